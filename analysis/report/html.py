"""report.html: everything about a run or its traces in one file that needs no network;
the same for TensorBoard."""

import functools
import gzip
import json
import re
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import util
from pathlib import Path
from typing import NamedTuple

from analysis.diagnosis.document import OperatorAnalysis, read_answers
from analysis.diagnosis.text import judged_first
from analysis.report.charts import STEP_TIMELINE, charts_of, step_of_document
from analysis.report.figures.pictures import figures_of
from analysis.report.page import (
    ALL_FINDABLE,
    PARTS_FINDABLE,
    Documents,
    FirstScreen,
    documents_in,
    fill_template,
    first_screen,
    page_title,
    sections_of,
)
from analysis.report.step_zoom import step_of_trace
from harness import PROJECT
from harness.base.errors import UserError
from harness.base.files import write_bytes, writing
from harness.base.sections import Section, as_markdown
from harness.base.tables import Column
from harness.run.event_file import add_picture

ROWS = 25  # of a table in TensorBoard
SCRIPTS = ("tensorboard_plugin/tensorboard_step_profile/timeline.js", "analysis/report/page.js")
Analyses = list[tuple[Path, OperatorAnalysis]]  # traces, each with its answers


class Further(NamedTuple):
    """What a report shows beside a run and its traces."""

    sections: list[Section]
    charts: dict[str, dict]  # data and layout for plotly, by the names that the sections have


def write_report(
    folder: Path,
    analyses: Analyses | None = None,
    run: Path | None = None,
    reading: dict | None = None,
    further: Further | None = None,
) -> list[Path]:
    """Write report.html, and its tables and figures as TensorBoard's text and images; returns the
    files.

    analyses: of traces; default: that of the run in the folder.  run: the folder whose other files
    are included; default: this one.  reading: how the traces were read, as read_trace() takes it.
    further: what lies beside the traces.
    """
    left_out: list[str] = []
    documents = documents_in(run or folder, left_out)
    if analyses is None:
        analyses = own_analyses(folder, documents, left_out)
    if not analyses and not documents["summary"]:
        why = "; ".join(left_out) or "it has neither an operator_analysis.json nor a run"
        raise UserError(f"{folder}: nothing to report: {why}")
    own, others, step = None, [], None
    if analyses:
        (trace, own), *others = judged_first(analyses)
        step = step_to_show(trace, own, reading or {}, left_out)
    figures = figures_of(own, documents, page_title(own, documents))
    named = [(path.name, other) for path, other in others]
    sections = [Section("Not read", note=left_out), *sections_of(own, named, documents)]
    charts = charts_of(own)
    if further:
        sections += further.sections
        charts.update(further.charts)
    of_trace = step is not None and "device" in step
    findable = ALL_FINDABLE if of_trace else PARTS_FINDABLE
    first = first_screen(own, documents)
    page = write_page(
        folder, first, sections, charts, figures=figures, step=step, findable=findable
    )
    return [page, *to_tensorboard(folder, figures, sections)]


def own_analyses(folder: Path, documents: Documents, left_out: list[str]) -> Analyses:
    """The trace of the run in the folder with its answers, if it has one; left_out takes why it
    cannot be read."""
    own = read_answers(folder / "operator_analysis.json", left_out)
    if own is None:
        return []
    trace = folder / own.trace
    profiling = (documents["summary"] or {}).get("config", {}).get("profiling", {})
    if not trace.exists() and profiling.get("profile_dir"):
        trace = Path(profiling["profile_dir"]) / own.trace
    return [(trace, own)]


def step_to_show(trace: Path, own: OperatorAnalysis, reading: dict, left_out: list[str]) -> dict:
    """The events of one step; its parts alone, as the answers have them, where the trace is gone or
    cannot be read: left_out takes why."""
    if trace.exists():
        try:
            return step_of_trace(trace, own, reading)
        except UserError as error:
            left_out.append(str(error))
    return step_of_document(own.step_timeline)


def write_page(
    folder: Path,
    first: FirstScreen,
    sections: Sequence[Section],
    charts: dict[str, dict],
    *,
    figures: dict[str, bytes] | None = None,
    step: dict | None = None,
    findable: Sequence[str] = (),
) -> Path:
    """Write report.html with all that its script needs; returns the file.

    charts: data and layout for plotly, by name.  figures: PNG by name.  step: the events of one, of
    a trace.  findable: titles of sections whose names its timeline finds."""
    names = [*charts, STEP_TIMELINE] if step else [*charts]
    text = fill_template(
        "page.html",
        first,
        sections,
        figures=figures,
        charts=names,
        findable=findable,
        chart_data=charts,
        step=packed(json.dumps(step).encode()),
        plotly=packed_plotly() if names else "",
        script=script(),
    )
    target = folder / "report.html"
    write_bytes(target, text.encode(errors="backslashreplace"))
    return target


def packed(data: bytes) -> str:
    """Text that the page's script unpacks."""
    return b64encode(gzip.compress(data, mtime=0)).decode()


def script() -> str:
    """The modules of the page as one: a file that is opened from a disk may not import another."""
    text = "".join((PROJECT / name).read_text() for name in SCRIPTS)
    return re.sub(r"^(import .*\n|export )", "", text, flags=re.MULTILINE)


def plotly() -> Path:
    return (
        Path(util.find_spec("plotly").origin).parent / "package_data" / "plotly.min.js"
    )  # not imported: it is slow


@functools.cache
def packed_plotly() -> str:
    """plotly's script, which takes a third of a second to pack and is the same in each page."""
    return packed(plotly().read_bytes())


def to_tensorboard(folder: Path, figures: dict[str, bytes], sections: list[Section]) -> list[Path]:
    """Write figures and tables to a separate event file,
    which replaces that of an earlier report."""
    from torch.utils.tensorboard import SummaryWriter

    for earlier in folder.glob("events.out.tfevents.*.report"):
        earlier.unlink()
    with (
        writing(f"events in {folder}"),
        SummaryWriter(str(folder), filename_suffix=".report") as writer,
    ):
        for name, picture in figures.items():
            add_picture(writer, name, picture)
        for section in filter(None, sections):
            lines = as_markdown(escaped(section), ROWS)
            writer.add_text(f"profile/{section.title}", "\n".join(lines))
    return sorted(folder.glob("events.out.tfevents.*.report"))


def escaped(section: Section) -> Section:
    """With markdown that shows its texts as they are: names come from traces of any program."""
    columns = [replace(column, value=escaped_text(column), form="") for column in section.columns]
    return replace(
        section,
        columns=columns,
        facts={label: safe(str(value)) for label, value in section.facts.items()},
        note=[safe(note) for note in section.note],
        warning=safe(section.warning),
        figure="",  # TensorBoard has no files of figures beside its text
        parts=[escaped(part) for part in section.parts],
    )


def escaped_text(column: Column) -> Callable[[dict], str]:
    return lambda row: safe(column.text(row))


def safe(text: str) -> str:
    return "".join(f"\\{letter}" if letter in r"\`*_{}[]<>()#+!~" else letter for letter in text)
