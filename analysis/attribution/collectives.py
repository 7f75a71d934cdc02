"""Collectives of a trace: which, in which group, how many bytes, how long, and how much of it
nothing else overlapped.

One collective leaves several events: the operator of PyTorch that starts it (`c10d::allreduce_`),
`record_param_comms` with the group and its sizes, a range of the backend (`nccl:all_reduce`,
`gloo:all_reduce`), and on a GPU one or more kernels.  Here they are one call.  On a GPU its time is
that of the kernels, on a host that of the backend's range.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.trace.links import OPERATOR, first_row_of
from analysis.trace.nesting import nearest_marked_ancestor, nearest_marked_caller, operators_around
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
from harness.documents.trace import NO_BYTES, ONE_TRACE, MeasuredCollectiveRow
from harness.schema import because, explained

ROOT = "outside of units"  # what no inner module gathers
OF_CALLS = "kind group group_size ranks component bytes".split()
EVENT_COLUMNS = [*OF_CALLS, *"phase start end step calls row".split()]


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
    calls, call_of = host_calls(timeline)
    communicates = (timeline.gpu["category"] == "communication").to_numpy()
    events = (
        on_gpu(timeline, calls, call_of, communicates)
        if communicates.any()
        else on_host(timeline, calls, call_of)
    )
    events = with_known_groups(events, timeline.trace).sort_values(
        "start", kind="stable", ignore_index=True
    )
    return Collectives(events, bool(communicates.any()), computes(timeline.host, call_of))


# ---- Calls ---------------------------------------------------------------------------------------


def host_calls(timeline: Timeline) -> tuple[pd.DataFrame, np.ndarray]:
    """A row for each collective that the host began, by row of host: kind, group, group_size,
    ranks, phase, component, bytes; and for each row of host the call that it belongs to, or -1."""
    host, trace = timeline.host, timeline.trace
    noted = trace.comms.set_axis(
        trace.comms["operator"].map(first_row_of(trace.operators["external_id"]))
    )
    noted = noted[noted.index.notna() & ~noted.index.duplicated()]
    note_rows, inputs = (
        noted.index.to_numpy(int),
        [trace.operators["signature"], trace.annotations["signature"]],
    )
    signatures = [
        *map([*trace.signatures, None].__getitem__, np.concatenate(inputs).tolist())
    ]  # by row of timeline.host
    marked, call_of = calls_of_rows(host, note_rows, signatures)
    inside = np.flatnonzero(marked)
    rows = np.unique(call_of[inside])
    notes, members = noted.groupby(call_of[note_rows]), pd.Series(inside).groupby(call_of[inside])
    kind = host["collective"].astype(object).fillna(UNKNOWN).iloc[rows]
    kind = kind.where(kind != UNKNOWN, notes["kind"].first().reindex(rows)).fillna(UNKNOWN)
    size, shaped = (
        notes["bytes"].max().reindex(rows),
        {row: message_bytes(signatures, one) for row, one in members},
    )
    calls = notes[["group", "group_size", "ranks"]].first().reindex(rows)
    return (
        calls.assign(
            kind=kind,
            bytes=size.where(size > 0, pd.Series(shaped, dtype=float)),
            phase=phases_of_calls(timeline, rows),
            component=components_of_calls(host, rows),
        ),
        call_of,
    )


def calls_of_rows(
    host: pd.DataFrame, note_rows: np.ndarray, signatures: list
) -> tuple[np.ndarray, np.ndarray]:
    """Which host events are those of a collective, and for each host event the row of the call that
    it belongs to: the outermost of them around it, or for a range the operator that issued it; -1
    for none.

    note_rows: those of record_param_comms.
    """
    is_operator = (host["kind"] == OPERATOR).to_numpy()
    is_range = has_role(host, *roles.COLLECTIVE_RANGES)
    marked = is_range | has_role(host, roles.COLLECTIVE)
    marked[note_rows] = True
    parent = host["parent"].to_numpy()
    outermost = marked & (nearest_marked_caller(parent, marked) < 0)
    call_of = nearest_marked_ancestor(parent, outermost)
    has_range = np.isin(np.arange(len(host)), call_of[is_range & ~outermost])
    ranges, operators = (
        np.flatnonzero(outermost & which) for which in (is_range, is_operator & ~has_range)
    )
    stands_for = np.arange(len(host))
    for row, operator in issued_by(host, ranges, operators, signatures).items():
        stands_for[row] = operator
    return marked, take_or(stands_for, call_of, -1)


def issued_by(
    host: pd.DataFrame, ranges: np.ndarray, operators: np.ndarray, signatures: list
) -> dict[int, int]:
    """The operator that began each of these ranges, by rows of host; those of no known operator are
    left out.

    A backend with threads of its own, as gloo, takes its work in the order in which it was issued:
    a range belongs to the first operator before it that has no range yet and, where inputs were
    recorded, one of the same size.
    """
    start, found = host["start"].to_numpy(), {}
    waiting = sorted(operators.tolist(), key=start.__getitem__)
    for row in sorted(ranges.tolist(), key=start.__getitem__):
        sent = {*elements_of_inputs(signatures[row])}
        for i, operator in enumerate(waiting):
            if start[operator] > start[row]:
                break
            if not sent or sent.intersection(elements_of_inputs(signatures[operator])):
                found[row] = waiting.pop(i)
                break
    return found


def message_bytes(signatures: list[tuple | None], rows: np.ndarray) -> float:
    """Bytes of a call, the larger of input and output, from the recorded inputs of these host
    events; NaN if unknown.

    The operator has both as its inputs; but of a list of tensors only the range of the backend
    tells the type."""
    found = [signatures[row] for row in rows if signatures[row]]
    sizes = [BYTES_OF[kind] for _, types, _ in found for kind in types or [] if kind in BYTES_OF]
    elements = max(itertools.chain.from_iterable(map(elements_of_inputs, found)), default=0)
    return float(elements * sizes[0]) if sizes and elements else np.nan


def elements_of_inputs(signature: tuple | None) -> list[int]:
    """Elements of each recorded input that is a tensor,
    or a list of tensors; [] if none were recorded."""
    if signature is None:
        return []
    shapes, types, _ = signature
    found = [
        elements_in(shape)
        for shape, kind in zip(shapes, types or [], strict=False)
        if kind in TENSORS
    ]
    return [n for n in found if n]


def elements_in(shape: list) -> int:
    """Elements of a tensor of this shape, or of all in a list of shapes."""
    return (
        sum(map(elements_in, shape)) if shape and isinstance(shape[0], list) else math.prod(shape)
    )


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
    names = host["component"].to_numpy(object).copy()
    names[unit] = [
        starred(module, whole_layers=True)
        for module in host["about"][unit].astype(object).fillna(ROOT)
    ]
    named = nearest_marked_ancestor(host["parent"].to_numpy(), unit)[rows]
    return np.where(named >= 0, names[named], names[rows])


# ---- Events --------------------------------------------------------------------------------------


def on_gpu(
    timeline: Timeline, calls: pd.DataFrame, call_of: np.ndarray, communicates: np.ndarray
) -> pd.DataFrame:
    """Communication kernels, each with its call; one whose call is not in the trace is a call of
    its own."""
    gpu = timeline.gpu[communicates]
    call = take_or(call_of, gpu["operator"].to_numpy(), -1)
    alone = np.flatnonzero((call < 0) & (gpu["call"] >= 0).to_numpy())
    call[alone] = take_or(call_of, ranges_around(timeline, gpu["call"].to_numpy()[alone]), -1)
    row = calls.index.get_indexer(call)
    events = gpu[["start", "end", "step", "device", "stream"]].assign(
        **{name: take_or_none(calls[name], row) for name in OF_CALLS}, phase=gpu["phase"]
    )
    # Of the kernel's own arguments: an all-to-all is made of kernels that are called SendRecv.
    noted = timeline.trace.comms.query(f"operator > 0 and kind != '{UNKNOWN}'").drop_duplicates(
        "operator"
    )
    of_kernel = gpu["external_id"].map(noted.set_index("operator")["kind"])
    of_kernel = of_kernel.astype(object).fillna(gpu["collective"].astype(object)).fillna(UNKNOWN)
    events["kind"] = np.where(events["kind"].isin([None, UNKNOWN]), of_kernel, events["kind"])
    events["component"] = events["component"].fillna(gpu["component"])
    events["calls"] = np.where((call < 0) | ~pd.Series(call).duplicated().to_numpy(), 1, 0)
    events["bytes"] = events["bytes"].astype(float).where(events["calls"] == 1, 0.0)
    return events.assign(row=np.flatnonzero(communicates))


def ranges_around(timeline: Timeline, calls: np.ndarray) -> np.ndarray:
    """The row of host of the backend's range around each call, or -1: older versions have no
    operator for it."""
    ranges = timeline.trace.annotations[
        has_role(timeline.trace.annotations, *roles.COLLECTIVE_RANGES)
    ]
    rows = ranges.index.to_numpy() + len(timeline.trace.operators)
    return take_or(rows, operators_around(timeline.calls.iloc[calls], ranges), -1)


def on_host(timeline: Timeline, calls: pd.DataFrame, call_of: np.ndarray) -> pd.DataFrame:
    """The ranges of the backend."""
    host = timeline.host
    is_range = has_role(host, roles.COLLECTIVE_RANGE)  # others end once the kernel is queued
    rows = np.flatnonzero(
        is_range & (nearest_marked_caller(host["parent"].to_numpy(), is_range) < 0)
    )
    events = calls.loc[call_of[rows]].reset_index(drop=True)
    start, end = (
        host[name].to_numpy()[rows] for name in ("start", "end")
    )  # not until: it may outlive its caller
    events = events.assign(start=start, end=end, step=step_at(start, timeline.steps), row=rows)
    events["calls"] = (~pd.Series(call_of[rows]).duplicated()).astype(int)
    events["bytes"] = events["bytes"].where(events["calls"] == 1, 0.0)
    return events


def computes(host: pd.DataFrame, call_of: np.ndarray) -> np.ndarray:
    """Which host events are operators that work on tensors: neither part of a collective nor the
    caller of one, which may wait for it."""
    calls_one, parent, up = (
        np.zeros(len(host), bool),
        host["parent"].to_numpy(),
        np.unique(call_of[call_of >= 0]),
    )
    while len(up := parent[up][parent[up] >= 0]):
        calls_one[up] = True
        up = np.unique(up)
    works = (host["kind"] == OPERATOR).to_numpy() & ~has_role(host, *roles.MOVES_NO_ELEMENT)
    return works & (call_of < 0) & ~calls_one


def with_known_groups(events: pd.DataFrame, trace: Trace) -> pd.DataFrame:
    """Groups of kernels whose call is not in the trace: a communicator has a stream of its own.
    Where no event has a group, it is the one of the run, if that has only one."""
    streams = (
        events.groupby(["device", "stream"]).ngroup()
        if "stream" in events
        else pd.Series(0, events.index)
    )
    stream = streams.to_numpy()
    for name in ("group", "group_size", "ranks"):
        usual = pd.Series(stream, events.index).map(
            most_frequent(stream, events[name].to_numpy(object))
        )
        events[name] = events[name].where(events[name].notna(), usual)
    groups = trace.distributed.get("pg_config")
    if (
        isinstance(groups, list)
        and len(groups) == 1
        and isinstance(groups[0], dict)
        and events["group"].isna().all()
    ):
        (only,) = groups
        events["group"] = str(only.get("pg_desc") or only.get("pg_name"))
        events["group_size"], events["ranks"] = only.get("pg_size"), str(only.get("ranks"))
    size = pd.to_numeric(events["group_size"], errors="coerce").fillna(-1).astype(int)
    known = {
        name: events[name].astype(object).where(events[name].notna(), None)
        for name in ("group", "ranks")
    }
    return events.assign(group_size=size, **known)[EVENT_COLUMNS]


# ---- The table -----------------------------------------------------------------------------------


def collective_rows(
    events: pd.DataFrame,
    exposed: pd.DataFrame,
    waiting_us: np.ndarray | None = None,
    why: str = ONE_TRACE,
) -> list[dict]:
    """`collectives` of operator_analysis.json: sums over the steps, most time first.

    events: as in Collectives.  exposed: the slices of the steps that are exposed communication,
    each with its collective; cause "ranks" while it waits for them.  waiting_us: of each event,
    until the last rank arrived, NaN if unknown; None, and why, if that is not known at all.
    """
    waiting = np.full(len(events), np.nan) if waiting_us is None else waiting_us
    sums = [
        one.groupby("collective")["us"].sum()
        for one in (exposed, exposed[exposed["cause"] == "ranks"])
    ]
    of_all, of_waiting = (one.reindex(events.index, fill_value=0.0) for one in sums)
    events = events.assign(us=events["end"] - events["start"], exposed_us=of_all)
    events["transfer_us"] = events["us"] - waiting
    events["exposed_waiting_us"] = np.where(np.isnan(waiting), np.nan, of_waiting)
    events = events[(events["step"] >= 0) | (events["exposed_us"] > 0)]
    keys = ["kind", "group", "group_size", "phase", "component"]
    rows = [collective_row(one, why) for _, one in events.groupby(keys, dropna=False, sort=False)]
    return sorted(rows, key=lambda row: -row["time_ms"])


def collective_row(events: pd.DataFrame, why: str) -> dict:
    """Of events of one kind, group, phase, and component.  why: no waiting is known."""
    about, us = events.iloc[0], events["us"].sum()
    size = int(about["group_size"]) if about["group_size"] > 0 else None
    names = ("bytes", "transfer_us", "exposed_waiting_us")
    n_bytes, transfer, waiting = (events[name].sum(skipna=False) for name in names)
    rate = (
        n_bytes / (us if np.isnan(transfer) else transfer) / 1e3 if us else np.nan
    )  # bytes/us to 10^9 bytes/s
    share = sent_share(about["kind"], size) if size else None
    row = {"kind": about["kind"], "group": about["group"], "group_size": size}
    row |= {
        "phase": about["phase"] if isinstance(about["phase"], str) else None,
        "component": about["component"],
    }
    row |= {
        "calls": int(events["calls"].sum()),
        "bytes": None if np.isnan(n_bytes) else int(n_bytes),
    }
    row |= {"time_ms": float(us / 1e3), "exposed_ms": float(events["exposed_us"].sum() / 1e3)}
    row |= {"waiting_ms": None if np.isnan(waiting) else float(waiting / 1e3)}
    row |= {"algorithm_bandwidth_gb_per_sec": None if np.isnan(rate) else float(rate)}
    row |= {
        "bus_bandwidth_gb_per_sec": None if np.isnan(rate) or share is None else float(rate * share)
    }
    no_size = "not defined for this kind" if size else "the size of its group is not in the trace"
    no_rate = NO_BYTES if np.isnan(n_bytes) else no_size
    row |= because(why, "waiting_ms") | because(
        no_rate, "algorithm_bandwidth_gb_per_sec", "bus_bandwidth_gb_per_sec"
    )
    return explained(row, MeasuredCollectiveRow)


def communication_of_steps(
    rows: list[dict], steps: int, exposed: float, hidden: float
) -> dict | None:
    """`communication` of operator_analysis.json, in ms per step; None without collectives in the
    steps.

    rows: `collectives` of the same document.
    exposed, hidden: of all communication, in ms per step."""
    if not rows:
        return None
    backward = sum(row["exposed_ms"] for row in rows if row["phase"] == "backward") / steps
    why = next((row["waiting_ms_reason"] for row in rows if row["waiting_ms"] is None), "")
    waiting = None if why else sum(row["waiting_ms"] for row in rows) / steps
    out = {"steps": steps, "time_ms": exposed + hidden, "exposed_ms": exposed, "hidden_ms": hidden}
    out |= {
        "waiting_ms": waiting,
        "transfer_ms": None if waiting is None else max(0.0, exposed - waiting),
    }
    return out | {"exposed_backward_ms": backward} | because(why, "waiting_ms", "transfer_ms")


def predicted_beside(predicted: list[dict], rows: list[dict], steps: int) -> list[dict]:
    """`predicted` of `communication`: what a dry run predicts of each kind of collective, beside
    what was measured.

    predicted: rows of kind, group_size, calls and bytes of a step;
    rows: `collectives` of operator_analysis.json.
    """
    out = []
    for one in predicted:
        same = [
            row
            for row in rows
            if (row["kind"], row["group_size"]) == (one["kind"], one["group_size"])
        ]
        sizes, rates = (
            [row[name] for row in same] for name in ("bytes", "bus_bandwidth_gb_per_sec")
        )
        times = [n / rate for n, rate in zip(sizes, rates, strict=True) if rate]
        found = {"kind": one["kind"], "group_size": one["group_size"]}
        found |= {
            "predicted_calls": one["calls"],
            "calls": sum(row["calls"] for row in same) / steps,
        }
        found |= {
            "predicted_bytes": one["bytes"],
            "bytes": None if None in sizes else sum(sizes) / steps,
        }
        rate = sum(sizes) / sum(times) if times and None not in rates else None
        found |= {
            "time_ms": sum(row["time_ms"] for row in same) / steps,
            "bus_bandwidth_gb_per_sec": rate,
        }
        out.append(found)
    return out


# ---- For a reader --------------------------------------------------------------------------------


def collective_columns(rows: list[dict], steps: int) -> list[Column]:
    """The columns, per step; the group only where there are several."""
    of_group = [column("group", "group", left=True), column("ranks", "group_size")]
    return [
        column("collective", "kind", left=True),
        *(of_group if len({(row["group"], row["group_size"]) for row in rows}) > 1 else []),
        *text_columns("phase", "component"),
        column("calls/step", "calls", "~1", steps),
        column("MB/step", "bytes", "~2", MB * steps),
        column("ms/step", "time_ms", "~3", steps),
        column("exposed", "exposed_ms", "~3", steps),
        Column("hidden", lambda row: max(0.0, row["time_ms"] - row["exposed_ms"]) / steps, "~3"),
        column("waiting", "waiting_ms", "~3", steps),
        column("alg GB/s", "algorithm_bandwidth_gb_per_sec", "~2"),
        column("bus GB/s", "bus_bandwidth_gb_per_sec", "~2"),
    ]


def communication_text(about: dict) -> str:
    """'5.20 ms per step: 2.10 hidden, 3.10 exposed
    (1.00 transfer, 2.10 waiting for other ranks)'"""
    if about["waiting_ms"] is None:
        parts = f"waiting unknown: {about['waiting_ms_reason']}"
    else:
        transfer, waiting = (significant(about[name], 3) for name in ("transfer_ms", "waiting_ms"))
        parts = f"{transfer} transfer, {waiting} waiting for other ranks"
    all_ms, hidden, exposed = (
        significant(about[name], 3) for name in ("time_ms", "hidden_ms", "exposed_ms")
    )
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


