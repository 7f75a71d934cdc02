"""What does the host call in a step?  Its operators in order, by a fake-tensor run, each with what
its kernels do and move."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from analysis.memory.predicted import predicted_memory, tracker_of
from analysis.vocabulary.kernel_classes import ATTENTION, CONVOLUTION, MATMUL
from analysis.work.bytes_moved import (
    WorkCounter,
    at_most_two_micro_batches,
    step_work,
    work_counter,
)
from analysis.work.dispatched_costs import DispatchedCall, dispatched_call, tensors_in
from analysis.work.fake_step import KeptByStep, fake_step
from harness.instruments.memory_tracker import ASKS_FOR_DEVICE, MemoryTracker, device_of, local_part
from harness.model.workload import Workload
from harness.ranks.collective_calls import CollectiveCounter, kind_of_collective

OTHER = "other_kernels"


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
    convolves: bool = False


class Passed(NamedTuple):
    """To an operator and back: of shards, what this rank has."""

    args: tuple
    kwargs: dict[str, Any]
    out: Any

    def tensors_of_lists(self) -> int:
        """Of the longest list that is passed to it."""
        longest = 0
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, list):
                longest = max(longest, len(tensors_in(value)))
        return longest


def passed_here(args: tuple, kwargs: dict[str, Any], out: Any) -> Passed:
    # Else there are no shards.
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        args, kwargs, out = tree_map_only(Tensor, local_part, (args, kwargs, out))
    return Passed(args, kwargs, out)


class Work(NamedTuple):
    """What an operator does; the fields are those of Operator."""

    kind: str
    flops: int
    bytes: int
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    convolves: bool = False


def work_of_collective(func: Callable, kind: str, passed: Passed) -> Work:
    size = CollectiveCounter().count(func, passed.args)
    return Work(kind, 0, size, None, shape_of_first(tensors_in(passed.out)))


def work_of_call(call: DispatchedCall, passed: Passed) -> Work:
    factors, kind = call.factors, OTHER
    if call.cost.flops:
        kind = ATTENTION if call.kind == ATTENTION else MATMUL
    shaped = factors if kind == ATTENTION else tensors_in(passed.out)
    return Work(
        kind,
        flops=call.cost.least_flops,
        bytes=call.cost.bytes,
        dtype=factors[0].dtype if factors else None,
        shape=shape_of_first(shaped),
        convolves=call.kind == CONVOLUTION,
    )


def shape_of_first(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(tensors[0].shape) if tensors else ()


def may_be_fused(operator: Operator, func: Callable) -> bool:
    """Whether a compiler makes one kernel of it and its neighbors."""
    is_alone = func.namespace == "fsdp" or operator.name.startswith(("_foreach", "_fused"))
    return operator.kind == OTHER and not is_alone


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
        # Two thirds of all operators.
        out = device_of(args[0]) if func is ASKS_FOR_DEVICE else func(*args, **kwargs)
        if self.segments[-1] == "data":
            return out
        if func.namespace == "prim":
            self.views += 1
            return out
        passed = passed_here(args, kwargs, out)
        collective = kind_of_collective(func)
        call = None if collective else dispatched_call(func, *passed)
        if collective:
            work = work_of_collective(func, collective, passed)
        elif call is not None:
            work = work_of_call(call, passed)
        else:
            self.views += 1
            return out
        operator = Operator(
            segment=len(self.segments),
            phase=self.segments[-1],
            name=func.overloadpacket.__name__,
            views=self.views,
            tensors=passed.tensors_of_lists(),
            **work._asdict(),
        )
        self.operators.append(operator)
        self.views = 0
        if self.fused and may_be_fused(operator, func):
            self.into_kernel(call)
        else:
            self.end_of_kernel(len(self.operators) - 1)
        return out

    def into_kernel(self, call: DispatchedCall) -> None:
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


@KeptByStep
def operators_of(workload: Workload, on_gpu: bool) -> list[Operator]:
    """Of a step of rank 0, by a fake-tensor run.  A compiled step is predicted from the one that is
    not."""
    part = at_most_two_micro_batches(workload)
    log = fake_step(part, on_gpu, lambda *model: OperatorLog(workload.compiled), ranks=True)
    return operators_in(log, workload.micro_steps)


def operators_in(log: OperatorLog, micro_steps: int) -> list[Operator]:
    """Of a step of so many micro-batches.  log: of the first two of them."""
    if micro_steps <= 2 or "backward" not in log.segments:
        return log.operators
    first = log.segments.index("backward") + 1
    of_first = [operator for operator in log.operators if operator.segment <= first]
    return of_first * (micro_steps - 2) + log.operators


# ---- A step that is run once for all that a prediction asks of it --------------------------------


class StepWatchers(contextlib.ExitStack):
    """All active together.  memory: None where that of the step is not asked for, work: likewise.

    The log of operators is the innermost, which dispatches first: it counts the views that the
    others answer themselves.
    """

    def __init__(
        self, memory: MemoryTracker | None, work: WorkCounter | None, operators: OperatorLog
    ):
        super().__init__()
        self.memory, self.work, self.operators = memory, work, operators

    def __enter__(self) -> StepWatchers:
        for watcher in (self.memory, self.work, self.operators):
            if watcher is not None:
                self.enter_context(watcher)
        return self


def watch_step(workload: Workload, on_gpu: bool) -> None:
    """Keep what predicted_memory(), step_work() and operators_of() return for this step, as far as
    one run shows two or three of them.  Raises FakeRunError.

    Memory is that of the step as it is; operators and work are those of a step that is not
    compiled, of at most two micro-batches; and work is that of one rank alone.
    """
    part = at_most_two_micro_batches(workload)
    shows_memory, shows_work = part == workload, workload.parallel.world_size == 1
    if not (shows_memory or shows_work):
        return

    def watchers(*model: object) -> StepWatchers:
        return StepWatchers(
            tracker_of(on_gpu)(*model) if shows_memory else None,
            work_counter(workload) if shows_work else None,
            OperatorLog(workload.compiled),
        )

    watched = fake_step(part, on_gpu, watchers, ranks=True)
    operators = operators_in(watched.operators, workload.micro_steps)
    operators_of.keep(operators, workload, on_gpu)
    if watched.memory is not None:
        predicted_memory.keep(watched.memory.timeline, workload, on_gpu)
    if watched.work is not None:
        step_work.keep(watched.work, workload, on_gpu)
