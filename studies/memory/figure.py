"""The figure of the memory study."""

import numpy as np
from matplotlib.figure import Figure

from analysis.report.axes import legend, stacked_bars
from analysis.report.palette import MEMORY_COLORS, series
from harness.base.units import MB
from studies.engine.drawing import new_panels


def memory_figure(rows: list[dict], fitted: dict, about: str) -> Figure:
    """Measured peaks and fit over sequence length, a line for each batch size,
    and the peaks by category."""
    height = max(4.6, 2 + 0.25 * len(rows))
    figure, (left, right) = new_panels(
        height, "Peak memory by batch size and sequence length", about, 2
    )
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
    shown = [name for name in MEMORY_COLORS if name in rows[0]["bytes_by_category"]]
    parts = {name: [row["bytes_by_category"][name] / MB for row in rows] for name in shown}
    stacked_bars(
        right, [f"{row['batch_size']} x {row['seq_len']}" for row in rows], parts, MEMORY_COLORS
    )
    right.set(xlabel="live tensors at the peak (MB)", ylabel="batch x sequence length")
    legend(right, "By category", ncols=3)
    return figure
