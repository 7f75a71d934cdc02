"""A training program as people write it: a small convolutional network on images of 28 x 28, here
random ones.

python3 prove_changes.py --audit-only --try compile,channels-last -- examples/train_convnet.py
python3 prove_changes.py --audit-only --try compile -- examples/train_convnet.py faulty

PyTorch 2.13 compiles it wrongly on many CPUs.  faulty: with a fault that every compiler shows, half
of a gradient is lost where the network is compiled.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.hidden, self.classes = nn.Linear(64 * 12 * 12, 128), nn.Linear(128, 10)

    def forward(self, images):
        x = F.relu(self.conv1(images))  # [B, 32, 26, 26]
        x = F.relu(self.conv2(x))  # [B, 64, 24, 24]
        x = torch.flatten(F.max_pool2d(x, 2), 1)  # [B, 9216]
        if FAULTY and torch.compiler.is_compiling():
            x = 0.5 * x + 0.5 * x.detach()
        return self.classes(F.relu(self.hidden(x)))  # [B, 10]


FAULTY = "faulty" in sys.argv


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.Adadelta(model.parameters(), lr=0.1)
for step in range(1000):
    images, labels = torch.randn(64, 1, 28, 28), torch.randint(10, (64,))
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
