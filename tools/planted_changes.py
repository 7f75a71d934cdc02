"""Changes whose effect on training is known, as edits of programs: wrong ones, and right ones that
may only round."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Collection, Iterator
from itertools import product
from pathlib import Path

from analysis.prove.audit import apart, trains
from analysis.prove.proof import NOTHING, Asked, Prover
from analysis.prove.turns import gain
from harness.model.changes import EXACT, ROUNDING
from harness.program.trials import trials_of

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(SEED)
"""
MODELS = {
    "attention": (
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(16), nn.Dropout(0.1)
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 4)

    def forward(self, x):  # [B, T, 16]
        normed = self.norm(x)  # of the bias of k the gradient is zero but for rounding
        q, k, v = (
            of(normed).unflatten(-1, (4, 4)).transpose(1, 2) for of in (self.q, self.k, self.v)
        )
        x = x + self.drop(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return self.head(x + self.down(F.gelu(self.up(x)))).flatten(0, 1)


def batch():
    return torch.randn(8, 6, 16), torch.randint(4, (48,))
"""
    ),
    "convolution": (
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3)
        self.head = nn.Linear(32, 4)

    def forward(self, x):  # [B, 1, 8, 8]
        x = self.second(F.relu(self.norm(self.first(x))))
        x = F.max_pool2d(x, 2).flatten(1)
        return self.head(x)


def batch():
    return torch.randn(8, 1, 8, 8), torch.randint(4, (8,))
"""
    ),
    "recurrent": (
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(20, 16), nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x):  # [B, T]
        x = self.lstm(self.embedding(x))[0].flatten(0, 1)
        return self.head(x)


def batch():
    return torch.randint(20, (8, 6)), torch.randint(4, (48,))
"""
    ),
    "perceptron": (
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(16, 256), nn.LayerNorm(256)
        self.second = nn.Linear(256, 64)
        self.head = nn.Linear(64, 4)

    def forward(self, x):  # [B, 16], the first always zero
        x = F.silu(self.second(F.relu(self.norm(self.first(x)))))
        return self.head(x)


def batch():
    return torch.randn(8, 16) * (torch.arange(16) > 0), torch.randint(4, (8,))
"""
    ),
    "gated": (
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        shapes = [(16, 32), (16, 32), (32, 16)]
        self.gates, self.ups, self.downs = (
            nn.ModuleList(nn.Linear(*s) for _ in range(3)) for s in shapes
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x):  # [B, 16]
        for gate, up, down in zip(self.gates, self.ups, self.downs):
            x = x + down(F.silu(gate(x)) * up(x))
        return self.head(x)


def batch():
    return torch.randn(8, 16), torch.randint(4, (8,))
"""
    ),
}
OPTIMIZERS = {
    "AdamW": "torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)",
    "SGD": "torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)",
}
LOOP = """
model = Net()
optimizer = OPTIMIZER
for step in range(20):
    for _ in range(2):
        x, y = batch()
        loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
"""
PROGRAMS = {
    f"{kind}, {optimizer}": HEAD + MODELS[kind] + LOOP.replace("OPTIMIZER", OPTIMIZERS[optimizer])
    for kind, optimizer in product(MODELS, OPTIMIZERS)
}

HOOKED = """for i, p in enumerate(p for p in model.parameters() if p.ndim > 1):
    p.register_hook(lambda grad, i=i: {})
"""
LOST = "grad * (torch.arange(grad.shape[-1]) % 2) if i == 0 else grad"
# By name: what is replaced by what; the first of several that the program has.
WRONG = {
    "no weight decay": [("weight_decay=0.1", "weight_decay=0.0")],
    "another beta or momentum": [("0.95)", "0.999)"), ("momentum=0.9", "momentum=0.8")],
    "no clipping": [("    nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n", "")],
    "a frozen layer": [
        ("model = Net()\n", "model = Net()\nnext(model.parameters()).requires_grad_(False)\n")
    ],
    "accumulation not divided": [("y) / 2", "y)")],
    "no mask": [("is_causal=True", "is_causal=False"), ("model(x), y)", "model(x)[1:], y[1:])")],
    "a wrong scale": [
        ("is_causal=True", "is_causal=True, scale=0.4"),
        ("self.head(x)", "1.01 * self.head(x)"),
    ],
    # The first loss is right, as where a compiler gets the backward pass wrong.
    "gradients too large": [("model = Net()\n", f"model = Net()\n{HOOKED.format('1.3 * grad')}")],
    "a doubled gradient": [
        ("model = Net()\n", f"model = Net()\n{HOOKED.format('grad * (2 if i == 0 else 1)')}")
    ],
    "half a gradient lost": [("model = Net()\n", f"model = Net()\n{HOOKED.format(LOST)}")],
    "evaluation mode": [("model = Net()\n", "model = Net().eval()\n")],
}
RIGHT = {
    "fused": [("weight_decay=0.1", "weight_decay=0.1, fused=True")],
    "foreach": [("weight_decay=0.1", "weight_decay=0.1, foreach=True")],
    "one after another": [("weight_decay=0.1", "weight_decay=0.1, foreach=False")],
    "gradients set to zero": [("zero_grad()", "zero_grad(set_to_none=False)")],
    "a graph of operators": [
        ("model = Net()\n", "model = Net()\nmodel.compile(backend='aot_eager')\n")
    ],
    "two threads": [("torch.manual_seed(", "torch.set_num_threads(2)\ntorch.manual_seed(")],
    "a sum, divided": [
        ("F.cross_entropy(model(x), y)", "F.cross_entropy(model(x), y, reduction='sum') / len(y)")
    ],
    "a matmul with its bias": [
        ("self.head(x", "(lambda x: x @ self.head.weight.T + self.head.bias)(x")
    ],
    "a loss in two parts": [
        ("F.cross_entropy(model(x), y)", "F.nll_loss(F.log_softmax(model(x), -1), y)")
    ],
}


def edited(source: str, edits: list[tuple[str, str]]) -> str:
    before, after = next(edit for edit in edits if edit[0] in source)
    return source.replace(before, after)


@contextlib.contextmanager
def prover_of(source: str) -> Iterator[Prover]:
    """Of a program in a folder of its own, which is the working folder meanwhile."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            Path("train.py").write_text(source)
            command = [sys.executable, "train.py"]
            with trials_of(command, dict(os.environ), keep=True) as trials:
                yield Prover(trials, ["train.py"], Asked([], 4, audit_only=True))
        finally:
            os.chdir(before)


def audits(program: str, seed: int, chosen: Collection[str] = (*WRONG, *RIGHT)) -> dict[str, str]:
    """What the audit says of these edits of a program; of the program itself it says that it
    repeats itself."""
    source, said = PROGRAMS[program].replace("SEED", str(seed)), {}
    with prover_of(source) as prover:
        yardsticks = prover.yardsticks()
        assert prover.repeats == EXACT
        for name in chosen:
            edits = (WRONG | RIGHT)[name]
            Path("train.py").write_text(edited(source, edits))
            trial = prover.trials.run(audit=True)
            said[name] = trial.error
            if not trial.error:
                marks = apart(trial.found, prover.plain.found)
                said[name] = trains(marks, yardsticks, ROUNDING).word
    return said


def contests_of_nothing(program: str, contests: int = 10) -> list[str]:
    """What is said of turns in which nothing is changed."""
    source = PROGRAMS[program].replace("SEED", "0").replace("range(20)", "range(5000)")
    names = [str(number) for number in range(contests)]
    with prover_of(source) as prover:
        prover.audit_alike("the program as it is")
        intervals = prover.in_turn({name: [] for name in (NOTHING, *names)}).intervals
    return [gain(intervals[name], intervals[NOTHING]) for name in names]
