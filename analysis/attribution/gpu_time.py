"""How a GPU's time splits into computation, exposed communication, exposed copies and idle time, and why it idled."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.trace.links import OPERATOR, AttributedLinks, cached_on_links
from analysis.trace.tables import take_or
from harness.base.tables import Column, column

Intervals = tuple[np.ndarray, np.ndarray]  # starts and ends

KEYS = ("total_ms", "computation_ms", "exposed_comm_ms", "exposed_memcpy_ms", "busy_ms", "idle_ms")
# A launched kernel starts within microseconds on an idle GPU (26 at most in ten traces of V100 to B200, MI250 and
# MI300X): what is longer has a cause that the trace does not contain.
LATENCY_US = 100.0
# From one operator to the next, Python and PyTorch take microseconds; what is longer is work of the program.
HOST_CODE_US = 1e3
IDLE_CAUSES = {
    "data": "the host was fetching data",
    "synchronization": "the host was waiting for the GPU or for a copy, and had nothing queued",
    "launch": "the host was preparing the next launch",
    "host_code": "the host was running code of the program for more than 1 ms, outside of operators and calls",
    "communication": "the next event was queued behind communication, or was communication",
    "copy": "the next event was queued behind a copy, or was a copy",
    "latency": "the kernel had been launched, but had not started",
    "unknown": "the trace does not contain the launch, or the kernel started much later for no recorded reason",
}


def by_priority(intervals: list[Intervals]) -> list[float]:
    """The total time that each set of intervals covers and none of the earlier sets does."""
    lengths, start, end = [], np.zeros(0), np.zeros(0)
    for starts, ends in intervals:
        start, end = union(np.append(start, starts), np.append(end, ends))
        lengths.append((end - start).sum())
    return np.diff(lengths, prepend=0.0).tolist()


def exclusive_us(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The time of each interval that no interval with an earlier start covers; the sum is the length of the union."""
    if not len(start):
        return np.zeros(0)
    order = np.lexsort((-end, start))
    reached = np.maximum.accumulate(end[order])
    before = np.concatenate([[-np.inf], reached[:-1]])
    own = np.empty(len(start))
    own[order] = np.maximum(0.0, end[order] - np.maximum(start[order], before))
    return own


def exposed_us(gpu: pd.DataFrame, window: tuple[float, float]) -> np.ndarray:
    """The exposed time of each GPU event; overlapping time counts for computation before communication before copies.

    Within a class it counts for the event that started first.  The sum is the busy time of the window.
    """
    start, end = (np.clip(gpu[name].to_numpy(), *window) for name in ("start", "end"))
    own, before = np.zeros(len(gpu)), (np.zeros(0), np.zeros(0))
    for which in by_class(gpu):
        # Times on a clock that stops while an event of an earlier class runs.
        own[which] = exclusive_us(*(times[which] - covered_until(times[which], before) for times in (start, end)))
        before = union(np.append(before[0], start[which]), np.append(before[1], end[which]))
    return own


def by_class(gpu: pd.DataFrame) -> list[np.ndarray]:
    """Which GPU events are computation, communication and copies, in order of precedence."""
    memcpy, communication = (gpu["kind"] == "memcpy").to_numpy(), is_communication(gpu)
    return [~memcpy & ~communication, communication, memcpy]


def covered_until(times: np.ndarray, intervals: Intervals) -> np.ndarray:
    """How much of the time before each of `times` lies in the given disjoint, sorted intervals."""
    starts, ends = intervals
    if not len(starts):
        return np.zeros(len(times))
    lengths = np.concatenate([[0.0], np.cumsum(ends - starts)])
    edges = np.stack([starts, ends], axis=1).reshape(-1)
    return np.interp(times, edges, np.repeat(lengths, 2)[1:-1])


def is_communication(gpu: pd.DataFrame) -> np.ndarray:
    return (gpu["category"] == "communication").to_numpy()


