"""The figure of the training benchmark, and bars of phases for other studies of a step."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from analysis.report.axes import bare, beside, legend, new_axes
from analysis.report.palette import PHASE_COLORS
from studies.engine.drawing import stacked_bars
from studies.training.passes import PASSES


def training_figure(rows: list[dict], names: list[str], about: str) -> Figure:
    figure, axes = new_axes("Time of a step by phase", 1.9 + 0.3 * len(rows), about)
    phase_bars(axes, names, rows)
    beside(axes, [f"{row['step_mean_ms']:,.2f} ms" for row in rows])
    legend(axes)
    return figure


def phase_bars(axes, names: list[str], rows: list[dict]) -> None:
    """Mean of each phase in ms, and the standard deviation of the step as error bars."""
    parts = {phase: [row[f"{phase}_mean_ms"] or 0.0 for row in rows] for phase in PASSES}
    lengths = stacked_bars(axes, names, parts, PHASE_COLORS)
    spreads = np.array([row["step_std_ms"] or 0.0 for row in rows])
    axes.errorbar(lengths, range(len(names)), xerr=spreads, fmt="none", ecolor="black", capsize=3)
    axes.set_xlim(0, 1.02 * (lengths + spreads).max())
    axes.set_xlabel("time per step, mean (ms)\nerror bars: standard deviation of the step")
    bare(axes)
