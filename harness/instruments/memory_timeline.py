"""What the memory tracker recorded of a step, and memory_timeline.json from it."""

from dataclasses import asdict, dataclass, field

import numpy as np

from harness.base.layer_names import part_of
from harness.base.tables import added_up
from harness.ranks.collective_calls import CollectiveCounter

# Gathered parameters are those that FSDP has of other ranks too; buckets are what collectives read
# and write, unless it is a gradient, as in DistributedDataParallel.
CATEGORIES = (
    "parameters", "gathered parameters", "gradients", "buckets", "optimizer", "activations",
    "temporaries", "buffers",
)  # fmt: skip
OF_SEVERAL_RANKS = ("gathered parameters", "buckets")


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
    kept: list[Allocation] = field(
        default_factory=list
    )  # saved by the last forward pass for its backward pass
    allocator: dict[str, int] = field(
        default_factory=dict
    )  # bytes of a GPU's allocator at the peak; empty on a CPU
    collectives: CollectiveCounter = field(default_factory=CollectiveCounter)

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
            a for a in self.allocations if a.born <= event and (a.died is None or a.died > event)
        ]

    def document(self) -> dict:
        """memory_timeline.json: bytes by category over the step, by phase, and at the peak."""
        live = dict(zip(CATEGORIES, self.live_bytes(), strict=True))
        # One rank alone neither gathers nor reduces.
        live = {
            name: row for name, row in live.items() if name not in OF_SEVERAL_RANKS or row.any()
        }
        total, durations = sum(live.values()), np.diff(self.times_us)
        peak = int(total.argmax())
        made = [a for a in self.allocations if a.born > 0]  # the others were there before the step
        return {
            "step": self.step,
            "source": "bytes of live tensors, recorded at every operator of one step",
            "peak_bytes": int(total[peak]),
            "average_bytes": float(total[:-1] @ durations / durations.sum()),
            "allocations": len(made),
            "collectives": self.collectives.rows(),
            # A bucket that was allocated in the forward pass is a gradient's.  PyTorch 2.6 keeps an
            # empty tensor of each checkpointed block.
            "kept_for_backward": kept_rows(
                [one for one in self.kept if one.category == "activations" and one.bytes]
            ),
            "allocator": self.allocator_rows(int(total[peak])),
            "largest_tensor": asdict(max(made, key=lambda a: a.bytes)) if made else None,
            "phases": self.phase_rows(total),
            "peak": {
                "time_us": self.times_us[peak],
                "phase": next(
                    (one.name for one in self.finished_phases() if one.first <= peak <= one.last),
                    None,
                ),
                "where": self.places[peak],
                "bytes_by_category": {category: int(row[peak]) for category, row in live.items()},
                "largest_tensors": [
                    asdict(a) for a in sorted(self.live_at(peak), key=lambda a: -a.bytes)[:10]
                ],
            },
            "timeline": (
                {"time_us": [round(t, 1) for t in self.times_us], "total_bytes": total.tolist()}
                | {f"{category}_bytes": row.tolist() for category, row in live.items()}
                | {"layer": [part_of(place).layer for place in self.places]}
            ),
        }

    def finished_phases(self) -> list[Phase]:
        return [phase for phase in self.phases if phase.last is not None]

    def phase_rows(self, total: np.ndarray) -> list[dict]:
        """documents.MemoryPhase of each finished phase.  total: [event], live bytes."""
        return [
            {
                "name": one.name,
                "start_us": self.times_us[one.first],
                "end_us": self.times_us[one.last],
            }
            | {"peak_bytes": int(total[one.first : one.last + 1].max())}
            for one in self.finished_phases()
        ]

    def allocator_rows(self, tensors: int) -> list[dict] | None:
        """From live tensors to the memory that the driver reports, at the peak of live bytes; None
        on a CPU."""
        if not self.allocator:
            return None
        allocated, reserved, used = map(
            self.allocator.get, ("allocated_bytes", "reserved_bytes", "device_used_bytes")
        )
        return [
            {"what": "live tensors", "bytes": tensors},
            {"what": "rounding, library and operator workspaces", "bytes": allocated - tensors},
            {
                "what": "reserved by the allocator but free (fragmentation)",
                "bytes": reserved - allocated,
            },
            {
                "what": "driver, context and other processes, at the end of the step",
                "bytes": used - reserved,
            },
        ]


def kept_rows(kept: list[Allocation]) -> list[dict]:
    """Bytes that a forward pass keeps for its backward pass, by component and layer."""
    sums = added_up((part_of(entry.where), entry.bytes) for entry in kept)
    return [
        {"component": part, "layer": layer, "bytes": size} for (layer, part), size in sums.items()
    ]


def kept_by_component(memory: dict) -> dict[str, int]:
    """The same over all layers, from memory_timeline.json."""
    return added_up((row["component"], row["bytes"]) for row in memory["kept_for_backward"])
