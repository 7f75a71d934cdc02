"""Was a measurement disturbed?  How long its threads waited for a core, and what else happened on
the machine.

Other processes make every figure worse, and the figure does not show it.  Linux counts for each
thread how long it ran, and how long it was ready to run but had no core.  Beside such waits, and
what helps to explain them, counts what others do to a GPU.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from harness.base.text import count_of
from harness.machine.cpu_counters import Counters, Interval, Sample
from harness.machine.gpu_watch import (
    TAKE_TURNS,
    GpuDisturbance,
    GpuWatch,
    gpu_reasons,
    may_be_shared,
)
from harness.machine.host_limits import least_quota, usable_cores
from harness.schema import Document, explained, field, known_or

if TYPE_CHECKING:
    import torch

# From these shares on, a measurement counts as disturbed.  benchmarks/README.md compares them with
# what quiet runs showed, and runs that were slowed down on purpose.
# Of a step, for the thread that waited longest: the step may be longer by as much.
LONGEST_WAIT = 0.05
# Share of the periods of a CPU quota in which it was used up: each makes the process wait
THROTTLED = 0.05
STEPS = 0.10  # of the steps, those disturbed: fewer hardly change the median, by its definition
# Of the time that the machine's cores were busy, taken by other virtual machines of its host.  By
# definition (man 5 proc) work took longer by at least as much.  Not measured: only the host can
# steal.
STEAL = 0.03


MOST_LOST = 0.75  # from this upper bound on, the bound tells nothing
CURE = "close other programs or take a node of your own, then repeat"
NOT_RUN = "nothing was measured"


class Disturbance(Document):
    """Of several ranks, that of the one that was disturbed most."""

    disturbed: bool | None = field("whether something made it slower", null=NOT_RUN)
    waited_share: float | None = field("of thread time, waiting for a core", null=NOT_RUN)
    longest_wait_share: float | None = field(
        "of the steps, for the thread that waited longest in each", null=NOT_RUN
    )
    steps_disturbed: int | None = field("that waited long enough to be longer", null=NOT_RUN)
    threads: int = field("that PyTorch uses for one operator")
    cores: int = field("that the affinity mask allows")
    load_before: float | None = field(
        "load average of the minute before", null="this system has no load average"
    )
    quota_cores: float | None = field("least CPU quota of the control groups", null="no quota")
    throttled_share: float | None = field(
        "of the quota's periods, those in which it was used up", null="no quota"
    )
    pressure_share: float | None = field(
        "of the time, some process of the machine waited for a core", null=NOT_RUN
    )
    steal_share: float | None = field(
        "of the cores' busy time, taken by other virtual machines", null=NOT_RUN
    )
    switches_per_sec: float | None = field("involuntary context switches", null=NOT_RUN)
    sample_us: float | None = field(
        "microseconds that a sample takes, median, two per step", null=NOT_RUN
    )
    gpu: GpuDisturbance | None = field("of the GPU in use", null="no GPU in use")
    lost_share: float | None = field(
        "of the steps' time, that is due to it at most, sum over ranks", null=NOT_RUN
    )
    reasons: list[str] = field("what disturbed it, with figures")


def is_disturbed(step: Interval) -> bool | None:
    """Whether a step may be longer for waiting; None if the system does not tell."""
    if step.throttled:
        return True
    return step.longest_wait_share >= LONGEST_WAIT if step.run_s else None


class Figures(NamedTuple):
    """What tells whether a measurement was disturbed; fields as in Disturbance."""

    waited_share: float | None
    longest_wait_share: float | None
    steps_disturbed: int | None
    threads: int
    cores: int
    quota_cores: float | None
    throttled_share: float | None
    steal_share: float | None
    gpu: dict | None


class MachineShares(NamedTuple):
    """Of the time, or of the cores' busy time; None where the system does not tell."""

    pressure: float | None
    steal: float | None


