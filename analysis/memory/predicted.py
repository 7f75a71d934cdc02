"""What fills the memory of a step?  By running it on fake tensors."""

from __future__ import annotations

from analysis.work.fake_step import GpuMemoryTracker, KeptByStep, fake_step
from harness.base.units import MB
from harness.instruments.memory_timeline import StepMemory, kept_by_component
from harness.instruments.memory_tracker import MemoryTracker
from harness.model.workload import Workload
from harness.schema import Document, field

# Of parameters and two moments for each, how many of the three every rank has a part of.
SHARDED = {"zero1": 2, "fsdp": 3}


class KeptRow(Document):
    component: str = field("part of the model")
    mb: float = field("MB that the forward pass keeps")
    quadratic_mb: float | None = field(
        "the part quadratic in the sequence length", null="there is no formula for it"
    )


@KeptByStep
def predicted_memory(workload: Workload, on_gpu: bool) -> StepMemory:
    """The tensors of a step of rank 0, as --profile-memory would count them,
    by a fake-tensor run."""
    return fake_step(workload, on_gpu, tracker_of(on_gpu), ranks=True).timeline


def tracker_of(on_gpu: bool) -> type[MemoryTracker]:
    """Of the memory of a step on fake tensors."""
    return GpuMemoryTracker if on_gpu else MemoryTracker


def peak_bytes(workload: Workload, on_gpu: bool) -> int:
    """The most bytes that are live at once in a step of one rank of this run, by prediction."""
    return int(predicted_memory(workload, on_gpu).live_bytes_at_allocations().max())


def bytes_on_other_ranks(workload: Workload) -> int:
    """Bytes of parameters and optimizer state that only other ranks have."""
    sharded = SHARDED.get(workload.parallel.parallel, 0)
    every = persistent_bytes(workload) * sharded // 3
    return every - every // workload.parallel.world_size


def persistent_bytes(workload: Workload) -> int:
    """Of the parameters and of two moments for each, in their type."""
    return 3 * workload.parameter_dtype.itemsize * workload.parameter_count()


def kept_for_backward(workload: Workload, memory: dict, on_gpu: bool) -> list[KeptRow]:
    """What the forward pass keeps for the backward pass, by component, the largest first; by
    formula where the workload has one.  memory: memory_timeline.json of the predicted step."""
    tracked = kept_by_component(memory)
    if workload.compiled:
        size = sum(tracked.values())
        return [KeptRow(component="compiled model", mb=size / MB, quadratic_mb=None)]
    rows = []
    formula = workload.formulas.kept_for_backward(on_gpu)
    if formula:
        for name, (linear, quadratic) in formula.items():
            kept_mb = (linear + quadratic) / MB
            rows.append(KeptRow(component=name, mb=kept_mb, quadratic_mb=quadratic / MB))
    else:
        for name, size in tracked.items():
            rows.append(KeptRow(component=name, mb=size / MB, quadratic_mb=None))
    return sorted(rows, key=lambda row: -row.mb)
