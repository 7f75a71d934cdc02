"""The figure of the collective benchmark."""

import numpy as np
from matplotlib.figure import Figure

from analysis.report.axes import legend, log_axis
from analysis.report.palette import series
from studies.engine.drawing import new_panels


def collectives_figure(rows: list[dict], fits: list[dict], about: str) -> Figure:
    """Time of a call over its bytes, measured and fitted, and bus bandwidth; on the most ranks."""
    most = max(row["world_size"] for row in fits)
    title = f"Collectives on {most} ranks: time and bus bandwidth by bytes"
    figure, (left, right) = new_panels(4.2, title, about, 2)
    for n, fit in enumerate(fit for fit in fits if fit["world_size"] == most):
        color, marker, dashes = series(n)
        some = [row for row in rows if (row["kind"], row["world_size"]) == (fit["kind"], most)]
        size, style = (
            np.array([row["bytes"] for row in some], float),
            {"color": color, "label": fit["kind"]},
        )
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
