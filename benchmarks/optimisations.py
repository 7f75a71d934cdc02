#!/usr/bin/env python3
"""What does each optimisation bring to a training step, alone and together?

    python3 benchmarks/optimisations.py [--size small] [--variant=FLAGS] [--rounds N] [--output FILE]

Each set of flags of tiny_llama_v1.py is run against the baseline, interleaved in this one process (A B, B A, ...), with
the same weights, data and seed.  Compilation happens before the first round and stands apart.  The figure is the ratio
of the medians, below 1 where the optimisation is faster, with its 95% bootstrap interval over rounds; losses are
compared step by step, because a step that computes something else is no faster step.
"""

import argparse
import sys
from pathlib import Path

import torch
from step_time import compare, seconds

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import tiny_llama_v1 as tiny_llama
from studies.timing import Step

VARIANTS = (
    "--attention sdpa",
    "--optimizer-impl foreach",
    "--optimizer-impl fused",
    "--compile",
    "--precision bf16",
    "--attention sdpa --compile --optimizer-impl fused",
    "--attention sdpa --compile --optimizer-impl fused --precision bf16",
)


def compiled(step: Step, device: torch.device) -> float:
    """Compile it, and the seconds that this takes."""
    step.model.compile(dynamic=False)
    first = seconds(step, device)
    return max(0.0, first - seconds(step, device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(tiny_llama.SIZES), default="small")
    text = "a set of flags, given as --variant='--compile'; repeat it for more (every one above)"
    parser.add_argument("--variant", action="append", metavar="FLAGS", help=text)
    parser.add_argument("--batch-size", type=int, help="samples (that of the size)")
    parser.add_argument("--rounds", type=int, default=10, help="of each comparison (10)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--output", type=Path, help="JSON file for the results and every single time")
    args = parser.parse_args()
    device = tiny_llama.choose_device(args.device)
    environment = tiny_llama.describe_environment(device)
    name = environment["device"]["name"]
    common = ["--size", args.size, *(["--batch-size", str(args.batch_size)] if args.batch_size else [])]
    batch = f", batch {args.batch_size}" if args.batch_size else ""
    print(f"{name}, torch {torch.__version__}, {torch.get_num_threads()} threads, size {args.size}{batch}")
    columns = f"{'flags ms':>10}{'baseline ms':>13}{'ratio':>8}{'95% interval':>18}{'of minima':>11}{'compile s':>11}"
    print(f"{'flags':<70}{columns}{'loss off':>10}{'rounds':>8}")
    rows = []
    for variant in args.variant or VARIANTS:
        step, baseline = (Step([*common, *flags], device) for flags in (variant.split(), []))
        compile_s = compiled(step, device) if "--compile" in variant.split() else None
        row = {"flags": variant, **compare(step, baseline, args.rounds, device), "compile_s": compile_s}
        pairs = zip(step.losses, baseline.losses, strict=False)
        row["largest_loss_difference"] = max(abs(a - b).item() for a, b in pairs)
        rows.append(row)
        interval = f"{row['ratio_95_low']:.3f} to {row['ratio_95_high']:.3f}"
        compile_s = "-" if row["compile_s"] is None else f"{row['compile_s']:.1f}"
        print(
            f"{variant:<70}{row['a_median_ms']:>10.2f}{row['b_median_ms']:>13.2f}{row['ratio']:>8.3f}{interval:>18}"
            f"{row['ratio_of_minima']:>11.3f}{compile_s:>11}{row['largest_loss_difference']:>10.1e}{args.rounds:>8}",
            flush=True,
        )
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        about = {"environment": environment, "size": args.size, "batch_size": args.batch_size}
        tiny_llama.write_json(args.output, about | {"rows": rows})
        print(f"Results: {args.output}")


if __name__ == "__main__":
    sys.exit(tiny_llama.exit_code_of(main))
