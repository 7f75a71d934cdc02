"""The process group: who the ranks are, and whether they can work together."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator

import torch

from harness.errors import UserError, alike_on_all_ranks
from harness.hardware_seen import VISIBLE

MAY_DIFFER = ("output_dir", "profile_dir", "data")  # paths: nodes need not share folders


def world_size_of_run() -> int:
    """Processes of this run, as torchrun or srun tells each of them."""
    return int(os.environ.get("WORLD_SIZE", 1))


@contextlib.contextmanager
def process_group(device: torch.device, settings: dict[str, dict]) -> Iterator[tuple[int, int]]:
    """Under torchrun or srun, join the other processes, which must have the same settings; yields (rank, ranks)."""
    if world_size_of_run() == 1:
        yield 0, 1
        return
    store, rank, world_size = next(torch.distributed.rendezvous("env://"))
    check_same_flags(torch.distributed.PrefixStore("flags", store), settings, rank, world_size)
    options = {"store": torch.distributed.PrefixStore("workshop", store), "rank": rank, "world_size": world_size}
    if device.type == "cuda":
        check_gpu_is_not_shared(device, store, rank)
        # Without its device, a group on an MI300A may hang in the first collective.
        torch.distributed.init_process_group("nccl", device_id=device, **options)
    else:
        torch.distributed.init_process_group("gloo", **options)
    try:
        yield rank, world_size
    finally:
        torch.distributed.destroy_process_group()


def check_gpu_is_not_shared(device: torch.device, store: torch.distributed.Store, rank: int) -> None:
    """Raise UserError if another rank uses the same GPU, which NCCL and RCCL refuse in words of their own."""
    gpu, host = torch.cuda.get_device_properties(device), socket.gethostname()
    # Partitions of one GPU may share its UUID; they differ in the index, before or after these variables.
    partition = [device.index, *(os.environ.get(name) for name in VISIBLE)]
    first = store.compare_set(f"gpu/{host}/{gpu.uuid}/{partition}", "", str(rank)).decode()  # sets it if nobody has
    if first != str(rank):
        raise UserError(
            f"ranks {first} and {rank} would share a GPU, {gpu.name} {gpu.uuid} of {host}; start one process per GPU"
        )


def check_same_flags(store: torch.distributed.Store, settings: dict[str, dict], rank: int, world_size: int) -> None:
    """Raise UserError on every rank if one was started with other flags: their collectives would not match."""
    store.set(f"settings/{rank}", json.dumps(settings))
    everyone = [json.loads(store.get(f"settings/{other}")) for other in range(world_size)]
    store.set(f"read/{rank}", "")
    if rank == 0:  # whose end may be that of the store
        store.wait([f"read/{other}" for other in range(world_size)])
    for other, theirs in enumerate(everyone):
        for section, values in everyone[0].items():
            for name, value in values.items():
                if theirs[section][name] != value and name not in MAY_DIFFER:
                    line = f"--{name.replace('_', '-')}: rank {other} has {theirs[section][name]}, rank 0 has {value}"
                    with alike_on_all_ranks():
                        raise UserError(f"{line}; start all ranks with the same flags", 2)


def facts_of_ranks(own: dict) -> list[dict]:
    """What every rank passes here, in the order of ranks, once all of them have called this; [] for one rank."""
    if world_size_of_run() == 1:
        return []
    everyone: list[dict] = [{}] * world_size_of_run()
    torch.distributed.all_gather_object(everyone, own)
    return everyone


def suffix_of_rank(rank: int, world_size: int) -> str:
    """Suffix that distinguishes the files of one rank from those of the others."""
    return f"_rank{rank}" if world_size > 1 else ""
