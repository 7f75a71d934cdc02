"""Does the type of a parameter keep what the optimizer adds to it?  An update below half a unit in
the last place of a weight is lost: in bf16, which keeps 8 bits,
what is below 1/512 to 1/256 of it."""

from __future__ import annotations

import torch
from torch import Tensor

SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
LEAST = 0.95  # of an update: the optimizer's own arithmetic may be in the narrow type, too
PIECE = 1 << 22  # elements that are looked at at once


def type_name(tensor: Tensor) -> str:
    return SHORT.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))


def is_narrow(tensor: Tensor) -> bool:
    """Whether updates of usual size are often lost in it."""
    return tensor.is_floating_point() and tensor.itemsize <= 2


def lost_updates(
    optimizer: torch.optim.Optimizer, group: dict, parameter: Tensor, weights: Tensor, at: Tensor
) -> Tensor | None:
    """Whether the last step of the optimizer could change none of these elements, though it had
    something to add: a bool without dimensions.  None: how this optimizer computes what it adds is
    not known.

    group: of the optimizer's parameters, that with this one; weights: what its elements were
    before, [n]; at: their places in this rank's flattened part, [n].
    """
    gradient = parameter.grad
    if gradient is None or gradient.is_sparse:
        return None
    state = optimizer.state.get(parameter, {})
    found = update_of(optimizer, group, state, at, weights.double(), picked(gradient, at))
    if found is None:
        return None
    kept_share, update = found
    decayed = (weights.double() * kept_share).to(weights.dtype)
    after = (decayed.double() - LEAST * update).to(weights.dtype)
    return (after == weights).all() & (update != 0).any()


def lost_entirely(
    optimizer: torch.optim.Optimizer, group: dict, parameter: Tensor, local: Tensor
) -> bool | None:
    """The same of all elements with a gradient.  local: this rank's part, which did not change."""
    flat, has_gradient = local.reshape(-1), False
    for begin in range(0, len(flat), PIECE):
        at = torch.arange(begin, min(begin + PIECE, len(flat)), device=flat.device)
        if parameter.grad is not None and not parameter.grad.is_sparse:
            at = at[picked(parameter.grad, at) != 0]
        lost = lost_updates(optimizer, group, parameter, flat[at], at)
        if lost is None:
            return None
        if len(at) and not lost:
            return False
        has_gradient = has_gradient or len(at) > 0
    return has_gradient


def picked(tensor: Tensor, at: Tensor) -> Tensor:
    """Elements of this rank's part, as float64."""
    return getattr(tensor, "_local_tensor", tensor).reshape(-1)[at].double()


def update_of(
    optimizer: torch.optim.Optimizer,
    group: dict,
    state: dict,
    at: Tensor,
    weights: Tensor,
    gradient: Tensor,
) -> tuple[float, Tensor] | None:
    """By what the weights are multiplied, and what is subtracted from them then, [n]; None: not
    known.

    One that has no state yet, as on a rank of ZeRO-1 that leaves a parameter to another, is in its
    first step.
    """
    kind, rate, decay = (
        getattr(optimizer, "optim", optimizer),
        float(group["lr"]),
        group.get("weight_decay", 0.0),
    )
    if group.get("maximize"):
        gradient = -gradient
    if isinstance(kind, torch.optim.Adam | torch.optim.AdamW):
        mean, square = gradient, gradient.square()
        if "exp_avg" in state:
            first, second = (float(beta) ** float(state["step"]) for beta in group["betas"])
            mean = picked(state["exp_avg"], at) / (1 - first)
            square = picked(state["exp_avg_sq"], at) / (1 - second)
        is_decoupled = isinstance(kind, torch.optim.AdamW) or bool(
            group.get("decoupled_weight_decay")
        )
        kept_share = 1 - LEAST * rate * decay if is_decoupled else 1.0
        return kept_share, rate * mean / (square.sqrt() + group["eps"])
    if isinstance(kind, torch.optim.SGD):
        gradient = gradient + decay * weights
        momentum = state.get("momentum_buffer")
        if momentum is not None:
            buffer = picked(momentum, at)
            gradient = gradient + group["momentum"] * buffer if group["nesterov"] else buffer
        return 1.0, rate * gradient
    return None
