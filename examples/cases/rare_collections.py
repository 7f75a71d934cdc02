"""Hundreds of thousands of objects that live long, and a step that makes more of them: now and then
the collector of garbage looks at all of them, and on many ranks all others wait.

`fixed` tells the collector after the first steps that what is there stays.
"""

import gc
import sys

import torch
import torch.nn.functional as F
from torch import nn


def main() -> None:
    samples = [{"id": number, "tokens": [number, number + 1]} for number in range(200_000)]
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 10))
    optimizer = torch.optim.AdamW(network.parameters())
    inputs, labels = torch.randn(512, 256), torch.randint(10, (512,))
    seen = []
    for step in range(800):
        seen.append([{"step": step, "sample": sample} for sample in samples[:1000]])
        optimizer.zero_grad()
        F.cross_entropy(network(inputs), labels).backward()
        optimizer.step()
        seen = seen[-3:]
        if step == 2 and sys.argv[1:] == ["fixed"]:  # what libraries make late is there, too
            gc.collect()
            gc.freeze()


if __name__ == "__main__":
    main()
