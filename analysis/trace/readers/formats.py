"""Which files are traces, by their names and contents, and what reads each of them?"""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from analysis.trace.readers.chrome_file import OnProgress, named_errors
from harness.base.errors import UserError
from harness.base.files import is_of_ours_but_no_trace

if TYPE_CHECKING:
    from analysis.trace.columns import Part

ENDINGS = (".json", ".json.gz")  # of the names of traces
SIGNS = (b'"traceEvents"', b'"schemaVersion"', b'"ph"')  # one of these is among the first BEGIN bytes of a Chrome trace
BEGIN = 1 << 16
OTHER_FORMATS = {b"SQLite format 3\0": "an SQLite database"}  # by how their files begin: these are not read


class Reader(Protocol):
    """A trace file.  What is known of all of it is complete after the last part."""

    metadata: dict  # everything in the file but its events, by the names that torch.profiler gives them
    cut_off: bool  # it ends before its document does, or is damaged from there on
    has_nan: bool  # it contains NaN or Infinity where its format has none
    n_frames: int  # frames of Python
    unread: Counter[str]  # events of devices in categories that are not known here, and how many
    ranks: set[int]  # whose events it contains, if they tell; of several, only those of `rank` are in its parts
    rank: int | None

    def parts(self, wanted: Callable[[str], bool] | None = None) -> Iterator[Part]:
        """Its events, some at a time; only those whose name is wanted.

        Raises UserError, naming the file, if there is no trace in it; of one that is cut off, yields what is whole."""

    def contains(self, text: str) -> bool:
        """Whether the text is anywhere in it.  Raises UserError if it cannot be read."""


def reader_of(path: Path, watch: OnProgress | None = None, rank: int | None = None) -> Reader:
    """What reads the file.  Raises UserError, naming it, for one of a format that is not read.

    watch: is told how far it is.  rank: of a file that was merged from the traces of several, the one to read, by
    default the first.
    """
    from analysis.trace.readers.chrome import ChromeTrace  # names of files are asked for without what reads them

    begin = beginning(path, max(map(len, OTHER_FORMATS)))
    if what := next((what for sign, what in OTHER_FORMATS.items() if begin.startswith(sign)), None):
        raise UserError(f"{path}: {what}, which is not read; a trace is JSON, as torch.profiler exports it")
    return ChromeTrace(path, watch, rank)


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
