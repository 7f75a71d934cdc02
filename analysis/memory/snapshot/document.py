"""memory_snapshot.json: who held the memory of each device, by category and by line."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from analysis.memory.snapshot.lines import LineBytes, left_by_step, lines_at_peak, modules_at_peak
from analysis.memory.snapshot.reading import (
    NO_TIME,
    OUT_OF_MEMORY,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
)
from analysis.memory.snapshot.replay import Replay
from analysis.memory.snapshot.savings import savings_of
from analysis.memory.snapshot.stacks import PHASE_NAMES, Line
from harness.base.text import count_of
from harness.base.units import megabytes
from harness.schema import Document, field

TWO_MOMENTS = "state is twice the gradients, as Adam's moments are"
# What optimizer state is, by how many times the gradients it has.
STATE_TIMES = {
    1: "state is as large as the gradients, as one moment is",
    2: TWO_MOMENTS,
    4: "state is 4 times the gradients, as Adam's moments in fp32 are beside gradients in bf16",
    6: "state is 6 times the gradients, as Adam's moments and weights in fp32 are beside gradients"
    " in bf16",
}
NO_LINE = "no frame of the program in the stack: C++ alone, or none"
NO_EVENTS = "the recording has no event that allocates more than was there before it"
NOTHING_LOST = "nothing that can be seen"
NO_CARD = "no snapshot tells the device; --device-name NAME does, or the summary of a run beside it"
# What people give for max_entries; torch has no limit by default.
RING_SIZES = (1_000, 10_000, 50_000, 65_536, 100_000, 200_000, 500_000, 1_000_000)


class HeldBytes(Document):
    gradients: int = field("made by the backward pass, and still there after it")
    optimizer_state: int = field("made by a step of the optimizer, and still there after it")
    activations: int = field("made by the forward pass, and freed in the backward pass or later")
    kept: int = field("made by the forward pass or the program, and not freed")
    temporaries: int = field("freed in the phase that made them")
    before_the_recording: int = field("parameters, and whatever else was there before")


class SnapshotLine(Document):
    category: str = field("as in held")
    where: str | None = field("file and line of the program, model.py:39", null=NO_LINE)
    function: str | None = field("that the line is in", null=NO_LINE)
    caller: str | None = field(
        "function and line of the program that called it", null="none in the stack"
    )
    bytes: int = field("at the peak, as requested; of what was there before, its blocks at the end")
    count: int = field("of allocations")


class SnapshotModule(Document):
    kind: str | None = field(
        "attention, MLP, loss, embedding, normalization", null="no function that it calls tells"
    )
    where: str | None = field(
        "line of forward() that calls it, model.py:382", null="outside of forward()"
    )
    bytes: int = field("at the peak, of what was made in it; the backward pass names no module")
    count: int = field("of allocations")


class LeftByStep(Document):
    where: str | None = field("file and line of the program", null=NO_LINE)
    function: str | None = field("that the line is in", null=NO_LINE)
    caller: str | None = field("that called it", null="none in the stack")
    bytes_per_step: float = field("more at the end of a step than of the one before, median")
    steps: int = field("that are compared with the one before")


class WouldLower(Document):
    change: str = field("to try")
    at_most_bytes: int = field("by which the peak, or what is reserved, would be lower at most")


class RanOut(Document):
    asked_bytes: int = field("that could not be allocated")
    driver_free_bytes: int = field("that the driver had then")
    where: str | None = field("file and line of the program that asked", null=NO_LINE)


class SnapshotDevice(Document):
    device: int = field("number")
    before_bytes: int = field("allocated as the recording began")
    peak_bytes: int = field("the most that was allocated: what was there before, and requests")
    peak_event: int | None = field(
        "the event of the device that reached it, from 0", null=NO_EVENTS
    )
    peak_phase: str | None = field("forward, backward, optimizer", null="no stack tells the phase")
    end_bytes: int = field("allocated at the end, in blocks, as torch.cuda.memory_allocated()")
    reserved_bytes: int = field("at the end")
    peak_reserved_bytes: int = field("the most within the recording")
    free_reserved_bytes: int = field("reserved and free at the end")
    largest_free_bytes: int = field("the largest block of these")
    free_in_pools_bytes: int = field(
        "of these, what is in pools of CUDA graphs or of torch.cuda.MemPool, for them alone"
    )
    segments_taken: int = field(
        "from the driver within the recording; mapped parts of expandable ones"
    )
    segments_given_back: int = field("to the driver")
    out_of_memory: int = field("how often memory ran out")
    ran_out: RanOut | None = field("the last time", null="memory did not run out")
    held: HeldBytes = field("bytes at the peak, which they add up to")
    lines: list[SnapshotLine] = field("largest first")
    modules: list[SnapshotModule] = field("largest first; empty where no stack has a forward()")
    left_by_step: list[LeftByStep] = field(
        "what every step leaves; empty where fewer than two are seen"
    )
    steps: int = field("of an optimizer, else backward passes, that end within the recording")
    would_lower: list[WouldLower] = field("changes, the one with the largest bound first")
    adds_up: str | None = field(
        "what gradients, state and what was there before say of each other",
        null="the recording made no gradients that fit them",
    )
    lost: str | None = field("what its recording lacks", null=NOTHING_LOST)
    events: int = field("that the recording has")
    recorded_s: float | None = field(
        "seconds from the first event to the last", null="without times"
    )


class ComparedLine(Document):
    where: str | None = field("file and line of the program", null=NO_LINE)
    category: str = field("as in held")
    bytes: int = field("at the peak of this snapshot")
    other_bytes: int = field("at the peak of the other one")


class PredictedBytes(Document):
    category: str = field("of the prediction, or several together")
    predicted_bytes: float = field("by prediction.json, at its peak")
    held_bytes: int = field("at the peak of the snapshot")
    difference: str = field("what explains it")


class MemorySnapshot(Document):
    snapshot: str = field("name of the file")
    devices: list[SnapshotDevice] = field("those with memory")
    headline: str = field("where the peak is, and what held it; of the device that holds most")
    lost: str | None = field("the same of all devices", null=NOTHING_LOST)
    card_bytes: int | None = field("memory of the device", null=NO_CARD)
    compared_with: str | None = field(
        "name of the other file", null="nothing was given with --compare"
    )
    compared: list[ComparedLine] | None = field(
        "lines that differ, the largest difference first", null="nothing was given with --compare"
    )
    predicted: list[PredictedBytes] | None = field(
        "beside what was held", null="no --prediction was given, and none stands beside the file"
    )

    @property
    def fullest(self) -> SnapshotDevice:
        """The device that holds most."""
        return max(self.devices, key=lambda device: device.peak_bytes)


def device_row(replay: Replay, expandable_segments: bool) -> SnapshotDevice:
    free = replay.free_blocks()
    phase = PHASE_NAMES[replay.peak_phase()]
    return SnapshotDevice(
        device=replay.recording.device,
        before_bytes=replay.before_bytes,
        peak_bytes=replay.peak_bytes,
        peak_event=replay.peak_event,
        peak_phase=phase if replay.phases.are_told or phase else None,
        end_bytes=replay.end_bytes(),
        reserved_bytes=replay.recording.reserved_bytes,
        peak_reserved_bytes=replay.peak_reserved_bytes(),
        free_reserved_bytes=sum(free),
        largest_free_bytes=max(free, default=0),
        free_in_pools_bytes=sum(replay.free_blocks(in_pools=True)),
        segments_taken=replay.count_of(SEGMENT_ALLOC, SEGMENT_MAP),
        segments_given_back=replay.count_of(SEGMENT_FREE, SEGMENT_UNMAP),
        out_of_memory=replay.count_of(OUT_OF_MEMORY),
        ran_out=last_time_ran_out(replay),
        held=HeldBytes(**replay.held),
        lines=[line_row(row) for row in lines_at_peak(replay)],
        modules=[SnapshotModule(**row._asdict()) for row in modules_at_peak(replay)],
        left_by_step=left_rows(replay),
        steps=len(replay.phases.step_ends),
        would_lower=[
            WouldLower(change=saving.change, at_most_bytes=saving.at_most_bytes)
            for saving in savings_of(replay, expandable_segments)
        ],
        adds_up=sums_text(replay),
        lost=lost_of(replay),
        events=len(replay.recording.action),
        recorded_s=recorded_s(replay),
    )


def place(line: Line | None) -> dict[str, str | None]:
    """where, function and caller of a row."""
    if line is None:
        return {"where": None, "function": None, "caller": None}
    return {"where": line.where, "function": line.function, "caller": line.caller or None}


def line_row(row: LineBytes) -> SnapshotLine:
    return SnapshotLine(category=row.category, **place(row.line), bytes=row.bytes, count=row.count)


def left_rows(replay: Replay) -> list[LeftByStep]:
    rows = []
    for left in left_by_step(replay):
        values = place(left.line)
        rows.append(LeftByStep(**values, bytes_per_step=left.bytes_per_step, steps=left.steps))
    return rows


def last_time_ran_out(replay: Replay) -> RanOut | None:
    recording = replay.recording
    events = np.flatnonzero(recording.action == OUT_OF_MEMORY)
    if not len(events):
        return None
    line = replay.line_of(int(recording.stack[events[-1]]))
    return RanOut(
        asked_bytes=int(recording.size_bytes[events[-1]]),
        driver_free_bytes=recording.driver_free_bytes[-1],
        where=line.where if line else None,
    )


def recorded_s(replay: Replay) -> float | None:
    times = replay.recording.time_us
    times = times[times != NO_TIME]
    return float(times[-1] - times[0]) / 1e6 if len(times) else None


# ---- What sums and counts say --------------------------------------------------------------------

CLOSE = 0.01  # relative; sums of parameters, gradients and moments agree better than that
CLOSE_BEFORE = 0.03  # with buffers and workspaces beside them


def sums_text(replay: Replay) -> str | None:
    """Parameters, gradients and each of Adam's moments have equal sums where all are of one
    dtype."""
    gradients = most_of(replay, "gradients")
    state = most_of(replay, "optimizer_state")
    if not gradients:
        return None
    for times, text in STATE_TIMES.items():
        if abs(state / gradients - times) < times * CLOSE / 2:
            return text
    before = replay.before_bytes / gradients
    if abs(before - 3) < 3 * CLOSE_BEFORE:
        return "before it 3 times the gradients, as parameters and two moments are"
    if abs(before - 1) < CLOSE_BEFORE:
        return "before it as much as the gradients, as parameters are"
    return None


def most_of(replay: Replay, category: str) -> int:
    """The most bytes of a category at any time."""
    totals = replay.totals_of_category(list(replay.held).index(category))
    return int(totals.max()) if len(totals) else 0


def lost_text(devices: Sequence[SnapshotDevice]) -> str | None:
    texts = []
    for device in devices:
        if device.lost:
            name = f"device {device.device}: " if len(devices) > 1 else ""
            texts.append(f"{name}{device.lost}")
    return "; ".join(texts) or None


def lost_of(replay: Replay) -> str | None:
    """Whether the ring of the allocator has lost its beginning, and what else is not recorded."""
    recording = replay.recording
    events = len(recording.action)
    if not replay.made_at.size:
        return (
            "no allocation was recorded: history was off, or its ring too short; blocks alone tell"
            " what was there"
        )
    if events in RING_SIZES:
        return (
            f"lost: {events:,} events are a full ring, so what came before the first of them is"
            " not known; a larger max_entries keeps it"
        )
    unseen = len(replay.unseen_at)
    if unseen:
        return (
            f"perhaps: it began within the run, or lost its beginning, as it never saw the"
            f" allocation of what {count_of(unseen, 'free')} gave back"
        )
    most_reserved = replay.peak_reserved_bytes()
    if replay.peak_bytes > most_reserved:
        return (
            f"events and segments contradict each other: {megabytes(replay.peak_bytes)} allocated,"
            f" but no more than {megabytes(most_reserved)} reserved; they are not of one recording"
        )
    return None
