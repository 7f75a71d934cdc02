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
            for key, item in value.items():
                copied[key] = map_tensors(change, item)
            return copied
        return value

    return tree_map(leaf, batch)


def tensors_of(batch: Any) -> list[Tensor]:
    tensors: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(note, batch)
    return tensors


def shapes_of(batch: Any) -> str:
    """'[8, 128] int64, [8] int64'"""
    return ", ".join(
        f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        for tensor in tensors_of(batch)
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

    def zeros(x: Tensor) -> Tensor:
        key = (x.untyped_storage()._cdata, x.dtype)
        if key not in storages:
            storages[key] = torch.zeros(x.untyped_storage().nbytes() // x.itemsize, dtype=x.dtype)
        return storages[key].as_strided(x.shape, x.stride(), x.storage_offset())

    def zeros_of_other_length(x: Tensor) -> Tensor:
        shape = list(x.shape)
        for dim, length in sizes.items():
            if dim < min(len(shape), first.dim()) and shape[dim] == first.shape[dim]:
                shape[dim] = length
        return torch.zeros(shape, dtype=x.dtype)

    scaled = any(dim < first.dim() for dim in sizes)
    return map_tensors(zeros_of_other_length if scaled else zeros, batch)


def hides_tokens(batch: Any) -> bool:
    """Whether a mask in the batch, as far as it can be read, is not true everywhere: what a mapping
    calls a mask, else [B, S] of zeros and ones.  Positions that a batch brings may begin again in
    it, and hide what is before."""
    if isinstance(batch, MutableMapping):
        if "position_ids" in batch:
            return True
        masks = tensors_of([value for key, value in batch.items() if "mask" in str(key)])
    else:
        masks = [x for x in tensors_of(batch) if x.dim() == 2 and not x.is_floating_point()]
    return any(hides_some(mask) for mask in masks)


def hides_some(mask: Tensor) -> bool:
    """Whether it has zeros beside ones; not of one that cannot be read."""
    if isinstance(mask, FakeTensor) or not mask.numel():
        return False
    return bool((mask == 0).any()) and bool(mask.max() <= 1)


def leading(batch: Any) -> Tensor:
    """The tensor whose dimensions are samples and, if it holds tokens, their positions: input_ids,
    else the first."""
    if isinstance(batch, MutableMapping):
        named = batch.get("input_ids")
        if named is not None:
            return named
    return tensors_of(batch)[0]
