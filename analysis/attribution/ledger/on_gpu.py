"""Whose time is it on a GPU?"""

from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.attribution.collectives import collectives_of
from analysis.attribution.intervals import Slices, merged, slices_of
from analysis.attribution.ledger.idle import IdleSlices, by_kind, idle_slices
from analysis.attribution.ledger.kinds import (
    COMMUNICATES,
    COMPUTES,
    COPIES,
    IDLES,
    NUMBER,
    RESTS,
    WAITS,
    WORKS,
)
from analysis.trace.tables import take_or
from analysis.trace.timeline import Timeline

# Causes that every recording has before the first event of the GPU and after the last.
AT_EDGES = ("launch", "latency", "host_code", "synchronization")


class Owners(NamedTuple):
    """Whose time it is on the GPU."""

    edges: np.ndarray  # us, [times + 1]: between two of them, nothing changes
    by_class: np.ndarray  # [classes, times]: row of the event that owns the time; -1: none
    kind: np.ndarray  # [times]: number of KINDS of the class that comes first; IDLES: none
    event: np.ndarray  # [times]: row of the event of that class; -1: none


def owners_of(gpu: pd.DataFrame, further_edges: np.ndarray) -> Owners:
    """further_edges: beside those of the events."""
    slices = [slices_of(gpu, which) for which in by_kind(gpu)]
    edges = np.unique(np.concatenate([further_edges, *(one.edges for one in slices)]))
    by_classes = np.stack([one.at(edges[:-1]) for one in slices])
    is_owned = by_classes >= 0
    first = is_owned.argmax(axis=0)  # 0 where no class has an event, which then is -1
    kind = np.where(is_owned.any(axis=0), first, IDLES)
    event = by_classes[first, np.arange(len(first))]
    return Owners(edges, by_classes, kind.astype(np.int8), event)


def overlapped_kinds(owners: Owners, kind: np.ndarray, on_host: np.ndarray) -> np.ndarray:
    """[times]: which kinds run beside the one that the time is given to, as the sum of 1 for each
    class of KINDS, 2 and 4.  on_host: whether a collective of the host runs."""
    runs = owners.by_class >= 0
    communicates = runs[COMMUNICATES] | on_host
    bits = runs[COMPUTES] + 2 * communicates + 4 * runs[COPIES]
    of_itself = np.where(kind < IDLES, 1 << kind.astype(np.int64), 0)
    return bits & ~of_itself


class CollectiveTimes(NamedTuple):
    """Where collectives run."""

    of_kernel: np.ndarray  # [GPU events]: row of collectives that it is; -1: none
    on_host: Slices  # of those that the host does: the GPU waits for them where it has none


def collective_times(timeline: Timeline) -> CollectiveTimes:
    collectives = collectives_of(timeline)
    events, none = collectives.events, collectives.events[:0]
    of_kernel = np.full(len(timeline.gpu), -1)
    if not collectives.on_gpu:
        return CollectiveTimes(of_kernel, slices_of(events))
    of_kernel[events["row"]] = events.index
    return CollectiveTimes(of_kernel, slices_of(none))


def gpu_slices(timeline: Timeline) -> pd.DataFrame:
    gpu, (first, last) = timeline.gpu, timeline.window
    whole = (min(first, float(gpu["start"].min())), max(last, float(gpu["end"].max())))
    collectives = collective_times(timeline)
    of_host = collectives.on_host
    idle = idle_slices(timeline, whole, of_host)
    own_edges = [whole, (first, last), idle.times.edges, np.clip(of_host.edges, *whole)]
    owners = owners_of(gpu, np.concatenate(own_edges))
    times = owners.edges[:-1]
    gap, pending = idle.times.at(times), of_host.at(times)
    cause = take_or(idle.cause, gap, 0)
    waits = (cause == NUMBER["communication"]) & (pending >= 0)
    kind = np.where(waits, COMMUNICATES, owners.kind)
    columns = {
        "owner": owners.event,
        "kind": kind,
        "overlaps": overlapped_kinds(owners, kind, pending >= 0),
        "cause": cause,
        "collective": np.where(waits, pending, take_or(collectives.of_kernel, owners.event, -1)),
        "next": take_or(idle.after, gap, -1),
        "of_steps": within_steps(timeline, owners, idle, gap),
    }
    return with_events(gpu, merged(owners.edges, columns))


def within_steps(
    timeline: Timeline, owners: Owners, idle: IdleSlices, gap: np.ndarray
) -> np.ndarray:
    """Whether each time is of the steps [times].  gap: row of `idle` at each; -1: something
    runs."""
    gpu, (first, last) = timeline.gpu, timeline.window
    times = owners.edges[:-1]
    inside = (times >= first) & (times < last)
    inside &= ~take_or(idle.before_recording, gap, False)
    if not timeline.steps_are_marked and (owners.event >= 0).any():
        at_edge = (times < gpu["start"].min()) | (times >= gpu["end"].max())
        causes = [NUMBER[name] for name in AT_EDGES]
        inside &= ~(at_edge & np.isin(take_or(idle.cause, gap, 0), causes))
    return inside


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
