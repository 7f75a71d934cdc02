"""Lets code of the user's, and of libraries, build a model and run a step on fake tensors, which
have no values.

A few functions of PyTorch's and of transformers' cannot work without values.  Each is replaced
while a block runs; which, why, and what happens when a version has no such function any more is
said at its record.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor


def under_fake_mode() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


# ---- Replacing a function ------------------------------------------------------------------------


class Replacement(NamedTuple):
    """A function of a library, and what stands in its place."""

    owner: object  # a class or a module
    name: str
    by: Callable


@contextlib.contextmanager
def replaced(*replacements: Replacement) -> Iterator[None]:
    """Replace the functions while the block runs.  One that its owner does not have is left out:
    what would have called it then fails, or works, by itself."""
    with contextlib.ExitStack() as restored:
        for owner, name, by in replacements:
            if not hasattr(owner, name):
                continue
            if name in vars(owner):
                restored.callback(setattr, owner, name, vars(owner)[name])
            else:  # inherited: the owner itself has none
                restored.callback(delattr, owner, name)
            setattr(owner, name, by)
        yield


# ---- What needs values ---------------------------------------------------------------------------


def copied_without_mode(tensor: Tensor, memo: dict[int, Tensor]) -> Tensor:
    """In place of FakeTensor.__deepcopy__: copy.deepcopy() would copy the mode of a fake tensor
    too, and the copy would belong to none that is at work.  Were the method gone, copying a model
    would do just that, and the step would end with an error that names two modes."""
    if id(tensor) not in memo:
        new = tensor.detach().clone()
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new, tensor.requires_grad)
        memo[id(tensor)] = new
    return memo[id(tensor)]


def step_without_looking(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, state: dict, *rest, **options
) -> object:
    """In place of GradScaler._maybe_opt_step: it looks for infinities in the gradients before it
    calls the optimizer.  Were the method gone, the step would end where a value is read."""
    return optimizer.step(*rest, **options)


def apply_by_new_tensors(
    module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """In place of nn.Module._apply, which .to(), .half() and their like call: it sets the data of a
    parameter in place, which a fake tensor refuses.  Were the method gone, a conversion would
    end with that error."""
    changed: dict[int, nn.Parameter] = {}  # by id: tied ones stay tied
    for part in module.modules():
        for name, parameter in part._parameters.items():
            new = parameter if parameter is None else change(parameter)
            if new is not parameter:
                converted = nn.Parameter(new.detach(), parameter.requires_grad)
                part._parameters[name] = changed.setdefault(id(parameter), converted)
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else change(buffer)
    return module


def no_gpu() -> bool:
    """In place of torch.cuda.is_available(): fake tensors are on the CPU, wherever the run is."""
    return False


def without_values() -> contextlib.AbstractContextManager[None]:
    """Fake tensors can be copied by copy.deepcopy(), and a gradient scaler calls the optimizer."""
    return replaced(
        Replacement(FakeTensor, "__deepcopy__", copied_without_mode),
        Replacement(torch.amp.GradScaler, "_maybe_opt_step", step_without_looking),
    )


@contextlib.contextmanager
def on_fake_tensors() -> Iterator[None]:
    """without_values() for building a model, too: its fake tensors cannot be converted in place,
    and are on the CPU."""
    building = replaced(
        Replacement(nn.Module, "_apply", apply_by_new_tensors),
        Replacement(torch.cuda, "is_available", no_gpu),
    )
    with building, without_values():
        yield


# ---- Masks of transformers -----------------------------------------------------------------------


@contextlib.contextmanager
def attention_without_masks() -> Iterator[None]:
    """transformers builds no mask for attention where the positions [B, S] follow one another and
    no token of the padding mask [B, S] is hidden; it cannot look into fake tensors, and would build
    one.  Here it takes them for such.

    A version without one of these functions decides in another way, and may count a mask.
    """
    masking = sys.modules.get("transformers.masking_utils")
    if masking is None:  # nothing of the model's is transformers'
        yield
        return
    told_of = {
        "_ignore_causal_mask_sdpa": told_of_no_padding,
        "_ignore_bidirectional_mask_sdpa": told_of_no_padding,
        "find_packed_sequence_indices": told_of_no_packing,
    }
    replacements = []
    for name, told in told_of.items():
        if hasattr(masking, name):
            replacements.append(Replacement(masking, name, told(getattr(masking, name))))
    with replaced(*replacements):
        yield


def known(tensor: Tensor | None) -> Tensor | None:
    """The tensor, if it has values."""
    return None if isinstance(tensor, FakeTensor) else tensor


def told_of_no_padding(needs_no_mask: Callable[..., bool]) -> Callable[..., bool]:
    def answer(padding: Tensor | None, *rest, **options) -> bool:
        return needs_no_mask(known(padding), *rest, **options)

    return answer


def told_of_no_packing(
    sequences_of: Callable[[Tensor], Tensor | None],
) -> Callable[[Tensor], Tensor | None]:
    def answer(positions: Tensor) -> Tensor | None:
        return None if known(positions) is None else sequences_of(positions)

    return answer
