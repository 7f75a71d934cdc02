"""Results of a run's instruments: for each its document, lines to print, and perhaps a figure."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from analysis.commands.memory_snapshots import add_prediction, answer_of_snapshots
from analysis.memory.predicted import predicted_memory
from analysis.memory.snapshot.analyzed import analyze_snapshot
from analysis.memory.snapshot.reading import read_snapshot
from analysis.memory.snapshot.text import snapshot_sections
from analysis.memory.tables import memory_lines, memory_section
from analysis.memory.timeline import memory_timeline
from analysis.prediction.capacity import capacity_of
from analysis.prediction.document import memory_prediction
from analysis.prediction.expected_time import expected_step_time
from analysis.prediction.text import what_fits
from analysis.work.fake_step import FakeRunError
from analysis.work.flop_rates import flops_profile
from analysis.work.sections import agreement_text, flops_section
from harness.base.errors import UserError, out_of_memory
from harness.base.sections import as_text
from harness.base.tables import ANSWER_LINES, labeled, wrapped
from harness.base.text import run_title
from harness.base.units import rounded
from harness.model.workload import Workload
from harness.ranks.failures import explain_error
from harness.run.run_report import Explanation, RunReport
from harness.run.run_summary import ExpectedTime
from harness.schema import Unknown

if TYPE_CHECKING:  # takes pandas, which a run without a trace does not need
    from analysis.diagnosis.document import OperatorAnalysis

# NFS shows a new file of another node at latest after acdirmax, 60 s; nfs(5)
SHARED_FOLDER_WAIT_S = 60.0
OPERATORS = 5  # that --profile-operators prints without --verbose


def explanations(report: RunReport, summary: dict) -> Iterator[Explanation]:
    """The results of the memory tracker, the profiler and the FLOP count, as far as the run got."""
    instruments = report.measurements.instruments
    if instruments is None:
        return
    if report.recorded_memory:
        yield explain_memory(report, summary)
    if instruments.snapshot and instruments.snapshot.written:
        yield explain_snapshot(report, summary)
    # Before the trace, whose verdict uses the same ridge point: this measures the peaks if they
    # are unknown.
    profile = profile_of_flops(report, summary)
    if instruments.trace and instruments.trace.path:
        yield explain_trace(report, summary)
    if profile:
        agree = agreement_text(profile["flops_analysis"]["reconciliation"], "the matmul counts")
        line = f"FLOPs Profile: {profile['flops_analysis']['step_flops']:,} per step; {agree}"
        before = as_text(flops_section(profile)) if report.verbose else []
        yield Explanation("flops_profile.json", profile, [line], before)


def profile_of_flops(report: RunReport, summary: dict) -> dict | None:
    """flops_profile.json; None where they were not counted, or no step was timed."""
    flops = report.measurements.instruments.flops
    if not (flops and flops.counts and summary["performance"]["avg_step_time_ms"]):
        return None
    return flops_profile(report.workload, summary, flops.counts).as_json()


def explain_memory(report: RunReport, summary: dict) -> Explanation:
    """What held memory in the step that was tracked, beside the prediction."""
    on_gpu = report.device.type == "cuda"
    timeline = memory_timeline(
        report.measurements.instruments.memory.timeline, report.workload, on_gpu
    )
    memory = timeline.as_json()
    figure = None
    if importlib.util.find_spec("matplotlib"):
        from analysis.report.figures.pictures import draw_memory_timeline, picture

        figure = picture(draw_memory_timeline, memory, run_title(summary))
    section, lines = memory_section(memory), list(memory_lines(memory, summary))
    expected = report.measurements.expected_time
    if isinstance(expected, ExpectedTime):
        measured = rounded(summary["performance"]["median_step_time_ms"])
        lines.append(f"Step time: expected {rounded(expected.median)} ms, measured {measured}")
    before = as_text(section) if report.verbose else wrapped(labeled(section.facts))
    return Explanation("memory_timeline.json", memory, lines, before, figure)


def expected_of_run(report: RunReport) -> ExpectedTime | Unknown:
    """Of a step of what ran; of one rank only, as the network between several is seldom known."""
    device = report.measurements.environment.device.as_json()
    try:
        return expected_step_time(report.workload, device, None)
    except FakeRunError as error:
        return Unknown(str(error))


def explain_snapshot(report: RunReport, summary: dict) -> Explanation:
    """Who held the memory: its document and, with --verbose, its tables.  Of a run that failed the
    answer, as nothing follows that would tell it."""
    name = "memory_snapshot.json"
    path = report.measurements.instruments.snapshot.written[-1]
    device = report.measurements.environment.device.as_json()
    try:
        analyzed = analyze_snapshot(read_snapshot(path), device.get("memory_bytes"))
    except UserError as error:
        return Explanation(name, None, [f"Not read: {error}"])
    unread: list[str] = []
    add_prediction(analyzed, unread)
    before = [f"Not read: {line}" for line in unread]
    if report.verbose:
        for section in snapshot_sections(analyzed.document):
            before += as_text(section)
    lines = []
    if summary["status"] != "completed":
        lines = answer_of_snapshots([analyzed.document], None, ANSWER_LINES - 2)
    return Explanation(name, analyzed.document.as_json(), lines, before)


def explain_trace(report: RunReport, summary: dict) -> Explanation:
    """The analysis of the traces of all ranks, in the folder of rank 0's trace."""
    name = "operator_analysis.json"
    try:
        from analysis.answers import analyze_all
        from analysis.diagnosis.sections import profile_lines
    except ModuleNotFoundError as missing:
        return Explanation(name, None, [f"{name} is not written: {missing}"])
    path = report.measurements.instruments.trace.path
    # Of a run that failed, a rank may have none.
    wait_s = SHARED_FOLDER_WAIT_S if summary["status"] == "completed" else 0.0
    paths, missing = traces_of_ranks(path, report.world_size, wait_s)
    predicted = {}
    if report.world_size > 1:
        # A model that cannot run on fake tensors has no prediction.
        with contextlib.suppress(FakeRunError):
            predicted[path] = predicted_collectives(report)
    analyses, refused = analyze_all(paths, summary, predicted=predicted)
    if not analyses:
        raise refused[0]
    own = next((answers for file, answers in analyses if file == path), analyses[0][1])
    before = []
    if report.profiling.profile_operators:
        before = ["", *profile_lines(own)] if report.verbose else operator_lines(own)
    lines = [f"Not read: {error}" for error in refused]
    if missing:
        lines.append(missing_text(path.parent, missing, wait_s))
    return Explanation(name, own.as_json(), lines, before)


