"""RMSNorm with a hand-written backward pass: three operators instead of a dozen."""

import torch
from torch import Tensor

import tiny_llama_v1


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[B, S, D], [D] -> [B, S, D]"""
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(normed, weight)
        return weight * normed

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        normed, weight = ctx.saved_tensors
        return gradient * weight, (gradient * normed).sum((0, 1)), None


class RMSNorm(tiny_llama_v1.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return Norm.apply(x.float(), self.weight, self.eps)
