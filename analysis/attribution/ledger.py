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

import itertools
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.attribution.collectives import collectives_of
from analysis.attribution.components import (
    BETWEEN,
    COMMUNICATION,
    IDLE,
    OVERHEAD,
    UNATTRIBUTED,
    views_and_metadata,
)
from analysis.attribution.intervals import Slices, innermost, merged, slices_of
from analysis.attribution.once import few_of, occasional
from analysis.trace.links import LATENCY_US, OPERATOR
from analysis.trace.tables import by_name, different_pairs, has_role, take_or
from analysis.trace.timeline import Timeline, cached_on_timeline
from analysis.vocabulary import roles
from analysis.vocabulary.calls import pins_host_memory
from analysis.vocabulary.operators import operator_class
from harness.base.text import read_ini

WORKING, WAITING = "working", "waiting"
KINDS, STATES = ("computation", COMMUNICATION, "copy"), (WORKING, WAITING, IDLE)
COMPUTES, COMMUNICATES, COPIES, IDLES = range(4)  # numbers of KINDS, and of idle time
WORKS, WAITS, RESTS = range(3)  # numbers of STATES
# From one operator to the next, Python and PyTorch take microseconds; what is longer is work of the
# program.
HOST_CODE_US = 1e3
# Calls that do not wait take microseconds, and tens of them where they load a kernel (332 ms and
# 19.6 s were seen) or where the queue is full, while the GPU works.
START_UP_US = 5e3  # of any call
LOADING_US = 1e3  # of one that is the first to launch a kernel of this name
# Libraries create their context in a call that seems to be of memory, as cudaFree(0) is; freeing
# takes milliseconds.
CONTEXT_US = 50e3
# Time of the program's code before the first event of the GPU: models are built, and files read
SET_UP_US = 1e6
IDLE_CAUSES = dict(read_ini(Path(__file__).with_suffix(".ini"))["idle causes"])  # what each means
# Of the GPU's work: steps that are shorter than it by more are those of something else
STEPS_DIFFER = 0.1
# Causes that every recording has before the first event of the GPU and after the last.
AT_EDGES = ("launch", "latency", "host_code", "synchronization")
NOTHING = "nothing"
# thread: another one works for that of the steps; ranks: they are late
CAUSES = (NOTHING, *IDLE_CAUSES, "thread", "ranks")
NUMBER = {cause: number for number, cause in enumerate(CAUSES)}
# What runs beneath, by the sum of 1 for each class of KINDS, 2 and 4.
BENEATH = [" and ".join(kind for i, kind in enumerate(KINDS) if bits & 1 << i) for bits in range(8)]
BENEATH[0] = NOTHING


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
    slices["class"] = classes_of(slices, rules)
    slices["kind"] = pd.Categorical.from_codes(kind, [*KINDS, IDLE])
    slices["cause"] = pd.Categorical.from_codes(cause, CAUSES)
    slices["state"] = pd.Categorical.from_codes(slices["state"], STATES)
    slices["overlaps"] = pd.Categorical.from_codes(slices["overlaps"], BENEATH)
    slices["where"] = places_of(timeline, owner)
    slices["us"] = slices["end"] - slices["start"]
    slices["rank"] = -1 if timeline.trace.rank is None else timeline.trace.rank
    rows = ("step", "rank", "operator", "event", "collective")
    return slices.astype(dict.fromkeys(rows, np.int32))


@cached_on_timeline
def of_steps(timeline: Timeline) -> pd.DataFrame:
    """The slices of the steps, whose `us` add up to the time of the steps, as long as they are
    without the profiler."""
    found = timeline.slices[timeline.slices["of_steps"].to_numpy()]
    if timeline.idle_left < 1:
        found = found.assign(
            us=found["us"].where(found["state"] != IDLE, timeline.idle_left * found["us"])
        )
    return found


def idle_left_without_profiler(timeline: Timeline, unprofiled_ms: float) -> float:
    """The share of the idle time that steps without the profiler, of so many milliseconds, leave
    beside the GPU's work."""
    if not timeline.on_gpu:
        return 1.0
    slices = timeline.slices[timeline.slices["of_steps"].to_numpy()]
    sums = us_by(slices, "state")
    idle = float(sums.get(IDLE, 0.0))
    working = float(sums.sum()) - idle
    left = 1e3 * unprofiled_ms * len(timeline.steps) - working
    if left < -STEPS_DIFFER * working:  # far less than the GPU works: they are other steps
        return 1.0
    if max(0.0, left) >= idle:
        return 1.0
    return max(0.0, left) / idle


