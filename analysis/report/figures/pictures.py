"""The figures of a page, each drawn once: the page, TensorBoard's IMAGES and files show the same
picture."""

from collections.abc import Callable

from matplotlib.figure import Figure

from analysis.report.figures.axes import plain_text
from analysis.report.figures.comparison import draw_comparison
from analysis.report.figures.memory import draw_memory_timeline
from analysis.report.figures.roofline import draw_roofline
from analysis.report.figures.step import draw_breakdown, draw_queue, draw_ranks, draw_steps
from harness.base.files import png

Draw = Callable[[dict, str], Figure]  # of a document, and what was run


def figures_of(analysis: dict | None, documents: dict, about: str) -> dict[str, bytes]:
    """The figures for which there is data, as PNG, by the names that sections have for them.

    documents: those of the run, by the names of page.DOCUMENT_FILES.  about: what was run."""
    drawn: list[tuple[str, Draw, dict]] = []
    if analysis:
        drawn.append(("step_breakdown", draw_breakdown, analysis))
        if analysis["gpu_timeline"]["queue_over_step"]:
            drawn.append(("queue", draw_queue, analysis))
        if any(row["exposed_comm_ms"] for row in analysis.get("ranks", {}).get("rows", [])):
            drawn.append(("ranks", draw_ranks, analysis))
    summary = documents["summary"]
    if summary and summary["steps"]["step"]:
        drawn.append(("steps", draw_steps, summary))
    if documents["memory"]:
        drawn.append(("memory_timeline", draw_memory_timeline, documents["memory"]))
    if documents["roofline"]:
        drawn.append(("roofline", draw_roofline, documents["roofline"]))
    pictures = {}
    for name, draw, document in drawn:
        pictures[name] = picture(draw, document, about)
    return pictures


def picture(draw: Draw, document: dict, about: str) -> bytes:
    """A figure as PNG, drawn without matplotlib's formulas: names may contain dollar signs."""
    with plain_text():
        return png(draw(document, about))


def comparison_picture(comparison: dict) -> bytes:
    """The figure of a comparison of runs with short names, as PNG."""
    with plain_text():
        return png(draw_comparison(comparison))
