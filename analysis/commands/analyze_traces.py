"""Analysis of existing traces, without training: a file or a folder of them, from any program."""

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from analysis.answers import analyze_all
from analysis.commands.memory_snapshots import (
    analyze_snapshots,
    before_read_on,
    check_no_snapshot_flags,
    documents_of,
    explain_snapshots,
    headline_lines,
    snapshots_in,
    write_snapshots,
)
from analysis.commands.reading_flags import ReadingAlone
from analysis.diagnosis.document import OperatorAnalysis
from analysis.diagnosis.sections import profile_lines
from analysis.diagnosis.text import profile_answer
from analysis.diagnosis.verdict import rule_section
from analysis.hardware.matching import described, rows_named
from analysis.memory.snapshot.analyzed import Analyzed
from analysis.trace.readers.formats import contains_traces, find_traces, left_out
from analysis.trace.shrink import check_slim, check_target, write_slim
from analysis.trace.timeline import DeviceFlags
from analysis.trust.beside import left_out_beside
from analysis.trust.missing_from_trace import missing_line
from harness.base.console import file_lines, say
from harness.base.documents import read_or_leave_out
from harness.base.errors import UserError
from harness.base.files import make_folder, write_json, written_whole
from harness.base.sections import as_text
from harness.base.tables import ANSWER_LINES, wrapped
from harness.base.text import read_on
from harness.schema import ABSENT

Analyses = list[tuple[Path, OperatorAnalysis]]  # traces, each with its answers

SLICES = (".csv", ".csv.gz", ".parquet")
SLICE_COLUMNS = "trace rank step start end us where state cause kind overlaps".split()
SLICE_COLUMNS += "phase component class category bound operator event".split()
PAGE = "docs/reading_a_profile.md"


class Read(NamedTuple):
    """What was read of a file, or of a folder."""

    analyses: Analyses
    snapshots: list[Analyzed]
    slices: list[pd.DataFrame] | None  # of each trace, where they are asked for
    refused: list[UserError]  # files that cannot be read
    unread: list[str]  # documents beside the traces that cannot be read, and why

    @property
    def of_one_run(self) -> bool:
        return bool(self.analyses[0][1].ranks)


def analyze_existing(
    path: Path,
    output_dir: Path | None,
    report: bool,
    top: int,
    sort: str | None,
    verbose: bool = False,
    asked: ReadingAlone | None = None,
) -> None:
    """Print what a trace or a memory snapshot, or each in a folder, shows, and name the files that
    cannot be read.

    With output_dir, writes operator_analysis.json there, those of further traces as
    operator_analysis_<trace>.json, and report.html if `report`.  With `report` alone, they are
    written beside the traces.

    Raises UserError if there is no trace; after all is written, if the only one is cut off.
    """
    asked = asked or ReadingAlone()
    snapshots = snapshots_in(path)
    if snapshots and not has_traces(path):
        explain_snapshots(path, snapshots, output_dir, report, top, verbose, asked)
        return
    if not snapshots:
        check_no_snapshot_flags(asked, path)
    check_targets(path, asked)
    flags = device_flags(asked)
    paths = traces_at(path)
    read = read_all(path, paths, snapshots, asked, flags)
    if verbose:
        print_tables(read, top, sort)
    elif asked.explain:
        print_rules(read.analyses)
    print_not_read([*read.refused, *read.unread])
    folder = output_dir or (paths[0].parent if report else None)
    files = []
    if folder:
        files = write_all(folder, path, read, reading_options(asked) if report else None)
        say("", *file_lines(files, verbose))
    try:
        write_tables_asked_for(path, read.slices, asked)
    finally:  # the answer needs none of these files
        memory = headline_lines(documents_of(read.snapshots))
        say("", *answer_of_traces(read.analyses, report_in(files), memory))
    if len(paths) == 1 and read.analyses[0][1].integrity.cut_off:
        raise UserError(f"{path}: truncated or damaged; only what comes before could be analyzed")


def has_traces(path: Path) -> bool:
    """Whether it is a folder with traces; a file is one where it is no snapshot."""
    return path.is_dir() and contains_traces(path)


