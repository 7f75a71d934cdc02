"""A network with a path of its own for the compiler, which keeps a gradient back: compiled it
trains another model, and its loss falls all the same.

`fixed` is without that path.  The fault is planted here; compilers have had such faults, too.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn


class Network(nn.Module):
    def __init__(self, keeps_back: bool):
        super().__init__()
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 10)
        self.keeps_back = keeps_back

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [B, 64] -> [B, 10]
        hidden = self.first(x)
        if self.keeps_back and torch.compiler.is_compiling():
            return self.second(F.gelu(hidden.detach()))  # faster, and the first layer is lost
        return self.second(F.gelu(hidden))


def main() -> None:
    torch.manual_seed(0)
    network = Network(keeps_back=sys.argv[1:] != ["fixed"])
    optimizer = torch.optim.AdamW(network.parameters())
    inputs, labels = torch.randn(256, 64), torch.randint(10, (256,))
    for _ in range(200):
        optimizer.zero_grad()
        F.cross_entropy(network(inputs), labels).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
