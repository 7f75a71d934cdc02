"""Models that published.ini takes from others and that are no LLaMA, as --workload
published_models.py:NAME.

python3 tiny_llama_v1.py --dry-run --workload benchmarks/published_models.py:mpt_7b \\
    --target-device H100
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tiny_llama_v1 import OptimizationConfig, TinyLlamaConfig, TinyLlamaModel

BOTTLENECKS = ((3, 64), (4, 128), (6, 256), (3, 512))  # of ResNet-50: blocks, channels within them


class Block(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:  # [B, S, D] -> [B, S, D]
        q, k, v = (
            self.qkv(self.attention_norm(x))
            .unflatten(-1, (3, self.heads, -1))
            .permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)  # [B, H, S, D / H]
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class Gpt(nn.Module):
    """GPT-2, and MPT as its benchmarks train it: learned positions, biases, an output layer tied to
    the embedding."""

    def __init__(
        self, layers: int, width: int, heads: int, vocabulary: int, length: int, usual: bool = True
    ):
        super().__init__()
        self.embedding, self.positions = (
            nn.Embedding(vocabulary, width),
            nn.Embedding(length, width),
        )
        self.layers = nn.ModuleList(Block(width, heads, usual) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if usual:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:  # [B, S] -> [B, S, V]
        x = self.embedding(tokens) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Bottleneck(nn.Module):
    def __init__(self, given: int, within: int, stride: int):
        super().__init__()
        sizes = ((given, within, 1, 1), (within, within, 3, stride), (within, 4 * within, 1, 1))
        self.layers = nn.Sequential(*(layer for one in sizes for layer in convolution(*one)))[:-1]
        self.shortcut = None
        if stride > 1 or given != 4 * within:
            self.shortcut = nn.Sequential(*convolution(given, 4 * within, 1, stride)[:2])

    def forward(self, x: Tensor) -> Tensor:  # [N, C, H, W]
        return F.relu_(self.layers(x) + (self.shortcut(x) if self.shortcut else x))


def convolution(given: int, out: int, size: int, stride: int) -> list[nn.Module]:
    layer = nn.Conv2d(given, out, size, stride, padding=size // 2, bias=False)
    return [layer, nn.BatchNorm2d(out), nn.ReLU(inplace=True)]


def text_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, following = batch
    return F.cross_entropy(model(tokens).float().flatten(0, 1), following.flatten())


def text(vocabulary: int, length: int, samples: int):
    while True:
        tokens = torch.randint(vocabulary, (samples, length + 1))
        yield tokens[:, :-1], tokens[:, 1:]


def gpt(layers: int, width: int, heads: int, vocabulary: int, length: int, samples: int):
    model = Gpt(layers, width, heads, vocabulary, length)
    return (
        model,
        torch.optim.AdamW(model.parameters()),
        text(vocabulary, length, samples),
        text_loss,
    )


def fsdp2_example():
    """That of PyTorch's example of FSDP2: not tied, its attention not causal, no loss but the sum
    of the output."""
    model = Gpt(16, 1024, 16, 32000, 512, usual=False)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, text(32000, 512, 8), lambda model, batch: model(batch[0]).float().sum()


def llama_3b():
    """Llama 3.2 3B, whose output layer is its embedding."""
    model = TinyLlamaModel(
        TinyLlamaConfig(128256, 3072, 28, 24, 8, 8192, 4096), OptimizationConfig(attention="sdpa")
    )
    model.lm_head.weight = model.embedding.weight
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, text(128256, 4096, 2), lambda model, batch: model(*batch)[1]


def resnet50():
    blocks, given = [], 64
    for number, (count, within) in enumerate(BOTTLENECKS):
        for i in range(count):
            blocks.append(Bottleneck(given, within, 2 if number and not i else 1))
            given = 4 * within
    stem = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    model = nn.Sequential(
        *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    batches = iter(lambda: (torch.randn(512, 3, 224, 224), torch.randint(1000, (512,))), None)
    return (
        model,
        optimizer,
        batches,
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    )


# Layers, width, heads, vocabulary, tokens, samples of a micro-batch.
gpt2_124m = partial(gpt, 12, 768, 12, 50304, 1024, 64)
gpt2_350m = partial(gpt, 24, 1024, 16, 50304, 1024, 64)
mpt_125m = partial(gpt, 12, 768, 12, 50368, 2048, 40)
mpt_350m = partial(gpt, 24, 1024, 16, 50368, 2048, 32)
mpt_760m = partial(gpt, 24, 1536, 12, 50368, 2048, 24)
mpt_1b = partial(gpt, 24, 2048, 16, 50368, 2048, 14)
mpt_1b_65536 = partial(gpt, 24, 2048, 16, 50368, 65536, 1)
mpt_3b = partial(gpt, 32, 2560, 20, 50368, 2048, 10)
mpt_3b_1024 = partial(gpt, 32, 2560, 20, 50368, 1024, 20)
mpt_7b = partial(gpt, 32, 4096, 32, 50368, 2048, 6)
mpt_7b_32768 = partial(gpt, 32, 4096, 32, 50368, 32768, 2)
mpt_13b = partial(gpt, 40, 5120, 40, 50368, 2048, 2)
mpt_30b = partial(gpt, 48, 7168, 56, 50368, 2048, 3)
