"""Was the GPU busy, and with what, and if not, what was it waiting for?  Times on the GPU's own clock, from a trace."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.links import Links
from analysis.trace import where_name

COMMUNICATION = ("nccl", "rccl")  # RCCL calls most of its kernels nccl too
KEYS = ("total_ms", "computation_ms", "exposed_comm_ms", "exposed_memcpy_ms", "busy_ms", "idle_ms")
IDLE_CAUSES = {
    "data": "the host was fetching data",
    "synchronisation": "the host was waiting for the GPU or for a copy, and had launched nothing more",
    "launch": "the host was preparing the next launch",
    "communication": "what was queued followed communication, or was it",
    "copy": "what was queued followed a copy, or was one",
    "latency": "the launch was made, the kernel had not begun",
    "unknown": "the trace does not hold the launch",
}


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


def by_priority(intervals: list[tuple[np.ndarray, np.ndarray]]) -> list[float]:
    """The length of time that each set covers and none before it does."""
    if not sum(len(starts) for starts, _ in intervals):
        return [0.0] * len(intervals)
    lengths, inside = covered(intervals)
    taken = np.zeros(len(lengths), dtype=bool)
    out = []
    for covers in inside:
        out.append(float(lengths[covers & ~taken].sum()))
        taken |= covers
    return out


def exclusive_us(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The time of each interval in which none that started before it runs: together, the length of their union."""
    if not len(start):
        return np.zeros(0)
    order = np.lexsort((-end, start))
    reached = np.maximum.accumulate(end[order])
    before = np.concatenate([[-np.inf], reached[:-1]])
    own = np.empty(len(start))
    own[order] = np.maximum(0.0, end[order] - np.maximum(start[order], before))
    return own


def exposed_us(gpu: pd.DataFrame, window: tuple[float, float]) -> np.ndarray:
    """The time of each GPU event that counts as its own: computation first, then communication, then copies.

    Within a class the event that started first has it.  Together, the busy time of the window.
    """
    start, end = (np.clip(gpu[name].to_numpy(), *window) for name in ("start", "end"))
    memcpy, communication = (gpu["kind"] == "memcpy").to_numpy(), is_communication(gpu)
    own, taken = np.zeros(len(gpu)), (np.zeros(0), np.zeros(0))
    for which in (~memcpy & ~communication, communication, memcpy):
        # On a clock that stands still while something before it in rank runs, only what is left has a length.
        left = [times[which] - covered_until(times[which], taken) for times in (start, end)]
        own[which] = exclusive_us(*left)
        taken = union(np.append(taken[0], start[which]), np.append(taken[1], end[which]))
    return own


