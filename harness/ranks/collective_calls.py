"""Collectives as PyTorch dispatches them: how many a step calls, of how many bytes, and gloo's on
copies."""

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map, tree_map_only

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


def kind_of_collective(func) -> str | None:
    """all_reduce, all_gather, reduce_scatter or broadcast; None for any other operator."""
    namespace, name = func._schema.name.split("::")
    if namespace != "c10d":
        return None
    for kind in KINDS:  # of allreduce_coalesced_, _allgather_base_ and others
        if kind.replace("_", "") in name.replace("_", ""):
            return kind
    return None


class CollectiveCounter:
    """Calls of collectives and their bytes, by kind; of a call those of its larger side, input or
    output."""

    def __init__(self):
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def count(self, func, args: tuple) -> int:
        """The bytes of a call, which is counted if it is a collective; else 0."""
        kind = kind_of_collective(func)
        if kind is None:
            return 0
        size_bytes = max(map(bytes_of_tensors, args))
        self.calls[kind] += 1
        self.bytes[kind] += size_bytes
        return size_bytes


def bytes_of_tensors(tree: object) -> int:
    """The bytes of all tensors in an argument, which may be a list of them."""
    return sum(leaf.numel() * leaf.itemsize for leaf in tree_iter(tree) if isinstance(leaf, Tensor))


def held_by_gloo(func) -> bool:
    """Whether this is a collective of FSDP's on gloo: what DistributedDataParallel and ZeRO-1 send
    lives on anyway."""
    return (
        kind_of_collective(func) in ("all_gather", "reduce_scatter")
        and dist.get_backend() == "gloo"
    )


def work_that_is_done() -> torch.ScriptObject:
    """What a collective returns as its work, for which nobody has to wait."""
    from torch._C import _distributed_c10d as c10d  # some builds have no torch.distributed

    if hasattr(c10d, "FakeWork"):
        return c10d.FakeWork().boxed()
    # PyTorch 2.6 keeps that class to itself, but its group that sends nothing returns one.
    return c10d.FakeProcessGroup(0, 1).barrier().boxed()


def on_copies(func, args: tuple, kwargs: dict):
    """The result of a collective of gloo's that reads and writes copies, and has ended.

    The thread of gloo's that runs a collective lets go of its tensors only after it has told that
    it is done; on busy cores that is many operators later.  Nothing of the program needs them any
    more, and no other backend holds them.
    """
    originals = {}  # by id of the copy

    def copy(tensor: Tensor) -> Tensor:
        copied = tensor.clone()
        originals[id(copied)] = (tensor, copied)
        return copied

    def ended(value):
        """The original of a copy, and work that is done in place of gloo's, whose wait() would
        write the copy again."""
        if isinstance(value, torch.ScriptObject):
            dist.Work.unbox(value).wait()
            return work_that_is_done()
        return originals[id(value)][0] if isinstance(value, Tensor) else value

    out = func(*tree_map_only(Tensor, copy, args), **tree_map_only(Tensor, copy, kwargs))
    out = tree_map(ended, out)
    for tensor, copied in originals.values():
        tensor.copy_(copied)
    return out
