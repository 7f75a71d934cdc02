#!/usr/bin/env python3
"""From which waiting on is a run slower?  What justifies the thresholds of harness/machine/disturbance.py on a machine.

    python3 benchmarks/disturbance.py [--busy 0 0.1 0.25 1 2] [--quotas N ...] [--slow-down X] [--repetitions N]
                                      [--output FILE] [flags]

Each run trains with tiny_llama_v1.py, which gets the other flags, in a fresh process: alone, beside processes that keep
a core busy (0.25: one, for a quarter of the time), or alone under a CPU quota of so many cores, where this user may set
one.  The combinations are in a new random order for each repetition.  The first table has all runs of a combination:

    slower       median step / median of the quiet runs' median steps: median over the runs
    waited       of thread time, waiting for a core; smallest to largest run, as everything below
    longest      of the steps, waiting of the thread that waited longest in each
    disturbed    of the steps, those that were marked
    named        runs that the summary calls disturbed

The second one compares each threshold with what quiet runs show and with what runs show whose cause it is about and
that were slower by X.  A threshold separates them if it is above all of the first and at or below all of the second.
What no run here showed is null.  With GOMP_SPINCOUNT=N before the command, the runs have that waiting policy.  The file
is written after each run: an interruption loses only the one that has begun.
"""

import contextlib
import math
import os
import random
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from harness.run.startup import begin_command, run_command

if __name__ == "__main__":
    begin_command()  # before PyTorch is imported

import torch

from benchmarks.common import benchmark_parser, environment_of, report, save, stored_table, training_run
from harness.base.console import progress_bar, say
from harness.base.tables import Column, column, text_columns, text_table
from harness.documents.run import UNREPORTED, Disturbance
from harness.documents.schema import explained, field
from harness.machine import disturbance
from harness.machine.host_limits import cgroup_folders, usable_cores

STEPS_OF_A_RUN = ("--num-steps", "12")
# Threshold, the figure of a run that it limits, what slowed the runs to compare with.  No other threshold can be tried
# without another machine: nothing here takes time or memory from a virtual machine.
THRESHOLDS = (
    ("LONGEST_WAIT", "longest_wait_share", "busy_processes"),
    ("STEPS", "steps_disturbed_share", "busy_processes"),
    ("THROTTLED", "throttled_share", "quota_cores"),
)
FROM_RUN = (
    "waited_share longest_wait_share pressure_share steal_share throttled_share switches_per_sec system_share "
    "minor_faults_per_sec major_faults_per_sec fault_slowdown"
).split()


class DisturbedRun(Disturbance):
    quota_cores: float | None = field("that was set", null="none was set")
    steps_disturbed_share: float | None = field("of the averaged steps", null=UNREPORTED)


@contextlib.contextmanager
def cpu_quota(cores: float | None, groups: list[Path]) -> Iterator[tuple[str, ...]]:
    """A command that runs another one under a CPU quota, in a new control group below the first of these; () without.

    Raises OSError where this user may not make one.
    """
    if cores is None:
        yield ()
        return
    if not groups:
        raise FileNotFoundError(2, "no control group of this process with a CPU controller", "/sys/fs/cgroup")
    folder = groups[0] / f"tiny_llama_quota_{os.getpid()}"
    folder.mkdir()
    try:
        if (groups[0] / "cpu.cfs_quota_us").exists():  # version 1
            (folder / "cpu.cfs_period_us").write_text("100000")
            (folder / "cpu.cfs_quota_us").write_text(str(int(100_000 * cores)))
        else:
            (folder / "cpu.max").write_text(f"{int(100_000 * cores)} 100000")
        yield ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(folder / "cgroup.procs"))
    finally:
        folder.rmdir()


def why_no_quota(groups: list[Path]) -> str | None:
    """Why this user cannot set a CPU quota; None if that works."""
    try:
        with cpu_quota(1.0, groups):
            return None
    except OSError as error:
        return f"{error.filename}: {error.strerror}"


def measured_run(busy: float, quota: float | None, flags: list[str], groups: list[Path]) -> dict:
    """One run: its median step, what it says about its disturbance, and its steps."""
    with cpu_quota(quota, groups) as prefix:
        summary = training_run(flags, busy, os.environ, prefix)
    found, steps = summary["disturbance"], summary["steps"]
    counted = [i for i, reason in enumerate(steps["exclusion_reason"]) if reason is None]
    marked = [steps["disturbed"][i] for i in counted if steps["disturbed"][i] is not None]
    values = {
        "busy_processes": busy,
        "quota_cores": quota,
        "step_ms": summary["performance"]["median_step_time_ms"],
        **{name: found[name] for name in FROM_RUN},
        "steps_disturbed_share": statistics.mean(marked) if marked else None,
        "disturbed": found["disturbed"],
        "reasons": found["reasons"],
        "steps_ms": [steps["time_ms"][i] for i in counted],
        "steps_longest_wait_share": [steps["longest_wait_share"][i] for i in counted],
    }
    reasons = {name: why for name, why in found.items() if name.endswith("_reason")}
    return explained(values | reasons, DisturbedRun)


def is_quiet(run: dict, cores: int = 0) -> bool:
    """Also under a quota that cannot be used up, where the system counts its periods.  cores: default: those here."""
    return not run["busy_processes"] and (run["quota_cores"] or math.inf) > (cores or len(usable_cores()))


def quiet_ms(runs: list[dict], cores: int = 0) -> float | None:
    return statistics.median(times) if (times := [run["step_ms"] for run in runs if is_quiet(run, cores)]) else None


