"""A convolutional network with residual connections, which sorts small images into ten classes.

python3 run_pytorch_profiler.py --workload tests/workloads/convolutional_network.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, PIXELS, CHANNELS, CLASSES = 16, 32, 16, 10


class Residual(nn.Module):
    """Two 3 x 3 convolutions, added to their input; with stride 2, half as many pixels and twice as
    many channels."""

    def __init__(self, channels: int, stride: int):
        super().__init__()
        wider = channels * stride
        self.first = nn.Conv2d(channels, wider, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(wider)
        self.second = nn.Conv2d(wider, wider, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(wider)
        self.shortcut = (
            nn.Conv2d(channels, wider, 1, stride, bias=False) if stride > 1 else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:  # [B, C, P, P] -> [B, C stride, P / stride, P / stride]
        hidden = self.first_norm(self.first(x)).relu()
        return (self.second_norm(self.second(hidden)) + self.shortcut(x)).relu()


def network() -> nn.Module:
    blocks = [
        Residual(CHANNELS, 1),
        Residual(CHANNELS, 2),
        Residual(2 * CHANNELS, 1),
        Residual(2 * CHANNELS, 2),
    ]
    return nn.Sequential(
        nn.Conv2d(3, CHANNELS, 3, padding=1, bias=False),
        nn.BatchNorm2d(CHANNELS),
        nn.ReLU(),
        nn.Sequential(*blocks),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * CHANNELS, CLASSES),
    )


def images():
    """Endless batches of noise: images [B, 3, P, P] and their classes [B]."""
    while True:
        yield torch.randn(BATCH, 3, PIXELS, PIXELS), torch.randint(CLASSES, (BATCH,))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, classes = batch
    return F.cross_entropy(model(inputs), classes)


def workload():
    model = network()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), images(), loss
