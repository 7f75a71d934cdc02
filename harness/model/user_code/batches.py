"""Batches of a file of the user's: tensors in tuples, lists, dicts and mappings."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from harness.base.errors import UserError
from harness.model.user_code.user_file import Made, UserFile


def map_tensors(change: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """The batch with each of its tensors changed, in tuples,
    lists, dicts and mappings such as transformers'."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            return change(value)
        if isinstance(value, MutableMapping):
            copied = copy.copy(value)
            for key, one in value.items():
                copied[key] = map_tensors(change, one)
            return copied
        return value

    return tree_map(leaf, batch)


def tensors_of(batch: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, batch)
    return found


def shapes_of(batch: Any) -> str:
    """'[8, 128] int64, [8] int64'"""
    return ", ".join(
        f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}" for x in tensors_of(batch)
    )


def endless(file: UserFile, made: Made) -> Iterator[Any]:
    """The batches; those of a DataLoader again and again.  Raises UserError if an iterator ends.

    Drawn unseen by memory trackers: what the file's own code needs for it is not
    part of the step."""
    where = file.where(file.function())
    for epoch in itertools.count(1):
        number = 0
        with file.users_code():
            stream = iter(made.batches)
        while True:
            with file.users_code(), _disable_current_modes():
                batch = next(stream, endless)
            if batch is endless:
                break
            number += 1
            yield batch
        if not number:
            seen = "batches ended before the last step" if epoch > 1 else "there is no batch"
            raise UserError(
                f"{where}: {seen}; expected a DataLoader, which is started again, or an endless"
                " iterator"
            )


def zeros_like_batch(batch: Any, sizes: dict[int, int]) -> Any:
    """The same batch of zeros: tensors that share a storage share one again.  sizes: other lengths
    by dimension, of tensors that are as long there as the first of the batch."""
    storages: dict[tuple, Tensor] = {}
    first = leading(batch)
    lengths = {d: (first.shape[d], n) for d, n in sizes.items() if d < first.dim()}

    def zeros(x: Tensor) -> Tensor:
        if lengths:
            shape = list(x.shape)
            for dim, (old, new) in lengths.items():
                if dim < len(shape) and shape[dim] == old:
                    shape[dim] = new
            return torch.zeros(shape, dtype=x.dtype)
        key = (x.untyped_storage()._cdata, x.dtype)
        if key not in storages:
            storages[key] = torch.zeros(x.untyped_storage().nbytes() // x.itemsize, dtype=x.dtype)
        return storages[key].as_strided(x.shape, x.stride(), x.storage_offset())

    return map_tensors(zeros, batch)


def hides_tokens(batch: Any) -> bool:
    """Whether a mask in the batch, as far as it can be read, is not true everywhere: what a mapping
    calls a mask, else [B, S] of zeros and ones.  Positions that a batch brings may begin again in
    it, and hide what is before."""
    if isinstance(batch, MutableMapping):
        masks = tensors_of([value for key, value in batch.items() if "mask" in str(key)])
    else:
        masks = [x for x in tensors_of(batch) if x.dim() == 2 and not x.is_floating_point()]
    masks = [x for x in masks if x.numel() and not isinstance(x, FakeTensor)]
    hidden = any(bool((x == 0).any()) and bool(x.max() <= 1) for x in masks)
    return hidden or (isinstance(batch, MutableMapping) and "position_ids" in batch)


def leading(batch: Any) -> Tensor:
    """The tensor whose dimensions are samples and, if it holds tokens, their positions: input_ids,
    else the first."""
    named = (
        batch["input_ids"] if isinstance(batch, MutableMapping) and "input_ids" in batch else None
    )
    return tensors_of(batch)[0] if named is None else named
