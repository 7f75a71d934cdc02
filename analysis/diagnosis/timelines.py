"""When did what happen in a trace?  Thinned to what a figure can show."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.attribution.components import UNATTRIBUTED
from analysis.attribution.intervals import Slices, innermost, slices_of
from analysis.trace.links import OPERATOR, AttributedLinks, Links, median_step
from harness.base.units import MB

PIECES = 1500  # of a timeline's lane at most: more cannot be seen
LANES = 8  # at most


def window_of_step(links: Links, which: int) -> tuple[float, float]:
    """When a step begins and ends, in us, with its work on the GPU, which may end after the host has gone on."""
    steps, gpu = links.steps, links.gpu
    first, last = float(steps["start"].iloc[which]), float(steps["end"].iloc[which])
    of_step = (gpu["step"] == which).to_numpy()
    return first, max(last, float(gpu.loc[of_step, "end"].max())) if of_step.any() else last


def step_timeline(links: AttributedLinks) -> dict:
    """The step with the median duration as lanes of colored pieces: one per host thread and per GPU stream."""
    steps, host, gpu = links.steps, links.host, links.gpu
    which = median_step(links)
    first, last = window_of_step(links, which)
    components: dict[str, int] = {}
    is_operator = (host["kind"] == OPERATOR).to_numpy()
    lanes = {
        "host" if thread == links.thread else f"host thread {thread}": lane(
            innermost(host, (host["thread"] == thread).to_numpy(), is_operator), host, first, last, components
        )
        for thread in np.unique(host["thread"].to_numpy()[is_operator])
    }
    lanes |= {
        f"GPU {device} stream {stream}": lane(slices_of(rows), rows, first, last, components)
        for (device, stream), rows in gpu.groupby(["device", "stream"])
    }
    names = [name for name, pieces in lanes.items() if pieces]
    names.sort(key=lambda name: (name != "host", name.startswith("GPU"), name))
    return {
        "step": int(steps["number"].iloc[which]),
        "length_ms": (last - first) / 1e3,
        "lanes": [{"name": name, "pieces": lanes[name]} for name in names[:LANES]],
        "lanes_left_out": max(0, len(names) - LANES),
        "components": list(components),
    }


def lane(slices: Slices, table: pd.DataFrame, first: float, last: float, components: dict[str, int]) -> list[list]:
    """[start ms, end ms, number of the component] of what owns the time between first and last; new components get a
    number.

    Neighboring pieces of one component are merged where the gap is too small to be seen.
    """
    inside = np.flatnonzero((slices.end > first) & (slices.start < last))
    start, end = (np.clip(times[inside], first, last) - first for times in (slices.start, slices.end))
    component = table["component"].fillna(UNATTRIBUTED).to_numpy(object)[slices.row[inside]]
    pieces: list[list] = []
    gap = (last - first) / PIECES
    for begins, ends, name in zip(start.tolist(), end.tolist(), component, strict=True):
        key = components.setdefault(name, len(components))
        if pieces and pieces[-1][2] == key and begins - pieces[-1][1] < gap:
            pieces[-1][1] = max(pieces[-1][1], ends)
        elif not pieces or ends - begins >= gap or begins - pieces[-1][1] >= gap:
            pieces.append([begins, ends, key])
    return [[round(begins / 1e3, 4), round(ends / 1e3, 4), key] for begins, ends, key in pieces]


def memory_series(links: Links) -> dict:
    """Allocated MB over time, if the trace recorded it, thinned to what a figure shows."""
    memory = links.trace.memory
    if memory.empty:
        return {"peak_mb": None}
    on_gpu = bool(memory["on_gpu"].any())
    memory = memory[memory["on_gpu"] == on_gpu].sort_values("start", kind="stable")
    total, start = memory["total"].to_numpy() / MB, memory["start"].to_numpy() / 1e3
    picked = np.linspace(0, len(total) - 1, min(len(total), PIECES)).astype(int)
    highest = np.maximum.reduceat(total, picked)  # of each interval, so that thinning loses no peak
    return {
        "peak_mb": float(total.max()),
        "of": "GPU memory allocated" if on_gpu else "Host memory allocated since recording began",
        "allocations": int((memory["bytes"] > 0).sum()),
        "time_ms": start[picked].round(4).tolist(),
        "allocated_mb": highest.round(4).tolist(),
    }
