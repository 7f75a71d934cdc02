"""SwiGLU's activation as an operator of PyTorch, with its gradient: silu(gate) * up, silu(x) = x *
sigmoid(x).

Eager, these are two kernels forward and three backward, which move 14 tensors in all, and
silu(gate) is kept for the backward pass.  As one operator they are two kernels that move 8, and
only gate and up are kept.  rms_norm.py explains the parts of an operator.
"""

import torch
from torch import Tensor


@torch.library.custom_op("kernels::swiglu", mutates_args=())
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """[..., D_ff] each, of one type -> [..., D_ff]."""
    from kernels import device_code

    out = forward_output(gate, up)
    device_code.swiglu(gate, up, out)
    return out


@swiglu.register_fake
def forward_output(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op("kernels::swiglu_backward", mutates_args=())
def backward(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up, [..., D_ff] each."""
    from kernels import device_code

    gate_gradient, up_gradient = backward_outputs(gradient, gate, up)
    device_code.swiglu_backward(gradient, gate, up, gate_gradient, up_gradient)
    return gate_gradient, up_gradient


@backward.register_fake
def backward_outputs(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def gradients(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
    return backward(gradient, *ctx.saved_tensors)


swiglu.register_autograd(gradients, setup_context=setup_context)
