"""Which files are traces, by their names and contents, and what reads each of them?"""

from __future__ import annotations

import contextlib
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
PROFILES = "pytorch_profiles"  # the folder of traces in that of a run of ours
SIGNS = (b'"traceEvents"', b'"schemaVersion"', b'"ph"')  # one of these is among the first BEGIN bytes of a Chrome trace
BEGIN = 1 << 16
GZIP = b"\x1f\x8b"
SQLITE = rb"SQLite format 3\0"  # how such a file begins
AS_JSON = "a trace is JSON, as torch.profiler exports it"
# Files of other profilers: patterns of the name's end and of the content's beginning, what it is, what is read instead.
NOT_READ = (
    (r"\.rpd", SQLITE, "a database of rocmProfileData", AS_JSON),
    (r"\.db", SQLITE, "a database as rocprofv3 writes it (rocpd)", AS_JSON),
    (r"\.sqlite", SQLITE, "an SQLite database as nsys exports it", AS_JSON),
    (r"", SQLITE, "an SQLite database", AS_JSON),
    (r"\.(nsys-rep|qdrep)", b"", "a report of Nsight Systems", AS_JSON),
    (r"\.ncu-rep", b"", "a report of Nsight Compute, with counters of single kernels", AS_JSON),
    (r"\.xplane\.pb", b"", "a profile of XLA (JAX, TensorFlow)", AS_JSON),
    (r"\.(pftrace|perfetto-trace)", b"", "a binary trace of Perfetto", AS_JSON),
    (r"", rb'\s*\{\s*"rocprofiler-sdk-tool"', "JSON of rocprofv3 and no trace", AS_JSON),
    (r"\.csv", rb'"?(Kind|Domain|Index|Name)"?,', "a table as rocprof writes it", AS_JSON),
    (r"", rb"\x80[\x02-\x05]", "a pickle, such as a memory snapshot", "pytorch.org/memory_viz shows snapshots"),
    (r"", rb"PK\x03\x04|\x28\xb5\x2f\xfd|BZh\d1AY|\xfd7zXZ", "compressed in another way than gzip", "unpack it"),
)


def reader_of(path: Path, watch: OnProgress | None = None, rank: int | None = None) -> Reader:
    """What reads the file.  Raises UserError, naming it, for one of a format that is not read."""
    from analysis.trace.readers.chrome import ChromeTrace  # names of files are asked for without what reads them

    if why := why_not_read(path):
        raise UserError(why)
    return ChromeTrace(path, watch, rank)


def why_not_read(path: Path) -> str | None:
    """What the file is and what is read instead, where another profiler wrote it; None where it may be a trace."""
    begin = beginning(path, BEGIN)
    if begin.startswith(GZIP):
        with contextlib.suppress(UserError):  # damaged: reading it says so
            begin = beginning(path, BEGIN, gzip.open)
    rows = ((re.search(rf"({end})$", path.name) and re.match(start, begin), *told) for end, start, *told in NOT_READ)
    return next((f"{path}: {what}, which is not read; {instead}" for found, what, instead in rows if found), None)


def left_out(folder: Path) -> list[UserError]:
    """What else in a folder looks like a profile, and why it is not read: files of others, and folders with traces."""
    why = []
    for one in sorted(folder.iterdir()):
        if one.is_file() and not (may_be_trace(one.name) or is_of_ours_but_no_trace(one.name)):
            with contextlib.suppress(UserError):  # not readable, and asked for by nobody
                why.append(why_not_read(one))
        elif one.name != PROFILES and any(may_be_trace(file.name) for file in one.glob("*.json*")):
            why.append(f"{one}: a folder with files that may be traces; name it to read them")
    return [UserError(one) for one in why if one]


def find_traces(folder: Path) -> list[Path]:
    """Files in a folder that may be traces, in the order of ranks; in its pytorch_profiles/ if it has none itself."""
    for place in (folder, folder / PROFILES):
        if found := [file for file in place.iterdir() if may_be_trace(file.name)] if place.is_dir() else []:
            return in_order_of_ranks(found)
    endings = " or ".join(f"*{ending}" for ending in ENDINGS)
    others = "".join(f"; {why}" for why in left_out(folder))
    raise UserError(f"{folder}: the folder has no trace (no {endings} file that may be one){others}")


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
