"""Which operators and kernels ran in the profiled steps, how often, for how long, and which launched which?"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pandas as pd

from analysis.trace import Trace


def parents(start: np.ndarray, end: np.ndarray, thread: np.ndarray) -> np.ndarray:
    """For each interval the position of the innermost one that holds it on the same thread, or -1."""
    parent = np.full(len(start), -1)
    order = np.lexsort((-end, start, thread))
    # Plain lists: indexing NumPy arrays one by one is what would take the time.
    starts, ends, threads = start.tolist(), end.tolist(), thread.tolist()
    open_intervals: list[int] = []
    current = None
    for i in order.tolist():
        if threads[i] != current:
            current, open_intervals = threads[i], []
        while open_intervals and ends[open_intervals[-1]] < ends[i]:
            open_intervals.pop()
        while open_intervals and ends[open_intervals[-1]] <= starts[i]:
            open_intervals.pop()
        if open_intervals:
            parent[i] = open_intervals[-1]
        open_intervals.append(i)
    return parent


def launching_operator(trace: Trace) -> np.ndarray:
    """For each GPU event the row of the operator that launched it, or -1.

    By the id that the event carries, else by that of the runtime call with the same correlation, else by the innermost
    operator around that call.
    """
    operators, launches, gpu = trace.operators, trace.launches, trace.gpu
    row_of_id = pd.Series(operators.index, index=operators["external_id"])
    row_of_id = row_of_id[(row_of_id.index > 0) & ~row_of_id.index.duplicated()]
    call_of = pd.Series(launches.index, index=launches["correlation"])
    call_of = call_of[(call_of.index > 0) & ~call_of.index.duplicated()]
    call = gpu["correlation"].map(call_of)
    row = gpu["external_id"].map(row_of_id)
    row = row.fillna(call.map(launches["external_id"]).map(row_of_id))
    unlinked = row.isna() & call.notna()
    if unlinked.any() and len(operators):
        calls = launches.loc[call[unlinked].astype(int), ["start", "end", "thread"]]
        both = pd.concat([operators[["start", "end", "thread"]], calls])
        around = parents(*(both[name].to_numpy() for name in ("start", "end", "thread")))[len(operators) :]
        row[unlinked] = np.where(around < len(operators), around, -1)
    return row.fillna(-1).to_numpy().astype(int)


def operator_tables(trace: Trace) -> dict:
    """Operators and kernels by name, most time of their own first.

    An operator's own CPU time is its duration less that of the operators it called; its own device time that of the
    GPU events it launched itself.
    """
    operators, gpu = trace.operators, trace.gpu
    duration = (operators["end"] - operators["start"]).to_numpy()
    parent = parents(*(operators[name].to_numpy() for name in ("start", "end", "thread")))
    called = np.bincount(parent[parent >= 0], weights=duration[parent >= 0], minlength=len(operators))
    launcher = launching_operator(trace)
    time_on_gpu = (gpu["end"] - gpu["start"]).to_numpy()
    linked = launcher >= 0
    device = np.bincount(launcher[linked], weights=time_on_gpu[linked], minlength=len(operators))
    table = operators[["name"]].assign(calls=1, self_cpu_us=duration - called, cpu_us=duration, self_device_us=device)
    table = table.groupby("name", sort=False).sum().sort_values(["self_device_us", "self_cpu_us"], ascending=False)
    by_name = gpu.assign(us=time_on_gpu).groupby("name", sort=False)["us"]
    kernels = by_name.agg(
        count="count", total_us="sum", mean_us="mean", p50_us="median", p95_us=lambda us: np.percentile(us, 95)
    )
    if len(gpu):
        names = np.append(operators["name"].to_numpy(object), None)[launcher]  # -1 takes the None
        launched_by = {name: most_frequent(names[rows]) for name, rows in by_name.indices.items()}
        kernels["launched_by"] = pd.Series(launched_by, dtype=object)
        kernels = kernels.sort_values("total_us", ascending=False)
    return {
        "kernels_linked_to_an_operator": float(linked.mean()) if len(gpu) else None,
        "operators": table.reset_index().to_dict("records"),
        "kernels": kernels.reset_index().to_dict("records"),
    }


def most_frequent(names: np.ndarray) -> str | None:
    counts = Counter(name for name in names if name is not None)
    return counts.most_common(1)[0][0] if counts else None


def operator_lines(analysis: dict, limit: int = 15) -> list[str]:
    """The tables that a person reads."""
    operators, kernels = analysis["operators"], analysis["kernels"]
    whole = sum(row["self_cpu_us"] for row in operators)
    on_gpu = sum(row["self_device_us"] for row in operators)
    heading = f"{'operator':<52}{'calls':>8}{'self CPU ms':>13}{'share':>8}{'CPU ms':>12}"
    lines = [f"Operators in {analysis['trace']}:", heading + (f"{'GPU ms':>12}{'share':>8}" if kernels else "")]
    for row in operators[:limit]:
        line = f"{row['name'][:50]:<52}{row['calls']:>8}{row['self_cpu_us'] / 1e3:>13.3f}"
        line += f"{row['self_cpu_us'] / whole:>8.1%}{row['cpu_us'] / 1e3:>12.3f}"
        if kernels:
            line += f"{row['self_device_us'] / 1e3:>12.3f}{row['self_device_us'] / on_gpu if on_gpu else 0:>8.1%}"
        lines.append(line)
    lines.append(f"{len(operators)} operators in all, {whole / 1e3:.3f} ms of their own on the CPU")
    if kernels:
        lines += ["", f"{'GPU kernel':<62}{'count':>8}{'total ms':>12}{'mean us':>10}{'p95 us':>10}  launched by"]
        lines += [
            f"{row['name'][:60]:<62}{row['count']:>8}{row['total_us'] / 1e3:>12.3f}{row['mean_us']:>10.1f}"
            f"{row['p95_us']:>10.1f}  {row['launched_by'] or 'unknown'}"
            for row in kernels[:limit]
        ]
    return lines
