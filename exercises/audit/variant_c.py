"""Attention that keeps less for the backward pass: the weights are made once, and read as constants
from there on."""

import torch.nn.functional as F
from torch import Tensor

from harness.base.ranges import trace_range
from tiny_llama_v1 import repeat_kv


def eager_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, part: str = "attention"
) -> Tensor:
    """q [B, H, S, E], k and v [B, K, S, E], mask [S, S] -> [B, H, S, E]"""
    with trace_range(f"{part}.scores"):
        scores = (q * q.shape[-1] ** -0.5) @ repeat_kv(k, q.shape[1]).transpose(
            2, 3
        )  # [B, H, S, S]
        scores = scores if mask is None else scores + mask
    with trace_range(f"{part}.softmax"):
        weights = F.softmax(scores.detach(), dim=-1).to(q.dtype)  # [B, H, S, S]
    with trace_range(f"{part}.weighted_sum"):
        return weights @ repeat_kv(v, q.shape[1])  # [B, H, S, E]
