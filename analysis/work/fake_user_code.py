"""Lets code of the user's, and of libraries, build a model and run a step on fake tensors, which
have no values."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor


def under_fake_mode() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Fake tensors can be copied by copy.deepcopy(), which would copy their mode too; a gradient
    scaler does not look for infinities before it calls the optimizer."""

    def copied(tensor: Tensor, memo: dict) -> Tensor:
        if id(tensor) not in memo:
            new = tensor.detach().clone()
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
        return memo[id(tensor)]

    def step(
        scaler: torch.amp.GradScaler,
        optimizer: torch.optim.Optimizer,
        state: dict,
        *rest,
        **options,
    ) -> object:
        return optimizer.step(*rest, **options)

    copying = mock.patch.object(FakeTensor, "__deepcopy__", copied)
    with copying, mock.patch.object(torch.amp.GradScaler, "_maybe_opt_step", step):
        yield


@contextlib.contextmanager
def attention_without_masks() -> Iterator[None]:
    """transformers builds no mask for attention where the positions [B, S] follow one another and
    no token of the padding mask [B, S] is hidden; it cannot look into fake tensors, and would build
    one.  Here it takes them for such.
    """
    masking = sys.modules.get(
        "transformers.masking_utils"
    )  # None: nothing of the model's is transformers'

    def real(tensor: Tensor | None) -> Tensor | None:
        return None if isinstance(tensor, FakeTensor) else tensor

    def told_of_no_padding(needs_no_mask: Callable[..., bool]) -> Callable[..., bool]:
        return lambda padding, *rest, **options: needs_no_mask(real(padding), *rest, **options)

    def told_of_no_packing(
        sequences_of: Callable[[Tensor], Tensor | None],
    ) -> Callable[[Tensor], Tensor | None]:
        return lambda positions: None if real(positions) is None else sequences_of(positions)

    answers = {
        "_ignore_causal_mask_sdpa": told_of_no_padding,
        "_ignore_bidirectional_mask_sdpa": told_of_no_padding,
        "find_packed_sequence_indices": told_of_no_packing,
    }
    with contextlib.ExitStack() as stack:
        for name, told in answers.items():
            if hasattr(masking, name):  # not in every version
                stack.enter_context(mock.patch.object(masking, name, told(getattr(masking, name))))
        yield


@contextlib.contextmanager
def on_fake_tensors() -> Iterator[None]:
    """The same for building a model: its fake tensors cannot be converted in place,
    and are on the CPU."""

    def apply(
        module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> nn.Module:
        changed: dict[int, nn.Parameter] = {}  # by id: tied ones stay tied
        for one in module.modules():
            for name, tensor in one._parameters.items():
                if tensor is not None and (new := change(tensor)) is not tensor:
                    new = changed.setdefault(
                        id(tensor), nn.Parameter(new.detach(), tensor.requires_grad)
                    )
                    one._parameters[name] = new
            for name, tensor in one._buffers.items():
                one._buffers[name] = None if tensor is None else change(tensor)
        return module

    no_gpu = mock.patch.object(torch.cuda, "is_available", lambda: False)
    with mock.patch.object(nn.Module, "_apply", apply), no_gpu, without_values():
        yield
