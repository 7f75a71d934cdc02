"""Which operators and kernels ran, how often, for how long, doing how much work, and which launched which?"""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis import SORT_KEYS
from analysis.components import UNATTRIBUTED
from analysis.costs import Cost, cost
from analysis.links import Links

COLUMN_OF = {key: f"{key}_us" if key.endswith(("cpu", "device")) else key for key in SORT_KEYS}


def operator_calls(links: Links) -> pd.DataFrame:
    """Each call of an operator, with times in us of its own and in all, on the host and on the GPU.

    An operator's own time is its duration less that of the operators it called; its own device time that of the GPU
    events it launched itself, and its device time also that of those launched by the operators it called.
    """
    operators, gpu = links.trace.operators, links.gpu
    n = len(operators)
    parent = links.host["operator_parent"].to_numpy()[:n].astype(np.int64)
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
    codes = operators["name"].cat.codes.to_numpy()
    # One that calls itself by the same name counts once in the totals.
    outer = ~(nested & (codes[np.maximum(parent, 0)] == codes)) if n else np.zeros(0, dtype=bool)
    return pd.DataFrame(
        {
            "code": codes,
            "signature": operators["signature"].to_numpy(),
            "self_cpu_us": np.maximum(0.0, duration - called),
            "cpu_us": duration * outer,
            "self_device_us": own_device,
            "device_us": device * outer,
        }
    )


def operator_tables(links: Links) -> dict:
    """Operators by name, and by name and input shapes, most time first; FLOPs and bytes are those of all calls."""
    calls = operator_calls(links)
    times = ["self_cpu_us", "cpu_us", "self_device_us", "device_us"]
    groups = calls.assign(calls=1).groupby(["code", "signature"], sort=False)[["calls", *times]].sum().reset_index()
    names = np.asarray(links.trace.operators["name"].cat.categories, dtype=object)
    groups.insert(0, "name", names[groups.pop("code").to_numpy()])
    costs = [
        cost(name, *links.trace.signatures[signature]) if signature >= 0 else Cost()
        for name, signature in zip(groups["name"], groups["signature"], strict=True)
    ]
    for field in ("flops", "bytes"):  # Python's numbers, which have no largest
        each = [getattr(one, field) for one in costs]
        totals = [n and n * calls for n, calls in zip(each, groups["calls"].tolist(), strict=True)]
        groups[field] = pd.Series(totals, dtype=object, index=groups.index)
    on_gpu = len(links.gpu) > 0
    first = "self_device_us" if on_gpu else "self_cpu_us"
    whole = groups[first].sum()
    named = groups.drop(columns="signature").groupby("name", sort=False)
    by_name = named[["calls", *times]].sum()
    for field in ("flops", "bytes"):  # a figure for some of an operator's calls is none for the operator
        by_name[field] = named[field].agg(lambda values: None if values.isna().any() else sum(values)).astype(object)
    by_name = by_name.reset_index()

    def rows(table: pd.DataFrame) -> list[dict]:
        table = table.assign(share=table[first] / whole if whole else 0.0)
        table = table.sort_values([first, "self_cpu_us"], ascending=False)
        out = table.to_dict("records")
        for row in out:
            row |= {field: int(row[field]) if pd.notna(row[field]) else None for field in ("flops", "bytes")}
            if not on_gpu:
                row |= {"self_device_us": None, "device_us": None}
        return out

    shapes = [shapes_text(links.trace.signatures[s][0]) if s >= 0 else None for s in groups["signature"]]
    by_shape = groups.drop(columns="signature").assign(shapes=shapes)
    return {"operators": rows(by_name), "operators_by_shape": rows(by_shape[pd.notna(by_shape["shapes"])])}


def shapes_text(shapes: list) -> str:
    """'[8, 128, 256] [256]': tensors only; a list of tensors in parentheses."""
    texts = []
    for shape in shapes:
        if isinstance(shape, list) and shape and isinstance(shape[0], list):
            texts.append(f"({shapes_text(shape)})")
        elif shape:
            texts.append(str(shape))
    return " ".join(texts)


