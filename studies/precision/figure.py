"""The figure of the precision study."""

from __future__ import annotations

import math

from matplotlib.figure import Figure

from analysis.report.axes import SEAM, bare, legend, log_axis
from analysis.report.palette import MEMORY_COLORS, series
from harness.base.units import MB
from studies.engine.drawing import new_panels
from studies.training.figure import phase_bars


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
        style = {
            "color": MEMORY_COLORS["activations" if hatch == "" else "temporaries"],
            "hatch": hatch,
            "edgecolor": SEAM,
        }
        bars = axes.barh(places, values, height=0.8 / len(kinds), linewidth=0, label=kind, **style)
        axes.bar_label(bars, [f"{value:,.0f}" if value else "" for value in values], padding=3, fontsize=8)
    axes.set_yticks([y + 0.2 * (len(kinds) - 1) for y in range(len(rows))], [row["precision"] for row in rows])
    axes.margins(x=0.2)
    axes.invert_yaxis()
    axes.set_xlabel("peak memory (MB)")
    legend(axes, "Peak memory of a step", ncols=2)
    bare(axes)
