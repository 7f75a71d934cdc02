"""Figures of the sweeps, from their rows alone.  `about` says what was run, and on which device."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.figure import Figure  # not pyplot: no global state, no display

from analysis.report.figures import SEAM, WIDTH, bare, beside, entitle, legend, log_axis, new_axes
from analysis.report.palette import GRAY, HATCHES, MEMORY, PHASES, series
from harness.base.text import shortened
from harness.base.units import MB
from studies.optimization.rungs import last_flag

GAIN, LOSS = ("#0072b2", ""), ("#d55e00", "//")  # color and hatching of what takes less time, or more


def new_panels(height: float, title: str, about: str, count: int):
    """A figure with axes side by side; height in inches."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    panels = figure.subplots(1, count, squeeze=False)[0]
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    entitle(figure, title, about)
    return figure, list(panels)


def stacked_bars(axes, names: list[str], parts: dict[str, list[float]], colors: dict[str, str]) -> np.ndarray:
    """Draw a bar for each name, from top to bottom.  Returns their lengths."""
    left, at = np.zeros(len(names)), np.arange(len(names))
    for part, widths in parts.items():
        style = {"color": colors[part], "hatch": HATCHES.get(part), "edgecolor": SEAM, "linewidth": 0}
        axes.barh(at, widths, left=left, label=part, **style)
        left = left + widths
    axes.set_yticks(at, names, fontsize=8.5)
    axes.invert_yaxis()
    return left


def phase_bars(axes, names: list[str], rows: list[dict]) -> None:
    """Mean of each phase in ms, and the standard deviation of the step as error bars."""
    parts = {phase: [row[f"{phase}_mean_ms"] or 0.0 for row in rows] for phase in ("forward", "backward", "optimizer")}
    lengths = stacked_bars(axes, names, parts, PHASES)
    spreads = np.array([row["step_std_ms"] or 0.0 for row in rows])
    axes.errorbar(lengths, range(len(names)), xerr=spreads, fmt="none", ecolor="black", capsize=3)
    axes.set_xlim(0, 1.02 * (lengths + spreads).max())
    axes.set_xlabel("time per step, mean (ms)\nerror bars: standard deviation of the step")
    bare(axes)


def training_figure(rows: list[dict], names: list[str], about: str) -> Figure:
    figure, axes = new_axes("Time of a step by phase", 1.9 + 0.3 * len(rows), about)
    phase_bars(axes, names, rows)
    beside(axes, [f"{row['step_mean_ms']:,.2f} ms" for row in rows])
    legend(axes)
    return figure


# ---- Memory --------------------------------------------------------------------------------------------------------


def memory_figure(rows: list[dict], fitted: dict, about: str) -> Figure:
    """Measured peaks and fit over sequence length, a line for each batch size, and the peaks by category."""
    height = max(4.6, 2 + 0.25 * len(rows))
    figure, (left, right) = new_panels(height, "Peak memory by batch size and sequence length", about, 2)
    for n, batch_size in enumerate(sorted({row["batch_size"] for row in rows})):
        color, marker, dashes = series(n)
        some = [row for row in rows if row["batch_size"] == batch_size]
        seq = np.array([row["seq_len"] for row in some], float)
        style = {"color": color, "label": f"batch {batch_size}"}
        left.plot(seq, [row["peak_bytes"] / MB for row in some], marker, **style)
        if fitted["rows"]:
            dense = np.linspace(seq.min(), seq.max(), 100)
            growing = fitted["linear_bytes"] * dense + fitted["quadratic_bytes"] * dense**2
            peaks = (fitted["constant_bytes"] + batch_size * growing) / MB
            left.plot(dense, peaks, color=color, linewidth=1, linestyle=dashes)
    left.set(xlabel="sequence length (tokens)", ylabel="peak of live tensors (MB)", ylim=(0, None))
    legend(left, "Measured (markers) and fit (lines)")
    shown = [name for name in MEMORY if name in rows[0]["bytes_by_category"]]
    parts = {name: [row["bytes_by_category"][name] / MB for row in rows] for name in shown}
    stacked_bars(right, [f"{row['batch_size']} x {row['seq_len']}" for row in rows], parts, MEMORY)
    right.set(xlabel="live tensors at the peak (MB)", ylabel="batch x sequence length")
    legend(right, "By category", ncols=3)
    return figure


