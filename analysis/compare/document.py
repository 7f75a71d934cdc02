"""How do runs differ?  Their settings, times, memory and, where they were profiled, their
components and operators.

comparison.json.  The first run is the baseline.  A ratio of step times has a 95% interval by the
steps that both averaged and the spread between processes; if it contains 1, the difference is
within noise.  A repeat of the baseline is no finding of its own: it says how large the noise is.
"""

from pathlib import Path

import numpy as np

from analysis.compare.noise import BASELINE, NOISE, REPEAT, judged, ratio_of_medians, within_spread
from analysis.compare.parts import PART_KINDS, compare_profiles, profiler_of
from analysis.compare.runs import (
    IGNORED,
    ComparedRun,
    different_settings,
    read_run,
    settings_of_run,
)
from analysis.compare.same_training import NOT_THE_SAME, training_check
from harness.base.errors import UserError
from harness.base.tables import grouped
from harness.documents.comparisons import NOT_IN_TRACE, Comparison
from harness.instruments.phases import PHASES, power_law_exponent, summary_stats
from harness.schema import because, explained, unknown

# From so many times the FLOPs on, runs are of different sizes; kernels of the same step may differ
# by less
SCALES = 1.1


def compare(folders: list[Path]) -> dict:
    """comparison.json; the first is the baseline, the others are sorted by the time at which they
    began, then traces, which do not tell it.  Raises UserError."""
    baseline, *others = read_runs(folders)
    runs = sorted((run for run in others if not run.of_trace), key=ComparedRun.began)
    traces = [run for run in others if run.of_trace]
    return compare_read([baseline, *runs, *traces])


def read_runs(folders: list[Path]) -> list[ComparedRun]:
    """Each run by the name of its folder, or by its path where several have that name.
    Raises UserError."""
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UserError("a folder is named twice; give each once", exit_code=2)
    names = [folder.resolve().name for folder in folders]
    runs = []
    for folder, name in zip(folders, names, strict=True):
        runs.append(read_run(folder, str(folder) if names.count(name) > 1 else name))
    return runs


def compare_read(runs: list[ComparedRun]) -> dict:
    """comparison.json of runs that were read already, the baseline first."""
    repeats = repeated(runs)
    rows = [run_row(run, runs[0], repeats) for run in runs]
    document = {
        "baseline": runs[0].name,
        "runs": rows,
        "repeats": repeats,
        "differences": different_settings([settings_of_run(run) for run in runs]),
        "scaling": scaling(rows),
        "not_read": [line for run in runs for line in run.left_out],
        **profile_changes(runs, repeats["spread"] if repeats else 0.0),
    }
    return explained(document, Comparison)


def profile_changes(runs: list[ComparedRun], spread: float) -> dict:
    """`components`, `classes` and `operators`: rows of each run whose profile can be compared with
    the baseline's; and why others cannot, `profiles_reason` and `components_reason`."""
    baseline, changes = runs[0], {kind: [] for kind in PART_KINDS}
    untraced = [run.name for run in runs if not run.analysis]
    reasons = [f"there is no trace of {', '.join(untraced)}"] if untraced else []
    for run in runs[1:] if baseline.analysis else ():
        if not run.analysis:
            continue
        if run.clock != baseline.clock:
            reasons.append(
                f"{baseline.name} and {run.name} are timed on different clocks, GPU and host"
            )
            continue
        own = compare_profiles(run.name, baseline.analysis, run.analysis, spread)
        for kind in PART_KINDS:
            changes[kind] += own[kind]
        if reason := own.get("components_reason"):
            changes["components_reason"] = "; ".join(
                filter(None, (changes.get("components_reason"), reason))
            )
    return changes | ({"profiles_reason": "; ".join(reasons)} if reasons else {})


