"""What the memory tracker recorded of a step, and memory_timeline.json from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from harness.base.layer_names import part_of
from harness.base.tables import added_up
from harness.schema import Document, different_lengths
from harness.schema import field as declared

# Reading what a run wrote needs no PyTorch.
if TYPE_CHECKING:
    from harness.ranks.collective_calls import CollectiveCounter

# Gathered parameters are those that FSDP has of other ranks too; buckets are what collectives read
# and write, unless it is a gradient, as in DistributedDataParallel.
CATEGORIES = (
    "parameters", "gathered parameters", "gradients", "buckets", "optimizer", "activations",
    "temporaries", "buffers",
)  # fmt: skip
OF_SEVERAL_RANKS = ("gathered parameters", "buckets")
LARGEST = 10  # tensors that are told of a peak


# ---- What the document tells ---------------------------------------------------------------------


class TensorRow(Document):
    bytes: int = declared("of its storage")
    shape: list[int] = declared("of the tensor")
    dtype: str = declared("data type")
    where: str = declared("part of the model that allocated it, or whose gradient it is used for")
    phase: str | None = declared("of the step", null="allocated before the step")
    category: str = declared(
        "parameters, gradients, optimizer, activations, temporaries, buffers, ..."
    )
    born: int = declared("event that allocated it")
    died: int | None = declared("event that freed it", null="it outlives the step")
    stream: int = declared("of the GPU that allocated it; 0: the default one")


class MemoryPhase(Document):
    name: str = declared("data, forward, backward, optimizer")
    start_us: float = declared("microseconds after the step began")
    end_us: float = declared("microseconds after the step began")
    peak_bytes: int = declared("of live tensors")


class MemoryPeak(Document):
    time_us: float = declared("microseconds after the step began")
    phase: str | None = declared("in which it is", null="between phases")
    where: str = declared("part of the model")
    bytes_by_category: dict[str, int] = declared("of live tensors")
    largest_tensors: list[TensorRow] = declared("ten at most")


class CollectiveRow(Document):
    kind: str = declared("all_reduce, all_gather, reduce_scatter, broadcast")
    calls: int = declared("of a step and rank")
    bytes: int = declared("of the larger of input and output, summed over calls")


class SavedTensors(Document):
    component: str = declared("part of the model")
    layer: int | None = declared("its number, from 0", null="in none")
    bytes: int = declared("of its tensors")


class AllocatorRow(Document):
    what: str = declared("from live tensors to what the driver reports")
    bytes: int = declared("of these")


class StepTimeline(Document):
    """Of one step, as it was tracked."""

    step: int = declared("number of the tracked step")
    source: str = declared("what was counted")
    peak_bytes: int = declared("of live tensors")
    average_bytes: float = declared("over the time of the step")
    allocations: int = declared("during the step")
    collectives: list[CollectiveRow] = declared(
        "of the step, that of the loss included; empty: one rank"
    )
    kept_for_backward: list[SavedTensors] = declared("saved tensors")
    allocator: list[AllocatorRow] | None = declared(
        "of a GPU's memory, at the peak", null="no GPU in use"
    )
    largest_tensor: TensorRow | None = declared("of the step", null="the step allocated none")
    phases: list[MemoryPhase] = declared("in order")
    peak: MemoryPeak = declared("when live tensors are the most")
    timeline: dict[str, list] = declared(
        "columns by event: time_us, total_bytes, bytes of each category, layer"
    )

    @staticmethod
    def contradiction(value: dict) -> str | None:
        """Every column of the timeline has an entry for every event."""
        for name in ("time_us", "total_bytes", "layer"):
            if name not in value["timeline"]:
                return f"timeline.{name}: is missing"
        problem = different_lengths(value["timeline"], "time_us")
        return f"timeline.{problem}" if problem else None


# ---- What is recorded ----------------------------------------------------------------------------


@dataclass
class Allocation:
    """A tensor's storage.  born and died are indices of the events that allocated and freed it."""

    bytes: int
    shape: list[int]
    dtype: str
    where: str  # part of the model that allocated it, or whose gradient it is used for
    phase: str | None  # of the step; None if allocated before it
    category: str
    born: int
    died: int | None = None
    stream: int = 0  # of a GPU, on which it was allocated; 0: the default one


@dataclass
class Phase:
    """A phase of the step, by its first and last event; an interrupted step has one
    without a last event."""

    name: str
    first: int
    last: int | None = None


