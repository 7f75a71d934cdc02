"""Answers for the tab in TensorBoard, as a process of its own that TensorBoard never waits for.

python3 -m analysis.report.tab LOGDIR reads requests from standard input and writes the answers, a
line of JSON each, in any order.  Several log directories are given as NAME LOGDIR NAME LOGDIR ...,
and their runs begin with these names.  It ends when its input does, and writes nothing to the
folders that it reads.
"""

import contextlib
import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from pathlib import Path

from analysis.compare.document import compare_read
from analysis.compare.parts import PART_KINDS
from analysis.compare.runs import ComparedRun, summary_and_flops, summary_of_trace
from analysis.compare.text import comparison_section
from analysis.diagnosis.document import operator_analysis
from analysis.diagnosis.traces import analyze_all, note_missing_ranks
from analysis.limits.timeline import timeline_of
from analysis.report.charts import charts, comparison_chart, step_of_document
from analysis.report.page import (
    FINDABLE,
    documents_in,
    fill_template,
    first_of_comparison,
    first_screen,
    sections_of,
)
from analysis.report.step_zoom import zoomed_step
from analysis.trace.readers.formats import begins_as_trace, may_be_trace, recordings
from analysis.trace.tables import read_trace
from analysis.trace.timeline import Timeline
from analysis.trust.integrity import summary_beside
from harness.base.documents import read_or_leave_out
from harness.base.errors import UserError
from harness.base.sections import Section
from harness.documents.trace import OperatorAnalysis
from harness.ranks.failures import explain_error

# A folder with one of these is a run; with one of the first, one that was profiled.
ANALYSES, DOCUMENTS = {"operator_analysis.json"}, {"performance_summary.json"}
NO_RUNS = re.compile(
    r"\..*|tests?|venv|node_modules|site-packages|__pycache__|pytest-.*"
)  # names of folders
READING = threading.Lock()  # one trace at a time: a large one takes gigabytes
PROGRESS: dict[str, str | float] = {}  # file and share of it, of the trace that is being read
Stamp = tuple[Path, int]  # a file and when it was changed, until when it is kept what was read


# ---- What is in the log directory ----------------------------------------------------------------


def runs_in(logdir: Path) -> list[tuple[bool, float, str]]:
    """Folders with a run or a trace below the log directory: whether there is a trace, when it or
    the run was written, and the folder relative to the log directory.  Folders of tests and of
    installed packages are left out."""
    found = []
    for place, folders, files in os.walk(logdir):
        folders[:] = [name for name in folders if not NO_RUNS.fullmatch(name)]
        paths = [Path(place) / name for name in files]
        traces = [path for path in paths if path.name in ANALYSES or is_trace(path)]
        if of_run := traces or [path for path in paths if path.name in DOCUMENTS]:
            found.append(
                (
                    bool(traces),
                    max(path.stat().st_mtime for path in of_run),
                    os.path.relpath(place, logdir),
                )
            )
    return found


def is_trace(path: Path) -> bool:
    return may_be_trace(path.name) and looks_like_trace(stamp(path))


@cache
def looks_like_trace(of: Stamp) -> bool:
    return begins_as_trace(of[0])


def traces_in(folder: Path) -> list[Path]:
    return recordings([path for path in folder.iterdir() if is_trace(path)])


def analyses_in(folder: Path, left_out: list[str]) -> dict[str, dict]:
    """The documents of traces in a folder, by the name of the trace; left_out takes why others
    cannot be read."""
    found: dict[str, dict] = {}
    for file in sorted(folder.glob("operator_analysis*.json")):
        document = read_or_leave_out(file, OperatorAnalysis, left_out)
        if document:
            found.setdefault(document["trace"], document)  # of a file of several ranks, the first
    return found


# ---- Reading traces ------------------------------------------------------------------------------


def stamp(path: Path) -> Stamp:
    return path, path.stat().st_mtime_ns