@cached_on_timeline
def occasional_times(timeline: Timeline) -> pd.DataFrame:
    """The times that are not part of what every step does, as once.occasional() tells them."""
    return occasional(timeline, host_code(timeline))


def start_up_slices(timeline: Timeline) -> pd.DataFrame:
    """The idle slices of the steps, or apart, that are start-up but no compilation; `where`: the
    call that takes the time."""
    slices = timeline.slices
    in_steps = (slices["of_steps"] | slices["apart"]) & (slices["step"] >= 0)
    elsewhere = slices_of(occasional_times(timeline)).at(slices["start"].to_numpy()) < 0
    found = slices[((slices["cause"] == "start_up") & in_steps & elsewhere).to_numpy()]
    calls = timeline.calls[starts_up(timeline)]
    call = slices_of(calls).at(found["start"].to_numpy())
    names = take_or(calls["name"].to_numpy(object), call, "before the first event of the GPU")
    return found.assign(where=names)


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
        apart |= start_up
    if timeline.on_gpu and len(times):
        launched = take_or(timeline.gpu["launched"].to_numpy(), slices["event"].to_numpy(), np.nan)
        apart |= ~rests & (spans.at(np.nan_to_num(launched, nan=-np.inf)) >= 0)
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


def left_out(timeline: Timeline) -> pd.DataFrame:
    """The idle slices of the window that are no part of the steps.  The first event of a stream
    began more than LATENCY_US after its launch, so what was launched on it before the recording was
    still running.  Or nothing marks steps: then waits AT_EDGES are those of a program that was not
    recorded before, and not after."""
    slices = timeline.slices
    return cut_to(slices[~(slices["of_steps"] | slices["apart"]).to_numpy()], *timeline.window)


def capture_share(timeline: Timeline) -> float:
    """The share of the span of the steps in which a graph was being captured."""
    (first, last), calls = timeline.window, timeline.calls
    begin = np.sort(calls["start"][has_role(calls, roles.CAPTURE_BEGIN)])
    end = np.sort(calls["end"][has_role(calls, roles.CAPTURE_END)])
    until = take_or(end, np.searchsorted(end, begin), last)
    begin, until = np.clip([begin, until], first, last)
    captures = Slices(begin, until)
    return float((captures.end - captures.start).sum() / (last - first)) if last > first else 0.0


def us_by(slices: pd.DataFrame, *columns: str) -> pd.Series:
    """The time of slices in us, by one or more columns of them."""
    return slices.groupby([*columns], observed=True, sort=False)["us"].sum()


def cut_to(slices: pd.DataFrame, first: float, last: float) -> pd.DataFrame:
    """The slices between two times, each with its share of `us`."""
    inside = slices[((slices["end"] > first) & (slices["start"] < last)).to_numpy()]
    within = inside["end"].clip(upper=last) - inside["start"].clip(lower=first)
    return inside.assign(us=inside["us"] * within / (inside["end"] - inside["start"]))


@cached_on_timeline
def events_of_steps(timeline: Timeline) -> pd.DataFrame:
    """A row for each event that owns time of the steps, by its row: component, phase, category,
    class, operator, step (those of its first slice), us.  Row -1: collectives of the host that a
    GPU waits for."""
    slices = of_steps(timeline)
    slices = slices[
        ((slices["state"] != IDLE) | ((slices["event"] >= 0) & (not timeline.on_gpu))).to_numpy()
    ]
    first = slices.drop_duplicates("event").set_index("event").sort_index()
    columns = ["component", "phase", "category", "class", "operator", "step"]
    return first[columns].assign(us=slices.groupby("event")["us"].sum())


def idle_by_cause(slices: pd.DataFrame) -> dict[str, float]:
    """Idle time of the GPU in these slices in us, by cause."""
    idle = us_by(slices[(slices["state"] == IDLE).to_numpy()], "cause")
    return {cause: float(idle.get(cause, 0.0)) for cause in IDLE_CAUSES}


