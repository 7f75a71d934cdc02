"""What does the host call in a step?  Its operators in order, by a fake-tensor run, each with what
its kernels do and move."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from analysis.work.bytes_moved import WorkCounter, accesses, masked_flops, tensors_in
from analysis.work.fake_step import fake_step
from harness.instruments.memory_tracker import local_part
from harness.model.workload import Workload
from harness.ranks.collective_calls import CollectiveCounter, kind_of_collective

MATMUL, ATTENTION, OTHER = "matmul", "attention", "other_kernels"


@dataclass(frozen=True)
class Operator:
    """A call that launches kernels, or a collective."""

    segment: int  # phases that had begun
    phase: str
    name: str
    kind: str  # matmul, attention, other_kernels, or that of a collective
    flops: int  # that a kernel must do
    bytes: int  # read and written; of a collective as in CollectiveRow
    dtype: torch.dtype | None  # of what a matmul multiplies
    shape: tuple[int, ...]  # of the output; of attention the query
    views: int  # operators before it that launch nothing
    tensors: int  # of the lists that it takes


class Call:
    """Of an operator of PyTorch's, with what this rank has of its tensors."""

    def __init__(self, func: Callable, args: tuple, kwargs: dict[str, Any], out: Any):
        # Else there are no shards.
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            args, kwargs, out = tree_map_only(Tensor, local_part, (args, kwargs, out))
        self.func, self.args, self.kwargs, self.out = func, args, kwargs, out
        self.name = func.overloadpacket.__name__
        self.collective = kind_of_collective(func)
        names = [argument.name for argument in func._schema.arguments]
        self.given = {**dict(zip(names, args, strict=False)), **kwargs}
        self.read, self.written = [], []  # tensors, with the bytes of them
        if not self.collective:
            self.read, self.written = accesses(func, self.given, out)

    @property
    def launches(self) -> bool:
        """Kernels, or a collective; else it makes a view, or only allocates."""
        return bool(self.written or self.collective)

    @property
    def may_be_fused(self) -> bool:
        """Whether a compiler makes one kernel of it and its neighbors."""
        is_whole = self.func.namespace == "fsdp" or self.name.startswith(("_foreach", "_fused"))
        return self.kind == OTHER and not is_whole

    @functools.cached_property
    def flops(self) -> int:
        """Of matmuls, those of masked scores included."""
        formula = flop_registry.get(self.func.overloadpacket)
        return int(formula(*self.args, **self.kwargs, out_val=self.out)) if formula else 0

    @functools.cached_property
    def kind(self) -> str:
        if self.collective:
            return self.collective
        if not self.flops:
            return OTHER
        return ATTENTION if "attention" in self.name else MATMUL

    def bytes_moved(self) -> int:
        if self.collective:
            return CollectiveCounter().count(self.func, self.args)
        return sum(size for _, size in self.read + self.written)

    def dtype(self) -> torch.dtype | None:
        factors = self.factors()
        return factors[0].dtype if factors else None

    def shape(self) -> tuple[int, ...]:
        shaped = self.factors() if self.kind == ATTENTION else tensors_in(self.out)
        return tuple(shaped[0].shape) if shaped else ()

    def factors(self) -> list[Tensor]:
        """What is multiplied."""
        if not self.flops:
            return []
        return [tensor for tensor in tensors_in(self.args) if tensor.dim() > 1]

    def tensors_of_lists(self) -> int:
        """Of the longest list that it takes."""
        lists = [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, list)]
        return max((len(tensors_in(value)) for value in lists), default=0)


class OperatorLog(WorkCounter):
    """The operators of a step in the order in which the host calls them.

    fused: those between two matmuls that a compiler makes one kernel of read and write only what is
    there before or after; the first stands for all of them.
    """

    def __init__(self, fused: bool = False):
        super().__init__()
        self.operators: list[Operator] = []
        self.views, self.fused = 0, fused
        self.began: int | None = None  # of the operators, where those that become one kernel begin
        self.read: dict[int, int] = {}  # their bytes by storage
        self.made: dict[int, tuple[weakref.ref, int]] = {}

    def __exit__(self, *exception) -> None:
        super().__exit__(*exception)
        self.end_of_kernel(len(self.operators))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.segments[-1] == "data":
            return out
        call = Call(func, args, kwargs, out)
        if not call.launches:
            self.views += 1
            return out
        self.operators.append(self.operator_of(call))
        self.views = 0
        if self.fused and call.may_be_fused:
            self.into_kernel(call)
        else:
            self.end_of_kernel(len(self.operators) - 1)
        return out

    def operator_of(self, call: Call) -> Operator:
        return Operator(
            segment=len(self.segments),
            phase=self.segments[-1],
            name=call.name,
            kind=call.kind,
            flops=call.flops - masked_flops(call.given, call.flops),
            bytes=call.bytes_moved(),
            dtype=call.dtype(),
            shape=call.shape(),
            views=self.views,
            tensors=call.tensors_of_lists(),
        )

    def into_kernel(self, call: Call) -> None:
        if self.began is None:
            self.began, self.read, self.made = len(self.operators) - 1, {}, {}
        for tensor, size in call.read:
            key = tensor.untyped_storage()._cdata
            if key not in self.made:
                self.read[key] = max(size, self.read.get(key, 0))
        for tensor, size in call.written:
            storage = tensor.untyped_storage()
            self.made[storage._cdata] = (weakref.ref(storage), size)

    def end_of_kernel(self, end: int) -> None:
        """The operators before this one that are one kernel become one."""
        if self.began is None:
            return
        left = sum(size for storage, size in self.made.values() if storage() is not None)
        merged = self.operators[self.began : end]
        kernel = replace(
            merged[0],
            bytes=sum(self.read.values()) + left,
            views=sum(operator.views for operator in merged),
        )
        self.operators[self.began : end] = [kernel]
        self.began = None


@functools.lru_cache(maxsize=8)
def operators_of(workload: Workload, on_gpu: bool) -> list[Operator]:
    """Of a step of rank 0.  All micro-batches but the last do the same: of several, two are run.  A
    compiled step is told from the one that is not."""
    micro_steps, fused = workload.micro_steps, workload.compiled
    workload = workload.with_settings(compile=False)
    if micro_steps <= 2:
        return log_of(workload, on_gpu, fused).operators
    size = workload.batch_size // micro_steps * 2
    workload = workload.with_settings(batch_size=size, gradient_accumulation_steps=2)
    log = log_of(workload, on_gpu, fused)
    if "backward" not in log.segments:
        return log.operators
    first = log.segments.index("backward") + 1
    of_first = [operator for operator in log.operators if operator.segment <= first]
    return of_first * (micro_steps - 2) + log.operators


def log_of(workload: Workload, on_gpu: bool, fused: bool) -> OperatorLog:
    return fake_step(workload, on_gpu, lambda *model: OperatorLog(fused), ranks=True)
