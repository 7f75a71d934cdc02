"""A model of the library transformers, made from its configuration, with random weights: nothing is
downloaded.

python3 run_pytorch_profiler.py --workload tests/workloads/transformers_model.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel  # pip install transformers

BATCH, LENGTH, VOCABULARY = 4, 128, 1024


def batches():
    """Endless batches of random tokens [B, S], and the tokens that follow each [B, S]."""
    while True:
        text = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
        yield text[:, :-1], text[:, 1:]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, following = batch
    logits = model(input_ids=tokens, use_cache=False).logits  # [B, S, V]
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def workload():
    shape = {"n_positions": LENGTH, "n_embd": 128, "n_layer": 4, "n_head": 4}
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **shape)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4), batches(), loss
