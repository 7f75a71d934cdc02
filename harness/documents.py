"""The JSON documents: their schema version, and reading one."""

from __future__ import annotations

import json
from pathlib import Path

from harness.errors import UserError

SCHEMA_VERSION = 2


def read_document(path: Path) -> dict | None:
    """A JSON document of ours; None where there is none, or a JSON file of another program.

    Raises UserError, naming the file, for one that is damaged or was written under another schema version.
    """
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise UserError(f"{path}: cannot be read as JSON of a run: {error}") from error
    version = document.get("schema_version") if isinstance(document, dict) else None
    if not isinstance(version, int):
        return None
    if version != SCHEMA_VERSION:
        raise UserError(f"{path}: schema version {version}, this workshop reads version {SCHEMA_VERSION}")
    return document
