"""What is known of a run that can be compared?  Its folder, or a trace of any program."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np

from analysis.answers import analyze_all
from analysis.attribution.breakdown import Attribution, Breakdown, ClassRow, ComponentRow
from analysis.attribution.operators import OperatorRow
from analysis.compare.noise import STEPS_OF_RUN, Disturbance
from analysis.compare.settings import different_settings, settings_text
from analysis.diagnosis.document import OperatorAnalysis
from analysis.diagnosis.timelines import MemorySeries
from analysis.hardware.mfu import mfu_percent
from analysis.program.watched_process import watched_processes
from analysis.trace.readers.formats import find_traces, may_be_trace
from analysis.trust.steps import ProfiledSteps
from harness.base.documents import read_document, read_fitting, read_or_leave_out
from harness.base.errors import UserError
from harness.base.text import count_of
from harness.base.units import MB
from harness.documents.flops import FlopsProfile
from harness.instruments.phases import PHASES
from harness.machine.disturbance import disturbance_text
from harness.run.run_summary import PerformanceSummary

SUMMARY = "performance_summary.json"
WATCH = "watch.json"
NOT_IN_TRACE = "not in a trace"
# The fields that a comparison reads of each document of a run.
OF_SUMMARY = (
    "status",
    "config",
    "environment",
    "steps",
    "loss.first",
    "loss.final",
    "disturbance?.disturbed",
    "disturbance?.waited_share",
    "disturbance?.lost_share",
    "disturbance?.reasons",
    "disturbance?.gpu",
    "audit?.ok",
    "audit?.findings",
    "training.world_size",
    "training.completed_steps",
    "memory.peak_mb",
    "memory.source",
    "performance.samples_per_sec",
    "performance.tokens_per_sec",
    "performance.model_flops_per_step",
    "performance.achieved_tflops",
    *(f"performance.avg_{phase}_time_ms" for phase in PHASES),
)
OF_ANALYSIS = (
    "trace",
    "steps",
    "attribution",
    "components",
    "classes",
    "operators",
    "memory",
    "verdict.bound",
    "integrity.world_size",
    "integrity.profiler_overhead.ratio",
)
OF_FLOPS = ("efficiency_metrics.mfu_percent",)


class Profile(NamedTuple):
    """What a comparison reads of the answers of a trace, of an earlier version too."""

    trace: str  # its file
    recorded_by: str
    clock: str  # GPU or host
    bound: str
    steps: ProfiledSteps
    breakdown: Breakdown
    operators: list[OperatorRow]
    memory: MemorySeries
    world_size: int | None
    overhead_ratio: float | None  # profiled to other steps


class Memory(NamedTuple):
    """The peak of a run."""

    peak_mb: float | None
    source: str  # what was counted


class WasDisturbed(NamedTuple):
    """What other processes did to the averaged steps of a run; None: it did not measure it."""

    disturbed: bool | None
    waited_share: float | None  # of thread time, waiting for a core
    lost_share: float | None  # of the steps' time, that is due to it at most
    text: str

    @property
    def of_times(self) -> Disturbance:
        return Disturbance(self.disturbed, self.lost_share)


@dataclass
class ComparedRun:
    """One run folder, or a trace of another program."""

    folder: Path  # or the trace
    name: str
    summary: dict  # of a trace, what it tells
    profile: Profile | None
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
        averaged = np.array([reason is None for reason in steps["exclusion_reason"]], dtype=bool)
        if averaged.any():
            return times[averaged]
        return times[1:] if len(times) > 1 else times

    @property
    def disturbance(self) -> WasDisturbed:
        document = self.summary.get("disturbance")
        if not document:
            return WasDisturbed(None, None, None, "not measured")
        return WasDisturbed(
            disturbed=document["disturbed"],
            waited_share=document["waited_share"],
            lost_share=document["lost_share"],
            text=disturbance_text(document),
        )

    @property
    def mfu_percent(self) -> float | None:
        """As the run printed it; a run of another machine may have its peak in its
        flops_profile.json alone."""
        printed = mfu_percent(self.summary)
        if printed is None and self.flops:
            return self.flops["efficiency_metrics"]["mfu_percent"]
        return printed

    @property
    def memory(self) -> Memory:
        """Its peak as its summary tells it; of a run that does not, as its trace does."""
        memory = self.summary["memory"]
        if memory["peak_mb"] is None and self.profile:
            return memory_of_trace(self.profile)
        return Memory(memory["peak_mb"], memory["source"])


def read_run(path: Path, name: str) -> ComparedRun:
    """The run in a folder, the trace analyzed in it or else its first trace, which is that of rank
    0, or the trace that is this file.  Raises UserError, naming it."""
    if path.is_file():
        return run_of_trace(path, path, name)
    if not path.is_dir():
        raise UserError(f"{path}: no such folder")
    left_out: list[str] = []
    summary, flops = summary_and_flops(path, left_out)
    profile = profile_in(path, left_out)
    if summary:
        return ComparedRun(path, name, summary, profile, flops, left_out)
    if profile:
        return ComparedRun(path, name, summary_of_trace(profile), profile, flops, left_out)
    if (path / WATCH).exists():
        return ComparedRun(path, name, summary_of_watch(path), None, flops, left_out)
    if any(may_be_trace(file.name) for file in path.iterdir()):
        return run_of_trace(find_traces(path)[0], path, name, left_out)
    raise UserError("; ".join(left_out) or f"{path}: neither {SUMMARY} of a run nor a trace in it")


def profile_in(folder: Path, left_out: list[str]) -> Profile | None:
    """By the operator_analysis.json of a folder, or of that of its profiles; left_out takes why one
    cannot be read."""
    for place in (folder, folder / "pytorch_profiles"):
        file = place / "operator_analysis.json"
        document = read_or_leave_out(file, OperatorAnalysis, left_out, OF_ANALYSIS)
        if document:
            return profile_of(document)
    return None


def profile_of(document: dict) -> Profile:
    """document: operator_analysis.json, of which OF_ANALYSIS is there."""
    trust = document["integrity"]
    return Profile(
        trace=document["trace"],
        recorded_by=trust.get("recorded_by", "torch.profiler"),  # older ones do not say it
        clock=document["attribution"]["clock"],
        bound=document["verdict"]["bound"],
        steps=ProfiledSteps.from_json(document["steps"]),
        breakdown=Breakdown(
            attribution=Attribution.from_json(document["attribution"]),
            phases=[],
            components=[ComponentRow.from_json(row) for row in document["components"]],
            classes=[ClassRow.from_json(row) for row in document["classes"]],
        ),
        operators=[OperatorRow.from_json(row) for row in document["operators"]],
        memory=MemorySeries.from_json(document["memory"]),
        world_size=trust["world_size"],
        overhead_ratio=trust["profiler_overhead"]["ratio"],
    )


def summary_and_flops(folder: Path, left_out: list[str]) -> tuple[dict | None, dict | None]:
    """performance_summary.json and flops_profile.json of a folder; left_out takes why one of them
    cannot be read."""
    summary = read_or_leave_out(folder / SUMMARY, PerformanceSummary, left_out, OF_SUMMARY)
    flops_file = folder / "flops_profile.json"
    return summary, read_or_leave_out(flops_file, FlopsProfile, left_out, OF_FLOPS)


def run_of_trace(trace: Path, path: Path, name: str, left_out: Sequence[str] = ()) -> ComparedRun:
    analyses, refused = analyze_all([trace])
    if refused:
        raise refused[0]
    _, own = analyses[0]
    profile = profile_of(own.as_json())
    return ComparedRun(path, name, summary_of_trace(profile), profile, None, [*left_out])


def summary_of_trace(profile: Profile) -> dict:
    """What the summary of a run would tell, as far as a trace does: times of its profiled steps."""
    times_ms = [row.duration_ms for row in profile.steps.rows]
    return summary_of_times(profile.trace, times_ms, memory_of_trace(profile), profile.world_size)


def summary_of_watch(folder: Path) -> dict:
    """The same of a watched run: times of all steps of its first rank, slow ones too.
    Raises UserError where no step was timed."""
    processes = watched_processes(folder)
    rank = min((process.rank for process in processes), default=0)
    own = [process for process in processes if process.rank == rank and len(process.seconds)]
    if not own:
        raise UserError(f"{folder / WATCH}: no step was timed")
    times_ms = 1e3 * np.concatenate([process.seconds for process in own])
    column = 2 if own[0].on_gpu else 1
    sizes = np.concatenate([process.memory[:, column] for process in own])
    peak_mb = float(sizes.max()) / MB if len(sizes) else None
    memory = Memory(peak_mb, "largest at the end of a step")
    return summary_of_times(WATCH, times_ms.tolist(), memory, own[0].about["world_size"])


def summary_of_times(
    source: str, times_ms: list[float], memory: Memory, world_size: int | None
) -> dict:
    """source: the file that tells the times of the steps."""
    return {
        "status": "completed",
        "config": {"training": {"trace": source}, "profiling": {}, "model": {"parameters": None}},
        "environment": {
            "device": {"name": None},
            "packages": {},
            "variables": {},
            "host": None,
            "python": None,
            "commit": None,
            "uncommitted_changes": None,
            "timestamp": None,
        },
        "training": {"world_size": world_size},
        "performance": {
            "samples_per_sec": None,
            "tokens_per_sec": None,
            "model_flops_per_step": None,
            "achieved_tflops": None,
            **{f"avg_{phase}_time_ms": None for phase in PHASES},
        },
        "memory": {"peak_mb": memory.peak_mb, "source": memory.source},
        "loss": {"final": None},
        "steps": {"time_ms": times_ms, "exclusion_reason": [None] * len(times_ms), "loss": []},
    }


def memory_of_trace(profile: Profile) -> Memory:
    """Of the recorded steps."""
    memory = profile.memory
    if memory.peak_mb is None:
        return Memory(None, NOT_IN_TRACE)
    return Memory(memory.peak_mb, f"{memory.of or 'allocated'}, by its trace")


def runs_below(folder: Path) -> tuple[list[ComparedRun], list[str]]:
    """The runs in a folder and below it, by the time at which they began, without what was analyzed
    of them; and what else looks like a run there, and what it is.
    Raises UserError without such a folder."""
    if folder.is_file():
        raise UserError(f"{folder}: a file; give the folder of a run")
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    runs, others = [], []
    for place, file in sorted(documents_below(folder).items()):
        name = folder.resolve().name if place == folder else os.path.relpath(place, folder)
        try:
            run = run_in(place, name, others)
            if run:
                runs.append(run)
            else:
                others.append(why_no_run(place, file))
        except UserError as error:
            others.append(str(error))
    return sorted(runs, key=ComparedRun.began), others


def documents_below(folder: Path) -> dict[Path, Path]:
    """By folder, the document that tells of a run there; not of hidden folders."""
    files = {}
    for name in (SUMMARY, "config.json"):
        for file in folder.rglob(name):
            place = file.parent
            if not any(part.startswith(".") for part in place.relative_to(folder).parts):
                files[place] = file
    return files


def run_in(folder: Path, name: str, left_out: list[str]) -> ComparedRun | None:
    """The run in a folder, without what was analyzed of it; None: there is no summary of one.
    left_out takes what else of it cannot be read.  Raises UserError."""
    summary = read_fitting(folder / SUMMARY, PerformanceSummary, OF_SUMMARY)
    if not summary:
        return None
    flops = read_or_leave_out(folder / "flops_profile.json", FlopsProfile, left_out, OF_FLOPS)
    run = ComparedRun(folder, name, summary, None, flops)
    run.began()
    return run


def why_no_run(folder: Path, file: Path) -> str:
    """What a folder is that has this document of a run, but no summary.  Raises UserError."""
    if read_document(file):
        return f"{folder}: has no {SUMMARY} of a run: it was killed, or still runs"
    return f"Not a run of this workshop: {folder} has a {file.name} of another program"


def repeated_runs(folder: Path) -> tuple[list[ComparedRun], list[str]]:
    """The run in a folder, or the runs below it, which repeat each other, by the time at which they
    began; and what was left out, and why.  Raises UserError where nothing is left, or runs differ
    in their settings."""
    below, left_out = runs_below(folder)
    # Those below a run are earlier ones.
    candidates = [run for run in below if run.folder == folder] or below
    runs = []
    for run in candidates:
        status, steps = run.summary["status"], len(run.step_ms)
        if status == "completed" and steps >= STEPS_OF_RUN:
            runs.append(run)
        else:
            few = f"{count_of(steps, 'step')} averaged of {STEPS_OF_RUN} needed"
            left_out.append(f"{run.name}: {status}, {few}")
    if not runs:
        raise UserError("; ".join([f"{folder}: no run that can be judged", *left_out]))
    different = different_settings([run.summary["config"]["training"] for run in runs])
    if different:
        raise UserError(f"{folder}: its runs do not repeat each other: {settings_text(different)}")
    return runs, left_out
