"""How long does each step take?  The device's time where a GPU computes, as the host only queues
its work."""

import time

import torch

# Marks are distrusted if the device works on after the last one for more of the steps' time
MISSED = 0.05


class StepClock:
    """Begins and ends of steps.  On a GPU each is an event in the queue, which disturbs no step:
    the host may be steps ahead of the device.  Where the device still works when the last event has
    passed, as on streams that nothing waits for, events do not tell: from then on, each step ends
    with a synchronization."""

    def __init__(self):
        self.synchronizes = False
        self.restart()

    def restart(self) -> None:
        """Forget the steps so far; whether a GPU is in use is asked anew."""
        self.on_gpu = torch.cuda.is_initialized()
        self.stream = torch.cuda.current_stream() if self.on_gpu else None
        self.begun: torch.cuda.Event | float = 0.0
        self.steps: list[
            tuple
        ] = []  # begin and end of each: events, or seconds of the host's clock
        if self.on_gpu and self.synchronizes:
            torch.cuda.synchronize()

    def begin(self) -> None:
        self.begun = self.mark(time.perf_counter())

    def end(self, now_s: float) -> None:
        """now_s: when the host came here."""
        if self.on_gpu and self.synchronizes:
            torch.cuda.synchronize()
            now_s = time.perf_counter()
        self.steps.append((self.begun, self.mark(now_s)))

    def mark(self, now_s: float) -> "torch.cuda.Event | float":
        if not self.on_gpu or self.synchronizes:
            return now_s
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def times_ms(self) -> list[float]:
        """Of the steps that are over, on the device too; nothing waits for the others."""
        times_ms = []
        for begin, end in self.steps:
            if isinstance(end, float):
                times_ms.append(1e3 * (end - begin))
            elif end.query():
                times_ms.append(begin.elapsed_time(end))
        return times_ms

    def wait(self) -> None:
        """Until the device is done with all steps."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def misses_work(self) -> bool:
        """Waits for the device: whether it worked on, after the last step's end, for longer than
        marks may miss.  From then on steps end with a synchronization."""
        if not self.on_gpu or self.synchronizes or not self.steps:
            self.wait()
            return False
        self.steps[-1][1].synchronize()
        passed_s = time.perf_counter()
        self.wait()
        missed_ms = 1e3 * (time.perf_counter() - passed_s)
        self.synchronizes = missed_ms > MISSED * sum(self.times_ms())
        return self.synchronizes
