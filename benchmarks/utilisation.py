#!/usr/bin/env python3
"""How far can the MFU be believed?  The spread of the measured peak, and MFU by the number of steps.

    python3 benchmarks/utilisation.py [--rounds N] [--num-steps 10 100] [--output FILE] [flags of tiny_llama_v1.py]

peak        a measurement of this machine in a process of its own, with no earlier one to fall back on
mfu N       run_deepspeed_flops.py over N steps; its MFU is a share of the best of the peaks measured here

In turn, so that a slow spell of a shared machine meets all of them.  The spread of the peak is (largest - smallest) /
largest; a step's spread is the standard deviation of the run's own steps over their mean.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import tiny_llama_v1 as tiny_llama

PROJECT = Path(tiny_llama.__file__).parent
PEAK = """
import json, sys
sys.path.insert(0, sys.argv[1])
from analysis.hardware import bandwidth_ceilings, compute_ceilings
from tiny_llama_v1 import choose_device, describe_environment
device = describe_environment(choose_device("auto"))["device"]
found = compute_ceilings(device, sys.argv[2], "measured")[0], bandwidth_ceilings(device, "measured")[0]
print(json.dumps([one.rate for one in found]))
"""


def measured_peak(precision: str) -> tuple[float, float]:
    """FLOP/s and bytes/s."""
    with tempfile.TemporaryDirectory() as empty:
        environment = os.environ | {"XDG_CACHE_HOME": empty}
        command = [sys.executable, "-c", PEAK, str(PROJECT), precision]
        return tuple(json.loads(subprocess.check_output(command, env=environment, text=True)))


def measured_run(num_steps: int, flags: list[str]) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(PROJECT / "run_deepspeed_flops.py"), *flags]
        command += ["--num-steps", str(num_steps), "--output-dir", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        profile = json.loads((Path(folder) / "flops_profile.json").read_text())
        summary = json.loads((Path(folder) / "performance_summary.json").read_text())["performance"]
    return {
        "flops_per_sec": profile["performance_metrics"]["flops_per_sec"],
        "step_spread": summary["std_step_time_ms"] / summary["avg_step_time_ms"],
        "steps_averaged": summary["steps_averaged"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-steps", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--output", type=Path, help="JSON file for the results and every single figure")
    args, flags = parser.parse_known_args()
    precision = tiny_llama.resolve(tiny_llama.build_parser().parse_args(flags))[1].precision
    peaks: list[tuple[float, float]] = []
    runs: dict[int, list[dict]] = {n: [] for n in args.num_steps}
    for _ in tqdm(range(args.rounds), leave=False, disable=None):
        peaks.append(measured_peak(precision))
        for n in args.num_steps:
            runs[n].append(measured_run(n, flags))
    print(f"{precision:<12}{'median':>12}{'smallest':>12}{'largest':>12}{'spread':>9}")
    rows = {}
    for name, unit, values in (
        ("products", "GFLOP/s", [peak[0] / 1e9 for peak in peaks]),
        ("copies", "GB/s", [peak[1] / 1e9 for peak in peaks]),
    ):
        spread = (max(values) - min(values)) / max(values)
        rows[name] = {"unit": unit, "values": values, "spread": spread}
        cells = "".join(f"{value:>12,.1f}" for value in (statistics.median(values), min(values), max(values)))
        print(f"{name:<12}{cells}{spread:>9.1%}  {unit}")
    best = max(peak[0] for peak in peaks)
    print(f"{'':<12}{'MFU':>12}{'smallest':>12}{'largest':>12}{'spread of the steps of a run':>32}")
    for n, found in runs.items():
        mfu = [run["flops_per_sec"] / best for run in found]
        spread = statistics.median(run["step_spread"] for run in found)
        rows[f"mfu over {n} steps"] = {"values": mfu, "step_spread": spread, "runs": found}
        cells = "".join(f"{value:>12.1%}" for value in (statistics.median(mfu), min(mfu), max(mfu)))
        print(f"{f'{n} steps':<12}{cells}{spread:>32.1%}")
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        environment = tiny_llama.describe_environment(tiny_llama.choose_device("auto"))
        environment["command_line"] = shlex.join(["python", *sys.argv])
        tiny_llama.write_json(args.output, {"environment": environment, "rows": rows})
        print(f"Results: {args.output}")


if __name__ == "__main__":
    sys.exit(tiny_llama.exit_code_of(main))
