"""Which steps of a whole run are slow, and why?

An ordinary step is the median of the 101 steps around it, so that lengths that change over an epoch
are no slow steps.  A slow one takes more than that by a quarter, and by five times the spread of
the steps (1.4826 x the median absolute deviation).  What it takes beyond an ordinary step is given
to what happened in it, the longest first; the rest to the line in which its samples were, if an
ordinary step spends little there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.program.watched_process import FEW, WatchedProcess
from harness.base.text import count_of, shortened, significant
from harness.schema import Document, Unknown, field, known_or

AROUND = 101  # steps
LONGER = 0.25  # than an ordinary step, by this share of it
SPREADS = 5.0  # and by this many robust standard deviations
MOST_OF_IT = 0.5  # of what is not explained: a line that took so much is the cause
SELDOM = 0.25  # of a line's time in the slow step, at most, that it takes in an ordinary one
OF_STEP = 1.5  # times the step, at most, that samples in it stand for
LITTLE = 0.2  # of what a step takes beyond an ordinary one: not looked at any further
FAULT_S = 1e-4  # to read a page from a disk, at least
ALIKE = 0.5  # of the rank that a cause costs most: what it costs each of the others
SHOWN_SHARE = 1e-3  # of the run
TEXT = 60  # letters of a line in a sentence
COLLECTION, SAVE, LOADER = "garbage collection", "save", "loader start"
DATA, EVALUATION, COMPILATION = "data", "evaluation", "compilation"
ALLOCATOR, CALL, HELD = "allocator", "call of the program", "held the lock"
DISK, HOST_MEMORY = "disk", "host memory"
OTHER_RANK, UNKNOWN = "other rank", "unknown"
# Beneath a line: a rank may wait there for the others.
WAITING = ("torch.autograd.", "torch.distributed.")
WAITED = "other programs had the core"
RETRIED = "the GPU's allocator is short of memory, gives its cache back and tries again"
# Why no line is named.
ANY_LINE = "a collection begins wherever something is allocated"
NO_LINE = "the stack was not sampled there"
ANY_BATCH = "the line that asks for a batch; the time is the loader's"
LATE = "the late rank tells"


class SlowRow(Document):
    """Steps that took longer than ordinary ones, by one cause."""

    cause: str = field(
        "garbage collection, save, loader start, data, evaluation, compilation, allocator, call of"
        " the program, held the lock, disk, host memory, other rank, unknown"
    )
    rank: int | None = field("whose steps", null="those of all ranks")
    where: str | None = field("train.py:77: the line of the program", null=NO_LINE)
    steps: int = field("in which it was, of a rank")
    seconds: float = field("beyond ordinary steps, of a rank")
    share_of_run: float = field("the same, of the time of all steps")
    sentence: str = field("the cause and its cost in words")
    cure: str | None = field("what would help", null="none that is known to apply")


class Cause(NamedTuple):
    """Of a part of the time of a slow step."""

    cause: str
    what: str  # torch.save, generation 2, the text of a line
    where: str | None
    may_wait: bool = False  # for another rank: in a collective or a backward pass, or not known


class SlowSteps(NamedTuple):
    """Of one process."""

    ordinary: np.ndarray  # [N] seconds
    is_slow: np.ndarray  # [N] of bool
    causes: dict[int, dict[Cause, float]]  # by place of the step: seconds beyond an ordinary one


def slow_steps(process: WatchedProcess) -> SlowSteps:
    seconds = process.seconds
    series = pd.Series(seconds)
    ordinary = series.rolling(AROUND, center=True, min_periods=1).median().to_numpy()
    is_slow = np.zeros(len(seconds), bool)
    if len(seconds) >= FEW:
        beyond = seconds - ordinary
        spread = 1.4826 * np.median(np.abs(beyond - np.median(beyond)))
        is_slow = beyond > np.maximum(LONGER * ordinary, SPREADS * spread)
    middle = {name: float(np.median(process.steps[name])) for name in ("data", "waited")}
    causes = {}
    for place in np.flatnonzero(is_slow):
        beyond_s = float(seconds[place] - ordinary[place])
        record = process.slow.get(int(place))
        phases = {name: float(process.steps[name][place]) - middle[name] for name in middle}
        causes[int(place)] = causes_of(record, phases, beyond_s)
    return SlowSteps(ordinary, is_slow, causes)


def causes_of(record: dict | None, phases: dict[str, float], beyond_s: float) -> dict[Cause, float]:
    """What a step takes beyond an ordinary one, by cause.  phases: what it waited for data and for
    a core beyond an ordinary step."""
    times: dict[Cause, float] = defaultdict(float)
    left_s = beyond_s
    occasions = record["occasions"] if record else []
    for occasion in sorted(occasions, key=lambda row: -row["seconds"]):
        cause = Cause(occasion["what"], occasion["call"], occasion["where"])
        left_s -= given(times, cause, occasion["seconds"], left_s)
    if phases["waited"] > LITTLE * beyond_s:
        left_s -= given(times, Cause(UNKNOWN, WAITED, None), phases["waited"], left_s)
    if phases["data"] > LITTLE * beyond_s:
        starts = [cause for cause in times if cause.cause == LOADER]
        cause = starts[0] if starts else Cause(DATA, "", None)
        left_s -= given(times, cause, phases["data"], left_s)
    if times and left_s < LITTLE * beyond_s:
        largest = max(times, key=times.get)
        times[largest] += left_s
    else:
        times[cause_by_samples(record, left_s)] += left_s
    return dict(times)


def given(times: dict[Cause, float], cause: Cause, seconds: float, left_s: float) -> float:
    """How much of what is left a cause takes."""
    taken_s = min(seconds, left_s)
    if taken_s > 0:
        times[cause] += taken_s
    return max(0.0, taken_s)


def cause_by_samples(record: dict | None, left_s: float) -> Cause:
    """Of the time that nothing explains: a line, if it is long in this step alone."""
    lines = record["lines"] if record else []
    if record and record["retries"]:
        return Cause(ALLOCATOR, RETRIED, None)
    if record and record["pressure"] > MOST_OF_IT * left_s:
        return Cause(HOST_MEMORY, "", None)
    if not lines:
        return Cause(UNKNOWN, "", None, may_wait=True)
    if record["faults"] * FAULT_S > MOST_OF_IT * left_s:
        return Cause(DISK, "", None)
    line = max(lines, key=lambda row: row["seconds"] - row["ordinary"])
    what = line["text"] or line["function"]
    is_long = line["seconds"] - line["ordinary"] > MOST_OF_IT * left_s
    if line["seconds"] > OF_STEP * record["seconds"]:
        is_long = False  # a sample stands for the time since the one before, of other steps too
    if is_long and line["ordinary"] < SELDOM * line["seconds"]:
        is_held = line["held"] > MOST_OF_IT * line["seconds"]
        may_wait = (line["beneath"] or "").startswith(WAITING)
        return Cause(HELD if is_held else CALL, what, line["where"], may_wait)
    return Cause(UNKNOWN, "", line["where"] if is_long else None, may_wait=True)


# ---- Of all ranks --------------------------------------------------------------------------------


def with_other_ranks(slow: Sequence[SlowSteps]) -> list[SlowSteps]:
    """Ranks that train together wait for the late one: what a rank does not know of a step, and
    another one does, is that one's."""
    told = []
    for number, own in enumerate(slow):
        causes = {}
        for place, times in own.causes.items():
            late_s = 0.0
            for other, theirs in enumerate(slow):
                if other != number:
                    late_s = max(late_s, known_seconds(theirs.causes.get(place, {})))
            causes[place] = waiting_for_others(times, late_s)
        told.append(own._replace(causes=causes))
    return told


