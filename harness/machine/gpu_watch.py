"""What else a GPU does during a measurement: other processes on it, memory in use, clocks and what
lowers them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from harness.base.errors import first_line
from harness.base.text import count_of
from harness.base.units import MB
from harness.machine.gpu_driver import Slowdowns, gpu_driver
from harness.schema import Document, field, known_or

if TYPE_CHECKING:
    import torch

# From these on, a measurement counts as disturbed.  Neither was measured, as that needs a GPU that
# can be heated and shared.  Clocks lowered for a share of the time make a measurement longer by
# less than that, so 5% hides no more than LONGEST_WAIT in disturbance.py does.  The memory is that
# of this process's own context and libraries: a few hundred MB by the documentation of both makers,
# four times that for safety.
LOWERED_CLOCKS = 0.05  # of the time, clocks lowered by heat or power supply
MEMORY_OF_OTHERS = 2048 * MB  # bytes, before the run, where processes cannot be counted

TAKE_TURNS = "on a shared GPU take turns: flock /tmp COMMAND"

ASKED = ("other_processes", "clock_mhz", "max_clock_mhz", "lowered_by")  # of the driver
NO_READING = "no reading was taken"


class GpuDisturbance(Document):
    other_processes: int | None = field(
        "on the GPU, the most of before and after the run", null=NO_READING
    )
    memory_in_use_mb: float = field(
        "MB before the run: other processes, and the context of this one"
    )
    clock_mhz: float | None = field("mean, read once a second", null=NO_READING)
    max_clock_mhz: int | None = field("of the GPU's cores", null=NO_READING)
    lowered_by: dict[str, float] | None = field(
        "causes other than the power limit, share of the time", null=NO_READING
    )


class GpuWatch:
    """Other processes before and after a measurement, memory in use before it, clocks and what
    lowered them during it.

    What the driver does not report is None, with the reason in `reasons`.
    """

    EVERY_S = 1.0  # seconds between two readings of the clocks

    def __init__(self, device: torch.device):
        import torch  # not before: reading what a run wrote needs no PyTorch

        self.reasons: dict[str, str] = {}
        self.clocks_mhz: list[int] = []
        self._read_at = -self.EVERY_S
        free, total = torch.cuda.mem_get_info(device)
        self.memory_bytes = total - free - torch.cuda.memory_reserved(device)
        try:
            self.driver = gpu_driver(device)
        except OSError as error:
            self.reasons = dict.fromkeys(ASKED, first_line(error))
        self._others = [self._ask("other_processes", self._count_others)]
        self.max_clock_mhz = self._ask("max_clock_mhz", lambda: self.driver.max_clock_mhz())
        self._slowdowns: list[Slowdowns] = []  # before the first reading, and at the last one
        self._note_slowdowns()

    def _ask(self, name: str, question: Callable):
        """The answer; None once there was none."""
        try:
            return None if name in self.reasons else question()
        except (OSError, ValueError) as error:
            self.reasons[name] = first_line(error)
            return None

    def _count_others(self) -> int:
        pids = self.driver.processes()
        if not pids:  # this process uses the GPU, so it should be in the list
            raise OSError("the driver lists no process on this GPU, not even this one")
        return len(pids) - 1  # this one, which has another id in a container

    def _note_slowdowns(self) -> None:
        slowdowns = self._ask("lowered_by", lambda: self.driver.slowdowns())
        if slowdowns is None:
            self._slowdowns = self._slowdowns[:1]
        else:
            self._slowdowns = [*self._slowdowns[:1], slowdowns]

    def read(self) -> None:
        """While the GPU works, at most once a second."""
        if time.perf_counter() - self._read_at < self.EVERY_S:
            return
        self._read_at = time.perf_counter()
        clock_mhz = self._ask("clock_mhz", lambda: self.driver.clock_mhz())
        if clock_mhz:
            self.clocks_mhz.append(clock_mhz)
        self._note_slowdowns()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Reads in a thread of its own, during work that has no steps."""
        done = threading.Event()

        def read_until_done() -> None:
            while not done.wait(self.EVERY_S / 4):
                self.read()

        thread = threading.Thread(target=read_until_done, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def document(self) -> dict:
        """The section `gpu` of a disturbance."""
        counts = [*self._others, self._ask("other_processes", self._count_others)]
        others = [count for count in counts if count is not None]
        clock_mhz = None
        if self.clocks_mhz:
            clock_mhz = sum(self.clocks_mhz) / len(self.clocks_mhz)
        lowered_by = None
        if len(self._slowdowns) == 2:
            lowered_by = self._slowdowns[1].since(self._slowdowns[0])
        return GpuDisturbance(
            other_processes=self._told("other_processes", max(others, default=None)),
            memory_in_use_mb=self.memory_bytes / MB,
            clock_mhz=self._told("clock_mhz", clock_mhz),
            max_clock_mhz=self._told("max_clock_mhz", self.max_clock_mhz),
            lowered_by=self._told("lowered_by", lowered_by),
        ).as_json()

    def _told(self, name: str, value: object) -> object:
        """The value; where it is None, why the driver did not tell it, if it was asked."""
        return known_or(value, self.reasons.get(name, NO_READING))


def may_be_shared(gpu: dict) -> bool:
    """Whether other processes use the GPU, or nothing tells why more of its memory is in use than
    this one needs."""
    others = gpu["other_processes"]
    return bool(others) or (others is None and gpu["memory_in_use_mb"] * MB > MEMORY_OF_OTHERS)


def gpu_reasons(gpu: dict) -> list[str]:
    """What disturbed the GPU, each with its figure."""
    reasons = []
    others = gpu["other_processes"]
    if others:
        reasons.append(f"{count_of(others, 'other process')} on the GPU")
    elif may_be_shared(gpu):
        reasons.append(
            f"{gpu['memory_in_use_mb']:,.0f} MB of the GPU in use before the run, own context"
            " included"
        )
    for cause, share in (gpu["lowered_by"] or {}).items():
        if share >= LOWERED_CLOCKS:
            reasons.append(f"GPU clocks lowered by {cause} for {share:.0%} of the time")
    return reasons


def gpu_text(gpu: dict) -> str:
    """What disturbed the GPU, or 'none seen', or why that is unknown."""
    reasons = gpu_reasons(gpu)
    if reasons:
        return "; ".join(reasons)
    asked = ("other_processes", "lowered_by")
    unknown = dict.fromkeys(gpu[f"{name}_reason"] for name in asked if gpu[name] is None)
    return "; ".join(f"unknown: {why}" for why in unknown) or "none seen"
