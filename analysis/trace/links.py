"""Links between the events of a trace: host events with callers, GPU events with launch call and
operator."""

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.trace.columns import TABLES
from analysis.trace.nesting import operators_around, parents
from analysis.trace.tables import Trace, has_role, take_or
from analysis.vocabulary import roles
from analysis.vocabulary.roles import Meaning

OPERATOR, ANNOTATION, MODULE = 0, 1, 2  # kinds of host events
CLOCK_TICK_US = 1.0  # some traces are in whole us
# A launched kernel starts within microseconds on an idle GPU (26 at most in ten traces of V100 to
# B200, MI250 and MI300X): what is longer has a cause that the trace does not contain.
LATENCY_US = 100.0


@dataclass
class Replayed:
    """The operators of replayed graphs, the last ones of a trace: what captures and warm-ups tell
    of them."""

    component: np.ndarray  # of each; None: unknown
    phase: np.ndarray
    source: str  # of the components
    where: list[str]  # they were found
    files: set[Path]


@dataclass
class Links:
    """A trace with the links between its events.  `host` begins with the rows of trace.operators:
    row numbers agree."""

    trace: Trace
    # name, start, end, until (at most that of the parent), thread, kind, sequence, forward_thread,
    # parent, own_us, operator_parent, and what names mean
    host: pd.DataFrame
    # trace.gpu with call (row of launches), operator (row of host), launched, of_graph; -1 unknown
    gpu: pd.DataFrame
    calls: pd.DataFrame  # trace.launches with starts_kernel, starts_graph, waits
    thread: int  # the host thread that ran the steps
    replayed: Replayed | None = None

    @property
    def on_gpu(self) -> bool:
        return len(self.gpu) > 0

    @property
    def launches_kernels(self) -> bool:
        """Whether a call that launches a kernel, and captures none, was recorded."""
        return bool(self.calls["starts_kernel"].any())

    @property
    def has_launches(self) -> bool:
        """Whether a call that starts a kernel or a graph was recorded."""
        return self.launches_kernels or bool(self.calls["starts_graph"].any())

    @property
    def ran_on_gpu(self) -> bool:
        """Whether a GPU did work, or was given some of which the trace has nothing."""
        return self.on_gpu or self.launches_kernels

    @property
    def first_replayed(self) -> int:
        """The first row of the operators of replayed graphs that another trace, or another part of
        this one, tells."""
        n = len(self.trace.operators)
        return n - len(self.replayed.component) if self.replayed else n

    @property
    def replayed_rows(self) -> slice:
        """Of host and of the operators, the rows of those of replayed graphs."""
        return slice(self.first_replayed, len(self.trace.operators))

    @property
    def only_of_graph(self) -> np.ndarray:
        """The GPU events of a graph of which nothing tells which of its operators they belong
        to."""
        return (self.gpu["of_graph"] & (self.gpu["operator"] < self.first_replayed)).to_numpy()


def link(trace: Trace) -> Links:
    host = host_events(trace)
    calls = trace.launches.assign(
        starts_kernel=has_role(trace.launches, roles.LAUNCH),
        starts_graph=has_role(trace.launches, roles.GRAPH_LAUNCH),
        waits=has_role(trace.launches, *roles.WAITS),
    )
    calls["starts_kernel"] &= ~captured(calls)
    gpu = link_gpu(trace, calls)
    calls["waits"] = calls["waits"] | held_up(calls, gpu)
    return Links(trace, host, gpu, calls, step_thread(trace, host))


def with_operators(
    links: Links, operators: pd.DataFrame, signatures: list[tuple], of_event: np.ndarray
) -> Links:
    """The links with further operators behind those of the trace, which nothing calls and which
    call nothing.

    operators: as trace.operators.  signatures: behind those of the trace.  of_event: [GPU events]:
    which of these operators launched it, or -1."""
    trace, n, n_new = links.trace, len(links.trace.operators), len(operators)
    names = dtype_of_all([trace.operators["name"], operators["name"]])
    tables = {name: with_names(getattr(trace, name), names) for name in TABLES}
    operators = with_names(operators, names)
    tables["operators"] = joined([tables["operators"], operators])
    signatures = [*trace.signatures, *signatures]
    host = with_names(links.host, names)
    for caller in ("parent", "operator_parent"):
        host[caller] += np.where(host[caller] >= n, n_new, 0)
    alone = {"kind": OPERATOR, "parent": -1, "operator_parent": -1, "own_us": 0.0}
    added = operators.assign(**alone, until=operators["end"])[host.columns]
    host = joined([host.iloc[:n], added, host.iloc[n:]])
    gpu = with_names(links.gpu, names)
    gpu["operator"] = np.where(of_event >= 0, n + of_event, gpu["operator"])
    gpu["external_id"] = np.where(of_event >= 0, -1, gpu["external_id"])  # of the graph as a whole
    trace = replace(trace, **tables, signatures=signatures)
    return replace(links, trace=trace, host=host, gpu=gpu, calls=with_names(links.calls, names))


