"""What does every rank of a scaling study do?  Steps timed with and without communication, and one
whose memory is tracked."""

from collections.abc import Iterator

import torch

from harness.instruments.memory_tracker import MemoryTracker
from harness.instruments.timing import NullMeter, StepMeter
from harness.model.workload import TrainingState, Workload
from harness.session.session import Preparation, Session
from studies.engine.ranks import RankContext
from studies.scaling.faults import MORE_DATA, ReducedAfterBackward, compute_again


def measure_steps(
    rank: RankContext, workload: Workload, steps: int, warmup: int, fault: str | None
) -> dict:
    """Times of this rank's steps, memory and collectives of one, and how disturbed they were."""
    if fault == "more-data" and is_last(rank):
        workload = workload.with_settings(batch_size=MORE_DATA * workload.batch_size)
    ranks = (rank.rank, rank.world_size)
    with Session(workload, rank.device, ranks, with_fault(rank, fault)) as session:
        samples: list[int] = []
        session.stream = counted(session.stream, samples)
        meter = session.timed(warmup + steps)
        samples_of_step = sum(samples) // (warmup + steps)
        tracker = OverlapTracker(session.model, session.optimizer)
        session.step(watching=tracker)
        memory = tracker.timeline.document()
        return {
            "step_ms": [record.total_ms for record in meter.records[warmup:]],
            "local_step_ms": local_steps(session, steps),
            "samples": samples_of_step,
            "peak_bytes": memory["peak_bytes"],
            "bytes_by_category": memory["peak"]["bytes_by_category"],
            "collectives": memory["collectives"],
            "overlapped_bytes": tracker.overlapped_bytes,
            "disturbance": meter.disturbance.document(),
        }


def is_last(rank: RankContext) -> bool:
    return rank.rank == rank.world_size - 1


def with_fault(rank: RankContext, fault: str | None) -> Preparation:
    """How the step is made ready with the fault in it; those of data and of settings are none of
    this."""

    def reduced_after_backward(state: TrainingState) -> ReducedAfterBackward:
        return ReducedAfterBackward(state.model, state.optimizer, flat=fault == "no-overlap")

    if fault in ("no-overlap", "naive"):
        return Preparation(wrap=reduced_after_backward)
    if fault == "slow-rank" and is_last(rank):
        return Preparation(
            change_model=lambda model: model.register_forward_pre_hook(compute_again)
        )
    return Preparation()


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


def local_steps(session: Session, steps: int) -> list[float] | None:
    """Milliseconds of steps without communication, on all ranks at once; None if the mode needs it
    to compute.

    In harness/instruments/no_sync.py ranks wait for one another in every step, as they reduce its
    loss, and so all take as long as the slowest.  Here none waits, which tells a slow rank from
    those that it holds up.

    The ranks' parameters differ from then on, so nothing can follow.
    """
    model = session.state.model
    is_ddp = session.workload.parallel.parallel == "ddp" and hasattr(model, "no_sync")
    if session.world_size == 1 or not is_ddp:
        return None
    torch.distributed.barrier()
    alone = StepMeter(session.device, 1, lambda step: False, lambda record: None)
    with model.no_sync():
        session.run(1 + steps, alone, NullMeter())
    alone.read_finished(wait=True)
    torch.distributed.barrier()  # no rank leaves while another is still timed
    return [record.total_ms for record in alone.records[1:]]
