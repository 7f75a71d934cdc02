"""Time: the phases of a step, and how long each takes."""

import contextlib
import itertools
import math
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.base.ranges import trace_range
from harness.machine.clock import elapsed_ms, mark
from harness.machine.cpu_counters import Interval
from harness.machine.disturbance import DisturbanceMeter


@dataclass
class StepRecord:
    """One step: timestamps while it runs, times and loss once the device has finished it."""

    step: int
    # (name of the phase that ends here, CUDA event or seconds)
    marks: list = field(default_factory=list)
    # One 0-d tensor per micro-batch, on its way to the host
    losses: list[Tensor] = field(default_factory=list)
    phase_ms: dict[str, float] = field(default_factory=dict)
    total_ms: float = math.nan
    loss: float = math.nan
    norm_copy: Tensor | None = None  # 0-d, on its way to the host
    grad_norm: float | None = None  # of all gradients, before clipping; None without --grad-clip
    ended_at: float = math.nan  # wall clock, seconds since the epoch
    memory_bytes: int = 0  # the last sample before the step was read
    interval: Interval = field(default_factory=Interval)  # how long its threads waited for a core


class StepMeter:
    """Times the phases of every step without making the device wait.

    On a GPU the marks are events in the stream, read when the device has passed them; the host
    waits only for steps that are printed.  On a CPU they are perf_counter readings.  Phases are
    contiguous, so they add up to the step.  What disturbed a step is sampled before and after its
    marks, so it adds nothing to the step's time.
    """

    def __init__(self, device: torch.device, world_size: int, wait_for, on_record):
        self.on_gpu = device.type == "cuda"
        self.world_size = world_size
        self.wait_for = wait_for  # step number -> bool
        self.on_record = on_record  # called with each finished StepRecord, in order
        self.records: list[StepRecord] = []
        self._pending: list[StepRecord] = []
        self.disturbance = DisturbanceMeter(device)

    def _mark(self, name: str) -> None:
        self._current.marks.append((name, mark(self.on_gpu)))

    @contextlib.contextmanager
    def step(self, step: int):
        self._current = StepRecord(step)
        with self.disturbance.interval() as self._current.interval:
            self._mark("start")
            yield
        self._current.ended_at = time.time()
        self._pending.append(self._current)
        self.read_finished(wait=self.wait_for(step))

    @contextlib.contextmanager
    def phase(self, name: str):
        with trace_range(name):
            yield
        self._mark(name)

    def add_loss(self, loss: Tensor) -> None:
        """Store a micro-batch's loss, the mean over ranks.
        The copy to the host is asynchronous."""
        self._current.losses.append(
            mean_over_ranks(loss, self.world_size).to("cpu", non_blocking=True)
        )

    def add_grad_norm(self, norm: Tensor) -> None:
        """Store the norm of the step's gradients before clipping, which all ranks know, as
        add_loss() does."""
        self._current.norm_copy = norm.to("cpu", non_blocking=True)

    def read_finished(self, wait: bool) -> None:
        """Turn the marks of finished steps into numbers.
        Raises FloatingPointError at a non-finite loss."""
        while self._pending:
            record = self._pending[0]
            if self.on_gpu and wait:
                record.marks[-1][1].synchronize()
            elif self.on_gpu and not record.marks[-1][1].query():
                return
            self._pending.pop(0)
            for (_, start), (name, end) in itertools.pairwise(record.marks):
                record.phase_ms[name] = record.phase_ms.get(name, 0.0) + elapsed_ms(start, end)
            record.total_ms = sum(record.phase_ms.values())
            record.loss = sum(loss.item() for loss in record.losses) / len(record.losses)
            if record.norm_copy is not None:
                record.grad_norm = record.norm_copy.item()
            record.marks, record.losses, record.norm_copy = [], [], None
            self.records.append(record)
            self.on_record(record)
            if not math.isfinite(record.loss):
                raise FloatingPointError(f"the loss is {record.loss} at step {record.step}")


def mean_over_ranks(loss: Tensor, world_size: int) -> Tensor:
    loss = loss.detach()
    if world_size > 1:
        loss = loss / world_size
        torch.distributed.all_reduce(loss)
    return loss


class NullMeter:
    """Stands in for the timer and the instruments of the loop:
    names the phases, and may watch the step."""

    def __init__(
        self, watching: contextlib.AbstractContextManager | None = None, world_size: int = 1
    ):
        self.watching, self.world_size = watching, world_size
        self.losses: list[Tensor] = []
        self.grad_norms: list[Tensor] = []

    def step(self, step: int) -> contextlib.AbstractContextManager:
        return self.watching or contextlib.nullcontext()

    def observes(self, step: int) -> bool:
        return self.watching is not None

    def phase(self, name: str) -> contextlib.AbstractContextManager:
        return trace_range(name)

    def forward(self, step: int) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def add_loss(self, loss: Tensor) -> None:
        # A run keeps those of a step's micro-batches until it reads them.
        self.losses.append(mean_over_ranks(loss, self.world_size))

    def add_grad_norm(self, norm: Tensor) -> None:
        self.grad_norms.append(norm)
