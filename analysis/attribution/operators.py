"""Which operators and kernels ran: calls, times, FLOPs and bytes, and the operator that launched
each kernel."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from typing_extensions import NotRequired

from analysis import SORT_KEYS
from analysis.attribution.components import UNATTRIBUTED
from analysis.trace.nesting import nearest_marked_ancestor, nearest_marked_caller
from analysis.trace.reasons import NO_GPU, UNDETERMINED
from analysis.trace.tables import by_name, different_pairs, most_frequent, take_or_none
from analysis.trace.timeline import Timeline, cached_on_timeline
from analysis.vocabulary.annotations import BATCH
from analysis.vocabulary.kernel_classes import MATMUL_CLASSES
from analysis.work.cost import Cost
from analysis.work.operator_costs import cost, cost_of_called, tells_cost
from harness.base.sections import Section
from harness.base.tables import Column, column, value_of
from harness.base.text import count_of, significant
from harness.base.units import MB
from harness.schema import ABSENT, Document, field

COLUMN_OF = {key: f"{key}_us" if key.endswith(("cpu", "device")) else key for key in SORT_KEYS}
TIMES = ["self_cpu_us", "cpu_us", "self_device_us", "device_us"]


class OperatorRow(Document):
    name: str = field("as PyTorch calls it")
    shapes: NotRequired[str] = field("of the inputs; by shape only")
    calls: int = field("in the trace")
    self_cpu_us: float = field("over all calls")
    cpu_us: float = field("over all calls, with the operators that it calls")
    self_device_us: float | None = field("of the kernels that it launched itself", null=NO_GPU)
    device_us: float | None = field("with the operators that it calls", null=NO_GPU)
    flops: int | None = field("over all calls", null=UNDETERMINED)
    bytes: int | None = field("read and written", null=UNDETERMINED)
    share: float = field("of the self time of all operators")


class KernelRow(Document):
    name: str = field("as the driver calls it")
    kind: str = field("kernel, copy or memory set")
    count: int = field("in the trace")
    count_per_step: float = field("that the steps launched")
    total_us: float = field("over all")
    mean_us: float = field("of one")
    p50_us: float = field("the median")
    p95_us: float = field("95th percentile")
    share: float = field("of the time of all kernels")
    launched_by: str | None = field("operator", null="it is linked to no operator")
    component: str = field("part of the model")
    category: str | None = field(
        "class of operators", null="neither its name nor its operator tells it"
    )


class OperatorTables(NamedTuple):
    """The most time first."""

    operators: list[OperatorRow]  # by name
    operators_by_shape: list[OperatorRow]  # by name and shapes of the inputs


# ---- Operators -----------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """Of each operator."""

    signature: np.ndarray  # [operators] its number in trace.signatures, or -1
    # [operators] the row that has these inputs: its own, or, of a matmul or convolution without
    # any, that of the caller that called it to do its work
    teller: np.ndarray


@cached_on_timeline
def inputs_of_operators(timeline: Timeline) -> Inputs:
    operators, gpu = timeline.trace.operators, timeline.gpu
    n = len(operators)
    signature, own_rows = operators["signature"].to_numpy(), np.arange(n)
    bare = (signature < 0) & operators["named_category"].isin(MATMUL_CLASSES).to_numpy()
    if not bare.any() or (signature < 0).all():
        return Inputs(signature, own_rows)
    tells = by_name(operators["name"], tells_cost, bool) & (signature >= 0)
    callers = np.append(tells, np.zeros(len(timeline.host) - n, bool))
    caller = nearest_marked_caller(timeline.host["operator_parent"].to_numpy(), callers)[:n]
    kinds = operators["named_category"].to_numpy(object)
    takes = np.flatnonzero(bare & (caller >= 0))
    takes = takes[kinds[takes] == kinds[caller[takes]]]
    # Of several that a caller calls, the one that works longest does what its inputs tell.
    if timeline.on_gpu:
        linked = gpu[(gpu["operator"] >= 0).to_numpy()]
        us = (linked["end"] - linked["start"]).to_numpy()
        work_us = np.bincount(linked["operator"].to_numpy(), us, minlength=n)
    else:
        work_us = timeline.host["own_us"].to_numpy()[:n]
    longest = takes[np.lexsort((-work_us[takes], caller[takes]))]
    rows = longest[~pd.Series(caller[longest]).duplicated().to_numpy()]
    told, teller = signature.copy(), own_rows
    told[rows], teller[rows] = signature[caller[rows]], caller[rows]
    return Inputs(told, teller)


@cached_on_timeline
def operator_calls(timeline: Timeline) -> pd.DataFrame:
    """Each call of an operator, with self and total times in us, on the host and on the GPU.

    Self CPU time is the duration less that of the operators it called.  Self device time is that of
    the GPU events it launched itself; device time includes those launched by the operators it
    called.  An operator that calls another of its name, as mm does mm.out, is one call: columns
    ..._of_name are 0 for the inner one, the others if its inputs are the same too.  call: the row
    of the outermost call of the same name and inputs.
    """
    operators = timeline.trace.operators
    n = len(operators)
    parent = timeline.host["operator_parent"].to_numpy()[:n].astype(np.int64)
    duration_us = (operators["end"] - operators["start"]).to_numpy()
    nested = parent >= 0
    called_us = np.bincount(parent[nested], weights=duration_us[nested], minlength=n)
    device = device_times(timeline, parent)
    codes = operators["name"].cat.codes.to_numpy()
    signature = inputs_of_operators(timeline).signature
    within_name = nested & (codes[parent] == codes)
    within_inputs = within_name & (signature[parent] == signature)
    columns = {
        "code": codes,
        "signature": signature,
        "call": outermost_calls(parent, within_inputs),
        "self_cpu_us": np.maximum(0.0, duration_us - called_us),
        "self_device_us": device.own_us,
        "calls": ~within_inputs,
        "calls_of_name": ~within_name,
        "cpu_us": np.where(within_inputs, 0.0, duration_us),
        "cpu_us_of_name": np.where(within_name, 0.0, duration_us),
        "device_us": np.where(within_inputs, 0.0, device.us),
        "device_us_of_name": np.where(within_name, 0.0, device.us),
    }
    return pd.DataFrame(columns, copy=False)


class DeviceTimes(NamedTuple):
    """Of the GPU events that operators launched."""

    own_us: np.ndarray  # [operators] those that it launched itself
    us: np.ndarray  # [operators] with those of the operators that it calls


def device_times(timeline: Timeline, parent: np.ndarray) -> DeviceTimes:
    """parent: [operators] the row of the operator that called each, or -1."""
    linked = timeline.gpu[(timeline.gpu["operator"] >= 0).to_numpy()]
    rows = linked["operator"].to_numpy()
    us = (linked["end"] - linked["start"]).to_numpy()
    own_us = np.bincount(rows, weights=us, minlength=len(parent))
    all_us = own_us.copy()
    while len(rows):
        rows = parent[rows]
        is_called = rows >= 0
        rows, us = rows[is_called], us[is_called]
        all_us += np.bincount(rows, weights=us, minlength=len(parent))
    return DeviceTimes(own_us, all_us)


def outermost_calls(parent: np.ndarray, within_inputs: np.ndarray) -> np.ndarray:
    """For each operator the row of the outermost call of the same name and inputs around it.
    within_inputs: whether an operator's caller is one of the same."""
    call = np.arange(len(parent))
    is_inner = within_inputs
    while is_inner.any():
        call[is_inner] = parent[call[is_inner]]
        is_inner = within_inputs[call]
    return call