def covered_until(times: np.ndarray, intervals: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """How much of the time before each of `times` lies in the given disjoint, sorted intervals."""
    starts, ends = intervals
    if not len(starts):
        return np.zeros(len(times))
    lengths = np.concatenate([[0.0], np.cumsum(ends - starts)])
    edges = np.stack([starts, ends], axis=1).reshape(-1)
    return np.interp(times, edges, np.repeat(lengths, 2)[1:-1])


def is_communication(gpu: pd.DataFrame) -> np.ndarray:
    named = where_name(gpu, lambda name: any(word in name for word in COMMUNICATION))
    return named & (gpu["kind"] != "memcpy").to_numpy()


def gpu_timeline(gpu: pd.DataFrame) -> dict[str, float | None]:
    """How a GPU's time splits, in ms, from the start of its first event to the end of its last.

    Computation is the time in which any kernel other than communication, or a memset, runs; communication counts
    where no computation runs, copies where neither does.  The parts add up to the total.
    """
    if gpu.empty:
        return dict.fromkeys(KEYS)
    memcpy, communication = (gpu["kind"] == "memcpy").to_numpy(), is_communication(gpu)
    start, end = gpu["start"].to_numpy(), gpu["end"].to_numpy()
    sets = [(start[which], end[which]) for which in (~memcpy & ~communication, communication, memcpy)]
    computation, exposed_comm, exposed_memcpy = by_priority(sets)
    total, busy = end.max() - start.min(), computation + exposed_comm + exposed_memcpy
    times = (total, computation, exposed_comm, exposed_memcpy, busy, total - busy)
    return {key: float(time) / 1e3 for key, time in zip(KEYS, times, strict=True)}


def gpu_timelines(links: Links) -> dict:
    """The split over all devices of the trace, for each device, and for each of its streams; idle time by cause."""
    gpu = links.gpu
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
    out = gpu_timeline(gpu) | {"devices": devices}
    if gpu.empty:
        return out | dict.fromkeys(("idle_by_cause", "launch_delay_us", "queue_depth"))
    causes = idle_by_cause(links)
    return out | {
        "idle_by_cause": [
            {
                "cause": cause,
                "ms": us / 1e3,
                "share_of_total": us / 1e3 / out["total_ms"] if out["total_ms"] else 0.0,
                "meaning": IDLE_CAUSES[cause],
            }
            for cause, us in sorted(causes.items(), key=lambda item: -item[1])
        ],
        **queue(links),
    }


def gaps(
    gpu: pd.DataFrame, window: tuple[float, float] | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """When nothing ran on any device: start, end, and the rows of the event that ended last and that began next.

    Between the first event and the last or, given a window, within that; then -1 stands for no event.
    """
    order = np.lexsort((-gpu["end"].to_numpy(), gpu["start"].to_numpy()))
    start, end = gpu["start"].to_numpy()[order], gpu["end"].to_numpy()[order]
    reached = np.maximum.accumulate(end)
    # The event that reached furthest so far: where the running maximum was set.
    furthest = np.maximum.accumulate(np.where(end >= reached, np.arange(len(end)), 0))
    after = np.flatnonzero(start[1:] > reached[:-1])
    found = [reached[after], start[after + 1], order[furthest[after]], order[after + 1]]
    if window:
        edges = [(-np.inf, start[0], -1, order[0]), (reached[-1], np.inf, order[furthest[-1]], -1)]
        found = [np.append(column, edge) for column, edge in zip(found, zip(*edges, strict=True), strict=True)]
        found[:2] = (np.clip(column, *window) for column in found[:2])
    keep = found[1] > found[0]
    first, end, last, following = (column[keep] for column in found)
    return first, end, last.astype(np.int64), following.astype(np.int64)


def idle_by_cause(links: Links, window: tuple[float, float] | None = None) -> dict[str, float]:
    """Idle time of the GPU in us, by what it waited for; together all of it.

    A gap up to the end of the next event's launch call is the host's doing, what follows is latency.  Where the launch
    had been made before the gap began, the event waited for another: for communication, a copy, or the end of a kernel.
    """
    causes = dict.fromkeys(IDLE_CAUSES, 0.0)
    gpu = links.gpu
    if gpu.empty:
        return causes
    start, end, last, following = gaps(gpu, window)
    call = np.where(following >= 0, gpu["call"].to_numpy()[following], -1)
    nothing_follows = following < 0  # the host may still be in its step, and launches nothing more
    known = (call >= 0) | nothing_follows
    causes["unknown"] = float((end - start)[~known].sum())
    launch_end = np.where(call >= 0, links.calls["end"].to_numpy()[call] if len(links.calls) else np.nan, end)
    # The kernel may begin before its launch call returns.
    host_until = np.clip(np.where(known, np.minimum(launch_end, end), start), start, None)
    by_host = known & (host_until > start)
    starts, ends = start[by_host], host_until[by_host]
    data, waiting = (covered_until(ends, one) - covered_until(starts, one) for one in host_intervals(links))
    waiting = np.minimum(waiting, ends - starts - data)
    causes["data"], causes["synchronisation"] = float(data.sum()), float(waiting.sum())
    causes["launch"] = float((ends - starts - data - waiting).sum())
    causes["latency"] += float((end - host_until)[by_host].sum())
    queued = known & ~by_host
    memcpy, communication = (gpu["kind"] == "memcpy").to_numpy(), is_communication(gpu)
    after_communication = queued & (((last >= 0) & communication[last]) | communication[following])
    after_copy = queued & ~after_communication & (((last >= 0) & memcpy[last]) | memcpy[following])
    causes["communication"] = float((end - start)[after_communication].sum())
    causes["copy"] = float((end - start)[after_copy].sum())
    causes["latency"] += float((end - start)[queued & ~after_communication & ~after_copy].sum())
    return causes


def host_intervals(links: Links) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """When the host fetched data, and when it waited for the GPU: sorted, disjoint (starts, ends) each."""
    host, calls = links.host, links.calls
    data = host[(host["phase"] == "data").to_numpy()] if len(host) else host
    waiting = calls[calls["waits"].to_numpy(bool)] if len(calls) else calls
    return tuple(union(table["start"].to_numpy(float), table["end"].to_numpy(float)) for table in (data, waiting))


def union(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if not len(start):
        return start, end
    order = np.argsort(start)
    start, reached = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate([[True], start[1:] > reached[:-1]])
    return start[first], reached[np.append(np.flatnonzero(first)[1:] - 1, len(start) - 1)]


def queue(links: Links) -> dict:
    """Launch delay: from a kernel's launch call to its start.  Queue depth: kernels launched and not yet begun."""
    kernels = links.gpu[(links.gpu["kind"] == "kernel").to_numpy() & (links.gpu["call"] >= 0).to_numpy()]
    if kernels.empty:
        return {"launch_delay_us": None, "queue_depth": None}
    launched, began = np.sort(kernels["launched"].to_numpy()), np.sort(kernels["start"].to_numpy())
    depth = np.arange(1, len(launched) + 1) - np.searchsorted(began, launched, side="right")
    delay = kernels["start"].to_numpy() - kernels["launched"].to_numpy()

    def spread(values: np.ndarray) -> dict:
        return {
            "mean": float(values.mean()),
            "p50": float(np.median(values)),
            "p95": float(np.percentile(values, 95)),
            "max": float(values.max()),
            "min": float(values.min()),
        }

    return {"launch_delay_us": spread(delay), "queue_depth": spread(np.maximum(0, depth))}
