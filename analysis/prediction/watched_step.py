"""A step that is run once on fake tensors for all that a prediction asks of it."""

from __future__ import annotations

import contextlib

from analysis.memory.predicted import predicted_memory, tracker_of
from analysis.prediction.operators import OperatorLog, operators_in, operators_of
from analysis.work.bytes_moved import (
    WorkCounter,
    at_most_two_micro_batches,
    step_work,
    work_counter,
)
from analysis.work.fake_step import fake_step
from harness.instruments.memory_tracker import MemoryTracker
from harness.model.workload import Workload


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