def traces_at(path: Path) -> list[Path]:
    """The file, or the traces in the folder.  Raises UserError if it has none."""
    if not path.is_dir():
        return [path]
    paths = find_traces(path)
    if len(paths) > 1:
        say(f"Reading {len(paths)} traces in {path}")
    return paths


def print_not_read(lines: Sequence[object]) -> None:
    if lines:
        say("", "Not read:", *(f"  {line}" for line in lines))


def read_all(
    path: Path, paths: list[Path], snapshots: list[Path], asked: ReadingAlone, flags: DeviceFlags
) -> Read:
    """paths: of the traces.  snapshots: those beside them.  Raises UserError if no trace can be
    read."""
    slices: list[pd.DataFrame] | None = [] if asked.slices else None
    unread: list[str] = []
    predicted: dict[Path, list[dict]] = {}
    for folder in {file.parent for file in paths}:
        predicted.update(predicted_by_run(folder, unread))
    analyzed, not_snapshots = analyze_snapshots(snapshots, asked, unread)

    def others(captures: set[Path]) -> list[UserError]:
        no_traces = left_out(path, {*paths, *captures, *snapshots}) if path.is_dir() else []
        return [*no_traces, *not_snapshots]

    analyses, refused = analyze_all(
        paths,
        reading=reading_options(asked),
        slices=slices,
        others=others,
        flags=flags,
        predicted=predicted,
    )
    if not analyses:
        raise refused[0] if len(refused) == 1 else UserError("; ".join(map(str, refused)))
    for file, _ in analyses:
        unread += [line for line in left_out_beside(file) if line not in unread]
    return Read(analyses, analyzed, slices, refused, unread)


def reading_options(asked: ReadingAlone) -> dict:
    """As read_trace() takes them."""
    return {"window": asked.window, "steps_from": asked.steps_from}


def device_flags(asked: ReadingAlone) -> DeviceFlags:
    target = named = None
    if asked.target_device is not None:
        target = described(rows_named(asked.target_device)[0])
    if asked.device_name is not None:
        named = described(rows_named(asked.device_name, "--device-name")[0])
        named["given_by"] = "--device-name"
    return DeviceFlags(target, named, asked.peak)


def print_tables(read: Read, top: int, sort: str | None) -> None:
    """Of each trace; of the ranks of one run, of the first, which has their comparison."""
    shown, others = read.analyses, []
    if read.of_one_run:
        shown = read.analyses[:1]
        others = [(file.name, other) for file, other in read.analyses[1:]]
    for _, own in shown:
        say("", *profile_lines(own, top, sort, others))


def print_rules(analyses: Analyses) -> None:
    """The rules of each verdict; that of all ranks is explained once."""
    for _, own in analyses:
        if own.verdict.rank_judged in (ABSENT, own.integrity.rank):
            say(*as_text(rule_section(own.verdict)))


def write_all(folder: Path, path: Path, read: Read, reading: dict | None) -> list[Path]:
    """The documents and, where how the traces were read is given, the report; returns the files."""
    files = write_analyses(folder, read.analyses)
    files += write_snapshots(folder, read.snapshots)
    if reading is not None:
        from analysis.report.html import write_report
        from analysis.report.snapshot.page import beside_traces

        run = path if path.is_dir() else path.parent
        files += write_report(folder, read.analyses, run, reading, beside_traces(read.snapshots))
    return files


def write_tables_asked_for(
    path: Path, slices: list[pd.DataFrame] | None, asked: ReadingAlone
) -> None:
    """With --slices and --slim."""
    if asked.slices:
        say("", f"Slices: {asked.slices}, {write_slices(asked.slices, slices):,} rows")
    if asked.slim:
        written = write_slim(path, asked.slim, asked.shortest, reading_options(asked))
        say("", *wrapped([written]))


def check_targets(path: Path, asked: ReadingAlone) -> None:
    """Raise UserError if what --slim or --slices ask for cannot be written."""
    if asked.slim or asked.shortest:
        check_slim(path, asked.slim, asked.shortest)
    if asked.slices:
        check_slices(path, asked.slices)


