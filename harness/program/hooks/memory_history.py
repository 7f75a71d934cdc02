"""The history of the CUDA allocator from the start of the program, which has to be on before memory
runs out to tell who held it.

torch.cuda._lazy_call() runs a function once the program has made CUDA ready, as it decides itself
which devices it sees, and may fork before.  Where torch has no such function, the hooks fail as
they are installed, and the program goes on without us.
"""

import os
from pathlib import Path

import torch

ENTRIES = 100_000  # of the ring; the oldest are dropped first


def record_history() -> None:
    torch.cuda._lazy_call(_begin)


def _begin() -> None:
    # Stacks of C++ would cost as much again; a thread of autograd's engine is told by having none.
    torch.cuda.memory._record_memory_history(max_entries=ENTRIES, stacks="python")


def write_history(folder: str, rank: int, is_rank: bool) -> None:
    """A snapshot of all devices of this process, where CUDA is in use."""
    if torch.cuda.is_initialized():
        whose = f"rank{rank}" if is_rank else f"process{os.getpid()}"
        torch.cuda.memory._dump_snapshot(str(Path(folder, f"memory_snapshot_{whose}.pickle")))
