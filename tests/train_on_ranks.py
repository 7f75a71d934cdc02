"""Started by torch.distributed.run: trains once for each set of flags, and prints what rank 0 measured as JSON.

torchrun --nproc-per-node 2 tests/train_on_ranks.py '["--parallel ddp", "--parallel fsdp"]'
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import tiny_llama_v1 as tiny_llama
from harness.instruments.memory_tracker import MemoryTracker
from harness.instruments.timing import UntimedMeter
from harness.model.workload import sharded_state
from harness.ranks.distributed import process_group
from harness.ranks.parallel import replicated

CPU = torch.device("cpu")
STEPS = 4


def trained(flags: str, rank: int) -> dict:
    """Losses of all steps, and the memory of one."""
    workload, _ = tiny_llama.resolve(tiny_llama.build_parser().parse_args(flags.split()))
    torch.manual_seed(workload.training.seed)
    state = sharded_state(workload, CPU)
    model, optimizer = state.model, state.optimizer
    state = state._replace(model=replicated(model, workload.training, CPU))
    stream, meter = workload.batches(CPU, rank), UntimedMeter(world_size=workload.training.world_size)
    workload.train(state, stream, STEPS - 1, meter, UntimedMeter())
    tracker = MemoryTracker(model, optimizer)
    workload.train(state, stream, 1, meter, UntimedMeter(tracker))
    memory = tracker.timeline.document()
    losses = torch.stack(meter.losses).view(STEPS, -1).mean(1).tolist()  # of the micro-batches of a step
    return {"losses": losses, "peak": memory["peak"]["bytes_by_category"], "collectives": memory["collectives"]}


def main() -> None:
    torch.set_num_threads(1)
    with process_group(CPU, {}) as (rank, _):
        results = [trained(flags, rank) for flags in json.loads(sys.argv[1])]
        if rank == 0:
            print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