def note_progress(path: Path, share: float) -> None:
    PROGRESS.update(file=path.name, share=share)


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Afterwards nothing is being read, whether it could be read or not."""
    try:
        yield
    finally:
        PROGRESS.clear()


@lru_cache(maxsize=1)
def timeline_of_file(of: Stamp) -> Timeline:
    with reading():
        trace = read_trace(of[0], watch=note_progress)
    return timeline_of(trace, summary_beside(trace.path))


@lru_cache(maxsize=16)
def analysis_of(of: Stamp, alone: bool) -> dict:
    """alone: no other trace lies beside it, which would be those of the other ranks."""
    timeline = timeline_of_file(of)
    document = operator_analysis(timeline)
    note_missing_ranks(
        document["integrity"],
        {timeline.trace.rank} if alone else range(timeline.trace.world_size or 1),
    )
    return document


@lru_cache(maxsize=4)
def analyses_of(of: tuple[Stamp, ...]) -> tuple[list[tuple[str, dict]], list[str]]:
    """All ranks of a run: (trace, document with their comparison), and why others were not read."""
    with reading():
        analyses, refused = analyze_all([path for path, _ in of], reading={"watch": note_progress})
    return [(path.name, analysis) for path, analysis in analyses], list(map(str, refused))


# ---- Answers -------------------------------------------------------------------------------------


class Tab:
    """What the tab asks for.  `run` and `trace` are names in a log directory:
    no path leads out of it."""

    def __init__(self, logdir: Path):
        self.logdir = logdir

    def runs(self) -> dict:
        """Those with a trace first, of them the newest; the log directory itself by its name."""
        names = [run for _, _, run in sorted(runs_in(self.logdir), reverse=True)]
        runs = [
            {"run": run, "name": self.logdir.resolve().name if run == "." else run} for run in names
        ]
        return {"runs": runs, "logdir": str(self.logdir)}

    def folder(self, run: str) -> Path:
        folder = self.logdir / run
        if Path(run).is_absolute() or ".." in Path(run).parts or not folder.is_dir():
            raise UserError(f"{run}: no such run in {self.logdir}")
        return folder

    def analysis(
        self, folder: Path, trace: str = "", left_out: list[str] | None = None
    ) -> tuple[str, dict] | None:
        """The document of a trace, by default of the first; a trace without one that can be read is
        read itself.

        left_out takes why documents cannot be read."""
        written = analyses_in(folder, [] if left_out is None else left_out)
        files = {path.name: path for path in traces_in(folder)}
        name = trace or next(iter([*written, *files]), None)
        if name is None:
            return None
        if name in written:
            return name, written[name]
        if name not in files:
            raise UserError(f"{name}: no such trace in {folder}")
        with READING:
            return name, analysis_of(stamp(files[name]), alone=len(files) == 1)

    def page(self, run: str, trace: str = "", ranks: str = "") -> dict:
        """The sections of a run for one of its traces.
        ranks: all of its traces are read, and compared."""
        folder, left_out = self.folder(run), []
        files, documents = traces_in(folder), documents_in(folder, left_out)
        if ranks:
            with READING:
                analyses, refused = analyses_of(tuple(map(stamp, files)))
            analyses = sorted(
                analyses, key=lambda one: one[0] != trace
            )  # the one that was chosen comes first
        else:
            found, refused = self.analysis(folder, trace, left_out), []
            analyses = [found] if found else []
        if not analyses and not documents["summary"]:
            raise UserError(
                "; ".join([*refused, *left_out]) or f"{run}: has neither a trace nor a run in it"
            )
        name, analysis = analyses[0] if analyses else (None, None)
        drawn, names = charts(analysis, documents), [file.name for file in files]
        sections = sections_of(analysis, analyses[1:], documents)
        first, shown = (
            first_screen(analysis, documents),
            [*drawn, *(["step_timeline"] if analysis else [])],
        )
        return {
            "html": fill_template("body.html", first, sections, charts=shown, findable=FINDABLE),
            "charts": drawn,
            "step": step_of_document(analysis["step_timeline"])
            if analysis and name not in names
            else None,
            "trace": name,
            "not_read": [*refused, *left_out],
            "traces": list(dict.fromkeys([*names, *analyses_in(folder, left_out)])),
            "ranks_to_read": ranks_to_read(files, analysis),
        }

    def progress(self) -> dict:
        """Which file is being read, and what share of it has been."""
        return PROGRESS

    def timeline(self, run: str, trace: str, step: str = "", window: str = "") -> dict:
        """The events of a step; window: 'first,last' in ms since it began."""
        path = next((path for path in traces_in(self.folder(run)) if path.name == trace), None)
        if path is None:
            raise UserError(f"{trace}: no such trace in {run}")
        with READING:
            timeline = timeline_of_file(stamp(path))
        first_last = tuple(map(float, window.split(","))) if window else None
        return zoomed_step(timeline, int(step) if step else None, first_last)

    def compared(self, run: str, trace: str = "") -> ComparedRun:
        """A run, or what is known of one by its trace alone."""
        folder, left_out = self.folder(run), []
        _, analysis = self.analysis(folder, trace, left_out) or (None, None)
        summary, flops = summary_and_flops(folder, left_out)
        if summary is None and analysis is None:
            raise UserError("; ".join(left_out) or f"{run}: has neither a trace nor a run in it")
        return ComparedRun(
            folder, run, summary or summary_of_trace(analysis), analysis, flops, left_out
        )

    def compare(self, run: str, trace: str, other: str) -> dict:
        """Two runs side by side: which is faster, and what takes how long in each."""
        comparison = compare_read([self.compared(run, trace), self.compared(other)]).as_json()
        rows, drawn = comparison["components"] or comparison["classes"], {}
        sections = [*comparison_section(comparison).parts]
        if rows:
            kind = PART_KINDS["components" if comparison["components"] else "classes"]
            drawn["comparison"] = comparison_chart(rows, kind, (run, other))
            sections.insert(
                0, Section("What the parts of both take", note=["ms"], figure="comparison")
            )
        html = fill_template(
            "body.html", first_of_comparison(comparison), sections, charts=[*drawn]
        )
        return {"html": html, "charts": drawn}


def ranks_to_read(files: list[Path], analysis: dict | None) -> int:
    """How many ranks a comparison would read: 0 where the traces are not known to be
    those of one run."""
    if not analysis or "ranks" in analysis:
        return 0
    trust = analysis["integrity"]
    ranks = max(len(files), len(trust["ranks_in_file"]))
    return ranks if 1 < ranks <= (trust["world_size"] or len(trust["ranks_in_file"])) else 0


def answer_request(tab: Tab, request: dict) -> dict:
    try:
        return getattr(tab, request["route"])(**request["parameters"])
    except Exception as error:  # noqa: BLE001
        return {"error": explain_error(error)[0]}


def main(logdir: str) -> None:
    tab, out, writing = Tab(Path(logdir)), sys.stdout, threading.Lock()
    sys.stdout = sys.stderr  # what a library prints is no answer

    def reply(request: dict) -> None:
        text = json.dumps(answer_request(tab, request))
        with writing:
            print(request["id"], text, file=out, flush=True)

    with ThreadPoolExecutor() as pool:
        for line in sys.stdin:
            pool.submit(reply, json.loads(line))
        os._exit(0)  # TensorBoard has ended: nobody waits for a trace that is being read


if __name__ == "__main__":
    main(sys.argv[1])