class Costs(NamedTuple):
    """Of operators: work counts once, where it is done."""

    # [pairs + 1] of each name and inputs, in the order in which they first appear.  The last one,
    # which is unknown, is that of operators that leave the work to others whose costs are known.
    costs: list[Cost]
    which: np.ndarray  # [operators] which of them each has


@cached_on_timeline
def costs_of_operators(timeline: Timeline) -> Costs:
    operators, signatures = timeline.trace.operators, timeline.trace.signatures
    names, codes = operators["name"].cat.categories, operators["name"].cat.codes.to_numpy()
    inputs = inputs_of_operators(timeline)
    pairs, which = different_pairs(codes, inputs.signature)
    ranges = batches_told(timeline, which)
    first = np.unique(which, return_index=True)[1]  # the first operator of each pair
    costs = []
    for number, (code, signature) in enumerate(pairs):
        row = first[number]
        teller = inputs.teller[row]
        if signature < 0:
            costs.append(Cost())
        elif teller == row:
            costs.append(cost(names[code], *signatures[signature], ranges.get(number)))
        else:
            costs.append(cost_of_called(names[codes[teller]], *signatures[signature]))
    known = np.array([bool(of_pair.flops or of_pair.most_flops) for of_pair in costs], dtype=bool)
    which = np.where(leaves_work_to_others(timeline, known[which]), len(costs), which)
    return Costs([*costs, Cost()], which)


