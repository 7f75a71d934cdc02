"""What does the host do while the GPU is idle?  Start-up, and code of the program."""

import numpy as np
import pandas as pd

from analysis.attribution.components import COMMUNICATION, views_and_metadata
from analysis.attribution.intervals import Slices
from analysis.attribution.once import occasional
from analysis.trace.links import OPERATOR
from analysis.trace.tables import by_name, has_role
from analysis.trace.timeline import Timeline, cached_on_timeline
from analysis.vocabulary import roles
from analysis.vocabulary.calls import pins_host_memory

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


@cached_on_timeline
def occasional_times(timeline: Timeline) -> pd.DataFrame:
    """The times that are not part of what every step does, as once.occasional() tells them."""
    return occasional(timeline, host_code(timeline))
