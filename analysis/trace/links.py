"""Links between the events of a trace: host events with callers, GPU events with launch call,
operator and step."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from analysis.trace.nesting import operators_around, parents
from analysis.trace.steps import (
    COVERED,
    FEW_UNFLUSHED,
    REPEATS,
    StepApart,
    incomplete_at_ends,
    outlying_first,
    repeated_steps,
    step_at,
    whole_steps,
)
from analysis.trace.tables import Trace, has_role, steps_between, take_or
from analysis.vocabulary import roles
from analysis.vocabulary.roles import Meaning

OPERATOR, ANNOTATION, MODULE = 0, 1, 2  # kinds of host events
CLOCK_TICK_US = 1.0  # some traces are in whole us
# A launched kernel starts within microseconds on an idle GPU (26 at most in ten traces of V100 to
# B200, MI250 and MI300X): what is longer has a cause that the trace does not contain.
LATENCY_US = 100.0
# What steps do, but layers do not: wait for the device, copy to or from the host, fetch data,
# update weights.
BETWEEN_STEPS = {
    "role": (roles.WAIT, *roles.HOST_COPIES, roles.SCALAR_READ),
    "named_phase": ("data", "optimizer"),
}


def cached_on_links(function: Callable) -> Callable:
    """A function of Links, computed once for the same ones and the same arguments; its result is
    not to be changed."""

    @functools.wraps(function)
    def kept(links: Links, *arguments):
        key = (function, *arguments)
        if key not in links.results:
            links.results[key] = function(links, *arguments)
        return links.results[key]

    return kept


@dataclass
class Links:
    """A trace with the links between its events.  `host` begins with the rows of trace.operators:
    row numbers agree."""

    trace: Trace
    # name, start, end, until (at most that of the parent), thread, kind, sequence, forward_thread,
    # parent, own_us, operator_parent, and what names mean
    host: pd.DataFrame
    # trace.gpu with call (row of launches), operator (row of host), launched, step, of_graph; -1
    # unknown
    gpu: pd.DataFrame
    calls: pd.DataFrame  # trace.launches with step, starts_kernel, starts_graph, waits
    steps: pd.DataFrame  # those that are judged; the entire trace as one step if none are marked
    steps_are_marked: bool  # or found where the work repeats
    thread: int  # the host thread that ran the steps
    steps_found: str | None = field(
        default=None, kw_only=True
    )  # how, where no ProfilerStep marks them
    unflushed: int = field(
        default=0, kw_only=True
    )  # launches at the ends of the trace without a kernel, if few
    apart: list[StepApart] = field(
        default_factory=list, kw_only=True
    )  # steps that are not judged, in order
    idle_left: float = field(
        default=1.0, kw_only=True
    )  # of the GPU's idle time, what steps have without the profiler
    results: dict = field(
        default_factory=dict, repr=False, kw_only=True
    )  # of functions that are computed once

    @property
    def on_gpu(self) -> bool:
        return len(self.gpu) > 0

    @property
    def first_replayed(self) -> int:
        """The first row of the operators of replayed graphs that another trace, or another part of
        this one, tells."""
        return len(self.trace.operators) - len(
            self.trace.replayed.component if self.trace.replayed else ()
        )

    @property
    def replayed_rows(self) -> slice:
        """Of host and of the operators, the rows of those of replayed graphs."""
        return slice(self.first_replayed, len(self.trace.operators))

    @property
    def only_of_graph(self) -> np.ndarray:
        """The GPU events of a graph of which nothing tells which of its
        operators they belong to."""
        return (self.gpu["of_graph"] & (self.gpu["operator"] < self.first_replayed)).to_numpy()

    @functools.cached_property
    def window(self) -> tuple[float, float]:
        """The time that the step tables account for, in us.

        The time of the steps on the host, shifted to their work on the GPU, which runs behind the
        host: it may still be busy with earlier work when they begin,
        and with their own after they end.
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

    host: component and phase (None if unknown), category (of vocabulary.kernel_classes), node
    (row of the autograd node that the event runs in, or -1).  gpu: component, phase and category of
    the operator that launched the event.
    """

    source: str  # of the components: named ranges, nn.Module calls, or kinds of operators


def host_events(trace: Trace) -> pd.DataFrame:
    """Operators, annotations and module calls in one frame, each with its caller and its self time.

    An asynchronous range has the caller that began it, but takes none of its thread's time: it has
    a thread of its own.
    """
    columns = [
        "name",
        "start",
        "end",
        "thread",
        "kind",
        "sequence",
        "forward_thread",
        *Meaning._fields,
    ]
    kinds = {OPERATOR: trace.operators, ANNOTATION: trace.annotations, MODULE: trace.modules}
    parts = [part.assign(kind=kind) for kind, part in kinds.items()]
    parts = [part for part in parts if len(part)] or parts[:1]
    host = pd.concat(parts, ignore_index=True).reindex(columns=columns)
    numbers = ["sequence", "forward_thread"]
    host[numbers] = host[numbers].fillna(-1).astype(np.int64)
    start, end, thread = (host[name].to_numpy() for name in ("start", "end", "thread"))
    # Of an event that ends after its caller, only the part within counts, so that parts never
    # exceed the whole.
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
    return host.assign(
        thread=thread, parent=parent, own_us=own_us, operator_parent=above, until=within
    )


def asynchronous(
    start: np.ndarray, end: np.ndarray, parent: np.ndarray, is_operator: np.ndarray
) -> np.ndarray:
    """Which ranges go on while their thread does something else: they overlap another event without
    containing it.

    So do collectives, whose range begins in the call that starts them and ends when they are
    complete: it outlives its caller, or an operator that begins in it does not end in it, but does
    in its caller.
    """
    until = np.append(end, -np.inf)  # nothing ends within caller -1
    crosses = (parent >= 0) & (end > until[parent] + CLOCK_TICK_US)
    out = crosses & ~is_operator
    around = parent[crosses & is_operator]
    fits = end[crosses & is_operator] <= until[parent[around]] + CLOCK_TICK_US
    out[around[fits & ~is_operator[around]]] = True
    return out


def link(trace: Trace) -> Links:
    host, steps, found = host_events(trace), whole_steps(trace), None
    if steps.empty and trace.steps_from is None:
        steps, found = unmarked_steps(trace, host)
    marked = len(steps) > 0
    if not marked:
        times = pd.concat(
            [table[["start", "end"]] for table in (trace.operators, trace.annotations, trace.gpu)]
        )
        steps = pd.DataFrame(
            {"number": [0], "start": times["start"].min(), "end": times["end"].max()}
        )
    calls = trace.launches.assign(
        step=step_at(trace.launches["start"].to_numpy(), steps),
        starts_kernel=has_role(trace.launches, roles.LAUNCH),
        starts_graph=has_role(trace.launches, roles.GRAPH_LAUNCH),
        waits=has_role(trace.launches, *roles.WAITS),
    )
    calls["starts_kernel"] &= ~captured(calls)
    gpu = link_gpu(trace, calls, steps)
    calls["waits"] |= held_up(calls, gpu)
    unflushed = unflushed_launches(calls, gpu)
    apart, is_first = (
        steps_apart(steps, calls, gpu, unflushed) if marked else (np.zeros(1, bool), False)
    )
    others = [
        StepApart(*row, is_first and not i)
        for i, row in enumerate(steps.itertuples(index=False))
        if apart[i]
    ]
    if others:
        steps = steps[~apart].reset_index(drop=True)
        step_of = np.append(np.where(apart, -1, np.cumsum(~apart) - 1), -1)  # and of -1
        calls["step"], gpu["step"] = step_of[calls["step"]], step_of[gpu["step"]]
    thread = step_thread(trace, host)
    return Links(
        trace,
        host,
        gpu,
        calls,
        steps,
        marked,
        thread,
        steps_found=found,
        unflushed=int(unflushed.sum()),
        apart=others,
    )


def unflushed_launches(calls: pd.DataFrame, gpu: pd.DataFrame) -> np.ndarray:
    """Which calls launched a kernel at the beginning or the end of the trace that was not written,
    while those between have theirs; none where they are more than a few of all."""
    starts = np.flatnonzero(calls["starts_kernel"].to_numpy(bool))
    starts = starts[np.argsort(calls["start"].to_numpy()[starts], kind="stable")]
    kernels = gpu["correlation"][(gpu["kind"] == "kernel").to_numpy()]
    answered = np.flatnonzero(calls["correlation"].isin(kernels).to_numpy()[starts])
    out = np.zeros(len(calls), bool)
    if len(answered):
        at_ends = np.append(starts[: answered[0]], starts[answered[-1] + 1 :])
        out[at_ends] = len(at_ends) <= FEW_UNFLUSHED * len(starts)
    return out


def steps_apart(
    steps: pd.DataFrame, calls: pd.DataFrame, gpu: pd.DataFrame, unflushed: np.ndarray
) -> tuple[np.ndarray, bool]:
    """Which steps are not judged with the others, and whether the first is one because it takes far
    longer: no others would remain.  Those at an end that lack kernels are left out too."""
    n, step = len(steps), calls["step"].to_numpy()
    launches = calls["starts_kernel"].to_numpy(bool) & (step >= 0)
    kernels = gpu["correlation"][(gpu["kind"] == "kernel").to_numpy()]
    lost = launches & ~calls["correlation"].isin(kernels).to_numpy() & (len(gpu) > 0)
    missing, launched, at_end = (
        np.bincount(step[which], minlength=n) for which in (lost, launches, lost & unflushed)
    )
    apart = incomplete_at_ends(missing, launched, at_end == missing)
    # A GPU that runs behind takes as long as its work: how long the host takes to launch it is
    # hidden.
    of_gpu, us = gpu["step"].to_numpy(), (gpu["end"] - gpu["start"]).to_numpy()
    busy = np.bincount(of_gpu[of_gpu >= 0], us[of_gpu >= 0], minlength=n)
    length = np.maximum((steps["end"] - steps["start"]).to_numpy(float), busy)
    is_first = not apart[0] and outlying_first(length[~apart])
    apart[0] |= is_first
    return apart, is_first


def held_up(calls: pd.DataFrame, gpu: pd.DataFrame) -> np.ndarray:
    """Which calls waited though their names do not say so: asynchronous copies that returned only
    once the copy had ended, as those of pageable memory do, and long calls without an event of
    their own, copies, or of memory, which may wait too, that returned once all that had been
    launched before had ended."""
    copies = gpu[has_role(gpu, roles.HOST_COPY) & (gpu["call"] >= 0).to_numpy()]
    begun, returned, rows = (
        calls["start"].to_numpy(),
        calls["end"].to_numpy() + CLOCK_TICK_US,
        np.arange(len(calls)),
    )
    in_order = gpu.assign(launched=gpu["launched"].fillna(-np.inf)).sort_values("launched")
    before = np.searchsorted(in_order["launched"], begun) - 1
    ended = take_or(in_order["end"].cummax().to_numpy(), before, -np.inf)
    alone = has_role(calls, roles.COPY, roles.ALLOCATION) & ~np.isin(rows, gpu["call"])
    long = alone & (returned - begun > LATENCY_US) & (ended > begun) & (ended <= returned)
    return long | np.isin(
        rows, copies["call"][copies["end"].to_numpy() <= returned[copies["call"]]]
    )


def median_step(links: Links) -> int:
    """The row of the step with the median duration."""
    durations = (links.steps["end"] - links.steps["start"]).to_numpy()
    return int(np.argsort(durations, kind="stable")[len(durations) // 2])


def unmarked_steps(trace: Trace, host: pd.DataFrame) -> tuple[pd.DataFrame, str | None]:
    """Steps where no event marks them, and how they were found; none if they are not."""
    names, times, between = work_in_order(trace, host)
    steps, length = repeated_steps(names, times, between, len(trace.gpu) > 0)
    if (
        len(steps) and trace.gpu.empty and steps["end"].iloc[-1] == times[-1]
    ):  # with the work that begins there
        steps.loc[steps.index[-1], "end"] = host["end"][
            (host["operator_parent"] < 0) & (host["kind"] == OPERATOR)
        ].max()
    # Several within one range or operator are parts of what it does, such as layers.
    ends_in = np.searchsorted(steps["end"], host["end"] + CLOCK_TICK_US, side="right")
    in_one = ends_in - np.searchsorted(steps["start"], host["start"] - CLOCK_TICK_US)
    if len(steps) and in_one.max(initial=0) <= 1:
        return steps, f"repetitions of the same {length:,} events"
    updates = trace.annotations[has_role(trace.annotations, roles.OPTIMIZER_STEP)]
    often = updates["name"].value_counts()
    if len(often) and often.iloc[0] > REPEATS:
        marks = updates[(updates["name"] == often.index[0]).to_numpy()].sort_values("start")
        between = steps_between(marks["start"].to_numpy(), marks["end"].to_numpy())
        if between["end"].iloc[-1] - between["start"].iloc[0] > COVERED * (
            host["end"].max() - host["start"].min()
        ):
            return between, f"from one {often.index[0]} to the next"
    return steps.iloc[:0], None


def work_in_order(trace: Trace, host: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The work of a trace in the order in which the host began it: numbers of names, times; and
    times of what happens only between steps.  On a GPU, its events where their calls are in the
    trace, else the outermost operators."""
    calls, gpu = trace.launches, trace.gpu
    if len(gpu):
        call = (
            gpu["correlation"]
            .map(first_row_of(calls["correlation"]))
            .fillna(-1)
            .astype(np.int64)
            .to_numpy()
        )
        work = gpu.assign(began=take_or(calls["start"], call, np.nan)).dropna(subset="began")
    else:
        outer = (host["operator_parent"] < 0) & (host["thread"] == step_thread(trace, host))
        work = host.assign(began=host["start"])[(outer & (host["kind"] == OPERATOR)).to_numpy()]
    work = work.sort_values(["began", "start"], kind="stable")
    tables = (calls, host, work.assign(start=work["began"]))
    found = (
        (table, table[column].isin(told))
        for table in tables
        for column, told in BETWEEN_STEPS.items()
    )
    between = [table["start"].to_numpy()[which.to_numpy()] for table, which in found]
    return (
        work["name"].cat.codes.to_numpy().astype(np.int64),
        work["began"].to_numpy(),
        np.concatenate(between),
    )


