"""How a GPU's time splits into computation, exposed communication, exposed copies and idle time, and why it idled."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.attribution.ledger import IDLE_CAUSES, KINDS, cut_to, idle_by_cause, ledger, of_steps, owners
from analysis.trace.links import AttributedLinks
from harness.base.tables import Column, column

KEYS = ("total_ms", "computation_ms", "exposed_comm_ms", "exposed_memcpy_ms", "busy_ms", "idle_ms")


def gpu_timeline(gpu: pd.DataFrame) -> dict[str, float | None]:
    """How the time of these GPU events splits, in ms, from the start of the first to the end of the last.

    Computation is any kernel other than communication, or a memset; communication is exposed while no computation
    runs, a copy while neither does.  The parts add up to the total.
    """
    if gpu.empty:
        return dict.fromkeys(KEYS)
    edges, _, kind = owners(gpu, np.array([gpu["start"].min(), gpu["end"].max()]))
    return split(np.bincount(kind, np.diff(edges), len(KINDS) + 1))


def split(us: np.ndarray) -> dict[str, float]:
    """us: of computation, exposed communication, exposed copies, and of none of them."""
    *parts, idle = (float(one) / 1e3 for one in us)
    busy = sum(parts)
    return dict(zip(KEYS, (busy + idle, *parts, busy, idle), strict=True))


def timeline_of_slices(links: AttributedLinks, slices: pd.DataFrame) -> dict[str, float | None]:
    """The same for slices of the ledger."""
    if not links.on_gpu:
        return dict.fromkeys(KEYS)
    return split(np.bincount(slices["kind"].cat.codes, slices["us"], len(KINDS) + 1))


def gpu_timelines(links: AttributedLinks, two_clocks: str | None) -> dict:
    """The split over all devices of the trace, for each device, and for each of its streams; idle time by cause.

    two_clocks: why times of GPU and host cannot be compared; what needs both is then null.
    """
    gpu, between = links.gpu, between_events(links)
    few = gpu[["device", "stream", "start", "end", "kind", "category"]]
    devices = [
        {
            "device": int(device),
            **gpu_timeline(rows),
            "streams": [
                {"stream": int(stream), "events": len(events), **gpu_timeline(events)}
                for stream, events in rows.groupby("stream")
            ],
        }
        for device, rows in few.groupby("device")
    ]
    whole, in_steps = (timeline_of_slices(links, slices) for slices in (between, of_steps(links)))
    out = whole | {"of_steps": in_steps, "devices": devices}
    compared = ("idle_by_cause", "idle_of_step_ms", "launch_delay_us", "queue_depth")
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
        for cause, us in sorted(idle_by_cause(between).items(), key=lambda item: -item[1])
    ]
    of_step = {cause: us / 1e3 / len(links.steps) for cause, us in idle_by_cause(of_steps(links)).items()}
    return out | {"idle_by_cause": causes, "idle_of_step_ms": of_step, **queue(links)}


def between_events(links: AttributedLinks) -> pd.DataFrame:
    """The slices of the whole trace, from the start of its first GPU event to the end of the last."""
    return cut_to(ledger(links), links.gpu["start"].min(), links.gpu["end"].max())


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
