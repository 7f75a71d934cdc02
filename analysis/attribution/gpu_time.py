"""How a GPU's time splits into computation, exposed communication, exposed copies and idle time,
and why it idled."""

import numpy as np
import pandas as pd

from analysis.attribution.ledger import (
    IDLE_CAUSES,
    KINDS,
    cut_to,
    idle_by_cause,
    of_steps,
    owners_of,
)
from analysis.trace.timeline import Timeline
from harness.base.sections import Section
from harness.base.tables import Column, column
from harness.base.text import significant
from harness.schema import because

KEYS = ("total_ms", "computation_ms", "exposed_comm_ms", "exposed_memcpy_ms", "busy_ms", "idle_ms")


def gpu_timeline(gpu: pd.DataFrame) -> dict[str, float | None]:
    """How the time of these GPU events splits, in ms, from the start of the first to the end of the
    last.

    Computation is any kernel other than communication, or a memset; communication is exposed while
    no computation runs, a copy while neither does.  The parts add up to the total.
    """
    if gpu.empty:
        return dict.fromkeys(KEYS)
    owners = owners_of(gpu, np.array([gpu["start"].min(), gpu["end"].max()]))
    return split(np.bincount(owners.kind, np.diff(owners.edges), len(KINDS) + 1))


def split(us: np.ndarray) -> dict[str, float]:
    """us: of computation, exposed communication, exposed copies, and of none of them."""
    *parts, idle = (float(one) / 1e3 for one in us)
    busy = sum(parts)
    return dict(zip(KEYS, (busy + idle, *parts, busy, idle), strict=True))


def timeline_of_slices(timeline: Timeline, slices: pd.DataFrame) -> dict[str, float | None]:
    """The same for slices of the ledger."""
    if not timeline.on_gpu:
        return dict.fromkeys(KEYS)
    return split(np.bincount(slices["kind"].cat.codes, slices["us"], len(KINDS) + 1))


def gpu_timelines(timeline: Timeline, two_clocks: str | None) -> dict:
    """The split over all devices of the trace, for each device, and for each of its streams; idle
    time by cause.

    two_clocks: why times of GPU and host cannot be compared; what needs both is then null.
    """
    gpu = timeline.gpu
    between = cut_to(
        timeline.slices, gpu["start"].min(), gpu["end"].max()
    )  # from its first event to the last
    few = gpu[["device", "stream", "start", "end", "kind", "category"]]
    devices = []
    for device, rows in few.groupby("device"):
        by_stream = rows.groupby("stream")
        streams = [
            {"stream": int(name), "events": len(one), **gpu_timeline(one)}
            for name, one in by_stream
        ]
        streams.sort(key=lambda one: -one["busy_ms"])
        devices.append({"device": int(device), **gpu_timeline(rows), "streams": streams})
    whole, in_steps = (
        timeline_of_slices(timeline, slices) for slices in (between, of_steps(timeline))
    )
    out = whole | {"of_steps": in_steps, "devices": devices}
    compared = ("idle_by_cause", "idle_of_step_ms", "launch_delay_us", "queue_depth")
    if gpu.empty or two_clocks:
        return (
            out | dict.fromkeys(compared) | (because(two_clocks, *compared) if two_clocks else {})
        )
    total_us = 1e3 * out["total_ms"] or 1.0
    causes = [
        {
            "cause": cause,
            "ms": us / 1e3,
            "share_of_total": us / total_us,
            "meaning": IDLE_CAUSES[cause],
        }
        for cause, us in sorted(idle_by_cause(between).items(), key=lambda item: -item[1])
    ]
    of_step = {
        cause: us / 1e3 / len(timeline.steps)
        for cause, us in idle_by_cause(of_steps(timeline)).items()
    }
    return out | {"idle_by_cause": causes, "idle_of_step_ms": of_step, **queue(timeline)}


