"""What is known of a run that can be compared?  Its folder, or a trace of any program."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from analysis.comparison.noise import STEPS_OF_RUN
from analysis.hardware.mfu import mfu_percent
from analysis.trace.readers.formats import find_traces, may_be_trace
from harness.base.documents import read_document
from harness.base.errors import UserError
from harness.base.text import count_of
from harness.documents.sweeps import NOT_IN_TRACE
from harness.instruments.phases import PHASES
from harness.machine.disturbance import disturbance_text

SUMMARY = "performance_summary.json"
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

    @property
    def of_trace(self) -> bool:
        """Whether a trace is all that is known of it."""
        return "trace" in self.summary["config"]["training"]

    @property
    def environment(self) -> dict:
        return self.summary["environment"]

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
            return {"disturbed": None, "waited_share": None, "lost_share": None, "disturbance": "not measured"}
        values = {name: found[name] for name in ("disturbed", "waited_share", "lost_share")}
        return values | {"disturbance": disturbance_text(found)}

    @property
    def mfu_percent(self) -> float | None:
        """As the run printed it; a run of another machine may have its peak in its flops_profile.json alone."""
        found = mfu_percent(self.summary)
        return self.flops["efficiency_metrics"]["mfu_percent"] if found is None and self.flops else found

    @property
    def clock(self) -> str:
        """The clock of its profile: GPU or host."""
        return self.analysis["attribution"]["clock"]


def read_run(path: Path, name: str) -> ComparedRun:
    """The run in a folder, the trace analyzed in it or else its first trace, which is that of rank 0, or the trace that
    is this file.  Raises UserError, naming it."""
    if path.is_file():
        return run_of_trace(path, path, name)
    if not path.is_dir():
        raise UserError(f"{path}: no such folder")
    summary = read_document(path / "performance_summary.json")
    profiles = (path / "operator_analysis.json", path / "pytorch_profiles" / "operator_analysis.json")
    analysis = next((document for file in profiles if (document := read_document(file))), None)
    if summary is None and analysis:
        summary = summary_of_trace(analysis)
    if summary is None and any(may_be_trace(file.name) for file in path.iterdir()):
        return run_of_trace(find_traces(path)[0], path, name)
    if summary is None or "exclusion_reason" not in summary.get("steps", {}):
        raise UserError(f"{path}: neither performance_summary.json of a run nor a trace in it")
    return ComparedRun(path, name, summary, analysis, read_document(path / "flops_profile.json"))


def run_of_trace(trace: Path, path: Path, name: str) -> ComparedRun:
    from analysis.diagnosis.traces import analyze_all  # pandas is slow to load, and runs are compared without it

    analyses, refused = analyze_all([trace])
    if refused:
        raise refused[0]
    return ComparedRun(path, name, summary_of_trace(analyses[0][1]), analyses[0][1], None)


def summary_of_trace(analysis: dict) -> dict:
    """What the summary of a run would tell, as far as a trace does: the times of its profiled steps."""
    times = [row["duration_ms"] for row in analysis["steps"]["rows"]]
    names = ("samples_per_sec", "tokens_per_sec", "model_flops_per_step", "achieved_tflops")
    peak_mb = analysis["memory"]["peak_mb"]
    source = NOT_IN_TRACE if peak_mb is None else f"{analysis['memory']['of']}, by its trace"
    return {
        "status": "completed",
        "config": {"training": {"trace": analysis["trace"]}, "profiling": {}, "model": {"parameters": None}},
        "environment": {"device": {"name": None}, "packages": {}, "variables": {}}
        | dict.fromkeys(("host", "python", "commit", "uncommitted_changes")),
        "training": {"world_size": analysis["integrity"]["world_size"]},
        "performance": dict.fromkeys((*names, *(f"avg_{phase}_time_ms" for phase in PHASES))),
        "memory": {"peak_mb": peak_mb, "source": source},
        "loss": {"final": None},
        "steps": {"time_ms": times, "exclusion_reason": [None] * len(times), "loss": []},
    }


def runs_below(folder: Path) -> tuple[list[ComparedRun], list[str]]:
    """The runs in a folder and below it, by the time at which they began, without what was analyzed of them; and what
    else looks like a run there, and what it is.  Raises UserError without such a folder."""
    if not folder.is_dir():
        raise UserError(f"{folder}: " + ("a file; give the folder of a run" if folder.exists() else "no such folder"))
    found, others = [], []
    files = {file.parent: file for name in (SUMMARY, "config.json") for file in folder.rglob(name)}
    for place, file in sorted(files.items()):
        if any(part.startswith(".") for part in place.relative_to(folder).parts):
            continue
        try:
            summary = read_document(place / SUMMARY)
            parts = {**summary.get("steps", {}), **summary.get("environment", {})} if summary else {}
            if {"exclusion_reason", "timestamp"} <= parts.keys():
                flops, name = read_document(place / "flops_profile.json"), os.path.relpath(place, folder)
                name = folder.resolve().name if place == folder else name
                found.append(ComparedRun(place, name, summary, None, flops))
            elif read_document(file):
                others.append(f"{place}: has no {SUMMARY} of a run: it was killed, or still runs")
            else:
                others.append(f"Not a run of this workshop: {place} has a {file.name} of another program")
        except UserError as error:
            others.append(str(error))
    return sorted(found, key=lambda run: datetime.fromisoformat(run.environment["timestamp"])), others


def repeated_runs(folder: Path) -> tuple[list[ComparedRun], list[str]]:
    """The run in a folder, or the runs below it, which repeat each other, by the time at which they began; and what was
    left out, and why.  Raises UserError where nothing is left, or runs differ in their settings."""
    found, left_out = runs_below(folder)
    found = [run for run in found if run.folder == folder] or found  # those below a run are earlier ones
    runs = [run for run in found if run.summary["status"] == "completed" and len(run.step_ms) >= STEPS_OF_RUN]
    few = f"averaged of {STEPS_OF_RUN} needed"
    rest = [run for run in found if run not in runs]
    left_out += [f"{run.name}: {run.summary['status']}, {count_of(len(run.step_ms), 'step')} {few}" for run in rest]
    if not runs:
        raise UserError("; ".join([f"{folder}: no run that can be judged", *left_out]))
    if different := different_settings([run.summary["config"]["training"] for run in runs]):
        raise UserError(f"{folder}: its runs do not repeat each other: {settings_text(different)}")
    return runs, left_out


def settings_text(different: list[dict]) -> str:
    """'batch_size 8 | 4, seed 1 | 2': rows of different_settings()."""
    return ", ".join(f"{row['name']} {' | '.join(dict.fromkeys(map(str, row['values'])))}" for row in different)


# ---- Settings ----


def different_settings(tables: Sequence[dict]) -> list[dict]:
    """Each name whose values differ between the tables, with its values; None where a table lacks it."""
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
    found |= {name: environment[name] for name in ("host", "python", "commit", "uncommitted_changes")}
    found |= {f"${name}": value for name, value in environment["variables"].items()}
    return found | {"world_size": run.summary["training"]["world_size"]}
