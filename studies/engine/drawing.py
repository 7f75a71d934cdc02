"""What do the figures of sweeps share?"""

from matplotlib.figure import Figure  # not pyplot: no global state, no display

from analysis.report.figures.axes import WIDTH, entitle

GAIN, LOSS = (
    ("#0072b2", ""),
    ("#d55e00", "//"),
)  # color and hatching of what takes less time, or more


def new_panels(height: float, title: str, about: str, count: int):
    """A figure with axes side by side; height in inches.  about: what was run, on which device."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    panels = figure.subplots(1, count, squeeze=False)[0]
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    entitle(figure, title, about)
    return figure, list(panels)