# ---- Attention -----------------------------------------------------------------------------------------------------

PANELS = {  # title: the measured column, and the predicted one
    "forward pass (ms)": ("forward_ms", None),
    "backward pass (ms)": ("backward_ms", None),
    "memory before the backward pass (MB)": ("memory_bytes", "predicted_memory_bytes"),
}


def attention_figure(rows: list[dict], about: str) -> Figure:
    """Forward time, backward time and memory over sequence length, a line for each implementation; what is known."""
    known = {title: keys for title, keys in PANELS.items() if any(row[key] for row in rows for key in keys if key)}
    figure, panels = new_panels(4.2, "Attention alone, by sequence length", about, len(known))
    implementations = list(dict.fromkeys(row["implementation"] for row in rows))
    for axes, (title, (measured, predicted)) in zip(panels, known.items(), strict=True):
        axes.set_title(title, loc="left", fontsize=10)
        scale = MB if predicted else 1
        for n, name in enumerate(implementations):
            some = [row for row in rows if row["implementation"] == name]
            lines_over_sequence(axes, some, measured, n, scale, predicted=False)
            if predicted:
                lines_over_sequence(axes, some, predicted, n, scale, predicted=True)
        log_axis(axes.xaxis, ticks_among(sorted({row["seq_len"] for row in rows})))
        log_axis(axes.yaxis)
        axes.margins(0.1, tight=False)
        axes.set_xlabel("sequence length (tokens)")
    handles = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles, loc="outside right center", fontsize=8, frameon=False, handlelength=4, labelspacing=1
    )
    return figure


def lines_over_sequence(axes, rows: list[dict], key: str, n: int, scale: float, *, predicted: bool) -> None:
    """The n-th implementation.  Its predictions are rings, the larger the earlier, so that equal ones all show."""
    color, marker, dashes = series(n)
    points = [(row["seq_len"], row[key] / scale) for row in rows if row[key]]
    style = {"markersize": 5, "label": rows[0]["implementation"]}
    if predicted:
        style = {"markersize": 16 - 2.5 * min(n, 4), "markerfacecolor": "none", "linewidth": 0.6}
        style["label"] = f"{rows[0]['implementation']}, predicted"
    if points:
        axes.plot(
            *zip(*points, strict=True), marker=marker, linestyle=dashes, color=color, **{"linewidth": 1.4, **style}
        )


def ticks_among(lengths: list[int]) -> list[int]:
    """Those lengths whose labels have room on a logarithmic axis: the longest, the shortest, and between them."""
    kept = lengths[-1:]
    for length in reversed(lengths):
        if kept[0] / length >= max(1.3, (lengths[-1] / lengths[0]) ** 0.29):
            kept.insert(0, length)
    return kept if len(kept) < 2 else [lengths[0], *kept[1:]]


# ---- Precision -----------------------------------------------------------------------------------------------------


def precision_figure(rows: list[dict], sums: dict[str, list[float]], addend: float, about: str) -> Figure:
    """Time by phase and peak memory by precision, and the relative error of the sums."""
    timed = [row for row in rows if row["status"] == "ok"]
    sized = [row for row in rows if row["predicted_peak_bytes"] is not None]
    figure, panels = new_panels(4, "Precision: time, memory and rounding", about, bool(timed) + bool(sized) + 1)
    if timed:
        phase_bars(panels[0], [row["precision"] for row in timed], timed)
        legend(panels[0], "Step time by phase", ncols=3)
    if sized:
        peak_bars(panels[-2], sized)
    for n, (name, totals) in enumerate(sums.items()):
        color, _, dashes = series(n)
        errors = [100 * abs(total / (addend * k) - 1) or math.nan for k, total in enumerate(totals, 1)]  # log(0): none
        panels[-1].plot(range(1, len(totals) + 1), errors, color=color, linestyle=dashes, linewidth=1.2, label=name)
    log_axis(panels[-1].yaxis)
    panels[-1].set(ylim=(1e-6, 200), xlabel="additions", ylabel="relative error (%)")
    legend(panels[-1], f"Error of sums of {addend}", ncols=2)
    return figure