class DisturbanceMeter:
    """Measures how far something was disturbed: the steps of a run, each in an interval(), or one
    long_interval()."""

    def __init__(self, device: torch.device, counters: Counters | None = None):
        import torch  # not before: reading what a run wrote needs no PyTorch

        self.on_gpu, self.counters = device.type == "cuda", counters or Counters()
        self.threads, self.cores = torch.get_num_threads(), len(usable_cores())
        self.quota_cores = least_quota(self.counters.limited)
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
        """An interval whose counts are filled in at the end, and kept if no exception ends it."""
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
        with (
            self.gpu.reading() if self.gpu else contextlib.nullcontext(),
            self.interval() as interval,
        ):
            yield interval

    def document(self) -> dict:
        """The section `disturbance` of a document; ends the measurement."""
        total = sum(self.intervals, Interval())
        pressure_share, steal_share = self._machine()
        figures = Figures(
            waited_share=total.waited_share,
            longest_wait_share=total.longest_wait_share,
            steps_disturbed=self._steps_disturbed(),
            threads=self.threads,
            cores=self.cores,
            quota_cores=self.quota_cores,
            throttled_share=total.throttled / total.periods if total.periods else None,
            steal_share=steal_share,
            gpu=self.gpu.document() if self.gpu else None,
        )
        self.counters.close()
        reasons = reasons_of(figures, len(self.intervals), self.on_gpu)
        is_known = bool(reasons) or total.run_s > 0
        no_threads = no_pressure = no_steal = NOT_RUN  # why values are null
        if self.intervals:
            proc = self.counters.proc
            no_threads = self.counters.missing or NOT_RUN
            no_pressure = f"no {proc}/pressure/cpu on this system"
            no_steal = f"no {proc}/stat on this system, or no clock tick passed"
        no_quota = self.counters.no_quota_reason
        no_period = no_quota if self.quota_cores is None else "shorter than a period of the quota"
        return Disturbance(
            disturbed=known_or(bool(reasons) if is_known else None, no_threads),
            waited_share=known_or(figures.waited_share, no_threads),
            longest_wait_share=known_or(figures.longest_wait_share, no_threads),
            steps_disturbed=known_or(figures.steps_disturbed, no_threads),
            threads=figures.threads,
            cores=figures.cores,
            load_before=self.load_before,
            quota_cores=known_or(figures.quota_cores, no_quota),
            throttled_share=known_or(figures.throttled_share, no_period),
            pressure_share=known_or(pressure_share, no_pressure),
            steal_share=known_or(figures.steal_share, no_steal),
            switches_per_sec=total.switches / total.wall_s if total.wall_s else None,
            sample_us=1e6 * statistics.median(self._sampling_s) if self._sampling_s else None,
            gpu=figures.gpu,
            lost_share=known_or(most_lost(figures, total.lost_share), no_threads),
            reasons=reasons,
        ).as_json()

    def _steps_disturbed(self) -> int | None:
        """Steps that may be longer for waiting; None if the system tells of none."""
        marks = [is_disturbed(interval) for interval in self.intervals]
        known = [mark for mark in marks if mark is not None]
        return known.count(True) if known else None

    def _machine(self) -> MachineShares:
        """What other processes and other virtual machines took of the machine's cores."""
        after, before = self.counters.machine(), self._before
        change = {name: after[name] - before[name] for name in after if name in before}
        steal = change["stolen"] / change["busy"] if change.get("busy") else None
        pressure = None
        # The kernel updates its sum only now and then.
        if change.get("at_s") and "pressure_s" in change:
            pressure = min(1.0, change["pressure_s"] / change["at_s"])
        return MachineShares(pressure, steal)


def most_lost(figures: Figures, waiting: float | None) -> float | None:
    """Upper bound of the share of the time lost to everything that disturbed the measurement:
    waiting, and what the other figures tell."""
    gpu = figures.gpu
    if waiting is None:
        return None
    if gpu and may_be_shared(gpu):  # what others take of the GPU is unknown
        return 1.0
    lost = waiting + (figures.throttled_share or 0.0) + (figures.steal_share or 0.0)
    if gpu and gpu["lowered_by"] and gpu["clock_mhz"] and gpu["max_clock_mhz"]:
        lost += max(0.0, 1 - gpu["clock_mhz"] / gpu["max_clock_mhz"])
    return min(1.0, lost)


