"""How long does a collective take on every rank?  As nccl-tests does it: calls back to back, the
mean over them."""

from collections.abc import Callable

import torch

from harness.machine.clock import time_synced
from harness.machine.devices import synchronize
from harness.machine.disturbance import DisturbanceMeter
from studies.engine.isolation import tell
from studies.engine.ranks import RankContext

CALLS = 5  # back to back in each repetition
ITEM = 4  # bytes of fp32
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


def size_on_ranks(size: int, world_size: int) -> int:
    """The largest number of bytes up to size that all ranks share evenly;
    one element each at least."""
    unit = ITEM * world_size
    return max(size // unit, 1) * unit


def collective(kind: str, size: int, rank: RankContext) -> Callable[[], object]:
    """A function that calls it once.  size: bytes of the larger of input and output."""
    whole = torch.zeros(size // ITEM, device=rank.device)  # their sum stays 0
    part = whole[: len(whole) // rank.world_size].clone()
    group = torch.distributed
    return {
        "all_reduce": lambda: group.all_reduce(whole),
        "all_gather": lambda: group.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: group.reduce_scatter_tensor(part, whole),
        "broadcast": lambda: group.broadcast(whole, 0),
    }[kind]


def time_us(call: Callable[[], object], rank: RankContext) -> float:
    """Microseconds of a call, the mean over some that follow one another."""

    def calls() -> None:
        for _ in range(CALLS):
            call()

    synchronize(rank.device)
    torch.distributed.barrier()
    return 1e3 * time_synced(calls, rank.device) / CALLS


def time_collectives(
    rank: RankContext, kinds: list[str], sizes: list[int], repetitions: int, warmup: int
) -> dict:
    """Microseconds of each repetition by kind and bytes on this rank, and how disturbed it was."""
    meter, times = DisturbanceMeter(rank.device), {}
    with meter.long_interval():
        for n, kind in enumerate(kinds, 1):
            if rank.rank == 0:
                tell(f"{n} of {len(kinds)}: {kind}")
            for size in sizes:
                call = collective(kind, size, rank)
                for _ in range(warmup):
                    call()
                times[kind, size] = [time_us(call, rank) for _ in range(repetitions)]
    return {"times_us": times, "disturbance": meter.document()}