def gpu_timeline(gpu: pd.DataFrame) -> dict[str, float | None]:
    """How a GPU's time splits, in ms, from the start of its first event to the end of its last.

    Computation is any kernel other than communication, or a memset; communication is exposed while no computation
    runs, a copy while neither does.  The parts add up to the total.
    """
    if gpu.empty:
        return dict.fromkeys(KEYS)
    start, end = gpu["start"].to_numpy(), gpu["end"].to_numpy()
    computation, exposed_comm, exposed_memcpy = by_priority([(start[which], end[which]) for which in by_class(gpu)])
    total, busy = end.max() - start.min(), computation + exposed_comm + exposed_memcpy
    times = (total, computation, exposed_comm, exposed_memcpy, busy, total - busy)
    return {key: float(time) / 1e3 for key, time in zip(KEYS, times, strict=True)}


def gpu_timelines(links: AttributedLinks, two_clocks: str | None = None) -> dict:
    """The split over all devices of the trace, for each device, and for each of its streams; idle time by cause.

    two_clocks: why times of GPU and host cannot be compared; what needs both is then null.
    """
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
    of_steps = gpu_timeline(gpu[(gpu["step"] >= 0).to_numpy()])
    out = gpu_timeline(gpu) | {"of_steps": of_steps, "devices": devices}
    compared = ("idle_by_cause", "launch_delay_us", "queue_depth")
    if gpu.empty or two_clocks:
        reasons = {f"{name}_reason": two_clocks for name in compared} if two_clocks else {}
        return out | dict.fromkeys(compared) | reasons
    causes = [
        {
            "cause": cause,
            "ms": us / 1e3,
            "share_of_total": us / 1e3 / out["total_ms"] if out["total_ms"] else 0.0,
            "meaning": IDLE_CAUSES[cause],
        }
        for cause, us in sorted(idle_by_cause(links).items(), key=lambda item: -item[1])
    ]
    return out | {"idle_by_cause": causes, **queue(links)}