def kernel_table(links: Links) -> list[dict]:
    """GPU events by name, most time first: counts, times in us, and who launched them, mostly."""
    gpu = links.gpu
    if gpu.empty:
        return []
    us, codes = (gpu["end"] - gpu["start"]).to_numpy(), gpu["name"].cat.codes.to_numpy()
    order = np.lexsort((us, codes))
    ordered = us[order]
    group, first, count = np.unique(codes[order], return_index=True, return_counts=True)

    def quantile(q: float) -> np.ndarray:
        at = first + q * (count - 1)
        low, high = np.floor(at).astype(int), np.ceil(at).astype(int)
        return ordered[low] + (at - low) * (ordered[high] - ordered[low])

    total = np.add.reduceat(ordered, first)
    in_steps = np.bincount(codes[(gpu["step"] >= 0).to_numpy()], minlength=codes.max() + 1)[group]
    operator_names = np.append(links.host["name"].astype(object).to_numpy(), None)[gpu["operator"].to_numpy()]
    table = pd.DataFrame({"code": codes, "launched_by": operator_names, "component": gpu["component"].to_numpy()})
    table["category"] = gpu["category"].to_numpy()
    usual = {name: most_frequent(table["code"], table[name]) for name in ("launched_by", "component", "category")}
    names = np.asarray(gpu["name"].cat.categories, dtype=object)
    kinds = gpu["kind"].to_numpy()[order][first]
    rows = [
        {
            "name": names[code],
            "kind": kinds[i],
            "count": int(count[i]),
            "count_per_step": in_steps[i] / len(links.steps),
            "total_us": float(total[i]),
            "mean_us": float(total[i] / count[i]),
            "p50_us": float(p50[i]),
            "p95_us": float(p95[i]),
            "share": float(total[i] / us.sum()) if us.sum() else 0.0,
            "launched_by": usual["launched_by"].get(code),
            "component": usual["component"].get(code) or UNATTRIBUTED,
            "category": usual["category"].get(code),
        }
        for p50, p95 in [(quantile(0.5), quantile(0.95))]
        for i, code in enumerate(group.tolist())
    ]
    return sorted(rows, key=lambda row: -row["total_us"])


def most_frequent(groups: pd.Series, values: pd.Series) -> dict[int, str]:
    """The commonest known value of each group."""
    known = pd.DataFrame({"group": groups, "value": values}).dropna()
    if known.empty:
        return {}
    counts = known.groupby(["group", "value"], sort=False).size().reset_index(name="n")
    top = counts.sort_values("n", kind="stable").drop_duplicates("group", keep="last")
    return dict(zip(top["group"].tolist(), top["value"].tolist(), strict=True))


def sorted_by(rows: list[dict], key: str | None) -> list[dict]:
    """Rows as they are, or by a column, largest first; unknown values last."""
    return rows if key is None else sorted(rows, key=lambda row: -(row[COLUMN_OF[key]] or -1))


def quantity(value: int | None, scale: float) -> str:
    return "-" if value is None else f"{value / scale:.3f}"


def operator_lines(analysis: dict, top: int = 15, sort: str | None = None) -> list[str]:
    """The tables that a person reads."""
    operators, kernels = analysis["operators"], analysis["kernels"]
    on_gpu = bool(kernels)
    device = f"{'self GPU ms':>13}{'GPU ms':>11}" if on_gpu else ""
    heading = f"{'calls':>8}{'self CPU ms':>13}{'CPU ms':>12}{device}{'share':>8}{'GFLOP':>10}{'MB':>11}"

    def line(row: dict, label: str, width: int) -> str:
        text = f"{label[: width - 2]:<{width}}{row['calls']:>8}{row['self_cpu_us'] / 1e3:>13.3f}"
        text += f"{row['cpu_us'] / 1e3:>12.3f}"
        if on_gpu:
            text += f"{row['self_device_us'] / 1e3:>13.3f}{row['device_us'] / 1e3:>11.3f}"
        return text + f"{row['share']:>8.1%}{quantity(row['flops'], 1e9):>10}{quantity(row['bytes'], 2**20):>11}"

    clock = "GPU" if on_gpu else "CPU"
    whole = sum(row["self_device_us" if on_gpu else "self_cpu_us"] for row in operators) / 1e3
    lines = [
        f"Operators: {len(operators)} by name, {whole:.3f} ms of their own on the {clock}; "
        "share of that; FLOPs and bytes of all calls, where shapes tell",
        f"{'operator':<48}{heading}",
        *(line(row, row["name"], 48) for row in sorted_by(operators, sort)[:top]),
    ]
    by_shape = sorted_by(analysis["operators_by_shape"], sort)[:top]
    if by_shape:
        lines += ["", f"{'operator, input shapes':<70}{heading}"]
        lines += [line(row, f"{row['name']} {row['shapes']}", 70) for row in by_shape]
    if kernels:
        per_step = sum(row["count_per_step"] for row in kernels)
        lines += [
            "",
            f"GPU kernels: {len(kernels)} by name, {per_step:.1f} launched a step",
            f"{'kernel':<60}{'a step':>8}{'total ms':>11}{'mean us':>10}{'p50 us':>10}{'p95 us':>10}{'share':>8}"
            "  launched by (component)",
        ]
        lines += [
            f"{row['name'][:58]:<60}{row['count_per_step']:>8.1f}{row['total_us'] / 1e3:>11.3f}{row['mean_us']:>10.1f}"
            f"{row['p50_us']:>10.1f}{row['p95_us']:>10.1f}{row['share']:>8.1%}"
            f"  {row['launched_by'] or 'unknown'} ({row['component']})"
            for row in kernels[:top]
        ]
    return lines
