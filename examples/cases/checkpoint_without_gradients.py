"""A network whose blocks are checkpointed although their input needs no gradient: nothing but the
last layer trains, and that is fast.

`use_reentrant=True` runs each block without autograd and records it only if one of its inputs needs
a gradient; weights do not count as inputs.  With `False` all blocks train.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [B, width] -> [B, width]
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Network(nn.Module):
    def __init__(self, width: int = 128, depth: int = 4, reentrant: bool = True):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head, self.reentrant = nn.Linear(width, 10), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [B, width] -> [B, 10]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def main() -> None:
    torch.manual_seed(0)
    network = Network(reentrant=sys.argv[1:] != ["fixed"])
    optimizer = torch.optim.AdamW(network.parameters())
    inputs, labels = torch.randn(256, 128), torch.randint(10, (256,))
    for _ in range(200):
        optimizer.zero_grad()
        F.cross_entropy(network(inputs), labels).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
