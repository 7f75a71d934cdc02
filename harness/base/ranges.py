"""Named ranges within a step, for the profilers and the observers that are running."""

import contextlib

import torch

# Objects with range_push(name) and range_pop() that are told which part of the step is running:
# torch.cuda.nvtx on a GPU (NVTX, and ROCTX on ROCm), and the memory tracker in its step.
# torch.profiler has record_function instead.
range_observers: list = []
_NO_RANGE = contextlib.nullcontext()
# emit_nvtx counts as a profiler, and would show each range of an observer a second time.
_NOT_RECORDING = (
    torch._C._profiler.ActiveProfilerType.NONE,
    torch._C._profiler.ActiveProfilerType.NVTX,
)


class _TraceRange:
    def __init__(self, name: str):
        self.name = name

    def __enter__(self) -> None:
        recording = torch._C._autograd._profiler_type() not in _NOT_RECORDING
        self.record = torch.profiler.record_function(self.name) if recording else None
        if self.record:
            self.record.__enter__()
        self.observers = tuple(range_observers)
        for observer in self.observers:
            observer.range_push(self.name)

    def __exit__(self, *exception) -> None:
        for observer in self.observers:
            observer.range_pop()
        if self.record:
            self.record.__exit__(*exception)


def trace_range(name: str):
    """Name a part of the step for the profilers that are running.  Nearly free when no profiler is
    running.

    Compiled code has no separate parts, so there are no ranges while the compiler traces.
    """
    if torch.compiler.is_compiling():
        return _NO_RANGE
    if range_observers or torch.autograd._profiler_enabled():
        return _TraceRange(name)
    return _NO_RANGE
