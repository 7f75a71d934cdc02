"""The JSON documents of runs: reading one, and a reason beside every null of one."""

from __future__ import annotations

import json
from pathlib import Path

from tiny_llama_v1 import UserError


def read_document(path: Path) -> dict | None:
    """The JSON file of a run of ours, None where there is none."""
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise UserError(f"{path}: cannot be read as JSON of a run: {error}") from error
    return document if isinstance(document, dict) and isinstance(document.get("schema_version"), int) else None


def with_reasons_beside(value, reasons: dict[str, str]):
    """A copy of a document in which each null has `<name>_reason` beside it, unless it has one already.

    reasons are by name.  Raises KeyError for a null whose name has none: an unexplained gap is a mistake of ours.
    """
    if isinstance(value, list):
        return [with_reasons_beside(one, reasons) for one in value]
    if not isinstance(value, dict):
        return value
    out = {}
    for name, one in value.items():
        out[name] = with_reasons_beside(one, reasons)
        if one is None and f"{name}_reason" not in value:
            out[f"{name}_reason"] = reasons[name]
    return out
