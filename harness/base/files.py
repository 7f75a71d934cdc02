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
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from pkgutil import resolve_name
from typing import BinaryIO

from harness.base.console import say, world_size_of_run
from harness.base.documents import SCHEMA_VERSION
from harness.base.errors import UserError
from harness.schema import Document, explained
from harness.study_files import document_of_study, study_names


@dataclass(frozen=True)
class FileKind:
    """A file, or a folder of files, that a command may write to its folder."""

    pattern: str  # for glob
    writer: str  # command or flag
    contents: str  # for docs/files.md
    # Of a JSON document: its type, as module:class.  It is named and not imported, because who
    # computes a document is above this package.
    type_name: str = ""
    is_folder: bool = False

    @property
    def document(self) -> type[Document] | None:
        """The type of a JSON document; None for other files."""
        return resolve_name(self.type_name) if self.type_name else None


TRACE = "trace_step_*.pt.trace.json*"


def _registered(row: str) -> FileKind:
    """The kind that a row of files.txt tells of."""
    pattern, writer, type_name, contents = map(str.strip, row.split("|"))
    is_folder = pattern.endswith("/")
    return FileKind(pattern.rstrip("/"), writer, contents, type_name, is_folder)


def _rows() -> Iterator[str]:
    """Those of files.txt; those of studies once for each study."""
    of_studies = [row for row in _LINES if "<name>" in row]
    for row in _LINES:
        if row == of_studies[0]:
            for name in study_names():
                for of_study in of_studies:
                    document = document_of_study(name)
                    yield of_study.replace("<name>", name).replace("<study>", document)
        elif "|" in row and row not in of_studies:
            yield row


_TEXT = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
_LINES = [line for line in _TEXT.splitlines() if not line.startswith("#")]
FILES = tuple(_registered(row) for row in _rows())
FOLDERS = " ".join(line for line in _LINES if "|" not in line).split()


def kind_of(name: str) -> FileKind | None:
    """The registered kind of a file of this name, or None."""
    for kind in FILES:
        if fnmatch.fnmatch(name, kind.pattern):
            return kind
    return None


def is_of_ours_but_no_trace(name: str) -> bool:
    """Whether a file of this name is one that we write, and no trace."""
    kind = kind_of(name)
    return kind is not None and not kind.is_folder and kind.pattern != TRACE


def files_of_run(*folders: Path) -> list[Path]:
    """The files that a run has written to its folders, by name."""
    patterns = [kind.pattern for kind in FILES if not kind.is_folder]
    files = set()
    for folder in folders:
        files.update(_matching(folder, patterns))
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


def write_json(path: Path, document: dict | Document, kind: type[Document] | None = None) -> None:
    """Write a document with its schema version, atomically; each null gets the reason that its type
    gives.

    kind: the type of a dictionary, where the name of the file does not tell it.
    """
    registered = kind_of(path.name)
    if kind is None and registered and isinstance(document, dict):
        kind = registered.document
    content = {"schema_version": SCHEMA_VERSION, **explained(document, kind)}
    text = json.dumps(content, indent=2, allow_nan=False)
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
        if not earlier:
            return
        ended_at = datetime.fromtimestamp(max(file.stat().st_mtime for file in earlier))
        target = unused_folder(folder / f"earlier_{ended_at:%Y%m%d_%H%M%S}")
        target.mkdir()
        for file in earlier:
            file.rename(target / file.name)
        say(f"The run that was in {folder} is now in {target}")


def new_part(folder: Path, name: str) -> Path:
    """A new folder for what a run that goes on in the same folder writes: in the folder of this
    name in it.  If there is none, an earlier run of another kind is moved, as by
    prepare_folder()."""
    if not (folder / name).is_dir():
        prepare_folder(folder)
    part = unused_folder(folder / name / f"{datetime.now():%Y%m%d_%H%M%S}")
    make_folder(part)
    return part


def _earlier_run(folder: Path) -> list[Path]:
    """The files and folders of a run in the folder.  UserError if its config.json is not ours."""
    config = folder / "config.json"
    if config.exists() and b'"schema_version"' not in config.read_bytes():
        raise UserError(f"{config} was not written by this workshop; use another folder")
    # Without a config.json, only names that no other program would use are assumed to be ours.
    patterns = [TRACE, "prediction.json", "watch.json"]
    if config.exists():
        patterns = [kind.pattern for kind in FILES if not kind.is_folder]
    being_written = _launchers_logs()
    files = []
    for file in _matching(folder, patterns):
        if file.is_file() and file.absolute() not in being_written:
            files.append(file)
    if not files:
        return []
    return [*files, *_registered_folders(folder)]


def _matching(folder: Path, patterns: list[str]) -> list[Path]:
    """What any of the patterns takes in the folder, each once, by name."""
    paths = set()
    for pattern in patterns:
        paths.update(folder.glob(pattern))
    return sorted(paths)


def _launchers_logs() -> set[Path]:
    """The log that the launcher of this process writes, and those that the launchers of the other
    ranks write beside it."""
    if "TINY_LLAMA_LOG" not in os.environ:
        return set()
    log = Path(os.environ["TINY_LLAMA_LOG"]).absolute()
    logs = {log}
    for rank in range(1, world_size_of_run()):
        logs.add(log.with_name(f"{log.stem}_rank{rank}.log"))
    return logs


def _registered_folders(folder: Path) -> list[Path]:
    """The folders in this one that a run may have written."""
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
