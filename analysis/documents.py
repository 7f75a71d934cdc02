"""The JSON documents of runs: reading one, and a reason beside every null of one."""

from __future__ import annotations

import contextlib
import io
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


def write_whole(path: Path, data: bytes) -> None:
    """Write the file whole or not at all.  Raises UserError, naming it."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def png(figure) -> bytes:
    """A figure of matplotlib as a file."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=120)
    return data.getvalue()


def cell(value: float | None, width: int, form: str) -> str:
    """A number in a table's column, - where there is none."""
    return f"{'-' if value is None else format(value, form):>{width}}"


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