def peak_bars(axes, rows: list[dict]) -> None:
    """Predicted and, on a GPU, measured peaks."""
    kinds = [("predicted", "predicted_peak_bytes", "//")]
    if any(row["peak_bytes"] is not None for row in rows):
        kinds.append(("measured", "peak_bytes", ""))
    for i, (kind, name, hatch) in enumerate(kinds):
        values = [(row[name] or 0) / MB for row in rows]
        places = [y + 0.4 * i for y in range(len(rows))]
        style = {"color": MEMORY["activations" if hatch == "" else "temporaries"], "hatch": hatch, "edgecolor": SEAM}
        bars = axes.barh(places, values, height=0.8 / len(kinds), linewidth=0, label=kind, **style)
        axes.bar_label(bars, [f"{value:,.0f}" if value else "" for value in values], padding=3, fontsize=8)
    axes.set_yticks([y + 0.2 * (len(kinds) - 1) for y in range(len(rows))], [row["precision"] for row in rows])
    axes.margins(x=0.2)
    axes.invert_yaxis()
    axes.set_xlabel("peak memory (MB)")
    legend(axes, "Peak memory of a step", ncols=2)
    bare(axes)


# ---- Timing --------------------------------------------------------------------------------------------------------


def timing_figure(rows: list[dict], interval: tuple[float, float], change: str, about: str) -> Figure:
    """The ratio that each method reports, and the interval of the right one."""
    figure, axes = new_axes("What each timing method would have reported", 1.7 + 0.28 * len(rows), about)
    low, high = interval
    axes.axvspan(low, high, color="#009e73", alpha=0.25, linewidth=0, label="right, 95% interval")
    axes.axvline(1, color="#404040", linewidth=1, linestyle=":", label="no difference")
    for y, row in enumerate(rows):
        color, marker = ("#009e73", "o") if low <= row["ratio"] <= high else ("#d55e00", "X")
        axes.scatter([row["ratio"]], [y], c=color, marker=marker, s=60, zorder=3)
    axes.set_yticks(range(len(rows)), [row["method"] for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.margins(x=0.08)
    axes.set_xlabel(f"step time with {change} / without (ratio)")
    beside(axes, [f"{row['ratio']:.3f}" for row in rows])
    legend(axes)
    return figure


# ---- Comparison ----------------------------------------------------------------------------------------------------


def comparison_figure(rows: list[tuple[str, float, bool]], baseline: str) -> Figure:
    """Bars of the ratio of each time to that of the baseline: name, ratio, whether it is within noise."""
    figure, axes = new_axes(f"Times relative to {baseline}", 1.4 + 0.24 * max(4, len(rows)), "")
    for y, (_, ratio, noise) in enumerate(rows):
        color, hatch = (GRAY, "") if noise else LOSS if ratio > 1 else GAIN
        axes.barh(y, ratio - 1, left=1, color=color, hatch=hatch, edgecolor=SEAM, linewidth=0)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows], fontsize=7.5)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_ylim(max(4, len(rows)) - 0.5, -0.5)
    beside(axes, [f"{ratio:.2f}x{', within noise' * noise}" for _, ratio, noise in rows])
    axes.set_xlabel("time / that of the baseline (ratio)")
    return figure


# ---- Several ranks -------------------------------------------------------------------------------------------------