def named_slices(timeline: Timeline, slices: pd.DataFrame) -> pd.DataFrame:
    """Slices for a reader: the number of the step, names in place of rows; without them, `none`."""
    table = timeline.gpu if timeline.on_gpu else timeline.host
    rows = {"operator": timeline.host["name"], "event": table["name"]}
    names = {
        key: take_or(column.to_numpy(object), slices[key], "none") for key, column in rows.items()
    }
    number = take_or(timeline.steps["number"].to_numpy(float), slices["step"], np.nan)
    return slices.assign(
        **names, step=pd.array(number, dtype="Int64"), trace=timeline.trace.path.name
    )


def exposed_communication(timeline: Timeline) -> pd.DataFrame:
    """The slices of the steps that belong to communication: nothing computes meanwhile."""
    slices = of_steps(timeline)
    return slices[(slices["kind"] == COMMUNICATION).to_numpy()]


def hidden_communication_us(timeline: Timeline) -> float:
    """How long communication ran in the steps while something else worked, or data were fetched."""
    slices = of_steps(timeline)
    return float(slices["us"][slices["overlaps"].str.contains(COMMUNICATION).to_numpy(bool)].sum())


def cut_at_arrivals(
    slices: pd.DataFrame, events: pd.DataFrame, waiting_us: np.ndarray
) -> pd.DataFrame:
    """Slices with communication cut where the last rank arrived: before that it waits for the
    ranks.  The sum stays.

    events: the collectives.  waiting_us: of each, until the last rank arrived;
    NaN where that is unknown."""
    of = slices["collective"].to_numpy()
    begin = take_or(events["start"].to_numpy(), of, np.nan)
    until = begin + take_or(np.nan_to_num(waiting_us), of, np.nan)
    start, end = slices["start"].to_numpy(), slices["end"].to_numpy()
    edges = [start, *(np.fmin(np.fmax(start, one), end) for one in (begin, until)), end]
    parts = [slices.assign(start=first, end=last) for first, last in itertools.pairwise(edges)]
    parts[1] = parts[1].assign(state=WAITING, cause="ranks")
    out = pd.concat(parts).astype(slices.dtypes)
    out["us"] = out["end"] - out["start"]
    return out[out["us"] > 0].sort_values("start", ignore_index=True)


# ---- Columns that follow from the owner ----------------------------------------------------------


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


def classes_of(slices: pd.DataFrame, rules: dict[str, np.ndarray]) -> pd.Categorical:
    """The class of each slice: the first that a rule tells, else that of its operator."""
    phase, category = slices["phase"].cat, slices["category"].cat
    pairs, which = different_pairs(phase.codes.to_numpy(), category.codes.to_numpy())
    names = [operator_class(phase.categories[i], category.categories[j]) for i, j in pairs] + [
        *rules
    ]
    codes = np.select([*rules.values()], [*range(len(pairs), len(names))], which)
    names, new = np.unique(np.array(names, dtype=object), return_inverse=True)
    return pd.Categorical.from_codes(new[codes], names)


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


# ---- Whose time it is on a GPU -------------------------------------------------------------------


def by_class(gpu: pd.DataFrame) -> list[np.ndarray]:
    """Which GPU events are computation, communication and copies, in order of precedence."""
    copies = (gpu["kind"] == "memcpy").to_numpy()
    communicates = (gpu["category"] == COMMUNICATION).to_numpy()
    return [~copies & ~communicates, communicates, copies]


class Owners(NamedTuple):
    """Whose time it is on the GPU."""

    edges: np.ndarray  # us, [times + 1]: between two of them, nothing changes
    by_class: np.ndarray  # [classes, times]: row of the event that owns the time; -1: none
    kind: np.ndarray  # [times]: number of KINDS of the class that comes first; IDLES: none


def owners_of(gpu: pd.DataFrame, further_edges: np.ndarray) -> Owners:
    """further_edges: beside those of the events."""
    slices = [slices_of(gpu, which) for which in by_class(gpu)]
    edges = np.unique(np.concatenate([further_edges, *(one.edges for one in slices)]))
    by_classes = np.stack([one.at(edges[:-1]) for one in slices])
    is_owned = by_classes >= 0
    kind = np.where(is_owned.any(axis=0), is_owned.argmax(axis=0), IDLES)
    return Owners(edges, by_classes, kind.astype(np.int8))


def overlapped_kinds(owners: Owners, kind: np.ndarray, on_host: np.ndarray) -> np.ndarray:
    """[times]: which kinds run beside the one that the time is given to, as the sum of 1 for each
    class of KINDS, 2 and 4.  on_host: whether a collective of the host runs."""
    runs = owners.by_class >= 0
    runs[COMMUNICATES] |= on_host
    bits = runs[COMPUTES] + 2 * runs[COMMUNICATES] + 4 * runs[COPIES]
    of_itself = np.where(kind < IDLES, 1 << kind.astype(np.int64), 0)
    return bits & ~of_itself


