"""Which files are traces, by their names and contents, and what reads each of them?"""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from harness.base.errors import UserError
from harness.base.files import is_of_ours_but_no_trace, named_errors

if TYPE_CHECKING:
    from analysis.trace.columns import OnProgress, Reader

ENDINGS = (".json", ".json.gz")  # of the names of traces
SIGNS = (b'"traceEvents"', b'"schemaVersion"', b'"ph"')  # one of these is among the first BEGIN bytes of a Chrome trace
BEGIN = 1 << 16
SQLITE = b"SQLite format 3\0"  # how such a file begins


def reader_of(path: Path, watch: OnProgress | None = None, rank: int | None = None) -> Reader:
    """What reads the file.  Raises UserError, naming it, for one of a format that is not read."""
    from analysis.trace.readers.chrome import ChromeTrace  # names of files are asked for without what reads them

    if beginning(path, len(SQLITE)) == SQLITE:
        raise UserError(f"{path}: an SQLite database, which is not read; a trace is JSON, as torch.profiler exports it")
    return ChromeTrace(path, watch, rank)


def find_traces(folder: Path) -> list[Path]:
    """Files in a folder that may be traces, in the order of ranks; in its pytorch_profiles/ if it has none itself."""
    for place in (folder, folder / "pytorch_profiles"):
        found = [file for file in place.iterdir() if may_be_trace(file.name)] if place.is_dir() else []
        if found:
            return in_order_of_ranks(found)
    endings = " or ".join(f"*{ending}" for ending in ENDINGS)
    raise UserError(f"{folder}: the folder has no trace (no {endings} file that may be one)")


def in_order_of_ranks(files: list[Path]) -> list[Path]:
    """By name, with numbers as numbers: rank2 before rank10."""
    parts = {file: re.split(r"(\d+)", file.name) for file in sorted(files)}
    return sorted(parts, key=lambda file: [int(one) if one.isdigit() else one for one in parts[file]])


def may_be_trace(name: str) -> bool:
    """Whether a file of this name may be a trace."""
    return name.endswith(ENDINGS) and not is_of_ours_but_no_trace(name)


def begins_as_trace(path: Path) -> bool:
    """Whether JSON of any program looks like a trace.  A damaged file does, so that reading it says what is wrong."""
    try:
        begin = beginning(path, BEGIN, gzip.open if path.suffix == ".gz" else open)
    except UserError:
        return True
    return any(sign in begin for sign in SIGNS)


def beginning(path: Path, n: int, opened: Callable = open) -> bytes:
    with named_errors(path), opened(path, "rb") as file:
        return file.read(n)
