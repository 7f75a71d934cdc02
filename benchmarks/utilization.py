#!/usr/bin/env python3
"""How reproducible is MFU?  The spread of the measured peak, and of MFU by the number of steps.

    python3 benchmarks/utilization.py [--repetitions N] [--num-steps 10 100] [--output FILE] [flags of tiny_llama_v1.py]

peak        the peak rates of this machine, measured in a fresh process without cached results
mfu N       run_deepspeed_flops.py over N steps; its MFU refers to the best of the peaks measured here

They alternate, so that a slow period of a shared machine affects all of them.  The spread of a figure is (largest -
smallest) / largest; that of a run's steps is their standard deviation / mean.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from harness.run.startup import begin_command, run_command

if __name__ == "__main__":
    begin_command()  # before PyTorch is imported

from analysis.hardware.ceilings import bandwidth_ceilings, compute_ceilings
from benchmarks.common import benchmark_parser, environment_of, report
from harness.base.console import progress_bar
from harness.base.documents import read_document
from harness.base.errors import UserError
from harness.base.paths import PROJECT
from harness.base.tables import column, text_columns
from harness.machine.devices import choose_device
from harness.machine.environment import describe_environment
from studies.engine.command_line import workload_of
from studies.engine.isolation import in_fresh_process


def peak_rates(precision: str, empty: str) -> tuple[float, float]:
    """FLOP/s and bytes/s, measured in this process; `empty` is a folder without cached results."""
    os.environ["XDG_CACHE_HOME"] = empty
    device = describe_environment(choose_device("auto"))["device"]
    found = compute_ceilings(device, precision, "measured"), bandwidth_ceilings(device, "measured")
    return found[0][0].rate, found[1][0].rate


def measured_peak(precision: str) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as empty:
        status, answer = in_fresh_process(peak_rates, precision, empty)
    if status != "ok":
        raise UserError(f"the peak cannot be measured: {answer}")
    return answer


def measured_run(num_steps: int, flags: list[str]) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(PROJECT / "run_deepspeed_flops.py"), *flags]
        command += ["--num-steps", str(num_steps), "--output-dir", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        profile = read_document(Path(folder) / "flops_profile.json")
        summary = read_document(Path(folder) / "performance_summary.json")["performance"]
    return {
        "flops_per_sec": profile["performance_metrics"]["flops_per_sec"],
        "step_spread": summary["std_step_time_ms"] / summary["avg_step_time_ms"],
        "steps_averaged": summary["steps_averaged"],
    }


def row_of(figure: str, unit: str, values: list[float]) -> dict:
    row = {"figure": figure, "unit": unit, "median": statistics.median(values), "smallest": min(values)}
    return row | {"largest": max(values), "spread": (max(values) - min(values)) / max(values), "values": values}


def main() -> None:
    parser = benchmark_parser(__doc__, repetitions=3)
    parser.add_argument("--num-steps", type=int, nargs="+", default=[10, 100])
    args, flags = parser.parse_known_args()
    precision = workload_of(flags).precision
    environment = environment_of(choose_device("auto"))
    peaks: list[tuple[float, float]] = []
    runs: dict[int, list[dict]] = {n: [] for n in args.num_steps}
    for _ in progress_bar("repetitions", range(args.repetitions)):
        peaks.append(measured_peak(precision))
        for n in args.num_steps:
            runs[n].append(measured_run(n, flags))
    rows = [row_of(f"matmuls in {precision}", "GFLOP/s", [flops / 1e9 for flops, _ in peaks])]
    rows.append(row_of("copies", "GB/s", [rate / 1e9 for _, rate in peaks]))
    best = max(flops for flops, _ in peaks)
    for n, found in runs.items():
        spread = {"step_spread": statistics.median(run["step_spread"] for run in found), "runs": found}
        rows.append(row_of(f"MFU over {n} steps", "%", [100 * run["flops_per_sec"] / best for run in found]) | spread)
    columns = (
        *text_columns("figure", "unit"),
        *(column(name, name, ",.1f") for name in ("median", "smallest", "largest")),
        column("spread", "spread", ".1%"),
        column("spread of a run's steps", "step_spread", ".1%"),
    )
    report(columns, rows, args.output, environment=environment)


if __name__ == "__main__":
    run_command(main)
