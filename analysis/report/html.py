"""report.html: everything about a run or its traces in one file that needs no network;
the same for TensorBoard."""

import gzip
import re
from base64 import b64encode
from dataclasses import replace
from importlib import util
from pathlib import Path
from typing import NamedTuple

from analysis.diagnosis.text import judged_first
from analysis.report.axes import plain_text
from analysis.report.charts import charts, step_of_document
from analysis.report.page import (
    FINDABLE,
    documents_in,
    fill_template,
    first_screen,
    page_title,
    sections_of,
)
from analysis.report.roofline_figure import draw_roofline
from harness import PROJECT
from harness.base.documents import read_or_leave_out
from harness.base.errors import UserError
from harness.base.files import write_bytes, writing
from harness.base.sections import Section, as_markdown
from harness.documents.trace import OperatorAnalysis

ROWS = 25  # of a table in TensorBoard
SCRIPTS = ("tensorboard_plugin/tensorboard_step_profile/timeline.js", "analysis/report/page.js")


class Further(NamedTuple):
    """What a report shows beside a run and its traces."""

    sections: list[Section]
    charts: dict[str, dict]  # data and layout for plotly, by the names that the sections have


def write_report(
    folder: Path,
    analyses: list[tuple[str, dict]] | None = None,
    run: Path | None = None,
    further: Further | None = None,
) -> list[Path]:
    """Write report.html, and its tables and some figures as TensorBoard's text and images; returns
    the files.

    analyses: (name, operator_analysis.json) of traces; default: that in the folder.  run: the
    folder whose other files are included; default: this one.  further: sections of what lies beside.
    """
    left_out: list[str] = []
    documents = documents_in(run or folder, left_out)
    if analyses is None:
        own = read_or_leave_out(folder / "operator_analysis.json", OperatorAnalysis, left_out)
        analyses = [(own["trace"], own)] if own else []
    if not analyses and not documents["summary"]:
        why = "; ".join(left_out) or "it has neither an operator_analysis.json nor a run"
        raise UserError(f"{folder}: nothing to report: {why}")
    analyses = judged_first(analyses) if analyses else []
    analysis = analyses[0][1] if analyses else None
    sections = [Section("Not read", note=left_out), *sections_of(analysis, analyses[1:], documents)]
    drawn, step = (
        charts(analysis, documents),
        step_of_document(analysis["step_timeline"]) if analysis else None,
    )
    if further:
        sections += further.sections
        drawn.update(further.charts)
    page = {
        "charts": [*drawn, *(["step_timeline"] if analysis else [])],
        "data": {"charts": drawn, "step": step},
    }
    # The timeline of a document has parts alone.
    page |= {"findable": FINDABLE[:1], "script": script()}
    page["plotly"] = b64encode(gzip.compress(plotly().read_bytes(), mtime=0)).decode()
    text = fill_template("page.html", first_screen(analysis, documents), sections, **page)
    target = folder / "report.html"
    write_bytes(target, text.encode(errors="backslashreplace"))
    return [target, *to_tensorboard(folder, page_title(analysis, documents), documents, sections)]


def script() -> str:
    """The modules of the page as one: a file that is opened from a disk may not import another."""
    text = "".join((PROJECT / name).read_text() for name in SCRIPTS)
    return re.sub(r"^(import .*\n|export )", "", text, flags=re.MULTILINE)


def plotly() -> Path:
    return (
        Path(util.find_spec("plotly").origin).parent / "package_data" / "plotly.min.js"
    )  # not imported: it is slow


def to_tensorboard(
    folder: Path, title: str, documents: dict, sections: list[Section]
) -> list[Path]:
    """Write tables and the roofline to a separate event file,
    which replaces that of an earlier report."""
    from torch.utils.tensorboard import SummaryWriter

    for earlier in folder.glob("events.out.tfevents.*.report"):
        earlier.unlink()
    with (
        plain_text(),
        writing(f"events in {folder}"),
        SummaryWriter(str(folder), filename_suffix=".report") as writer,
    ):
        if documents["roofline"]:
            writer.add_figure("whole_run/roofline", draw_roofline(documents["roofline"], title))
        for section in filter(None, sections):
            writer.add_text(
                f"profile/{section.title}", "\n".join(as_markdown(escaped(section), ROWS))
            )
    return sorted(folder.glob("events.out.tfevents.*.report"))


def escaped(section: Section) -> Section:
    """With markdown that shows its texts as they are: names come from traces of any program."""
    columns = [
        replace(one, value=lambda row, text=one.text: safe(text(row)), form="")
        for one in section.columns
    ]
    facts = {label: safe(str(value)) for label, value in section.facts.items()}
    texts = {"note": [*map(safe, section.note)], "facts": facts, "warning": safe(section.warning)}
    # TensorBoard has no files of figures beside its text.
    return replace(
        section, columns=columns, **texts, figure="", parts=[*map(escaped, section.parts)]
    )


def safe(text: str) -> str:
    return "".join(f"\\{letter}" if letter in r"\`*_{}[]<>()#+!~" else letter for letter in text)
