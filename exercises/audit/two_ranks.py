"""Train a network on two ranks, which reduce their gradients once for every four micro-batches.

    python3 -m torch.distributed.run --nproc-per-node 2 exercises/audit/two_ranks.py

`fixed` after its name mends what is wrong with it.  Runs on CPUs, wherever it is started.
"""

import contextlib
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

MICRO_STEPS, ACCUMULATED = 160, 4


def main() -> None:
    is_fixed = sys.argv[1:] == ["fixed"]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    rule = nn.Linear(256, 10)  # by which the data are labelled
    network = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 10))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + rank)  # other data on each rank
    losses = []
    for micro_step in range(MICRO_STEPS):
        inputs = torch.randn(64, 256)
        labels = rule(inputs).argmax(dim=1)
        is_last = (micro_step + 1) % ACCUMULATED == 0
        reduces = is_last if is_fixed else micro_step % ACCUMULATED == 0
        with contextlib.nullcontext() if reduces else model.no_sync():
            loss = F.cross_entropy(model(inputs), labels) / ACCUMULATED
            loss.backward()
        losses.append(ACCUMULATED * loss.item())
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    print(f"rank {rank}: the loss falls from {losses[0]:.2f} to {losses[-1]:.2f}", flush=True)
    del model  # it holds the process group too: freed last, it may wait for gloo's thread for ever
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
