"""The critical path of a step: the chain of work on host and GPU that its end had to wait for, by
component.

From the end backwards: a kernel waited either for its launch, then the path goes on at the host, or
for the GPU event that ended last before it began.  A call that also waits, as a blocking copy does,
launched as it began.  The host waited for the GPU where it called a synchronization, then the path
goes on at the event that ended last before the call returned.  Making something shorter that is not
on the path saves nothing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.attribution.components import IDLE, OVERHEAD, UNATTRIBUTED
from analysis.attribution.intervals import Slices, innermost
from analysis.attribution.ledger.of_steps import cut_to, left_out, of_steps, us_by
from analysis.trace.links import CLOCK_TICK_US
from analysis.trace.tables import take_or
from analysis.trace.timeline import Timeline, cached_on_timeline, median_step
from harness.base.sections import Section
from harness.base.tables import added_up, column, text_columns
from harness.base.text import significant
from harness.schema import Document, field

# Share of the path: from here on it is told that the GPU works while the path is on the host
BESIDE = 0.1
GPU, HOST, START = "GPU", "host", "kernel start"


class PathRow(Document):
    where: str = field("GPU, host, kernel start")
    component: str = field("part of the model")
    ms: float = field("on the path")
    share: float = field("of the path")


class CriticalPath(Document):
    step: int = field("its number")
    length_ms: float = field("from its start to its end")
    gpu_idle_ms: float = field(
        "of it, without work on the GPU, with the profiler: a faster host saves no more of it"
    )
    rows: list[PathRow] = field("they add up to length_ms")


class Span(NamedTuple):
    """A part of the path."""

    where: str  # GPU, HOST or START
    row: int  # of the GPU event; on the host the thread
    start: float  # us
    end: float


@dataclass(frozen=True)
class Path:
    """The critical path of a step."""

    step: int  # row of timeline.steps
    spans: list[Span]  # from its end to its beginning; none if it takes no time

    @functools.cached_property
    def gpu_us(self) -> pd.Series:
        """The time of each GPU event on the path, by its row of timeline.gpu."""
        of_gpu = [(span.row, span.end - span.start) for span in self.spans if span.where == GPU]
        return pd.Series(added_up(of_gpu), dtype=float)


@cached_on_timeline
def path_of_step(timeline: Timeline) -> Path | None:
    """The path through a step of about median duration; None if it has no GPU events."""
    step = median_step(timeline)
    if step == 0 and len(timeline.steps) > 1:
        step = 1  # of the first, the trace lacks what was before
    if not (timeline.gpu["step"] == step).any():
        return None
    return Path(step, walk(timeline, step))


def critical_path(timeline: Timeline) -> CriticalPath | None:
    """The path with its time by place and component, most first; None without GPU events, or if it
    takes no time."""
    path = path_of_step(timeline)
    if path is None or not path.spans:
        return None
    us_by_part = added_up(time_by_component(timeline, path.spans))
    length_us = us_by_part.total()
    # As long as the path: both with the profiler
    slices = timeline.slices
    of_path = cut_to(slices[slices["of_steps"].to_numpy()], path.spans[-1].start, path.spans[0].end)
    rows = []
    for (where, component), us in us_by_part.most_common():
        if us > 0:
            share = float(us / length_us)
            rows.append(PathRow(where=where, component=component, ms=float(us / 1e3), share=share))
    return CriticalPath(
        step=int(timeline.steps["number"].iloc[path.step]),
        length_ms=float(length_us / 1e3),
        gpu_idle_ms=float(us_by(of_path, "state").get(IDLE, 0.0) / 1e3),
        rows=rows,
    )


def host_share(path: CriticalPath) -> float:
    """The share of the path that is on the host."""
    return sum(row.share for row in path.rows if row.where == HOST)


# ---- From the end backwards ----------------------------------------------------------------------


class Events(NamedTuple):
    """GPU events in the order in which they end; arrays with an entry for each."""

    row: np.ndarray  # of timeline.gpu
    step: np.ndarray  # row of timeline.steps, -1: in none
    start: np.ndarray  # us
    end: np.ndarray  # us
    launched: np.ndarray  # us: when the call had launched it; -inf: not recorded
    thread: np.ndarray  # of the call; -1: not recorded
    left_out: np.ndarray  # bool: what it waited for was not recorded


class Waits(NamedTuple):
    """Calls that wait for the GPU, in the order in which they return; arrays with an entry for
    each."""

    start: np.ndarray  # us
    end: np.ndarray  # us


class Place(NamedTuple):
    """Where a walk has come to."""

    us: float
    event: int  # of Events, which ends here; -1: the path is on the host
    thread: int  # of the host
    # So many events, in the order of Events, may still be on the path: as events may take no time,
    # it could come to one twice.
    left: int


@cached_on_timeline
def walk(timeline: Timeline, step: int) -> list[Span]:
    """The path from its end to the beginning of the step; where the GPU runs behind, to the end of
    the step before."""
    events, waits = events_by_end(timeline), waits_by_end(timeline)
    slices = of_steps(timeline)
    first = max(float(timeline.steps["start"].iloc[step]), slices["start"].min())
    last = min(float(timeline.steps["end"].iloc[step]), slices["end"].max())
    earlier = events.end[(events.step >= 0) & (events.step < step)]
    first = max(first, float(earlier.max(initial=-np.inf)))
    latest = int(np.flatnonzero(events.step == step)[-1])
    ended = float(events.end[latest])
    place = Place(max(ended, last), latest if ended >= last else -1, timeline.thread, latest + 1)
    spans: list[Span] = []
    while place.us > first:
        if place.event >= 0:
            place = before_event(place, events, first, spans)
        else:
            place = before_host(place, events, waits, first, spans)
    return spans


def events_by_end(timeline: Timeline) -> Events:
    gpu, calls = timeline.gpu, timeline.calls
    not_recorded = np.isin(np.arange(len(gpu)), left_out(timeline)["event"])
    call = gpu["call"].to_numpy()
    # A call that also waits launched its event as it began; one of an event whose wait was not
    # recorded is taken as any other.
    of_not_recorded = np.isin(np.arange(len(calls)), call[not_recorded])
    at_once = calls["waits"].to_numpy(bool) & ~of_not_recorded
    launched = np.where(at_once, calls["start"], calls["end"])
    order = np.argsort(gpu["end"].to_numpy(), kind="stable")
    call = call[order]
    return Events(
        row=order,
        step=gpu["step"].to_numpy()[order],
        start=gpu["start"].to_numpy()[order],
        end=gpu["end"].to_numpy()[order],
        launched=take_or(launched, call, -np.inf),
        thread=take_or(calls["thread"], call, -1),
        left_out=not_recorded[order],
    )


def waits_by_end(timeline: Timeline) -> Waits:
    calls = timeline.calls
    waits = calls[calls["waits"].to_numpy(bool)].sort_values("end")
    return Waits(waits["start"].to_numpy(), waits["end"].to_numpy())


def before_event(place: Place, events: Events, first: float, spans: list[Span]) -> Place:
    """Adds the event that ends here and the time until it started, and goes to what it waited for:
    the event that ended before it, or its launch."""
    event = place.event
    begun = max(events.start[event], first)
    spans.append(Span(GPU, events.row[event], begun, place.us))
    if begun <= first:
        return place._replace(us=begun)
    left = min(event, int(np.searchsorted(events.end, begun + CLOCK_TICK_US, side="right")))
    ended = min(events.end[left - 1], begun) if left > 0 else -np.inf
    launched = min(events.launched[event], begun)
    until = max(ended, launched, first)
    if not events.left_out[event]:
        spans.append(Span(START, events.row[event], until, begun))
    if ended > launched:
        return Place(until, left - 1, place.thread, left)
    thread = int(events.thread[event]) if events.launched[event] > -np.inf else place.thread
    return Place(until, -1, thread, left)


def before_host(
    place: Place, events: Events, waits: Waits, first: float, spans: list[Span]
) -> Place:
    """Adds the time of the host since its latest wait, and goes to the event that this waited for;
    if that is none, to where the wait began."""
    wait = int(np.searchsorted(waits.end, place.us, side="right")) - 1
    if wait < 0:
        spans.append(Span(HOST, place.thread, first, place.us))
        return place._replace(us=first)
    began, returned = max(waits.start[wait], first), max(waits.end[wait], first)
    event = min(place.left, int(np.searchsorted(events.end, returned, side="right"))) - 1
    if event >= 0 and events.end[event] > began:
        spans.append(Span(HOST, place.thread, events.end[event], place.us))
        return place._replace(us=events.end[event], event=event)
    begun = min(began, place.us)
    spans.append(Span(HOST, place.thread, begun, place.us))
    return place._replace(us=begun if begun < place.us else first)


# ---- Whose time it is ----------------------------------------------------------------------------


def time_by_component(timeline: Timeline, spans: list[Span]) -> list[tuple[tuple[str, str], float]]:
    """The time of each span, by where and component; that of the host by the innermost event,
    else overhead."""
    component = timeline.gpu["component"].to_numpy(object)
    times: list[tuple[tuple[str, str], float]] = []
    host_spans: dict[int, list[tuple[float, float]]] = {}
    for span in spans:
        if span.where == HOST:
            host_spans.setdefault(span.row, []).append((span.start, span.end))
        else:
            name = component[span.row]
            name = str(name) if pd.notna(name) else UNATTRIBUTED
            times.append(((span.where, name), span.end - span.start))
    for thread in sorted(host_spans):
        times += host_time_by_component(timeline.host, thread, np.array(host_spans[thread]))
    return times


def host_time_by_component(
    host: pd.DataFrame, thread: int, edges: np.ndarray
) -> list[tuple[tuple[str, str], float]]:
    """edges: [spans, 2], begin and end of the path on this thread, in us."""
    on_path = Slices(edges[:, 0], edges[:, 1])
    inside = host["thread"] == thread
    inside &= (host["until"] > edges.min()) & (host["start"] < edges.max())
    slices = innermost(host, inside.to_numpy())
    us = on_path.covered_until(slices.end) - on_path.covered_until(slices.start)
    names = host["component"].to_numpy(object)[slices.row]
    sums = pd.Series(us).groupby(np.where(pd.isna(names), UNATTRIBUTED, names)).sum()
    times = [((HOST, str(name)), float(us)) for name, us in sums.items()]
    times.append(((HOST, OVERHEAD), max(0.0, float(np.diff(edges).sum() - sums.sum()))))
    return times


# ---- For a reader --------------------------------------------------------------------------------

PATH_COLUMNS = [
    *text_columns("where", "component"),
    column("ms", "ms", "~3"),
    column("share", "share", ".1%"),
]


def path_title(path: CriticalPath) -> str:
    """The path may be on the host while the GPU works too: then another path is nearly as long."""
    length, idle = significant(path.length_ms, most=3), significant(path.gpu_idle_ms)
    title = f"{length} ms of step {path.step}; nothing else can make it shorter"
    off_gpu_ms = sum(row.ms for row in path.rows if row.where != GPU)
    if off_gpu_ms - path.gpu_idle_ms < BESIDE * path.length_ms:
        return title
    return (
        f"{title}; while it is on the host, the GPU works as well: a faster host alone saves at"
        f" most the {idle} ms in which the GPU is idle"
    )


def path_section(
    path: CriticalPath | None, why_unknown: str, timeline: str, note: list[str], unreliable: str
) -> Section:
    """One step: its timeline, and what its end had to wait for.

    why_unknown: of a path that is not there.  timeline, note: what the timeline shows, and what it
    leaves out.  unreliable: why it should not be relied on."""
    title = path_title(path) if path else f"not known: {why_unknown}"
    return Section(
        "One step, and its critical path",
        PATH_COLUMNS,
        path.rows if path else [],
        note,
        facts={"Timeline": timeline, "Critical path": title},
        figure="step_timeline",
        warning=unreliable,
        label="component",
        sums=("ms", "share"),
    )
