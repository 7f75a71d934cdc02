"""Straggler detection: the ranks of one run side by side, and the order in which they reach their
collectives.

In a collective the last rank to arrive makes the others wait, so a slow rank has the shortest
collectives, and the shortest of all ranks is what the transfer takes.  What counts is the waiting
that a rank causes, not how often it is last: most collectives begin within microseconds.  The
clocks of ranks on several hosts differ, and so do those of GPUs: they are aligned by the ends of
the collectives, which all ranks leave together.  Processes of one host have one clock: if they
leave far apart, they waited for cores.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.attribution.collectives import ONE_TRACE, Collectives, collectives_of
from analysis.attribution.gpu_time import timeline_of_slices
from analysis.attribution.ledger import COMMUNICATION, exposed_communication, named_slices, of_steps
from analysis.trace.tables import RANK_IN_NAME, take_or
from analysis.trace.timeline import Timeline
from harness.base.sections import Section
from harness.base.tables import Column, column
from harness.base.text import count_of, read_ini

# Ends of a collective on aligned clocks: if most differ by more than 1 ms and by more than this
# share of its duration, they do not tell who was late.  Threads of a busy CPU leave a long one some
# ms apart.
ENDS_MEET_US, ENDS_MEET_SHARE = 1e3, 0.1
ONE_CLOCK_US = (
    100.0  # by which times of two processes on it may be off: calibrated for each, to a few us
)
PROCESS_FILE = re.compile(r"_process\d+\.")  # in the names of traces of profile_program.py
SAME_RUN_US = 86_400e6  # ranks that recorded a day apart are not of one run
WORTH_NAMING = 0.01  # of the time: less waiting than this makes no straggler
WORTH_BLAMING = 0.25  # of what a straggler costs: by less than this no part of its step explains it


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
        return (self.found.events["end"] - self.found.events["start"]).to_numpy()


@dataclass
class CommonCollectives:
    """Collectives that several ranks of a group have:
    rows[i, j] is the row of the j-th in ranks[members[i]]."""

    members: list[int]
    rows: np.ndarray  # [members, collectives]
    complete: bool  # all ranks of the group are here


def rank_facts(timeline: Timeline, keep_slices: bool) -> RankTrace:
    """keep_slices: whether a reader asks for them."""
    trace = timeline.trace
    steps = timeline.steps if timeline.steps_are_marked else timeline.steps.iloc[:0]
    busy = timeline_of_slices(timeline, of_steps(timeline))["busy_ms"]
    in_name = RANK_IN_NAME.search(trace.path.name)
    rank = int(in_name[1]) if trace.rank is None and in_name else trace.rank
    numbers = (
        steps["number"].tolist()
        if timeline.steps_found is None and trace.steps_from is None
        else []
    )
    found = collectives_of(timeline)
    columns = ["start", "end", "us", "state", "cause", "collective"]
    slices = None
    if keep_slices:
        slices = named_slices(timeline, timeline.slices).assign(rank=-1 if rank is None else rank)
    return RankTrace(
        rank=rank,
        world_size=trace.world_size,
        file=trace.path.name,
        mean_step_ms=(
            float(np.mean((steps["end"] - steps["start"]).to_numpy() / 1e3)) if len(steps) else None
        ),
        steps=numbers,
        n_steps=len(timeline.steps),
        busy_ms=busy and busy / len(timeline.steps),
        found=found,
        exposed=exposed_communication(timeline)[columns],
        base_us=trace.base_us,
        clock=None if found.on_gpu else trace.host,
        slices=slices,
    )


def not_of_one_run(ranks: list[RankTrace]) -> str | None:
    """Why these traces cannot be those of the ranks of one run; None if they can."""
    numbers = [one.rank for one in ranks]
    if len(ranks) > 1 and all(PROCESS_FILE.search(one.file) for one in ranks):
        return "they are of processes that are no ranks of each other"
    if None in numbers:
        return "some tell no rank, by distributedInfo or by the name of the file"
    if len({*numbers}) < len(numbers):
        return "several are of the same rank"
    if len({one.world_size for one in ranks}) > 1:
        return "they are of runs with different numbers of ranks"
    begins = [one.times("start")[0] for one in ranks if len(one.found.events)]
    if begins and (apart := max(begins) - min(begins)) > SAME_RUN_US:
        return f"they were recorded {apart / SAME_RUN_US:,.0f} days apart"
    return None


# ---- The same collectives on all ranks -----------------------------------------------------------


class NotComparable(Exception):
    """Why the ranks' collectives do not tell who was late."""


