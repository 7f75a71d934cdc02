"""What do traces say that are there already?  A file, or a folder of them, from any program."""

from __future__ import annotations

import re
from pathlib import Path

from analysis.profile import analyze_all, find_traces, profile_lines
from harness.console import say
from harness.errors import UserError
from harness.files import write_json


def analyze_existing(path: Path, output_dir: Path | None, report: bool, top: int, sort: str | None) -> None:
    """Print what a trace says, or each in a folder; in a folder, those that are none are named, and the rest is read.

    operator_analysis.json goes to output_dir, that of further traces to operator_analysis_<trace>.json; so does
    report.html, if asked for.  Without output_dir a report goes beside the traces, and without either nothing is
    written.
    """
    paths = find_traces(path) if path.is_dir() else [path]
    say(*([f"Reading {len(paths)} traces in {path}"] if len(paths) > 1 else []))
    analyses, refused = analyze_all(paths, progress=lambda file: say(f"  {file.name}") if len(paths) > 1 else None)
    if not analyses:
        raise refused[0] if len(refused) == 1 else UserError("; ".join(map(str, refused)))
    for _, analysis in analyses:
        say("", *profile_lines(analysis, top, sort))
    if refused:
        say("", "Not read:", *(f"  {error}" for error in refused))
    target = output_dir or (paths[0].parent if report else None)
    if target is None:
        return
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to folder {target}: {error.strerror}") from error
    names = [stem_of(file) for file, _ in analyses]
    written = []
    for i, (name, (_, analysis)) in enumerate(zip(names, analyses, strict=True)):
        name = f"{name}_{i}" if names.count(name) > 1 else name
        written.append(target / f"operator_analysis{f'_{name}' if i else ''}.json")
        write_json(written[-1], analysis | {"not_read": [str(error) for error in refused]})
    if report:
        from analysis.report import write_report

        run = path if path.is_dir() else path.parent
        named = [(file.name, analysis) for file, analysis in analyses]
        written += write_report(target, named, run)
    say("", "Files:", *(f"  {file}" for file in written))


def stem_of(file: Path) -> str:
    """'worker.17' of worker.17.pt.trace.json.gz"""
    return re.sub(r"(\.pt)?(\.trace)?\.json(\.gz)?$", "", file.name)