def communication_section(analysis: dict) -> Section:
    """What communication costs a step, and each collective; empty without any."""
    about, rows = analysis["communication"], analysis["collectives"]
    if about is None:
        return Section("Communication")
    facts = {"Communication": communication_text(about)}
    if about[
        "by_difference"
    ]:  # what steps without reduction measured: the exposed time should confirm it
        from harness.instruments.no_sync import (
            no_sync_text,
        )  # takes PyTorch, which reading a trace does not need

        trace = f"the trace has {about['exposed_backward_ms']:.2f} ms exposed in the backward pass"
        facts["By difference"] = f"{no_sync_text(about['by_difference'])}; {trace}"
    known = about["waiting_ms"] is not None
    note = [
        (
            f"Mean of {count_of(about['steps'], 'step')}; of ms: exposed, hidden; MB of the larger"
            " of input and output"
        ),
        (
            "Exposed: no computation overlapped"
            f" it{'; waiting, a part of that: until the last rank arrived' * known}"
        ),
        f"Bus bandwidth as nccl-tests define it{', with waiting' * (not known)}",
    ]
    beside = Section("Predicted and measured, per step", BESIDE_COLUMNS, about["predicted"] or [])
    return Section(
        "Communication", collective_columns(rows, about["steps"]), rows, note, facts, parts=[beside]
    )