def leaves_work_to_others(timeline: Timeline, known: np.ndarray) -> np.ndarray:
    """Which operators call one whose FLOPs are known, other than their own call passed on, as mm
    does to mm.out.  known: [operators] whether its FLOPs are."""
    n = len(known)
    parent = timeline.host["operator_parent"].to_numpy()[:n].astype(np.int64)
    leaves = np.zeros(n, dtype=bool)
    rows = parent[known & operator_calls(timeline)["calls_of_name"].to_numpy()]
    while len(rows):
        rows = rows[rows >= 0]
        leaves[rows] = True
        rows = parent[np.unique(rows)]
    return leaves


def batches_told(timeline: Timeline, which: np.ndarray) -> dict[int, str]:
    """The range that tells the lengths of a batch's sequences, for the groups of operators that are
    in only one."""
    parent, names = timeline.host["parent"].to_numpy(), timeline.host["name"]
    tells = by_name(names, lambda name: BATCH.match(name) is not None, bool)
    if not tells.any():
        return {}
    around = take_or_none(names, nearest_marked_ancestor(parent, tells)[: len(which)])
    texts = pd.Series(around).groupby(which).agg(["nunique", "first"])
    return texts["first"][texts["nunique"] == 1].to_dict()


def operator_tables(timeline: Timeline) -> OperatorTables:
    """FLOPs and bytes are those of all calls."""
    groups = calls_by_name_and_inputs(timeline)
    clock = "self_device_us" if timeline.on_gpu else "self_cpu_us"
    total_us = groups[clock].sum()
    by_shape = groups[groups["shapes"].notna().to_numpy()]
    return OperatorTables(
        operators=operator_rows(sums_by_name(groups), clock, total_us),
        operators_by_shape=operator_rows(by_shape, clock, total_us),
    )


def calls_by_name_and_inputs(timeline: Timeline) -> pd.DataFrame:
    """A row for each name and inputs of operators: name, shapes (None: not recorded), and the sums
    of operator_calls(), with flops and bytes; those ..._of_name too, where a call within one of its
    name does not count."""
    # But for the last one, the costs are in the order of the groups.
    (*costs, _), which = costs_of_operators(timeline)
    calls = operator_calls(timeline).drop(columns="call")
    works = which != len(costs)
    calls = calls.assign(works=works & calls["calls"], works_of_name=works & calls["calls_of_name"])
    groups = calls.groupby(["code", "signature"], sort=False).sum().reset_index()
    names = np.asarray(timeline.trace.operators["name"].cat.categories, dtype=object)
    groups["name"] = names[groups["code"].to_numpy()]
    shapes = []
    for signature in groups["signature"]:
        recorded = signature >= 0
        shapes.append(shapes_text(timeline.trace.signatures[signature][0]) if recorded else None)
    groups["shapes"] = shapes
    for suffix in ("", "_of_name"):
        n_calls, n_works = groups[f"calls{suffix}"], groups[f"works{suffix}"]
        groups[f"bytes{suffix}"] = products([cost.bytes for cost in costs], n_calls)
        flops = products([cost.flops for cost in costs], n_works)
        groups[f"flops{suffix}"] = flops.where((n_works > 0) | (n_calls == 0), None)
    return groups


