"""Links between the events of a trace: host events with callers, GPU events with launch call, operator and step."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.trace import STEP, Trace, where_name

OPERATOR, ANNOTATION, MODULE = 0, 1, 2  # kinds of host events
LAUNCHES = re.compile("LaunchKernel|LaunchCooperativeKernel")  # CUDA and HIP calls that start one kernel
GRAPH_LAUNCHES = re.compile("GraphLaunch")  # those that start all kernels of a graph
STARTS_WORK = re.compile(f"{LAUNCHES.pattern}|{GRAPH_LAUNCHES.pattern}|Mem(cpy|set)")
CLOCK_TICK_US = 1.0  # some traces are in whole us
CUT_SHORT = 0.1  # of the median step: a last step mark without work that is shorter is none
# Calls that block until the GPU has finished: synchronization, and copies that are not asynchronous.
WAITS = re.compile(r"(Device|Stream|Event|Ctx)Synchronize|^(cuda|hip)Memcpy(WithStream|2D|3D|DtoH|HtoD|DtoD)?$")


@dataclass
class Links:
    """A trace with the links between its events.  `host` begins with the rows of trace.operators: row numbers agree."""

    trace: Trace
    host: pd.DataFrame  # name, start, end, thread, kind, sequence, forward_thread, parent, own_us, operator_parent
    gpu: (
        pd.DataFrame
    )  # trace.gpu with call (row of launches), operator (row of host), launched, step, of_graph; -1 unknown
    calls: pd.DataFrame  # trace.launches with step, starts_kernel, starts_graph, waits
    steps: pd.DataFrame  # trace.steps; the entire trace as one step if none are marked
    steps_are_marked: bool
    thread: int  # the host thread that ran the steps

    @property
    def on_gpu(self) -> bool:
        return len(self.gpu) > 0

    @property
    def window(self) -> tuple[float, float]:
        """The time that the step tables account for, in us.

        The time of the steps on the host, shifted to their work on the GPU, which runs behind the host: it may still be
        busy with earlier work when they begin, and with their own after they end.
        """
        first, last = float(self.steps["start"].min()), float(self.steps["end"].max())
        launched = self.gpu[self.gpu["step"] >= 0]
        if launched.empty:
            return first, last
        begins = float(launched["start"].min())
        earlier = self.gpu[(self.gpu["step"] < 0) & (self.gpu["start"] < begins)]
        free_from = max(first, float(earlier["end"].max())) if len(earlier) else first
        return min(begins, free_from), max(last, float(launched["end"].max()))


@dataclass
class AttributedLinks(Links):
    """Links with the columns that components.attribute() adds to both tables.

    host: component and phase (None if unknown), category (of costs.CATEGORIES), node (row of the autograd node that
    the event runs in, or -1).  gpu: component, phase and category of the operator that launched the event.
    """

    source: str  # of the components: named ranges, nn.Module calls, or kinds of operators


def parents(
    start: np.ndarray, end: np.ndarray, thread: np.ndarray, apart: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """For each interval the row of the innermost one that is open on its thread when it starts, or -1, and its end.

    An interval ends with its parent at the latest, but for those `apart`, which are nobody's parent.
    """
    parent, apart = np.full(len(start), -1), np.zeros(len(start), bool) if apart is None else apart
    order = np.lexsort((-end, start, thread))
    # Plain lists, because indexing NumPy arrays one by one is slow.
    starts, ends, threads = start.tolist(), end.tolist(), thread.tolist()
    found, order, leaf = parent.tolist(), order.tolist(), apart.tolist()
    open_intervals: list[int] = []
    current = None
    for i in order:
        if threads[i] != current:
            current, open_intervals = threads[i], []
        started = starts[i]
        while open_intervals and ends[open_intervals[-1]] <= started:
            open_intervals.pop()
        if open_intervals:
            found[i] = open_intervals[-1]
        if leaf[i]:
            continue
        if open_intervals and ends[i] > ends[found[i]]:
            ends[i] = ends[found[i]]
        open_intervals.append(i)
    return np.array(found, dtype=np.int64), np.array(ends, dtype=float)


def host_events(trace: Trace) -> pd.DataFrame:
    """Operators, annotations and module calls in one frame, each with its caller and its self time.

    An asynchronous range has the caller that began it, but takes none of its thread's time: it has a thread of its own.
    """
    columns = ["name", "start", "end", "thread", "kind", "sequence", "forward_thread"]
    kinds = {OPERATOR: trace.operators, ANNOTATION: trace.annotations, MODULE: trace.modules}
    parts = [part.assign(kind=kind) for kind, part in kinds.items()]
    parts = [part for part in parts if len(part)] or parts[:1]
    host = pd.concat(parts, ignore_index=True).reindex(columns=columns)
    numbers = ["sequence", "forward_thread"]
    host[numbers] = host[numbers].fillna(-1).astype(np.int64)
    start, end, thread = (host[name].to_numpy() for name in ("start", "end", "thread"))
    # Of an event that ends after its caller, only the part within counts, so that parts never exceed the whole.
    parent, within = parents(start, end, thread)
    is_operator = (host["kind"] == OPERATOR).to_numpy()
    if (apart := asynchronous(start, end, parent, is_operator)).any():
        parent, within = parents(start, end, thread, apart)
        thread = np.where(apart, thread.max() + np.cumsum(apart), thread)
    nested, end = (parent >= 0) & ~apart, within
    children = np.bincount(parent[nested], weights=(end - start)[nested], minlength=len(host))
    above = parent.copy()
    while (skip := (above >= 0) & ~is_operator[above]).any():
        above[skip] = parent[above[skip]]
    own_us = np.maximum(0.0, end - start - children)
    return host.assign(thread=thread, parent=parent, own_us=own_us, operator_parent=above)


def asynchronous(start: np.ndarray, end: np.ndarray, parent: np.ndarray, is_operator: np.ndarray) -> np.ndarray:
    """Which ranges go on while their thread does something else: they overlap another event without containing it.

    So do collectives, whose range begins in the call that starts them and ends when they are complete: it outlives its
    caller, or an operator that begins in it does not end in it, but does in its caller.
    """
    until = np.append(end, -np.inf)  # nothing ends within caller -1
    crosses = (parent >= 0) & (end > until[parent] + CLOCK_TICK_US)
    out = crosses & ~is_operator
    around = parent[crosses & is_operator]
    fits = end[crosses & is_operator] <= until[parent[around]] + CLOCK_TICK_US
    out[around[fits & ~is_operator[around]]] = True
    return out


def link(trace: Trace) -> Links:
    host, steps = host_events(trace), whole_steps(trace)
    marked = len(steps) > 0
    if not marked:
        edges = [t for t in (trace.operators, trace.annotations, trace.gpu) if len(t)]
        bounds = (min(t["start"].min() for t in edges), max(t["end"].max() for t in edges))
        steps = pd.DataFrame({"number": [0], "start": [bounds[0]], "end": [bounds[1]]})
    calls = trace.launches.assign(
        step=step_at(trace.launches["start"].to_numpy(), steps),
        starts_kernel=where_name(trace.launches, LAUNCHES.search),
        starts_graph=where_name(trace.launches, GRAPH_LAUNCHES.search),
        waits=where_name(trace.launches, WAITS.search),
    )
    calls["starts_kernel"] &= ~captured(calls)
    gpu = link_gpu(trace, calls, steps)
    return Links(trace, host, gpu, calls, steps, marked, step_thread(trace, host))


def whole_steps(trace: Trace) -> pd.DataFrame:
    """The marked steps without a last one that is cut: a mark that opened as recording ended, before any work.

    It contains no operator, on a GPU no call that launches anything, and is far shorter than the others.
    """
    steps = trace.steps
    if len(steps) < 2:
        return steps
    start, end = steps["start"].iloc[-1], steps["end"].iloc[-1]
    launches = trace.launches[where_name(trace.launches, lambda name: STARTS_WORK.search(name))]
    work = trace.operators if launches.empty else launches
    empty = len(work) and not ((work["start"] < end) & (work["end"] > start)).any()
    durations = steps["end"] - steps["start"]
    cut = empty and end - start < CUT_SHORT * durations.iloc[:-1].median()
    return steps.iloc[:-1] if cut else steps


def captured(calls: pd.DataFrame) -> np.ndarray:
    """Calls made while a graph was being captured: they are recorded in it and launch nothing."""
    times = calls["start"].to_numpy()
    begins = np.sort(times[where_name(calls, lambda name: "StreamBeginCapture" in name)])
    ends = np.sort(times[where_name(calls, lambda name: "StreamEndCapture" in name)])
    return np.searchsorted(begins, times) > np.searchsorted(ends, times)


def step_at(times: np.ndarray, steps: pd.DataFrame) -> np.ndarray:
    """The row of the step that was running on the host at each time, or -1; gaps belong to the step before."""
    at = np.searchsorted(steps["start"].to_numpy(), times, side="right") - 1
    return np.where(times < steps["end"].max(), at, -1)


def step_thread(trace: Trace, host: pd.DataFrame) -> int:
    marks = trace.annotations[where_name(trace.annotations, lambda name: name.startswith(STEP))]
    if len(marks):
        return int(marks["thread"].iloc[0])
    if host.empty:
        return -1
    top = host[host["parent"] < 0]
    return int((top["end"] - top["start"]).groupby(top["thread"]).sum().idxmax())


def first_row_of(keys: pd.Series) -> pd.Series:
    """The first row number for each key; keys below 1 mean that there is none."""
    rows = pd.Series(keys.index, index=keys.to_numpy())
    return rows[(rows.index > 0) & ~rows.index.duplicated()]


def launched_before_trace(gpu: pd.DataFrame, calls: pd.DataFrame) -> np.ndarray:
    """Which GPU events belong to calls from before recording began: correlation numbers grow, and theirs are below all
    of the trace."""
    first = calls.loc[calls["correlation"] > 0, "correlation"].min()
    return ((gpu["call"] < 0) & (gpu["correlation"] > 0) & (gpu["correlation"] < first)).to_numpy()


def link_gpu(trace: Trace, calls: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Each GPU event with its launch call, by correlation, and its operator: by external id, or around the call.

    An external id is believed only if its operator was running at the call or, without a call, began before the event.
    """
    operators, gpu = trace.operators, trace.gpu
    call = gpu["correlation"].map(first_row_of(calls["correlation"])).fillna(-1).astype(np.int64).to_numpy()
    launched = np.append(calls["start"].to_numpy(), np.nan)[call]
    of_call = np.append(calls["step"].to_numpy(), -1)[call]
    # In a trace of the GPU alone, steps are in GPU time.
    step = of_call if len(calls) else step_at(gpu["start"].to_numpy(), steps)
    of_graph = np.append(calls["starts_graph"].to_numpy(bool), False)[call]
    gpu = gpu.assign(call=call, launched=launched, step=step, of_graph=of_graph)
    return gpu.assign(operator=operators_of(gpu, calls, operators))