def known_seconds(times: dict[Cause, float]) -> float:
    """Of causes that are the rank's own."""
    return sum(seconds for cause, seconds in times.items() if not cause.may_wait)


def waiting_for_others(times: dict[Cause, float], late_s: float) -> dict[Cause, float]:
    """late_s: how late the latest of the others is, by causes of its own."""
    changed: dict[Cause, float] = defaultdict(float)
    for cause, seconds in times.items():
        if cause.may_wait and late_s > MOST_OF_IT * seconds:
            cause = Cause(OTHER_RANK, "", None)
        changed[cause] += seconds
    return dict(changed)


class OfRank(NamedTuple):
    """What one cause cost one rank."""

    rank: int
    steps: int
    seconds: float


def slow_rows(
    processes: Sequence[WatchedProcess], slow: Sequence[SlowSteps], of_ranks: Sequence[int]
) -> list[SlowRow]:
    """Largest first.  of_ranks: all that were seen."""
    steps: dict[tuple[Cause, int], int] = defaultdict(int)
    seconds: dict[tuple[Cause, int], float] = defaultdict(float)
    told_as = lines_told_once(slow)
    for process, own in zip(processes, slow, strict=True):
        for times in own.causes.values():
            for of_step, taken_s in times.items():
                cause = of_step._replace(may_wait=False)  # ranks are compared by now
                cause = told_as.get(cause, cause)
                steps[cause, process.rank] += 1
                seconds[cause, process.rank] += taken_s
    by_cause: dict[Cause, list[OfRank]] = defaultdict(list)
    for (cause, rank), taken_s in seconds.items():
        by_cause[cause].append(OfRank(rank, steps[cause, rank], taken_s))
    run_s, n_steps = times_of_ranks(processes)
    rows = []
    for cause, ranks in by_cause.items():
        groups = [[of_rank] for of_rank in ranks]
        longest_s = max(of_rank.seconds for of_rank in ranks)
        is_alike = min(of_rank.seconds for of_rank in ranks) > ALIKE * longest_s
        if len(ranks) == len(of_ranks) and is_alike:
            groups = [ranks]
        for group in groups:
            rows.append(row_of(cause, group, run_s, n_steps, len(of_ranks)))
    rows = [row for row in rows if row.share_of_run >= SHOWN_SHARE]
    return sorted(rows, key=lambda row: -row.seconds)