def steps_in_common(ranks: list[RankTrace]) -> set[int] | None:
    """The numbers of the steps that all ranks have, if some have others; None: all have the same,
    or marked none.  Raises NotComparable if there is no such step."""
    steps = [{*one.steps} for one in ranks]
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
    if min(len(one.found.events) for one in ranks) == 0:
        raise NotComparable("no collectives in the traces")
    rows_of: dict[tuple, dict[int, np.ndarray]] = {}
    for i, one in enumerate(ranks):
        for key, rows in one.found.events.groupby(
            ["group", "ranks", "group_size"], dropna=False
        ).indices.items():
            if steps:
                step = take_or(one.steps, one.found.events["step"].to_numpy()[rows], -1)
                rows = rows[np.isin(step, [*steps])]
            if len(rows):
                rows_of.setdefault(tuple(map(str, key)), {})[i] = rows
    out = []
    for (*_, size), of_ranks in rows_of.items():
        n = min(map(len, of_ranks.values()))
        members, rows = list(of_ranks), np.stack([rows[-n:] for rows in of_ranks.values()])
        kinds = [
            ranks[i].found.events["kind"].to_numpy()[which]
            for i, which in zip(members, rows, strict=True)
        ]
        if any((other != kinds[0]).any() for other in kinds):
            raise NotComparable("the ranks do not have the same collectives in the same order")
        group_size = int(size) if int(size) > 0 else ranks[0].world_size or len(ranks)
        out.append(CommonCollectives(members, rows, len(members) == group_size))
    return out


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


def align_clocks(
    ranks: list[RankTrace], groups: list[CommonCollectives]
) -> tuple[Arrivals, str | None]:
    """The arrivals of all ranks; several clocks are aligned by the ends of collectives.  And with
    what caution they are to be taken.  Raises NotComparable."""
    of_all = [one.rows for one in groups if len(one.members) == len(ranks)]
    if not of_all:
        raise NotComparable("no process group has all these ranks")
    which = np.concatenate(of_all, axis=1)  # [ranks, collectives]
    pairs = [*zip(ranks, which, strict=True)]
    start, end = (np.stack([one.times(key)[i] for one, i in pairs]) for key in ("start", "end"))
    one_clock = ranks[0].clock is not None and len({one.clock for one in ranks}) == 1
    offsets = np.zeros(len(ranks)) if one_clock else np.median(end - end[0], axis=1)
    in_steps = [one.found.events["step"].to_numpy()[i] >= 0 for one, i in pairs]
    found = Arrivals(
        start - offsets[:, None],
        end - offsets[:, None],
        offsets,
        one_clock,
        np.all(in_steps, axis=0),
    )
    if one_clock and (found.left.min(axis=0) < found.reached.max(axis=0)).all():
        why = (
            "no collective of one rank overlaps with that of the others: the traces are of"
            " different runs"
        )
        raise NotComparable(why)
    if not found.in_steps.any():
        raise NotComparable("no collective is in the steps of all ranks")
    apart, longest = (
        float(np.median(found.ends_differ)),
        float(np.median((end - start).max(axis=0))),
    )
    if apart <= max(ENDS_MEET_US, ENDS_MEET_SHARE * longest):
        return found, None
    caution = f"ranks waited for cores: collectives end {apart / 1e3:,.1f} ms apart"
    if one_clock:
        return found, caution
    raise NotComparable(f"the clocks do not meet, or {caution}")


# ---- Who was late --------------------------------------------------------------------------------