def operators_of(gpu: pd.DataFrame, calls: pd.DataFrame, operators: pd.DataFrame) -> np.ndarray:
    """The row of the operator that launched each GPU event, or -1."""
    if operators.empty:
        return np.full(len(gpu), -1)
    row_of_id = first_row_of(operators["external_id"])
    call, launched = gpu["call"].to_numpy(), gpu["launched"].to_numpy()
    of_call = np.append(calls["external_id"].to_numpy(), -1)[call]
    row = gpu["external_id"].map(row_of_id).fillna(pd.Series(of_call, gpu.index).map(row_of_id))
    row = row.fillna(-1).astype(np.int64).to_numpy()
    start, end = (operators[name].to_numpy()[row] for name in ("start", "end"))
    running = (start - CLOCK_TICK_US <= launched) & (launched <= end + CLOCK_TICK_US)
    alone = np.isnan(launched) & (start <= gpu["start"].to_numpy()) & ~launched_before_trace(gpu, calls)
    row = np.where((row >= 0) & (running | alone), row, -1)
    if (unlinked := (row < 0) & (call >= 0)).any():
        row[unlinked] = operators_around(calls.iloc[call[unlinked]], operators)
    return row


def operators_around(calls: pd.DataFrame, operators: pd.DataFrame) -> np.ndarray:
    """The innermost operator around each call."""
    both = pd.concat([table[["start", "end", "thread"]] for table in (operators, calls)])
    is_call = np.arange(len(both)) >= len(operators)
    caller, _ = parents(*(both[name].to_numpy() for name in ("start", "end", "thread")), is_call)
    return caller[is_call]
