"""What every rank of a scaling study does: steps timed with and without communication, and one whose memory is tracked;
and the faults that can be planted in them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from harness.instruments.memory_tracker import MemoryTracker
from harness.instruments.timing import NullMeter, StepMeter
from harness.machine.devices import set_numerics
from harness.model.workload import TrainingState, Workload, sharded_state
from harness.ranks.parallel import replicated
from studies.engine.ranks import Rank

EXTRA_PASSES = 2  # forward passes that a slow rank computes in addition
MORE_DATA = 2  # times the samples, on the rank that has more

# ---- Faults --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """Something that makes steps of several ranks slower, without changing what they compute together by much."""

    parallel: str  # the mode that it is planted in
    text: str
    settings: tuple[tuple[str, object], ...] = ()  # of ParallelConfig, as flags would set them
    named_by: tuple[str, ...] = ()  # all findings that name it

    def planted(self, workload: Workload) -> Workload:
        return workload.with_settings(**dict(self.settings))


FAULTS = {
    "slow-rank": Fault(
        "ddp", f"the last rank computes each forward pass {1 + EXTRA_PASSES} times", named_by=("slow-rank",)
    ),
    "more-data": Fault(
        "ddp", f"the last rank has {MORE_DATA} times the samples of the others", named_by=("more-data",)
    ),
    "small-buckets": Fault("ddp", "--bucket-mb 0.05", (("bucket_mb", 0.05),), ("small-buckets",)),
    "no-overlap": Fault(
        "ddp", "gradients are reduced after the backward pass, all in one all-reduce", named_by=("no-overlap",)
    ),
    "naive": Fault(
        "ddp",
        "gradients are reduced after the backward pass, an all-reduce for each parameter",
        named_by=("no-overlap", "small-buckets"),
    ),
    "fine-wrapping": Fault("fsdp", "--fsdp-wrap sublayer", (("fsdp_wrap", "sublayer"),), ("fine-wrapping",)),
}


class ReducedAfterBackward:
    """In the place of DistributedDataParallel: gradients are averaged when the backward pass has ended, all in one flat
    tensor or one by one.  The ranks' parameters are the same, as all have the same seed."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, flat: bool):
        self.model, self.flat, self.syncs = model, flat, True
        optimizer.register_step_pre_hook(lambda *_: self._reduce())

    def __call__(self, *arguments):
        return self.model(*arguments)

    def _reduce(self) -> None:
        if not self.syncs:
            return
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        sent = [_flatten_dense_tensors(gradients)] if self.flat else gradients
        for tensor in sent:
            torch.distributed.all_reduce(tensor.div_(torch.distributed.get_world_size()))
        if self.flat:
            for gradient, mean in zip(gradients, _unflatten_dense_tensors(sent[0], gradients), strict=True):
                gradient.copy_(mean)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.syncs = self.syncs, False
        try:
            yield
        finally:
            self.syncs = before


def compute_again(model: nn.Module, arguments: tuple) -> None:
    """A hook before the forward pass: some more of them, without gradients."""
    with torch.no_grad():
        for _ in range(EXTRA_PASSES):
            model.forward(*arguments)


# ---- On each rank --------------------------------------------------------------------------------------------------


def state_with_fault(workload: Workload, rank: Rank, fault: str | None) -> tuple[TrainingState, nn.Module]:
    """The state to train, and its model without what wraps it."""
    state, parallel = sharded_state(workload, rank.device), workload.parallel
    model, last = state.model, rank.rank == rank.world_size - 1
    if fault == "slow-rank" and last:
        model.register_forward_pre_hook(compute_again)
    if fault in ("no-overlap", "naive"):
        return state._replace(model=ReducedAfterBackward(model, state.optimizer, flat=fault == "no-overlap")), model
    return state._replace(model=replicated(model, parallel, rank.device)), model


def measure(rank: Rank, workload: Workload, steps: int, warmup: int, fault: str | None) -> dict:
    """Times of this rank's steps, memory and collectives of one, and how far they were disturbed."""
    training = workload.settings()["training"]
    set_numerics(training["seed"], workload.precision, training["deterministic"])
    last = rank.rank == rank.world_size - 1
    own = (
        workload.with_settings(batch_size=MORE_DATA * workload.batch_size)
        if fault == "more-data" and last
        else workload
    )
    state, model = state_with_fault(own, rank, fault)
    stream = CountedBatches(own.batches(rank.device, rank.rank))
    meter = StepMeter(rank.device, rank.world_size, lambda step: False, lambda record: None)
    own.train(state, stream, warmup + steps, meter, NullMeter())
    meter.read_finished(wait=True)
    samples = stream.samples // (warmup + steps)
    memory = tracked(own, state, model, stream, rank)
    return {
        "step_ms": [record.total_ms for record in meter.records[warmup:]],
        "local_step_ms": local_steps(own, state, stream, steps, rank),
        "samples": samples,
        "peak_bytes": memory["peak_bytes"],
        "bytes_by_category": memory["peak"]["bytes_by_category"],
        "collectives": memory["collectives"],
        "overlapped_bytes": memory["overlapped_bytes"],
        "disturbance": meter.disturbance.document(),
    }


class CountedBatches:
    """The batches of a rank; counts their samples."""

    def __init__(self, stream: Iterator):
        self.stream, self.samples = stream, 0

    def __iter__(self) -> CountedBatches:
        return self

    def __next__(self):
        batch = next(self.stream)  # (input_ids, labels), [B, S] each
        self.samples += len(batch[0])
        return batch


class Tracker(MemoryTracker):
    """Also counts the bytes of reductions that begin while the backward pass still runs."""

    overlapped_bytes = 0

    def _communicates(self, func, args: tuple, kwargs: dict) -> None:
        counted = self.timeline.collectives.bytes
        before = counted.total()
        super()._communicates(func, args, kwargs)
        if "backward" in self.part.ranges:
            self.overlapped_bytes += counted.total() - before


def tracked(workload: Workload, state: TrainingState, model: nn.Module, stream: Iterator, rank: Rank) -> dict:
    """Memory of a step."""
    tracker = Tracker(model, state.optimizer)
    workload.train(state, stream, 1, NullMeter(world_size=rank.world_size), NullMeter(tracker))
    return tracker.timeline.document() | {"overlapped_bytes": tracker.overlapped_bytes}


def local_steps(
    workload: Workload, state: TrainingState, stream: Iterator, steps: int, rank: Rank
) -> list[float] | None:
    """Milliseconds of steps without communication, on all ranks at once; None if the mode needs it to compute.

    In harness/instruments/no_sync.py ranks wait for one another in every step, as they reduce its loss, and so all take
    as long as the slowest.  Here none waits, which tells a slow rank from those that it holds up.

    The ranks' parameters differ from then on, so nothing can follow.
    """
    if rank.world_size == 1 or not hasattr(state.model, "no_sync") or workload.parallel.parallel != "ddp":
        return None
    torch.distributed.barrier()
    meter = StepMeter(rank.device, 1, lambda step: False, lambda record: None)
    with state.model.no_sync():
        workload.train(state, stream, 1 + steps, meter, NullMeter())
    meter.read_finished(wait=True)
    torch.distributed.barrier()  # no rank leaves while another is still timed
    return [record.total_ms for record in meter.records[1:]]
