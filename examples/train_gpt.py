"""A training loop around examples/gpt.py, as people write them: nothing in it knows of this
workshop.

python3 examples/train_gpt.py [STEPS]
"""

import sys

import torch
from gpt import workload

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model, optimizer, batches, loss_of = workload()
model.to(device)
for step in range(int(sys.argv[1]) if len(sys.argv) > 1 else 100):
    loss = loss_of(model, [one.to(device) for one in next(batches)])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}", flush=True)
