"""Was a measurement disturbed?  How long its threads waited for a core, and what else happened on the machine.

Other processes make every figure worse, and the figure does not show it.  Linux counts for each thread how long it
ran, and how long it was ready to run but had no core.  Everything else here helps to explain such waits.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.base.files import explain_nulls
from harness.machine.cgroups import cgroup_folders
from harness.machine.gpu_watch import GpuWatch, gpu_reasons, may_be_shared

# From these shares on, a measurement counts as disturbed.  benchmarks/disturbance.py compares each with what quiet runs
# show and with what runs show that were slowed down on purpose; its table tells which ones a machine could test.
LONGEST_WAIT = 0.05  # of a step, for the thread that waited longest: the step may be longer by as much
THROTTLED = 0.05  # of the periods of a CPU quota, those in which it was used up: each makes the process wait
STEPS = 0.10  # of the steps, those disturbed: fewer hardly change the median, by its definition
# Of the time that the machine's cores were busy, taken by other virtual machines of its host.  By definition (man 5
# proc) work took longer by at least as much.  Not measured: only the host can steal.
STEAL = 0.03


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
        return Interval(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    @property
    def waited_share(self) -> float | None:
        """Of the time that threads ran or wanted to; None if unknown."""
        return self.waited_s / (self.run_s + self.waited_s) if self.run_s else None

    @property
    def longest_wait_share(self) -> float | None:
        return min(1.0, self.longest_wait_s / self.wall_s) if self.run_s else None

    @property
    def lost_share(self) -> float | None:
        """Upper bound of the share of the wall time that is due to waiting: if no two threads waited at once."""
        return min(1.0, self.waited_s / self.wall_s) if self.run_s else None

    @property
    def disturbed(self) -> bool | None:
        if self.throttled:
            return True
        return self.longest_wait_share >= LONGEST_WAIT if self.run_s else None


# ---- What Linux counts -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """Counters at one moment."""

    at_s: float
    threads: dict[str, tuple[int, int]]  # by thread: ns run, ns waited
    throttled: int
    periods: int
    switches: int

    def until(self, later: Sample) -> Interval:
        """A thread that ended in between counts as far as it was seen: a step samples at both ends."""
        run_ns, waits_ns = 0, [0]
        for thread, (ran, waited) in later.threads.items():
            ran_before, waited_before = self.threads.get(thread, (0, 0))
            run_ns += ran - ran_before
            waits_ns.append(waited - waited_before)
        return Interval(
            later.at_s - self.at_s,
            run_ns / 1e9,
            sum(waits_ns) / 1e9,
            max(waits_ns) / 1e9,
            later.throttled - self.throttled,
            later.periods - self.periods,
            later.switches - self.switches,
        )


class Counters:
    """Reads the counters of this process.  Files stay open: reading one again takes 1 to 2 us instead of 15.

    proc and cgroups are where /proc and the control groups are mounted.
    """

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")):
        self.proc, self._files = proc, {}
        folders = cgroup_folders("cpu", proc, cgroups)
        self.limited = [folder for folder in folders if quota_cores(folder)]
        self.no_quota_reason = unknown_quota(folders, proc, cgroups) or "no quota"
        self.missing = None  # why the threads' times are unknown
        if not any(ran for ran, _ in self._threads().values()):  # zeros: a kernel without this accounting
            self.missing = f"{proc}/self/task/*/schedstat is missing or empty on this system"

    def _threads(self) -> dict[str, tuple[int, int]]:
        found, tasks = {}, f"{self.proc}/self/task"
        with contextlib.suppress(FileNotFoundError):
            for thread in os.listdir(tasks):
                with contextlib.suppress(OSError):  # it ended just now
                    if thread not in self._files:
                        self._files[thread] = os.open(f"{tasks}/{thread}/schedstat", os.O_RDONLY)
                    ran, waited, _ = os.pread(self._files[thread], 100, 0).split()
                    found[thread] = int(ran), int(waited)
        for thread in self._files.keys() - found.keys():
            os.close(self._files.pop(thread))
        return found

    def sample(self) -> Sample:
        threads = {} if self.missing else self._threads()
        quotas = [fields(folder / "cpu.stat") for folder in self.limited]
        throttled, periods = (sum(one.get(name, 0) for one in quotas) for name in ("nr_throttled", "nr_periods"))
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        return Sample(time.perf_counter(), threads, throttled, periods, switches)

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    __del__ = close

    def machine(self) -> dict[str, float]:
        """Of the entire machine: clock ticks that its cores were busy and those stolen from it; seconds in which some
        process waited for a core.  What the system does not report is left out."""
        found = {"at_s": time.perf_counter()}
        with contextlib.suppress(OSError, ValueError), (self.proc / "stat").open() as file:
            user, nice, system, _, _, irq, softirq, stolen = map(int, file.readline().split()[1:9])
            found |= {"busy": user + nice + system + irq + softirq + stolen, "stolen": stolen}
        with contextlib.suppress(OSError, AttributeError):
            pressure = (self.proc / "pressure/cpu").read_text()
            found["pressure_s"] = int(re.search(r"^some .*total=(\d+)", pressure).group(1)) / 1e6
        return found


def fields(path: Path) -> dict[str, int]:
    """The lines 'name number' of a file; none if it does not exist."""
    try:
        return {name: int(value) for name, value in map(str.split, path.read_text().splitlines())}
    except (OSError, ValueError):
        return {}


def unknown_quota(folders: list[Path], proc: Path, cgroups: Path) -> str | None:
    """Why it is unknown whether the control groups have a quota; None if it is known."""
    if not (proc / "self/cgroup").exists():
        return f"no {proc}/self/cgroup on this system"
    if not folders:
        return f"{cgroups} does not have the control group of this process"
    for file in (folder / name for folder in folders for name in ("cpu.max", "cpu.cfs_quota_us")):
        try:
            file.read_text()
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{file}: {error.strerror}"
    return None


def quota_cores(folder: Path) -> float | None:
    """Cores' worth of time that a control group may use; None without a limit."""
    with contextlib.suppress(OSError, ValueError):
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None  # "max" is no number
    return None


