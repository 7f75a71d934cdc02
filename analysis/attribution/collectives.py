"""Collectives of a trace: which, in which group, how many bytes, how long, and how much of it
nothing else overlapped.

One collective leaves several events: the operator of PyTorch that starts it (`c10d::allreduce_`),
`record_param_comms` with the group and its sizes, a range of the backend (`nccl:all_reduce`,
`gloo:all_reduce`), and on a GPU one or more kernels.  Here they are one call.  On a GPU its time is
that of the kernels, on a host that of the backend's range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.trace.links import OPERATOR, first_row_of
from analysis.trace.nesting import nearest_marked_ancestor, nearest_marked_caller, operators_around
from analysis.trace.reasons import NOT_IN_TRACE, UNDETERMINED
from analysis.trace.steps import step_at
from analysis.trace.tables import Trace, has_role, most_frequent, take_or, take_or_none
from analysis.trace.timeline import Timeline, cached_on_timeline
from analysis.vocabulary import roles
from analysis.vocabulary.collectives import UNKNOWN
from analysis.vocabulary.operators import BYTES_OF, TENSORS
from analysis.work.sent_bytes import sent_share
from harness.base.layer_names import starred
from harness.base.sections import Section
from harness.base.tables import Column, column, text_columns
from harness.base.text import count_of, significant
from harness.base.units import MB
from harness.instruments.no_sync import NoSyncSteps, no_sync_text
from harness.schema import Document, Unknown, field

ROOT = "outside of units"  # what no inner module gathers
OF_CALLS = "kind group group_size ranks component bytes".split()
EVENT_COLUMNS = [*OF_CALLS, *"phase start end step calls row".split()]
# (shapes, types, values) of an event's inputs, as Trace.signatures has them; None: not recorded
Signature = tuple | None


ONE_TRACE = "needs the traces of all ranks"
NO_BYTES = "its bytes are not in the trace"
NO_DIFFERENCE = "--no-sync-steps was not given, or there is no summary"


class MeasuredCollectiveRow(Document):
    kind: str = field("all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, ...; unknown")
    group: str | None = field("description or name of the process group", null=NOT_IN_TRACE)
    group_size: int | None = field("ranks", null=NOT_IN_TRACE)
    phase: str | None = field("in which it was begun", null="in none")
    component: str = field("part of the model that it was begun for")
    calls: int = field("in the steps of the trace")
    bytes: int | None = field(
        "of the larger of input and output, summed over calls", null=UNDETERMINED
    )
    time_ms: float = field("summed over calls, waiting for other ranks included")
    exposed_ms: float = field("of it, that no computation overlapped; the rest was hidden")
    waiting_ms: float | None = field(
        "of exposed_ms, until the last rank arrived; the rest: transfer", null=ONE_TRACE
    )
    algorithm_bandwidth_gb_per_sec: float | None = field(
        "10^9 bytes/s, of transfer alone if known", null=NO_BYTES
    )
    bus_bandwidth_gb_per_sec: float | None = field("as nccl-tests define it", null=NO_BYTES)


class PredictedBesideRow(Document):
    kind: str = field("as in collectives")
    group_size: int = field("ranks")
    predicted_calls: int = field("per step")
    calls: float = field("per step, measured")
    predicted_bytes: int = field("per step")
    bytes: float | None = field("per step, measured", null=NOT_IN_TRACE)
    time_ms: float = field("per step, measured")
    bus_bandwidth_gb_per_sec: float | None = field("measured", null=NOT_IN_TRACE)


class StepCommunication(Document):
    steps: int = field("of which the mean is taken")
    time_ms: float = field("per step, in which some collective was in progress")
    exposed_ms: float = field("per step, of time_ms: no computation overlapped it")
    hidden_ms: float = field("per step, the rest")
    waiting_ms: float | None = field(
        "per step, of exposed_ms: until the last rank arrived", null=ONE_TRACE
    )
    transfer_ms: float | None = field("per step, of exposed_ms: the rest", null=ONE_TRACE)
    exposed_backward_ms: float = field(
        "per step, of exposed_ms: begun in the backward pass; by_difference measures it"
    )
    by_difference: NoSyncSteps | None = field("measured without a profiler", null=NO_DIFFERENCE)
    predicted: list[PredictedBesideRow] | None = field(
        "beside it", null="not a run of several ranks of this workshop"
    )


@dataclass
class Collectives:
    """The collectives of one rank.

    events: a row for each kernel or range, by start: kind, group (None: not in the trace),
    group_size (-1: unknown), ranks (of the group, as text), phase, component, bytes (NaN: unknown),
    start and end in us of the trace, step (-1: in none), calls (1 for the first event of a call,
    else 0, as for bytes), row (of gpu or host).  on_gpu: whether they are kernels.
    computes: which rows of host are operators that hide those of the host.
    """

    events: pd.DataFrame
    on_gpu: bool
    computes: np.ndarray


@cached_on_timeline
def collectives_of(timeline: Timeline) -> Collectives:
    """The collectives of a trace: those on the GPU if it has any, else those of the host."""
    calls = host_calls(timeline)
    communicates = (timeline.gpu["category"] == "communication").to_numpy()
    has_kernels = bool(communicates.any())
    events = on_gpu(timeline, calls, communicates) if has_kernels else on_host(timeline, calls)
    events = with_known_groups(events, timeline.trace)
    events = events.sort_values("start", kind="stable", ignore_index=True)
    return Collectives(events, has_kernels, computes(timeline.host, calls.call_of))


# ---- Calls ---------------------------------------------------------------------------------------


class HostCalls(NamedTuple):
    """The collectives that the host began."""

    # A row for each, by its row of host: kind, group, group_size, ranks, phase, component,
    # bytes
    table: pd.DataFrame
    call_of: np.ndarray  # [host events]: the call that each belongs to, or -1


def host_calls(timeline: Timeline) -> HostCalls:
    host, trace = timeline.host, timeline.trace
    row_of_note = trace.comms["operator"].map(first_row_of(trace.operators["external_id"]))
    noted = trace.comms.set_axis(row_of_note)
    noted = noted[noted.index.notna() & ~noted.index.duplicated()]
    note_rows = noted.index.to_numpy(int)
    signatures = signatures_of_host(trace)
    marked, call_of = calls_of_rows(host, note_rows, signatures)
    inside = np.flatnonzero(marked)
    rows = np.unique(call_of[inside])
    notes = noted.groupby(call_of[note_rows])
    kind = host["collective"].astype(object).fillna(UNKNOWN).iloc[rows]
    kind = kind.where(kind != UNKNOWN, notes["kind"].first().reindex(rows)).fillna(UNKNOWN)
    bytes_by_shapes = {}
    for row, members in pd.Series(inside).groupby(call_of[inside]):
        bytes_by_shapes[row] = message_bytes([signatures[member] for member in members])
    noted_bytes = notes["bytes"].max().reindex(rows)
    table = notes[["group", "group_size", "ranks"]].first().reindex(rows)
    table = table.assign(
        kind=kind,
        bytes=noted_bytes.where(noted_bytes > 0, pd.Series(bytes_by_shapes, dtype=float)),
        phase=phases_of_calls(timeline, rows),
        component=components_of_calls(host, rows),
    )
    return HostCalls(table, call_of)


def signatures_of_host(trace: Trace) -> list[Signature]:
    """By row of host, which begins with operators and annotations; module calls have none."""
    numbers = np.concatenate([trace.operators["signature"], trace.annotations["signature"]])
    by_number = [*trace.signatures, None]  # the last one is that of -1
    return [by_number[number] for number in numbers.tolist()]


class CallsOfRows(NamedTuple):
    """Arrays with an entry for each host event."""

    marked: np.ndarray  # bool: it is an event of a collective
    # The row of the call that it belongs to: the outermost of them around it, or for a range the
    # operator that issued it; -1: none
    call_of: np.ndarray


def calls_of_rows(
    host: pd.DataFrame, note_rows: np.ndarray, signatures: list[Signature]
) -> CallsOfRows:
    """note_rows: those of record_param_comms."""
    is_operator = (host["kind"] == OPERATOR).to_numpy()
    is_range = has_role(host, *roles.COLLECTIVE_RANGES)
    marked = is_range | has_role(host, roles.COLLECTIVE)
    marked[note_rows] = True
    parent = host["parent"].to_numpy()
    outermost = marked & (nearest_marked_caller(parent, marked) < 0)
    call_of = nearest_marked_ancestor(parent, outermost)
    has_range = np.isin(np.arange(len(host)), call_of[is_range & ~outermost])
    ranges = np.flatnonzero(outermost & is_range)
    operators = np.flatnonzero(outermost & is_operator & ~has_range)
    stands_for = np.arange(len(host))
    for row, operator in issued_by(host, ranges, operators, signatures).items():
        stands_for[row] = operator
    return CallsOfRows(marked, take_or(stands_for, call_of, -1))


def issued_by(
    host: pd.DataFrame, ranges: np.ndarray, operators: np.ndarray, signatures: list[Signature]
) -> dict[int, int]:
    """The operator that began each of these ranges, by rows of host; those of no known operator are
    left out.

    A backend with threads of its own, as gloo, takes its work in the order in which it was issued:
    a range belongs to the first operator before it that has no range yet and, where inputs were
    recorded, one of the same size.
    """
    start = host["start"].to_numpy()
    operator_of = {}
    waiting = sorted(operators.tolist(), key=start.__getitem__)
    for row in sorted(ranges.tolist(), key=start.__getitem__):
        sent = set(elements_of_inputs(signatures[row]))
        for place, operator in enumerate(waiting):
            if start[operator] > start[row]:
                break
            if not sent or sent.intersection(elements_of_inputs(signatures[operator])):
                operator_of[row] = operator
                del waiting[place]
                break
    return operator_of


def message_bytes(signatures: list[Signature]) -> float:
    """Bytes of a call, the larger of input and output, from the inputs of its host events; NaN if
    unknown.

    The operator has both as its inputs; but of a list of tensors only the range of the backend
    tells the type."""
    most_elements, element_bytes = 0, None
    for signature in signatures:
        most_elements = max([most_elements, *elements_of_inputs(signature)])
        if signature and element_bytes is None:
            sizes = [BYTES_OF[kind] for kind in signature[1] or [] if kind in BYTES_OF]
            element_bytes = sizes[0] if sizes else None
    return float(most_elements * element_bytes) if element_bytes and most_elements else np.nan


def elements_of_inputs(signature: Signature) -> list[int]:
    """Elements of each recorded input that is a tensor,
    or a list of tensors; [] if none were recorded."""
    if signature is None:
        return []
    shapes, types, _ = signature
    counts = []
    for shape, kind in zip(shapes, types or [], strict=False):
        if kind in TENSORS:
            counts.append(elements_in(shape))
    return [n for n in counts if n]


def elements_in(shape: list) -> int:
    """Elements of a tensor of this shape, or of all in a list of shapes."""
    if shape and isinstance(shape[0], list):
        return sum(map(elements_in, shape))
    return math.prod(shape)


def phases_of_calls(timeline: Timeline, rows: np.ndarray) -> np.ndarray:
    """The phase of each call.  Where a trace names phases, a call outside of them and of the
    backward pass, such as the sum of losses over ranks, is in none: having a sequence number does
    not make it forward work."""
    host = timeline.host
    named = has_role(host, roles.PHASE)
    phase = host["phase"].to_numpy(object)[rows].copy()
    if named.any():
        in_no_phase = nearest_marked_ancestor(host["parent"].to_numpy(), named)[rows] < 0
        phase[in_no_phase & (host["node"].to_numpy()[rows] < 0)] = None
    return phase


def components_of_calls(host: pd.DataFrame, rows: np.ndarray) -> np.ndarray:
    """The part of the model that each call belongs to: the range of a sharded unit names it,
    'layers.*' for layers.3, else it is that of the event."""
    unit = has_role(host, roles.UNIT)
    modules = host["about"][unit].astype(object).fillna(ROOT)
    names = host["component"].to_numpy(object).copy()
    names[unit] = [starred(module, whole_layers=True) for module in modules]
    named = nearest_marked_ancestor(host["parent"].to_numpy(), unit)[rows]
    return np.where(named >= 0, names[named], names[rows])


# ---- Events --------------------------------------------------------------------------------------


def on_gpu(timeline: Timeline, calls: HostCalls, communicates: np.ndarray) -> pd.DataFrame:
    """Communication kernels, each with its call; one whose call is not in the trace is a call of
    its own."""
    gpu = timeline.gpu[communicates]
    call = take_or(calls.call_of, gpu["operator"].to_numpy(), -1)
    alone = np.flatnonzero((call < 0) & (gpu["call"] >= 0).to_numpy())
    of_alone = ranges_around(timeline, gpu["call"].to_numpy()[alone])
    call[alone] = take_or(calls.call_of, of_alone, -1)
    row = calls.table.index.get_indexer(call)
    events = gpu[["start", "end", "step", "device", "stream", "phase"]].copy()
    for name in OF_CALLS:
        events[name] = take_or_none(calls.table[name], row)
    kind_of_kernel = gpu["external_id"].map(kinds_noted(timeline.trace)).astype(object)
    kind_of_kernel = kind_of_kernel.fillna(gpu["collective"].astype(object)).fillna(UNKNOWN)
    is_unknown = events["kind"].isin([None, UNKNOWN])
    events["kind"] = np.where(is_unknown, kind_of_kernel, events["kind"])
    events["component"] = events["component"].fillna(gpu["component"])
    begins_call = (call < 0) | ~pd.Series(call).duplicated().to_numpy()
    events["calls"] = begins_call.astype(int)
    events["bytes"] = events["bytes"].astype(float).where(begins_call, 0.0)
    events["row"] = np.flatnonzero(communicates)
    return events


def kinds_noted(trace: Trace) -> pd.Series:
    """The kinds of collectives that kernels note in their own arguments, by external id: an
    all-to-all is made of kernels that are called SendRecv."""
    comms = trace.comms
    is_known = (comms["operator"] > 0) & (comms["kind"] != UNKNOWN)
    return comms[is_known].drop_duplicates("operator").set_index("operator")["kind"]


def ranges_around(timeline: Timeline, calls: np.ndarray) -> np.ndarray:
    """The row of host of the backend's range around each call, or -1: older versions have no
    operator for it."""
    trace = timeline.trace
    ranges = trace.annotations[has_role(trace.annotations, *roles.COLLECTIVE_RANGES)]
    rows = ranges.index.to_numpy() + len(trace.operators)
    return take_or(rows, operators_around(timeline.calls.iloc[calls], ranges), -1)


def on_host(timeline: Timeline, calls: HostCalls) -> pd.DataFrame:
    """The ranges of the backend."""
    host = timeline.host
    is_range = has_role(host, roles.COLLECTIVE_RANGE)  # others end once the kernel is queued
    is_outer = nearest_marked_caller(host["parent"].to_numpy(), is_range) < 0
    rows = np.flatnonzero(is_range & is_outer)
    call = calls.call_of[rows]
    begins_call = ~pd.Series(call).duplicated()
    events = calls.table.loc[call].reset_index(drop=True)
    events["start"] = host["start"].to_numpy()[rows]
    events["end"] = host["end"].to_numpy()[rows]  # not until: it may outlive its caller
    events["step"] = step_at(events["start"].to_numpy(), timeline.steps)
    events["calls"] = begins_call.astype(int)
    events["bytes"] = events["bytes"].where(begins_call, 0.0)
    events["row"] = rows
    return events


def computes(host: pd.DataFrame, call_of: np.ndarray) -> np.ndarray:
    """Which host events are operators that work on tensors: neither part of a collective nor the
    caller of one, which may wait for it."""
    parent = host["parent"].to_numpy()
    is_caller = np.zeros(len(host), bool)
    callers = np.unique(call_of[call_of >= 0])
    while len(callers):
        callers = parent[callers]
        callers = np.unique(callers[callers >= 0])
        is_caller[callers] = True
    moves_elements = ~has_role(host, *roles.MOVES_NO_ELEMENT)
    works = (host["kind"] == OPERATOR).to_numpy() & moves_elements
    return works & (call_of < 0) & ~is_caller


def with_known_groups(events: pd.DataFrame, trace: Trace) -> pd.DataFrame:
    """The columns EVENT_COLUMNS.  Groups of kernels whose call is not in the trace: a communicator
    has a stream of its own.  Where no event has a group, it is the one of the run, if that has only
    one."""
    stream = np.zeros(len(events), int)
    if "stream" in events:
        stream = events.groupby(["device", "stream"]).ngroup().to_numpy()
    for name in ("group", "group_size", "ranks"):
        of_stream = most_frequent(stream, events[name].to_numpy(object))
        usual = pd.Series(stream, events.index).map(of_stream)
        events[name] = events[name].where(events[name].notna(), usual)
    only = only_group(trace)
    if only is not None and events["group"].isna().all():
        events["group"] = str(only.get("pg_desc") or only.get("pg_name"))
        events["group_size"], events["ranks"] = only.get("pg_size"), str(only.get("ranks"))
    sizes = pd.to_numeric(events["group_size"], errors="coerce")
    events["group_size"] = sizes.fillna(-1).astype(int)
    for name in ("group", "ranks"):
        events[name] = events[name].astype(object).where(events[name].notna(), None)
    return events[EVENT_COLUMNS]


def only_group(trace: Trace) -> dict | None:
    """What the trace tells of the one process group of its run; None: of none, or of several."""
    groups = trace.distributed.get("pg_config")
    if isinstance(groups, list) and len(groups) == 1 and isinstance(groups[0], dict):
        return groups[0]
    return None


# ---- The table -----------------------------------------------------------------------------------


def collective_rows(
    events: pd.DataFrame,
    exposed: pd.DataFrame,
    waiting_us: np.ndarray | None = None,
    why: str = ONE_TRACE,
) -> list[MeasuredCollectiveRow]:
    """Sums over the steps, most time first.

    events: as in Collectives.  exposed: the slices of the steps that are exposed communication,
    each with its collective; cause "ranks" while it waits for them.  waiting_us: of each event,
    until the last rank arrived, NaN if unknown; None, and why, if that is not known at all.
    """
    if events.empty:
        return []
    if waiting_us is None:
        waiting_us = np.full(len(events), np.nan)
    exposed_us = exposed.groupby("collective")["us"].sum()
    exposed_us = exposed_us.reindex(events.index, fill_value=0.0)
    for_ranks_us = exposed[exposed["cause"] == "ranks"].groupby("collective")["us"].sum()
    for_ranks_us = for_ranks_us.reindex(events.index, fill_value=0.0)
    us = events["end"] - events["start"]
    events = events.assign(
        us=us,
        exposed_us=exposed_us,
        transfer_us=us - waiting_us,
        exposed_waiting_us=np.where(np.isnan(waiting_us), np.nan, for_ranks_us),
    )
    events = events[(events["step"] >= 0) | (events["exposed_us"] > 0)]
    keys = ["kind", "group", "group_size", "phase", "component"]
    rows = [collective_row(same, why) for _, same in events.groupby(keys, dropna=False, sort=False)]
    return sorted(rows, key=lambda row: -row.time_ms)


def collective_row(events: pd.DataFrame, why: str) -> MeasuredCollectiveRow:
    """Of events of one kind, group, phase, and component.  why: no waiting is known."""
    first = events.iloc[0]
    size = int(first["group_size"]) if first["group_size"] > 0 else None
    us, n_bytes = events["us"].sum(), events["bytes"].sum(skipna=False)
    transfer_us = events["transfer_us"].sum(skipna=False)
    waiting_us = events["exposed_waiting_us"].sum(skipna=False)
    gb_per_sec = np.nan
    if us:  # bytes/us to 10^9 bytes/s
        gb_per_sec = n_bytes / (us if np.isnan(transfer_us) else transfer_us) / 1e3
    algorithm_gb_per_sec = bus_gb_per_sec = Unknown(why_no_rate(n_bytes, size))
    if not np.isnan(gb_per_sec):
        algorithm_gb_per_sec = float(gb_per_sec)
        bus_share = sent_share(first["kind"], size) if size else None
        if bus_share is not None:
            bus_gb_per_sec = float(gb_per_sec * bus_share)
    return MeasuredCollectiveRow(
        kind=first["kind"],
        group=first["group"],
        group_size=size,
        phase=first["phase"] if isinstance(first["phase"], str) else None,
        component=first["component"],
        calls=int(events["calls"].sum()),
        bytes=None if np.isnan(n_bytes) else int(n_bytes),
        time_ms=float(us / 1e3),
        exposed_ms=float(events["exposed_us"].sum() / 1e3),
        waiting_ms=Unknown(why) if np.isnan(waiting_us) else float(waiting_us / 1e3),
        algorithm_bandwidth_gb_per_sec=algorithm_gb_per_sec,
        bus_bandwidth_gb_per_sec=bus_gb_per_sec,
    )


def why_no_rate(n_bytes: float, group_size: int | None) -> str:
    if np.isnan(n_bytes):
        return NO_BYTES
    if group_size:
        return "not defined for this kind"
    return "the size of its group is not in the trace"


class CommunicationTimes(NamedTuple):
    """Of all communication in the steps."""

    steps: int
    exposed_ms: float  # of a step
    hidden_ms: float  # of a step


def communication_of_steps(
    rows: list[MeasuredCollectiveRow],
    times: CommunicationTimes,
    by_difference: NoSyncSteps | None,
    predicted: list[dict] | None,
) -> StepCommunication | None:
    """What these collectives cost a step; None without any in the steps.

    by_difference: what the run measured without a profiler.  predicted: as predicted_beside() takes
    them; None where nothing is."""
    if not rows:
        return None
    unknown = [row.reason_of("waiting_ms") for row in rows if row.waiting_ms is None]
    if unknown:
        waiting_ms = transfer_ms = Unknown(unknown[0])
    else:
        waiting_ms = sum(row.waiting_ms for row in rows) / times.steps
        transfer_ms = max(0.0, times.exposed_ms - waiting_ms)
    in_backward_ms = [row.exposed_ms for row in rows if row.phase == "backward"]
    return StepCommunication(
        steps=times.steps,
        time_ms=times.exposed_ms + times.hidden_ms,
        exposed_ms=times.exposed_ms,
        hidden_ms=times.hidden_ms,
        waiting_ms=waiting_ms,
        transfer_ms=transfer_ms,
        exposed_backward_ms=sum(in_backward_ms) / times.steps,
        by_difference=by_difference,
        predicted=predicted_beside(predicted, rows, times.steps) if predicted else None,
    )


def predicted_beside(
    predicted: list[dict], rows: list[MeasuredCollectiveRow], steps: int
) -> list[PredictedBesideRow]:
    """What a dry run predicts of each kind of collective, beside what was measured.

    predicted: rows of kind, group_size, calls and bytes of a step."""
    return [prediction_beside(prediction, rows, steps) for prediction in predicted]


def prediction_beside(
    prediction: dict, rows: list[MeasuredCollectiveRow], steps: int
) -> PredictedBesideRow:
    kind, group_size = prediction["kind"], prediction["group_size"]
    same = [row for row in rows if (row.kind, row.group_size) == (kind, group_size)]
    sent_bytes = [row.bytes for row in same]
    return PredictedBesideRow(
        kind=kind,
        group_size=group_size,
        predicted_calls=prediction["calls"],
        calls=sum(row.calls for row in same) / steps,
        predicted_bytes=prediction["bytes"],
        bytes=None if None in sent_bytes else sum(sent_bytes) / steps,
        time_ms=sum(row.time_ms for row in same) / steps,
        bus_bandwidth_gb_per_sec=mean_bandwidth(same),
    )


def mean_bandwidth(rows: list[MeasuredCollectiveRow]) -> float | None:
    """Of all their bytes in all their time; None if a row does not know it."""
    n_bytes, times = 0, []
    for row in rows:
        rate = row.bus_bandwidth_gb_per_sec
        if rate is None:
            return None
        n_bytes += row.bytes
        if rate:
            times.append(row.bytes / rate)
    return n_bytes / sum(times) if times else None


# ---- For a reader --------------------------------------------------------------------------------


def collective_columns(rows: list[MeasuredCollectiveRow], steps: int) -> list[Column]:
    """The columns, per step; the group only where there are several."""
    of_group = []
    if len({(row.group, row.group_size) for row in rows}) > 1:
        of_group = [column("group", "group", left=True), column("ranks", "group_size")]
    return [
        column("collective", "kind", left=True),
        *of_group,
        *text_columns("phase", "component"),
        column("calls/step", "calls", "~1", steps),
        column("MB/step", "bytes", "~2", MB * steps),
        column("ms/step", "time_ms", "~3", steps),
        column("exposed", "exposed_ms", "~3", steps),
        Column("hidden", lambda row: max(0.0, row.time_ms - row.exposed_ms) / steps, "~3"),
        column("waiting", "waiting_ms", "~3", steps),
        column("alg GB/s", "algorithm_bandwidth_gb_per_sec", "~2"),
        column("bus GB/s", "bus_bandwidth_gb_per_sec", "~2"),
    ]


def communication_text(about: StepCommunication) -> str:
    """'5.20 ms per step: 2.10 hidden, 3.10 exposed
    (1.00 transfer, 2.10 waiting for other ranks)'"""
    if about.waiting_ms is None:
        parts = f"waiting unknown: {about.reason_of('waiting_ms')}"
    else:
        transfer, waiting = significant(about.transfer_ms, 3), significant(about.waiting_ms, 3)
        parts = f"{transfer} transfer, {waiting} waiting for other ranks"
    hidden, exposed = significant(about.hidden_ms, 3), significant(about.exposed_ms, 3)
    all_ms = significant(about.time_ms, 3)
    return f"{all_ms} ms per step: {hidden} hidden, {exposed} exposed ({parts})"


