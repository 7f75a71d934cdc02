"""Started by torch.distributed.run: trains once for each set of flags, and prints what rank 0
measured as JSON.

torchrun --nproc-per-node 2 tests/train_on_ranks.py '["--parallel ddp", "--parallel fsdp"]'
"""

import json
import math
import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import tiny_llama_v1 as tiny_llama
from harness.instruments.memory_tracker import MemoryTracker
from harness.instruments.timing import NullMeter
from harness.model.grad_clip import clip_gradients
from harness.ranks.distributed import process_group
from harness.session.session import Session

CPU = torch.device("cpu")
STEPS = 4


def trained(flags: str, rank: int) -> dict:
    """Losses and gradient norms of all steps, norms after clipping of all but the last, and the
    memory of that one."""
    workload, _ = tiny_llama.resolve(tiny_llama.build_parser().parse_args(flags.split()))
    world_size = workload.training.world_size
    session, meter = Session(workload, CPU, (rank, world_size)), NullMeter(world_size=world_size)
    clipped = []

    def clip_and_measure(optimizer: torch.optim.Optimizer, max_norm: float) -> torch.Tensor:
        norm = clip_gradients(optimizer, max_norm)
        clipped.append(clip_gradients(optimizer, math.inf))
        return norm

    with mock.patch.object(tiny_llama, "clip_gradients", clip_and_measure):
        session.run(STEPS - 1, meter)
    tracker = MemoryTracker(session.model, session.optimizer)
    session.step(meter, tracker)
    memory = tracker.timeline.document()
    losses = (
        torch.stack(meter.losses).view(STEPS, -1).mean(1).tolist()
    )  # of the micro-batches of a step
    return {
        "losses": losses,
        "grad_norms": [norm.item() for norm in meter.grad_norms],
        "clipped": [norm.item() for norm in clipped],
        "peak": memory["peak"]["bytes_by_category"],
        "peak_by_phase": [phase["peak_bytes"] for phase in memory["phases"]],
        "collectives": memory["collectives"],
    }


def main() -> None:
    torch.set_num_threads(1)
    with process_group(CPU, {}) as (rank, _):
        results = [trained(flags, rank) for flags in json.loads(sys.argv[1])]
        if rank == 0:
            print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
