"""When did each rank of a run reach the collectives that all of them have?

In a collective the last rank to arrive makes the others wait, so a slow rank has the shortest
collectives, and the shortest of all ranks is what the transfer takes.  The clocks of ranks on
several hosts differ, and so do those of GPUs: they are aligned by the ends of the collectives,
which all ranks leave together.  Processes of one host have one clock: if they leave far apart, they
waited for cores.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.attribution.collectives import ONE_TRACE, Collectives, collectives_of
from analysis.attribution.gpu_time import split_of_slices
from analysis.attribution.ledger.of_steps import exposed_communication, named_slices, of_steps
from analysis.trace.tables import RANK_IN_NAME, Trace, take_or
from analysis.trace.timeline import Timeline
from harness.base.text import count_of

# Ends of a collective on aligned clocks: if most differ by more than 1 ms and by more than this
# share of its duration, they do not tell who was late.  Threads of a busy CPU leave a long one some
# ms apart.
ENDS_MEET_US, ENDS_MEET_SHARE = 1e3, 0.1
# By which times of two processes on one clock may be off: calibrated for each, to a few us.
ONE_CLOCK_US = 100.0
PROCESS_FILE = re.compile(r"_process\d+\.")  # in the names of traces of profile_program.py
SAME_RUN_US = 86_400e6  # ranks that recorded a day apart are not of one run
EXPOSED_COLUMNS = ["start", "end", "us", "state", "cause", "collective"]


@dataclass
class RankTrace:
    """The part of a rank's trace that the comparison needs."""

    rank: int | None  # by the trace, else by the file's name
    world_size: int | None
    file: str
    mean_step_ms: float | None  # None: no step is marked
    steps: list[int]  # their numbers, where ProfilerStep marks them
    n_steps: int  # that the tables divide by, marked or not
    busy_ms: float | None  # of a step
    found: Collectives
    exposed: pd.DataFrame  # slices of the steps that are communication
    base_us: float  # time of the trace's 0 on the rank's own clock
    clock: str | None  # which one it is; None: not known, or that of a GPU
    slices: pd.DataFrame | None = None  # the ledger for a reader, where one asks for it

    def times(self, name: str) -> np.ndarray:
        """Starts or ends of the collectives on the rank's own clock, in us."""
        return self.found.events[name].to_numpy() + self.base_us

    def durations(self) -> np.ndarray:
        """Of the collectives, in us."""
        return (self.found.events["end"] - self.found.events["start"]).to_numpy()


def rank_facts(timeline: Timeline, keep_slices: bool) -> RankTrace:
    """keep_slices: whether a reader asks for them."""
    trace = timeline.trace
    mean_step_ms = None
    if timeline.steps_are_marked and len(timeline.steps):
        lengths_us = (timeline.steps["end"] - timeline.steps["start"]).to_numpy()
        mean_step_ms = float(np.mean(lengths_us / 1e3))
    numbers = []
    if timeline.steps_are_marked and timeline.steps_found is None and trace.steps_from is None:
        numbers = timeline.steps["number"].tolist()
    busy_ms = split_of_slices(timeline, of_steps(timeline)).busy_ms
    rank = rank_of(trace)
    slices = None
    if keep_slices:
        slices = named_slices(timeline, timeline.slices).assign(rank=-1 if rank is None else rank)
    found = collectives_of(timeline)
    return RankTrace(
        rank=rank,
        world_size=trace.world_size,
        file=trace.path.name,
        mean_step_ms=mean_step_ms,
        steps=numbers,
        n_steps=len(timeline.steps),
        busy_ms=busy_ms and busy_ms / len(timeline.steps),
        found=found,
        exposed=exposed_communication(timeline)[EXPOSED_COLUMNS],
        base_us=trace.base_us,
        clock=None if found.on_gpu else trace.host,
        slices=slices,
    )


def rank_of(trace: Trace) -> int | None:
    in_name = RANK_IN_NAME.search(trace.path.name)
    return int(in_name[1]) if trace.rank is None and in_name else trace.rank


def not_of_one_run(ranks: list[RankTrace]) -> str | None:
    """Why these traces cannot be those of the ranks of one run; None if they can."""
    numbers = [trace.rank for trace in ranks]
    if len(ranks) > 1 and all(PROCESS_FILE.search(trace.file) for trace in ranks):
        return "they are of processes that are no ranks of each other"
    if None in numbers:
        return "some tell no rank, by distributedInfo or by the name of the file"
    if len({*numbers}) < len(numbers):
        return "several are of the same rank"
    if len({trace.world_size for trace in ranks}) > 1:
        return "they are of runs with different numbers of ranks"
    apart_us = recorded_apart_us(ranks)
    if apart_us > SAME_RUN_US:
        return f"they were recorded {apart_us / SAME_RUN_US:,.0f} days apart"
    return None


def recorded_apart_us(ranks: list[RankTrace]) -> float:
    """By how much the first collectives of the ranks differ."""
    begins = [trace.times("start")[0] for trace in ranks if len(trace.found.events)]
    return max(begins) - min(begins) if begins else 0.0