def missing_text(folder: Path, ranks: list[int], wait_s: float) -> str:
    """The ranks whose traces are not there."""
    word = "rank" if len(ranks) == 1 else "ranks"
    named = f"{word} {', '.join(map(str, ranks))}"
    return f"Not in {folder} after {wait_s:.0f} s: the trace of {named}; do all nodes share it?"


def predicted_collectives(report: RunReport) -> list[dict]:
    """Of a step, as analyze_all() takes them.  Raises FakeRunError."""
    memory = predicted_memory(report.workload, report.device.type == "cuda").document()
    return [{**row, "group_size": report.world_size} for row in memory["collectives"]]


def operator_lines(own: OperatorAnalysis) -> list[str]:
    """The operators that take longest."""
    from analysis.attribution.operators import operator_section

    short = operator_section(own.operator_tables, bool(own.kernels), own.attribution.steps)
    short.parts = []
    return as_text(short, OPERATORS)


def traces_of_ranks(path: Path, world_size: int, wait_s: float) -> tuple[list[Path], list[int]]:
    """The traces beside that of rank 0, and the ranks whose trace has not appeared after wait_s
    seconds.

    All have been written, but a network file system shows those of other nodes later.
    """
    paths = [
        path.with_name(path.name.replace("_rank0.", f"_rank{rank}.")) for rank in range(world_size)
    ]
    give_up = time.monotonic() + wait_s
    while True:
        # Reading the folder again makes NFS look, which asking for a name may not.
        here = {*path.parent.iterdir()}
        missing = [rank for rank, file in enumerate(paths) if file not in here]
        if not missing or time.monotonic() >= give_up:
            return [file for file in paths if file in here], missing
        time.sleep(0.2)


def with_prediction(
    error: BaseException, workload: Workload, device: torch.device
) -> BaseException:
    """The error itself; if memory ran out, one that adds the prediction to its message."""
    if not out_of_memory(error):
        return error
    with contextlib.suppress(
        FakeRunError, RuntimeError, MemoryError
    ):  # the original error takes precedence
        capacity = capacity_of(device, [workload.precision], after_failure=True)
        predicted = what_fits(memory_prediction(workload, device, capacity))
        return UserError(f"{explain_error(error)[0]}; predicted: {predicted}")
    return error