def gpu_slices(timeline: Timeline) -> pd.DataFrame:
    gpu, (first, last) = timeline.gpu, timeline.window
    whole = (min(first, float(gpu["start"].min())), max(last, float(gpu["end"].max())))
    # The GPU waits for collectives of the host where it has none of its own.
    collectives = collectives_of(timeline)
    kernels = collectives.events if collectives.on_gpu else collectives.events[:0]
    ranges = collectives.events[:0] if collectives.on_gpu else collectives.events
    collective_of_kernel = np.full(len(gpu), -1)
    collective_of_kernel[kernels["row"]] = kernels.index
    of_host = slices_of(ranges)
    idle = idle_slices(timeline, whole, of_host)
    own_edges = [whole, (first, last), idle.times.edges, np.clip(of_host.edges, *whole)]
    owners = owners_of(gpu, np.concatenate(own_edges))
    times, kind = owners.edges[:-1], owners.kind
    event = owners.by_class[kind % len(KINDS), np.arange(len(times))]  # -1 where no class has one
    gap, pending = idle.times.at(times), of_host.at(times)
    cause = take_or(idle.cause, gap, 0)
    waits = (cause == NUMBER["communication"]) & (pending >= 0)
    kind = np.where(waits, COMMUNICATES, kind)
    inside = (times >= first) & (times < last) & ~take_or(idle.before_recording, gap, False)
    if not timeline.steps_are_marked and (owners.by_class >= 0).any():
        at_edge = (times < gpu["start"].min()) | (times >= gpu["end"].max())
        inside &= ~(at_edge & np.isin(cause, [NUMBER[name] for name in AT_EDGES]))
    columns = {
        "owner": event,
        "kind": kind,
        "overlaps": overlapped_kinds(owners, kind, pending >= 0),
        "cause": cause,
        "collective": np.where(waits, pending, take_or(collective_of_kernel, event, -1)),
        "next": take_or(idle.after, gap, -1),
        "of_steps": inside,
    }
    return with_events(gpu, merged(owners.edges, columns))


def with_events(gpu: pd.DataFrame, slices: pd.DataFrame) -> pd.DataFrame:
    """The slices with event, operator, step and state: of idle time, those of the event that
    follows."""
    owner, inside = slices["owner"].to_numpy(), slices["of_steps"].to_numpy()
    is_idle = owner < 0
    row = np.where(is_idle, slices.pop("next"), owner)
    waits = is_idle & (slices["kind"] == COMMUNICATES).to_numpy()
    step = pd.Series(take_or(gpu["step"], row, -1))
    step = step.where((step >= 0) & inside).bfill().ffill().fillna(0)  # between events of the step
    state = np.full(len(slices), WORKS)
    state[is_idle] = RESTS
    state[waits] = WAITS
    return slices.assign(
        event=np.where(waits, -1, row),
        operator=np.where(waits, -1, take_or(gpu["operator"], row, -1)),
        step=np.where(inside, step, -1).astype(np.int64),
        state=state,
    )


class Gaps(NamedTuple):
    """When nothing ran on any device; arrays with an entry for each gap."""

    start: np.ndarray  # us
    end: np.ndarray  # us
    before: np.ndarray  # row of the event that ends where the gap begins; -1: none
    after: np.ndarray  # row of the event that follows; -1: none


def gaps_of(gpu: pd.DataFrame, first: float, last: float) -> Gaps:
    """Those between these times, which no event exceeds."""
    order = np.lexsort((-gpu["end"].to_numpy(), gpu["start"].to_numpy()))
    start, end = gpu["start"].to_numpy()[order], gpu["end"].to_numpy()[order]
    reached = np.maximum.accumulate(end)
    # The event that reached furthest so far: where the running maximum was set.
    furthest = order[np.maximum.accumulate(np.where(end >= reached, np.arange(len(end)), 0))]
    begin, until = np.append(first, reached), np.append(start, last)
    keep = until > begin
    before, after = np.append(-1, furthest), np.append(order, -1)
    return Gaps(begin[keep], until[keep], before[keep], after[keep])


