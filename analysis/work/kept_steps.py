"""What was recorded of the last steps on fake tensors, of which several questions are asked."""

import functools
from collections.abc import Callable
from typing import Generic, TypeVar

from harness.model.workload import Workload

MOST_KEPT = 8  # steps
Recorded = TypeVar("Recorded")


class KeptByStep(Generic[Recorded]):
    """Decorates a function of (workload, on_gpu): its results for the last steps are kept.

    Beside what functools.lru_cache does, a result can be kept that another run has shown.
    """

    def __init__(self, record: Callable[[Workload, bool], Recorded]):
        functools.update_wrapper(self, record)
        self._record = record
        self._kept: dict[tuple[Workload, bool], Recorded] = {}  # what was asked for last, last

    def __call__(self, workload: Workload, on_gpu: bool = False) -> Recorded:
        key = (workload, on_gpu)
        recorded = self._kept.pop(key) if key in self._kept else self._record(workload, on_gpu)
        self.keep(recorded, workload, on_gpu)
        return recorded

    def keep(self, recorded: Recorded, workload: Workload, on_gpu: bool) -> None:
        """As what the function returns for this step."""
        self._kept[workload, on_gpu] = recorded
        if len(self._kept) > MOST_KEPT:
            del self._kept[next(iter(self._kept))]

    def cache_clear(self) -> None:
        self._kept.clear()
