"""Which files are traces, by their names and contents, and what reads each of them?"""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import shutil
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from harness.base.errors import UserError
from harness.base.files import is_of_ours_but_no_trace, named_errors
from harness.base.text import read_ini

if TYPE_CHECKING:
    from analysis.trace.columns import OnProgress, Reader

SYSTEM = "system_profile"  # so begin the names of what run_system_profiler.sh leaves
PROFILES = "pytorch_profiles"  # the folder of traces in that of a run of ours
BEGIN = 1 << 16  # bytes of a file that tell what it is
GZIP = b"\x1f\x8b"
DEPTH = 4  # of folders below one that is named, in which traces are looked for
NAMED = 8  # folders with traces that are not read
LOOKED_AT = 20  # files of a folder, to see whether it has traces
NOT_READ = read_ini(Path(__file__).with_suffix(".ini"))


# ---- The formats ---------------------------------------------------------------------------------


class Format(NamedTuple):
    """A form of files with a trace, and what reads it."""

    reader: Callable[[Path], type[Reader]]
    endings: tuple[str, ...]  # of the names of files that may be one
    sign: bytes = b""  # pattern that is found in the first BEGIN bytes; empty: only its name tells
    named: str = ""  # pattern of names that tell enough
    program: str = ""  # that is needed to read it

    def is_of(self, path: Path, begin: bytes) -> bool:
        """Whether a file that begins so is one."""
        if self.program and not shutil.which(self.program):
            return False
        if self.named:
            return re.search(self.named, path.name) is not None
        return re.search(self.sign, self.content(begin)) is not None

    def content(self, begin: bytes) -> bytes:
        """The beginning of the content; files whose names may end with .gz may be compressed."""
        may_be_packed = any(ending.endswith(".gz") for ending in self.endings)
        return unpacked(begin) if may_be_packed else begin


# Readers are imported where a file is read: names of files are asked for without these.


def of_database(path: Path) -> type[Reader]:
    from analysis.trace.readers.databases import kind_of

    return kind_of(path)


def nsys_report(path: Path) -> type[Reader]:
    from analysis.trace.readers.databases import NsysReport

    return NsysReport


def rocprofv3_json(path: Path) -> type[Reader]:
    from analysis.trace.readers.rocprofv3 import Rocprofv3Json

    return Rocprofv3Json


def rocprofv3_csv(path: Path) -> type[Reader]:
    from analysis.trace.readers.rocprofv3 import Rocprofv3Csv

    return Rocprofv3Csv


def chrome(path: Path) -> type[Reader]:
    from analysis.trace.readers.chrome import ChromeTrace

    return ChromeTrace


# In the order in which they are asked.  Of one recording in several forms, the first is read.
OF_SYSTEM_PROFILERS = (
    Format(of_database, (".sqlite", "_results.db", ".db", ".rpd"), sign=rb"\ASQLite format 3\0"),
    Format(nsys_report, (".nsys-rep",), named=r"\.nsys-rep$", program="nsys"),
    Format(
        rocprofv3_json,
        ("_results.json", "_results.json.gz"),
        sign=rb'\A\s*\{\s*"rocprofiler-sdk-tool"',
    ),
    Format(
        rocprofv3_csv,
        ("_kernel_trace.csv",),
        sign=b"Start_Timestamp",
        named=(
            r"_((kernel|memory_copy|memory_allocation|hip_api|hsa_api|marker_api)_trace"
            r"|agent_info)\.csv$"
        ),
    ),
)
# What is read where no other is told.
CHROME = Format(chrome, (".json", ".json.gz"), sign=rb'"(traceEvents|schemaVersion|ph)"')
FORMATS = (CHROME, *OF_SYSTEM_PROFILERS)
ENDINGS = tuple(ending for form in FORMATS for ending in form.endings)


def reader_of(
    path: Path, watch: OnProgress | None = None, rank: int | None = None, every_rank: bool = False
) -> Reader:
    """What reads the file, by its content.  Raises UserError, naming it, for one of a format that
    is not read."""
    return format_of(path).reader(path)(path, watch, rank, every_rank)


def format_of(path: Path) -> Format:
    begin = beginning(path, BEGIN)
    for form in OF_SYSTEM_PROFILERS:
        if form.is_of(path, begin):
            return form
    why = why_not_read(path)
    if why:
        raise UserError(why)
    return CHROME


# ---- What is none of them ------------------------------------------------------------------------


def why_not_read(path: Path) -> str | None:
    """What the file is and what is read instead, where another profiler wrote it; None where it may
    be a trace."""
    begin = unpacked(beginning(path, BEGIN))
    for what in NOT_READ.sections():
        told = NOT_READ[what]
        if re.search(f"({told['name']})$", path.name) and re.match(told["begins"].encode(), begin):
            return f"{path}: {what}, which is not read; {told['instead']}"
    return None


