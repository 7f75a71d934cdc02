"""Which operators and kernels ran: calls, times, FLOPs and bytes, and the operator that launched
each kernel."""

import numpy as np
import pandas as pd

from analysis import SORT_KEYS
from analysis.attribution.components import UNATTRIBUTED
from analysis.trace.nesting import nearest_marked_ancestor, nearest_marked_caller
from analysis.trace.tables import by_name, different_pairs, most_frequent, take_or_none
from analysis.trace.timeline import Timeline, cached_on_timeline
from analysis.vocabulary.annotations import BATCH
from analysis.vocabulary.kernel_classes import MATMUL_CLASSES
from analysis.work.operator_costs import Cost, cost, cost_of_called, tells_cost
from harness.base.sections import Section
from harness.base.tables import Column, column
from harness.base.text import count_of, significant
from harness.base.units import MB

COLUMN_OF = {key: f"{key}_us" if key.endswith(("cpu", "device")) else key for key in SORT_KEYS}
TIMES = ["self_cpu_us", "cpu_us", "self_device_us", "device_us"]


@cached_on_timeline
def inputs_of_operators(timeline: Timeline) -> tuple[np.ndarray, np.ndarray]:
    """For each operator the number of its inputs in trace.signatures, or -1, and the row of the
    operator that has them: its own, or, of a matmul or convolution without any, the caller that
    called it to do its work."""
    operators, gpu = timeline.trace.operators, timeline.gpu
    n, signature = len(operators), operators["signature"].to_numpy()
    kinds, own_rows = operators["named_category"].to_numpy(object), np.arange(n)
    bare = (signature < 0) & operators["named_category"].isin(MATMUL_CLASSES).to_numpy()
    if not bare.any() or (signature < 0).all():
        return signature, own_rows
    tells = by_name(operators["name"], tells_cost, bool) & (signature >= 0)
    callers = np.append(tells, np.zeros(len(timeline.host) - n, bool))
    caller = nearest_marked_caller(timeline.host["operator_parent"].to_numpy(), callers)[:n]
    takes = np.flatnonzero(bare & (caller >= 0))
    takes = takes[kinds[takes] == kinds[caller[takes]]]
    # Of several that a caller calls, the one that works longest does what its inputs tell.
    launcher = gpu["operator"].to_numpy()
    us = np.bincount(
        launcher[launcher >= 0], (gpu["end"] - gpu["start"]).to_numpy()[launcher >= 0], minlength=n
    )
    work = us if timeline.on_gpu else timeline.host["own_us"].to_numpy()[:n]
    longest = takes[np.lexsort((-work[takes], caller[takes]))]
    rows = longest[~pd.Series(caller[longest]).duplicated().to_numpy()]
    found, teller = signature.copy(), own_rows
    found[rows], teller[rows] = signature[caller[rows]], caller[rows]
    return found, teller


@cached_on_timeline
def operator_calls(timeline: Timeline) -> pd.DataFrame:
    """Each call of an operator, with self and total times in us, on the host and on the GPU.

    Self CPU time is the duration less that of the operators it called.  Self device time is that of
    the GPU events it launched itself; device time includes those launched by the operators it
    called.  An operator that calls another of its name, as mm does mm.out, is one call: columns
    ..._of_name are 0 for the inner one, the others if its inputs are the same too.  call: the row
    of the outermost call of the same name and inputs.
    """
    operators, gpu = timeline.trace.operators, timeline.gpu
    n = len(operators)
    parent = timeline.host["operator_parent"].to_numpy()[:n].astype(np.int64)
    duration = (operators["end"] - operators["start"]).to_numpy()
    nested = parent >= 0
    called = np.bincount(parent[nested], weights=duration[nested], minlength=n)
    launcher, us = gpu["operator"].to_numpy(), (gpu["end"] - gpu["start"]).to_numpy()
    linked = launcher >= 0
    own_device = np.bincount(launcher[linked], weights=us[linked], minlength=n)
    device, rows, us = own_device.copy(), parent[launcher[linked]], us[linked]
    while (above := rows >= 0).any():
        rows, us = rows[above], us[above]
        device += np.bincount(rows, weights=us, minlength=n)
        rows = parent[rows]
    codes, signature, above = (
        operators["name"].cat.codes.to_numpy(),
        inputs_of_operators(timeline)[0],
        parent.clip(0),
    )
    within_name = nested & (codes[above] == codes) if n else np.zeros(0, dtype=bool)
    within_inputs = within_name & (signature[above] == signature)
    call = np.arange(n)
    while (inner := within_inputs[call]).any():
        call[inner] = parent[call[inner]]
    columns = {"code": codes, "signature": signature, "call": call}
    columns |= {"self_cpu_us": np.maximum(0.0, duration - called), "self_device_us": own_device}
    for name, values in {
        "calls": np.ones(n, bool),
        "cpu_us": duration,
        "device_us": device,
    }.items():
        columns |= {name: values * ~within_inputs, f"{name}_of_name": values * ~within_name}
    return pd.DataFrame(columns, copy=False)


@cached_on_timeline
def costs_of_operators(timeline: Timeline) -> tuple[list[Cost], np.ndarray]:
    """The cost of each name and inputs of operators, in the order in which they first appear, and
    for each operator which of them it has.  The last cost, which is unknown, is that of operators
    that leave the work to others whose costs are known: work counts once, where it is done."""
    operators, signatures = timeline.trace.operators, timeline.trace.signatures
    names, codes = operators["name"].cat.categories, operators["name"].cat.codes.to_numpy()
    signature, teller = inputs_of_operators(timeline)
    pairs, which = different_pairs(codes, signature)
    told, costs = batches_told(timeline, which), []
    first = np.unique(which, return_index=True)[1]  # the first operator of each pair
    for n, (code, inputs) in enumerate(pairs):
        row = first[n]
        if inputs < 0:
            costs.append(Cost())
        elif teller[row] == row:
            costs.append(cost(names[code], *signatures[inputs], told.get(n)))
        else:
            costs.append(cost_of_called(names[codes[teller[row]]], *signatures[inputs]))
    known = np.array([bool(of_pair.flops or of_pair.most_flops) for of_pair in costs], dtype=bool)
    which = np.where(leaves_work_to_others(timeline, known[which]), len(costs), which)
    return [*costs, Cost()], which


def leaves_work_to_others(timeline: Timeline, known: np.ndarray) -> np.ndarray:
    """Which operators call one whose FLOPs are known, other than their own call passed on, as mm
    does to mm.out."""
    n = len(known)
    parent = timeline.host["operator_parent"].to_numpy()[:n].astype(np.int64)
    out = np.zeros(n, dtype=bool)
    rows = parent[known & operator_calls(timeline)["calls_of_name"].to_numpy()]
    while (above := rows[rows >= 0]).size:
        out[above] = True
        rows = parent[np.unique(above)]
    return out


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


def operator_tables(timeline: Timeline) -> dict:
    """Operators by name, and by name and input shapes,
    most time first; FLOPs and bytes over all calls."""
    costs, which = costs_of_operators(timeline)  # but for the last, in the order of the groups
    calls = operator_calls(timeline).drop(columns="call")
    works = which != len(costs) - 1
    calls = calls.assign(works=works & calls["calls"], works_of_name=works & calls["calls_of_name"])
    groups = calls.groupby(["code", "signature"], sort=False).sum().reset_index()
    names = np.asarray(timeline.trace.operators["name"].cat.categories, dtype=object)
    groups["name"] = names[groups["code"].to_numpy()]
    inputs = [timeline.trace.signatures[i] if i >= 0 else None for i in groups["signature"]]
    for suffix in ("", "_of_name"):  # Python's integers, which do not overflow
        of_calls, of_works = groups[f"calls{suffix}"], groups[f"works{suffix}"]
        groups[f"bytes{suffix}"] = products([one.bytes for one in costs[:-1]], of_calls)
        flops = products([one.flops for one in costs[:-1]], of_works)
        groups[f"flops{suffix}"] = flops.where((of_works > 0) | (of_calls == 0), None)
    groups["shapes"] = [signature and shapes_text(signature[0]) for signature in inputs]
    by_name = groups.groupby("name", sort=False)
    totals = by_name[["self_cpu_us", "self_device_us"]].sum()
    for field in ("calls", "cpu_us", "device_us"):
        totals[field] = by_name[f"{field}_of_name"].sum()
    for field in (
        "flops",
        "bytes",
    ):  # unknown for an operator if it is unknown for some of its calls
        values = by_name[f"{field}_of_name"]
        totals[field] = values.agg(
            lambda values: None if values.isna().any() else sum(values)
        ).astype(object)
    by_shape = groups.loc[
        groups["shapes"].notna(), ["name", "calls", *TIMES, "flops", "bytes", "shapes"]
    ]
    clock = "self_device_us" if timeline.on_gpu else "self_cpu_us"
    total = groups[clock].sum()
    tables = {"operators": totals.reset_index(), "operators_by_shape": by_shape}
    return {name: operator_rows(table, clock, total) for name, table in tables.items()}


def products(each: list[int | None], calls: pd.Series) -> pd.Series:
    """What all calls do, where each does so much; None: unknown, but no calls do nothing."""
    pairs = zip(each, calls.tolist(), strict=True)
    totals = [n * times if n is not None else None if times else 0 for n, times in pairs]
    return pd.Series(totals, dtype=object, index=calls.index)


def operator_rows(table: pd.DataFrame, clock: str, total: float) -> list[dict]:
    """Rows of the document, most time first.  Shares are those of the column
    `clock` in the total."""
    table = table.assign(share=table[clock] / total if total else 0.0)
    rows = table.sort_values([clock, "self_cpu_us"], ascending=False).to_dict("records")
    for row in rows:
        row |= {
            field: int(row[field]) if pd.notna(row[field]) else None for field in ("flops", "bytes")
        }
        if clock == "self_cpu_us":  # no GPU
            row |= {"self_device_us": None, "device_us": None}
    return rows


