"""RMSNorm as an operator of PyTorch, with its gradient: y = weight * x * r, r = 1 / sqrt(mean(x^2)
+ eps) of each row.

An operator has three parts beside its kernels.  The fake says what comes out, without computing it:
predictions and the compiler need no more.  The backward formula is itself an operator, so that
whatever sees the forward pass sees the backward pass too: memory tracker, profilers, compiler.  And
setup_context says what is saved for it: x and weight exist anyway,
so RMSNorm costs one number per row.
"""

import math

import torch
from torch import Tensor

# Programs that share the rows in the backward pass, each with its own sum for the weight's
# gradient.  A fixed number: the memory, and the order of the additions, must not depend on the GPU.
# The H100 has 132 multiprocessors, the MI300X 304 compute units.
MOST_PROGRAMS = 256


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., D], [D] -> [..., D].  Under autocast in the narrow type, which the next matmul reads:
    an eager norm writes float32, and each matmul makes a copy of its own."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    return forward(x, weight, eps, dtype)[0]


@torch.library.custom_op("kernels::rms_norm", mutates_args=())
def forward(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """y [..., D] of this type, and r [..., 1]."""
    from kernels import device_code

    y, scale = forward_outputs(x, weight, eps, dtype)
    device_code.rms_norm(x, weight, eps, y, scale)
    return y, scale


@forward.register_fake
def forward_outputs(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), x.new_empty((*x.shape[:-1], 1), dtype=wide(x))


@torch.library.custom_op("kernels::rms_norm_backward", mutates_args=())
def backward(gradient: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of x [..., D], and of the weight one sum for each program [programs, D]."""
    from kernels import device_code

    x_gradient, w_sums = backward_outputs(gradient, x, weight, scale)
    device_code.rms_norm_backward(gradient, x, weight, scale, x_gradient, w_sums)
    return x_gradient, w_sums


@backward.register_fake
def backward_outputs(
    gradient: Tensor, x: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    programs = min(MOST_PROGRAMS, math.prod(x.shape[:-1]))
    return x.new_empty(x.shape), x.new_empty((programs, x.shape[-1]), dtype=wide(x))


def setup_context(ctx, inputs, output) -> None:
    x, weight, _, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros for the gradient of r
    ctx.save_for_backward(x, weight, output[1])


def gradients(ctx, gradient: Tensor, _) -> tuple:
    """Of each argument of forward().  Every row has added to the weight's: the sums of the programs
    are added up."""
    x, weight, scale = ctx.saved_tensors  # once: checkpointing computes them again
    x_gradient, w_sums = backward(gradient, x, weight, scale)
    return x_gradient, w_sums.sum(0).to(weight.dtype), None, None


forward.register_autograd(gradients, setup_context=setup_context)


def wide(x: Tensor) -> torch.dtype:
    """Of sums: float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)
