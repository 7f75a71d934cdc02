"""Figures of the sweeps, from their rows alone."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.figure import Figure  # not pyplot: no global state, no display

from analysis.figures import PALETTE, PHASE_COLORS, WIDTH, bare, new_axes
from analysis.memory import CATEGORY_COLORS
from harness.units import MB


def new_panels(height: float, titles: list[str]):
    """A figure with axes side by side; height in inches."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    panels = figure.subplots(1, len(titles), squeeze=False)[0]
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, loc="left", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, list(panels)


def legend(axes, **options) -> None:
    axes.legend(frameon=False, fontsize=8, **options)


def stacked_bars(axes, names: list[str], parts: dict[str, list[float]], colors: dict[str, str]) -> np.ndarray:
    """Draw a bar for each name, from top to bottom.  Returns their lengths."""
    left = np.zeros(len(names))
    for part, widths in parts.items():
        axes.barh(names, widths, left=left, color=colors[part], label=part)
        left = left + widths
    axes.invert_yaxis()
    return left


def phase_bars(axes, names: list[str], rows: list[dict]) -> None:
    """Mean of each phase in ms, and the standard deviation of the step as error bars."""
    parts = {phase: [row[f"{phase}_mean_ms"] or 0.0 for row in rows] for phase in ("forward", "backward", "optimizer")}
    lengths = stacked_bars(axes, names, parts, PHASE_COLORS)
    spreads = np.array([row["step_std_ms"] or 0.0 for row in rows])
    axes.errorbar(lengths, names, xerr=spreads, fmt="none", ecolor="black", capsize=3)
    axes.set_xlim(0, 1.05 * (lengths + spreads).max())
    bare(axes)


def training_figure(rows: list[dict], names: list[str]) -> Figure:
    figure, axes = new_axes("Time of a step by phase", 1.4 + 0.32 * len(rows))
    phase_bars(axes, names, rows)
    axes.set_xlabel("ms per step, mean; error bars: standard deviation of the step")
    legend(axes, ncols=3, loc="lower right", bbox_to_anchor=(1, 1))
    return figure


# ---- Memory --------------------------------------------------------------------------------------------------------


def memory_figure(rows: list[dict], fitted: dict) -> Figure:
    """Measured peaks and fit over sequence length, a line for each batch size, and the peaks by category."""
    figure, (left, right) = new_panels(4.6, ["Measured peaks (dots) and the fit (lines)", "Categories at the peak"])
    for color, batch_size in zip(PALETTE, sorted({row["batch_size"] for row in rows}), strict=False):
        some = [row for row in rows if row["batch_size"] == batch_size]
        seq = np.array([row["seq_len"] for row in some], float)
        left.plot(seq, [row["peak_bytes"] / MB for row in some], "o", color=color, label=f"batch {batch_size}")
        if fitted["rows"]:
            dense = np.linspace(seq.min(), seq.max(), 100)
            growing = fitted["linear_bytes"] * dense + fitted["quadratic_bytes"] * dense**2
            left.plot(dense, (fitted["constant_bytes"] + batch_size * growing) / MB, color=color, linewidth=1)
    left.set(xlabel="sequence length (tokens)", ylabel="peak of live tensors (MB)", ylim=(0, None))
    legend(left)
    parts = {name: [row["bytes_by_category"][name] / MB for row in rows] for name in CATEGORY_COLORS}
    stacked_bars(right, [f"{row['batch_size']} x {row['seq_len']}" for row in rows], parts, CATEGORY_COLORS)
    right.set(xlabel="MB at the peak", ylabel="batch x sequence")
    legend(right)
    return figure


# ---- Attention -----------------------------------------------------------------------------------------------------


def attention_figure(rows: list[dict], about: str) -> Figure:
    """Forward time, backward time and memory over sequence length, a line for each implementation."""
    figure, axes = new_panels(4.2, ["forward (ms)", "backward (ms)", "memory before backward (MB)"])
    lines_over_sequence(axes[0], rows, "forward_ms", "o-")
    lines_over_sequence(axes[1], rows, "backward_ms", "o-")
    lines_over_sequence(axes[2], rows, "memory_bytes", "o", scale=MB)
    lines_over_sequence(axes[2], rows, "predicted_memory_bytes", ":", scale=MB, labels=True)
    legend(axes[2], loc="upper left", title="dotted: predicted", title_fontsize=8)
    figure.suptitle(f"Attention alone, {about}", x=0.01, ha="left")
    return figure


