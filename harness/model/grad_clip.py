"""--grad-clip: the norm of all gradients together, and gradients scaled down to it, however ranks
share them."""

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def clip_gradients(optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
    """Multiply the gradients of all of the optimizer's parameters by the same factor, so that their
    2-norm, as of one vector, is at most max_norm.  Returns the norm before that, a scalar on the
    device, which nothing here waits for.

    Called by all ranks, once the gradients of a step are reduced and unscaled.  As with PyTorch's
    clip_grad_norm_(), an infinite norm makes finite gradients 0 and infinite ones NaN; a norm that
    is NaN makes all of them NaN.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    # Of FSDP's gradients, of which every rank has its own rows.
    mesh = getattr(gradients[0], "device_mesh", None)
    parts = [gradient.to_local() for gradient in gradients] if mesh else gradients
    norm = torch.nn.utils.get_total_norm(parts)
    if mesh:
        square = norm.float() ** 2  # that of a narrow type could overflow
        dist.all_reduce(square, group=mesh.get_group())
        norm = square.sqrt()
    # The small term is PyTorch's, of clip_grad_norm_(): it keeps a norm of zero from a division by
    # zero.
    torch._foreach_mul_(parts, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm
