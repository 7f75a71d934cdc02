"""The figure of a comparison of runs."""

from __future__ import annotations

import textwrap

import numpy as np
from matplotlib.figure import Figure

from analysis.comparison.noise import NOISE
from analysis.report.axes import SEAM, WIDTH, bare, beside, entitle, legend, log_axis
from analysis.report.palette import GRAY, HATCHES, MEMORY_COLORS, PHASE_COLORS, color_of, hatches_of, series
from analysis.trust.same_training import NOT_THE_SAME
from harness.base.text import shortened, told_apart
from harness.instruments.phases import PHASES


def draw_comparison(comparison: dict) -> Figure:
    """Step time by phase with its spread, peak memory, and what changed or how it scales."""
    rows = comparison["runs"]
    panels = [draw_step_times]
    panels += [draw_peaks] if rows[0]["peak_mb"] else []
    panels += [draw_changes] if changes_of(comparison) else []
    panels += [draw_scaling] if comparison["scaling"] else []
    heights = [
        1.1 + 0.3 * (max(4, len(changes_of(comparison))) if draw is draw_changes else len(rows)) for draw in panels
    ]
    heights = [2.4 + height if draw is draw_scaling else height for draw, height in zip(panels, heights, strict=True)]
    figure = Figure(figsize=(WIDTH, 0.5 + sum(heights)), layout="constrained")
    baseline = shortened(rows[0]["name"], 60)
    entitle(figure, f"Comparison of {len(rows)} runs; {baseline} is the baseline", "")
    all_axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for draw, axes in zip(panels, all_axes, strict=True):
        bare(axes)
        draw(axes, comparison)
    return figure


def name_runs(axes, rows: list[dict]) -> None:
    axes.set_yticks(range(len(rows)), run_labels(rows), fontsize=8.5)
    axes.invert_yaxis()


def run_labels(rows: list[dict]) -> list[str]:
    return told_apart([row["name"] for row in rows], 48)


def draw_step_times(axes, comparison: dict) -> None:
    rows = comparison["runs"]
    at, left = np.arange(len(rows)), np.zeros(len(rows))
    whole = np.array([not any(row["phases_ms"][phase] for phase in PHASES) for row in rows])  # as of a trace
    for phase in PHASES if not whole.all() else ():
        widths = np.array([row["phases_ms"][phase] or 0.0 for row in rows])
        style = {"color": PHASE_COLORS[phase], "hatch": HATCHES.get(phase), "edgecolor": SEAM, "linewidth": 0}
        axes.barh(at, widths, left=left, label=phase, **style)
        left += widths
    if whole.any():
        widths = np.array([row["mean_ms"] or 0.0 for row in rows]) * whole
        axes.barh(at, widths, label="step, phases not known", color=GRAY)
        left += widths
    spread = np.array([row["std_ms"] or 0.0 for row in rows])
    axes.errorbar(left, at, xerr=spread, fmt="none", ecolor="black", capsize=3)
    name_runs(axes, rows)
    found = [row["difference"] for row in rows[1:]]
    # Why it is not the same is in the tables: here the reason would leave no room for the bars.
    baseline = ["baseline", *(NOT_THE_SAME if text.startswith(NOT_THE_SAME) else text for text in found)]
    texts = [
        f"ratio {row['ratio']:.2f}, {text}" if row["ratio"] else "no steps"
        for row, text in zip(rows, baseline, strict=True)
    ]
    beside(axes, texts)
    axes.set(xlabel="time per step, mean (ms); error bars: standard deviation")
    axes.set_xlim(0, 1.02 * max((left + spread).max(), 1e-9))
    legend(axes, "Step time by phase")


def draw_peaks(axes, comparison: dict) -> None:
    """Only the runs that measured the same quantity as the baseline."""
    rows = comparison["runs"]
    peaks = [row["peak_mb"] if row["peak_ratio"] else None for row in rows]
    axes.barh(range(len(rows)), [peak or 0.0 for peak in peaks], color=MEMORY_COLORS["activations"])
    name_runs(axes, rows)
    beside(
        axes,
        [
            row["peak_ratio_reason"] if peak is None else f"{peak:,.0f} MB"
            for row, peak in zip(rows, peaks, strict=True)
        ],
    )
    axes.set(xlabel=textwrap.fill(f"MB: {rows[0]['memory_source']}", 80))
    axes.set_title("Peak memory", loc="left", fontsize=10)


def changes_of(comparison: dict) -> list[dict]:
    """The largest changes of the first run that has any: by component, else by class."""
    changes = comparison["components"] or comparison["classes"]
    return [row for row in changes if row["run"] == changes[0]["run"]][:10]


def draw_changes(axes, comparison: dict) -> None:
    rows = changes_of(comparison)
    kind = "component" if comparison["components"] else "class"
    parts, noise = [row[kind] for row in rows], [row["difference"] == NOISE for row in rows]
    colors = [GRAY if still else color_of(part) for part, still in zip(parts, noise, strict=True)]
    hatched = hatches_of(parts)
    hatches = ["" if still else hatched[part] for part, still in zip(parts, noise, strict=True)]
    style = {"color": colors, "hatch": hatches, "edgecolor": SEAM, "linewidth": 0}
    axes.barh(range(len(rows)), [row["change_ms"] for row in rows], **style)
    axes.set_yticks(range(len(rows)), told_apart(parts, 48), fontsize=8.5)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.invert_yaxis()
    beside(
        axes, [f"{row['change_ms']:+,.2f} ms{', within noise' * still}" for row, still in zip(rows, noise, strict=True)]
    )
    axes.set_xlabel("change of time per profiled step (ms); gray: within noise")
    what = "Components" if kind == "component" else "Classes of operators"
    title = f"{what}: {shortened(rows[0]['run'], 60)} against {shortened(comparison['baseline'], 60)}"
    axes.set_title(textwrap.fill(title, 80), loc="left", fontsize=10)


def draw_scaling(axes, comparison: dict) -> None:
    rows = [row for row in comparison["runs"] if row["median_ms"] and row["step_flops"]]
    points = sorted(
        (row["step_flops"] / 1e9, row["median_ms"], name) for row, name in zip(rows, run_labels(rows), strict=True)
    )
    log_axis(axes.xaxis)
    log_axis(axes.yaxis)
    axes.plot([x for x, _, _ in points], [y for _, y, _ in points], color=GRAY, zorder=1)
    for n, (x, y, name) in enumerate(points):
        color, marker, _ = series(n)
        label = f"{name}: {y:,.2f} ms, {x:,.4g} GFLOPs"
        axes.plot([x], [y], marker, color=color, label=label)
    axes.margins(0.1, tight=False)
    axes.set(xlabel="GFLOPs per step", ylabel="median step time (ms)")
    legend(axes, f"Scaling: time ~ FLOPs^{comparison['scaling']['exponent']:.2f}", ncols=1)
    axes.spines["left"].set_visible(True)