def lines_over_sequence(axes, rows: list[dict], key: str, line: str, scale: float = 1, labels: bool = False) -> None:
    implementations = dict.fromkeys(row["implementation"] for row in rows)
    for color, name in zip(PALETTE, implementations, strict=False):
        points = [(row["seq_len"], row[key] / scale) for row in rows if row["implementation"] == name and row[key]]
        if points:
            label = name if labels else None
            axes.plot(*zip(*points, strict=True), line, color=color, linewidth=1.4, label=label)
    lengths = sorted({row["seq_len"] for row in rows})
    axes.set(xscale="log", yscale="log", xlabel="sequence length (tokens)")
    axes.set_xticks(lengths, [f"{n:,}" for n in lengths], fontsize=8)
    axes.minorticks_off()


# ---- Precision -----------------------------------------------------------------------------------------------------


def precision_figure(rows: list[dict], series: dict[str, list[float]], addend: float) -> Figure:
    """Time by phase and peak memory by precision, and the relative error of the sums."""
    timed = [row for row in rows if row["status"] == "ok"]
    sized = [row for row in rows if row["predicted_peak_bytes"] is not None]
    titles = [f"Step, {row['size']} (ms)" for row in timed[:1]]
    titles += ["Peak memory of a step (MB)"] * bool(sized) + [f"Relative error of sums of {addend}"]
    figure, panels = new_panels(3.8, titles)
    if timed:
        phase_bars(panels[0], [row["precision"] for row in timed], timed)
        legend(panels[0], loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3)
    if sized:
        peak_bars(panels[-2], sized)
    for color, (name, sums) in zip(PALETTE, series.items(), strict=False):
        errors = [abs(total / (addend * n) - 1) or math.nan for n, total in enumerate(sums, 1)]  # 0 has no logarithm
        panels[-1].plot(range(1, len(sums) + 1), errors, color=color, linewidth=1.2, label=name)
    panels[-1].set(yscale="log", ylim=(1e-8, 2), xlabel="additions")
    legend(panels[-1])
    return figure


def peak_bars(axes, rows: list[dict]) -> None:
    """Predicted and, on a GPU, measured peaks."""
    kinds = [("predicted", "predicted_peak_bytes", PALETTE[9])]
    if any(row["peak_bytes"] is not None for row in rows):
        kinds.append(("measured", "peak_bytes", PALETTE[0]))
    for i, (kind, name, color) in enumerate(kinds):
        values = [(row[name] or 0) / MB for row in rows]
        places = [y + 0.4 * i for y in range(len(rows))]
        bars = axes.barh(places, values, height=0.8 / len(kinds), color=color, label=kind)
        axes.bar_label(bars, [f"{value:,.0f}" if value else "" for value in values], padding=3, fontsize=8)
    axes.set_yticks([y + 0.2 * (len(kinds) - 1) for y in range(len(rows))], [row["precision"] for row in rows])
    axes.margins(x=0.15)
    axes.invert_yaxis()
    legend(axes, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2)
    bare(axes)


# ---- Timing --------------------------------------------------------------------------------------------------------


def timing_figure(rows: list[dict], interval: tuple[float, float], change: str) -> Figure:
    """The ratio that each method reports, and the interval of the right one."""
    figure, axes = new_axes("What each timing method would have reported", 3.4)
    low, high = interval
    axes.axvspan(low, high, color=PALETTE[2], alpha=0.25, linewidth=0, label="right, 95% interval")
    axes.axvline(1, color="#404040", linewidth=1, linestyle=":", label="no difference")
    for row in rows:
        color = PALETTE[2 if low <= row["ratio"] <= high else 3]
        axes.scatter([row["ratio"]], [row["method"]], c=color, s=60, zorder=3)
        style = {"textcoords": "offset points", "ha": "center", "fontsize": 8}
        axes.annotate(f"{row['ratio']:.3f}", (row["ratio"], row["method"]), xytext=(0, 9), **style)
    axes.invert_yaxis()
    axes.margins(x=0.08, y=0.14)
    axes.set_xlabel(f"step time with {change} / without")
    legend(axes, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))
    return figure


# ---- Comparison ----------------------------------------------------------------------------------------------------


def comparison_figure(names: list[str], ratios: list[float], colors: list[str], baseline: str) -> Figure:
    """Bars of the ratio of each time to that of the baseline."""
    figure, axes = new_axes("", 1.2 + 0.24 * max(4, len(names)))
    axes.barh(range(len(names)), ratios, color=colors)
    axes.set_yticks(range(len(names)), names, fontsize=7.5)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel(f"time relative to {baseline}; gray: within noise")
    return figure