def combinations(runs: list[dict], cores: int = 0) -> list[dict]:
    """The rows of the first table: busy processes, then quotas."""
    found: dict[tuple, list[dict]] = {}
    for run in runs:
        found.setdefault((run["quota_cores"] or 0, run["busy_processes"]), []).append(run)
    return [combination(found[case], quiet_ms(runs, cores)) for case in sorted(found)]


def stored_runs() -> str:
    """The first table of the stored results, in markdown."""
    return stored_table(
        "disturbance", COLUMNS, lambda one: combinations(one["rows"], one["environment"]["cpu"]["logical_cores"])
    )


def extent(runs: list[dict], name: str) -> list[float] | None:
    """Smallest and largest share of the runs."""
    known = [run[name] for run in runs if run.get(name) is not None]
    return [min(known), max(known)] if known else None


def extent_column(title: str, key: str) -> Column:
    return Column(title, lambda row: row[key] and "{:.1%} to {:.1%}".format(*row[key]))


def combination(runs: list[dict], quiet: float | None) -> dict:
    """A row of the first table, from all runs of a combination."""
    step_ms = statistics.median(run["step_ms"] for run in runs)
    row = {name: runs[0][name] for name in ("busy_processes", "quota_cores")}
    row |= {"runs": len(runs), "median_ms": step_ms}
    row |= {"slower": step_ms / quiet if quiet else None, "named": sum(bool(run["disturbed"]) for run in runs)}
    shares = [name for name in FROM_RUN if name.endswith("share")]
    return row | {name: extent(runs, name) for name in (*shares, "steps_disturbed_share")}


def threshold_rows(runs: list[dict], slow_down: float) -> list[dict]:
    """Each threshold beside what quiet runs and slowed runs show.  What no run showed is null, with the reason."""
    quiet, rows = quiet_ms(runs), []
    for name, figure, cause in THRESHOLDS:
        slowed = [run for run in runs if run[cause] and quiet and run["step_ms"] >= (1 + slow_down) * quiet]
        still, slow = extent([run for run in runs if is_quiet(run)], figure), extent(slowed, figure)
        threshold = getattr(disturbance, name)
        row = {"threshold": name, "value": threshold, "figure": figure, "slowed_runs": len(slowed)}
        row["separates"] = still[1] < threshold <= slow[0] if still and slow else None
        row |= {"quiet_largest": still and still[1], "slowed_smallest": slow and slow[0]}
        reasons = {
            "separates": "quiet and slowed runs must both show it",
            "quiet_largest": "no quiet run showed it",
            "slowed_smallest": f"no run was slower by {slow_down:.0%} that showed it",
        }
        rows.append(row | {f"{name}_reason": why for name, why in reasons.items() if row[name] is None})
    return rows


def main() -> None:
    parser = benchmark_parser(__doc__, repetitions=4)
    text = "processes beside a run; a fraction is one that is busy for that part of the time (0 0.1 0.25 1 2)"
    parser.add_argument("--busy", nargs="+", type=float, default=[0, 0.1, 0.25, 1, 2], metavar="N", help=text)
    quotas = [1.5 * len(usable_cores()), 0.8 * len(usable_cores())]
    text = "CPU quotas in cores, for runs without other processes (1.5 and 0.8 times the cores)"
    parser.add_argument("--quotas", nargs="*", type=float, default=quotas, metavar="CORES", help=text)
    text = "a run counts as slowed if it takes so much longer than quiet ones (%(default)s)"
    parser.add_argument("--slow-down", type=float, default=0.1, metavar="X", help=text)
    args, flags = parser.parse_known_args()
    flags = [*STEPS_OF_A_RUN, *flags]
    groups = cgroup_folders("cpu")
    no_quota = why_no_quota(groups) if args.quotas else "--quotas names none"
    about = {"environment": environment_of(torch.device("cpu")), "flags": flags, "slow_down": args.slow_down}
    if no_quota:
        say(f"No runs under a CPU quota: {no_quota}")
        about["quotas_reason"] = no_quota
    cases = [(busy, None) for busy in sorted({0.0, *args.busy})]
    cases += [] if no_quota else [(0.0, quota) for quota in args.quotas]
    shuffled = [case for _ in range(args.repetitions) for case in random.sample(cases, len(cases))]
    about |= {"quotas": None if no_quota else args.quotas, "runs_planned": len(shuffled)}
    runs: list[dict] = []
    for case in progress_bar("runs", shuffled):
        runs.append(measured_run(*case, flags, groups))
        about |= {"runs": len(runs), "thresholds": threshold_rows(runs, args.slow_down)}
        save(args.output, **about, rows=runs)
    say(*text_table(COLUMNS, combinations(runs)), "")
    report(THRESHOLD_COLUMNS, about["thresholds"], None)


COLUMNS = (
    column("busy", "busy_processes", "g"),
    column("quota", "quota_cores", ".3g"),
    column("runs", "runs"),
    column("median (ms)", "median_ms", ",.1f"),
    column("slower", "slower", ".2f"),
    extent_column("waited", "waited_share"),
    extent_column("longest", "longest_wait_share"),
    extent_column("disturbed", "steps_disturbed_share"),
    extent_column("pressure", "pressure_share"),
    extent_column("steal", "steal_share"),
    extent_column("throttled", "throttled_share"),
    column("named", "named"),
)
THRESHOLD_COLUMNS = (
    *text_columns("threshold"),
    column("value", "value", ".1%"),
    column("quiet, largest", "quiet_largest", ".1%"),
    column("slowed runs", "slowed_runs"),
    column("slowed, smallest", "slowed_smallest", ".1%"),
    Column("separates", lambda row: {True: "yes", False: "no", None: None}[row["separates"]], left=True),
)

if __name__ == "__main__":
    run_command(main)
