"""Files: the registry of what commands may write, atomic writes, and run folders.

Everything that must know the files of a run uses FILES, the rows of files.txt: moving an earlier
run aside, finding traces in a folder, and docs/files.md.  FOLDERS is the list for .gitignore.
"""

import contextlib
import fnmatch
import io
import itertools
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from pkgutil import resolve_name
from typing import BinaryIO

from harness.base.console import say, world_size_of_run
from harness.base.documents import SCHEMA_VERSION
from harness.base.errors import UserError
from harness.documents.schema import Document, explained
from harness.documents.sweeps import SweepDocument


@dataclass(frozen=True)
class FileKind:
    """A file, or a folder of files, that a command may write to its folder."""

    pattern: str  # for glob
    writer: str  # command or flag
    contents: str  # for docs/files.md
    document: type[Document] | None = None  # its type, of JSON documents
    is_folder: bool = False


TRACE = "trace_step_*.pt.trace.json*"


def _registered(row: str) -> FileKind:
    """The kind that a row of files.txt tells of."""
    pattern, writer, of, contents = map(str.strip, row.split("|"))
    document = resolve_name(f"harness.documents.{of}") if of else None
    return FileKind(
        pattern.rstrip("/"), writer, contents, document, is_folder=pattern.endswith("/")
    )


def _of_sweep(document: type[SweepDocument]) -> tuple[FileKind, ...]:
    """MemoryStudy is memory_study.json, which run_memory_study.py writes, with its tables and its
    plot."""
    name = re.sub(r"\B(?=[A-Z])", "_", document.__name__).lower()
    writer = f"run_{name}.py"
    return (
        FileKind(f"{name}.json", writer, "one entry per row, rewritten after each row", document),
        FileKind(f"{name}.md", writer, f"the tables of {name}.json"),
        FileKind(f"{name}.png", writer, f"plot of {name}.json"),
    )


_TEXT = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
_LINES = [line for line in _TEXT.splitlines() if not line.startswith("#")]
FILES = (
    *(_registered(line) for line in _LINES if "|" in line),
    *itertools.chain.from_iterable(map(_of_sweep, SweepDocument.__subclasses__())),
)
FOLDERS = " ".join(line for line in _LINES if "|" not in line).split()


def kind_of(name: str) -> FileKind | None:
    """The registered kind of a file of this name, or None."""
    return next((kind for kind in FILES if fnmatch.fnmatch(name, kind.pattern)), None)


def is_of_ours_but_no_trace(name: str) -> bool:
    """Whether a file of this name is one that we write, and no trace."""
    kind = kind_of(name)
    return kind is not None and not kind.is_folder and kind.pattern != TRACE


def files_of_run(*folders: Path) -> list[Path]:
    """The files that a run has written to its folders, by name."""
    patterns = [kind.pattern for kind in FILES if not kind.is_folder]
    files: set[Path] = set()
    for folder in folders:
        for pattern in patterns:
            files.update(folder.glob(pattern))
    return sorted(files)


# ---- Writing -------------------------------------------------------------------------------------


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which gets its name at the end of the block.  Raises UserError, which
    names it."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with writing(path):
            with partial.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def writing(what: object) -> Iterator[None]:
    """Turns errors of writing into a UserError that names what was to be written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {what}: {error.strerror}") from error


@contextlib.contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Turns errors of reading the file into a UserError that names it."""
    try:
        yield
    except (OSError, EOFError) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def write_bytes(path: Path, data: bytes) -> None:
    """Write the file atomically.  Raises UserError, which names the file."""
    with written_whole(path) as file:
        file.write(data)


def write_json(path: Path, document: dict, kind: type[Document] | None = None) -> None:
    """Write a document with its schema version, atomically; each null gets the reason that its type
    gives.

    kind: the type, where the name of the file does not tell it.
    """
    registered = kind_of(path.name)
    document = explained(document, kind or (registered and registered.document))
    text = json.dumps({"schema_version": SCHEMA_VERSION} | document, indent=2, allow_nan=False)
    write_bytes(path, (text + "\n").encode())


def write_figure(path: Path, figure) -> None:
    """Write a matplotlib figure as PNG, atomically."""
    write_bytes(path, png(figure))


def png(figure) -> bytes:
    """A matplotlib figure as the bytes of a PNG file."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=120)
    return data.getvalue()


def make_folder(folder: Path) -> None:
    """Create the folder and check that it is writable.  Raises UserError, which names it."""
    with writing(f"to folder {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write_test{os.environ.get('RANK', '')}"  # ranks may share the folder
        try:
            probe.write_bytes(bytes(4096))
        finally:
            probe.unlink(missing_ok=True)


def prepare_folder(folder: Path) -> None:
    """Make the folder, and move an earlier run in it to earlier_<timestamp>/ inside it.

    The launcher's log, named in TINY_LLAMA_LOG, and those of other ranks are not moved, because
    they are being written.
    """
    make_folder(folder)
    with writing(f"to folder {folder}"):
        earlier = _earlier_run(folder)
        if earlier:
            ended = datetime.fromtimestamp(max(file.stat().st_mtime for file in earlier))
            stamp = ended.strftime("%Y%m%d_%H%M%S")
            target = unused_folder(folder / f"earlier_{stamp}")
            target.mkdir()
            for file in earlier:
                file.rename(target / file.name)
            say(f"The run that was in {folder} is now in {target}")


def _earlier_run(folder: Path) -> list[Path]:
    """The files and folders of a run in the folder.  UserError if its config.json is not ours."""
    config = folder / "config.json"
    if config.exists() and b'"schema_version"' not in config.read_bytes():
        raise UserError(f"{config} was not written by this workshop; use another folder")
    # Without a config.json, only names that no other program would use are assumed to be ours.
    patterns = [TRACE, "prediction.json"]
    if config.exists():
        patterns = [kind.pattern for kind in FILES if not kind.is_folder]
    paths: set[Path] = set()
    for pattern in patterns:
        paths.update(folder.glob(pattern))
    logs = _logs_of_this_run()
    written = [path for path in paths if path.absolute() not in logs]
    files = sorted(filter(Path.is_file, written))
    return files + _folders_of_run(folder) if files else []


def _logs_of_this_run() -> set[Path]:
    """The log that its launcher is writing, and those of the other ranks' launchers beside it."""
    if "TINY_LLAMA_LOG" not in os.environ:
        return set()
    log = Path(os.environ["TINY_LLAMA_LOG"]).absolute()
    others = [f"{log.stem}_rank{rank}.log" for rank in range(1, world_size_of_run())]
    return {log, *(log.with_name(name) for name in others)}


def _folders_of_run(folder: Path) -> list[Path]:
    """The folders in it that a run writes, in the order of the registry."""
    folders = []
    for kind in FILES:
        if kind.is_folder:
            folders += [path for path in sorted(folder.glob(kind.pattern)) if path.is_dir()]
    return folders


def unused_folder(wanted: Path) -> Path:
    """The path itself or, if it exists, <path>_2 and so on."""
    path = wanted
    for number in itertools.count(2):
        if not path.exists():
            break
        path = wanted.with_name(f"{wanted.name}_{number}")
    return path