def compare_ranks(ranks: list[RankTrace]) -> tuple[dict, list[np.ndarray] | None, str]:
    """Step times, communication and lateness of each rank, in the order of `ranks`; the straggler,
    if one causes most of the waiting.  All of it is of the steps: times are those of one, and
    collectives are counted over all of them.  And how long each rank waited in each of its
    collectives, in us, NaN if unknown; None, and why, if nothing is known.

    A rank waits itself for as long as its part of a collective takes longer than the shortest of
    all ranks.
    """
    rows = [facts_row(one) for one in ranks]
    try:
        steps = steps_in_common(ranks)
        groups = common_collectives(ranks, steps)
        arrivals, caution = align_clocks(ranks, groups)
    except NotComparable as error:
        out = {
            "rows": rows,
            "collectives_compared": 0,
            "straggler": None,
            "straggler_reason": str(error),
        }
        return out, None, str(error)
    if steps:
        only = f"only {count_of(len(steps), 'step')} compared, which all ranks recorded"
        caution = f"{caution}; {only}" if caution else only
    late, n = arrivals.late, len(steps) if steps else ranks[0].n_steps
    # The last rank of each collective causes the time since the one before it, in ms of one of
    # these steps.
    last, before = late.argmax(axis=0), np.sort(late, axis=0)[-2]
    caused_ms = np.bincount(last, weights=late.max(axis=0) - before, minlength=len(late)) / 1e3 / n
    spread = late.max(axis=0) > (ONE_CLOCK_US if arrivals.one_clock else arrivals.ends_differ.max())
    times_last = np.bincount(last[spread], minlength=len(ranks))
    for i, row in enumerate(rows):
        row |= {"clock_offset_us": float(arrivals.clock_offsets[i])}
        row |= {
            "mean_lateness_us": float(late[i].mean()),
            "median_lateness_us": float(np.median(late[i])),
        }
        row |= {"caused_waiting_ms": float(caused_ms[i]), "last_to_arrive": int(times_last[i])}
    out = {
        "rows": rows,
        "collectives_compared": late.shape[1],
        "steps_compared": n,
        "one_clock": arrivals.one_clock,
    }
    out |= {
        "collectives_with_spread": int(spread.sum()),
        "excess_waiting_ms": float(caused_ms.sum()),
    }
    out |= {"caution": caution} if caution else {}
    within = (one[:, arrivals.in_steps] for one in (arrivals.left, arrivals.reached))
    compared_ms = float(next(within).max() - next(within).min()) / 1e3 / n
    out |= straggler(ranks, caused_ms, times_last, compared_ms)
    return out, waiting_of(ranks, groups), ONE_TRACE


def facts_row(one: RankTrace) -> dict:
    in_steps = (one.found.events["step"] >= 0).to_numpy()
    in_collectives_ms = float(one.durations()[in_steps].sum() / 1e3 / one.n_steps)
    row = {
        "rank": one.rank,
        "file": one.file,
        "mean_step_ms": one.mean_step_ms,
        "gpu_busy_ms": one.busy_ms,
    }
    return row | {"in_collectives_ms": in_collectives_ms, "collectives": int(in_steps.sum())}


def waiting_of(ranks: list[RankTrace], groups: list[CommonCollectives]) -> list[np.ndarray]:
    """For each rank and collective, how much longer it took than on the rank where it was shortest,
    in us; NaN if not all ranks of its group are here."""
    out = [np.full(len(one.found.events), np.nan) for one in ranks]
    for group in (one for one in groups if one.complete):
        pairs = [*zip(group.members, group.rows, strict=True)]
        us = np.stack([ranks[i].durations()[rows] for i, rows in pairs])  # [members, collectives]
        for (i, rows), longer in zip(pairs, us - us.min(axis=0), strict=True):
            out[i][rows] = longer
    return out


def straggler(
    ranks: list[RankTrace], caused: np.ndarray, last: np.ndarray, compared_ms: float
) -> dict:
    """The rank that causes most of the excess waiting (`caused`, in ms of a step by rank), or why
    none is named.

    last: in how many collectives that begin apart each rank was the last."""
    absent = (ranks[0].world_size or len(ranks)) - len(ranks)
    if absent:
        return {
            "straggler": None,
            "straggler_reason": f"{count_of(absent, 'rank')} of the run absent, which may be it",
        }
    worst, total = int(caused.argmax()), caused.sum()
    if total < WORTH_NAMING * compared_ms:
        return {
            "straggler": None,
            "straggler_reason": f"ranks wait for one another for only {total:.3f} ms per step",
        }
    if caused[worst] <= total / 2 or last[worst] < 2:
        return {
            "straggler": None,
            "straggler_reason": "no rank causes more than half of the excess waiting",
        }
    return {"straggler": ranks[worst].rank}


# ---- Why it is late ------------------------------------------------------------------------------

_TABLES = read_ini(Path(__file__).with_name("what_to_do.ini"))
WHY_LATE, IF_LATE = _TABLES["why late"], _TABLES["late"]  # by the part of its step that is longer
NO_PART = "measure its network and its steps alone: ./run_study.sh collectives"


def parts_of_rank(document: dict) -> dict:
    """What a rank's own trace has beside the others', communication apart: ms of a step, and events
    in it."""
    step, verdict = document["attribution"]["ms_per_step"], document["verdict"]
    shares = {name: share for name, share in verdict["shares"].items() if name in WHY_LATE}
    work = (
        verdict["shares"]["compute"] + verdict["shares"]["memory"] + verdict["unclassified_share"]
    )
    parts = {"work": work, **shares, "idle": verdict["unrecorded_idle_share"]}
    events = [
        row["count_per_step"] for row in document["kernels"] if row["category"] != COMMUNICATION
    ]
    parts_ms = {name: share * step for name, share in parts.items()}
    return {"parts_ms": parts_ms, "kernels_per_step": sum(events) if events else None}