def unpacked(begin: bytes) -> bytes:
    """The beginning of what is in a file that begins so; nothing where it is damaged, which reading
    it says."""
    if not begin.startswith(GZIP):
        return begin
    try:
        return zlib.decompressobj(wbits=31).decompress(begin, BEGIN)
    except zlib.error:
        return b""


def left_out(folder: Path, read: Collection[Path] = ()) -> list[UserError]:
    """What else in a folder looks like a profile, and why it is not read: files of others, and
    folders with traces.

    read: the files that were, also those beside the traces that told of their graphs.
    """
    reasons = []
    for file in folder.iterdir():
        if file.is_file() and file not in read and not has_known_name(file.name):
            with contextlib.suppress(UserError):  # not readable, and asked for by nobody
                reasons.append(why_not_read(file))
    read_folders = {file.parent.resolve() for file in read}
    others = [place for place in folders_with_traces(folder) if place.resolve() not in read_folders]
    for place in others[:NAMED]:
        reasons.append(f"{place}: a folder with files that may be traces; name it to read them")
    if len(others) > NAMED:
        reasons.append(
            f"{folder}: {len(others) - NAMED} more folders below it with files that may be traces"
        )
    return [UserError(reason) for reason in sorted(filter(None, reasons))]


def has_known_name(name: str) -> bool:
    """Whether it is that of a trace, or of another file of ours."""
    return may_be_trace(name) or is_of_ours_but_no_trace(name)


# ---- Files and folders ---------------------------------------------------------------------------


def folders_with_traces(folder: Path) -> list[Path]:
    """The folders below one that contain traces, by their names and beginnings; not those deeper
    than DEPTH."""
    folders = []
    for place, names, files in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        visible = sorted(name for name in names if not name.startswith("."))
        names[:] = visible if depth < DEPTH else []
        candidates = [Path(place, name) for name in sorted(files) if may_be_trace(name)]
        if depth > 0 and any(map(begins_as_trace, candidates[:LOOKED_AT])):
            folders.append(Path(place))
    return folders


def contains_traces(folder: Path) -> bool:
    """Whether find_traces() finds any."""
    for place in (folder, folder / PROFILES):
        if place.is_dir() and any(may_be_trace(file.name) for file in place.iterdir()):
            return True
    return False


def find_traces(folder: Path) -> list[Path]:
    """Files in a folder that may be traces, in the order of ranks; in its pytorch_profiles/ if it
    has none itself."""
    for place in (folder, folder / PROFILES):
        files = place.iterdir() if place.is_dir() else []
        traces = [file for file in files if may_be_trace(file.name)]
        if traces:
            return recordings(traces)
    endings = " or ".join(f"*{ending}" for ending in ENDINGS)
    others = "".join(f"; {why}" for why in left_out(folder))
    raise UserError(
        f"{folder}: the folder has no trace (no {endings} file that may be one){others}"
    )


def recordings(files: list[Path]) -> list[Path]:
    """One file of each recording, by name, with numbers as numbers: rank2 before rank10."""
    file_of_recording: dict[str, Path] = {}
    for file in sorted(files, key=lambda file: form_of(file.name).place):
        file_of_recording.setdefault(form_of(file.name).recording, file)
    return sorted(sorted(file_of_recording.values()), key=lambda file: with_numbers(file.name))


class NamedForm(NamedTuple):
    """What the name of a file tells of its form."""

    recording: str  # the name, without the ending of a system profiler
    place: int  # of the ending in ENDINGS; -1: another one


def form_of(name: str) -> NamedForm:
    for form in OF_SYSTEM_PROFILERS:
        for ending in form.endings:
            if name.endswith(ending):
                return NamedForm(name.removesuffix(ending), ENDINGS.index(ending))
    return NamedForm(name, -1)


def with_numbers(name: str) -> list[int | str]:
    """The parts of a name in turns: texts, and numbers."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def may_be_trace(name: str) -> bool:
    """Whether a file of this name may be a trace."""
    is_ours = is_of_ours_but_no_trace(name) and not name.startswith(SYSTEM)
    return name.endswith(ENDINGS) and not is_ours


def begins_as_trace(path: Path) -> bool:
    """Whether JSON of any program looks like a trace.  A damaged file does, so that reading it says
    what is wrong."""
    try:
        begin = beginning(path, BEGIN, gzip.open if path.suffix == ".gz" else open)
    except UserError:
        return True
    for form in FORMATS:
        if form.sign and re.search(form.sign, begin):
            return True
        if not form.sign and re.search(form.named, path.name):
            return True
    return False


def beginning(path: Path, n: int, opened: Callable = open) -> bytes:
    with named_errors(path), opened(path, "rb") as file:
        return file.read(n)