def with_names(table: pd.DataFrame, names: pd.CategoricalDtype) -> pd.DataFrame:
    return table.assign(name=table["name"].astype(names))


def joined(tables: list[pd.DataFrame]) -> pd.DataFrame:
    """The rows of these tables, which have the same columns."""
    columns = {}
    for name in tables[0].columns:
        parts = [table[name] for table in tables]
        if isinstance(parts[0].dtype, pd.CategoricalDtype):
            dtype = dtype_of_all(parts)
            parts = [part.astype(dtype) for part in parts]
        columns[name] = pd.concat(parts, ignore_index=True)
    return pd.DataFrame(columns)


def dtype_of_all(columns: list[pd.Series]) -> pd.CategoricalDtype:
    """With the categories of the first of these columns, and then those that others have too."""
    categories = dict.fromkeys(itertools.chain(*(column.cat.categories for column in columns)))
    return pd.CategoricalDtype(pd.Index(categories, dtype=object))


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
    apart = asynchronous(start, end, parent, is_operator)
    if apart.any():
        parent, within = parents(start, end, thread, apart)
        thread = np.where(apart, thread.max() + np.cumsum(apart), thread)
    nested, end = (parent >= 0) & ~apart, within
    children = np.bincount(parent[nested], weights=(end - start)[nested], minlength=len(host))
    above = parent.copy()
    is_no_operator = np.append(~is_operator, False)  # the last: of none, row -1
    skips = is_no_operator[above]
    while skips.any():
        above[skips] = parent[above[skips]]
        skips = is_no_operator[above]
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


def held_up(calls: pd.DataFrame, gpu: pd.DataFrame) -> np.ndarray:
    """Which calls waited though their names do not say so: asynchronous copies that returned only
    once the copy had ended, as those of pageable memory do, and long calls without an event of
    their own, copies, or of memory, which may wait too, that returned once all that had been
    launched before had ended."""
    copies = gpu[has_role(gpu, roles.HOST_COPY) & (gpu["call"] >= 0).to_numpy()]
    begun, rows = calls["start"].to_numpy(), np.arange(len(calls))
    returned = calls["end"].to_numpy() + CLOCK_TICK_US
    in_order = gpu.assign(launched=gpu["launched"].fillna(-np.inf)).sort_values("launched")
    before = np.searchsorted(in_order["launched"], begun) - 1
    ended = take_or(in_order["end"].cummax().to_numpy(), before, -np.inf)
    without_event = has_role(calls, roles.COPY, roles.ALLOCATION) & ~np.isin(rows, gpu["call"])
    until_all_ended = (ended > begun) & (ended <= returned)
    waits = without_event & (returned - begun > LATENCY_US) & until_all_ended
    within_call = copies["end"].to_numpy() <= returned[copies["call"]]
    return waits | np.isin(rows, copies["call"][within_call])


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


def rows_of(keys: pd.Series, wanted: pd.Series) -> np.ndarray:
    """For each of these keys the first row that has it, or -1."""
    return wanted.map(first_row_of(keys)).fillna(-1).astype(np.int64).to_numpy()


def launched_before_trace(gpu: pd.DataFrame, calls: pd.DataFrame) -> np.ndarray:
    """Which GPU events belong to calls from before recording began: correlation numbers grow, and
    theirs are below all of the trace."""
    first = calls.loc[calls["correlation"] > 0, "correlation"].min()
    return ((gpu["call"] < 0) & (gpu["correlation"] > 0) & (gpu["correlation"] < first)).to_numpy()


def link_gpu(trace: Trace, calls: pd.DataFrame) -> pd.DataFrame:
    """Each GPU event with its launch call, by correlation, and its operator: by external id, or
    around the call.

    An external id is believed only if its operator was running at the call or, without a call,
    began before the event.
    """
    call = rows_of(calls["correlation"], trace.gpu["correlation"])
    gpu = trace.gpu.assign(
        call=call,
        launched=take_or(calls["start"], call, np.nan),
        of_graph=take_or(calls["starts_graph"], call, False),
    )
    return gpu.assign(operator=operators_of(gpu, calls, trace.operators))


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
    began_before = start <= gpu["start"].to_numpy()
    without_call = np.isnan(launched) & began_before & ~launched_before_trace(gpu, calls)
    row = np.where((row >= 0) & (running | without_call), row, -1)
    unlinked = (row < 0) & (call >= 0)
    if unlinked.any():
        row[unlinked] = operators_around(calls.iloc[call[unlinked]], operators)
    return row
