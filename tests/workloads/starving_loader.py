"""A small model whose data loader is too slow for it: one worker, and samples that each take a
while to read.

python3 run_pytorch_profiler.py --workload tests/workloads/starving_loader.py
"""

import itertools
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

BATCH, FEATURES, CLASSES = 8, 64, 10
READING_S = 0.02  # of a sample, as from a slow disk


class SlowSamples(Dataset):
    def __len__(self) -> int:
        return 1024

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        time.sleep(READING_S)
        return torch.randn(FEATURES), i % CLASSES


def epochs(loader: DataLoader):
    """Batches without end: features [B, F] and classes [B]."""
    for _ in itertools.count():
        yield from loader


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    features, classes = batch
    return F.cross_entropy(model(features), classes)


def workload():
    model = nn.Sequential(nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, CLASSES))
    loader = DataLoader(SlowSamples(), batch_size=BATCH, num_workers=1)
    return model, torch.optim.AdamW(model.parameters()), epochs(loader), loss