def collectives_figure(rows: list[dict], fits: list[dict], about: str) -> Figure:
    """Time of a call over its bytes, measured and fitted, and bus bandwidth; on the most ranks."""
    most = max(row["world_size"] for row in fits)
    title = f"Collectives on {most} ranks: time and bus bandwidth by bytes"
    figure, (left, right) = new_panels(4.2, title, about, 2)
    for n, fit in enumerate(fit for fit in fits if fit["world_size"] == most):
        color, marker, dashes = series(n)
        some = [row for row in rows if (row["kind"], row["world_size"]) == (fit["kind"], most)]
        size, style = np.array([row["bytes"] for row in some], float), {"color": color, "label": fit["kind"]}
        rates = np.array([row["bus_bandwidth_gb_per_sec"] for row in some])
        sent = rates * np.array([row["time_us"] for row in some]) * 1e3  # bytes
        fitted_us = fit["alpha_us"] + sent / fit["beta_gb_per_sec"] / 1e3
        left.plot(size, [row["time_us"] for row in some], marker, **style)
        left.plot(size, fitted_us, color=color, linewidth=1, linestyle=dashes)
        right.plot(size, rates, marker=marker, linewidth=1.2, linestyle=dashes, **style)
    for axes in (left, right):
        log_axis(axes.xaxis)
        log_axis(axes.yaxis)
        axes.set_xlabel("bytes of the larger of input and output")
    left.set_ylabel("time of a call (us)")
    right.set_ylabel("bus bandwidth (GB/s)")
    legend(left, "Measured (markers) and alpha + bytes / beta (lines)")
    return figure


def scaling_figure(rows: list[dict], about: str) -> Figure:
    """Efficiency by ranks, a line for each mode and bucket size with its interval and the predicted one (shaded), a
    panel for each kind of scaling; and memory of a rank, measured (markers) and predicted (rings)."""
    scalings = list(dict.fromkeys(row["scaling"] for row in rows))
    title = "Scaling: efficiency relative to the base, and memory of a rank"
    figure, panels = new_panels(4.8, title, about, len(scalings) + 1)
    groups = list(dict.fromkeys((row["parallel"], row["bucket_mb"]) for row in rows if row["parallel"]))
    for axes, scaling in zip(panels, scalings, strict=False):
        for n, group in enumerate(groups):
            lines_of_mode(axes, [row for row in rows if row["scaling"] == scaling], group, n)
        axes.axhline(1, color="#404040", linewidth=1, linestyle=":")
        axes.set(ylim=(0, None), ylabel=f"{scaling} scaling: efficiency")
    for n, group in enumerate(groups):
        memory_of_mode(panels[-1], [row for row in rows if row["scaling"] == scalings[0]], group, n)
    panels[-1].margins(y=0.15)
    panels[-1].set(ylim=(0, None), ylabel=f"peak memory of rank 0, {scalings[0]} scaling (MB)")
    for axes in panels:
        log_axis(axes.xaxis, sorted({row["world_size"] for row in rows}))
        axes.set_xlabel("ranks")
    # Below all panels: above one of them, a wide legend would take the room of the others.
    title = {"title": "Measured (markers) and predicted (shaded; rings)", "title_fontsize": 10, "alignment": "left"}
    modes = panels[0].get_legend_handles_labels()
    figure.legend(*modes, loc="outside lower left", ncols=6, fontsize=8, frameon=False, **title)
    return figure


def with_base(rows: list[dict], group: tuple) -> list[dict]:
    """The rows of a mode and bucket size, and the base of one rank, by ranks."""
    some = [row for row in rows if row["parallel"] is None or (row["parallel"], row["bucket_mb"]) == group]
    return sorted(some, key=lambda row: row["world_size"])


def lines_of_mode(axes, rows: list[dict], group: tuple, n: int) -> None:
    color, marker, dashes = series(n)
    some = [row for row in with_base(rows, group) if row["efficiency"] is not None]
    ranks, values = [row["world_size"] for row in some], np.array([row["efficiency"] for row in some])
    ends = np.array([row["efficiency_95"] or (row["efficiency"],) * 2 for row in some]).reshape(-1, 2)
    errors = np.maximum(0, [values - ends[:, 0], ends[:, 1] - values])
    name = group[0] if group[1] is None else f"{group[0]}, {group[1]:g} MB"
    style = {"color": color, "marker": marker, "linestyle": dashes, "markersize": 5, "capsize": 3}
    axes.errorbar(ranks, values, yerr=errors, label=name, **style)
    known = [row for row in some if row["predicted_efficiency"]]
    low, high = ([row["predicted_efficiency"][i] for row in known] for i in (0, 1))
    axes.fill_between([row["world_size"] for row in known], low, high, color=color, alpha=0.12, linewidth=0)


