"""The clock of a device: events in the stream of a GPU, for which the host need not wait; the wall
clock on a CPU."""

import time
from collections.abc import Callable

import torch

from harness.machine.devices import synchronize

Mark = "torch.cuda.Event | float"  # an event, or seconds


def mark(on_gpu: bool) -> Mark:
    """Now: on a GPU, once it has done what was launched before."""
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_ms(start: Mark, end: Mark) -> float:
    """Milliseconds between two marks, both of which a GPU must have reached: see
    torch.cuda.Event.synchronize()."""
    return 1e3 * (end - start) if isinstance(start, float) else start.elapsed_time(end)


def time_synced(work: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one call on the wall clock, synchronized before and after: launching is part
    of it."""
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    return 1e3 * (time.perf_counter() - started)
