"""Data parallelism: the process group, and averaging gradients over ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
from torch import nn


def world_size_of_run() -> int:
    """Processes of this run, as torchrun tells each of them."""
    return int(os.environ.get("WORLD_SIZE", 1))


@contextlib.contextmanager
def process_group(device: torch.device) -> Iterator[tuple[int, int]]:
    """Under torchrun, join the other processes; yields (rank, world size)."""
    world_size = world_size_of_run()
    if world_size == 1:
        yield 0, 1
        return
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield torch.distributed.get_rank(), world_size
    finally:
        torch.distributed.destroy_process_group()


def suffix_of_rank(rank: int, world_size: int) -> str:
    """Suffix that distinguishes the files of one rank from those of the others."""
    return f"_rank{rank}" if world_size > 1 else ""


def data_parallel(model: nn.Module, device: torch.device, world_size: int) -> nn.Module:
    """The model in DistributedDataParallel, which averages gradients in the backward pass; unchanged for one rank."""
    if world_size == 1:
        return model
    devices = [device] if device.type == "cuda" else None
    # Without views each gradient would exist twice: as the parameter's, and as a copy in its bucket.
    return nn.parallel.DistributedDataParallel(model, devices, broadcast_buffers=False, gradient_as_bucket_view=True)


def gradient_sync(model: nn.Module, last_micro_step: bool):
    """All-reduce gradients only in the last backward pass of a step; the earlier ones accumulate them locally."""
    return contextlib.nullcontext() if last_micro_step or not hasattr(model, "no_sync") else model.no_sync()