def memory_of_mode(axes, rows: list[dict], group: tuple, n: int) -> None:
    color, marker, dashes = series(n)
    some = with_base(rows, group)
    ranks = [row["world_size"] for row in some]
    axes.plot(ranks, [row["measured_memory_bytes"] / MB for row in some], marker, color=color, linestyle=dashes)
    known = [row for row in some if row["predicted_memory_bytes"] is not None]
    points = [row["world_size"] for row in known], [row["predicted_memory_bytes"] / MB for row in known]
    axes.plot(*points, "o", color=color, markersize=14 - 2 * min(n, 4), markerfacecolor="none", markeredgewidth=0.8)


# ---- Optimizations -------------------------------------------------------------------------------------------------

LARGEST_RATIO = 2.0  # of the axis; what takes longer is at its end


def optimization_figure(ladders: dict[str, list[dict]], about: str) -> Figure:
    """A panel for each size and precision: the ladder as a waterfall, from the baseline to all rungs, each bar from the
    ratio below it to its own; then each optimization alone, and the reference; all with intervals and bounds."""
    counts = [len(rows) + 1 for rows in ladders.values()]
    figure = Figure(figsize=(WIDTH, 1.2 + sum(0.9 + 0.24 * count for count in counts)), layout="constrained")
    panels = figure.subplots(len(counts), 1, squeeze=False, height_ratios=counts)[:, 0]
    for axes, (name, rows) in zip(panels, ladders.items(), strict=True):
        waterfall(axes, name, rows)
    entitle(figure, "Optimizations: step time relative to the baseline's", about)
    return figure


def waterfall(axes, name: str, rows: list[dict]) -> None:
    known = [row for row in rows if row["ratio"] is not None]
    climbing = sorted((row for row in known if row["ladder"]), key=lambda row: row["ladder"])
    others = [row for row in known if row["ladder"] is None]
    axes.barh(0, 1, color=GRAY, linewidth=0)
    below = 1.0
    for y, row in enumerate(climbing, 1):
        color, hatch = GAIN if row["ratio"] <= below else LOSS
        axes.barh(y, row["ratio"] - below, left=below, color=color, hatch=hatch, edgecolor=SEAM, linewidth=0)
        below = row["ratio"]
        whisker(axes, row, y)
    for y, row in enumerate(others, 1 + len(climbing)):
        color, at = (GAIN if row["ratio"] <= 1 else LOSS)[0], min(row["ratio"], LARGEST_RATIO)
        whisker(axes, row, y)
        axes.plot([at], [y], "o" if at == row["ratio"] else ">", color=color, markersize=5, clip_on=False)
    bounds = [(row["bound"], y) for y, row in enumerate((*climbing, *others), 1) if row["bound"]]
    if bounds:
        style = {"color": "#009e73", "markersize": 12, "markeredgewidth": 2}
        axes.plot(*zip(*bounds, strict=True), "|", label="least ratio that the baseline's trace allows", **style)
        legend(axes, name)
    else:
        axes.set_title(name, loc="left", fontsize=10)
    axes.axvline(1, color="#404040", linewidth=0.8, linestyle=":")
    names = [f"+ {last_flag(row['flags'])}" for row in climbing] + [shortened(row["flags"], 40) for row in others]
    axes.set_yticks(range(1 + len(names)), ["baseline", *names], fontsize=8)
    axes.set_ylim(len(names) + 0.6, -0.6)
    axes.margins(x=0.05)
    axes.set_xlim(0, min(axes.get_xlim()[1], LARGEST_RATIO))
    axes.set_xlabel("step time / baseline's (ratio)")
    bare(axes)
    beside(axes, [f"{row['ratio']:.3f}" for row in ({"ratio": 1.0}, *climbing, *others)])


def whisker(axes, row: dict, y: float) -> None:
    """The interval of the ratio, where there is one."""
    if row["ratio_low"] is not None:
        axes.plot([row["ratio_low"], row["ratio_high"]], [y, y], color="black", linewidth=1.2)
