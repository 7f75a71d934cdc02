"""How a GPU's time splits into computation, exposed communication, exposed copies and idle time,
why it idled, how short its kernels are, and how far ahead of it the host runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.attribution.ledger.kinds import IDLE_CAUSES, KINDS
from analysis.attribution.ledger.of_steps import cut_to, idle_by_cause, of_steps
from analysis.attribution.ledger.on_gpu import owners_of
from analysis.trace.reasons import NO_GPU
from analysis.trace.timeline import Timeline, median_step
from harness.base.sections import Section
from harness.base.tables import Column, column
from harness.base.text import significant
from harness.schema import Document, Unknown, field, fields_of

NO_LAUNCH = "the trace has no launch call of any kernel"
DURATIONS_US = (2, 5, 10, 20, 50, 100, 1000, None)  # upper limits of the histogram of kernels
POINTS = 200  # of the queue over a step


class GpuSplit(Document):
    total_ms: float | None = field("from the first GPU event to the end of the last", null=NO_GPU)
    computation_ms: float | None = field(
        "any kernel other than communication, or a memory set", null=NO_GPU
    )
    exposed_comm_ms: float | None = field(
        "communication that no computation overlaps, of the host too", null=NO_GPU
    )
    exposed_memcpy_ms: float | None = field("copies that nothing else overlaps", null=NO_GPU)
    busy_ms: float | None = field("the sum of these", null=NO_GPU)
    idle_ms: float | None = field("the rest", null=NO_GPU)

    @staticmethod
    def contradiction(value: dict) -> str | None:
        """All are known of a GPU, and none without."""
        for name in fields_of(GpuSplit):
            if (value.get(name) is None) != (value.get("total_ms") is None):
                return f"{name}: is {value.get(name)}, and total_ms {value.get('total_ms')}"
        return None


class StreamSplit(GpuSplit):
    stream: int = field("its number")
    events: int = field("in it")


class DeviceSplit(GpuSplit):
    device: int = field("its number")
    streams: list[StreamSplit] = field("of this device")


class IdleRow(Document):
    cause: str = field("of idle time")
    ms: float = field("of it")
    share_of_total: float = field("of total_ms")
    meaning: str = field("of the cause")


class KernelDurations(Document):
    up_to_us: float | None = field(
        "microseconds, and longer than the row before", null="the longest kernels"
    )
    kernels_per_step: float = field("of these")
    share_of_kernels: float = field("of these")
    share_of_time: float = field("of all kernels")


class Queue(Document):
    step: int = field("its number")
    time_ms: list[float] = field("after it began")
    queued: list[int] = field("events launched but not started")
    ahead_ms: list[float] = field("that the latest one has to wait")


class GpuTimeline(GpuSplit):
    of_steps: GpuSplit = field("the same for the time of the steps")
    devices: list[DeviceSplit] = field("the same for each device, and for each of its streams")
    idle_by_cause: list[IdleRow] | None = field("most first", null=NO_GPU)
    idle_of_step_ms: dict[str, float] | None = field(
        "by cause; adds up to idle in `components`", null=NO_GPU
    )
    launch_delay_us: dict[str, float] | None = field(
        "from launch to start: mean, p50, ...", null=NO_LAUNCH
    )
    queue_depth: dict[str, float] | None = field(
        "events launched but not started: mean, p50, ...", null=NO_LAUNCH
    )
    kernel_durations: list[KernelDurations] = field("how many kernels are how short")
    queue_over_step: Queue | None = field("the step of median duration", null=NO_LAUNCH)


def gpu_timeline(timeline: Timeline, two_clocks: str | None) -> GpuTimeline:
    """The split over all devices of the trace, for each device, and for each of its streams; idle
    time by cause.

    two_clocks: why times of GPU and host cannot be compared; what needs both is then null.
    """
    gpu = timeline.gpu
    from_first_to_last = cut_to(timeline.slices, gpu["start"].min(), gpu["end"].max())
    split = split_of_slices(timeline, from_first_to_last)
    idle_rows = idle_of_step_ms = None
    launches = Launches(None, None)
    if two_clocks:
        idle_rows = idle_of_step_ms = Unknown(two_clocks)
        launches = Launches(Unknown(two_clocks), Unknown(two_clocks))
    elif not gpu.empty:
        idle_rows = rows_of_causes(from_first_to_last, split.total_ms)
        idle_of_step_ms = {}
        for cause, us in idle_by_cause(of_steps(timeline)).items():
            idle_of_step_ms[cause] = us / 1e3 / len(timeline.steps)
        launches = launches_of(timeline)
    return GpuTimeline(
        **split._asdict(),
        of_steps=GpuSplit(**split_of_slices(timeline, of_steps(timeline))._asdict()),
        devices=splits_of_devices(gpu),
        idle_by_cause=idle_rows,
        idle_of_step_ms=idle_of_step_ms,
        launch_delay_us=launches.delay_us,
        queue_depth=launches.queue_depth,
        kernel_durations=kernel_durations(timeline),
        queue_over_step=queue_over_step(timeline),
    )


# ---- How its time splits -------------------------------------------------------------------------


class Split(NamedTuple):
    """The fields of a GpuSplit."""

    total_ms: float | None
    computation_ms: float | None
    exposed_comm_ms: float | None
    exposed_memcpy_ms: float | None
    busy_ms: float | None
    idle_ms: float | None


NO_SPLIT = Split(None, None, None, None, None, None)


def split_of_events(gpu: pd.DataFrame) -> Split:
    """How the time of these GPU events splits, from the start of the first to the end of the last.

    Computation is any kernel other than communication, or a memset; communication is exposed while
    no computation runs, a copy while neither does.  The parts add up to the total.
    """
    if gpu.empty:
        return NO_SPLIT
    owners = owners_of(gpu, np.array([gpu["start"].min(), gpu["end"].max()]))
    return split_of_kinds(owners.kind, np.diff(owners.edges))


def split_of_slices(timeline: Timeline, slices: pd.DataFrame) -> Split:
    """The same for slices of the ledger."""
    if not timeline.on_gpu:
        return NO_SPLIT
    return split_of_kinds(slices["kind"].cat.codes, slices["us"])


def split_of_kinds(kind: np.ndarray, us: np.ndarray) -> Split:
    """kind, us: [slices] numbers of KINDS, or the next one for idle time, and how long each
    takes."""
    sums_us = np.bincount(kind, us, len(KINDS) + 1)
    computation, communication, copies, idle = (float(sum_us) / 1e3 for sum_us in sums_us)
    busy = computation + communication + copies
    return Split(busy + idle, computation, communication, copies, busy, idle)


def splits_of_devices(gpu: pd.DataFrame) -> list[DeviceSplit]:
    """Each device, with its streams from the busiest on."""
    devices = []
    columns = gpu[["device", "stream", "start", "end", "kind", "category"]]
    for device, of_device in columns.groupby("device"):
        streams = []
        for stream, of_stream in of_device.groupby("stream"):
            split = split_of_events(of_stream)._asdict()
            streams.append(StreamSplit(stream=int(stream), events=len(of_stream), **split))
        streams.sort(key=lambda stream: -stream.busy_ms)
        split = split_of_events(of_device)._asdict()
        devices.append(DeviceSplit(device=int(device), streams=streams, **split))
    return devices


def rows_of_causes(slices: pd.DataFrame, total_ms: float) -> list[IdleRow]:
    """Idle time of slices of the ledger, most first."""
    rows = []
    for cause, us in idle_by_cause(slices).items():
        row = IdleRow(
            cause=cause,
            ms=us / 1e3,
            share_of_total=us / (1e3 * total_ms or 1.0),
            meaning=IDLE_CAUSES[cause],
        )
        rows.append(row)
    return sorted(rows, key=lambda row: -row.ms)


# ---- Launches ------------------------------------------------------------------------------------


class Launches(NamedTuple):
    """Mean, p50, p95, max and min; None without a launch of any kernel."""

    delay_us: dict[str, float] | Unknown | None  # from a kernel's launch call to its start
    queue_depth: dict[str, float] | Unknown | None  # events launched but not yet started


def launches_of(timeline: Timeline) -> Launches:
    """A graph counts once in both."""
    events = launched_events(timeline)
    kernels = events[(events["kind"] == "kernel").to_numpy() | events["of_graph"].to_numpy(bool)]
    if kernels.empty:
        return Launches(None, None)
    launched, began = np.sort(events["launched"].to_numpy()), np.sort(events["start"].to_numpy())
    depth = np.arange(1, len(launched) + 1) - np.searchsorted(began, launched, side="right")
    delay_us = (kernels["start"] - kernels["launched"]).to_numpy()
    return Launches(delay_us=described(delay_us), queue_depth=described(depth.clip(0)))


def described(values: np.ndarray) -> dict[str, float]:
    """Mean, median, 95th percentile, largest and smallest of values [N]."""
    median, high = np.quantile(values, [0.5, 0.95])
    statistics = {"mean": values.mean(), "p50": median, "p95": high}
    statistics |= {"max": values.max(), "min": values.min()}
    return {name: float(value) for name, value in statistics.items()}


def launched_events(timeline: Timeline) -> pd.DataFrame:
    """The rows of timeline.gpu whose launch call is in the trace, in the order of their launches.
    Copies and memory sets fill the queue, too.  Of a replayed graph, which one call launches as a
    whole, only the first event to begin."""
    events = timeline.gpu[(timeline.gpu["call"] >= 0).to_numpy()]
    events = events.sort_values(["launched", "start"], kind="stable")
    later_of_graph = events["of_graph"].to_numpy(bool) & events["call"].duplicated().to_numpy()
    return events[~later_of_graph]


def kernel_durations(timeline: Timeline) -> list[KernelDurations]:
    """How many of the steps' kernels are how short, and their share of the kernels' time."""
    is_kernel = (timeline.gpu["kind"] == "kernel") & (timeline.gpu["step"] >= 0)
    kernels = timeline.gpu[is_kernel.to_numpy()]
    us = (kernels["end"] - kernels["start"]).to_numpy()
    which = np.searchsorted(DURATIONS_US[:-1], us)
    counts = np.bincount(which, minlength=len(DURATIONS_US))
    sums_us = np.bincount(which, us, minlength=len(DURATIONS_US))
    rows = []
    for limit, n, sum_us in zip(DURATIONS_US, counts, sums_us, strict=True):
        if n:
            row = KernelDurations(
                up_to_us=limit,
                kernels_per_step=float(n / len(timeline.steps)),
                share_of_kernels=float(n / len(us)),
                share_of_time=float(sum_us / us.sum()) if us.sum() else 0.0,
            )
            rows.append(row)
    return rows


def queue_over_step(timeline: Timeline) -> Queue | None:
    """Kernels, copies, memory sets, and graphs as a whole, launched but not started, and how long
    the latest one has to wait, over the step of median duration."""
    events = launched_events(timeline)
    if not ((events["kind"] == "kernel") | events["of_graph"]).any():
        return None
    step = timeline.steps.iloc[median_step(timeline)]
    times = np.linspace(step["start"], step["end"], POINTS)
    launched, began = events["launched"].to_numpy(), events["start"].to_numpy()
    n_launched = np.searchsorted(launched, times, side="right")
    n_began = np.searchsorted(np.sort(began), times, side="right")
    until_latest = np.maximum(0.0, began[n_launched - 1] - times)
    ahead_us = np.where(n_launched > 0, until_latest, 0.0)
    return Queue(
        step=int(step["number"]),
        time_ms=((times - step["start"]) / 1e3).round(4).tolist(),
        queued=np.maximum(0, n_launched - n_began).tolist(),
        ahead_ms=(ahead_us / 1e3).round(4).tolist(),
    )


# ---- For a reader --------------------------------------------------------------------------------


@dataclass
class SplitRow:
    """A device, or one of its streams."""

    name: str
    events: int | None  # None: of a device
    split: GpuSplit


def split_column(title: str, key: str) -> Column:
    return Column(title, lambda row: getattr(row.split, key), "~3")


SPLIT_COLUMNS = [
    column("device, stream", "name", left=True),
    column("events", "events", ","),
    split_column("total ms", "total_ms"),
    split_column("computation ms", "computation_ms"),
    split_column("exposed comm ms", "exposed_comm_ms"),
    split_column("exposed memcpy ms", "exposed_memcpy_ms"),
    split_column("busy ms", "busy_ms"),
    split_column("idle ms", "idle_ms"),
]
IDLE_COLUMNS = [
    Column("idle cause", lambda row: row.cause.replace("_", " "), left=True),
    column("ms", "ms", "~3"),
    column("share of total", "share_of_total", ".1%"),
    column("meaning", "meaning", left=True),
]
DURATION_COLUMNS = [
    Column(
        "kernels of", lambda row: f"up to {row.up_to_us} us" if row.up_to_us else "more", left=True
    ),
    column("per step", "kernels_per_step", "~1"),
    column("share of kernels", "share_of_kernels", ".1%"),
    column("share of time", "share_of_time", ".1%"),
]


def gpu_section(timeline: GpuTimeline, unreliable: str = "") -> Section:
    """How the GPU's time splits, why it is idle, and how far the host is ahead of it; empty without
    GPU events.  unreliable: why causes of idle time should not be relied on."""
    if timeline.total_ms is None:
        return Section("GPU")
    parts_ms = {
        "computation": timeline.computation_ms,
        "exposed communication": timeline.exposed_comm_ms,
        "exposed copies": timeline.exposed_memcpy_ms,
        "idle": timeline.idle_ms,
    }
    parts = ", ".join(f"{name} {significant(ms, most=3)}" for name, ms in parts_ms.items())
    total_ms = significant(timeline.total_ms, most=3)
    causes = [row for row in timeline.idle_by_cause or [] if row.ms]
    idle = Section("GPU idle time by cause", IDLE_COLUMNS, causes, warning=unreliable)
    return Section(
        "GPU",
        SPLIT_COLUMNS,
        split_rows(timeline),
        ["Times are ms of the trace, from its first GPU event to the last"],
        {"GPU": f"{total_ms} ms from first to last event: {parts}"},
        parts=[idle, queue_section(timeline)],
    )


def split_rows(timeline: GpuTimeline) -> list[SplitRow]:
    """Each device, and each of its streams below it."""
    rows = []
    for device in timeline.devices:
        rows.append(SplitRow(f"{device.device}", None, device))
        for stream in device.streams:
            name = f"{device.device}, stream {stream.stream}"
            rows.append(SplitRow(name, stream.events, stream))
    return rows


def queue_section(timeline: GpuTimeline) -> Section:
    section = Section("Launch queue", figure="queue")
    delay_us, depth = timeline.launch_delay_us, timeline.queue_depth
    if delay_us:
        median, p95 = significant(delay_us["p50"], most=1), significant(delay_us["p95"], most=1)
        mean = significant(depth["mean"], most=1)
        times = f"median {median} us, p95 {p95} us, from the call to the kernel's start"
        section.facts = {
            "Launch delay": times,
            "Queue depth": f"mean {mean} events launched but not started",
        }
    return section


def duration_section(timeline: GpuTimeline) -> Section:
    return Section("Durations of the steps' kernels", DURATION_COLUMNS, timeline.kernel_durations)
