"""Which lines of the program hold memory, and what does each step leave behind?  Sums over
allocations of the same category and line."""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

import numpy as np

from analysis.memory.snapshot.replay import BEFORE, CATEGORIES, KEPT, NEVER, Replay
from analysis.memory.snapshot.stacks import Line

FEWEST_STEPS = 2


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


# ---- Several steps -------------------------------------------------------------------------------


class LeftBehind(NamedTuple):
    """A line of which every step leaves memory allocated to the end of the recording."""

    line: Line | None
    bytes_per_step: float  # median
    steps: int


def left_by_step(replay: Replay) -> list[LeftBehind]:
    """The largest first; nothing where fewer than two steps are seen.

    The first of three or more steps is left out: caches, state and gradients appear in it.  What
    the last one made and the next would free is not left by the steps before it.
    """
    ends = replay.phases.step_ends
    if len(ends) < FEWEST_STEPS:
        return []
    step = np.searchsorted(ends, replay.made_at, side="left")
    is_kept = (replay.freed_at == NEVER) & (replay.category == KEPT)
    first = 1 if len(ends) > FEWEST_STEPS else 0
    bytes_of_line: dict[Line | None, list[int]] = {}
    for number in range(first, len(ends)):
        for row in line_sums(replay, is_kept & (step == number)):
            bytes_of_line.setdefault(row.line, []).append(row.bytes)
    steps = len(ends) - first
    rows = []
    for line, sizes in bytes_of_line.items():
        if len(sizes) == steps:
            rows.append(LeftBehind(line, median(sizes), steps))
    return sorted(rows, key=lambda row: -row.bytes_per_step)
