"""Which files of a folder are traces?"""

from __future__ import annotations

import re
from pathlib import Path

from analysis.trace.readers.formats import ENDINGS, may_be_trace
from harness.base.errors import UserError


def find_traces(folder: Path) -> list[Path]:
    """Files in a folder that may be traces, in the order of ranks; in its pytorch_profiles/ if it has none itself."""
    for place in (folder, folder / "pytorch_profiles"):
        found = [file for file in place.iterdir() if may_be_trace(file.name)] if place.is_dir() else []
        if found:
            return in_order_of_ranks(found)
    raise UserError(
        f"{folder}: the folder has no trace (no {' or '.join(f'*{one}' for one in ENDINGS)} file that may be one)"
    )


def in_order_of_ranks(files: list[Path]) -> list[Path]:
    """By name, with numbers as numbers: rank2 before rank10."""
    parts = {file: re.split(r"(\d+)", file.name) for file in sorted(files)}
    return sorted(parts, key=lambda file: [int(one) if one.isdigit() else one for one in parts[file]])
