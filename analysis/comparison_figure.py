"""The figure of a comparison of runs."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from analysis.compare import NOISE
from analysis.figures import GREY, PALETTE, PHASE_COLORS, WIDTH, bare, log_axes
from analysis.wording import shortened
from harness.timing import PHASES


def draw_comparison(comparison: dict) -> Figure:
    """Step time by phase with its spread, peak memory, and what changed or how it scales."""
    rows = comparison["runs"]
    panels = [draw_step_times, draw_peaks]
    panels += [draw_changes] if comparison["components"] else []
    panels += [draw_scaling] if comparison["scaling"] else []
    height = 0.9 + len(panels) * (0.9 + 0.34 * max(4, len(rows)))
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    for draw, axes in zip(panels, figure.subplots(len(panels), 1), strict=True):
        bare(axes)
        draw(axes, comparison)
        if draw in (draw_step_times, draw_peaks):
            axes.set_yticks(range(len(rows)), [shortened(row["name"], 48) for row in rows], fontsize=8.5)
            axes.invert_yaxis()
    return figure


def draw_step_times(axes, comparison: dict) -> None:
    rows = comparison["runs"]
    at, left = np.arange(len(rows)), np.zeros(len(rows))
    for phase in PHASES:
        widths = np.array([row["phases_ms"][phase] or 0.0 for row in rows])
        axes.barh(at, widths, left=left, color=PHASE_COLORS[phase], label=phase)
        left += widths
    spread = np.array([row["std_ms"] or 0.0 for row in rows])
    axes.errorbar(left, at, xerr=spread, fmt="none", ecolor="black", capsize=3)
    for y, row in zip(at, rows, strict=True):
        text = f" {row['ratio']:.2f}x {row['difference'] if y else 'baseline'}" if row["ratio"] else " no steps"
        axes.text(left[y] + spread[y], y, text, va="center", fontsize=8.5)
    axes.set(xlabel="ms per step, mean; whiskers: standard deviation", xlim=(0, 1.3 * max((left + spread).max(), 1e-9)))
    axes.legend(ncols=4, fontsize=8, frameon=False, loc="lower right", bbox_to_anchor=(1, 1))
    axes.set_title("Step time", loc="left", fontsize=11)


def draw_peaks(axes, comparison: dict) -> None:
    peaks = [row["peak_mb"] or 0.0 for row in comparison["runs"]]
    axes.barh(range(len(peaks)), peaks, color=PALETTE[4])
    for y, peak in enumerate(peaks):
        axes.text(peak, y, f" {peak:,.0f}", va="center", fontsize=8.5)
    axes.set(xlabel="MB", xlim=(0, 1.2 * max(*peaks, 1e-9)))
    axes.set_title("Peak memory", loc="left", fontsize=11)


def draw_changes(axes, comparison: dict) -> None:
    run = comparison["components"][0]["run"]
    top = [row for row in comparison["components"] if row["run"] == run][:10]
    colors = [GREY["other"] if row["difference"] == NOISE else PALETTE[3 if row["change_ms"] > 0 else 2] for row in top]
    axes.barh([row["component"] for row in top], [row["change_ms"] for row in top], color=colors)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel("change in ms per profiled step; gray: within noise")
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=8)
    title = f"Components: {shortened(run, 40)} against {shortened(comparison['baseline'], 40)}"
    axes.set_title(title, loc="left", fontsize=11)


def draw_scaling(axes, comparison: dict) -> None:
    rows = [row for row in comparison["runs"] if row["median_ms"] and row["step_flops"]]
    points = sorted((row["step_flops"], row["median_ms"], row["name"]) for row in rows)
    log_axes(axes)
    axes.plot([x for x, _, _ in points], [y for _, y, _ in points], "o-", color=PALETTE[0])
    axes.margins(0.15)
    for x, y, name in points:
        text = f"{shortened(name, 40)}: {y:,.2f} ms, {x:.3g} FLOPs"
        axes.annotate(text, (x, y), (4, -10), textcoords="offset points", fontsize=7.5)
    axes.set(xlabel="FLOPs per step", ylabel="median ms")
    axes.set_title(f"Scaling: time ~ FLOPs^{comparison['scaling']['exponent']:.2f}", loc="left", fontsize=11)
    axes.spines["left"].set_visible(True)
