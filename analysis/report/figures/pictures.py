"""The figures of a page, each drawn once: the page, TensorBoard's IMAGES and files show the same
picture."""

from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure

from analysis.compare.document import Comparison
from analysis.diagnosis.document import OperatorAnalysis
from analysis.report.figures.axes import plain_text
from analysis.report.figures.comparison import draw_comparison
from analysis.report.figures.memory import draw_memory_timeline
from analysis.report.figures.roofline import draw_roofline
from analysis.report.figures.step import draw_breakdown, draw_queue, draw_ranks, draw_steps
from harness.base.files import png
from harness.base.text import run_title

Draw = Callable[[Any, str], Figure]  # of answers or a document, and what was run


def figures_of(own: OperatorAnalysis | None, documents: dict, about: str) -> dict[str, bytes]:
    """The figures for which there is data, as PNG, by the names that sections have for them.

    documents: those of the run, by the names of page.DOCUMENT_FILES.  about: what was run, and of
    which rank the trace is; figures of documents tell what was run alone, as those do that the run
    itself has written."""
    of_trace: list[tuple[str, Draw, Any]] = []
    if own:
        of_trace.append(("step_breakdown", draw_breakdown, own))
        if own.gpu_timeline.queue_over_step:
            of_trace.append(("queue", draw_queue, own.gpu_timeline.queue_over_step))
        if own.ranks and any(row.exposed_comm_ms for row in own.ranks.rows):
            of_trace.append(("ranks", draw_ranks, own))
    of_run: list[tuple[str, Draw, Any]] = []
    summary = documents["summary"]
    if summary and summary["steps"]["step"]:
        of_run.append(("steps", draw_steps, summary))
    if documents["memory"]:
        of_run.append(("memory_timeline", draw_memory_timeline, documents["memory"]))
    if documents["roofline"]:
        of_run.append(("roofline", draw_roofline, documents["roofline"]))
    about_run = run_title(summary) if summary else about
    pictures = {}
    for name, draw, document in of_trace:
        pictures[name] = picture(draw, document, about)
    for name, draw, document in of_run:
        pictures[name] = picture(draw, document, about_run)
    return pictures


def picture(draw: Draw, document: Any, about: str) -> bytes:
    """A figure as PNG, drawn without matplotlib's formulas: names may contain dollar signs."""
    with plain_text():
        return png(draw(document, about))


def comparison_picture(comparison: Comparison) -> bytes:
    """The figure of a comparison of runs with short names, as PNG."""
    with plain_text():
        return png(draw_comparison(comparison))
