"""What do the instruments of a run show?  A document, lines and perhaps a figure for each, when the run is over."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

import torch

from analysis.fake_run import FakeRunError
from analysis.flops import flops_lines, flops_profile
from analysis.memory import draw_memory_timeline, memory_lines
from analysis.prediction import beside_measured, memory_prediction, what_fits
from harness.errors import UserError, explain_error, out_of_memory
from harness.run_report import Explanation, RunReport
from harness.workload import Workload


def explanations(report: RunReport, summary: dict) -> Iterator[Explanation]:
    """Of the memory tracker, the trace and the FLOP count, as far as the run got."""
    instruments = report.instruments
    if instruments is None:
        return
    if instruments.memory and instruments.memory.finished:
        memory = instruments.memory.document()
        memory |= beside_measured(memory, report.workload, report.device)
        figure = draw_memory_timeline(memory) if importlib.util.find_spec("matplotlib") else None
        yield Explanation("memory_timeline.json", memory, memory_lines(memory, summary), figure)
    if instruments.trace and instruments.trace.path:
        yield explain_trace(report, summary)
    if instruments.flops and instruments.flops.counts and summary["performance"]["avg_step_time_ms"]:
        profile = flops_profile(report.workload, summary, instruments.flops.counts)
        yield Explanation("flops_profile.json", profile, flops_lines(profile))


def explain_trace(report: RunReport, summary: dict) -> Explanation:
    """Of the traces of all ranks, which lie beside that of rank 0: it has waited for them."""
    name = "operator_analysis.json"
    try:
        from analysis.profile import analyze_all, profile_lines
    except ModuleNotFoundError as missing:
        return Explanation(name, None, [f"{name} is not written: {missing}"])
    path = report.instruments.trace.path
    paths = sorted(path.parent.glob(path.name.replace("_rank0.", "_rank*.")))
    analyses, refused = analyze_all(paths, summary)
    if not analyses:
        raise refused[0]
    document = next((d for file, d in analyses if file == path), analyses[0][1])
    lines = profile_lines(document) if report.profiling.profile_operators else []
    return Explanation(name, document, lines + [f"Not read: {error}" for error in refused])


def with_prediction(error: BaseException, workload: Workload, device: torch.device) -> BaseException:
    """Out of memory: the same error with the prediction beside it; others as they are."""
    if not out_of_memory(error):
        return error
    with contextlib.suppress(FakeRunError, RuntimeError, MemoryError):  # the error at hand is the one that counts
        predicted = what_fits(memory_prediction(workload, device, after_failure=True))
        return UserError(f"{explain_error(error)[0]}; by prediction {predicted}")
    return error
