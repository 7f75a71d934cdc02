"""A list of losses, each with the graph of its step: the memory of the process grows until it is
full.

`fixed` keeps numbers, as a log needs them.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn


def main() -> None:
    keeps_numbers = sys.argv[1:] == ["fixed"]
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    losses = []
    for _ in range(300):
        inputs, labels = torch.randn(512, 256), torch.randint(10, (512,))
        loss = F.cross_entropy(network(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item() if keeps_numbers else F.cross_entropy(network(inputs), labels))
    print(f"{len(losses)} losses")


if __name__ == "__main__":
    main()
