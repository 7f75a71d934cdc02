"""The figure of a comparison of sweeps."""

from __future__ import annotations

from matplotlib.figure import Figure

from analysis.comparison.noise import NOISE
from analysis.report.axes import SEAM, beside, new_axes
from analysis.report.palette import GRAY
from harness.base.text import shortened
from studies.engine.drawing import GAIN, LOSS

MOST_BARS = 60


def sweep_comparison_figure(comparison: dict) -> Figure:
    """Bars of the ratio of each time to that of the baseline, gray within noise."""
    rows = [row for row in comparison["rows"] if row["figure"].endswith("_ms") and row["ratio"]][:MOST_BARS]
    names = [shortened(f"{row['row']} {row['figure'].removesuffix('_ms')} {row['run']}", 70) for row in rows]
    title, least = f"Times relative to {shortened(comparison['baseline'], 50)}", max(4, len(rows))
    figure, axes = new_axes(title, 1.4 + 0.24 * least, "")
    for y, row in enumerate(rows):
        color, hatch = (GRAY, "") if row["difference"] == NOISE else LOSS if row["ratio"] > 1 else GAIN
        axes.barh(y, row["ratio"] - 1, left=1, color=color, hatch=hatch, edgecolor=SEAM, linewidth=0)
    axes.set_yticks(range(len(rows)), names, fontsize=7.5)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_ylim(least - 0.5, -0.5)
    beside(axes, [f"{row['ratio']:.2f}x{', within noise' * (row['difference'] == NOISE)}" for row in rows])
    axes.set_xlabel("time / that of the baseline (ratio)")
    return figure
