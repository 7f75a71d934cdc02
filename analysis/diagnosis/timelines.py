"""When did what happen in a trace?  Thinned to what a figure can show."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from typing_extensions import NotRequired

from analysis.attribution.components import UNATTRIBUTED
from analysis.attribution.intervals import Slices, innermost, slices_of
from analysis.trace.links import OPERATOR
from analysis.trace.reasons import NO_MEMORY
from analysis.trace.timeline import Timeline, median_step
from analysis.trust.steps import ProfiledSteps
from harness.base.sections import Section
from harness.base.units import MB
from harness.schema import Document, different_lengths, field

PIECES = 1500  # of a timeline's lane at most: more cannot be seen
LANES = 8  # at most


class Lane(Document):
    name: str = field("host thread, or stream of a GPU")
    pieces: list[list] = field("[start ms, end ms, index in components]")


class StepTimeline(Document):
    step: int = field("its number")
    length_ms: float = field("with its work on the GPU")
    lanes: list[Lane] = field("of one step, thinned to what a figure shows")
    lanes_left_out: int = field("beyond the first eight")
    components: list[str] = field("parts of the model")


class MemorySeries(Document):
    peak_mb: float | None = field("MB; the others are absent without it", null=NO_MEMORY)
    of: NotRequired[str] = field("what was counted")
    allocations: NotRequired[int] = field("in the trace")
    time_ms: NotRequired[list[float]] = field("in the trace")
    allocated_mb: NotRequired[list[float]] = field("MB, the highest up to the next time")

    @staticmethod
    def contradiction(value: dict) -> str | None:
        """What is told of a peak."""
        if value.get("peak_mb") is None:
            return None
        for name in ("of", "time_ms", "allocated_mb"):
            if name not in value:
                return f"{name}: is missing"
        return different_lengths(value, "time_ms")


# ---- One step ------------------------------------------------------------------------------------


def window_of_step(timeline: Timeline, which: int) -> tuple[float, float]:
    """When a step begins and ends, in us, with its work on the GPU, which may end after the host
    has gone on."""
    steps, gpu = timeline.steps, timeline.gpu
    first, last = float(steps["start"].iloc[which]), float(steps["end"].iloc[which])
    of_step = gpu.loc[(gpu["step"] == which).to_numpy(), "end"]
    if of_step.empty:
        return first, last
    return first, max(last, float(of_step.max()))


class Piece(NamedTuple):
    """Time of a lane that one component owns, after the step began."""

    start_ms: float
    end_ms: float
    component: str


def step_timeline(timeline: Timeline) -> StepTimeline:
    """The step with the median duration as lanes of colored pieces: one per host thread and per GPU
    stream."""
    which = median_step(timeline)
    first, last = window_of_step(timeline, which)
    lanes = {**host_lanes(timeline, first, last), **gpu_lanes(timeline, first, last)}
    lanes = {name: pieces for name, pieces in lanes.items() if pieces}
    shown = names_of_lanes(lanes)
    numbers: dict[str, int] = {}  # of the components that are shown
    drawn = []
    for name in shown:
        pieces = []
        for piece in lanes[name]:
            number = numbers.setdefault(piece.component, len(numbers))
            pieces.append([piece.start_ms, piece.end_ms, number])
        drawn.append(Lane(name=name, pieces=pieces))
    return StepTimeline(
        step=int(timeline.steps["number"].iloc[which]),
        length_ms=(last - first) / 1e3,
        lanes=drawn,
        lanes_left_out=len(lanes) - len(shown),
        components=[*numbers],
    )


def host_lanes(timeline: Timeline, first: float, last: float) -> dict[str, list[Piece]]:
    """The threads on which operators run, by name."""
    host = timeline.host
    component = host["component"].fillna(UNATTRIBUTED).to_numpy(object)
    inside = ((host["until"] > first) & (host["start"] < last)).to_numpy()
    is_operator, thread = (host["kind"] == OPERATOR).to_numpy(), host["thread"].to_numpy()
    lanes = {}
    for number in np.unique(thread[is_operator & inside]):
        name = "host" if number == timeline.thread else f"host thread {number}"
        slices = innermost(host, (thread == number) & inside, is_operator)
        lanes[name] = pieces_of(slices, component, first, last)
    return lanes


def gpu_lanes(timeline: Timeline, first: float, last: float) -> dict[str, list[Piece]]:
    """The streams of all devices, by name."""
    gpu = timeline.gpu
    component = gpu["component"].fillna(UNATTRIBUTED).to_numpy(object)
    lanes = {}
    for (device, stream), rows in gpu.groupby(["device", "stream"]).indices.items():
        name = f"GPU {device} stream {stream}"
        lanes[name] = pieces_of(slices_of(gpu, rows), component, first, last)
    return lanes


def names_of_lanes(lanes: dict[str, list[Piece]]) -> list[str]:
    """The thread of the steps and the busiest others, LANES at most: threads before streams."""
    busy_ms = {}
    for name, pieces in lanes.items():
        busy_ms[name] = sum(piece.end_ms - piece.start_ms for piece in pieces)
    busiest = sorted(lanes, key=lambda name: (name != "host", -busy_ms[name]))[:LANES]
    return sorted(busiest, key=lambda name: "GPU" in name)


def pieces_of(slices: Slices, component: np.ndarray, first: float, last: float) -> list[Piece]:
    """What owns the time between first and last, in us; component: [rows of slices].

    Neighboring pieces of one component are merged where the gap is too small to be seen, and what
    is too short to be seen beside another piece is left out.
    """
    inside = np.flatnonzero((slices.end > first) & (slices.start < last))
    start_us = np.clip(slices.start[inside], first, last) - first
    end_us = np.clip(slices.end[inside], first, last) - first
    owner = component[slices.row[inside]]
    too_short_us = (last - first) / PIECES
    if len(owner) == 0:
        return []
    changes = owner[1:] != owner[:-1]
    is_apart = start_us[1:] - end_us[:-1] >= too_short_us
    begins = np.append(True, changes | is_apart)
    ends = np.append(begins[1:], True)
    seen: list[tuple[float, float, str]] = []
    for start, end, name in zip(
        start_us[begins].tolist(), end_us[ends].tolist(), owner[begins].tolist(), strict=True
    ):
        if not seen:
            seen.append((start, end, name))
            continue
        began, ended, before = seen[-1]
        is_near = start - ended < too_short_us
        if is_near and name == before:
            seen[-1] = began, end, name
        elif not is_near or end - start >= too_short_us:
            seen.append((start, end, name))
    return [Piece(round(start / 1e3, 4), round(end / 1e3, 4), name) for start, end, name in seen]


# ---- Memory --------------------------------------------------------------------------------------


def memory_series(timeline: Timeline) -> MemorySeries:
    """Allocated MB over time, if the trace recorded it, thinned to what a figure shows."""
    memory = timeline.trace.memory
    if memory.empty:
        return MemorySeries(peak_mb=None)
    on_gpu = bool(memory["on_gpu"].any())
    memory = memory[memory["on_gpu"] == on_gpu].sort_values("start", kind="stable")
    total_mb = memory["total"].to_numpy() / MB
    start_ms = memory["start"].to_numpy() / 1e3
    picked = np.linspace(0, len(total_mb) - 1, min(len(total_mb), PIECES)).astype(int)
    # Of each interval, so that thinning loses no peak
    highest_mb = np.maximum.reduceat(total_mb, picked)
    what = "Host memory allocated since recording began"
    if on_gpu:
        what = "GPU memory allocated"
    return MemorySeries(
        peak_mb=float(total_mb.max()),
        of=what,
        allocations=int((memory["bytes"] > 0).sum()),
        time_ms=start_ms[picked].round(4).tolist(),
        allocated_mb=highest_mb.round(4).tolist(),
    )


# ---- For a reader --------------------------------------------------------------------------------


def timeline_text(timeline: StepTimeline, steps: ProfiledSteps) -> str:
    """How long the step of the timeline takes on the host, and with its work on the GPU, which may
    end later."""
    for row in steps.rows:
        if row.number == timeline.step and timeline.length_ms > row.duration_ms:
            return (
                f"step {timeline.step}, {row.duration_ms:.2f} ms on the host; the GPU, which runs"
                f" behind, ends its work {timeline.length_ms - row.duration_ms:.2f} ms later"
            )
    return f"step {timeline.step}, {timeline.length_ms:.2f} ms"


def memory_section(memory: MemorySeries) -> Section:
    title = "Memory of the trace"
    if memory.peak_mb is None:
        return Section(title, facts={"Not recorded": memory.reason_of("peak_mb")})
    peak = f"{memory.peak_mb:,.1f} MB: {memory.of}"
    return Section(title, facts={"Peak": peak}, figure="memory")
