"""Four micro-batches a step on two ranks, with no_sync() around the backward passes alone.
DistributedDataParallel decides in the forward pass whether gradients are reduced, so they are
reduced four times as often as they need to be.

`fixed` has the forward passes within no_sync() too.  Start it with torchrun --nproc-per-node 2.
"""

import contextlib
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

MICRO_BATCHES = 4


def main() -> None:
    holds_forward = sys.argv[1:] == ["fixed"]
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(6)]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(512, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(dist.get_rank())  # of the data
    for _ in range(100):
        optimizer.zero_grad()
        for micro_batch in range(MICRO_BATCHES):
            is_last = micro_batch == MICRO_BATCHES - 1
            inputs, labels = torch.randn(32, 512), torch.randint(10, (32,))
            unreduced = contextlib.nullcontext if is_last else model.no_sync
            with unreduced() if holds_forward else contextlib.nullcontext():
                loss = F.cross_entropy(model(inputs), labels) / MICRO_BATCHES
                with unreduced():
                    loss.backward()
        optimizer.step()
    del model  # it holds the process group too: freed last, it may wait for gloo's thread for ever
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
