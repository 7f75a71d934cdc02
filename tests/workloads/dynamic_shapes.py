"""Sentences of different lengths, padded to the longest of their batch: steps differ in shapes.

python3 run_pytorch_profiler.py --workload tests/workloads/dynamic_shapes.py
python3 run_pytorch_profiler.py --workload tests/workloads/dynamic_shapes.py:padded    # one length
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

BATCH, LONGEST, VOCABULARY, WIDTH, CLASSES = 16, 32, 1000, 64, 10


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.recurrent, self.head = (
            nn.GRU(WIDTH, WIDTH, batch_first=True),
            nn.Linear(WIDTH, CLASSES),
        )

    def forward(self, tokens: Tensor) -> Tensor:  # [B, S] -> [B, classes]
        states, _ = self.recurrent(self.embedding(tokens))  # [B, S, D]
        return self.head(states.mean(1))


def sentences(least: int):
    """Endless batches of tokens [B, S], with S at least `least` and at most LONGEST, and of classes
    [B]."""
    while True:
        lengths = torch.randint(4, LONGEST + 1, (BATCH,)).tolist()
        tokens = pad_sequence(
            [torch.randint(1, VOCABULARY, (n,)) for n in lengths], batch_first=True
        )
        yield F.pad(tokens, (0, max(0, least - tokens.shape[1]))), torch.randint(CLASSES, (BATCH,))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, classes = batch
    return F.cross_entropy(model(tokens), classes)


def workload(least: int = 0):
    model = Classifier()
    return model, torch.optim.AdamW(model.parameters()), sentences(least), loss


def padded():
    return workload(LONGEST)