BESIDE_COLUMNS = [
    column("per step", "kind", left=True),
    column("ranks", "group_size"),
    column("calls predicted", "predicted_calls", ","),
    column("measured", "calls", ",.4g"),
    column("MB predicted", "predicted_bytes", "~3", MB),
    column("measured", "bytes", "~3", MB),
    column("ms", "time_ms", "~3"),
    column("bus GB/s", "bus_bandwidth_gb_per_sec", "~2"),
]


def communication_section(
    about: StepCommunication | None, rows: list[MeasuredCollectiveRow]
) -> Section:
    """What communication costs a step, and each collective; empty without any."""
    if about is None:
        return Section("Communication")
    facts = {"Communication": communication_text(about)}
    if about.by_difference:  # what steps without reduction measured: the exposed time confirms it
        measured = no_sync_text(about.by_difference.as_json())
        trace = f"the trace has {about.exposed_backward_ms:.2f} ms exposed in the backward pass"
        facts["By difference"] = f"{measured}; {trace}"
    exposed, bus = "Exposed: no computation overlapped it", "Bus bandwidth as nccl-tests define it"
    if about.waiting_ms is None:
        bus += ", with waiting"
    else:
        exposed += "; waiting, a part of that: until the last rank arrived"
    steps = count_of(about.steps, "step")
    mean = f"Mean of {steps}; of ms: exposed, hidden; MB of the larger of input and output"
    predicted = about.predicted or []
    return Section(
        "Communication",
        collective_columns(rows, about.steps),
        rows,
        [mean, exposed, bus],
        facts,
        parts=[Section("Predicted and measured, per step", BESIDE_COLUMNS, predicted)],
    )
