"""What Linux counts for this process and its machine:
time on a core and waiting for one, CPU quotas."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import time
from dataclasses import dataclass
from pathlib import Path

from harness.machine.host_limits import cgroup_folders, quota_cores, unknown_quota


@dataclass
class Interval:
    """Counts for this process over an interval, for example a step; intervals can be added."""

    wall_s: float = 0.0
    run_s: float = 0.0  # over all threads; 0 if unknown
    waited_s: float = 0.0  # over all threads: ready to run, but without a core
    longest_wait_s: float = 0.0  # of the thread that waited longest
    throttled: int = 0  # periods of a CPU quota that was used up
    periods: int = 0  # of the quota
    switches: int = 0  # involuntary context switches

    def __add__(self, other: Interval) -> Interval:
        return Interval(
            *(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True))
        )

    @property
    def waited_share(self) -> float | None:
        """The share of waiting in the time that threads ran or wanted to; None if unknown."""
        return self.waited_s / (self.run_s + self.waited_s) if self.run_s else None

    @property
    def longest_wait_share(self) -> float | None:
        return min(1.0, self.longest_wait_s / self.wall_s) if self.run_s else None

    @property
    def lost_share(self) -> float | None:
        """Upper bound of the share of the wall time that is due to waiting: if no two threads
        waited at once."""
        return min(1.0, self.waited_s / self.wall_s) if self.run_s else None


@dataclass(frozen=True)
class Sample:
    """Counters at one moment."""

    at_s: float
    threads: dict[str, tuple[int, int]]  # by thread: ns run, ns waited
    throttled: int
    periods: int
    switches: int

    def until(self, later: Sample) -> Interval:
        """A thread that ended in between counts as far as it was seen: a step samples at both
        ends."""
        run_ns, waits_ns = 0, [0]
        for thread, (ran, waited) in later.threads.items():
            ran_before, waited_before = self.threads.get(thread, (0, 0))
            run_ns += ran - ran_before
            waits_ns.append(waited - waited_before)
        return Interval(
            wall_s=later.at_s - self.at_s,
            run_s=run_ns / 1e9,
            waited_s=sum(waits_ns) / 1e9,
            longest_wait_s=max(waits_ns) / 1e9,
            throttled=later.throttled - self.throttled,
            periods=later.periods - self.periods,
            switches=later.switches - self.switches,
        )


class Counters:
    """Reads the counters of this process.  Files stay open: reading one again takes 1 to 2 us, and
    15 with opening it.

    proc and cgroups are where /proc and the control groups are mounted.
    """

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")):
        self.proc, self._files = proc, {}
        self.ignored: set[str] = set()  # threads of ours, by their number for the system
        folders = cgroup_folders("cpu", proc, cgroups)
        self.limited = [folder for folder in folders if quota_cores(folder)]
        self.no_quota_reason = unknown_quota(folders, proc, cgroups) or "no quota"
        self.missing = None  # why the threads' times are unknown
        # Zeros: a kernel without this accounting.
        if not any(ran for ran, _ in self._threads().values()):
            self.missing = f"{proc}/self/task/*/schedstat is missing or empty on this system"

    def _threads(self) -> dict[str, tuple[int, int]]:
        """(ns run, ns waited) by thread."""
        times, tasks = {}, f"{self.proc}/self/task"
        with contextlib.suppress(FileNotFoundError):
            for thread in os.listdir(tasks):
                if thread in self.ignored:
                    continue
                with contextlib.suppress(OSError):  # it ended just now
                    if thread not in self._files:
                        self._files[thread] = os.open(f"{tasks}/{thread}/schedstat", os.O_RDONLY)
                    ran, waited, _ = os.pread(self._files[thread], 100, 0).split()
                    times[thread] = int(ran), int(waited)
        for thread in [thread for thread in self._files if thread not in times]:
            os.close(self._files.pop(thread))
        return times

    def sample(self) -> Sample:
        threads = {} if self.missing else self._threads()
        quotas = [kernel_counters(folder / "cpu.stat") for folder in self.limited]
        throttled = sum(quota.get("nr_throttled", 0) for quota in quotas)
        periods = sum(quota.get("nr_periods", 0) for quota in quotas)
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        return Sample(time.perf_counter(), threads, throttled, periods, switches)

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    __del__ = close

    def machine(self) -> dict[str, float]:
        """Counts of the entire machine: clock ticks that its cores were busy and those stolen from
        it; seconds in which some process waited for a core.  What the system does not report is
        left out."""
        counts = {"at_s": time.perf_counter()}
        with contextlib.suppress(OSError, ValueError), (self.proc / "stat").open() as file:
            user, nice, system, _, _, irq, softirq, stolen = map(int, file.readline().split()[1:9])
            counts["busy"] = user + nice + system + irq + softirq + stolen
            counts["stolen"] = stolen
        with contextlib.suppress(OSError, AttributeError):
            pressure = (self.proc / "pressure/cpu").read_text()
            counts["pressure_s"] = int(re.search(r"^some .*total=(\d+)", pressure).group(1)) / 1e6
        return counts


def kernel_counters(path: Path) -> dict[str, int]:
    """The lines 'name number' of a file; none if it does not exist."""
    try:
        return {name: int(value) for name, value in map(str.split, path.read_text().splitlines())}
    except (OSError, ValueError):
        return {}
