"""Was the GPU busy, and with what?  Times on the GPU's own clock, from a trace."""

from __future__ import annotations

import numpy as np
import pandas as pd

COMMUNICATION = "nccl"  # RCCL names its kernels so too

KEYS = ("total_ms", "computation_ms", "exposed_comm_ms", "exposed_memcpy_ms", "busy_ms", "idle_ms")


def covered(intervals: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Cut time at every boundary of several sets of intervals.

    Takes (starts, ends) of each set; intervals may overlap.  Returns the length of each piece [P], and for each set
    whether it covers the piece [P].
    """
    times = np.concatenate([edge for pair in intervals for edge in pair])
    order = np.argsort(times, kind="stable")
    lengths = np.diff(times[order])
    inside = []
    position = 0
    for starts, ends in intervals:
        change = np.zeros(len(times), dtype=np.int64)
        change[position : position + len(starts)] = 1
        change[position + len(starts) : position + len(starts) + len(ends)] = -1
        position += len(starts) + len(ends)
        inside.append(change[order].cumsum()[:-1] > 0)
    return lengths, inside


def gpu_timeline(gpu: pd.DataFrame) -> dict[str, float | None]:
    """How a GPU's time splits, in ms, from the start of its first event to the end of its last.

    Computation is the time in which any kernel other than communication, or a memset, runs; communication counts
    where no computation runs, copies where neither does.  The parts add up to the total.
    """
    if gpu.empty:
        return {key: None for key in KEYS} | {f"{key}_reason": "the trace holds no GPU events" for key in KEYS}
    memcpy = (gpu["kind"] == "memcpy").to_numpy()
    communication = gpu["name"].str.contains(COMMUNICATION, regex=False).to_numpy() & ~memcpy
    start, end = gpu["start"].to_numpy(), gpu["end"].to_numpy()
    sets = [(start[which], end[which]) for which in (~memcpy & ~communication, communication, memcpy)]
    lengths, (computes, communicates, copies) = covered(sets)
    total = end.max() - start.min()
    parts = {
        "computation_ms": lengths[computes].sum(),
        "exposed_comm_ms": lengths[communicates & ~computes].sum(),
        "exposed_memcpy_ms": lengths[copies & ~communicates & ~computes].sum(),
    }
    busy = sum(parts.values())
    times = {"total_ms": total, **parts, "busy_ms": busy, "idle_ms": total - busy}
    return {name: float(time) / 1e3 for name, time in times.items()}


def gpu_timelines(gpu: pd.DataFrame) -> dict:
    """The split over all devices of the trace, for each device, and for each of its streams."""
    devices = [
        {
            "device": int(device),
            **gpu_timeline(rows),
            "streams": [
                {"stream": int(stream), "events": len(events), **gpu_timeline(events)}
                for stream, events in rows.groupby("stream")
            ],
        }
        for device, rows in gpu.groupby("device")
    ]
    return gpu_timeline(gpu) | {"devices": devices}
