"""What is known of a run that can be compared?  Its folder, or a trace of any program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from analysis.hardware.mfu import mfu_percent
from analysis.trace.readers.formats import find_traces, may_be_trace
from harness.base.documents import read_document
from harness.base.errors import UserError
from harness.instruments.phases import PHASES
from harness.machine.disturbance import disturbance_text

NOT_IN_TRACE = "not in a trace"
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


# ---- Names and settings ----


def check_distinct(folders: list[Path]) -> None:
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UserError("a folder is named twice; give each once", exit_code=2)


def unique_names(folders: list[Path]) -> list[str]:
    """Folder names; the path where two folders have the same name."""
    names = [folder.resolve().name for folder in folders]
    return [str(folder) if names.count(name) > 1 else name for folder, name in zip(folders, names, strict=True)]


def different_settings(tables: Sequence[dict]) -> list[dict]:
    """Each name whose values differ between the tables, with its values; None where a table lacks it."""
    names = dict.fromkeys(name for table in tables for name in table if name not in IGNORED)
    rows = [{"name": name, "values": [table.get(name) for table in tables]} for name in names]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"][1:])]


def settings_of_run(run: ComparedRun) -> dict:
    """Settings and environment of a run, by name."""
    config, environment = run.summary["config"], run.summary["environment"]
    return (
        config["training"]
        | config["profiling"]
        | config["model"]
        | {f"{package} version": version for package, version in environment["packages"].items()}
        | {"device": environment["device"]["name"]}
        | {name: environment[name] for name in ("host", "python", "commit", "uncommitted_changes")}
        | {f"${name}": value for name, value in environment["variables"].items()}
        | {"world_size": run.summary["training"]["world_size"]}
    )
