"""Work that lags behind the host: events cannot be read early, and copies to the host arrive late.

The CPU has computed everything when an operator returns, so that a program that reads too early
would get away with it.  Here it gets an error from an event, and NaN from a copy.
"""

from __future__ import annotations

import contextlib
import math
import time

import torch

LAG = 1e-3  # seconds that the device is behind the host
CALL = "pretended:"  # begins the names of annotations that trace.py turns into runtime calls


def runtime_call(name: str) -> contextlib.AbstractContextManager:
    """Of CUDA or HIP, to be seen in a trace."""
    recording = torch.autograd._profiler_enabled()
    return torch.profiler.record_function(CALL + name) if recording else contextlib.nullcontext()


class Clock:
    def __init__(self):
        self.done_at = 0.0  # when the work submitted so far is done
        self.free_at = 0.0  # when the work that work() has queued is done
        self.arriving: list[
            tuple[float, torch.Tensor, torch.Tensor]
        ] = []  # when, host tensor, its values

    def work(self, seconds: float) -> None:
        """Queue work that takes the device so long, as a slow kernel; the host goes on."""
        self.free_at = self.begins() + seconds
        self.submit()

    def begins(self) -> float:
        """When the device comes to work submitted now, but for the lag."""
        return max(time.perf_counter(), self.free_at)

    def submit(self) -> float:
        """When work submitted now is done."""
        self.done_at = self.begins() + LAG
        return self.done_at

    def reached(self, when: float) -> bool:
        """Has the device come so far?  What it has copied by now is on the host from now on."""
        now = time.perf_counter()
        while self.arriving and self.arriving[0][0] <= now:
            _, target, values = self.arriving.pop(0)
            target.copy_(values)
        return now >= when

    def wait(self, when: float, call: str) -> None:
        """Of the host, in a runtime call."""
        with runtime_call(call):
            time.sleep(max(0.0, when - time.perf_counter()))
        self.reached(when)

    def copy_late(self, target: torch.Tensor) -> torch.Tensor:
        """A copy to the host that has been queued: its values are there when the device is asked
        after it is done."""
        if target.is_floating_point():
            self.arriving.append((self.submit(), target.detach(), target.detach().clone()))
            target.detach().fill_(math.nan)
        return target


CLOCK = Clock()


class Event:
    """torch.cuda.Event."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ):
        self.enable_timing, self.recorded_at, self.done_at = enable_timing, None, 0.0

    def record(self, stream=None) -> None:
        self.recorded_at, self.done_at = CLOCK.begins(), CLOCK.submit()

    def query(self) -> bool:
        return CLOCK.reached(self.done_at)

    def synchronize(self) -> None:
        CLOCK.wait(self.done_at, "EventSynchronize")

    def wait(self, stream=None) -> None:
        """Of a stream, not of the host."""

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds.  RuntimeError as from the driver: not recorded, no timing, or not ready."""
        if not (self.enable_timing and end.enable_timing):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if self.recorded_at is None or end.recorded_at is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        if not (self.query() and end.query()):
            raise RuntimeError("CUDA error: device not ready")
        return 1e3 * (end.recorded_at - self.recorded_at)


class Stream:
    """torch.cuda.Stream: there is only one."""

    def __init__(self, *arguments, **options):
        self.cuda_stream = 0

    def synchronize(self) -> None:
        CLOCK.wait(CLOCK.done_at, "StreamSynchronize")

    def query(self) -> bool:
        return CLOCK.reached(CLOCK.done_at)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def wait_event(self, event: Event) -> None: ...

    def wait_stream(self, stream: Stream) -> None: ...