# ---- A measurement -----------------------------------------------------------------------------------------------

NOT_RUN = "nothing was measured"


class DisturbanceMeter:
    """Measures how far something was disturbed: the steps of a run, each in an interval(), or one long_interval()."""

    def __init__(self, device: torch.device, counters: Counters | None = None):
        self.on_gpu, self.counters = device.type == "cuda", counters or Counters()
        self.threads, self.cores = torch.get_num_threads(), available_cores()
        self.quota_cores = min(filter(None, map(quota_cores, self.counters.limited)), default=None)
        self.load_before = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        self.gpu = GpuWatch(device) if self.on_gpu else None
        self.intervals: list[Interval] = []
        self._before: dict[str, float] = {}
        self._sampling_s: list[float] = []

    def _sample(self) -> Sample:
        start = time.perf_counter()
        sample = self.counters.sample()
        self._sampling_s.append(time.perf_counter() - start)
        return sample

    @contextlib.contextmanager
    def interval(self) -> Iterator[Interval]:
        """Its counts are filled in at the end, and kept if no exception ends it."""
        self._before = self._before or self.counters.machine()
        interval, before = Interval(), self._sample()
        yield interval
        vars(interval).update(vars(before.until(self._sample())))
        self.intervals.append(interval)
        if self.gpu:
            self.gpu.read()

    @contextlib.contextmanager
    def long_interval(self) -> Iterator[Interval]:
        """An interval in which a GPU's clocks are read all the time, not only at its end."""
        with self.gpu.reading() if self.gpu else contextlib.nullcontext(), self.interval() as interval:
            yield interval

    def document(self) -> dict:
        """The section `disturbance` of a document; ends the measurement."""
        total, machine = sum(self.intervals, Interval()), self._machine_shares()
        unknown = (self.counters.missing or NOT_RUN) if self.intervals else NOT_RUN
        known_steps = [one.disturbed for one in self.intervals if one.disturbed is not None]
        values = {
            "waited_share": total.waited_share,
            "longest_wait_share": total.longest_wait_share,
            "steps_disturbed": sum(map(bool, known_steps)) if known_steps else None,
            "threads": self.threads,
            "cores": self.cores,
            "quota_cores": self.quota_cores,
            "load_before": self.load_before,
            "throttled_share": total.throttled / total.periods if total.periods else None,
            "pressure_share": machine["pressure_share"],
            "steal_share": machine["steal_share"],
            "switches_per_sec": total.switches / total.wall_s if total.wall_s else None,
            "sample_us": 1e6 * statistics.median(self._sampling_s) if self._sampling_s else None,
            "gpu": self.gpu.document() if self.gpu else None,
        }
        self.counters.close()
        values["lost_share"] = most_lost(values, total.lost_share)
        reasons = reasons_of(values, len(self.intervals), self.on_gpu)
        known = bool(reasons) or total.run_s > 0
        proc, no_quota = self.counters.proc, self.counters.no_quota_reason
        return explain_nulls(
            {"disturbed": bool(reasons) if known else None, **values, "reasons": reasons},
            unknown,
            quota_cores=no_quota,
            throttled_share=no_quota if self.quota_cores is None else "shorter than a period of the quota",
            load_before="this system has no load average",
            pressure_share=f"no {proc}/pressure/cpu on this system" if self.intervals else NOT_RUN,
            steal_share=f"no {proc}/stat on this system, or no clock tick passed" if self.intervals else NOT_RUN,
            switches_per_sec=NOT_RUN,
            sample_us=NOT_RUN,
            gpu="no GPU in use",
        )

    def _machine_shares(self) -> dict[str, float | None]:
        after, before = self.counters.machine(), self._before
        change = {name: after[name] - before[name] for name in after.keys() & before.keys()}
        steal = change["stolen"] / change["busy"] if change.get("busy") else None
        pressure = None
        if change.get("at_s") and "pressure_s" in change:  # the kernel updates its sum only now and then
            pressure = min(1.0, change["pressure_s"] / change["at_s"])
        return {"steal_share": steal, "pressure_share": pressure}


