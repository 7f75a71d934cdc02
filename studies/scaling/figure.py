"""The figure of the scaling study."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from analysis.report.axes import log_axis
from analysis.report.palette import series
from harness.base.units import MB
from studies.engine.drawing import new_panels


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
