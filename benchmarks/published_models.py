"""Models that published.ini takes from others and that are no LLaMA, as --workload
published_models.py:NAME.

python3 tiny_llama_v1.py --dry-run --workload benchmarks/published_models.py:mpt_7b \\
    --target-device H100
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tiny_llama_v1 import OptimizationConfig, TinyLlamaConfig, TinyLlamaModel

BOTTLENECKS = ((3, 64), (4, 128), (6, 256), (3, 512))  # of ResNet-50: blocks, channels within them


class Block(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool, bias: bool = True):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.attention_norm = nn.LayerNorm(width, bias=bias)
        self.mlp_norm = nn.LayerNorm(width, bias=bias)
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=bias),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=bias),
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
        self,
        layers: int,
        width: int,
        heads: int,
        vocabulary: int,
        length: int,
        usual: bool = True,
        bias: bool = True,
    ):
        super().__init__()
        self.embedding, self.positions = (
            nn.Embedding(vocabulary, width),
            nn.Embedding(length, width),
        )
        self.layers = nn.ModuleList(Block(width, heads, usual, bias) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=bias)
        self.head = nn.Linear(width, vocabulary, bias=False)
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


def gpt(
    layers: int,
    width: int,
    heads: int,
    vocabulary: int,
    length: int,
    samples: int,
    bias: bool = True,
):
    model = Gpt(layers, width, heads, vocabulary, length, bias=bias)
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


def resnet50(samples: int = 512, channels_last: bool = False):
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
    form = torch.channels_last if channels_last else torch.contiguous_format
    model = model.to(memory_format=form)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)

    def batches():
        while True:
            images = torch.randn(samples, 3, 224, 224).to(memory_format=form)
            yield images, torch.randint(1000, (samples,))

    return (
        model,
        optimizer,
        batches(),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    )


# ---- Attention in single operators ---------------------------------------------------------------


def attention_of_operators(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, dropout: float
) -> Tensor:
    """q, k, v: [B, H, S, D].  hidden: [S, S], true for what a token must not see."""
    scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
    if hidden is not None:
        scores = scores.masked_fill(hidden, -1e4)
    return F.dropout(F.softmax(scores, dim=-1), dropout) @ v


def heads_of(x: Tensor, heads: int) -> Tensor:
    """[B, S, D] -> [B, H, S, D / H]"""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def later_tokens(length: int) -> Tensor:
    return torch.triu(torch.ones(length, length, dtype=torch.bool), 1)


class SingleOperators(NamedTuple):
    """A GPT whose attention is a matmul, a mask, a softmax, a dropout and a matmul."""

    layers: int
    width: int
    heads: int
    within: int  # width of the feed-forward layers
    samples: int
    length: int = 512
    dropout: float = 0.1


class SingleOperatorsBlock(nn.Module):
    def __init__(self, shape: SingleOperators):
        super().__init__()
        width, self.heads, self.dropout = shape.width, shape.heads, shape.dropout
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, shape.within, bias=False)
        self.down = nn.Linear(shape.within, width, bias=False)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        parts = self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        q, k, v = (heads_of(part, self.heads) for part in parts)
        mixed = attention_of_operators(q, k, v, hidden, self.dropout).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(mixed), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))), self.dropout)


class SingleOperatorsGpt(nn.Module):
    def __init__(self, shape: SingleOperators, vocabulary: int):
        super().__init__()
        self.dropout = shape.dropout
        self.embedding = nn.Embedding(vocabulary, shape.width)
        self.positions = nn.Embedding(shape.length, shape.width)
        self.layers = nn.ModuleList(SingleOperatorsBlock(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("hidden", later_tokens(shape.length))

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.dropout(self.embedding(tokens) + self.positions.weight, self.dropout)
        for layer in self.layers:
            x = layer(x, self.hidden)
        return self.head(self.norm(x))


def loss_as_it_comes(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Without a cast to float32."""
    tokens, following = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())


