"""A mixture of experts: the data decide which tokens an expert gets, and how many.

A dry run has shapes but no data, so it cannot know.  A real step can be measured.

python3 run_pytorch_profiler.py --workload tests/workloads/data_decides.py
"""

import torch
from torch import Tensor, nn

BATCH, WIDTH, EXPERTS = 256, 64, 4


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:  # [B, D] -> [B, D]
        weight, chosen = (
            self.router(x).softmax(-1).max(-1)
        )  # [B] each: the best expert, and how good it is
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            (rows,) = (chosen == i).nonzero(as_tuple=True)  # as many as the data say
            out = out.index_add(0, rows, weight[rows, None] * expert(x[rows]))
        return out


def samples():
    """Endless batches [B, D]."""
    while True:
        yield torch.randn(BATCH, WIDTH)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch.flip(-1)).square().mean()


def workload():
    model = Mixture()
    return model, torch.optim.AdamW(model.parameters()), samples(), loss