def captured(calls: pd.DataFrame) -> np.ndarray:
    """Calls made while a graph was being captured: they are recorded in it and launch nothing."""
    times, edges = calls["start"].to_numpy(), (roles.CAPTURE_BEGIN, roles.CAPTURE_END)
    begins, ends = (np.sort(times[has_role(calls, edge)]) for edge in edges)
    return np.searchsorted(begins, times) > np.searchsorted(ends, times)


def step_thread(trace: Trace, host: pd.DataFrame) -> int:
    marks = trace.annotations[has_role(trace.annotations, roles.STEP)]
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
    """Which GPU events belong to calls from before recording began: correlation numbers grow, and
    theirs are below all of the trace."""
    first = calls.loc[calls["correlation"] > 0, "correlation"].min()
    return ((gpu["call"] < 0) & (gpu["correlation"] > 0) & (gpu["correlation"] < first)).to_numpy()


def link_gpu(trace: Trace, calls: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Each GPU event with its launch call, by correlation, and its operator: by external id, or
    around the call.

    An external id is believed only if its operator was running at the call or, without a call,
    began before the event.
    """
    operators, gpu = trace.operators, trace.gpu
    call = (
        gpu["correlation"]
        .map(first_row_of(calls["correlation"]))
        .fillna(-1)
        .astype(np.int64)
        .to_numpy()
    )
    launched, of_call = take_or(calls["start"], call, np.nan), take_or(calls["step"], call, -1)
    # In a trace of the GPU alone, or of one whose launches nothing links to its events, steps are
    # in GPU time.
    linked = (call >= 0).any() or ((gpu["correlation"] > 0).any() and len(calls) > 0)
    step = of_call if linked else step_at(gpu["start"].to_numpy(), steps)
    of_graph = take_or(calls["starts_graph"], call, False)
    gpu = gpu.assign(call=call, launched=launched, step=step, of_graph=of_graph)
    return gpu.assign(operator=operators_of(gpu, calls, operators))


def operators_of(gpu: pd.DataFrame, calls: pd.DataFrame, operators: pd.DataFrame) -> np.ndarray:
    """The row of the operator that launched each GPU event, or -1."""
    if operators.empty:
        return np.full(len(gpu), -1)
    row_of_id = first_row_of(operators["external_id"])
    call, launched = gpu["call"].to_numpy(), gpu["launched"].to_numpy()
    of_call = take_or(calls["external_id"], call, -1)
    row = gpu["external_id"].map(row_of_id).fillna(pd.Series(of_call, gpu.index).map(row_of_id))
    row = row.fillna(-1).astype(np.int64).to_numpy()
    start, end = (operators[name].to_numpy()[row] for name in ("start", "end"))
    running = (start - CLOCK_TICK_US <= launched) & (launched <= end + CLOCK_TICK_US)
    alone = (
        np.isnan(launched) & (start <= gpu["start"].to_numpy()) & ~launched_before_trace(gpu, calls)
    )
    row = np.where((row >= 0) & (running | alone), row, -1)
    if (unlinked := (row < 0) & (call >= 0)).any():
        row[unlinked] = operators_around(calls.iloc[call[unlinked]], operators)
    return row