class Behind(NamedTuple):
    """Why the event after each gap did not start sooner; arrays with an entry for each gap."""

    host_until: np.ndarray  # us: the host was still launching the event up to here
    late: np.ndarray  # us: up to here it may be the time that a launch takes to arrive
    is_known: np.ndarray  # bool: whether its launch was recorded, or nothing follows
    in_replay: np.ndarray  # bool: between two events of one replay of a graph
    communication: np.ndarray  # bool: all was launched, and communication is on one side
    copy: np.ndarray  # bool: the same of a copy
    unrecorded: np.ndarray  # bool: what ran before was not recorded, as at the start of a trace


def behind_gaps(timeline: Timeline, gaps: Gaps) -> Behind:
    gpu = timeline.gpu
    call = take_or(gpu["call"], gaps.after, -1)
    has_call = call >= 0
    same_call = call == take_or(gpu["call"], gaps.before, -1)
    in_replay = has_call & same_call & take_or(gpu["of_graph"], gaps.after, False)
    # After the last event, the host's step may go on without another launch.
    is_known = has_call | (gaps.after < 0)
    call_ends = take_or(timeline.calls["end"].to_numpy(float), call, np.nan)
    launched = np.where(has_call, call_ends, gaps.end)
    # The kernel may start before its launch call returns.
    launched = np.where(is_known, np.minimum(launched, gaps.end), gaps.start)
    host_until = np.maximum(launched, gaps.start)
    late = np.minimum(host_until + LATENCY_US, gaps.end)
    queued = is_known & (host_until <= gaps.start)
    _, communicates, copies = (np.append(which, False) for which in by_class(gpu))
    begins_stream = np.isin(gaps.after, first_of_streams(gpu))
    return Behind(
        host_until=host_until,
        late=late,
        is_known=is_known,
        in_replay=in_replay,
        communication=queued & (communicates[gaps.before] | communicates[gaps.after]),
        copy=queued & (copies[gaps.before] | copies[gaps.after]),
        unrecorded=begins_stream & has_call & (late < gaps.end) & ~in_replay,
    )


def first_of_streams(gpu: pd.DataFrame) -> np.ndarray:
    """The rows of the first event of each stream."""
    stream = different_pairs(gpu["device"].to_numpy(), gpu["stream"].to_numpy())[1]
    order = np.argsort(gpu["start"].to_numpy(), kind="stable")
    return order[np.unique(stream[order], return_index=True)[1]]


def host_activities(timeline: Timeline, collectives: Slices) -> dict[str, Slices]:
    """What the host does while the GPU is idle, by cause; where two are at once, the first counts.
    collectives: those of the host."""
    calls = timeline.calls
    fetches = launching(timeline) & (timeline.host["phase"] == "data").to_numpy()
    allocates = has_role(calls, roles.ALLOCATION) & ~creates_context(timeline)
    return {
        "data": slices_of(timeline.host, fetches),
        "communication": collectives,
        "allocation": slices_of(calls, allocates),
        "synchronization": slices_of(calls, calls["waits"].to_numpy(bool)),
        "start_up": slices_of(calls, starts_up(timeline)),
        "host_code": host_code(timeline),
    }


class IdleSlices(NamedTuple):
    """When nothing runs on the GPU, cut where the cause changes; arrays with an entry for each
    slice."""

    times: Slices
    cause: np.ndarray  # a number of CAUSES
    after: np.ndarray  # row of the event that follows; -1: none
    before_recording: np.ndarray  # bool: its cause is from before the recording


def idle_slices(timeline: Timeline, whole: tuple[float, float], collectives: Slices) -> IdleSlices:
    """collectives: those of the host."""
    gaps = gaps_of(timeline.gpu, *whole)
    behind = behind_gaps(timeline, gaps)
    activities = host_activities(timeline, collectives)
    gap_times = Slices(gaps.start, gaps.end)
    changes = np.concatenate([activity.edges for activity in activities.values()])
    changes = changes[gap_times.at(changes) >= 0]
    edges = np.unique(np.concatenate([gap_times.edges, behind.host_until, behind.late, changes]))
    times = edges[:-1]
    gap = gap_times.at(times)  # of each slice; -1 between two gaps
    active = {cause: activity.at(times) >= 0 for cause, activity in activities.items()}
    by_host = np.full(len(times), NUMBER["launch"])
    for cause in reversed(active):
        by_host[active[cause]] = NUMBER[cause]
    sets_up = (gaps.before < 0) & (gaps.end - gaps.start > SET_UP_US)
    by_host[sets_up[gap] & (by_host == NUMBER["host_code"])] = NUMBER["start_up"]
    host_works = times < behind.host_until[gap]
    soon = times < behind.late[gap]
    # Each rule comes before those above it.
    cause = np.full(len(times), NUMBER["unknown"])
    cause[soon & behind.is_known[gap]] = NUMBER["latency"]
    cause[behind.in_replay[gap]] = NUMBER["replay"]
    cause[soon & behind.copy[gap]] = NUMBER["copy"]
    cause[active["communication"] | (soon & behind.communication[gap])] = NUMBER["communication"]
    cause[host_works] = by_host[host_works]
    keep = gap >= 0
    return IdleSlices(
        times=Slices(times[keep], edges[1:][keep]),
        cause=cause[keep],
        after=gaps.after[gap][keep],
        before_recording=(behind.unrecorded[gap] & ~host_works)[keep],
    )


