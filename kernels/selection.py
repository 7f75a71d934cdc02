"""Which kernels a model runs, by its flags; None stands for the operators that
the model itself names."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from kernels.rms_norm import rms_norm
from kernels.swiglu import swiglu


def norm_kernel(options) -> Callable[[Tensor, Tensor, float], Tensor] | None:
    """(x [..., D], weight [D], eps) -> [..., D]; options has the fields of OptimizationConfig."""
    return (
        rms_norm
        if options.kernels == "triton"
        else pytorch_rms_norm
        if options.fused_norm
        else None
    )


def swiglu_kernel(options) -> Callable[[Tensor, Tensor], Tensor] | None:
    """(gate, up) -> silu(gate) * up, [..., D_ff] each."""
    return swiglu if options.kernels == "triton" else None


def pytorch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """One kernel on a GPU; on a CPU PyTorch runs the same operators as without it."""
    return F.rms_norm(x, weight.shape, weight, eps)