# ---- The same collectives on all ranks -----------------------------------------------------------


class NotComparable(Exception):
    """Why the ranks' collectives do not tell who was late."""


@dataclass
class CommonCollectives:
    """Collectives that several ranks of a group have:
    rows[i, j] is the row of the j-th in ranks[members[i]]."""

    members: list[int]
    rows: np.ndarray  # [members, collectives]
    complete: bool  # all ranks of the group are here


def steps_in_common(ranks: list[RankTrace]) -> set[int] | None:
    """The numbers of the steps that all ranks have, if some have others; None: all have the same,
    or marked none.  Raises NotComparable if there is no such step."""
    steps = [{*trace.steps} for trace in ranks]
    common = set.intersection(*steps)
    if not common and all(steps):
        raise NotComparable("the ranks recorded no step in common")
    return common if common and common != set.union(*steps) else None


def common_collectives(ranks: list[RankTrace], steps: set[int] | None) -> list[CommonCollectives]:
    """The collectives that ranks have in common, by process group.  Raises NotComparable if they
    are in another order.

    The last ones of each: if recording began in the middle of a step, the first ones are missing.
    steps: only those of these.
    """
    if min(len(trace.found.events) for trace in ranks) == 0:
        raise NotComparable("no collectives in the traces")
    groups = []
    for (*_, group_size), of_ranks in rows_of_groups(ranks, steps).items():
        n = min(map(len, of_ranks.values()))
        members, rows = list(of_ranks), np.stack([rows[-n:] for rows in of_ranks.values()])
        check_order(ranks, members, rows)
        size = int(group_size)
        if size <= 0:  # not recorded
            size = ranks[0].world_size or len(ranks)
        groups.append(CommonCollectives(members, rows, complete=len(members) == size))
    return groups


def rows_of_groups(
    ranks: list[RankTrace], steps: set[int] | None
) -> dict[tuple[str, ...], dict[int, np.ndarray]]:
    """By process group (name, ranks, size) and by rank, which of `ranks` it is, the rows of its
    collectives.  steps: only those of these."""
    rows_of: dict[tuple[str, ...], dict[int, np.ndarray]] = {}
    for i, trace in enumerate(ranks):
        events = trace.found.events
        of_groups = events.groupby(["group", "ranks", "group_size"], dropna=False).indices
        for group, rows in of_groups.items():
            if steps:
                step = take_or(trace.steps, events["step"].to_numpy()[rows], -1)
                rows = rows[np.isin(step, [*steps])]
            if len(rows):
                rows_of.setdefault(tuple(map(str, group)), {})[i] = rows
    return rows_of


def check_order(ranks: list[RankTrace], members: list[int], rows: np.ndarray) -> None:
    """Raise NotComparable if the collectives of a group are of other kinds on some rank.  rows:
    [members, collectives]."""
    first = None
    for i, rows_of_rank in zip(members, rows, strict=True):
        kinds = ranks[i].found.events["kind"].to_numpy()[rows_of_rank]
        if first is None:
            first = kinds
        elif (kinds != first).any():
            raise NotComparable("the ranks do not have the same collectives in the same order")


# ---- On one clock --------------------------------------------------------------------------------


@dataclass
class Arrivals:
    """When each rank reached and left the collectives that all ranks have, on one clock, in us;
    those beside the steps help to align the clocks."""

    reached: np.ndarray  # [ranks, collectives]
    left: np.ndarray  # [ranks, collectives]
    clock_offsets: np.ndarray  # [ranks], of each rank's clock against the first's
    one_clock: bool  # all ranks have the same
    in_steps: np.ndarray  # [collectives], whether it is in a step of every rank

    @property
    def ends_differ(self) -> np.ndarray:
        """How far apart the ranks left each collective, [collectives]."""
        return self.left.max(axis=0) - self.left.min(axis=0)

    @property
    def late(self) -> np.ndarray:
        """How long after the first one each rank arrived, [ranks, collectives of the steps]."""
        return (self.reached - self.reached.min(axis=0))[:, self.in_steps]

    @property
    def compared_us(self) -> float:
        """From the first arrival at a collective of the steps until the last rank left one."""
        last = self.left[:, self.in_steps].max()
        return float(last - self.reached[:, self.in_steps].min())


def align_clocks(ranks: list[RankTrace], groups: list[CommonCollectives]) -> Arrivals:
    """The arrivals of all ranks; several clocks are aligned by the ends of collectives.  Raises
    NotComparable."""
    pairs = [*zip(ranks, rows_of_all(ranks, groups), strict=True)]
    start = np.stack([trace.times("start")[i] for trace, i in pairs])
    end = np.stack([trace.times("end")[i] for trace, i in pairs])
    in_steps = [trace.found.events["step"].to_numpy()[i] >= 0 for trace, i in pairs]
    one_clock = ranks[0].clock is not None and len({trace.clock for trace in ranks}) == 1
    offsets = np.zeros(len(ranks)) if one_clock else np.median(end - end[0], axis=1)
    arrivals = Arrivals(
        reached=start - offsets[:, None],
        left=end - offsets[:, None],
        clock_offsets=offsets,
        one_clock=one_clock,
        in_steps=np.all(in_steps, axis=0),
    )
    if one_clock and (arrivals.left.min(axis=0) < arrivals.reached.max(axis=0)).all():
        raise NotComparable(
            "no collective of one rank overlaps with that of the others: the traces are of"
            " different runs"
        )
    if not arrivals.in_steps.any():
        raise NotComparable("no collective is in the steps of all ranks")
    return arrivals