def lines_told_once(slow: Sequence[SlowSteps]) -> dict[Cause, Cause]:
    """A line that held the lock in some of its steps, and not in others, as far as samples tell, is
    told as what it was for longer."""
    seconds: dict[Cause, float] = defaultdict(float)
    for own in slow:
        for times in own.causes.values():
            for cause, taken_s in times.items():
                if cause.cause in (CALL, HELD):
                    seconds[cause._replace(may_wait=False)] += taken_s
    told_as = {}
    for cause, taken_s in seconds.items():
        other = cause._replace(cause=CALL if cause.cause == HELD else HELD)
        if seconds.get(other, 0.0) > taken_s:
            told_as[cause] = other
    return told_as


def times_of_ranks(processes: Sequence[WatchedProcess]) -> tuple[float, int]:
    """Mean seconds and steps of a rank, over all its parts."""
    ranks = {process.rank for process in processes}
    run_s = sum(float(process.seconds.sum()) for process in processes) / len(ranks)
    n_steps = sum(len(process.seconds) for process in processes) // len(ranks)
    return run_s, n_steps


def row_of(
    cause: Cause, group: Sequence[OfRank], run_s: float, n_steps: int, n_ranks: int
) -> SlowRow:
    """group: one rank, or all of them."""
    mean_s = sum(of_rank.seconds for of_rank in group) / len(group)
    steps = max(1, round(sum(of_rank.steps for of_rank in group) / len(group)))
    share = mean_s / run_s
    is_of_one = len(group) == 1 and n_ranks > 1
    subject = subject_of(cause)
    if is_of_one:
        subject = f"rank {group[0].rank}: {subject}"
    sentence = (
        f"{subject}: in {steps:,} of {count_of(n_steps, 'step')},"
        f" {duration(mean_s / steps)} each beyond an ordinary step, {percent(share)} of the time"
    )
    return SlowRow(
        cause=cause.cause,
        rank=group[0].rank if is_of_one else None,
        where=known_or(cause.where, why_no_line(cause)),
        steps=steps,
        seconds=mean_s,
        share_of_run=share,
        sentence=sentence,
        cure=cure_of(cause) or Unknown("none that is known to apply"),
    )


def why_no_line(cause: Cause) -> str:
    reasons = {COLLECTION: ANY_LINE, DATA: ANY_BATCH, OTHER_RANK: LATE}
    return reasons.get(cause.cause, NO_LINE)


def subject_of(cause: Cause) -> str:
    """What took the time, and where."""
    at = f" at {cause.where}" if cause.where else ""
    text = f" ({shortened(cause.what, TEXT)})" if cause.what else ""
    subjects = {
        COLLECTION: f"collection of garbage, {cause.what}{at}",
        SAVE: f"{cause.what}{at}",
        LOADER: f"a loader starts its workers{at}",
        DATA: "the step waits for data",
        EVALUATION: f"evaluation, {cause.what}{at}",
        COMPILATION: f"compilation{at}{text}",
        ALLOCATOR: f"{cause.what}{at}",
        CALL: f"a call{at}{text}",
        HELD: f"a call that holds the interpreter's lock{at}{text}",
        DISK: "pages are read from a disk",
        HOST_MEMORY: "memory of the host is short, its processes wait for it",
        OTHER_RANK: "waits for another rank",
    }
    if cause.cause == UNKNOWN:
        if cause.what:
            return f"unknown: {cause.what}"
        return f"unknown, longest{at}" if at else "unknown"
    return subjects[cause.cause]


def cure_of(cause: Cause) -> str | None:
    if cause.cause == COLLECTION and cause.where is None:
        return "gc.freeze() once what lives long is made: it is looked at no more"
    if cause.what == RETRIED:
        return "a smaller batch, or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    cures = {
        COLLECTION: "ask for collections less often",
        SAVE: "save in the background (torch.distributed.checkpoint.async_save), or less often",
        LOADER: "persistent_workers=True: the loader keeps its workers",
        DATA: "more workers of the loader (num_workers), or prefetch_factor",
        COMPILATION: "torch.compile(dynamic=True), or batches of few lengths",
        ALLOCATOR: "leave it out: the allocator uses its cache again",
        CALL: "do it less often, or on another thread",
        HELD: "do it less often, or in another process: it lets no thread run",
        HOST_MEMORY: "fewer workers of the loader, or more memory for this job",
    }
    return cures.get(cause.cause)


def duration(seconds: float) -> str:
    """'1.4 s', '38 ms'"""
    if seconds >= 1:
        return f"{significant(seconds, 2)} s"
    return f"{significant(1e3 * seconds, 2)} ms"


def percent(share: float) -> str:
    return f"{significant(100 * share, 2, 1)}%"