def crowding(threads: int, cores: int, quota: float | None) -> list[str]:
    """Whether there are more threads than cores.

    Ranks of a node share a CPU quota, and all cores of the machine if they are not bound.  Of a
    smaller mask it is not known here whether it is this rank's own: setup_checks compares the masks
    of all ranks."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    on_cores = ranks if cores == os.cpu_count() else 1  # ranks on these cores
    limit, sharing = count_of(cores, "core"), on_cores
    if quota and quota / ranks < cores / on_cores:
        limit, sharing, cores = f"a CPU quota of {quota:.3g} cores", ranks, quota
    if threads * sharing <= cores:
        return []
    each = f" in each of {sharing} ranks" if sharing > 1 else ""
    return [f"{count_of(threads, 'thread')}{each} on {limit}"]


def reasons_of(figures: Figures, intervals: int, on_gpu: bool) -> list[str]:
    """What disturbed a measurement, each with its figure."""
    reasons = reason_of_waits(figures, intervals)
    if not on_gpu:
        reasons += crowding(figures.threads, figures.cores, figures.quota_cores)
    throttled, stolen = figures.throttled_share or 0.0, figures.steal_share or 0.0
    if throttled >= THROTTLED:
        reasons.append(f"CPU quota used up in {throttled:.0%} of its periods")
    if stolen >= STEAL:
        reasons.append(f"{stolen:.0%} of core time stolen by other virtual machines")
    if figures.gpu:
        reasons += gpu_reasons(figures.gpu)
    return reasons


def reason_of_waits(figures: Figures, intervals: int) -> list[str]:
    """That threads waited for a core, if it made a thread wait for long, or many steps."""
    waited, longest = figures.waited_share, figures.longest_wait_share
    if waited is not None and longest >= LONGEST_WAIT:
        reason = f"{waited:.0%} of thread time waited for a core"
        if longest > 2 * waited:
            reason += f", one thread for {longest:.0%} of the steps"
        return [reason]
    steps = figures.steps_disturbed or 0
    if steps < max(2, STEPS * intervals):
        return []
    quota = " or for the CPU quota" if figures.throttled_share else ""
    return [f"{steps} of {intervals} steps waited for a core{quota}"]


def over_ranks(documents: list[dict], names: Sequence[str] | None = None) -> dict:
    """The document of a run from those of its ranks: of the one that was disturbed most, as all
    wait for the slowest.  names: of the documents, where they are not those of rank 0, 1, ...

    lost_share is the sum: the ranks may have been disturbed one after the other.
    """
    if len(documents) == 1:
        return documents[0]
    disturbed = [document for document in documents if document["disturbed"]]
    if not disturbed:  # "unknown" is said of any rank
        unknown = [document for document in documents if document["disturbed"] is None]
        return unknown[0] if unknown else most_disturbed(documents)
    worst = most_disturbed(disturbed)
    rank = documents.index(worst)
    name = names[rank] if names else f"rank {rank}"
    if len(disturbed) > 1:
        name += f" (of {len(disturbed)} disturbed)"
    return summed_up(worst, name, documents)


def most_disturbed(documents: list[dict]) -> dict:
    """The document of the rank that lost most."""
    return max(documents, key=lambda document: document["lost_share"] or 0.0)


def summed_up(worst: dict, name: str, documents: list[dict]) -> dict:
    """The document of the rank of this name, with what all of them have lost."""
    document = dict(worst)
    first, *others = document["reasons"]
    document["reasons"] = [f"{name}: {first}", *others]
    unknown = [of_rank for of_rank in documents if of_rank["lost_share"] is None]
    if unknown:
        document["lost_share"] = None
        document["lost_share_reason"] = unknown[0]["lost_share_reason"]
    else:
        document["lost_share"] = min(1.0, sum(of_rank["lost_share"] for of_rank in documents))
        document["lost_share_reason"] = ""
    return explained(document, Disturbance)


def disturbance_text(document: dict) -> str:
    """What follows 'Disturbance: ' in a summary."""
    if document["disturbed"] is None:
        return f"unknown: {document['disturbed_reason']}"
    gpu = document.get("gpu")
    if not document["disturbed"]:
        is_silent = gpu and gpu["other_processes"] is None and gpu["lowered_by"] is None
        return "none seen; GPU: not known here" if is_silent else "none seen"
    lost = document["lost_share"]
    most = "far" if lost is None or lost >= MOST_LOST else f"up to {lost / (1 - lost):.0%}"
    parts = [*document["reasons"], f"times may be {most} too long; {CURE}"]
    if gpu and may_be_shared(gpu):
        parts.append(TAKE_TURNS)
    return "; ".join(parts)
