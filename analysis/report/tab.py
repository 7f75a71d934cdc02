"""Answers for the tab in TensorBoard, as a process of its own that TensorBoard never waits for.

python3 -m analysis.report.tab LOGDIR reads requests from standard input and writes the answers, a line of JSON each,
in any order.  Several log directories are given as NAME LOGDIR NAME LOGDIR ..., and their runs begin with these names.
It ends when its input does, and writes nothing to the folders that it reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from pathlib import Path

from analysis.attribution.components import attribute
from analysis.attribution.graph_replays import with_replayed_operators
from analysis.comparison.parts import PART_KINDS, compare_profiles
from analysis.comparison.text import change_sections
from analysis.diagnosis.document import operator_analysis
from analysis.diagnosis.traces import analyze_all, note_missing_ranks
from analysis.report.charts import charts, comparison_chart
from analysis.report.sections import comparison_page, documents_in, page
from analysis.report.step_zoom import zoomed_step
from analysis.trace.links import AttributedLinks, link
from analysis.trace.readers.formats import begins_as_trace, in_order_of_ranks, may_be_trace
from analysis.trace.tables import read_trace
from analysis.trust.integrity import summary_beside
from harness.base.documents import read_document
from harness.base.errors import UserError
from harness.ranks.failures import explain_error

TOP = 200  # rows of the long tables
DOCUMENTS = {"performance_summary.json", "operator_analysis.json"}  # a folder with one of these is a run
READING = threading.Lock()  # one trace at a time: a large one takes gigabytes
PROGRESS: dict[str, str | float] = {}  # file and share of it, of the trace that is being read
Stamp = tuple[Path, int]  # a file and when it was changed, until when it is kept what was read


# ---- What is in the log directory ----------------------------------------------------------------------------------


def runs_in(logdir: Path) -> list[str]:
    """Folders with a run or a trace below the log directory, relative to it."""
    found = []
    for place, folders, files in os.walk(logdir):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        folder = Path(place)
        if not DOCUMENTS.isdisjoint(files) or any(is_trace(folder / name) for name in files):
            found.append(str(folder.relative_to(logdir)))
    return found


def is_trace(path: Path) -> bool:
    return may_be_trace(path.name) and looks_like_trace(stamp(path))


@cache
def looks_like_trace(of: Stamp) -> bool:
    return begins_as_trace(of[0])


def traces_in(folder: Path) -> list[Path]:
    return in_order_of_ranks([path for path in folder.iterdir() if is_trace(path)])


def analyses_in(folder: Path) -> dict[str, dict]:
    """The documents of traces in a folder, by the name of the trace."""
    found = map(read_document, sorted(folder.glob("operator_analysis*.json")))
    return {document["trace"]: document for document in found if document}


# ---- Reading traces ------------------------------------------------------------------------------------------------


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
def links_of(of: Stamp) -> AttributedLinks:
    with reading():
        trace = read_trace(of[0], watch=note_progress)
    return attribute(link(with_replayed_operators(trace)))


@lru_cache(maxsize=16)
def analysis_of(of: Stamp, alone: bool) -> dict:
    """alone: no other trace lies beside it, which would be those of the other ranks."""
    links = links_of(of)
    document = operator_analysis(links, summary_beside(of[0]))
    note_missing_ranks(document["integrity"], {links.trace.rank} if alone else range(links.trace.world_size or 1))
    return document


@lru_cache(maxsize=4)
def analyses_of(of: tuple[Stamp, ...]) -> tuple[list[tuple[str, dict]], list[str]]:
    """All ranks of a run: (trace, document with their comparison), and why others were not read."""
    with reading():
        analyses, refused = analyze_all([path for path, _ in of], reading={"watch": note_progress})
    return [(path.name, analysis) for path, analysis in analyses], list(map(str, refused))


# ---- Answers -------------------------------------------------------------------------------------------------------


class Tab:
    """What the tab asks for.  `run` and `trace` are names in a log directory: no path leads out of it."""

    def __init__(self, *logdirs: tuple[str, Path]):
        """logdirs: names, which begin those of their runs, and folders; the name may be empty."""
        self.logdirs = logdirs

    def runs(self) -> dict:
        runs = [os.path.normpath(os.path.join(name, run)) for name, logdir in self.logdirs for run in runs_in(logdir)]
        return {"runs": runs, "logdir": self.places}

    @property
    def places(self) -> str:
        return ", ".join(str(logdir) for _, logdir in self.logdirs)

    def folder(self, run: str) -> Path:
        for name, logdir in self.logdirs:
            if Path(run).is_relative_to(name) and ".." not in Path(run).parts:
                folder = logdir / Path(run).relative_to(name)
                if folder.is_dir():
                    return folder
        raise UserError(f"{run}: no such run in {self.places}")

    def analysis(self, folder: Path, trace: str = "") -> tuple[str, dict] | None:
        """The document of a trace, by default of the first; a trace without one is read."""
        written, files = analyses_in(folder), {path.name: path for path in traces_in(folder)}
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
        """The sections of a run for one of its traces.  ranks: all of its traces are read, and compared."""
        folder = self.folder(run)
        files, documents = traces_in(folder), documents_in(folder)
        if ranks:
            with READING:
                analyses, refused = analyses_of(tuple(map(stamp, files)))
            analyses = sorted(analyses, key=lambda one: one[0] != trace)  # the one that was chosen comes first
        else:
            found, refused = self.analysis(folder, trace), []
            analyses = [found] if found else []
        name, analysis = analyses[0] if analyses else (None, None)
        drawn, names = charts(analysis, documents), [file.name for file in files]
        n_ranks = max(len(files), len(analysis["integrity"]["ranks_in_file"]) if analysis else 0)
        shown = [*drawn, "step_timeline"] if name in names else [*drawn]
        return {
            "html": page("report_sections.html", analyses, documents, charts=shown, top=TOP),
            "charts": drawn,
            "trace": name,
            "not_read": refused,
            "traces": list(dict.fromkeys([*names, *analyses_in(folder)])),
            "ranks_to_read": n_ranks if n_ranks > 1 and "ranks" not in (analysis or {}) else 0,
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
            links = links_of(stamp(path))
        first_last = tuple(map(float, window.split(","))) if window else None
        return zoomed_step(links, int(step) if step else None, first_last)

    def compare(self, run: str, trace: str, other: str) -> dict:
        """Two runs side by side: what takes how long in each."""
        before, after = self.analysis(self.folder(run), trace), self.analysis(self.folder(other))
        if not before or not after:
            raise UserError(f"{other if before else run}: the run has no trace")
        if before[1]["attribution"]["clock"] != after[1]["attribution"]["clock"]:
            raise UserError("one of the two was profiled on a GPU, the other on a CPU: they have no clock in common")
        changes = {"baseline": run, **compare_profiles(other, before[1], after[1], spread=0.0)}
        sections = [one for kind in PART_KINDS for one in change_sections(changes, kind, TOP)]
        kind = "components" if changes["components"] else "classes"
        return {
            "html": comparison_page(
                [(run, before[1]), (other, after[1])],
                {one.title: (one.columns, one.rows) for one in sections},
                changes.get("components_reason", ""),
            ),
            "charts": {"comparison": comparison_chart(changes[kind], PART_KINDS[kind], (run, other))},
        }


def answer_request(tab: Tab, request: dict) -> dict:
    try:
        return getattr(tab, request["route"])(**request["parameters"])
    except Exception as error:  # noqa: BLE001
        return {"error": explain_error(error)[0]}


def main(*arguments: str) -> None:
    names, logdirs = (arguments[::2], arguments[1::2]) if len(arguments) > 1 else ([""], arguments)
    tab, out, writing = Tab(*zip(names, map(Path, logdirs), strict=True)), sys.stdout, threading.Lock()
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
    main(*sys.argv[1:])