def rows_of_all(ranks: list[RankTrace], groups: list[CommonCollectives]) -> np.ndarray:
    """[ranks, collectives], the rows of those that all ranks have.  Raises NotComparable."""
    of_all = [group.rows for group in groups if len(group.members) == len(ranks)]
    if not of_all:
        raise NotComparable("no process group has all these ranks")
    return np.concatenate(of_all, axis=1)


def caution_of(arrivals: Arrivals) -> str | None:
    """With what caution arrivals are to be taken; None: with none.  Raises NotComparable if the
    clocks do not meet."""
    apart_us = float(np.median(arrivals.ends_differ))
    longest_us = float(np.median((arrivals.left - arrivals.reached).max(axis=0)))
    if apart_us <= max(ENDS_MEET_US, ENDS_MEET_SHARE * longest_us):
        return None
    caution = f"ranks waited for cores: collectives end {apart_us / 1e3:,.1f} ms apart"
    if arrivals.one_clock:
        return caution
    raise NotComparable(f"the clocks do not meet, or {caution}")


# ---- How late, and how long they waited ----------------------------------------------------------


class Lateness(NamedTuple):
    """How late each rank is; of the steps that all ranks recorded, times are those of one."""

    n_steps: int
    one_clock: bool
    caution: str | None  # what is not compared, or what else was waited for
    late_us: np.ndarray  # [ranks, collectives], after the first to arrive
    clock_offsets_us: np.ndarray  # [ranks]
    caused_ms: np.ndarray  # [ranks], in which only this rank was missing
    times_last: np.ndarray  # [ranks], of the collectives at which ranks arrive apart
    n_apart: int  # of these
    compared_ms: float  # from the first arrival to the last end


class Comparison(NamedTuple):
    """What the collectives of several ranks tell of each other."""

    lateness: Lateness | None  # None: nothing, as `why` says
    # Of each rank, [its collectives], how long it waited in each, in us; NaN if unknown.
    waiting_us: list[np.ndarray] | None
    why: str  # why waiting is not known, where it is not


def compare_arrivals(ranks: list[RankTrace]) -> Comparison:
    """A rank waits itself for as long as its part of a collective takes longer than the shortest of
    all ranks."""
    try:
        steps = steps_in_common(ranks)
        groups = common_collectives(ranks, steps)
        arrivals = align_clocks(ranks, groups)
        caution = caution_of(arrivals)
    except NotComparable as error:
        return Comparison(None, None, str(error))
    if steps:
        only = f"only {count_of(len(steps), 'step')} compared, which all ranks recorded"
        caution = f"{caution}; {only}" if caution else only
    n_steps = len(steps) if steps else ranks[0].n_steps
    return Comparison(lateness_of(arrivals, n_steps, caution), waiting_of(ranks, groups), ONE_TRACE)


def lateness_of(arrivals: Arrivals, n_steps: int, caution: str | None) -> Lateness:
    late_us = arrivals.late
    n_ranks = len(late_us)
    # The last rank of each collective causes the time since the one before it.
    last, before_us = late_us.argmax(axis=0), np.sort(late_us, axis=0)[-2]
    caused_us = np.bincount(last, weights=late_us.max(axis=0) - before_us, minlength=n_ranks)
    clock_error_us = ONE_CLOCK_US if arrivals.one_clock else arrivals.ends_differ.max()
    apart = late_us.max(axis=0) > clock_error_us
    return Lateness(
        n_steps=n_steps,
        one_clock=arrivals.one_clock,
        caution=caution,
        late_us=late_us,
        clock_offsets_us=arrivals.clock_offsets,
        caused_ms=caused_us / 1e3 / n_steps,
        times_last=np.bincount(last[apart], minlength=n_ranks),
        n_apart=int(apart.sum()),
        compared_ms=arrivals.compared_us / 1e3 / n_steps,
    )


def waiting_of(ranks: list[RankTrace], groups: list[CommonCollectives]) -> list[np.ndarray]:
    """For each rank and collective, how much longer it took than on the rank where it was shortest,
    in us; NaN if not all ranks of its group are here."""
    waiting_us = [np.full(len(trace.found.events), np.nan) for trace in ranks]
    for group in groups:
        if not group.complete:
            continue
        pairs = [*zip(group.members, group.rows, strict=True)]
        us = np.stack([ranks[i].durations()[rows] for i, rows in pairs])  # [members, collectives]
        for (i, rows), longer_us in zip(pairs, us - us.min(axis=0), strict=True):
            waiting_us[i][rows] = longer_us
    return waiting_us
