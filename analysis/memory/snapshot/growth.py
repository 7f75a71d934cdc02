"""What does each training step leave behind?  By line, where a recording has several steps."""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

import numpy as np

from analysis.memory.snapshot.lines import line_sums
from analysis.memory.snapshot.replay import KEPT, NEVER, Replay
from analysis.memory.snapshot.stacks import Line

FEWEST_STEPS = 2


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