def single_operators(*shape):
    made = SingleOperators(*shape)
    model = SingleOperatorsGpt(made, 50257)
    batches = text(50257, made.length, made.samples)
    return model, torch.optim.AdamW(model.parameters()), batches, loss_as_it_comes


class MinGptBlock(nn.Module):
    """That of minGPT in PyTorch's examples, whose attention returns its weights, too."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, dropout=0.1, batch_first=True)
        self.out, self.dropout = nn.Linear(width, width), nn.Dropout(0.1)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        y = self.attention_norm(x)
        mixed, _ = self.attention(y, y, y, attn_mask=seen)
        x = x + self.dropout(self.out(mixed))
        return x + self.mlp(self.mlp_norm(x))


class MinGpt(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(1, length, width))
        self.dropout = nn.Dropout(0.1)
        self.layers = nn.ModuleList(MinGptBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("seen", torch.tril(torch.ones(length, length)))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.embedding(tokens) + self.positions)
        for layer in self.layers:
            x = layer(x, self.seen)
        return self.head(self.norm(x))


def mingpt():
    model = MinGpt(12, 768, 12, 50257, 512)
    return model, torch.optim.AdamW(model.parameters()), text(50257, 512, 8), loss_as_it_comes


# ---- A layer alone, forward and backward, in half precision --------------------------------------


class BertLayer(nn.Module):
    """Norms behind the sums, attention to all tokens."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads_of(part(x), self.heads) for part in (self.query, self.key, self.value))
        mixed = attention_of_operators(q, k, v, None, 0.1).transpose(1, 2).flatten(2)
        x = self.norm(x + F.dropout(self.out(mixed), 0.1))
        return self.mlp_norm(x + F.dropout(self.down(F.gelu(self.up(x))), 0.1))


