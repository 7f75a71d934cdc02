"""Analysis of existing traces, without training: a file or a folder of them, from any program."""

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pandas as pd

from analysis.answers import analyze_all, with_prediction
from analysis.commands.memory_snapshots import (
    analyze_snapshots,
    before_read_on,
    check_no_snapshot_flags,
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
from analysis.trace.readers.formats import contains_traces, find_traces, left_out
from analysis.trace.shrink import check_slim, check_target, write_slim
from analysis.trace.timeline import DeviceFlags
from analysis.trust.beside import left_out_beside
from analysis.trust.missing_from_trace import MissingPart, missing_line
from harness.base.console import file_lines, say
from harness.base.documents import read_or_leave_out
from harness.base.errors import UserError
from harness.base.files import make_folder, write_json, written_whole
from harness.base.sections import as_text
from harness.base.tables import ANSWER_LINES, wrapped
from harness.base.text import read_on

SLICES = (".csv", ".csv.gz", ".parquet")
SLICE_COLUMNS = "trace rank step start end us where state cause kind overlaps".split()
SLICE_COLUMNS += "phase component class category bound operator event".split()
PAGE = "docs/reading_a_profile.md"


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
    if snapshots and not (path.is_dir() and contains_traces(path)):
        explain_snapshots(path, snapshots, output_dir, report, top, verbose, asked)
        return
    if not snapshots:
        check_no_snapshot_flags(asked, path)
    if asked.slim or asked.shortest:
        check_slim(path, asked.slim, asked.shortest)
    if asked.slices:
        check_slices(path, asked.slices)
    target = (
        described(rows_named(asked.target_device)[0]) if asked.target_device is not None else None
    )
    named = None
    if asked.device_name is not None:
        named = described(rows_named(asked.device_name, "--device-name")[0]) | {
            "given_by": "--device-name"
        }
    reading = {"window": asked.window, "steps_from": asked.steps_from}
    paths = find_traces(path) if path.is_dir() else [path]
    if len(paths) > 1:
        say(f"Reading {len(paths)} traces in {path}")
    tables: list[pd.DataFrame] | None = [] if asked.slices else None
    captures: set[Path] = set()
    flags = DeviceFlags(target, named, asked.peak)
    analyses, refused = analyze_all(
        paths, reading=reading, slices=tables, captures=captures, flags=flags
    )
    refused += left_out(path, {*paths, *captures, *snapshots}) if path.is_dir() else []
    analyzed_snapshots, not_snapshots = analyze_snapshots(snapshots, asked)
    refused += not_snapshots
    if not analyses:
        raise refused[0] if len(refused) == 1 else UserError("; ".join(map(str, refused)))
    unread: list[str] = []  # documents beside the traces
    analyses[0] = with_own_prediction(*analyses[0], unread)
    for file, _ in analyses:
        unread += [line for line in left_out_beside(file) if line not in unread]
    one_run = "ranks" in analyses[0][1]
    if verbose:
        for _, analysis in analyses[:1] if one_run else analyses:
            others = [(file.name, one) for file, one in analyses[1:] if one_run]
            say("", *profile_lines(analysis, top, sort, others))
    for _, analysis in analyses if asked.explain and not verbose else []:
        rank = analysis["integrity"]["rank"]
        if (
            analysis["verdict"].get("rank_judged", rank) == rank
        ):  # the verdict of all ranks is explained once
            say(*as_text(rule_section(analysis)))
    if refused or unread:
        say("", "Not read:", *(f"  {line}" for line in (*refused, *unread)))
    folder = output_dir or (paths[0].parent if report else None)
    files = []
    if folder:
        files = write_analyses(folder, analyses, refused)
        files += write_snapshots(folder, analyzed_snapshots)
        if report:
            from analysis.report.html import write_report
            from analysis.report.snapshot.page import beside_traces

            run = path if path.is_dir() else path.parent
            files += write_report(folder, analyses, run, reading, beside_traces(analyzed_snapshots))
        say("", *file_lines(files, verbose))
    try:
        if asked.slices:
            say("", f"Slices: {asked.slices}, {write_slices(asked.slices, tables):,} rows")
        if asked.slim:
            say("", *wrapped([write_slim(path, asked.slim, asked.shortest, reading)]))
    finally:  # the answer needs none of these files
        say("", *answer_of_traces(analyses, report_in(files), headline_lines(analyzed_snapshots)))
    if len(paths) == 1 and analyses[0][1]["integrity"]["cut_off"]:
        raise UserError(f"{path}: truncated or damaged; only what comes before could be analyzed")


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
    analyses, refused = analyze_all(find_traces(path) if path.is_dir() else [path])
    if refused:
        raise refused[0]
    lines: dict[str, None] = {}
    for _, analysis in analyses:
        for row in analysis["integrity"]["not_recorded"]:
            lines[missing_line(MissingPart.from_json(row))] = None
    return list(lines)


def with_own_prediction(path: Path, document: dict, unread: list[str]) -> tuple[Path, dict]:
    """A trace with the collectives that the run predicted for itself, from its own
    operator_analysis.json beside the trace.

    unread takes why it cannot be read: the trace is read all the same."""
    file = path.parent / "operator_analysis.json"
    earlier = read_or_leave_out(file, OperatorAnalysis, unread, ("trace", "communication"))
    if not earlier or earlier["trace"] != path.name or not earlier["communication"]:
        return path, document
    predicted = []
    for row in earlier["communication"]["predicted"] or []:
        of_run = {"kind": row["kind"], "group_size": row["group_size"]}
        of_run["calls"], of_run["bytes"] = row["predicted_calls"], row["predicted_bytes"]
        predicted.append(of_run)
    if not predicted:
        return path, document
    return path, with_prediction(OperatorAnalysis.from_json(document), predicted).as_json()


def answer_of_traces(
    analyses: list[tuple[Path, dict]], report: Path | None, memory: Sequence[str] = ()
) -> list[str]:
    """The answer of a single trace, or of the first of several, which is that of rank 0.

    memory: lines about memory snapshots beside them."""
    (_, analysis), *others = analyses
    where = read_on(report or "--generate-report writes the report", PAGE)
    if others and "rank_judged" not in analysis["verdict"]:
        where = f"{whose_figures(analyses)}; {where}"
    named = [(file.name, other) for file, other in others]
    limit = ANSWER_LINES - len(memory)
    return before_read_on(profile_answer(analysis, where, limit, named), memory)


def whose_figures(analyses: list[tuple[Path, dict]]) -> str:
    """Which of several traces, or of the ranks in a file, the answer is about."""
    first, analysis = analyses[0]
    rank = analysis["integrity"]["rank"]
    shown = first.name if rank is None else f"rank {rank}, {first.name}"
    if all(file == first for file, _ in analyses):
        return f"the figures are of {shown}, which has {len(analyses)} ranks"
    return f"the figures are of {shown}, one of {len(analyses)} traces"


def report_in(files: list[Path]) -> Path | None:
    return next((file for file in files if file.name == "report.html"), None)


def write_analyses(
    target: Path, analyses: list[tuple[Path, dict]], refused: list[UserError]
) -> list[Path]:
    make_folder(target)
    # 'worker.17' of worker.17.pt.trace.json.gz
    names = [re.sub(r"(\.pt)?(\.trace)?\.json(\.gz)?$", "", file.name) for file, _ in analyses]
    files = []
    for i, (name, (_, analysis)) in enumerate(zip(names, analyses, strict=True)):
        suffix = f"_{name}_{i}" if names.count(name) > 1 else f"_{name}"
        files.append(target / f"operator_analysis{suffix if i else ''}.json")
        write_json(files[-1], analysis | {"not_read": [str(error) for error in refused]})
    return files