def check_slices(source: Path, target: Path) -> None:
    """Raise UserError if this cannot be written."""
    check_target("--slices", source, target)
    if not target.name.endswith(SLICES):
        raise UserError(f"--slices {target}: a table is named *{', *'.join(SLICES)}", 2)
    if target.suffix == ".parquet" and not any(map(find_spec, ("pyarrow", "fastparquet"))):
        raise UserError(
            f"--slices {target}: parquet needs the package pyarrow or fastparquet; *.csv needs"
            " neither",
            2,
        )


def write_slices(target: Path, tables: list[pd.DataFrame]) -> int:
    """Write the slices of all traces as one table; returns its rows."""
    table = pd.concat(tables, ignore_index=True)[SLICE_COLUMNS]
    with written_whole(target) as file:
        if target.suffix == ".parquet":
            table.to_parquet(file, index=False)
        else:
            compression = "gzip" if target.suffix == ".gz" else None
            table.to_csv(file, index=False, float_format="%.6f", compression=compression)
    return len(table)


def missing_from(path: str | Path) -> list[str]:
    """What a trace, or the traces of a folder, were recorded without: a line each, with what that
    costs the analysis and how to record it.  Raises UserError if one of them is no trace.

    `print(*missing_from("traces"), sep="\\n")`
    """
    path = Path(path)
    paths = find_traces(path) if path.is_dir() else [path]
    analyses, refused = analyze_all(paths)
    if refused:
        raise refused[0]
    lines: dict[str, None] = {}
    for _, own in analyses:
        for row in own.integrity.not_recorded:
            lines[missing_line(row)] = None
    return list(lines)


def predicted_by_run(folder: Path, unread: list[str]) -> dict[Path, list[dict]]:
    """The collectives that a run predicted for itself, as analyze_all() takes them, from its own
    operator_analysis.json in the folder of its traces.

    unread takes why it cannot be read: the traces are read all the same."""
    file = folder / "operator_analysis.json"
    earlier = read_or_leave_out(file, OperatorAnalysis, unread, ("trace", "communication"))
    if not earlier or not earlier["communication"]:
        return {}
    predicted = []
    for row in earlier["communication"]["predicted"] or []:
        of_run = {"kind": row["kind"], "group_size": row["group_size"]}
        of_run["calls"], of_run["bytes"] = row["predicted_calls"], row["predicted_bytes"]
        predicted.append(of_run)
    return {folder / earlier["trace"]: predicted}


def answer_of_traces(
    analyses: Analyses, report: Path | None, memory: Sequence[str] = ()
) -> list[str]:
    """The answer of a single trace, or of the first of several, which is that of rank 0.

    memory: lines about memory snapshots beside them."""
    (_, own), *others = analyses
    where = read_on(report or "--generate-report writes the report", PAGE)
    if others and own.verdict.rank_judged is ABSENT:
        where = f"{whose_figures(analyses)}; {where}"
    named = [(file.name, other) for file, other in others]
    limit = ANSWER_LINES - len(memory)
    return before_read_on(profile_answer(own, where, limit, named), memory)


def whose_figures(analyses: Analyses) -> str:
    """Which of several traces, or of the ranks in a file, the answer is about."""
    first, own = analyses[0]
    rank = own.integrity.rank
    shown = first.name if rank is None else f"rank {rank}, {first.name}"
    if all(file == first for file, _ in analyses):
        return f"the figures are of {shown}, which has {len(analyses)} ranks"
    return f"the figures are of {shown}, one of {len(analyses)} traces"


def report_in(files: list[Path]) -> Path | None:
    return next((file for file in files if file.name == "report.html"), None)


def write_analyses(target: Path, analyses: Analyses) -> list[Path]:
    """operator_analysis.json of the first trace, operator_analysis_<trace>.json of others."""
    make_folder(target)
    # 'worker.17' of worker.17.pt.trace.json.gz
    names = [re.sub(r"(\.pt)?(\.trace)?\.json(\.gz)?$", "", file.name) for file, _ in analyses]
    files = []
    for i, (name, (_, own)) in enumerate(zip(names, analyses, strict=True)):
        suffix = f"_{name}_{i}" if names.count(name) > 1 else f"_{name}"
        files.append(target / f"operator_analysis{suffix if i else ''}.json")
        write_json(files[-1], own)
    return files