def gaps(
    gpu: pd.DataFrame, window: tuple[float, float] | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """When nothing ran on any device: start, end, and the rows of the events before and after.

    Between the first event and the last or, given a window, within that; -1 then means that there is no such event.
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


@cached_on_links
def idle_by_cause(links: AttributedLinks, window: tuple[float, float] | None = None) -> dict[str, float]:
    """Idle time of the GPU in us, by cause."""
    return {cause: float(idle_gaps(links, window)[cause].sum()) for cause in IDLE_CAUSES}


@cached_on_links
def idle_gaps(links: AttributedLinks, window: tuple[float, float] | None = None) -> pd.DataFrame:
    """A row for each time in which the GPU was idle: start, end, and the us of it that each of IDLE_CAUSES explains.

    A gap up to the end of the next event's launch call is caused by the host; the rest is latency, up to LATENCY_US.
    If the launch call ended before the gap, the event waited for another one: communication, a copy, or a kernel.
    """
    gpu = links.gpu
    if gpu.empty:
        return pd.DataFrame(columns=["start", "end", *IDLE_CAUSES], dtype=float)
    start, end, before, after = gaps(gpu, window)
    call = take_or(gpu["call"], after, -1)
    nothing_follows = after < 0  # the host's step may go on without another launch
    known = (call >= 0) | nothing_follows
    launched = np.where(call >= 0, take_or(links.calls["end"].to_numpy(float), call, np.nan), end)
    # The kernel may start before its launch call returns.
    host_until = np.clip(np.where(known, np.minimum(launched, end), start), start, None)
    gap = {"start": start, "end": end, **host_causes(links, start, host_until)}
    was_queued = known & (host_until == start)
    _, communication, copies = by_class(gpu)
    for cause, of_class in (("communication", communication), ("copy", copies)):
        behind = was_queued & (((before >= 0) & of_class[before]) | of_class[after])
        gap[cause] = np.where(behind, end - start, 0.0)
        was_queued &= ~behind
    late = np.where(was_queued | (host_until > start), end - host_until, 0.0)
    gap["latency"] = np.minimum(late, LATENCY_US)
    gap["unknown"] = np.where(known, np.maximum(late - LATENCY_US, 0.0), end - start)
    return pd.DataFrame(gap)


def host_causes(links: AttributedLinks, start: np.ndarray, end: np.ndarray) -> dict[str, np.ndarray]:
    """Why the host launched nothing between these times: us of each, by cause; they add up to the time."""
    of_host = (links.host[links.host["phase"] == "data"], links.calls[links.calls["waits"].astype(bool)])
    busy = [union(table["start"].to_numpy(float), table["end"].to_numpy(float)) for table in of_host]
    data, waiting, program = (covered_until(end, one) - covered_until(start, one) for one in (*busy, host_code(links)))
    left = end - start - data
    waiting = np.minimum(waiting, left)
    program = np.minimum(program, left - waiting)
    return {"data": data, "synchronization": waiting, "host_code": program, "launch": left - waiting - program}


@cached_on_links
def host_code(links: AttributedLinks) -> Intervals:
    """When the host ran the program's own code: no thread that launches was in an operator, a call or a data range."""
    threads = {links.thread, *links.calls["thread"]}
    host = links.host[((links.host["kind"] == OPERATOR) | (links.host["phase"] == "data")).to_numpy()]
    tables = [table[table["thread"].isin(threads).to_numpy()] for table in (host, links.calls)]
    start, end = union(*(np.concatenate([table[key].to_numpy(float) for table in tables]) for key in ("start", "end")))
    if not len(start):
        return start, end
    first, last = float(links.steps["start"].min()), float(links.steps["end"].max())
    begins, ends = np.clip(np.append(first, end), first, last), np.clip(np.append(start, last), first, last)
    long = ends - begins > HOST_CODE_US
    return begins[long], ends[long]


def union(start: np.ndarray, end: np.ndarray) -> Intervals:
    """The union of intervals, as sorted, disjoint intervals."""
    if not len(start):
        return start, end
    order = np.argsort(start)
    start, reached = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate([[True], start[1:] > reached[:-1]])
    return start[first], reached[np.append(np.flatnonzero(first)[1:] - 1, len(start) - 1)]


def queue(links: AttributedLinks) -> dict:
    """Launch delay: us from a kernel's launch call to its start.  Queue depth: kernels launched but not yet started."""
    kernels = links.gpu[(links.gpu["kind"] == "kernel").to_numpy() & (links.gpu["call"] >= 0).to_numpy()]
    if kernels.empty:
        return {"launch_delay_us": None, "queue_depth": None}
    launched, began = np.sort(kernels["launched"].to_numpy()), np.sort(kernels["start"].to_numpy())
    depth = np.arange(1, len(launched) + 1) - np.searchsorted(began, launched, side="right")
    table = pd.DataFrame({"launch_delay_us": kernels["start"] - kernels["launched"], "queue_depth": depth.clip(0)})
    stats = table.describe(percentiles=[0.5, 0.95]).rename({"50%": "p50", "95%": "p95"})
    return stats.loc[["mean", "p50", "p95", "max", "min"]].to_dict()


# ---- For a reader --------------------------------------------------------------------------------------------------

IDLE_COLUMNS = [
    Column("idle cause", lambda row: row["cause"].replace("_", " "), left=True),
    column("ms", "ms", ",.3f"),
    column("share of total", "share_of_total", ".1%"),
    column("meaning", "meaning", left=True),
]
STREAM_COLUMNS = [
    column("device, stream", "name", left=True),
    column("events", "events", ","),
    *(column(key.removesuffix("_ms").replace("_", " ") + " ms", key, ",.3f") for key in KEYS),
]


def stream_rows(timeline: dict) -> list[dict]:
    """Each device, and each of its streams."""
    rows = []
    for device in timeline["devices"]:
        rows.append(device | {"name": f"{device['device']}"})
        rows += [one | {"name": f"{device['device']}, stream {one['stream']}"} for one in device["streams"]]
    return rows