def run_row(run: ComparedRun, baseline: ComparedRun, repeats: dict | None) -> dict:
    """A row of `runs`.  repeats: of repeated()."""
    summary, stats = run.summary, summary_stats(run.step_ms.tolist())
    memory = run.memory
    losses_differ = loss_difference(run, baseline)
    training = training_check(summary, baseline.summary, losses_differ)
    times = ratio_of_medians(run.step_ms, baseline.step_ms)
    performance, model = summary["performance"], summary["config"]["model"]
    row = {
        "name": run.name,
        "folder": str(run.folder),
        "started": summary["environment"]["timestamp"],
        "status": summary["status"],
        "size": model.get("size"),
    }
    row |= {"device": summary["environment"]["device"]["name"], "parameters": model["parameters"]}
    row |= {
        "steps_counted": stats["count"],
        **{f"{name}_ms": stats[name] for name in ("mean", "median", "std", "p95")},
        "phases_ms": {phase: performance[f"avg_{phase}_time_ms"] for phase in PHASES},
        **{name: performance[name] for name in ("samples_per_sec", "tokens_per_sec")},
        **{
            "step_flops": performance["model_flops_per_step"],
            "achieved_tflops": performance["achieved_tflops"],
        },
        "mfu_percent": run.mfu_percent,
        "peak_mb": memory["peak_mb"],
        "memory_source": memory["source"],
    }
    row |= peak_ratio(memory, baseline.memory)
    row |= {
        "final_loss": summary["loss"]["final"],
        "largest_loss_difference": losses_differ,
    } | training
    traced = run.analysis
    row |= {
        "verdict": traced and traced["verdict"]["bound"],
        "profiler": traced and profiler_of(traced),
    }
    row |= {
        "profiler_overhead": traced and traced["integrity"]["profiler_overhead"]["ratio"]
    } | run.disturbance
    row |= times | {
        "difference": difference(run, baseline, times, training["not_the_same"], repeats)
    }
    if run.of_trace:
        of_run = [
            name
            for name, value in row.items()
            if value is None and name not in ("std_ms", "ratio_95")
        ]
        row = (
            because(NOT_IN_TRACE, *of_run)
            | row
            | {"phases_ms": row["phases_ms"] | because(NOT_IN_TRACE, *PHASES)}
        )
    return row


def difference(
    run: ComparedRun, base: ComparedRun, times: dict, not_the_same: str | None, repeats: dict | None
) -> str:
    """How the step time differs from the baseline's, in words.  times: from ratio_of_medians()."""
    if not_the_same:
        return f"{NOT_THE_SAME}: {not_the_same}"
    if run is base or times["ratio"] is None:
        return BASELINE if run is base else times["difference"]
    if repeats and any({run.name, base.name} <= {*group} for group in repeats["groups"]):
        return REPEAT
    if repeats and within_spread(times["ratio"], repeats["spread"]):
        return NOISE
    return judged(times["ratio"], times["ratio_95"], run.disturbance, base.disturbance)


def peak_ratio(memory: dict, baseline: dict) -> dict:
    """Ratio of peaks if both are of the same quantity: tensors and a resident set
    size are not compared."""
    if not memory["peak_mb"] or not baseline["peak_mb"]:
        return {"peak_ratio": None}
    if memory["source"] != baseline["source"]:
        return unknown("another quantity than the baseline's", "peak_ratio")
    return {"peak_ratio": memory["peak_mb"] / baseline["peak_mb"]}


def loss_difference(run: ComparedRun, baseline: ComparedRun) -> float | None:
    """The largest loss difference over the steps that both completed: does the run still compute
    the same?"""
    pairs = zip(run.summary["steps"]["loss"], baseline.summary["steps"]["loss"], strict=False)
    return max((abs(a - b) for a, b in pairs if a is not None and b is not None), default=None)


def repeated(runs: list[ComparedRun]) -> dict | None:
    """Runs of the same code with the same settings on the same device, and the spread of their
    medians: what a restart alone changes.

    Their profiling may differ: steps with an instrument are not averaged.
    """

    def what_ran(run: ComparedRun) -> str:
        config, environment = run.summary["config"], run.summary["environment"]
        settings = {
            name: value for name, value in config["training"].items() if name not in IGNORED
        }
        about = [environment[name] for name in ("device", "packages", "host", "commit")]
        return repr((settings, config["model"], about, environment.get("changes_sha256")))

    known = (
        run for run in runs if len(run.step_ms) and not run.of_trace
    )  # of a trace, settings are not known
    groups = [group for group in grouped(known, what_ran).values() if len(group) > 1]
    if not groups:
        return None
    medians = [[float(np.median(run.step_ms)) for run in group] for group in groups]
    spread = max(max(group) / min(group) - 1 for group in medians)
    return {"groups": [[run.name for run in group] for group in groups], "spread": spread}


def scaling(rows: list[dict]) -> dict | None:
    """How step time grows with the FLOPs per step, if runs differ in them: t ~ FLOPs^exponent."""
    points = sorted(
        (row["step_flops"], row["median_ms"])
        for row in rows
        if row["median_ms"] and row["step_flops"]
    )
    if not points or max(points)[0] < SCALES * min(points)[0]:
        return None
    meaning = "step time grows as FLOPs to this power; below 1, larger steps use the device better"
    return {"exponent": power_law_exponent(points), "points": len(points), "meaning": meaning}
