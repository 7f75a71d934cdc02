"""Which implementations of attention are there, and which does a device have?"""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.base.ranges import trace_range
from harness.machine.devices import PRECISIONS, synchronize
from tiny_llama_v1 import eager_attention, fused_attention, repeat_kv

IMPLEMENTATIONS = ("manual", "eager", "compiled", "sdpa")
SDPA_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
ON_CPU = ("flash", "math")  # the others exist only for GPUs


class AttentionCall(NamedTuple):
    """A call of attention: by which implementation, and all that decides what it costs."""

    implementation: str  # manual, eager, compiled, sdpa-<backend>
    dtype: str
    batch_size: int
    n_heads: int
    d_head: int
    seq_len: int
    causal: bool

    @property
    def backend(self) -> str | None:
        """The backend of scaled_dot_product_attention that the implementation names."""
        name = self.implementation.removeprefix("sdpa-")
        return name if name in SDPA_BACKENDS else None

    @property
    def function(self) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
        """(q, k, v, mask) -> output; for `compiled`, the function to compile."""
        if self.implementation == "manual":
            return manual_attention
        if self.implementation in ("eager", "compiled"):
            return eager_attention
        return lambda q, k, v, mask: fused_attention(q, k, v, self.causal)

    def selected_kernel(self) -> contextlib.AbstractContextManager:
        """A context in which scaled_dot_product_attention may use its backend only."""
        if self.backend is None:
            return contextlib.nullcontext()
        return sdpa_kernel(SDPA_BACKENDS[self.backend])


def names_of(implementations: list[str], device: torch.device) -> list[str]:
    """The implementations asked for, with sdpa replaced by every kernel that PyTorch has for the
    device."""
    backends = ON_CPU if device.type == "cpu" else SDPA_BACKENDS
    names = []
    for asked in implementations:
        if asked == "sdpa":
            names += [f"sdpa-{backend}" for backend in backends]
        else:
            names.append(asked)
    return list(dict.fromkeys(names))


def manual_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Eager attention with softmax written out: exp and quotient, [B, H, S, S] each, are saved for
    the backward pass.

    The maximum that keeps exp in range cancels in the quotient, so it needs no gradient.
    """
    with trace_range("attention.scores"):
        keys = repeat_kv(k, q.shape[1])
        scores = (q @ keys.transpose(2, 3)) * q.shape[-1] ** -0.5  # [B, H, S, S]
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


class AttentionInputs(nn.Module):
    """Query, key, value [B, H, S, E] and, unless a fused kernel applies it, the causal mask
    [S, S]."""

    def __init__(self, call: AttentionCall, device: torch.device):
        super().__init__()
        shape = (call.batch_size, call.n_heads, call.seq_len, call.d_head)
        options = {"device": device, "dtype": PRECISIONS[call.dtype]}
        self.query, self.key, self.value = (
            nn.Parameter(torch.randn(shape, **options)) for _ in range(3)
        )
        mask = None
        if call.causal and call.backend is None:
            square = (call.seq_len, call.seq_len)
            mask = torch.full(square, float("-inf"), **options).triu_(1)
        self.register_buffer("mask", mask)

    def attend(self, function: Callable) -> Tensor:
        return function(self.query, self.key, self.value, self.mask)


def forward_and_backward(function: Callable, inputs: AttentionInputs) -> None:
    output = inputs.attend(function)
    output.backward(torch.ones_like(output))
    synchronize(output.device)