def launched_events(timeline: Timeline) -> pd.DataFrame:
    """The rows of timeline.gpu whose launch call is in the trace, in the order of their launches.
    Copies and memory sets fill the queue, too.  Of a replayed graph, which one call launches as a
    whole, only the first event to begin."""
    events = timeline.gpu[(timeline.gpu["call"] >= 0).to_numpy()].sort_values(
        ["launched", "start"], kind="stable"
    )
    later_of_graph = events["of_graph"].to_numpy(bool) & events["call"].duplicated().to_numpy()
    return events[~later_of_graph]


def queue(timeline: Timeline) -> dict:
    """Launch delay: us from a kernel's launch call to its start.  Queue depth: events launched but
    not yet started.  A graph counts once in both."""
    events = launched_events(timeline)
    kernels = events[(events["kind"] == "kernel").to_numpy() | events["of_graph"].to_numpy(bool)]
    if kernels.empty:
        return {"launch_delay_us": None, "queue_depth": None}
    launched, began = np.sort(events["launched"].to_numpy()), np.sort(events["start"].to_numpy())
    depth = np.arange(1, len(launched) + 1) - np.searchsorted(began, launched, side="right")
    delay = kernels["start"] - kernels["launched"]
    table = pd.DataFrame(
        {"launch_delay_us": delay, "queue_depth": pd.Series(depth.clip(0), events.index)}
    )
    stats = table.describe(percentiles=[0.5, 0.95]).rename({"50%": "p50", "95%": "p95"})
    return stats.loc[["mean", "p50", "p95", "max", "min"]].to_dict()


# ---- For a reader --------------------------------------------------------------------------------

IDLE_COLUMNS = [
    Column("idle cause", lambda row: row["cause"].replace("_", " "), left=True),
    column("ms", "ms", "~3"),
    column("share of total", "share_of_total", ".1%"),
    column("meaning", "meaning", left=True),
]
STREAM_COLUMNS = [
    column("device, stream", "name", left=True),
    column("events", "events", ","),
    *(column(key.removesuffix("_ms").replace("_", " ") + " ms", key, "~3") for key in KEYS),
]


def stream_rows(timeline: dict) -> list[dict]:
    """Each device, and each of its streams."""
    rows = []
    for device in timeline["devices"]:
        rows.append(device | {"name": f"{device['device']}"})
        rows += [
            one | {"name": f"{device['device']}, stream {one['stream']}"}
            for one in device["streams"]
        ]
    return rows


def gpu_section(analysis: dict) -> Section:
    """How the GPU's time splits, why it is idle, and how far the host is ahead of it; empty without
    GPU events."""
    timeline, unreliable = analysis["gpu_timeline"], analysis["integrity"]["unreliable"]
    if timeline["total_ms"] is None:
        return Section("GPU")
    parts = {"computation": "computation_ms", "exposed communication": "exposed_comm_ms"}
    parts |= {"exposed copies": "exposed_memcpy_ms", "idle": "idle_ms"}
    split = ", ".join(f"{name} {significant(timeline[key], most=3)}" for name, key in parts.items())
    causes, delay = (
        [row for row in timeline["idle_by_cause"] or [] if row["ms"]],
        timeline["launch_delay_us"],
    )
    idle = Section(
        "GPU idle time by cause", IDLE_COLUMNS, causes, warning=unreliable.get("idle_by_cause", "")
    )
    queue = Section("Launch queue", figure="queue")
    if delay:
        median, p95 = (significant(delay[name], most=1) for name in ("p50", "p95"))
        times = f"median {median} us, p95 {p95} us, from the call to the kernel's start"
        depth = (
            f"mean {significant(timeline['queue_depth']['mean'], most=1)} events launched but not"
            " started"
        )
        queue.facts = {"Launch delay": times, "Queue depth": depth}
    note = ["Times are ms of the trace, from its first GPU event to the last"]
    facts = {
        "GPU": f"{significant(timeline['total_ms'], most=3)} ms from first to last event: {split}"
    }
    return Section("GPU", STREAM_COLUMNS, stream_rows(timeline), note, facts, parts=[idle, queue])
