"""What do the figures of sweeps share, and how is a comparison of sweeps drawn?"""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure  # not pyplot: no global state, no display

from analysis.comparison.noise import NOISE
from analysis.report.axes import SEAM, WIDTH, beside, entitle, new_axes
from analysis.report.palette import GRAY, HATCHES
from harness.base.text import shortened

GAIN, LOSS = ("#0072b2", ""), ("#d55e00", "//")  # color and hatching of what takes less time, or more


def new_panels(height: float, title: str, about: str, count: int):
    """A figure with axes side by side; height in inches.  about: what was run, and on which device."""
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


MOST_BARS = 60


# ---- Comparison of sweeps ------------------------------------------------------------------------------------------


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