def starts_up(timeline: Timeline) -> np.ndarray:
    """Which calls set up the runtime or load a kernel, by how long they took."""
    calls = timeline.calls
    first_of_name = timeline.gpu.sort_values("start", kind="stable").drop_duplicates("name")
    is_first = np.isin(np.arange(len(calls)), first_of_name["call"])
    loads = calls["starts_kernel"].to_numpy() & is_first
    us = (calls["end"] - calls["start"]).to_numpy()
    takes_long = us > np.where(loads, LOADING_US, START_UP_US)
    moves = has_role(calls, roles.COPY, roles.ALLOCATION)
    return (takes_long & ~moves) | creates_context(timeline)


def creates_context(timeline: Timeline) -> np.ndarray:
    """Which calls for memory of the device create a context, by how long they take: it happens
    once, so in one step or, in a trace of one, before half of the GPU's work was launched."""
    calls = timeline.calls
    of_device = has_role(calls, roles.ALLOCATION) & ~by_name(calls["name"], pins_host_memory, bool)
    creates = of_device & ((calls["end"] - calls["start"]).to_numpy() > CONTEXT_US)
    if len(timeline.steps) > 1:
        in_one_step = calls["step"][creates].nunique() == 1
        return creates & in_one_step
    launched = np.sort(timeline.gpu["launched"].dropna().to_numpy())
    n_launched = np.searchsorted(launched, calls["start"].to_numpy())
    return creates & (n_launched < len(launched) / 2)


def launching(timeline: Timeline) -> np.ndarray:
    """Which host events run on the thread of the steps, or on one that calls the GPU."""
    threads = [timeline.thread, *timeline.calls["thread"].unique()]
    return timeline.host["thread"].isin(threads).to_numpy()


@cached_on_timeline
def computes_on_host(timeline: Timeline) -> np.ndarray:
    """Which host events are operators that work for long on the CPU, beside a GPU, one or several
    between two calls: each works on tensors, calls no other operator, and neither launches anything
    nor is in progress when a call begins.
    """
    host = timeline.host
    if not timeline.on_gpu:
        return np.zeros(len(host), bool)
    start, until = host["start"].to_numpy(), host["until"].to_numpy()
    is_operator = (host["kind"] == OPERATOR).to_numpy()
    fetches = (host["phase"] == "data").to_numpy()
    communicates = (host["category"] == COMMUNICATION).to_numpy()
    works = launching(timeline) & is_operator & ~fetches & ~communicates
    calls_or_launches = np.append(host["operator_parent"], timeline.gpu["operator"])
    works &= ~np.isin(np.arange(len(host)), calls_or_launches)
    calls_begin = np.sort(timeline.calls["start"].to_numpy())
    calls_before = np.searchsorted(calls_begin, start)
    works &= calls_before == np.searchsorted(calls_begin, until)
    rows = np.flatnonzero(works)
    works[rows] = ~views_and_metadata(timeline, rows)
    us = pd.Series(np.where(works, until - start, 0.0))
    us_between_calls = us.groupby([calls_before, host["thread"].to_numpy()]).transform("sum")
    return works & (us_between_calls.to_numpy() > HOST_CODE_US)