def why_late(comparison: dict) -> dict:
    """Of the straggler: in which part of its step it differs most from the median of the others,
    what it costs each of these in ms of a step, and what to do.  {} without one.  The rows have the
    parts of each rank, and its waiting."""
    if comparison["straggler"] is None:
        return {}
    own = next(row for row in comparison["rows"] if row["rank"] == comparison["straggler"])
    others = [row for row in comparison["rows"] if row is not own]
    usual = {
        name: float(np.median([row["parts_ms"][name] for row in others]))
        for name in own["parts_ms"]
    }
    more = {name: ms - usual[name] for name, ms in own["parts_ms"].items()}
    # What a computation hides of the waiting costs nothing.
    waits = [row["waiting_ms"] for row in others if row["waiting_ms"] is not None]
    saves = min([own["caused_waiting_ms"], *([float(np.median(waits))] if waits else [])])
    part = max(more, key=more.get)
    if more[part] < WORTH_BLAMING * own["caused_waiting_ms"]:
        why = "no part of its own step is longer"
        return {"straggler_saves_ms": saves, "straggler_why": why, "straggler_next": NO_PART}
    figures = f"{own['parts_ms'][part]:.2f} ms of a step, the others' median {usual[part]:.2f}"
    if part == "work" and own["kernels_per_step"]:
        n, usual_n = (
            own["kernels_per_step"],
            float(np.median([row["kernels_per_step"] for row in others])),
        )
        figures += f"; kernels {n:,.0f}, {usual_n:,.0f}"
    why = WHY_LATE[part].format(events="kernels" if own["kernels_per_step"] else "operators")
    return {
        "straggler_saves_ms": saves,
        "straggler_why": f"{why} ({figures})",
        "straggler_next": IF_LATE[part],
    }


# ---- For a reader --------------------------------------------------------------------------------


def rank_columns(comparison: dict) -> list[Column]:
    late = [
        column("causes ms", "caused_waiting_ms", "~3"),
        column(
            f"last in {count_of(comparison.get('steps_compared', 0), 'step')}", "last_to_arrive"
        ),
        column("late us", "mean_lateness_us", "~1"),
        column("clock offset us", "clock_offset_us", "~1"),
    ]
    return [
        column("rank", "rank"),
        column("host ms", "mean_step_ms", "~3"),
        column("GPU busy ms", "gpu_busy_ms", "~3"),
        column("peak MB", "peak_memory_mb", "~1"),
        column("exposed ms", "exposed_comm_ms", "~3"),
        column("waits ms", "waiting_ms", "~3"),
        *(late if comparison["collectives_compared"] else []),
        column("bound", "bound", left=True),
    ]


def compared_text(comparison: dict) -> str:
    """'56 collectives in 4 steps'; '' where none could be compared."""
    if not comparison["collectives_compared"]:
        return ""
    found = count_of(comparison["collectives_compared"], "collective")
    return f"{found} in {count_of(comparison['steps_compared'], 'step')}"


def straggler_text(comparison: dict) -> str:
    caution = f"; {comparison['caution']}" if "caution" in comparison else ""
    if comparison["straggler"] is None:
        return f"No straggler: {comparison['straggler_reason']}{caution}"
    row = next(row for row in comparison["rows"] if row["rank"] == comparison["straggler"])
    return (
        f"Rank {row['rank']} is a straggler: it causes {row['caused_waiting_ms']:.2f} of"
        f" {comparison['excess_waiting_ms']:.2f} ms per step in which one rank is missing, last in"
        f" {row['last_to_arrive']} of {comparison['collectives_with_spread']} that ranks reach"
        f" apart, of {compared_text(comparison)}; {comparison['straggler_why']}{caution}"
    )


def rank_section(analysis: dict) -> Section:
    """The ranks side by side, and the straggler; empty for a single trace."""
    if (comparison := analysis.get("ranks")) is None:
        return Section("Ranks")
    clocks = (
        "the clock of their host"
        if comparison.get("one_clock")
        else "clocks aligned by the ends of collectives"
    )
    note = ["All ms are of one step"]
    if of := compared_text(comparison):
        note[0] += f"; last: how often to arrive, late: mean, of {of}, on {clocks}"
    columns, rows = rank_columns(comparison), comparison["rows"]
    return Section(
        "Ranks", columns, rows, note, {"Straggler": straggler_text(comparison)}, figure="ranks"
    )