class Gpt2Layer(nn.Module):
    """Norms before the matmuls, a mask, and a GELU in single operators."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("hidden", later_tokens(1024))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        parts = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (heads_of(part, self.heads) for part in parts)
        hidden = self.hidden[:length, :length]
        mixed = attention_of_operators(q, k, v, hidden, 0.1).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(mixed), 0.1)
        up = self.up(self.mlp_norm(x))
        inner = math.sqrt(2 / math.pi) * (up + 0.044715 * torch.pow(up, 3.0))
        return x + F.dropout(self.down(0.5 * up * (1.0 + torch.tanh(inner))), 0.1)


def one_layer(kind: type[nn.Module], length: int, samples: int):
    """A layer of 1024 with 16 heads; its optimizer has next to nothing to do."""
    model = kind(1024, 16)

    def batches() -> Iterator[tuple[Tensor]]:
        while True:
            yield (torch.randn(samples, length, 1024, dtype=torch.bfloat16),)

    optimizer = torch.optim.SGD([model.norm.bias], 0.1)
    return model, optimizer, batches(), lambda model, batch: model(batch[0]).sum()


# ---- A rank's part of tensor parallelism, every layer recomputed ---------------------------------


class MegatronBlock(nn.Module):
    """A softmax that masks by itself, and positions by a bias of the scores (ALiBi)."""

    def __init__(self, width: int, heads: int, ranks: int):
        super().__init__()
        part, self.heads = width // ranks, heads // ranks
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * part), nn.Linear(part, width)
        self.up, self.down = nn.Linear(width, 4 * part), nn.Linear(4 * part, width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        samples = x.shape[0]
        parts = self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        q, k, v = (heads_of(part, self.heads).flatten(0, 1) for part in parts)
        scores = torch.baddbmm(bias.repeat(samples, 1, 1), q, k.transpose(1, 2))  # [B * H, S, S]
        mixed = torch.bmm(F.softmax(scores, dim=-1), v).unflatten(0, (samples, -1))
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Megatron(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, ranks: int, vocabulary: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(MegatronBlock(width, heads, ranks) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("bias", torch.zeros(heads // ranks, 1, 2048, dtype=torch.bfloat16))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, self.bias, use_reentrant=False)
        return self.head(self.norm(x))


def megatron(layers: int, width: int, heads: int, ranks: int = 1):
    """A micro-batch of 2 x 2,048 tokens; the step of the optimizer, after many of them, is left
    out."""
    vocabulary = 50432 // ranks
    model = Megatron(layers, width, heads, ranks, vocabulary)
    optimizer = torch.optim.SGD([model.norm.bias], 0.1)
    return model, optimizer, text(vocabulary, 2048, 2), text_loss


# ---- Our model, its output layer tied ------------------------------------------------------------


def tied_llama(width: int, layers: int, length: int, samples: int, fused: bool):
    """8 heads, 4 of keys and values, a vocabulary of 1,000."""
    settings = OptimizationConfig()
    if fused:
        settings = OptimizationConfig(attention="sdpa", fused_projections=True)
    config = TinyLlamaConfig(1000, width, layers, 8, 4, 4 * width, length)
    model = TinyLlamaModel(config, settings)
    model.lm_head.weight = model.embedding.weight
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, text(1000, length, samples), lambda model, batch: model(*batch)[1]


tiny_llama = partial(tied_llama, 512, 8, 128, 8, False)
tiny_llama_fused = partial(tied_llama, 512, 8, 128, 8, True)
tiny_llama_medium = partial(tied_llama, 1024, 12, 512, 16, False)
tiny_llama_medium_fused = partial(tied_llama, 1024, 12, 512, 16, True)

# Layers, width, heads, ranks.
megatron_7b = partial(megatron, 32, 4096, 32)
megatron_33b = partial(megatron, 60, 6656, 52, 2)
megatron_65b = partial(megatron, 80, 8192, 64, 2)
megatron_175b = partial(megatron, 70, 14336, 112, 8)

# Tokens and samples.
bert_128_2 = partial(one_layer, BertLayer, 128, 2)
bert_128_64 = partial(one_layer, BertLayer, 128, 64)
bert_128_128 = partial(one_layer, BertLayer, 128, 128)
bert_512_8 = partial(one_layer, BertLayer, 512, 8)
bert_512_64 = partial(one_layer, BertLayer, 512, 64)
gpt2_layer_512_32 = partial(one_layer, Gpt2Layer, 512, 32)
gpt2_layer_1024_8 = partial(one_layer, Gpt2Layer, 1024, 8)
gpt2_layer_1024_32 = partial(one_layer, Gpt2Layer, 1024, 32)

resnet50_128 = partial(resnet50, 128)
resnet50_128_channels_last = partial(resnet50, 128, True)

# As SingleOperators.
single_6_384 = partial(single_operators, 6, 384, 6, 1536, 32)
single_12_768 = partial(single_operators, 12, 768, 12, 3072, 16)
single_24_1024 = partial(single_operators, 24, 1024, 16, 4096, 8)
single_36_1280 = partial(single_operators, 36, 1280, 20, 5120, 4)
single_48_1536 = partial(single_operators, 48, 1536, 24, 6144, 4)
single_32_2560 = partial(single_operators, 32, 2560, 32, 10240, 2)
single_32_4096 = partial(single_operators, 32, 4096, 32, 11008, 8, 1024)
single_40_5120 = partial(single_operators, 40, 5120, 40, 13824, 4, 1024)
single_32_4096_ddp = partial(single_operators, 32, 4096, 32, 11008, 8, 1024, 0.0)
single_40_5120_ddp = partial(single_operators, 40, 5120, 40, 13824, 8, 1024, 0.0)

# Layers, width, heads, vocabulary, tokens, samples of a micro-batch; of nanoGPT without biases.
nano_760m = partial(gpt, 24, 1536, 24, 50304, 1024, 32, bias=False)
nano_760m_4 = partial(gpt, 24, 1536, 24, 50304, 1024, 4, bias=False)
gpt2_xl_14 = partial(gpt, 48, 1600, 25, 50304, 1024, 14, bias=False)
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
