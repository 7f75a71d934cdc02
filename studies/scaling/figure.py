"""The figure of the scaling study."""

import numpy as np
from matplotlib.figure import Figure

from analysis.report.axes import log_axis
from analysis.report.palette import series
from studies.engine.drawing import new_panels


def scaling_figure(rows: list[dict], about: str) -> Figure:
    """Efficiency by ranks, a line for each mode and bucket size with its interval and the predicted
    one (shaded), a panel for each kind of scaling."""
    scalings = list(dict.fromkeys(row["scaling"] for row in rows))
    figure, panels = new_panels(
        4.8, "Scaling: efficiency relative to the base", about, len(scalings)
    )
    groups = list(
        dict.fromkeys((row["parallel"], row["bucket_mb"]) for row in rows if row["parallel"])
    )
    for axes, scaling in zip(panels, scalings, strict=True):
        for n, group in enumerate(groups):
            lines_of_mode(axes, [row for row in rows if row["scaling"] == scaling], group, n)
        axes.axhline(1, color="#404040", linewidth=1, linestyle=":")
        axes.set(ylim=(0, None), xlabel="ranks", ylabel=f"{scaling} scaling: efficiency")
        log_axis(axes.xaxis, sorted({row["world_size"] for row in rows}))
    # Below all panels: above one of them, a wide legend would take the room of the others.
    title = {
        "title": "Measured (markers) and predicted (shaded)",
        "title_fontsize": 10,
        "alignment": "left",
    }
    modes = panels[0].get_legend_handles_labels()
    figure.legend(*modes, loc="outside lower left", ncols=6, fontsize=8, frameon=False, **title)
    return figure


def lines_of_mode(axes, rows: list[dict], group: tuple, n: int) -> None:
    """The rows of a mode and bucket size, and the base of one rank, by ranks."""
    color, marker, dashes = series(n)
    some = [
        row
        for row in rows
        if row["parallel"] is None or (row["parallel"], row["bucket_mb"]) == group
    ]
    some = sorted(
        (row for row in some if row["efficiency"] is not None), key=lambda row: row["world_size"]
    )
    ranks, values = (
        [row["world_size"] for row in some],
        np.array([row["efficiency"] for row in some]),
    )
    ends = np.array([row["efficiency_95"] or (row["efficiency"],) * 2 for row in some]).reshape(
        -1, 2
    )
    errors = np.maximum(0, [values - ends[:, 0], ends[:, 1] - values])
    name = group[0] if group[1] is None else f"{group[0]}, {group[1]:g} MB"
    style = {"color": color, "marker": marker, "linestyle": dashes, "markersize": 5, "capsize": 3}
    axes.errorbar(ranks, values, yerr=errors, label=name, **style)
    known = [row for row in some if row["predicted_efficiency"]]
    low, high = ([row["predicted_efficiency"][i] for row in known] for i in (0, 1))
    axes.fill_between(
        [row["world_size"] for row in known], low, high, color=color, alpha=0.12, linewidth=0
    )
