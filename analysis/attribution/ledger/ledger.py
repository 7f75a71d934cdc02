"""One ledger of time: a trace as disjoint slices, each with its owner.  The tables of the step are
group-bys of it.

**GPU.**  A slice belongs to the event that works at that time: computation before communication
before copies, within a class the one that began first; `overlaps` tells what runs beneath it.
Several devices are one: it is idle when none works.  Idle time has the cause of the gap
(IDLE_CAUSES) and the event that follows.  Up to the end of that one's launch call the host is the
cause, by the first that applies to a thread that launches: it fetched data, a call allocated memory
or waited for the GPU, another took long, it ran code of the program or an operator on the CPU, it
prepared the launch.  Then the event was
queued behind communication or a copy, or it took its latency, each for LATENCY_US at most; the rest
is unknown.  The time between two events of one replay of a graph is the GPU's own, once the call
has returned.  Where the GPU has no kernels of communication, as with gloo, a collective of the host
that was in progress comes after data in this order, with all the time that the GPU was idle: it is
exposed, as where a GPU has its own.

**Host, without a GPU.**  A slice belongs to the innermost event of the thread that runs the steps
or, where that is no operator, of one that runs the backward pass for it.  It is communication while
a collective is in progress, the one that began first, unless this event is an operator that works
on tensors.  Time without such work is idle: views, allocation, autograd, starting a collective,
Python.

**Which time.**  `of_steps` marks the time of the steps, to which `us` adds up.  On a GPU that is
one window of the trace (Timeline.window), gaps between steps included, since the GPU runs behind
the host, and without what belongs to no step (left_out); a slice has the step of its event, an idle
one of the event that follows.  A profiler slows the host down, and not the GPU's work.  So where
the run tells how long its other steps took, `us` of idle slices are reduced, all by the same
factor, until the steps take as long (Timeline.idle_left).  On a host it is the steps alone, without
gaps between them, and what overlaps in two steps counts in the first.  Events that go on after
their step count in it until it ends.
"""

import numpy as np
import pandas as pd

from analysis.attribution.components import (
    BETWEEN,
    COMMUNICATION,
    IDLE,
    OVERHEAD,
    UNATTRIBUTED,
    categories_of,
    classes_of,
)
from analysis.attribution.intervals import slices_of
from analysis.attribution.ledger.host_activity import occasional_times
from analysis.attribution.ledger.kinds import (
    BENEATH,
    CAUSES,
    COMMUNICATES,
    IDLES,
    KINDS,
    NUMBER,
    RESTS,
    STATES,
)
from analysis.attribution.ledger.on_gpu import gpu_slices
from analysis.attribution.ledger.on_host import host_slices
from analysis.attribution.once import few_of
from analysis.trace.tables import different_pairs, take_or
from analysis.trace.timeline import Timeline


def ledger(timeline: Timeline) -> pd.DataFrame:
    """A row for each slice of the trace, in order, none overlapping another: of a timeline that has
    all but these.

    start, end, us; step: row of steps, -1 outside of them; of_steps; apart: within the steps, but
    what only few of them do; rank (-1: unknown); where: stream or thread; state: working, waiting
    (for another thread, data, other ranks, a collective of the host) or idle; cause: of CAUSES,
    nothing where it works; kind: of KINDS, or idle; component, phase, category, class; operator:
    row of host, or -1; event: row of gpu, else of host, of the owner or, for idle time of a GPU, of
    the event that follows, or -1; collective: row of collectives_of(timeline).events that it
    belongs to, or -1; overlaps: what runs beneath it.
    """
    slices = gpu_slices(timeline) if timeline.on_gpu else host_slices(timeline)
    slices = without_occasional(timeline, slices)
    kind, cause = slices["kind"].to_numpy(), slices["cause"].to_numpy()
    owner = slices.pop("owner").to_numpy()
    table, rest, between = timeline.host, OVERHEAD, BETWEEN  # of time without an owner
    if timeline.on_gpu:
        table, rest, between = timeline.gpu, IDLE, IDLE
    slices["component"] = labels_of(table["component"], owner, rest, UNATTRIBUTED)
    slices["phase"] = labels_of(table["phase"], owner, between, BETWEEN)
    slices["category"] = labels_of(table["category"], owner, rest, rest)
    # Of a GPU, for a collective of the host
    waits = (owner < 0) & (slices["collective"].to_numpy() >= 0)
    slices.loc[waits, ["category", "phase"]] = [COMMUNICATION, BETWEEN]
    idle = kind == IDLES
    slices["component"] = components_of(slices, kind == COMMUNICATES, idle, rest)
    fetches = np.zeros(len(slices), bool)
    if not timeline.on_gpu:
        fetches = cause == NUMBER["data"]
    rules = {COMMUNICATION: kind == COMMUNICATES, "data": fetches, rest: idle}
    slices["class"] = with_rules(classes_of(slices["phase"], slices["category"]), rules)
    slices["kind"] = pd.Categorical.from_codes(kind, [*KINDS, IDLE])
    slices["cause"] = pd.Categorical.from_codes(cause, CAUSES)
    slices["state"] = pd.Categorical.from_codes(slices["state"], STATES)
    slices["overlaps"] = pd.Categorical.from_codes(slices["overlaps"], BENEATH)
    slices["where"] = places_of(timeline, owner)
    slices["us"] = slices["end"] - slices["start"]
    slices["rank"] = -1 if timeline.trace.rank is None else timeline.trace.rank
    rows = ("step", "rank", "operator", "event", "collective")
    return slices.astype(dict.fromkeys(rows, np.int32))


