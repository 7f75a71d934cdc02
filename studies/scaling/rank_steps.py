"""What does every rank of a scaling study do?  Steps timed with and without communication, and one
whose memory is tracked."""

from collections.abc import Iterator

import torch
from torch import nn

from harness.instruments.memory_tracker import MemoryTracker
from harness.instruments.timing import NullMeter, StepMeter
from harness.model.workload import TrainingState, Workload, sharded_state
from harness.ranks.parallel import replicated
from studies.engine.ranks import RankContext
from studies.scaling.faults import MORE_DATA, ReducedAfterBackward, compute_again


def measure_steps(
    rank: RankContext, workload: Workload, steps: int, warmup: int, fault: str | None
) -> dict:
    """Times of this rank's steps, memory and collectives of one, and how disturbed they were."""
    with workload.step_settings():
        return steps_of_rank(rank, workload, steps, warmup, fault)


def steps_of_rank(
    rank: RankContext, workload: Workload, steps: int, warmup: int, fault: str | None
) -> dict:
    """The same, under the settings of the process that the workload asks for."""
    torch.manual_seed(workload.training.seed)
    if fault == "more-data" and is_last(rank):
        workload = workload.with_settings(batch_size=MORE_DATA * workload.batch_size)
    state, model = state_with_fault(workload, rank, fault)
    samples: list[int] = []
    stream = counted(workload.batches(rank.device, rank.rank), samples)
    meter = StepMeter(rank.device, rank.world_size, lambda step: False, lambda record: None)
    workload.train(state, stream, warmup + steps, meter, NullMeter())
    meter.read_finished(wait=True)
    samples_of_step = sum(samples) // (warmup + steps)
    memory = tracked(workload, state, model, stream, rank)
    return {
        "step_ms": [record.total_ms for record in meter.records[warmup:]],
        "local_step_ms": local_steps(workload, state, stream, steps, rank),
        "samples": samples_of_step,
        "peak_bytes": memory["peak_bytes"],
        "bytes_by_category": memory["peak"]["bytes_by_category"],
        "collectives": memory["collectives"],
        "overlapped_bytes": memory["overlapped_bytes"],
        "disturbance": meter.disturbance.document(),
    }


def is_last(rank: RankContext) -> bool:
    return rank.rank == rank.world_size - 1


def state_with_fault(
    workload: Workload, rank: RankContext, fault: str | None
) -> tuple[TrainingState, nn.Module]:
    """The state to train, and its model without what wraps it."""
    state, parallel = sharded_state(workload, rank.device), workload.parallel
    model = state.model
    if fault == "slow-rank" and is_last(rank):
        model.register_forward_pre_hook(compute_again)
    if fault in ("no-overlap", "naive"):
        return state._replace(
            model=ReducedAfterBackward(model, state.optimizer, flat=fault == "no-overlap")
        ), model
    return state._replace(model=replicated(model, parallel, rank.device)), model


def counted(stream: Iterator, samples: list[int]) -> Iterator:
    """The batches of a rank, whose numbers of samples are noted."""
    for batch in stream:  # (input_ids, labels), [B, S] each
        samples.append(len(batch[0]))
        yield batch


class OverlapTracker(MemoryTracker):
    """Also counts the bytes of reductions that begin while the backward pass still runs."""

    overlapped_bytes = 0

    def _communicates(self, func, args: tuple, kwargs: dict) -> None:
        counted = self.timeline.collectives.bytes
        before = counted.total()
        super()._communicates(func, args, kwargs)
        if "backward" in self.part.ranges:
            self.overlapped_bytes += counted.total() - before


def tracked(
    workload: Workload, state: TrainingState, model: nn.Module, stream: Iterator, rank: RankContext
) -> dict:
    """Memory of a step."""
    tracker = OverlapTracker(model, state.optimizer)
    workload.train(state, stream, 1, NullMeter(world_size=rank.world_size), NullMeter(tracker))
    return tracker.timeline.document() | {"overlapped_bytes": tracker.overlapped_bytes}


def local_steps(
    workload: Workload, state: TrainingState, stream: Iterator, steps: int, rank: RankContext
) -> list[float] | None:
    """Milliseconds of steps without communication, on all ranks at once; None if the mode needs it
    to compute.

    In harness/instruments/no_sync.py ranks wait for one another in every step, as they reduce its
    loss, and so all take as long as the slowest.  Here none waits, which tells a slow rank from
    those that it holds up.

    The ranks' parameters differ from then on, so nothing can follow.
    """
    if (
        rank.world_size == 1
        or not hasattr(state.model, "no_sync")
        or workload.parallel.parallel != "ddp"
    ):
        return None
    torch.distributed.barrier()
    meter = StepMeter(rank.device, 1, lambda step: False, lambda record: None)
    with state.model.no_sync():
        workload.train(state, stream, 1 + steps, meter, NullMeter())
    meter.read_finished(wait=True)
    torch.distributed.barrier()  # no rank leaves while another is still timed
    return [record.total_ms for record in meter.records[1:]]