def products(each: list[int | None], calls: pd.Series) -> pd.Series:
    """What all calls do, where each does so much, as integers of Python, which do not overflow;
    None: unknown, but no calls do nothing."""
    totals = []
    for amount, n_calls in zip(each, calls.tolist(), strict=True):
        if n_calls == 0:
            totals.append(0)
        else:
            totals.append(None if amount is None else amount * n_calls)
    return pd.Series(totals, dtype=object, index=calls.index)


def sums_by_name(groups: pd.DataFrame) -> pd.DataFrame:
    """The same by name alone; flops and bytes are unknown for an operator if they are for some of
    its calls."""
    by_name = groups.groupby("name", sort=False)
    sums = by_name[["self_cpu_us", "self_device_us"]].sum()
    for key in ("calls", "cpu_us", "device_us"):
        sums[key] = by_name[f"{key}_of_name"].sum()
    for key in ("flops", "bytes"):
        sums[key] = by_name[f"{key}_of_name"].agg(sum_if_known).astype(object)
    return sums.reset_index()


def sum_if_known(amounts: pd.Series) -> int | None:
    return None if amounts.isna().any() else sum(amounts)


def operator_rows(table: pd.DataFrame, clock: str, total_us: float) -> list[OperatorRow]:
    """Rows of the document, most time first.  Shares are those of the column `clock` in the
    total."""
    on_gpu = clock == "self_device_us"
    table = table.sort_values([clock, "self_cpu_us"], ascending=False)
    rows = []
    for operator in table.to_dict("records"):
        row = OperatorRow(
            name=operator["name"],
            shapes=operator.get("shapes", ABSENT),
            calls=operator["calls"],
            self_cpu_us=operator["self_cpu_us"],
            cpu_us=operator["cpu_us"],
            self_device_us=operator["self_device_us"] if on_gpu else None,
            device_us=operator["device_us"] if on_gpu else None,
            flops=known_integer(operator["flops"]),
            bytes=known_integer(operator["bytes"]),
            share=float(operator[clock] / total_us) if total_us else 0.0,
        )
        rows.append(row)
    return rows


def known_integer(value: float | None) -> int | None:
    """pandas has NaN for None."""
    return int(value) if pd.notna(value) else None


def shapes_text(shapes: list) -> str:
    """'[8, 128, 256] [256]': tensors only; a list of tensors in parentheses."""
    texts = []
    for shape in shapes:
        if isinstance(shape, list) and shape and isinstance(shape[0], list):
            texts.append(f"({shapes_text(shape)})")
        elif shape:
            texts.append(str(shape))
    return " ".join(texts)


# ---- Kernels -------------------------------------------------------------------------------------


def kernel_rows(timeline: Timeline) -> list[KernelRow]:
    """GPU events by name, most time first: counts, times in us, and what usually launched them."""
    gpu = timeline.gpu
    codes = gpu["name"].cat.codes.to_numpy()
    us = (gpu["end"] - gpu["start"]).groupby(codes)
    total_us, mean_us, count = us.sum(), us.mean(), us.size()
    p50_us, p95_us = us.quantile(0.5), us.quantile(0.95)
    kind = gpu["kind"].groupby(codes).first()
    count_of_steps = (gpu["step"] >= 0).groupby(codes).sum()
    operators = take_or_none(timeline.host["name"], gpu["operator"].to_numpy())
    launchers = most_frequent(codes, operators)
    components = most_frequent(codes, gpu["component"].to_numpy(object))
    categories = most_frequent(codes, gpu["category"].to_numpy(object))
    all_us = total_us.sum()
    rows = []
    for code in total_us.sort_values(ascending=False, kind="stable").index:
        row = KernelRow(
            name=gpu["name"].cat.categories[code],
            kind=kind[code],
            count=int(count[code]),
            count_per_step=float(count_of_steps[code] / len(timeline.steps)),
            total_us=float(total_us[code]),
            mean_us=float(mean_us[code]),
            p50_us=float(p50_us[code]),
            p95_us=float(p95_us[code]),
            share=float(total_us[code] / all_us) if all_us else 0.0,
            launched_by=launchers.get(code),
            component=components.get(code, UNATTRIBUTED),
            category=categories.get(code),
        )
        rows.append(row)
    return rows


