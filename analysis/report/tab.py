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
from typing import NamedTuple

from analysis.answers import analyze_all, answers
from analysis.compare.document import compare_read
from analysis.compare.runs import ComparedRun, profile_of, summary_and_flops, summary_of_trace
from analysis.compare.text import comparison_section, with_short_names
from analysis.diagnosis.document import OperatorAnalysis, read_answers
from analysis.limits.timeline import timeline_of
from analysis.report.charts import STEP_TIMELINE, charts_of, step_of_document
from analysis.report.figures.pictures import comparison_picture, figures_of
from analysis.report.page import (
    ALL_FINDABLE,
    PARTS_FINDABLE,
    Documents,
    documents_in,
    fill_template,
    first_of_comparison,
    first_screen,
    page_title,
    sections_of,
)
from analysis.report.step_zoom import zoomed_step
from analysis.trace.readers.formats import begins_as_trace, may_be_trace, recordings
from analysis.trace.tables import read_trace
from analysis.trace.timeline import Timeline
from analysis.trust.beside import summary_beside
from harness import PROJECT
from harness.base.errors import UserError
from harness.ranks.failures import explain_error

# A folder with one of these is a run; with one of the first, one that was profiled.
ANALYSES, DOCUMENTS = {"operator_analysis.json"}, {"performance_summary.json"}
# Names of folders without runs of the user's, and the folders of this project that store traces.
NO_RUNS = re.compile(r"\..*|tests?|venv|node_modules|site-packages|__pycache__|pytest-.*")
STORED = [PROJECT / name for name in ("benchmarks", "exercises", "tests")]
READING = threading.Lock()  # one trace at a time: a large one takes gigabytes
PROGRESS: dict[str, str | float] = {}  # file and share of it, of the trace that is being read
Stamp = tuple[Path, int]  # a file and when it was changed, until when it is kept what was read


# ---- What is in the log directory ----------------------------------------------------------------


class FoundRun(NamedTuple):
    """A folder with a run or a trace; the newest of those with a trace are the greatest."""

    has_trace: bool
    written_at: float  # its newest trace, else its newest document
    name: str  # relative to the log directory


def runs_in(logdir: Path) -> list[FoundRun]:
    """Folders with a run or a trace in the log directory and below it.  Folders of tests, of
    installed packages and of what this project stores are left out."""
    runs = []
    for place, folders, files in os.walk(logdir):
        folder = Path(place)
        folders[:] = [name for name in folders if may_have_runs(folder / name)]
        run = run_of_files([folder / name for name in files], os.path.relpath(folder, logdir))
        if run:
            runs.append(run)
    return runs


def run_of_files(paths: list[Path], name: str) -> FoundRun | None:
    """The run that has these files, if they are those of one."""
    traces = [path for path in paths if path.name in ANALYSES or is_trace(path)]
    of_run = traces or [path for path in paths if path.name in DOCUMENTS]
    if not of_run:
        return None
    return FoundRun(bool(traces), max(path.stat().st_mtime for path in of_run), name)


def may_have_runs(folder: Path) -> bool:
    """Whether a folder below the log directory is looked into."""
    if NO_RUNS.fullmatch(folder.name):
        return False
    return folder.resolve() not in STORED


def is_trace(path: Path) -> bool:
    return may_be_trace(path.name) and looks_like_trace(stamp(path))


@cache
def looks_like_trace(of: Stamp) -> bool:
    return begins_as_trace(of[0])


def traces_in(folder: Path) -> list[Path]:
    return recordings([path for path in folder.iterdir() if is_trace(path)])


def analyses_in(folder: Path, left_out: list[str]) -> dict[str, OperatorAnalysis]:
    """The answers of traces in a folder that were written there, by the name of the trace; left_out
    takes why others cannot be read."""
    written: dict[str, OperatorAnalysis] = {}
    for file in sorted(folder.glob("operator_analysis*.json")):
        own = read_answers(file, left_out)
        if own:
            written.setdefault(own.trace, own)  # of a file of several ranks, the first
    return written


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
def analysis_of(of: Stamp, alone: bool) -> OperatorAnalysis:
    """alone: no other trace lies beside it, which would be those of the other ranks."""
    timeline = timeline_of_file(of)
    present = {timeline.trace.rank} if alone else range(timeline.trace.world_size or 1)
    return answers(timeline, present)


@lru_cache(maxsize=4)
def analyses_of(of: tuple[Stamp, ...]) -> tuple[list[tuple[str, OperatorAnalysis]], list[str]]:
    """All ranks of a run: (trace, answers with their comparison), and why others were not read."""
    with reading():
        analyses, refused = analyze_all([path for path, _ in of], reading={"watch": note_progress})
    return [(path.name, analysis) for path, analysis in analyses], list(map(str, refused))


class Analysis(NamedTuple):
    """What is shown of a trace."""

    trace: str | None  # its name
    own: OperatorAnalysis | None  # what it says


