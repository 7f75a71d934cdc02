"""The process group: ranks that have met, and can work together."""

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch

from harness.base.console import world_size_of_run
from harness.base.errors import (
    Interrupted,
    UserError,
    ending_despite_signals,
    out_of_memory,
    print_error,
)
from harness.machine.hardware_seen import VISIBLE
from harness.ranks.failure_watch import Failure, abort_collectives
from harness.ranks.failures import RankFailure, explain_error
from harness.ranks.rendezvous import conclude, rendezvous, watch_of_run

# How long after an error of a collective, or a signal, the failure that caused it may become known.
CAUSE_S = 5.0
SIGNAL_S = 0.5


@contextlib.contextmanager
def process_group(device: torch.device, settings: dict[str, dict]) -> Iterator[tuple[int, int]]:
    """Under torchrun or srun, join the other processes, which must have the same settings; yields
    (rank, ranks).

    What is made in the block must not outlive it: call a function there.  Raises RankFailure if
    ranks do not come in time or do not fit together, or if another one fails.
    """
    if world_size_of_run() == 1:
        yield 0, 1
        return
    on_gpu = device.type == "cuda"
    meeting = rendezvous({"settings": settings, "gpu": identity(device) if on_gpu else None})
    if meeting.failure:
        raise RankFailure(meeting.failure)
    rank, world_size = int(os.environ["RANK"]), world_size_of_run()
    store = torch.distributed.PrefixStore("workshop", meeting.store)
    try:
        # Without its device, a group on an MI300A may hang in the first collective.
        backend, bound_to = ("nccl", device) if on_gpu else ("gloo", None)
        group = {"store": store, "rank": rank, "world_size": world_size, "device_id": bound_to}
        torch.distributed.init_process_group(backend, **group)
        yield rank, world_size
        # DDP's reducer holds the group too.  Were it freed after the group, it would join gloo's
        # threads with the GIL held, while one of them may need the GIL to free what it sent: both
        # would wait for ever.
        gc.collect()
        torch.distributed.destroy_process_group()
        meeting.watch.finish()
        failure = meeting.watch.failure_of_another()
        if failure:
            raise RankFailure(failure)
    except BaseException as error:
        with ending_despite_signals():
            first = first_failure(error)
            abort_collectives()  # destroying the group could wait for them
        if first is error:
            raise
        raise first from error


def identity(device: torch.device) -> list[str]:
    """What tells a GPU from the others of its host."""
    gpu = torch.cuda.get_device_properties(device)
    # Partitions of one GPU may share its UUID; they differ in the index, before or after these
    # variables.
    partition = [device.index, *(os.environ.get(name) for name in VISIBLE)]
    return [f"{gpu.name} {gpu.uuid}", str(partition)]


def facts_of_ranks(own: object) -> list:
    """What every rank passes here, in the order of ranks, once all of them have called this; [] for
    one rank.

    No collective follows: a rank cannot be stuck in one any more."""
    if world_size_of_run() == 1:
        return []
    everyone: list = [None] * world_size_of_run()
    torch.distributed.all_gather_object(everyone, own)
    watch = watch_of_run()
    if watch:
        watch.stop_ending_stuck()
    return everyone


def suffix_of_rank(rank: int, world_size: int) -> str:
    """Suffix that distinguishes the files of one rank from those of the others."""
    return f"_rank{rank}" if world_size > 1 else ""


# ---- Failures ------------------------------------------------------------------------------------


def first_failure(error: BaseException) -> BaseException:
    """What to report: the error itself, which the other ranks then hear of; or the failure of
    another rank, if the error follows from it, as that of a collective does, or a signal of
    torchrun's to all ranks."""
    watch = watch_of_run()
    if watch is None or isinstance(error, RankFailure):
        return error
    # What a step in a file of the user's has called is the cause of its error.
    cause = error.__cause__ if isinstance(error, UserError) else error
    failure = None
    if isinstance(cause, RuntimeError) and not out_of_memory(cause):
        failure = watch.failure_of_another(CAUSE_S)
    elif isinstance(error, Interrupted):
        failure = watch.failure_of_another(SIGNAL_S)
    if failure:
        return RankFailure(failure)
    watch.tell(*explain_error(error))
    return error


def when_stuck(write_summary: Callable[[BaseException], None]) -> None:
    """How this process ends if its main thread remains in a collective after another rank has
    failed."""

    def end(failure: Failure) -> NoReturn:
        try:
            write_summary(RankFailure(failure))
            line, _ = conclude(failure)
            if line:
                print_error(line)
        finally:
            os._exit(failure.exit_code)

    watch = watch_of_run()
    if watch:
        watch.when_stuck = end
