#!/usr/bin/env python3
"""What does a dry run predict for ranks that do not exist, in what time and memory, and is it right where they do?

    python3 benchmarks/many_ranks.py [--modes ddp zero1 fsdp] [--world-sizes 8 64 1024] [--real-size tiny]
                                     [--real-world-sizes 2 4] [--output FILE] [flags]

Predictions are those of `tiny_llama_v1.py --dry-run`, each in a fresh process, of the largest size on one kind of GPU
and one network; other flags, for other predictions, are passed on.  Then the smallest size trains on real ranks, one
thread each, with gloo: the bytes of memory and of collectives of a step, measured on rank 0, beside those predicted.
The file is written after each row: an interruption loses only the one that has begun.
"""

import json
import shlex
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from harness.run.startup import begin_command, run_command

if __name__ == "__main__":
    begin_command()  # before PyTorch is imported

import torch

from analysis.prediction.memory import predicted_memory
from benchmarks.common import benchmark_parser, environment_of, process_cost, report, save
from harness.base.console import progress_bar, say
from harness.base.errors import UserError
from harness.base.files import explain_nulls
from harness.base.tables import column, text_columns, text_table
from harness.base.units import MB
from studies.engine.command_line import workload_of
from studies.engine.ranks import on_ranks
from studies.scaling.rank_steps import measure_steps

SCRIPT = Path(__file__).resolve().parent.parent / "tiny_llama_v1.py"
MODES = ("ddp", "zero1", "fsdp")
PREDICTED = "--size very_large --activation-checkpointing --target-device MI300X --network 50".split()
FROM_PREDICTION = "collectives peak_memory_mb memory_by_category_mb fits margin_mb smallest_world_size".split()
FROM_COMMUNICATION = "sent_bytes network_ms efficiency_overlapped efficiency_not_overlapped".split()
WARMUP_STEPS, STEPS = 2, 2  # DistributedDataParallel rebuilds its buckets once, in the second step


def predicted_row(mode: str, world_size: int, flags: list[str]) -> dict:
    """A dry run: what it predicts, its seconds and its memory; or why it refuses to."""
    row = {"parallel": mode, "world_size": world_size, "status": "ok"}
    ranks = ["--dry-run", "--parallel", mode, "--world-size", str(world_size)]
    names = [*FROM_PREDICTION, *FROM_COMMUNICATION, "seconds", "cpu_s", "process_mb"]
    with tempfile.TemporaryDirectory() as folder:
        try:
            cost = process_cost([sys.executable, str(SCRIPT), *flags, *ranks, "--output-dir", folder])
        except UserError as error:
            if error.exit_code != 2:
                raise
            refused = row | {"status": "refused", "reason": str(error).partition("error: ")[2]} | dict.fromkeys(names)
            return explain_nulls(refused, "this number of ranks is refused")
        found = json.loads((Path(folder) / "prediction.json").read_text())
    row |= {name: found[name] for name in FROM_PREDICTION}
    row |= {name: found["communication"][name] for name in FROM_COMMUNICATION}
    reasons = {"smallest_world_size": found.get("smallest_world_size_reason", "")}
    return explain_nulls(row | dict(zip(names[-3:], cost, strict=True)), "no --network was given", **reasons)


def real_row(mode: str, world_size: int, size: str) -> dict:
    """Bytes of a step on real ranks beside those of the prediction; rank 0 is the one that is predicted."""
    workload = workload_of(size=size).with_settings(parallel=mode, world_size=world_size)
    expected = predicted_memory(workload, on_gpu=False).document()
    status, answer = on_ranks(world_size, "cpu", measure_steps, workload, STEPS, WARMUP_STEPS, None)
    if status != "ok":
        raise UserError(f"{mode} on {world_size} ranks: {answer}")
    found = answer[0]
    return {
        "parallel": mode,
        "world_size": world_size,
        "size": size,
        "predicted_memory_by_category": expected["peak"]["bytes_by_category"],
        "measured_memory_by_category": found["bytes_by_category"],
        "predicted_memory_bytes": expected["peak_bytes"],
        "measured_memory_bytes": found["peak_bytes"],
        "memory_difference_bytes": found["peak_bytes"] - expected["peak_bytes"],
        "predicted_collectives": expected["collectives"],
        "measured_collectives": found["collectives"],
        "collective_bytes": sum(row["bytes"] for row in found["collectives"]),
        "collectives_difference_bytes": sum(row["bytes"] for row in found["collectives"])
        - sum(row["bytes"] for row in expected["collectives"]),
    }


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="(all)")
    parser.add_argument("--world-sizes", nargs="+", type=int, default=[8, 64, 1024], metavar="W", help="(8 64 1024)")
    parser.add_argument("--real-size", default="tiny", metavar="SIZE", help="that trains on real ranks (%(default)s)")
    parser.add_argument("--real-world-sizes", nargs="*", type=int, default=[2, 4], metavar="W", help="(2 4)")
    args, flags = parser.parse_known_args()
    flags = [*PREDICTED, *flags]
    about = {"environment": environment_of(torch.device("cpu")), "flags": flags}
    rows: list[dict] = []
    real: list[dict] = []
    for mode, world_size in progress_bar("predictions", [(m, w) for m in args.modes for w in args.world_sizes]):
        rows.append(predicted_row(mode, world_size, flags))
        save(args.output, **about, rows=rows, real=real)
    for mode, world_size in progress_bar("real ranks", [(m, w) for m in args.modes for w in args.real_world_sizes]):
        real.append(real_row(mode, world_size, args.real_size))
        save(args.output, **about, rows=rows, real=real)
    say(f"Predicted with {shlex.join(flags)}:", *text_table(COLUMNS, rows), "", f"Measured, {args.real_size}:")
    report(REAL_COLUMNS, real, None)


RANKS = (*text_columns("parallel"), column("ranks", "world_size", ","))
COLUMNS = (
    *RANKS,
    *text_columns("status"),
    column("peak (MB)", "peak_memory_mb", ",.0f"),
    column("sent (MB)", "sent_bytes", ",.0f", MB),
    column("efficient at most", "efficiency_overlapped", ".0%"),
    column("nothing hidden", "efficiency_not_overlapped", ".0%"),
    column("dry run (s)", "seconds", ".0f"),
    column("its memory (MB)", "process_mb", ",.0f"),
)
REAL_COLUMNS = (
    *RANKS,
    column("peak (bytes)", "measured_memory_bytes", ","),
    column("- predicted", "memory_difference_bytes", "+,"),
    column("collectives (bytes)", "collective_bytes", ","),
    column("- predicted", "collectives_difference_bytes", "+,"),
)

if __name__ == "__main__":
    run_command(main)
