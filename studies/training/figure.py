"""The figure of studies of a training step: its time by phase."""

import numpy as np
from matplotlib.figure import Figure

from analysis.report.axes import beside, legend, new_axes, stacked_bars
from analysis.report.palette import PHASE_COLORS
from studies.training.passes import PASSES


def training_figure(rows: list[dict], names: list[str], about: str) -> Figure:
    """Mean of each phase in ms, and the standard deviation of the step as error bars."""
    figure, axes = new_axes("Time of a step by phase", 1.9 + 0.3 * len(rows), about)
    parts = {phase: [row[f"{phase}_mean_ms"] or 0.0 for row in rows] for phase in PASSES}
    lengths = stacked_bars(axes, names, parts, PHASE_COLORS)
    spreads = np.array([row["step_std_ms"] or 0.0 for row in rows])
    axes.errorbar(lengths, range(len(names)), xerr=spreads, fmt="none", ecolor="black", capsize=3)
    axes.set_xlim(0, 1.02 * (lengths + spreads).max())
    axes.set_xlabel("time per step, mean (ms)\nerror bars: standard deviation of the step")
    beside(axes, [f"{row['step_mean_ms']:,.2f} ms" for row in rows])
    legend(axes)
    return figure
