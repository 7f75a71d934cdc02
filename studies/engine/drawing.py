"""What do the figures of sweeps share?"""

import numpy as np
from matplotlib.figure import Figure  # not pyplot: no global state, no display

from analysis.report.axes import SEAM, WIDTH, entitle
from analysis.report.palette import HATCHES

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