@cached_on_timeline
def host_code(timeline: Timeline) -> Slices:
    """When the host ran the program's own code: no thread that launches was in an operator, a call
    or a data range, or one was in an operator on the CPU."""
    host, calls = timeline.host, timeline.calls
    is_work = ((host["kind"] == OPERATOR) | (host["phase"] == "data")).to_numpy()
    works = host[launching(timeline) & is_work]
    busy = Slices(
        np.concatenate([works["start"], calls["start"]]),
        np.concatenate([works["end"], calls["end"]]),
    )
    if len(busy.start) == 0:  # with nothing recorded, nothing tells
        return busy
    first, last = float(timeline.steps["start"].min()), float(timeline.steps["end"].max())
    begins = np.clip(np.append(first, busy.end), first, last)
    ends = np.clip(np.append(busy.start, last), first, last)
    is_long = ends - begins > HOST_CODE_US
    on_cpu = host[computes_on_host(timeline)]
    return Slices(
        np.append(begins[is_long], on_cpu["start"]), np.append(ends[is_long], on_cpu["until"])
    )


# ---- Whose time it is on a host ------------------------------------------------------------------


class HostOwners(NamedTuple):
    """Whose time it is on the host."""

    edges: np.ndarray  # us, [times + 1]: between two of them, nothing changes
    owner: np.ndarray  # [times]: row of host; -1: none
    helped: np.ndarray  # [times]: whether another thread than that of the steps owns it
    collective: np.ndarray  # [times]: the one in progress, row of Collectives; -1: none
    communicates: np.ndarray  # [times]: whether the time is that collective's


def host_owners(timeline: Timeline, further_edges: np.ndarray) -> HostOwners:
    """further_edges: beside those of events and collectives."""
    host, collectives = timeline.host, collectives_of(timeline)
    is_operator = (host["kind"] == OPERATOR).to_numpy()
    ours = (host["thread"] == timeline.thread).to_numpy()
    main = innermost(host, ours)
    backward = innermost(host, ~ours, (host["node"] >= 0).to_numpy())
    pending = slices_of(collectives.events)
    edges = np.unique(np.concatenate([further_edges, main.edges, backward.edges, pending.edges]))
    times = edges[:-1]
    event, in_backward, collective = main.at(times), backward.at(times), pending.at(times)
    is_ours = take_or(is_operator, event, False) | (in_backward < 0)
    owner = np.where(is_ours, event, in_backward)
    communicates = (collective >= 0) & ~take_or(collectives.computes, owner, False)
    of_range = communicates & ~take_or(is_operator, owner, False)
    owner = np.where(of_range, take_or(collectives.events["row"], collective, -1), owner)
    return HostOwners(edges, owner, owner != event, collective, communicates)


def host_slices(timeline: Timeline) -> pd.DataFrame:
    host, steps, code = timeline.host, slices_of(timeline.steps), host_code(timeline)
    owners = host_owners(timeline, np.concatenate([steps.edges, code.edges]))
    times = owners.edges[:-1]
    is_beneath = (owners.collective >= 0) & ~owners.communicates
    columns = {
        "owner": owners.owner,
        "step": steps.at(times),
        "code": code.at(times) >= 0,
        "helped": owners.helped,
        "collective": np.where(owners.communicates, owners.collective, -1),
        "overlaps": np.where(is_beneath, 1 << COMMUNICATES, 0),
    }
    slices = merged(owners.edges, columns)
    slices = slices[(slices["step"] >= 0).to_numpy()].reset_index(drop=True)
    owner, helped = slices["owner"].to_numpy(), slices.pop("helped").to_numpy()
    communicates = (slices["collective"] >= 0).to_numpy()
    is_operator = (host["kind"] == OPERATOR).to_numpy()
    operator = np.where(take_or(is_operator, owner, False), owner, -1)
    fetches = take_or((host["phase"] == "data").to_numpy(), owner, False) & ~communicates
    starts_one = take_or((host["category"] == COMMUNICATION).to_numpy(), owner, False)
    rests = (views_and_metadata(timeline, operator) | starts_one) & ~communicates
    of_nothing = np.where(slices.pop("code"), NUMBER["host_code"], NUMBER["launch"])
    causes = [NUMBER["communication"], NUMBER["data"], of_nothing, NUMBER["thread"]]
    rules = [communicates, fetches, rests, helped]  # the first that applies counts
    return slices.assign(
        event=owner,
        operator=operator,
        of_steps=True,
        kind=np.select([communicates, rests], [COMMUNICATES, IDLES], COMPUTES),
        state=np.select(rules, [WAITS, WAITS, RESTS, WAITS], WORKS),
        cause=np.select(rules, causes),
    )
