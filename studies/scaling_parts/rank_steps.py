"""What does every rank of a scaling study do?  Steps timed with and without communication, and one
whose memory is tracked, beside what is predicted of it."""

import itertools
import statistics
from collections.abc import Iterator

import torch

from analysis.memory.predicted import predicted_memory
from analysis.work.fake_step import FakeRunError
from harness.instruments.memory_timeline import CollectiveRow
from harness.instruments.memory_tracker import MemoryTracker
from harness.instruments.timing import NullMeter, StepMeter
from harness.model.workload import Workload
from harness.schema import Unknown
from harness.session.session import Session
from studies.engine.ranks import RankContext
from studies.scaling_parts.faults import FAULTS, MORE_DATA, preparation_with

NO_LOCAL_STEPS = "only ddp can compute steps without communication"
BY_DIFFERENCE = ("local_step_ms", "exposed_ms", "waiting_ms", "communication_share")
PREDICTED = (
    "predicted_memory_bytes",
    "predicted_memory_by_category",
    "predicted_collective_bytes",
    "predicted_collectives",
)


# ---- On the ranks --------------------------------------------------------------------------------


def measure_steps(
    rank: RankContext, workload: Workload, steps: int, warmup: int, fault: str | None
) -> dict:
    """Times of this rank's steps, memory and collectives of one, and how disturbed they were."""
    is_last_rank = rank.rank == rank.world_size - 1
    if fault == "more-data" and is_last_rank:
        workload = workload.with_settings(batch_size=MORE_DATA * workload.batch_size)
    ranks = (rank.rank, rank.world_size)
    preparation = preparation_with(fault, is_last_rank)
    with Session(workload, rank.device, ranks, preparation) as session:
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


# ---- What the ranks' answers say together --------------------------------------------------------


def columns_of_launch(
    answers: list[dict],
    seq_len: int,
    earlier_times_ms: list[list[float]],
    earlier_local_ms: list[float] | None,
) -> dict:
    """The measured columns of a row after one more launch.

    answers: of measure_steps(), by rank.  earlier_times_ms: of the launches before it, by launch
    and step; [] for none.  earlier_local_ms: their fastest steps without communication, by rank;
    None for none.
    """
    by_rank = [answer["step_ms"] for answer in answers]
    slowest_ms = [max(times) for times in zip(*by_rank, strict=True)]  # by step
    times_ms = [*earlier_times_ms, slowest_ms]
    step_ms = statistics.median(itertools.chain(*times_ms))
    samples = [answer["samples"] for answer in answers]
    first = answers[0]
    collectives = list(map(CollectiveRow.from_json, first["collectives"]))
    local_times_ms = [answer["local_step_ms"] for answer in answers]
    fastest_ms = min(itertools.chain(*times_ms))
    return {
        "launches": len(times_ms),
        "step_times_ms": times_ms,
        "step_ms": step_ms,
        "global_batch_size": sum(samples),
        "samples_by_rank": samples,
        "tokens_per_sec": 1e3 * sum(samples) * seq_len / step_ms,
        "measured_memory_bytes": first["peak_bytes"],
        "measured_memory_by_category": first["bytes_by_category"],
        "memory_bytes_by_rank": [answer["peak_bytes"] for answer in answers],
        "measured_collective_bytes": sum(calls.bytes for calls in collectives),
        "measured_collectives": collectives,
        **communication_columns(local_times_ms, earlier_local_ms, fastest_ms),
        "overlapped_share": overlapped_share(collectives, first["overlapped_bytes"]),
    }


def communication_columns(
    local_times_ms: list[list[float] | None],
    earlier_local_ms: list[float] | None,
    fastest_ms: float,
) -> dict:
    """Communication by difference: the fastest step less one without communication.  The fastest of
    both, because other work on the machine, and ranks that wait for each other's, only add to a
    time.

    local_times_ms: of this launch, by rank and step.
    """
    if local_times_ms[0] is None:
        why = "one rank" if len(local_times_ms) == 1 else NO_LOCAL_STEPS
        return dict.fromkeys(BY_DIFFERENCE, Unknown(why))
    local_ms = [min(times) for times in local_times_ms]
    if earlier_local_ms is not None:
        local_ms = [min(pair) for pair in zip(local_ms, earlier_local_ms, strict=True)]
    mean, longest = statistics.fmean(local_ms), max(local_ms)
    return {
        "local_step_ms": local_ms,
        "exposed_ms": max(0.0, fastest_ms - longest),
        "waiting_ms": longest - mean,
        "communication_share": max(0.0, 1 - mean / fastest_ms),
    }


def overlapped_share(collectives: list[CollectiveRow], overlapped_bytes: int) -> float | Unknown:
    """Of the bytes that all-reduces send, those that begin in the backward pass."""
    kinds = {calls.kind for calls in collectives}
    reduced_bytes = sum(calls.bytes for calls in collectives if calls.kind == "all_reduce")
    if not kinds:
        return Unknown("one rank")
    if not reduced_bytes or "reduce_scatter" in kinds:
        return Unknown("fsdp reduces shards")
    return overlapped_bytes / reduced_bytes


# ---- What is predicted of them -------------------------------------------------------------------


def predicted_columns(workload: Workload, on_gpu: bool, fault: str | None) -> dict:
    """Memory and collectives of a step, by a fake-tensor run; a fault that is no setting cannot be
    predicted."""
    if fault and not FAULTS[fault].settings:
        why = Unknown("the prediction is of the step without the fault")
        return dict.fromkeys(PREDICTED, why)
    try:
        memory = predicted_memory(workload, on_gpu).document()
    except FakeRunError as error:
        return dict.fromkeys(PREDICTED, Unknown(str(error)))
    return {
        "predicted_memory_bytes": memory["peak_bytes"],
        "predicted_memory_by_category": memory["peak"]["bytes_by_category"],
        "predicted_collective_bytes": sum(calls["bytes"] for calls in memory["collectives"]),
        "predicted_collectives": list(map(CollectiveRow.from_json, memory["collectives"])),
    }
