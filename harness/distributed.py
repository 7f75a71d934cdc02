"""Data parallelism: the process group, and averaging gradients over ranks."""

from __future__ import annotations

import contextlib
import inspect
import os
import socket
from collections.abc import Iterator

import torch
from torch import nn

from harness.errors import UserError
from harness.hardware_seen import VISIBLE


def world_size_of_run() -> int:
    """Processes of this run, as torchrun or srun tells each of them."""
    return int(os.environ.get("WORLD_SIZE", 1))


@contextlib.contextmanager
def process_group(device: torch.device) -> Iterator[tuple[int, int]]:
    """Under torchrun or srun, join the other processes; yields (rank, world size)."""
    if world_size_of_run() == 1:
        yield 0, 1
        return
    store, rank, world_size = next(torch.distributed.rendezvous("env://"))
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


def suffix_of_rank(rank: int, world_size: int) -> str:
    """Suffix that distinguishes the files of one rank from those of the others."""
    return f"_rank{rank}" if world_size > 1 else ""


def data_parallel(model: nn.Module, device: torch.device, world_size: int) -> nn.Module:
    """The model in DistributedDataParallel, which averages gradients in the backward pass; unchanged for one rank."""
    if world_size == 1:
        return model
    devices = [device] if device.type == "cuda" else None
    # Buffers are the same on all ranks, so no forward pass has to send them.  PyTorch 2.13 renamed the flag.
    renamed = "forward_sync_buffers" in inspect.signature(nn.parallel.DistributedDataParallel).parameters
    no_buffers = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    # Without views each gradient would exist twice: as the parameter's, and as a copy in its bucket.
    return nn.parallel.DistributedDataParallel(model, devices, gradient_as_bucket_view=True, **no_buffers)


def gradient_sync(model: nn.Module, last_micro_step: bool):
    """All-reduce gradients only in the last backward pass of a step; the earlier ones accumulate them locally."""
    return contextlib.nullcontext() if last_micro_step or not hasattr(model, "no_sync") else model.no_sync()
