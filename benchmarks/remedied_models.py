"""Training steps of models that are not ours, plain and with a remedy planted; see planted_remedies.py.

Each function is one of --workload FILE.py:NAME: it returns model, optimizer, batches and loss.
"""

import time
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples import gpt

BATCH, LENGTH, VOCABULARY, WIDTH, HEADS, LAYERS = 4, 128, 1024, 256, 8, 4
READING_S = 0.03  # of a batch, as from a slow disk


def plain_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)


# ---- examples/gpt.py -----------------------------------------------------------------------------------------------


class FusedAttention(gpt.Attention):
    def forward(self, x: Tensor) -> Tensor:  # [B, S, D] -> [B, S, D]
        q, k, v = self.qkv(x).unflatten(-1, (3, gpt.HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


small_gpt = gpt.workload


def small_gpt_fused_attention():
    model, *others = gpt.workload()
    for block in model.blocks:
        block.attention.__class__ = FusedAttention
    return model, *others


def small_gpt_fused_loss():
    return *gpt.workload()[:3], token_loss


def small_gpt_larger_batch():
    model, optimizer, batches, loss = gpt.workload()
    pairs = zip(batches, batches, strict=True)
    return model, optimizer, (tuple(map(torch.cat, zip(*two, strict=True))) for two in pairs), loss


def small_gpt_slow_data():
    model, optimizer, batches, loss = gpt.workload()

    def read():
        for batch in batches:
            time.sleep(READING_S)
            yield batch

    return model, optimizer, read(), loss


# ---- PyTorch's own encoder -----------------------------------------------------------------------------------------


class Encoder(nn.Module):
    def __init__(self, dropout: float):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout, batch_first=True)
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:  # [B, S] -> [B, S, V]
        return self.head(self.layers(self.embedding(tokens)))


def tokens():
    """Endless batches of random tokens [B, S], and the tokens that follow each [B, S]."""
    while True:
        text = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
        yield text[:, :-1], text[:, 1:]


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def encoder(dropout: float = 0.1):
    model = Encoder(dropout)
    return model, plain_adamw(model), tokens(), token_loss


encoder_without_dropout = partial(encoder, 0.0)


# ---- transformers --------------------------------------------------------------------------------------------------


def logits_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return token_loss(lambda inputs: model(input_ids=inputs, use_cache=False).logits, batch)


def gpt2(attention: str = "eager"):
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
    others = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**shape, **others, attn_implementation=attention))
    return model, plain_adamw(model), tokens(), logits_loss


gpt2_sdpa = partial(gpt2, "sdpa")


def llama(attention: str = "eager", fuse: tuple[str, ...] = ()):
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS // 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **shape, **heads, attn_implementation=attention))
    for module in [*model.modules()]:
        if fuse and all(hasattr(module, name) for name in fuse):
            fused = Fused([getattr(module, name) for name in fuse])
            for name in fuse:
                setattr(module, name, fused)
    return model, plain_adamw(model), tokens(), logits_loss


class Fused(nn.Module):
    """Linear layers with one input, called one after another: the first call multiplies for all of them."""

    def __init__(self, layers: list[nn.Linear]):
        super().__init__()
        self.sizes, self.found = [layer.out_features for layer in layers], []
        self.weight = nn.Parameter(torch.cat([layer.weight.detach() for layer in layers]))

    def forward(self, x: Tensor) -> Tensor:
        self.found = self.found or [*F.linear(x, self.weight).split(self.sizes, -1)]
        return self.found.pop(0)


llama_sdpa = partial(llama, "sdpa")
llama_fused_qkv = partial(llama, fuse=("q_proj", "k_proj", "v_proj"))
llama_fused_gate_up = partial(llama, fuse=("gate_proj", "up_proj"))
