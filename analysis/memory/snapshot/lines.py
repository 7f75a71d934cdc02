"""Which lines of the program hold memory?  Sums over allocations of the same category and line."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from analysis.memory.snapshot.replay import BEFORE, CATEGORIES, Replay
from analysis.memory.snapshot.stacks import Line


class LineBytes(NamedTuple):
    """What one line holds in one category.  line: None where no stack names one."""

    category: str
    line: Line | None
    bytes: int
    count: int  # of allocations


def line_sums(replay: Replay, chosen: np.ndarray) -> list[LineBytes]:
    """Of these allocations, the largest sum first.  chosen: [allocations, bool]"""
    sums: dict[tuple[int, Line | None], list[int]] = {}
    categories, stacks = replay.category[chosen].tolist(), replay.stack[chosen].tolist()
    sizes = replay.size_bytes[chosen].tolist()
    for category, stack, size in zip(categories, stacks, sizes, strict=True):
        row = sums.setdefault((category, replay.line_of(stack)), [0, 0])
        row[0] += size
        row[1] += 1
    rows = []
    for (category, line), (size, count) in sums.items():
        rows.append(LineBytes(CATEGORIES[category], line, size, count))
    return by_size(rows)


def lines_at_peak(replay: Replay) -> list[LineBytes]:
    """Of all that is there at the peak; of what was there before the recording, the blocks whose
    stack is known and that are left at its end."""
    rows = line_sums(replay, replay.at_peak)
    sums: dict[Line, list[int]] = {}
    for block in replay.left:
        line = replay.line_of(block.stack)
        if line is not None:
            row = sums.setdefault(line, [0, 0])
            row[0] += block.size_bytes
            row[1] += 1
    for line, (size, count) in sums.items():
        rows.append(LineBytes(BEFORE, line, size, count))
    return by_size(rows)


def by_size(rows: list[LineBytes]) -> list[LineBytes]:
    return sorted(rows, key=lambda row: -row.bytes)


def line_text(line: Line | None) -> str:
    """'softmax nn_utils.py:6, called by scaled_dot_product_attention model.py:432'"""
    if line is None:
        return "no line of the program"
    called = f", called by {line.caller}" if line.caller else ""
    return f"{line.function} {line.where}{called}"
