"""When did what happen in a trace?  Thinned to what a figure can show."""

import numpy as np

from analysis.attribution.components import UNATTRIBUTED
from analysis.attribution.intervals import Slices, innermost, slices_of
from analysis.trace.links import OPERATOR
from analysis.trace.timeline import Timeline, median_step
from harness.base.units import MB

PIECES = 1500  # of a timeline's lane at most: more cannot be seen
LANES = 8  # at most


def window_of_step(timeline: Timeline, which: int) -> tuple[float, float]:
    """When a step begins and ends, in us, with its work on the GPU, which may end after the host
    has gone on."""
    steps, gpu = timeline.steps, timeline.gpu
    first, last = float(steps["start"].iloc[which]), float(steps["end"].iloc[which])
    of_step = (gpu["step"] == which).to_numpy()
    return first, max(last, float(gpu.loc[of_step, "end"].max())) if of_step.any() else last


def step_timeline(timeline: Timeline) -> dict:
    """The step with the median duration as lanes of colored pieces:
    one per host thread and per GPU stream."""
    steps, host, gpu = timeline.steps, timeline.host, timeline.gpu
    which = median_step(timeline)
    first, last = window_of_step(timeline, which)
    of_host, of_gpu = (
        table["component"].fillna(UNATTRIBUTED).to_numpy(object) for table in (host, gpu)
    )
    inside = ((host["until"] > first) & (host["start"] < last)).to_numpy()
    is_operator, thread = (host["kind"] == OPERATOR).to_numpy(), host["thread"].to_numpy()
    lanes = {
        "host" if one == timeline.thread else f"host thread {one}": lane(
            innermost(host, (thread == one) & inside, is_operator), of_host, first, last
        )
        for one in np.unique(thread[is_operator & inside])
    }
    lanes |= {
        f"GPU {device} stream {stream}": lane(slices_of(gpu, rows), of_gpu, first, last)
        for (device, stream), rows in gpu.groupby(["device", "stream"]).indices.items()
    }
    busy = {
        name: sum(end - start for start, end, _ in pieces)
        for name, pieces in lanes.items()
        if pieces
    }
    shown = sorted(
        sorted(busy, key=lambda name: (name != "host", -busy[name]))[:LANES],
        key=lambda name: "GPU" in name,
    )
    used = {
        key: i
        for i, key in enumerate(dict.fromkeys(piece[2] for name in shown for piece in lanes[name]))
    }
    drawn = [
        {"name": name, "pieces": [[*edges, used[key]] for *edges, key in lanes[name]]}
        for name in shown
    ]
    found = {
        "step": int(steps["number"].iloc[which]),
        "length_ms": (last - first) / 1e3,
        "lanes": drawn,
    }
    return found | {
        "lanes_left_out": sum(map(bool, lanes.values())) - len(shown),
        "components": [*used],
    }


def lane(slices: Slices, component: np.ndarray, first: float, last: float) -> list[list]:
    """[start ms, end ms, component] of what owns the time between first and last.

    Neighboring pieces of one component are merged where the gap is too small to be seen.
    """
    inside = np.flatnonzero((slices.end > first) & (slices.start < last))
    start, end = (
        np.clip(times[inside], first, last) - first for times in (slices.start, slices.end)
    )
    key, gap = component[slices.row[inside]], (last - first) / PIECES
    begins = np.append(True, (key[1:] != key[:-1]) | (start[1:] - end[:-1] >= gap))[: len(key)]
    start, end, key = start[begins], end[np.append(begins[1:], True)[: len(key)]], key[begins]
    pieces: list[list] = []
    for begin, until, one in zip(start.tolist(), end.tolist(), key.tolist(), strict=True):
        if pieces and pieces[-1][2] == one and begin - pieces[-1][1] < gap:
            pieces[-1][1] = until
        elif not pieces or until - begin >= gap or begin - pieces[-1][1] >= gap:
            pieces.append([begin, until, one])
    return [[round(begin / 1e3, 4), round(until / 1e3, 4), one] for begin, until, one in pieces]


def memory_series(timeline: Timeline) -> dict:
    """Allocated MB over time, if the trace recorded it, thinned to what a figure shows."""
    memory = timeline.trace.memory
    if memory.empty:
        return {"peak_mb": None}
    on_gpu = bool(memory["on_gpu"].any())
    memory = memory[memory["on_gpu"] == on_gpu].sort_values("start", kind="stable")
    total, start = memory["total"].to_numpy() / MB, memory["start"].to_numpy() / 1e3
    picked = np.linspace(0, len(total) - 1, min(len(total), PIECES)).astype(int)
    highest = np.maximum.reduceat(total, picked)  # of each interval, so that thinning loses no peak
    of = "GPU memory allocated" if on_gpu else "Host memory allocated since recording began"
    found = {
        "peak_mb": float(total.max()),
        "of": of,
        "allocations": int((memory["bytes"] > 0).sum()),
    }
    return found | {
        "time_ms": start[picked].round(4).tolist(),
        "allocated_mb": highest.round(4).tolist(),
    }