def without_occasional(timeline: Timeline, slices: pd.DataFrame) -> pd.DataFrame:
    """Slices cut at the occasional times, with the column `apart`: whether they are no part of the
    steps therefore. Of a GPU these are idle slices, and events that were launched at such a time.
    Where the trace has a single step, waiting for compilation is start-up."""
    n_steps, times = len(timeline.steps), occasional_times(timeline)
    spans = slices_of(times)
    if len(times):
        slices = cut_at(slices, spans.edges)
    rests = (slices["state"] == RESTS).to_numpy()
    within = spans.at(slices["start"].to_numpy()) >= 0
    if n_steps == 1:  # all of it is compilation
        cause = np.where(within & rests, NUMBER["start_up"], slices["cause"])
        return slices.assign(apart=False, cause=cause)
    of_steps = slices["of_steps"].to_numpy()
    apart = within & rests if timeline.on_gpu else within
    start_up = rests & (slices["cause"] == NUMBER["start_up"]).to_numpy() & of_steps
    if slices["step"][start_up].nunique() <= few_of(n_steps):
        apart = apart | start_up
    if timeline.on_gpu and len(times):
        launched = take_or(timeline.gpu["launched"].to_numpy(), slices["event"].to_numpy(), np.nan)
        launched_within = spans.at(np.nan_to_num(launched, nan=-np.inf)) >= 0
        apart = apart | (~rests & launched_within)
    apart &= of_steps & (slices["kind"] != COMMUNICATES).to_numpy()
    if apart.sum() == of_steps.sum():
        apart = np.zeros(len(slices), bool)
    return slices.assign(apart=apart, of_steps=of_steps & ~apart)


def cut_at(slices: pd.DataFrame, times: np.ndarray) -> pd.DataFrame:
    """Disjoint slices in order, each cut at those of these times that are within it."""
    start, end, times = slices["start"].to_numpy(), slices["end"].to_numpy(), np.unique(times)
    row = np.searchsorted(start, times, side="right") - 1
    within = (row >= 0) & (times > start[row]) & (times < end[row])
    rows, begin = np.append(np.arange(len(slices)), row[within]), np.append(start, times[within])
    order = np.lexsort((begin, rows))
    rows, begin = rows[order], begin[order]
    is_last = np.append(rows[1:] != rows[:-1], True)
    until = np.where(is_last, end[rows], np.append(begin[1:], np.inf))
    return slices.iloc[rows].reset_index(drop=True).assign(start=begin, end=until)


def labels_of(column: pd.Series, rows: np.ndarray, of_nothing: str, unknown: str) -> pd.Categorical:
    """The values of these rows of a table; of row -1 and of unknown values there is a name too."""
    codes, names = pd.factorize(column)
    codes, names = np.append(codes, len(names) + 1), [*names, unknown, of_nothing, COMMUNICATION]
    codes[codes < 0] = len(names) - 3
    names, new = np.unique(np.array(names, dtype=object), return_inverse=True)
    return pd.Categorical.from_codes(new[codes[rows]], names)


def components_of(
    slices: pd.DataFrame, communicates: np.ndarray, idle: np.ndarray, rest: str
) -> pd.Series:
    """The component of each slice: communication is all time of that kind, and no other time."""
    component = slices["component"]
    other = (component == COMMUNICATION).to_numpy() & ~communicates
    names = np.where(idle[other], rest, slices["category"][other])
    component = component.cat.set_categories(component.cat.categories.union([*{*names}]))
    component[other], component[communicates] = names, COMMUNICATION
    return component


def with_rules(of_operator: pd.Categorical, rules: dict[str, np.ndarray]) -> pd.Categorical:
    """The class of each slice: the first of which the rule holds, else that of its operator."""
    names = [*of_operator.categories, *rules]
    numbers = list(range(len(of_operator.categories), len(names)))
    codes = np.select(list(rules.values()), numbers, of_operator.codes)
    return categories_of(codes, names)


def places_of(timeline: Timeline, rows: np.ndarray) -> pd.Categorical:
    """The stream or thread of the owner of each slice."""
    if timeline.on_gpu:
        pairs, which = different_pairs(
            timeline.gpu["device"].to_numpy(), timeline.gpu["stream"].to_numpy()
        )
        names = [f"GPU {device} stream {stream}" for device, stream in pairs]
    else:
        which, threads = pd.factorize(timeline.host["thread"])
        names = ["host" if one == timeline.thread else f"host thread {one}" for one in threads]
    return pd.Categorical.from_codes(np.append(which, len(names))[rows], [*names, "nowhere"])