@dataclass
class StepMemory:
    """The events of a step, which are allocations, frees,
    and ends of phases; event 0 is the beginning."""

    step: int
    allocations: list[Allocation] = field(default_factory=list)
    times_us: list[float] = field(default_factory=list)  # of the events
    places: list[str] = field(default_factory=list)  # range in which each event happened
    phases: list[Phase] = field(default_factory=list)
    # Saved by the last forward pass for its backward pass.
    kept: list[Allocation] = field(default_factory=list)
    # Bytes of a GPU's allocator at the peak, and of its driver; empty on a CPU.
    allocator: dict[str, int] = field(default_factory=dict)
    collectives: CollectiveCounter | None = None  # of the step; None: they are not counted

    def live_bytes(self) -> np.ndarray:
        """[category, event]: live bytes after each event of the step."""
        changes = np.zeros((len(CATEGORIES), len(self.times_us) + 1), dtype=np.int64)
        for a in self.allocations:
            row = changes[CATEGORIES.index(a.category)]
            row[a.born] += a.bytes
            row[-1 if a.died is None else a.died] -= a.bytes
        return changes[:, :-1].cumsum(axis=1)

    def live_bytes_at_allocations(self) -> np.ndarray:
        """Live bytes after each event that allocated memory.  The peak is one of them.  The order
        in which memory is freed between two of them does not matter."""
        return self.live_bytes().sum(axis=0)[sorted({a.born for a in self.allocations})]

    def live_at(self, event: int) -> list[Allocation]:
        """What is allocated after an event."""
        return [
            allocation
            for allocation in self.allocations
            if allocation.born <= event and (allocation.died is None or allocation.died > event)
        ]

    def document(self) -> dict:
        """step_timeline() as JSON."""
        return self.step_timeline().as_json()

    def step_timeline(self) -> StepTimeline:
        """Bytes by category over the step, by phase, and at the peak."""
        live = {}  # by category: [event], bytes
        for category, live_bytes in zip(CATEGORIES, self.live_bytes(), strict=True):
            # One rank alone neither gathers nor reduces.
            if category not in OF_SEVERAL_RANKS or live_bytes.any():
                live[category] = live_bytes
        total, durations_us = sum(live.values()), np.diff(self.times_us)
        peak = int(total.argmax())
        # The others were there before the step.
        made = [allocation for allocation in self.allocations if allocation.born > 0]
        # A bucket that was allocated in the forward pass is a gradient's.  PyTorch 2.6 keeps an
        # empty tensor of each checkpointed block.
        kept = []
        for allocation in self.kept:
            if allocation.category == "activations" and allocation.bytes:
                kept.append(allocation)
        return StepTimeline(
            step=self.step,
            source="bytes of live tensors, recorded at every operator of one step",
            peak_bytes=int(total[peak]),
            average_bytes=float(total[:-1] @ durations_us / durations_us.sum()),
            allocations=len(made),
            collectives=collective_rows(self.collectives) if self.collectives else [],
            kept_for_backward=kept_rows(kept),
            allocator=allocator_rows(self.allocator, int(total[peak])) if self.allocator else None,
            largest_tensor=tensor_row(max(made, key=_size)) if made else None,
            phases=self.phase_rows(total),
            peak=self.peak_at(peak, live),
            timeline=self.columns(total, live),
        )

    def peak_at(self, event: int, live: dict[str, np.ndarray]) -> MemoryPeak:
        """live: of each category the live bytes after each event."""
        phase_of_peak = None
        for phase in self.finished_phases():
            if phase.first <= event <= phase.last:
                phase_of_peak = phase.name
                break
        largest = sorted(self.live_at(event), key=_size, reverse=True)[:LARGEST]
        return MemoryPeak(
            time_us=self.times_us[event],
            phase=phase_of_peak,
            where=self.places[event],
            bytes_by_category={
                category: int(live_bytes[event]) for category, live_bytes in live.items()
            },
            largest_tensors=[tensor_row(allocation) for allocation in largest],
        )

    def columns(self, total: np.ndarray, live: dict[str, np.ndarray]) -> dict[str, list]:
        """`timeline`: an entry for every event in each column."""
        columns = {
            "time_us": [round(time_us, 1) for time_us in self.times_us],
            "total_bytes": total.tolist(),
        }
        for category, live_bytes in live.items():
            columns[f"{category}_bytes"] = live_bytes.tolist()
        columns["layer"] = [part_of(place).layer for place in self.places]
        return columns

    def finished_phases(self) -> list[Phase]:
        """Those that have a last event."""
        return [phase for phase in self.phases if phase.last is not None]

    def phase_rows(self, total: np.ndarray) -> list[MemoryPhase]:
        """Of each finished phase.  total: [event], live bytes."""
        rows = []
        for phase in self.finished_phases():
            rows.append(
                MemoryPhase(
                    name=phase.name,
                    start_us=self.times_us[phase.first],
                    end_us=self.times_us[phase.last],
                    peak_bytes=int(total[phase.first : phase.last + 1].max()),
                )
            )
        return rows


def _size(allocation: Allocation) -> int:
    return allocation.bytes


def tensor_row(allocation: Allocation) -> TensorRow:
    """What the document tells of a tensor."""
    return TensorRow(**asdict(allocation))


def collective_rows(counter: CollectiveCounter) -> list[CollectiveRow]:
    """The calls of a step, by kind."""
    return [
        CollectiveRow(kind=kind, calls=counter.calls[kind], bytes=counter.bytes[kind])
        for kind in sorted(counter.calls)
    ]


def allocator_rows(allocator: dict[str, int], tensor_bytes: int) -> list[AllocatorRow]:
    """From live tensors to the memory that the driver reports, at the peak of live bytes."""
    allocated, reserved = allocator["allocated_bytes"], allocator["reserved_bytes"]
    beside = "driver, context and other processes, at the end of the step"
    rows = {
        "live tensors": tensor_bytes,
        "rounding, library and operator workspaces": allocated - tensor_bytes,
        "reserved by the allocator but free (fragmentation)": reserved - allocated,
        beside: allocator["device_used_bytes"] - reserved,
    }
    return [AllocatorRow(what=what, bytes=size) for what, size in rows.items()]


def kept_rows(kept: list[Allocation]) -> list[SavedTensors]:
    """Bytes that a forward pass keeps for its backward pass, by component and layer."""
    sums = added_up((part_of(allocation.where), allocation.bytes) for allocation in kept)
    return [
        SavedTensors(component=part, layer=layer, bytes=size)
        for (layer, part), size in sums.items()
    ]


def kept_by_component(memory: dict) -> dict[str, int]:
    """The same over all layers, from memory_timeline.json."""
    return added_up((row["component"], row["bytes"]) for row in memory["kept_for_backward"])
