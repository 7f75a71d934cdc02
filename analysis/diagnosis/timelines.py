"""When did what happen in a trace?  Thinned to what a figure can show."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.attribution.components import UNATTRIBUTED
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
    took_time = host["end"] > host["start"]  # the operators of replayed graphs took none here
    outer = host[((host["kind"] == OPERATOR) & (host["operator_parent"] < 0) & took_time).to_numpy()]
    lanes = {
        "host" if thread == links.thread else f"host thread {thread}": lane(rows, first, last, components)
        for thread, rows in outer.groupby("thread")
    }
    lanes |= {
        f"GPU {device} stream {stream}": lane(rows, first, last, components)
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


def lane(table: pd.DataFrame, first: float, last: float, components: dict[str, int]) -> list[list]:
    """[start ms, end ms, number of the component] of the events between first and last; new components get a number.

    Neighboring pieces of one component are merged where the gap is too small to be seen.
    """
    table = table[((table["end"] > first) & (table["start"] < last)).to_numpy()].sort_values("start")
    pieces: list[list] = []
    gap = (last - first) / PIECES
    for start, end, component in zip(table["start"], table["end"], table["component"], strict=True):
        key = components.setdefault(component if isinstance(component, str) else UNATTRIBUTED, len(components))
        start, end = max(start, first) - first, min(end, last) - first
        if pieces and pieces[-1][2] == key and start - pieces[-1][1] < gap:
            pieces[-1][1] = max(pieces[-1][1], end)
        elif not pieces or end - start >= gap or start - pieces[-1][1] >= gap:
            pieces.append([start, end, key])
    return [[round(start / 1e3, 4), round(end / 1e3, 4), key] for start, end, key in pieces]


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
