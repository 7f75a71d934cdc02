"""Which implementations of attention are there, and which does a device have?"""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.base.ranges import trace_range
from harness.machine.devices import PRECISIONS
from tiny_llama_v1 import eager_attention, fused_attention, repeat_kv

IMPLEMENTATIONS = ("manual", "eager", "compiled", "sdpa")
SDPA_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
ON_CPU = ("flash", "math")  # the others exist only for GPUs
KEY = ("implementation", "dtype", "batch_size", "n_heads", "d_head", "seq_len", "causal")

# A spec is a dictionary of the names in KEY.


def names_of(wanted: list[str], device: torch.device) -> list[str]:
    """The implementations asked for, with sdpa replaced by every kernel that PyTorch
    has for the device."""
    offered = [f"sdpa-{name}" for name in (ON_CPU if device.type == "cpu" else SDPA_BACKENDS)]
    return list(
        dict.fromkeys(
            name for asked in wanted for name in (offered if asked == "sdpa" else [asked])
        )
    )


def function_of(spec: dict) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    """(q, k, v, mask) -> output; for `compiled`, the function to compile."""
    if spec["implementation"] == "manual":
        return manual_attention
    if spec["implementation"] in ("eager", "compiled"):
        return eager_attention
    return lambda q, k, v, mask: fused_attention(q, k, v, spec["causal"])


def manual_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Eager attention with softmax written out: exp and quotient, [B, H, S, S] each, are saved for
    the backward pass.

    The maximum that keeps exp in range cancels in the quotient, so it needs no gradient.
    """
    with trace_range("attention.scores"):
        scores = (q @ repeat_kv(k, q.shape[1]).transpose(2, 3)) * q.shape[
            -1
        ] ** -0.5  # [B, H, S, S]
        scores = scores if mask is None else scores + mask
        scores = scores - scores.detach().amax(-1, keepdim=True)
    with trace_range("attention.exp"):
        scores = scores.exp()
    with trace_range("attention.sum"):
        total = scores.sum(-1, keepdim=True)  # [B, H, S, 1]
    with trace_range("attention.quotient"):
        weights = scores / total
    with trace_range("attention.weighted_sum"):
        return weights @ repeat_kv(v, q.shape[1])


def backend_of(spec: dict) -> str | None:
    """The backend of scaled_dot_product_attention that the implementation names."""
    name = spec["implementation"].removeprefix("sdpa-")
    return name if name in SDPA_BACKENDS else None


def selected_kernel(spec: dict) -> contextlib.AbstractContextManager:
    """A context in which scaled_dot_product_attention may use one backend only."""
    backend = backend_of(spec)
    return sdpa_kernel(SDPA_BACKENDS[backend]) if backend else contextlib.nullcontext()


class AttentionInputs(nn.Module):
    """Query, key, value [B, H, S, E] and, unless a fused kernel applies it,
    the causal mask [S, S]."""

    def __init__(self, spec: dict, device: torch.device):
        super().__init__()
        shape = [spec[name] for name in ("batch_size", "n_heads", "seq_len", "d_head")]
        options = {"device": device, "dtype": PRECISIONS[spec["dtype"]]}
        self.query, self.key, self.value = (
            nn.Parameter(torch.randn(shape, **options)) for _ in range(3)
        )
        mask = None
        if spec["causal"] and not backend_of(spec):
            mask = torch.full((spec["seq_len"],) * 2, float("-inf"), **options).triu_(1)
        self.register_buffer("mask", mask)

    def attend(self, function: Callable) -> Tensor:
        return function(self.query, self.key, self.value, self.mask)
