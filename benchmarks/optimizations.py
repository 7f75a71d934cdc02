#!/usr/bin/env python3
"""How much does each optimization gain per training step, alone and combined?

    python3 benchmarks/optimizations.py [--size small] [--variant=FLAGS] [--repetitions N] [--output FILE]

Each set of flags of tiny_llama_v1.py is compared with the baseline, alternating in one process (A B, B A, ...), with
the same weights, data and seed.  Compilation happens before the first repetition and is reported separately.  The
result is the ratio of the medians, below 1 if the optimization is faster, with its 95% bootstrap interval over
repetitions.  The losses are compared step by step, because a step that computes something else is not a faster step.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from harness.startup import begin_command, run_command

if __name__ == "__main__":
    begin_command()  # before PyTorch is imported

import torch

from benchmarks.common import benchmark_parser, compare, comparison_columns, environment_of, report
from harness.devices import choose_device
from harness.tables import column
from studies.sweep import text_columns, workload_of
from studies.timing import Step, time_synced
from tiny_llama_v1 import SIZES

VARIANTS = (
    "--attention sdpa",
    "--fused-projections",
    "--fused-norm",
    "--fused-rope",
    "--fused-loss",
    "--optimizer-impl foreach",
    "--optimizer-impl fused",
    "--compile",
    "--precision bf16",
    "--attention sdpa --fused-projections --fused-rope --optimizer-impl fused",
    "--attention sdpa --compile --optimizer-impl fused",
    "--attention sdpa --fused-projections --compile --optimizer-impl fused",
    "--attention sdpa --compile --optimizer-impl fused --precision bf16",
)


def compile_step(step: Step, device: torch.device) -> float:
    """Compile the step's model; returns the compile time in seconds."""
    step.state.model.compile(dynamic=False)
    first_ms = time_synced(step, device)
    return max(0.0, first_ms - time_synced(step, device)) / 1e3


def compare_variant(flags: list[str], settings: dict, repetitions: int, device: torch.device) -> dict:
    """A step with the flags, compared with one without."""
    step, baseline = (Step(workload_of(more, **settings), device) for more in (flags, []))
    compile_s = compile_step(step, device) if step.workload.compiled else None
    row = compare(step, baseline, repetitions, device) | {"compile_s": compile_s}
    pairs = zip(step.losses, baseline.losses, strict=False)
    return row | {"largest_loss_difference": max(abs(a - b).item() for a, b in pairs)}


def main() -> None:
    parser = benchmark_parser(__doc__, repetitions=10)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--size", choices=list(SIZES), default="small")
    text = "a set of flags, such as --variant='--compile'; may be repeated (thirteen sets)"
    parser.add_argument("--variant", action="append", metavar="FLAGS", help=text)
    parser.add_argument("--batch-size", type=int, help="samples per step (that of the size)")
    args = parser.parse_args()
    device = choose_device(args.device)
    environment = environment_of(device)
    settings = {"size": args.size, "batch_size": args.batch_size}
    rows = []
    for variant in args.variant or VARIANTS:
        rows.append({"flags": variant} | compare_variant(variant.split(), settings, args.repetitions, device))
    columns = (
        *text_columns("flags"),
        *comparison_columns("with flags", "baseline"),
        column("compile (s)", "compile_s", ".1f"),
        column("loss difference", "largest_loss_difference", ".1e"),
    )
    report(columns, rows, args.output, environment=environment, **settings)


if __name__ == "__main__":
    run_command(main)
