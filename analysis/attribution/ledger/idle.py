"""Why is the GPU idle?  Its gaps, cut where the cause changes."""

from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.attribution.components import COMMUNICATION
from analysis.attribution.intervals import Slices, slices_of
from analysis.attribution.ledger.host_activity import (
    creates_context,
    host_code,
    launching,
    starts_up,
)
from analysis.attribution.ledger.kinds import NUMBER
from analysis.trace.links import LATENCY_US
from analysis.trace.tables import different_pairs, has_role, take_or
from analysis.trace.timeline import Timeline
from analysis.vocabulary import roles

# Time of the program's code before the first event of the GPU: models are built, and files read
SET_UP_US = 1e6


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
    kinds = by_kind(gpu)
    begins_stream = np.isin(gaps.after, first_of_streams(gpu))
    return Behind(
        host_until=host_until,
        late=late,
        is_known=is_known,
        in_replay=in_replay,
        communication=queued & is_beside(gaps, kinds.communicates),
        copy=queued & is_beside(gaps, kinds.copies),
        unrecorded=begins_stream & has_call & (late < gaps.end) & ~in_replay,
    )


def is_beside(gaps: Gaps, which: np.ndarray) -> np.ndarray:
    """Whether one of these events is on a side of each gap [gaps].  which: [GPU events, bool]"""
    return take_or(which, gaps.before, False) | take_or(which, gaps.after, False)


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


class ByKind(NamedTuple):
    """Which GPU events are of each of KINDS, in their order; arrays with an entry for each
    event."""

    computes: np.ndarray  # bool
    communicates: np.ndarray  # bool
    copies: np.ndarray  # bool


def by_kind(gpu: pd.DataFrame) -> ByKind:
    copies = (gpu["kind"] == "memcpy").to_numpy()
    communicates = (gpu["category"] == COMMUNICATION).to_numpy()
    return ByKind(~copies & ~communicates, communicates, copies)
