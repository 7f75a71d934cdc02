"""What is known of a run that can be compared?  Its folder, or a trace of any program."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import numpy as np

from analysis.compare.noise import STEPS_OF_RUN
from analysis.hardware.mfu import mfu_percent
from analysis.trace.readers.formats import find_traces, may_be_trace
from harness.base.documents import read_document, read_fitting, read_or_leave_out
from harness.base.errors import UserError
from harness.base.text import count_of
from harness.documents.comparisons import NOT_IN_TRACE
from harness.documents.flops import FlopsProfile
from harness.documents.trace import OperatorAnalysis
from harness.instruments.phases import PHASES
from harness.machine.disturbance import disturbance_text
from harness.run.run_summary import PerformanceSummary

SUMMARY = "performance_summary.json"
# The fields that a comparison reads of each document of a run.
OF_SUMMARY = ["status", "config", "environment", "steps", "loss.first", "loss.final"]
OF_SUMMARY += [
    f"disturbance?.{name}" for name in ("disturbed", "waited_share", "lost_share", "reasons", "gpu")
]
OF_SUMMARY += ["audit?.ok", "audit?.findings"]
OF_SUMMARY += ["training.world_size", "training.completed_steps", "memory.peak_mb", "memory.source"]
OF_SUMMARY += [f"performance.avg_{phase}_time_ms" for phase in PHASES]
OF_SUMMARY += [f"performance.{name}" for name in ("samples_per_sec", "tokens_per_sec")]
OF_SUMMARY += [f"performance.{name}" for name in ("model_flops_per_step", "achieved_tflops")]
OF_ANALYSIS = (
    "trace",
    "steps",
    "attribution",
    "components",
    "classes",
    "operators",
    "memory",
    "verdict.bound",
)
OF_ANALYSIS += ("integrity.world_size", "integrity.profiler_overhead.ratio")
OF_FLOPS = ("efficiency_metrics.mfu_percent",)
# Settings that do not affect the results; DeepSpeed itself sets the variable.
IGNORED = {"output_dir", "profile_dir", "log_interval", "$PYTORCH_NVML_BASED_CUDA_CHECK"}


@dataclass
class ComparedRun:
    """One run folder, or a trace of another program."""

    folder: Path  # or the trace
    name: str
    summary: dict  # of a trace, what it tells
    analysis: dict | None
    flops: dict | None
    left_out: list[str] = field(default_factory=list)  # its documents that cannot be read, and why

    @property
    def of_trace(self) -> bool:
        """Whether a trace is all that is known of it."""
        return "trace" in self.summary["config"]["training"]

    @property
    def environment(self) -> dict:
        return self.summary["environment"]

    def began(self) -> datetime:
        """When it began, with a time zone.  Raises UserError if its summary does not tell."""
        text = self.environment["timestamp"]
        try:
            return datetime.fromisoformat(text).astimezone()
        except ValueError as error:
            raise UserError(
                f"{self.folder / SUMMARY}: environment.timestamp: {text} is no time"
            ) from error

    @property
    def step_ms(self) -> np.ndarray:
        """Times of the steps that averages include; if there are none, of all but the first."""
        steps = self.summary["steps"]
        times = np.array(steps["time_ms"], dtype=float)
        free = np.array([reason is None for reason in steps["exclusion_reason"]], dtype=bool)
        return times[free] if free.any() else times[1:] if len(times) > 1 else times

    @property
    def disturbance(self) -> dict:
        """What disturbed its averaged steps; `disturbed` is None if the run did not measure it.

        lost_share: the largest share of its step time that the disturbance can account for.
        """
        found = self.summary.get("disturbance")
        if not found:
            return {
                "disturbed": None,
                "waited_share": None,
                "lost_share": None,
                "disturbance": "not measured",
            }
        values = {name: found[name] for name in ("disturbed", "waited_share", "lost_share")}
        return values | {"disturbance": disturbance_text(found)}

    @property
    def mfu_percent(self) -> float | None:
        """As the run printed it; a run of another machine may have its peak in its
        flops_profile.json alone."""
        found = mfu_percent(self.summary)
        return (
            self.flops["efficiency_metrics"]["mfu_percent"]
            if found is None and self.flops
            else found
        )

    @property
    def memory(self) -> dict:
        """Its peak with its source, as its summary tells them;
        of a run that does not, as its trace does."""
        if self.summary["memory"]["peak_mb"] is None and self.analysis:
            return memory_of_trace(self.analysis)
        return self.summary["memory"]

    @property
    def clock(self) -> str:
        """The clock of its profile: GPU or host."""
        return self.analysis["attribution"]["clock"]


def read_run(path: Path, name: str) -> ComparedRun:
    """The run in a folder, the trace analyzed in it or else its first trace, which is that of rank
    0, or the trace that is this file.  Raises UserError, naming it."""
    if path.is_file():
        return run_of_trace(path, path, name)
    if not path.is_dir():
        raise UserError(f"{path}: no such folder")
    left_out: list[str] = []
    summary, flops = summary_and_flops(path, left_out)
    analysis = None
    for folder in (path, path / "pytorch_profiles"):
        file = folder / "operator_analysis.json"
        analysis = analysis or read_or_leave_out(file, OperatorAnalysis, left_out, OF_ANALYSIS)
    if summary is None and analysis:
        summary = summary_of_trace(analysis)
    if summary is None and any(may_be_trace(file.name) for file in path.iterdir()):
        return run_of_trace(find_traces(path)[0], path, name, left_out)
    if summary is None:
        raise UserError(
            "; ".join(left_out) or f"{path}: neither {SUMMARY} of a run nor a trace in it"
        )
    return ComparedRun(path, name, summary, analysis, flops, left_out)


def summary_and_flops(folder: Path, left_out: list[str]) -> tuple[dict | None, dict | None]:
    """performance_summary.json and flops_profile.json of a folder; left_out takes why one of them
    cannot be read."""
    summary = read_or_leave_out(folder / SUMMARY, PerformanceSummary, left_out, OF_SUMMARY)
    return summary, read_or_leave_out(
        folder / "flops_profile.json", FlopsProfile, left_out, OF_FLOPS
    )


def run_of_trace(trace: Path, path: Path, name: str, left_out: Sequence[str] = ()) -> ComparedRun:
    from analysis.diagnosis.traces import (
        analyze_all,
    )  # pandas is slow to load, and runs are compared without it

    analyses, refused = analyze_all([trace])
    if refused:
        raise refused[0]
    return ComparedRun(
        path, name, summary_of_trace(analyses[0][1]), analyses[0][1], None, [*left_out]
    )


def summary_of_trace(analysis: dict) -> dict:
    """What the summary of a run would tell, as far as a trace does: times of its profiled steps."""
    times = [row["duration_ms"] for row in analysis["steps"]["rows"]]
    names = ("samples_per_sec", "tokens_per_sec", "model_flops_per_step", "achieved_tflops")
    return {
        "status": "completed",
        "config": {
            "training": {"trace": analysis["trace"]},
            "profiling": {},
            "model": {"parameters": None},
        },
        "environment": {"device": {"name": None}, "packages": {}, "variables": {}}
        | dict.fromkeys(("host", "python", "commit", "uncommitted_changes", "timestamp")),
        "training": {"world_size": analysis["integrity"]["world_size"]},
        "performance": dict.fromkeys((*names, *(f"avg_{phase}_time_ms" for phase in PHASES))),
        "memory": memory_of_trace(analysis),
        "loss": {"final": None},
        "steps": {"time_ms": times, "exclusion_reason": [None] * len(times), "loss": []},
    }


def memory_of_trace(analysis: dict) -> dict:
    """`memory` of a summary, of the recorded steps."""
    peak_mb = analysis["memory"]["peak_mb"]
    if peak_mb is None:
        return {"peak_mb": None, "source": NOT_IN_TRACE}
    return {
        "peak_mb": peak_mb,
        "source": f"{analysis['memory'].get('of', 'allocated')}, by its trace",
    }


def runs_below(folder: Path) -> tuple[list[ComparedRun], list[str]]:
    """The runs in a folder and below it, by the time at which they began, without what was analyzed
    of them; and what else looks like a run there, and what it is.
    Raises UserError without such a folder."""
    if not folder.is_dir():
        raise UserError(
            f"{folder}: "
            + ("a file; give the folder of a run" if folder.exists() else "no such folder")
        )
    found, others = [], []
    files = {file.parent: file for name in (SUMMARY, "config.json") for file in folder.rglob(name)}
    for place, file in sorted(files.items()):
        if any(part.startswith(".") for part in place.relative_to(folder).parts):
            continue
        try:
            summary = read_fitting(place / SUMMARY, PerformanceSummary, OF_SUMMARY)
            if summary:
                flops = read_or_leave_out(
                    place / "flops_profile.json", FlopsProfile, others, OF_FLOPS
                )
                name = folder.resolve().name if place == folder else os.path.relpath(place, folder)
                run = ComparedRun(place, name, summary, None, flops)
                run.began()
                found.append(run)
            elif read_document(file):
                others.append(f"{place}: has no {SUMMARY} of a run: it was killed, or still runs")
            else:
                others.append(
                    f"Not a run of this workshop: {place} has a {file.name} of another program"
                )
        except UserError as error:
            others.append(str(error))
    return sorted(found, key=ComparedRun.began), others


def repeated_runs(folder: Path) -> tuple[list[ComparedRun], list[str]]:
    """The run in a folder, or the runs below it, which repeat each other, by the time at which they
    began; and what was left out, and why.  Raises UserError where nothing is left, or runs differ
    in their settings."""
    found, left_out = runs_below(folder)
    found = [
        run for run in found if run.folder == folder
    ] or found  # those below a run are earlier ones
    runs = [
        run
        for run in found
        if run.summary["status"] == "completed" and len(run.step_ms) >= STEPS_OF_RUN
    ]
    few = f"averaged of {STEPS_OF_RUN} needed"
    rest = [run for run in found if run not in runs]
    left_out += [
        f"{run.name}: {run.summary['status']}, {count_of(len(run.step_ms), 'step')} {few}"
        for run in rest
    ]
    if not runs:
        raise UserError("; ".join([f"{folder}: no run that can be judged", *left_out]))
    if different := different_settings([run.summary["config"]["training"] for run in runs]):
        raise UserError(f"{folder}: its runs do not repeat each other: {settings_text(different)}")
    return runs, left_out


def settings_text(different: list[dict]) -> str:
    """'batch_size 8 | 4, seed 1 | 2': rows of different_settings()."""
    return ", ".join(
        f"{row['name']} {' | '.join(dict.fromkeys(map(str, row['values'])))}" for row in different
    )


# ---- Settings ----


def different_settings(tables: Sequence[dict]) -> list[dict]:
    """Each name whose values differ between the tables,
    with its values; None where a table lacks it."""
    every = dict.fromkeys(name for table in tables for name in table)
    names = [name for name in every if name not in IGNORED and not name.endswith("_reason")]
    rows = [{"name": name, "values": [table.get(name) for table in tables]} for name in names]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"][1:])]


def settings_of_run(run: ComparedRun) -> dict:
    """Settings and environment of a run, by name."""
    config, environment = run.summary["config"], run.summary["environment"]
    found = config["training"] | config["profiling"] | config["model"]
    found |= {f"{package} version": version for package, version in environment["packages"].items()}
    found |= {"device": environment["device"]["name"]}
    found |= {
        name: environment[name] for name in ("host", "python", "commit", "uncommitted_changes")
    }
    found |= {f"${name}": value for name, value in environment["variables"].items()}
    return found | {"world_size": run.summary["training"]["world_size"]}
