"""The figure of the timing study."""

from matplotlib.figure import Figure

from analysis.report.axes import beside, legend, new_axes


def timing_figure(
    rows: list[dict], interval: tuple[float, float], change: str, about: str
) -> Figure:
    """How many times as fast each method reports the change to be,
    and the interval of the right one."""
    figure, axes = new_axes(
        "What each timing method would have reported", 1.7 + 0.28 * len(rows), about
    )
    low, high = sorted(1 / end for end in interval)
    axes.axvspan(low, high, color="#009e73", alpha=0.25, linewidth=0, label="right, 95% interval")
    axes.axvline(1, color="#404040", linewidth=1, linestyle=":", label="no difference")
    factors = [1 / row["ratio"] for row in rows]
    for y, factor in enumerate(factors):
        color, marker = ("#009e73", "o") if low <= factor <= high else ("#d55e00", "X")
        axes.scatter([factor], [y], c=color, marker=marker, s=60, zorder=3)
    axes.set_yticks(range(len(rows)), [row["method"] for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.margins(x=0.08)
    axes.set_xlabel(f"times as fast with {change} as without")
    beside(axes, [f"{factor:.2f}x" for factor in factors])
    legend(axes)
    return figure
