"""Results of a run's instruments: for each its document, lines to print, and perhaps a figure."""

import contextlib
import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from analysis.commands.memory_snapshots import add_prediction, headline_lines
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
from harness.base.tables import labeled, wrapped
from harness.base.text import run_title
from harness.base.units import rounded
from harness.model.workload import Workload
from harness.ranks.failures import explain_error
from harness.run.run_report import Explanation, RunReport
from harness.run.run_summary import PerformanceSummary
from harness.schema import Unknown, explained, unknown

SHARED_FOLDER_WAIT_S = (
    60.0  # NFS shows a new file of another node at latest after acdirmax, 60 s; nfs(5)
)
OPERATORS = 5  # that --profile-operators prints without --verbose


def explanations(report: RunReport, summary: dict) -> Iterator[Explanation]:
    """The results of the memory tracker, the profiler and the FLOP count, as far as the run got."""
    instruments = report.measurements.instruments
    if instruments is None:
        return
    if instruments.memory and instruments.memory.finished:
        on_gpu = report.device.type == "cuda"
        timeline = memory_timeline(instruments.memory.timeline, report.workload, on_gpu)
        memory = timeline.as_json()
        figure = None
        if importlib.util.find_spec("matplotlib"):
            from analysis.report.figures.pictures import draw_memory_timeline, picture

            figure = picture(draw_memory_timeline, memory, run_title(summary))
        section, lines = memory_section(memory), memory_lines(memory, summary)
        performance = summary["performance"]
        performance.update(expected_of_run(report))
        expected = performance["expected_step_time_ms"]
        if expected:
            measured = rounded(performance["median_step_time_ms"])
            lines = [
                *lines,
                f"Step time: expected {rounded(expected['median'])} ms, measured {measured}",
            ]
            yield Explanation(
                "performance_summary.json", explained(summary, PerformanceSummary), []
            )
        before = as_text(section) if report.verbose else wrapped(labeled(section.facts))
        yield Explanation("memory_timeline.json", memory, lines, before, figure)
    if instruments.snapshot and instruments.snapshot.written:
        yield explain_snapshot(report, summary)
    profile = None
    if (
        instruments.flops
        and instruments.flops.counts
        and summary["performance"]["avg_step_time_ms"]
    ):
        # Before the trace, whose verdict uses the same ridge point: this measures the peaks if they
        # are unknown.
        profile = flops_profile(report.workload, summary, instruments.flops.counts)
    if instruments.trace and instruments.trace.path:
        yield explain_trace(report, summary)
    if profile:
        agree = agreement_text(profile["flops_analysis"]["reconciliation"], "the matmul counts")
        line = f"FLOPs Profile: {profile['flops_analysis']['step_flops']:,} per step; {agree}"
        before = as_text(flops_section(profile)) if report.verbose else []
        yield Explanation("flops_profile.json", profile, [line], before)


def expected_of_run(report: RunReport) -> dict:
    """`expected_step_time_ms` of what ran; one rank only,
    as the network between several is seldom known."""
    device = report.measurements.environment.device.as_json()
    try:
        expected = expected_step_time(report.workload, device, None)
    except FakeRunError as error:
        expected = Unknown(str(error))
    if isinstance(expected, Unknown):
        return unknown(expected.reason, "expected_step_time_ms")
    return {"expected_step_time_ms": expected.as_json()}


def explain_snapshot(report: RunReport, summary: dict) -> Explanation:
    """Who held the memory: its document and, with --verbose, its tables.  Of a run that failed the
    headline, as nothing follows that would tell it."""
    name = "memory_snapshot.json"
    path = report.measurements.instruments.snapshot.written[-1]
    device = report.measurements.environment.device.as_json()
    try:
        analyzed = analyze_snapshot(read_snapshot(path), device.get("memory_bytes"))
        add_prediction(analyzed)
    except UserError as error:
        return Explanation(name, None, [f"Not read: {error}"])
    before = []
    if report.verbose:
        for section in snapshot_sections(analyzed.document):
            before += as_text(section)
    lines = headline_lines([analyzed]) if summary["status"] != "completed" else []
    return Explanation(name, analyzed.document.as_json(), lines, before)


def explain_trace(report: RunReport, summary: dict) -> Explanation:
    """The analysis of the traces of all ranks, in the folder of rank 0's trace."""
    name = "operator_analysis.json"
    try:
        from analysis.answers import analyze_all, with_prediction
        from analysis.attribution.operators import operator_section
        from analysis.diagnosis.document import OperatorAnalysis
        from analysis.diagnosis.sections import profile_lines
    except ModuleNotFoundError as missing:
        return Explanation(name, None, [f"{name} is not written: {missing}"])
    path = report.measurements.instruments.trace.path
    wait_s = (
        SHARED_FOLDER_WAIT_S if summary["status"] == "completed" else 0.0
    )  # else a rank may have none
    paths, missing = traces_of_ranks(path, report.world_size, wait_s)
    analyses, refused = analyze_all(paths, summary)
    if not analyses:
        raise refused[0]
    document = next((d for file, d in analyses if file == path), analyses[0][1])
    if report.world_size > 1:
        # A model that cannot run on fake tensors has no prediction.
        with contextlib.suppress(FakeRunError):
            memory = predicted_memory(report.workload, report.device.type == "cuda").document()
            predicted = []
            for row in memory["collectives"]:
                predicted.append({**row, "group_size": report.world_size})
            own = OperatorAnalysis.from_json(document)
            document = with_prediction(own, predicted).as_json()
    before = []
    if report.profiling.profile_operators:
        answers = OperatorAnalysis.from_json(document)
        short = operator_section(
            answers.operator_tables, bool(answers.kernels), answers.attribution.steps
        )
        short.parts = []
        before = ["", *profile_lines(document)] if report.verbose else as_text(short, OPERATORS)
    lines = [f"Not read: {error}" for error in refused]
    if missing:
        ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        lines.append(
            f"Not in {path.parent} after {wait_s:.0f} s: the trace of {ranks}; do all nodes"
            " share it?"
        )
    return Explanation(name, document, lines, before)


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
        here = {
            *path.parent.iterdir()
        }  # reading the folder again makes NFS look, which asking for a name may not
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
        predicted = what_fits(memory_prediction(workload, device, capacity).as_json())
        return UserError(f"{explain_error(error)[0]}; predicted: {predicted}")
    return error