def shapes_text(shapes: list) -> str:
    """'[8, 128, 256] [256]': tensors only; a list of tensors in parentheses."""
    texts = []
    for shape in shapes:
        if isinstance(shape, list) and shape and isinstance(shape[0], list):
            texts.append(f"({shapes_text(shape)})")
        elif shape:
            texts.append(str(shape))
    return " ".join(texts)


def kernel_table(timeline: Timeline) -> list[dict]:
    """GPU events by name, most time first: counts, times in us, and what usually launched them."""
    gpu, codes = timeline.gpu, timeline.gpu["name"].cat.codes.to_numpy()
    us = (gpu["end"] - gpu["start"]).groupby(codes)
    total = us.sum()
    quantiles = us.quantile([0.5, 0.95]).unstack()
    columns = {
        "name": gpu["name"].cat.categories[total.index],
        "kind": gpu["kind"].groupby(codes).first(),
    }
    columns |= {
        "count": us.size(),
        "count_per_step": (gpu["step"] >= 0).groupby(codes).sum() / len(timeline.steps),
    }
    columns |= {
        "total_us": total,
        "mean_us": us.mean(),
        "p50_us": quantiles.get(0.5),
        "p95_us": quantiles.get(0.95),
    }
    table = pd.DataFrame(columns | {"share": total / total.sum() if total.sum() else 0.0})
    launched_by = take_or_none(timeline.host["name"], gpu["operator"].to_numpy())
    usual = {
        "launched_by": launched_by,
        **{key: gpu[key].to_numpy(object) for key in ("component", "category")},
    }
    for key, values in usual.items():
        of_kernel = most_frequent(codes, values)
        table[key] = pd.Series(
            [of_kernel.get(code) for code in table.index], table.index, dtype=object
        )
    table["component"] = table["component"].fillna(UNATTRIBUTED)
    return table.sort_values("total_us", ascending=False, kind="stable").to_dict("records")


# ---- For a reader --------------------------------------------------------------------------------


def operator_columns(on_gpu: bool, by_shape: bool) -> list[Column]:
    shaped = Column(
        "operator, input shapes", lambda row: f"{row['name']} {row.get('shapes', '')}", left=True
    )
    of_gpu = [
        column("self GPU ms", "self_device_us", "~3", 1e3),
        column("GPU ms", "device_us", "~3", 1e3),
    ]
    return [
        shaped if by_shape else column("operator", "name", left=True),
        column("calls", "calls", ","),
        column("self CPU ms", "self_cpu_us", "~3", 1e3),
        column("CPU ms", "cpu_us", "~3", 1e3),
        *(of_gpu if on_gpu else []),
        column("share", "share", ".1%"),
        column("GFLOP", "flops", "~2", 1e9),
        column("MB", "bytes", "~1", MB),
    ]


KERNEL_COLUMNS = [
    column("kernel", "name", left=True),
    column("total calls", "count", ","),
    column("total ms", "total_us", "~3", 1e3),
    *(column(f"{name} us", f"{name}_us", "~1") for name in ("mean", "p50", "p95")),
    column("share", "share", ".1%"),
    Column("launched by", lambda row: row.get("launched_by", "-") or "unknown", left=True),
    column("component", "component", left=True),
]


SUMMED = ("calls", "self_cpu_us", "self_device_us", "share", "count", "total_us")  # for "5 more"


def operator_section(analysis: dict, sort: str | None = None) -> Section:
    """Operators by name, and by name and shapes of their inputs."""
    on_gpu = bool(analysis["kernels"])
    clock, key = ("GPU", "self_device_us") if on_gpu else ("CPU", "self_cpu_us")
    self_ms, steps = (
        significant(sum(row[key] for row in analysis["operators"]) / 1e3),
        analysis["attribution"]["steps"],
    )
    shares = (
        f"of {self_ms} ms of self {clock} time, which is all of the trace, with"
        f" {count_of(steps, 'step')}"
    )
    work = (
        "FLOPs (two per multiply-add) and bytes (inputs and outputs once): where the shapes of"
        " inputs determine them"
    )

    def table(title: str, rows: list[dict], by_shape: bool = False) -> Section:
        rows = (
            sorted(rows, key=lambda row: -(row[COLUMN_OF[sort]] or -1)) if sort else rows
        )  # unknown values last
        return Section(title, operator_columns(on_gpu, by_shape), rows, label="name", sums=SUMMED)

    found = table("Operators", analysis["operators"])
    found.facts, found.note = {"Shares": shares}, ["Times are sums over the trace", work]
    found.warning = analysis["integrity"]["unreliable"].get("operators", "")
    found.parts = [table("Operators by shape", analysis["operators_by_shape"], by_shape=True)]
    return found


def kernel_section(analysis: dict) -> Section:
    kernels = analysis["kernels"]
    per_step = sum(row["count_per_step"] for row in kernels)
    facts = {"Kernels": f"{len(kernels)}, {per_step:,.1f} launches per step"} if kernels else {}
    note = ["Calls and ms are sums over the trace"] * bool(kernels)
    return Section("GPU kernels", KERNEL_COLUMNS, kernels, note, facts, label="name", sums=SUMMED)