def most_lost(values: dict, waiting: float | None) -> float | None:
    """Upper bound of the share of the time lost to everything that disturbed the measurement."""
    gpu = values["gpu"]
    if waiting is None or (gpu and may_be_shared(gpu)):  # what they take of the GPU is unknown
        return None if waiting is None else 1.0
    lost = waiting + (values["throttled_share"] or 0.0) + (values["steal_share"] or 0.0)
    if gpu and gpu["lowered_by"] and gpu["clock_mhz"] and gpu["max_clock_mhz"]:
        lost += max(0.0, 1 - gpu["clock_mhz"] / gpu["max_clock_mhz"])
    return min(1.0, lost)


def available_cores() -> int:
    """Cores that this process may run on: those of its affinity mask, where there is one."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def crowding(threads: int, cores: int, quota: float | None) -> list[str]:
    """Whether there are more threads than cores.

    Ranks of a node share a CPU quota, and all cores of the machine if they are not bound.  Of a smaller mask it is not
    known here whether it is this rank's own: the doctor compares the masks of all ranks."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    on_cores = ranks if cores == os.cpu_count() else 1  # ranks on these cores
    limit, sharing = f"{cores} core{'s' * (cores > 1)}", on_cores
    if quota and quota / ranks < cores / on_cores:
        limit, sharing, cores = f"a CPU quota of {quota:.3g} cores", ranks, quota
    if threads * sharing <= cores:
        return []
    each = f" in each of {sharing} ranks" if sharing > 1 else ""
    return [f"{threads} thread{'s' * (threads > 1)}{each} on {limit}"]


def reasons_of(values: dict, intervals: int, on_gpu: bool) -> list[str]:
    """What disturbed a measurement, each with its figure."""
    found = []
    waited, longest = values["waited_share"], values["longest_wait_share"]
    if waited is not None and longest >= LONGEST_WAIT:
        one = f", one thread for {longest:.0%} of the steps" if longest > 2 * waited else ""
        found.append(f"{waited:.0%} of thread time waited for a core{one}")
    elif (values["steps_disturbed"] or 0) >= max(2, STEPS * intervals):
        quota = " or for the CPU quota" if values["throttled_share"] else ""
        found.append(f"{values['steps_disturbed']} of {intervals} steps waited for a core{quota}")
    if not on_gpu:
        found += crowding(values["threads"], values["cores"], values["quota_cores"])
    if (values["throttled_share"] or 0) >= THROTTLED:
        found.append(f"CPU quota used up in {values['throttled_share']:.0%} of its periods")
    if (values["steal_share"] or 0) >= STEAL:
        found.append(f"{values['steal_share']:.0%} of core time stolen by other virtual machines")
    return found + (gpu_reasons(values["gpu"]) if values["gpu"] else [])


def over_ranks(documents: list[dict]) -> dict:
    """The document of a run from those of its ranks: of the one that was disturbed most, as all wait for the slowest.

    lost_share is the sum: the ranks may have been disturbed one after the other.
    """
    lost = [one["lost_share"] for one in documents]
    worst = max(range(len(documents)), key=lambda rank: (bool(documents[rank]["disturbed"]), lost[rank] or 0.0))
    found, disturbed = documents[worst], sum(bool(one["disturbed"]) for one in documents)
    if not disturbed:  # "unknown" is said of any rank
        return next((one for one in documents if one["disturbed"] is None), found)
    if len(documents) == 1:
        return found
    more = f" (of {disturbed} disturbed)" if disturbed > 1 else ""
    reasons = [f"rank {worst}{more}: {found['reasons'][0]}", *found["reasons"][1:]]
    unknown = next((one["lost_share_reason"] for one in documents if one["lost_share"] is None), "")
    total = {"lost_share": None if unknown else min(1.0, sum(lost))}
    return found | {"reasons": reasons} | explain_nulls(total, unknown)


def disturbance_text(document: dict) -> str:
    """What follows 'Disturbance: ' in a summary."""
    if document["disturbed"] is None:
        return f"unknown: {document['disturbed_reason']}"
    if not document["disturbed"]:
        gpu = document["gpu"]
        silent = gpu and gpu["other_processes"] is None and gpu["lowered_by"] is None
        return "none seen" + "; GPU: not known here" * bool(silent)
    load, cores = document["load_before"], document["cores"]
    before = [] if load is None else [f"load {load:.1f} on {cores} core{'s' * (cores > 1)}"]
    return "; ".join([*document["reasons"], *before])
