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
from typing import TYPE_CHECKING

from harness.base.errors import UserError
from harness.base.files import is_of_ours_but_no_trace, named_errors
from harness.base.text import read_ini

if TYPE_CHECKING:
    from analysis.trace.columns import OnProgress, Reader

ENDINGS = (".json", ".json.gz")  # of the names of Chrome traces
# Those of system profilers.  Of one recording in several of these forms, the first is read.
FORMS = (
    *(
        ".sqlite .nsys-rep _results.db .db .rpd _results.json _results.json.gz _kernel_trace.csv"
    ).split(),
)
FORM = re.compile(rf"({'|'.join(map(re.escape, FORMS))})$")
SYSTEM = "system_profile"  # so begin the names of what run_system_profiler.sh leaves
PROFILES = "pytorch_profiles"  # the folder of traces in that of a run of ours
OF_ROCPROFV3 = re.compile(rb'\s*\{\s*"rocprofiler-sdk-tool"')
# Something of this is among the first BEGIN bytes of a trace
SIGN = re.compile(
    rb'"(traceEvents|schemaVersion|ph|rocprofiler-sdk-tool)"|^SQLite format 3|Start_Timestamp'
)
BEGIN = 1 << 16
GZIP = b"\x1f\x8b"
DEPTH = 4  # of folders below one that is named, in which traces are looked for
NAMED = 8  # folders with traces that are not read
LOOKED_AT = 20  # files of a folder, to see whether it has traces
SQLITE = b"SQLite format 3\0"  # how such a file begins
NOT_READ = read_ini(Path(__file__).with_suffix(".ini"))


def reader_of(
    path: Path, watch: OnProgress | None = None, rank: int | None = None, every_rank: bool = False
) -> Reader:
    """What reads the file, by its content.  Raises UserError, naming it, for one of a format that
    is not read."""
    from analysis.trace.readers import (
        chrome,
        databases,
        rocprofv3,
    )  # names of files are asked for without these

    begin = beginning(path, BEGIN)
    if begin.startswith(SQLITE):
        kind = databases.kind_of(path)
    elif rocprofv3.OF_SET.search(path.name):
        kind = rocprofv3.Rocprofv3Csv
    elif OF_ROCPROFV3.match(unpacked(begin)):
        kind = rocprofv3.Rocprofv3Json
    elif path.suffix == ".nsys-rep" and shutil.which("nsys"):
        kind = databases.NsysReport
    elif why := why_not_read(path):
        raise UserError(why)
    else:
        kind = chrome.ChromeTrace
    return kind(path, watch, rank, every_rank)


def why_not_read(path: Path) -> str | None:
    """What the file is and what is read instead, where another profiler wrote it; None where it may
    be a trace."""
    begin = unpacked(beginning(path, BEGIN))
    for what, of in ((section, NOT_READ[section]) for section in NOT_READ.sections()):
        if re.search(rf"({of['name']})$", path.name) and re.match(of["begins"].encode(), begin):
            return f"{path}: {what}, which is not read; {of['instead']}"
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
    why = []
    for file in folder.iterdir():
        if (
            file.is_file()
            and file not in read
            and not (may_be_trace(file.name) or is_of_ours_but_no_trace(file.name))
        ):
            with contextlib.suppress(UserError):  # not readable, and asked for by nobody
                why.append(why_not_read(file))
    read_folders = {file.parent.resolve() for file in read}
    folders = [
        place for place in folders_with_traces(folder) if place.resolve() not in read_folders
    ]
    why += [
        f"{place}: a folder with files that may be traces; name it to read them"
        for place in folders[:NAMED]
    ]
    if len(folders) > NAMED:
        why.append(
            f"{folder}: {len(folders) - NAMED} more folders below it with files that may be traces"
        )
    return [UserError(reason) for reason in sorted(filter(None, why))]


def folders_with_traces(folder: Path) -> list[Path]:
    """The folders below one that contain traces, by their names and beginnings; not those deeper
    than DEPTH."""
    found = []
    for place, names, files in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        visible = sorted(name for name in names if not name.startswith("."))
        names[:] = visible if depth < DEPTH else []
        candidates = [Path(place, name) for name in sorted(files) if may_be_trace(name)]
        if depth > 0 and any(map(begins_as_trace, candidates[:LOOKED_AT])):
            found.append(Path(place))
    return found


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
        if found := (
            [file for file in place.iterdir() if may_be_trace(file.name)] if place.is_dir() else []
        ):
            return recordings(found)
    endings = " or ".join(f"*{ending}" for ending in ENDINGS + FORMS)
    others = "".join(f"; {why}" for why in left_out(folder))
    raise UserError(
        f"{folder}: the folder has no trace (no {endings} file that may be one){others}"
    )


def recordings(files: list[Path]) -> list[Path]:
    """One file of each recording, by name, with numbers as numbers: rank2 before rank10."""
    forms = sorted(
        files, key=lambda file: FORMS.index(form[0]) if (form := FORM.search(file.name)) else -1
    )
    found = {FORM.sub("", file.name): file for file in reversed(forms)}
    parts = {file: re.split(r"(\d+)", file.name) for file in sorted(found.values())}
    return sorted(
        parts, key=lambda file: [int(one) if one.isdigit() else one for one in parts[file]]
    )


def may_be_trace(name: str) -> bool:
    """Whether a file of this name may be a trace."""
    return name.endswith(ENDINGS + FORMS) and (
        name.startswith(SYSTEM) or not is_of_ours_but_no_trace(name)
    )


def begins_as_trace(path: Path) -> bool:
    """Whether JSON of any program looks like a trace.  A damaged file does, so that reading it says
    what is wrong."""
    try:
        begin = beginning(path, BEGIN, gzip.open if path.suffix == ".gz" else open)
    except UserError:
        return True
    return path.suffix == ".nsys-rep" or SIGN.search(begin) is not None


def beginning(path: Path, n: int, opened: Callable = open) -> bytes:
    with named_errors(path), opened(path, "rb") as file:
        return file.read(n)
