"""Reading JSON documents of this project, and their schema version; their types tell what stands in
them."""

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NoReturn

from harness.base.errors import UserError
from harness.schema import Document, completed, misfit

SCHEMA_VERSION = 4
# 4 adds fields to 3: those that may be null are null in a document that lacks them.
READABLE_VERSIONS = (3, 4)


def read_document(path: Path) -> dict | None:
    """A JSON document of this project; None if the file does not exist or was written by another
    program.

    Raises UserError, which names the file, if it is damaged or has a schema
    version other than READABLE_VERSIONS.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_json)
    except FileNotFoundError:
        return None
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}") from error
    version = document.get("schema_version") if isinstance(document, dict) else None
    if not isinstance(version, int):
        return None
    if version not in READABLE_VERSIONS:
        known = " and ".join(map(str, READABLE_VERSIONS))
        raise UserError(
            f"{path}: has schema version {version}, but this workshop reads versions {known}"
        )
    return document


def _no_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def read_fitting(
    path: Path, kind: type[Document], parts: Collection[str] | None = None
) -> dict | None:
    """A document of this type that has what is needed of it; what may be null and is missing is
    null.

    parts: the fields that are needed, such as `verdict.bound`; None: all.  Raises UserError, which
    names the file and the first field that is missing or of another type, too.
    """
    document = read_document(path)
    if document is None:
        return None
    kind.bring_up_to_date(document)
    why = misfit(document, kind, parts)
    if why:
        raise UserError(f"{path}: damaged, or of an earlier version: {why}")
    return completed(document, kind)


def read_or_leave_out(
    path: Path, kind: type[Document], left_out: list[str], parts: Collection[str] | None = None
) -> dict | None:
    """A document that is not needed, else as read_fitting(): of one that cannot be read, left_out
    takes a line that says why, and the rest goes on without it."""
    try:
        return read_fitting(path, kind, parts)
    except UserError as error:
        if str(error) not in left_out:
            left_out.append(str(error))
        return None


def documents_beside(
    path: Path,
    name: str,
    kind: type[Document],
    left_out: list[str],
    parts: Collection[str] | None = None,
) -> Iterator[dict]:
    """The documents of this name in the folder of a trace and in the one above, of those that can
    be read; see read_or_leave_out()."""
    for folder in (path.parent, path.parent.parent):
        document = read_or_leave_out(folder / name, kind, left_out, parts)
        if document:
            yield document