# ---- For a reader --------------------------------------------------------------------------------


def operator_columns(on_gpu: bool, by_shape: bool) -> list[Column]:
    name = column("operator", "name", left=True)
    if by_shape:
        name = Column("operator, input shapes", name_and_shapes, left=True)
    columns = [
        name,
        column("calls", "calls", ","),
        column("self CPU ms", "self_cpu_us", "~3", 1e3),
        column("CPU ms", "cpu_us", "~3", 1e3),
    ]
    if on_gpu:
        columns.append(column("self GPU ms", "self_device_us", "~3", 1e3))
        columns.append(column("GPU ms", "device_us", "~3", 1e3))
    columns += [
        column("share", "share", ".1%"),
        column("GFLOP", "flops", "~2", 1e9),
        column("MB", "bytes", "~1", MB),
    ]
    return columns


def name_and_shapes(row: OperatorRow | dict) -> str:
    """row: a dictionary, of several together."""
    return f"{value_of(row, 'name')} {value_of(row, 'shapes') or ''}"


def launcher(row: KernelRow | dict) -> str | None:
    """None of several kernels together."""
    return None if isinstance(row, dict) else row.launched_by or "unknown"


KERNEL_COLUMNS = [
    column("kernel", "name", left=True),
    column("total calls", "count", ","),
    column("total ms", "total_us", "~3", 1e3),
    column("mean us", "mean_us", "~1"),
    column("p50 us", "p50_us", "~1"),
    column("p95 us", "p95_us", "~1"),
    column("share", "share", ".1%"),
    Column("launched by", launcher, left=True),
    column("component", "component", left=True),
]
# What is summed in the row of those that a table does not show
OPERATOR_SUMS = ("calls", "self_cpu_us", "self_device_us", "share")
KERNEL_SUMS = ("count", "total_us", "share")


def operator_section(
    tables: OperatorTables, on_gpu: bool, steps: int, unreliable: str = "", sort: str | None = None
) -> Section:
    """Operators by name, and by name and shapes of their inputs.

    on_gpu: whether GPU events were recorded.  steps: of the trace.  unreliable: why they should not
    be relied on.  sort: of SORT_KEYS; None: as they are."""
    clock, key = ("GPU", "self_device_us") if on_gpu else ("CPU", "self_cpu_us")
    self_ms = significant(sum(getattr(row, key) for row in tables.operators) / 1e3)
    by_shape = Section(
        "Operators by shape",
        operator_columns(on_gpu, by_shape=True),
        sorted_rows(tables.operators_by_shape, sort),
        label="name",
        sums=OPERATOR_SUMS,
    )
    return Section(
        "Operators",
        operator_columns(on_gpu, by_shape=False),
        sorted_rows(tables.operators, sort),
        [
            "Times are sums over the trace",
            "FLOPs (two per multiply-add) and bytes (inputs and outputs once): where the shapes of"
            " inputs determine them",
        ],
        {
            "Shares": f"of {self_ms} ms of self {clock} time, which is all of the trace, with"
            f" {count_of(steps, 'step')}"
        },
        label="name",
        sums=OPERATOR_SUMS,
        warning=unreliable,
        parts=[by_shape],
    )


def sorted_rows(rows: list[OperatorRow], sort: str | None) -> list[OperatorRow]:
    """The largest value first, unknown ones last."""
    if sort is None:
        return rows
    return sorted(rows, key=lambda row: -(getattr(row, COLUMN_OF[sort]) or -1))


def kernel_section(kernels: list[KernelRow]) -> Section:
    section = Section("GPU kernels", KERNEL_COLUMNS, kernels, label="name", sums=KERNEL_SUMS)
    if kernels:
        per_step = sum(row.count_per_step for row in kernels)
        section.facts = {"Kernels": f"{len(kernels)}, {per_step:,.1f} launches per step"}
        section.note = ["Calls and ms are sums over the trace"]
    return section
