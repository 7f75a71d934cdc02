"""A small GPT whose output layer shares its weights with the embedding.  Exercise 13 makes it
faster and smaller.

python3 run_pytorch_profiler.py --workload examples/gpt.py
"""

import math

import torch
from torch import Tensor, nn

BATCH, LENGTH, VOCABULARY = 1, 1024, 4096
WIDTH, HEADS, LAYERS = 128, 8, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer(
            "future", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:  # [B, S, D] -> [B, S, D]
        q, k, v = (
            self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        )  # each [B, H, S, D / H]
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # [B, H, S, S]
        weights = scores.masked_fill(self.future, -math.inf).softmax(-1)
        mixed = weights @ v  # [B, H, S, D / H]
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:  # [B, S, D] -> [B, S, D]
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.positions = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Embedding(LENGTH, WIDTH),
        )
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head.weight = self.embedding.weight  # tied: one parameter [V, D]

    def forward(self, tokens: Tensor) -> Tensor:  # [B, S] -> [B, S, V]
        x = self.embedding(tokens) + self.positions.weight  # [B, S, D]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def token_batches():
    """Endless batches of random tokens [B, S], and the tokens that follow each [B, S]."""
    while True:
        text = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
        yield text[:, :-1], text[:, 1:]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy with targets [B, S, V] that are 1 for the token that follows."""
    tokens, following = batch
    logits = model(tokens)  # [B, S, V]
    target = torch.zeros_like(logits).scatter_(-1, following.unsqueeze(-1), 1.0)
    return -(target * logits.log_softmax(-1)).sum(-1).mean()


def workload():
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    return model, optimizer, token_batches(), loss
