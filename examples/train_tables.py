"""A training loop of a model with large tables, as recommenders have them: a step looks up a few
rows, and AdamW goes through all of them.  Nothing in it knows of this workshop.

python3 examples/train_tables.py [STEPS]
"""

import sys

import torch
from torch import Tensor, nn

TABLES, ROWS, WIDTH, BATCH = 4, 50_000, 32, 256


class Clicks(nn.Module):
    """Whether somebody clicks, from a row of each table."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, WIDTH) for _ in range(TABLES))
        self.layers = nn.Sequential(
            nn.Linear(TABLES * WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)
        )

    def forward(self, rows: Tensor) -> Tensor:  # [B, TABLES] -> [B]
        looked_up = [table(rows[:, i]) for i, table in enumerate(self.tables)]  # each [B, WIDTH]
        return self.layers(torch.cat(looked_up, -1)).squeeze(-1)


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = Clicks().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(int(sys.argv[1]) if len(sys.argv) > 1 else 100):
    rows = torch.randint(ROWS, (BATCH, TABLES), device=device)
    clicked = (rows[:, 0] % 2).float()
    loss = nn.functional.binary_cross_entropy_with_logits(model(rows), clicked)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}", flush=True)
