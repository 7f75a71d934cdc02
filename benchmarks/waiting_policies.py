#!/usr/bin/env python3
"""How should OpenMP's threads wait for work: what does it cost on a quiet machine, and what does it save on a busy one?

    python3 benchmarks/waiting_policies.py [--settings ...] [--busy 0 1 2] [--repetitions N] [--output FILE] [flags]

Idle threads of libgomp look for new work for a while (GOMP_SPINCOUNT times) before they sleep.  Looking is quick to
notice work, but takes a core from whoever else could use it: another process, or the thread whose work is waited for.
Each setting trains with tiny_llama_v1.py, which gets the other flags, in a fresh process beside so many processes that
keep a core busy each; all combinations in a new random order for each repetition.  A time is the median step of a run.

    slower       time of the median run / that of libgomp's default without busy processes, with its 95% interval
    fair share   the same if all threads and busy processes got equal parts of the cores
    waited       share of thread time that waited for a core, and of the longest waiting thread: smallest to largest
                 run

The file is written after each repetition: an interruption loses only the one that has begun.
"""

import os
import random
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from harness.run.startup import WAITING_POLICIES, begin_command, run_command

if __name__ == "__main__":
    begin_command()  # before PyTorch is imported

import numpy as np
import torch

from analysis.comparison.noise import ratio_of_medians
from benchmarks.common import benchmark_parser, environment_of, report, save, training_run
from harness.base.console import progress_bar
from harness.base.tables import Column, column, text_columns
from harness.machine.host_limits import usable_cores
from studies.engine.columns import interval_column

DEFAULT = "GOMP_SPINCOUNT=300000"  # what libgomp does if no variable is set
SETTINGS = (DEFAULT, "OMP_WAIT_POLICY=PASSIVE", *(f"GOMP_SPINCOUNT={n}" for n in (1000, 3000, 10000)))


def measured_run(setting: str, busy: int, flags: list[str]) -> dict:
    """A run in a fresh process beside busy ones: its median step and how far it was disturbed."""
    name, value = setting.split("=")
    environment = {key: one for key, one in os.environ.items() if key not in WAITING_POLICIES} | {name: value}
    summary = training_run(flags, busy, environment)
    found = summary["disturbance"]
    return {"step_ms": summary["performance"]["median_step_time_ms"]} | {
        name: found[name] for name in ("waited_share", "longest_wait_share", "lost_share", "steal_share", "sample_us")
    }


def row_of(setting: str, busy: int, runs: list[dict], quiet_ms: list[float]) -> dict:
    times = [run["step_ms"] for run in runs]
    slower = ratio_of_medians(np.array(times), np.array(quiet_ms))
    threads, cores = torch.get_num_threads(), len(usable_cores())
    return {
        "setting": setting,
        "busy_processes": busy,
        "median_ms": statistics.median(times),
        "smallest_ms": min(times),
        "largest_ms": max(times),
        "slower": slower["ratio"],
        "slower_95": slower["ratio_95"],
        "fair_share": max(1.0, (threads + busy) / cores),
        "waited": extent(runs, "waited_share"),
        "longest_wait": extent(runs, "longest_wait_share"),
        "runs": runs,
    }


def extent(runs: list[dict], name: str) -> list[float] | None:
    """Smallest and largest share of the runs."""
    known = [run[name] for run in runs if run[name] is not None]
    return [min(known), max(known)] if known else None


def extent_column(title: str, key: str) -> Column:
    return Column(title, lambda row: row[key] and "{:.1%} to {:.1%}".format(*row[key]))


def main() -> None:
    parser = benchmark_parser(__doc__, repetitions=7)
    text = "environment variables, NAME=VALUE; the first one is what the others are compared with (%(default)s)"
    parser.add_argument("--settings", nargs="+", default=SETTINGS, metavar="NAME=VALUE", help=text)
    parser.add_argument("--busy", nargs="+", type=int, default=[0, 1, 2], metavar="N", help="processes (0 1 2)")
    args, flags = parser.parse_known_args()
    for setting in args.settings:
        if setting.partition("=")[0] not in WAITING_POLICIES or "=" not in setting:
            parser.error(f"--settings {setting}: must be one of {', '.join(WAITING_POLICIES)}, with =VALUE")
    environment = environment_of(torch.device("cpu"))
    cases = [(setting, busy) for busy in sorted({0, *args.busy}) for setting in args.settings]
    runs: dict[tuple[str, int], list[dict]] = {case: [] for case in cases}
    shuffled = [case for _ in range(args.repetitions) for case in random.sample(cases, len(cases))]
    about = {"environment": environment, "flags": flags, "repetitions_planned": args.repetitions}
    rows: list[dict] = []
    for done, case in enumerate(progress_bar("runs", shuffled), 1):
        runs[case].append(measured_run(*case, flags))
        if done % len(cases) == 0:
            quiet_ms = [run["step_ms"] for run in runs[args.settings[0], 0]]
            rows = [row_of(*one, found, quiet_ms) for one, found in runs.items()]
            about["repetitions"] = done // len(cases)
            save(args.output, **about, rows=rows)
    columns = (
        *text_columns("setting"),
        column("busy", "busy_processes"),
        *(column(f"{name} (ms)", f"{name}_ms", ",.1f") for name in ("median", "smallest", "largest")),
        column("slower", "slower", ".2f"),
        interval_column("95% interval", "slower_95"),
        column("fair share", "fair_share", ".2f"),
        Column("of it", lambda row: row["slower"] / row["fair_share"], ".2f"),
        extent_column("waited", "waited"),
        extent_column("longest", "longest_wait"),
    )
    report(columns, rows, args.output, **about)


if __name__ == "__main__":
    run_command(main)