# ---- Answers -------------------------------------------------------------------------------------


class Tab:
    """What the tab asks for.  `run` and `trace` are names in a log directory:
    no path leads out of it."""

    def __init__(self, logdir: Path):
        self.logdir = logdir

    def runs(self) -> dict:
        """Those with a trace first, of them the newest; the log directory itself by its name."""
        runs = []
        for run in sorted(runs_in(self.logdir), reverse=True):
            name = self.logdir.resolve().name if run.name == "." else run.name
            runs.append({"run": run.name, "name": name})
        return {"runs": runs, "logdir": str(self.logdir)}

    def folder(self, run: str) -> Path:
        folder = self.logdir / run
        if Path(run).is_absolute() or ".." in Path(run).parts or not folder.is_dir():
            raise UserError(f"{run}: no such run in {self.logdir}")
        return folder

    def analysis(self, folder: Path, trace: str, left_out: list[str]) -> Analysis | None:
        """A trace with its answers, by default the first; one of which none that can be read were
        written is read itself.

        left_out takes why documents cannot be read."""
        written = analyses_in(folder, left_out)
        files = {path.name: path for path in traces_in(folder)}
        name = trace or next(iter([*written, *files]), None)
        if name is None:
            return None
        if name in written:
            return Analysis(name, written[name])
        if name not in files:
            raise UserError(f"{name}: no such trace in {folder}")
        with READING:
            return Analysis(name, analysis_of(stamp(files[name]), alone=len(files) == 1))

    def page(self, run: str, trace: str = "", ranks: str = "") -> dict:
        """The sections of a run for one of its traces.
        ranks: all of its traces are read, and compared."""
        folder, left_out, others = self.folder(run), [], []
        files, documents = traces_in(folder), documents_in(folder, left_out)
        if ranks:
            shown, *others = self.all_ranks(files, trace, left_out) or [None]
        else:
            shown = self.analysis(folder, trace, left_out)
        if not shown and not documents["summary"]:
            raise UserError("; ".join(left_out) or f"{run}: has neither a trace nor a run in it")
        shown, names = shown or Analysis(None, None), [file.name for file in files]
        answer = page_of(shown, others, documents, has_trace=shown.trace in names)
        answer["not_read"] = left_out
        answer["traces"] = list(dict.fromkeys([*names, *analyses_in(folder, [])]))
        answer["ranks_to_read"] = ranks_to_read(files, shown.own)
        return answer

    def all_ranks(self, files: list[Path], trace: str, left_out: list[str]) -> list[Analysis]:
        """The traces of a run, read and compared, the one that was chosen first; left_out takes why
        others cannot be read."""
        with READING:
            analyses, refused = analyses_of(tuple(map(stamp, files)))
            left_out += refused
            read = [Analysis(name, own) for name, own in analyses]
            read.sort(key=lambda analysis: analysis.trace != trace)
        return read

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
        shown = self.analysis(folder, trace, left_out)
        summary, flops = summary_and_flops(folder, left_out)
        if summary is None and shown is None:
            raise UserError("; ".join(left_out) or f"{run}: has neither a trace nor a run in it")
        profile = profile_of(shown.own.as_json()) if shown else None
        return ComparedRun(
            folder, run, summary or summary_of_trace(profile), profile, flops, left_out
        )

    def compare(self, run: str, trace: str, other: str) -> dict:
        """Two runs side by side: which is faster, and what takes how long in each."""
        comparison = compare_read([self.compared(run, trace), self.compared(other)])
        html = fill_template(
            "body.html",
            first_of_comparison(comparison),
            comparison_section(comparison).parts,
            figures={"comparison": comparison_picture(with_short_names(comparison))},
        )
        return {"html": html, "charts": {}}


def page_of(
    shown: Analysis, others: list[Analysis], documents: Documents, *, has_trace: bool
) -> dict:
    """The page of a run, what its script draws, and the parts of a step where there is no trace
    whose events the script could ask for."""
    trace, own = shown
    charts = charts_of(own)
    step, findable = None, ALL_FINDABLE
    if own and not has_trace:
        step, findable = step_of_document(own.step_timeline), PARTS_FINDABLE
    title = page_title(own, documents)
    html = fill_template(
        "body.html",
        first_screen(own, documents),
        sections_of(own, [(other.trace, other.own) for other in others], documents),
        figures=figures_of(own, documents, title),
        charts=[*charts, STEP_TIMELINE] if own else [*charts],
        findable=findable,
    )
    return {"html": html, "charts": charts, "step": step, "trace": trace}


def ranks_to_read(files: list[Path], own: OperatorAnalysis | None) -> int:
    """How many ranks a comparison would read: 0 where the traces are not known to be
    those of one run."""
    if not own or own.ranks:
        return 0
    trust = own.integrity
    ranks = max(len(files), len(trust.ranks_in_file))
    return ranks if 1 < ranks <= (trust.world_size or len(trust.ranks_in_file)) else 0


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
