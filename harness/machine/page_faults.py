"""Page faults of a run: do they take longer than they need to?

A tensor larger than 32 MB is, in every step, memory that Linux first has to hand out and clear: a page fault for each
page of 4 KB.  That alone is no disturbance.  But on a virtual machine whose host takes memory back that is not in use,
a fault waits for the host too, which takes several times as long, and no other figure shows it: the time counts as the
kernel's, for this process.
"""

from __future__ import annotations

import functools
import mmap
import resource
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from harness.documents.run import TOO_SHORT
from harness.documents.schema import because, unknown
from harness.machine.cpu_counters import Interval

SETTLED = 2  # steps after which memory is no longer touched for the first time: step 1 makes the optimizer's state
# The kernel's time, over that which its page faults need.  On a virtual machine, a fault took 4 to 7 times as long in
# memory that the host had taken back as in memory freed just before; runs of all sizes, with few faults and with many,
# were at 0.7 to 1.3.
SLOW_FAULTS = 2.0
FAULT_SHARE = 0.05  # of CPU time, that page faults need at least: other work of the kernel is not taken for slow faults
# A second, in the median step.  Each waits for a disk, for up to 10 ms: 5% of the step, as with LONGEST_WAIT.  The
# steps of a quiet run have none.
MAJOR_FAULTS = 5.0

OTHER_PAGES = "the memory of tensors is not handed out in pages of the usual size"
PROBED_BYTES = 64 * 2**20  # 16,384 pages of 4 KB: 20 ms on two cores


@functools.cache
def fault_s() -> float | None:
    """CPU seconds that a page fault needs: in memory that was freed just before, by PyTorch's threads.  None if it is
    not that of usual pages, such as with transparent huge pages, of which some faults of a run are and some are not."""
    filling_fault_s(empty_tensor())  # at first the memory may have to come from the host
    return filling_fault_s(empty_tensor())


def empty_tensor() -> Tensor:
    """So large that its memory is new, and returned to the system afterwards."""
    return torch.empty(PROBED_BYTES, dtype=torch.uint8)


def filling_fault_s(tensor: Tensor) -> float | None:
    """CPU seconds of a page fault while PyTorch's threads fill new memory; None as in fault_s()."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    tensor.fill_(1)
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    faults = after.ru_minflt - before.ru_minflt
    return cpu_s / faults if faults > tensor.nbytes / mmap.PAGESIZE / 2 else None


class PageFaults:
    """Those of a run's steps, without the first ones."""

    def __init__(self, steps: Sequence[Interval]):
        self.steps = [step for step in steps[SETTLED:] if step.wall_s]
        self.total = sum(self.steps, Interval())

    @functools.cached_property
    def slowdown(self) -> float | None:
        """The time that the kernel took, over what its page faults need; None if that is too little to tell."""
        cpu_s, system_s = self.total.cpu_s, self.total.system_s
        if not cpu_s or system_s < FAULT_SHARE * cpu_s or fault_s() is None:
            return None
        needed_s = self.total.minor_faults * fault_s()
        return system_s / needed_s if needed_s >= FAULT_SHARE * cpu_s else None

    @property
    def lost_share(self) -> float:
        """Upper bound of the share of the wall time that slow faults cost: if no two threads had one at once."""
        if (self.slowdown or 0) < SLOW_FAULTS:
            return 0.0
        return min(1.0, self.total.system_s * (1 - 1 / self.slowdown) / self.total.wall_s)

    def figures(self) -> dict:
        """Of documents.Disturbance: system_share, fault_slowdown, minor_ and major_faults_per_sec."""
        if not self.steps:
            names = ("system_share", "minor_faults_per_sec", "major_faults_per_sec", "fault_slowdown")
            return unknown(TOO_SHORT, *names)
        no_rate = self.total.minor_faults and fault_s() is None
        return {
            "system_share": self.total.system_s / self.total.cpu_s if self.total.cpu_s else None,
            "minor_faults_per_sec": statistics.median(step.minor_faults / step.wall_s for step in self.steps),
            "major_faults_per_sec": statistics.median(step.major_faults / step.wall_s for step in self.steps),
            "fault_slowdown": self.slowdown,
            **(because(OTHER_PAGES, "fault_slowdown") if no_rate else {}),
        }


def fault_reasons(figures: dict) -> list[str]:
    """What of PageFaults.figures() disturbed a measurement."""
    found = []
    if (figures["fault_slowdown"] or 0) >= SLOW_FAULTS:
        found.append(
            f"{figures['system_share']:.0%} of CPU time in the kernel: {figures['minor_faults_per_sec']:,.0f} page "
            f"faults a second, each {figures['fault_slowdown']:.1f} times as long as in memory freed just before"
        )
    if (figures["major_faults_per_sec"] or 0) >= MAJOR_FAULTS:
        found.append(f"{figures['major_faults_per_sec']:,.0f} page faults a second waited for a disk")
    return found
