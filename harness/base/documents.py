"""Reading JSON documents of this project, and their schema version; harness/documents tells what stands in them."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from harness.base.errors import UserError

SCHEMA_VERSION = 3
READABLE_VERSIONS = (2, 3)  # 3 adds fields to 2; a reader takes those that a document may lack with get()


def read_document(path: Path) -> dict | None:
    """A JSON document of this project; None if the file does not exist or was written by another program.

    Raises UserError, which names the file, if it is damaged or has a schema version other than READABLE_VERSIONS.
    """
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}") from error
    version = document.get("schema_version") if isinstance(document, dict) else None
    if not isinstance(version, int):
        return None
    if version not in READABLE_VERSIONS:
        known = " and ".join(map(str, READABLE_VERSIONS))
        raise UserError(f"{path}: has schema version {version}, but this workshop reads versions {known}")
    return document


def documents_beside(path: Path, name: str) -> Iterator[dict]:
    """The documents of this name in the folder of a trace and in the one above; a damaged one, or one of another
    version, is left out: the trace is read all the same."""
    for folder in (path.parent, path.parent.parent):
        with contextlib.suppress(UserError):
            if document := read_document(folder / name):
                yield document
