"""Does memory grow with the steps?

After the first tenth of the readings, the rest is cut into blocks of as many steps each; the slope
is the mean change between their medians, with a 95% interval by the spread of these changes.  It
grows if the interval is above zero, by more than allocators round to, and if the last third of the
run grows at least half as fast as all of it: a cache that levels off does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from analysis.program.watched_process import WatchedProcess
from harness.base.text import count_of, significant
from harness.base.units import MB
from harness.schema import Document, Unknown, field

BLOCKS = 24
SKIPPED = 0.1  # of the readings: the first steps
FEW_READINGS = 48
T_95 = 2.07  # of 23 changes
NOISE_BYTES = 8 * MB  # what allocators take at once
STEADY = 0.5  # of the slope of all: that of the last third
DEVICE, PROCESS = "device", "process"
NO_CENSUS = "it has not grown by enough to look"
NOT_PYTHONS = (
    "nothing that Python knows grew with it: tensors that a graph keeps, NumPy buffers, or memory"
    " of a library"
)


class GrowthRow(Document):
    """Memory of a process, or of its GPU's allocator, that grows with the steps."""

    of: str = field("device (the GPU's allocator), process (resident memory of the host)")
    rank: int | None = field("whose", null="of all ranks")
    bytes_per_step: float = field("by which it grows")
    low: float = field("bytes per step, of the 95% interval")
    high: float = field("bytes per step, of the 95% interval")
    held_by: str | None = field("the container that grows with it", null=NOT_PYTHONS)
    where: str | None = field("train.py:77: the line that adds to it", null=NOT_PYTHONS)
    sentence: str = field("the growth and who holds it, in words")


class Slope(NamedTuple):
    """Bytes per step."""

    mean: float
    low: float
    high: float
    grows: bool
    may_grow: bool  # it is not yet known
    steps: int  # that were seen


def growth_of(process: WatchedProcess, of_ranks: int) -> tuple[list[GrowthRow], list[str]]:
    """Of device and process; and what is not yet known, a sentence each."""
    rows, not_yet_known = [], []
    for of, column in ((DEVICE, 2), (PROCESS, 1)):
        if of == DEVICE and not process.on_gpu:
            continue
        slope = slope_of(process.memory[:, 0], process.memory[:, column])
        if slope is None:
            continue
        whose = f"rank {process.rank}: " if of_ranks > 1 else ""
        if slope.grows:
            rows.append(row_of(process, of, slope, whose, of_ranks))
        elif slope.may_grow:
            not_yet_known.append(
                f"{whose}whether memory of the {of} grows, after {count_of(slope.steps, 'step')}:"
                f" after {2 * slope.steps:,} it would be"
            )
    return rows, not_yet_known


def slope_of(steps: np.ndarray, sizes: np.ndarray) -> Slope | None:
    """steps, sizes: [M] of each reading.  None where there are too few."""
    if len(steps) < FEW_READINGS:
        return None
    first = int(SKIPPED * len(steps))
    steps, sizes = steps[first:], sizes[first:]
    edges = np.linspace(steps[0], steps[-1], BLOCKS + 1)
    block = np.clip(np.searchsorted(edges, steps, side="right") - 1, 0, BLOCKS - 1)
    middles, heights = [], []
    for number in range(BLOCKS):
        inside = block == number
        if inside.any():
            middles.append(float(np.median(steps[inside])))
            heights.append(float(np.median(sizes[inside])))
    changes = np.diff(heights) / np.diff(middles)
    mean = (heights[-1] - heights[0]) / (middles[-1] - middles[0])
    error = T_95 * float(np.std(changes, ddof=1)) / math.sqrt(len(changes))
    third = len(heights) * 2 // 3
    late = (heights[-1] - heights[third]) / (middles[-1] - middles[third])
    grown_bytes = heights[-1] - heights[0]
    is_much = grown_bytes > max(NOISE_BYTES, 0.01 * heights[0])
    is_steady = late > STEADY * mean
    is_sure = mean - error > 0
    return Slope(
        mean=mean,
        low=mean - error,
        high=mean + error,
        grows=is_much and is_steady and is_sure,
        may_grow=is_much and is_steady and not is_sure,
        steps=int(steps[-1]),
    )


def row_of(process: WatchedProcess, of: str, slope: Slope, whose: str, of_ranks: int) -> GrowthRow:
    census = process.about["growth"]
    containers = census["containers"] if census else []
    tensors = census["tensors"] if census else []
    holder = containers[0] if containers else None
    # Of other things that grow, all are much smaller than a tensor.
    held_by = holder["who"] if holder else Unknown(NOT_PYTHONS if census else NO_CENSUS)
    where = Unknown(NOT_PYTHONS if census else NO_CENSUS)
    if holder:
        where = holder["where"] or Unknown(holder["where_reason"])
    return GrowthRow(
        of=of,
        rank=process.rank if of_ranks > 1 else None,
        bytes_per_step=slope.mean,
        low=slope.low,
        high=slope.high,
        held_by=held_by,
        where=where,
        sentence=f"{whose}{sentence_of(of, slope, tensors, holder, census is not None)}",
    )


def sentence_of(
    of: str, slope: Slope, tensors: Sequence[dict], holder: dict | None, was_counted: bool
) -> str:
    memory = "The GPU's memory" if of == DEVICE else "The process"
    text = (
        f"{memory} grows by {significant(slope.mean / MB, 2)} MB a step"
        f" ({significant(slope.low / MB, 2)} to {significant(slope.high / MB, 2)})"
    )
    if tensors:
        text += f": {tensor_text(tensors[0])}"
    if holder:
        line = f", {holder['where']}" if holder["where"] else ""
        text += f"{',' if tensors else ':'} in {holder['who']}{line}"
    elif not tensors and was_counted:
        text += f": {NOT_PYTHONS}"
    return text


def tensor_text(row: dict) -> str:
    """'one more 0-d tensor of float32 with a graph per step'"""
    shape = f"[{', '.join(map(str, row['shape']))}]" if row["shape"] else "0-d"
    graph = " with a graph" if row["has_graph"] else ""
    per_step, dtype = row["per_step"], row["dtype"].removeprefix("torch.")
    if 0.8 < per_step < 1.25:
        return f"one more {shape} tensor of {dtype}{graph} per step"
    number = f"{per_step:.0f}" if per_step > 1 else significant(per_step, 2)
    return f"{number} more {shape} tensors of {dtype}{graph} per step"
