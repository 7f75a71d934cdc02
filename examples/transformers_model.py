"""A model of the library transformers, made from its configuration, with random weights: nothing is downloaded.

python3 run_pytorch_profiler.py --workload examples/transformers_model.py
"""

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel  # pip install transformers

BATCH, LENGTH, VOCABULARY = 4, 128, 1024


def batches():
    """Endless batches of random tokens [B, S]."""
    while True:
        yield torch.randint(VOCABULARY, (BATCH, LENGTH))


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss  # it shifts the labels itself


def workload():
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=128, n_layer=4, n_head=4)
    model = GPT2LMHeadModel(config)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4), batches(), loss
