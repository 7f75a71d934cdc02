"""report.html: everything about a run or its traces in one file that needs no network; the same for TensorBoard."""

from __future__ import annotations

import io
from base64 import b64encode
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.image import imread

from analysis.report.axes import plain_text
from analysis.report.figures import profile_figures, steps_figure
from analysis.report.memory_figure import draw_memory_timeline
from analysis.report.roofline_figure import draw_roofline
from analysis.report.sections import documents_in, page, page_title, trace_tables
from harness.base.documents import read_document
from harness.base.errors import UserError
from harness.base.files import png, write_bytes
from harness.base.tables import markdown_table

TOP = 25  # rows of the long tables


def write_report(folder: Path, analyses: list[tuple[str, dict]] | None = None, run: Path | None = None) -> list[Path]:
    """Write report.html, and the same figures and tables as TensorBoard's images and text; returns the files.

    analyses: (name, operator_analysis.json) of traces; default: that in the folder.  run: the folder whose other files
    are included; default: this one.
    """
    documents = documents_in(run or folder)
    if analyses is None:
        own = read_document(folder / "operator_analysis.json")
        analyses = [(own["trace"], own)] if own else []
    if not analyses and not documents["summary"]:
        raise UserError(f"{folder}: nothing to report: it has neither an operator_analysis.json nor a run")
    analysis = analyses[0][1] if analyses else None
    about = page_title(analysis, documents)
    with plain_text():
        figures = profile_figures(analysis, about) if analysis else {}
        if documents["summary"] and (figure := steps_figure(documents["summary"], about)):
            figures["steps"] = figure
        if documents["memory"]:
            figures["memory_timeline"] = draw_memory_timeline(documents["memory"], about)
        if documents["roofline"]:
            figures["roofline"] = draw_roofline(documents["roofline"], about)
        drawn = {name: png(figure) for name, figure in figures.items()}
    images = {name: f"data:image/png;base64,{b64encode(data).decode()}" for name, data in drawn.items()}
    text = page("report_page.html", analyses, documents, images=images, top=TOP)
    target = folder / "report.html"
    write_bytes(target, text.encode(errors="backslashreplace"))
    return [target, *to_tensorboard(folder, analysis, drawn)]


def to_tensorboard(folder: Path, analysis: dict | None, drawn: dict[str, bytes]) -> list[Path]:
    """Write figures (PNG) and tables to a separate event file, which replaces that of an earlier report."""
    from torch.utils.tensorboard import SummaryWriter

    for earlier in folder.glob("events.out.tfevents.*.report"):
        earlier.unlink()
    try:
        with SummaryWriter(str(folder), filename_suffix=".report") as writer:
            for name, data in drawn.items():  # drawing them again would take as long as the rest of the report
                pixels = (255 * imread(io.BytesIO(data))).round().astype(np.uint8)  # [height, width, RGBA]
                writer.add_image(f"whole_run/{name}", pixels, dataformats="HWC")
            for name, text in (text_tables(analysis) if analysis else {}).items():
                writer.add_text(f"profile/{name}", text)
    except OSError as error:
        raise UserError(f"cannot write events in {folder}: {error.strerror}") from error
    return sorted(folder.glob("events.out.tfevents.*.report"))


def text_tables(analysis: dict) -> dict[str, str]:
    """The verdict and the tables of a trace as markdown."""
    trust = analysis["integrity"]
    notes = [f"- {escaped(note)}" for note in (*trust["problems"], *trust["notes"])]
    texts = {"verdict": "\n".join([f"**{escaped(analysis['verdict']['line'])}**", "", *notes])}
    for name, (columns, rows) in trace_tables(analysis, []).items():
        if rows:
            safe = [replace(one, value=lambda row, text=one.text: escaped(text(row)), form="") for one in columns]
            texts[name.replace(" ", "_")] = "\n".join(markdown_table(safe, rows[:TOP]))
    return texts


def escaped(text: str) -> str:
    """Markdown that shows the text as it is: names come from traces of any program."""
    return "".join(f"\\{letter}" if letter in r"\`*_{}[]<>()#+!~" else letter for letter in text)
