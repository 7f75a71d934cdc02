"""The type of parameters and of what is computed with them, by --precision."""

import torch
from torch import nn

from harness.base.text import BF16_TRUE
from harness.machine.devices import PRECISIONS


def parameter_dtype(precision: str) -> torch.dtype:
    """The type of parameters, gradients and optimizer state of a model made in float32."""
    return torch.bfloat16 if precision == BF16_TRUE else torch.float32


def autocast_of(precision: str, device: torch.device, cache_enabled: bool = True) -> torch.autocast:
    """Around forward passes; nothing where matmuls compute in the type of the parameters."""
    dtype = PRECISIONS.get(precision, torch.float32)
    return torch.autocast(
        device.type, dtype, enabled=dtype is not torch.float32, cache_enabled=cache_enabled
    )


def cast_floats(model: nn.Module, dtype: torch.dtype) -> None:
    """Every parameter and buffer of floating point, also of fake tensors, which cannot be converted
    in place."""
    changed: dict[int, nn.Parameter] = {}  # by id: tied ones stay tied
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                cast = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                module._parameters[name] = changed.setdefault(id(parameter), cast)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)
