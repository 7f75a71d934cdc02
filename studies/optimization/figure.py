"""The figure of the optimization study."""

from matplotlib.figure import Figure

from analysis.report.axes import SEAM, WIDTH, bare, beside, entitle, legend
from analysis.report.palette import GRAY
from harness.base.text import shortened
from studies.engine.drawing import GAIN, LOSS
from studies.optimization.rungs import last_flag

LARGEST_RATIO = 2.0  # of the axis; what takes longer is at its end


def optimization_figure(ladders: dict[str, list[dict]], about: str) -> Figure:
    """A panel for each size and precision: the ladder as a waterfall, from the baseline to all
    rungs, each bar from the ratio below it to its own; then each optimization alone, and the
    reference; all with intervals and bounds."""
    counts = [len(rows) + 1 for rows in ladders.values()]
    figure = Figure(
        figsize=(WIDTH, 1.2 + sum(0.9 + 0.24 * count for count in counts)), layout="constrained"
    )
    panels = figure.subplots(len(counts), 1, squeeze=False, height_ratios=counts)[:, 0]
    for axes, (name, rows) in zip(panels, ladders.items(), strict=True):
        waterfall(axes, name, rows)
    entitle(figure, "Optimizations: step time relative to the baseline's", about)
    return figure


def waterfall(axes, name: str, rows: list[dict]) -> None:
    known = [row for row in rows if row["ratio"] is not None]
    climbing = sorted((row for row in known if row["ladder"]), key=lambda row: row["ladder"])
    others = [row for row in known if row["ladder"] is None]
    axes.barh(0, 1, color=GRAY, linewidth=0)
    below = 1.0
    for y, row in enumerate(climbing, 1):
        color, hatch = GAIN if row["ratio"] <= below else LOSS
        axes.barh(
            y,
            row["ratio"] - below,
            left=below,
            color=color,
            hatch=hatch,
            edgecolor=SEAM,
            linewidth=0,
        )
        below = row["ratio"]
        whisker(axes, row, y)
    for y, row in enumerate(others, 1 + len(climbing)):
        color, at = (GAIN if row["ratio"] <= 1 else LOSS)[0], min(row["ratio"], LARGEST_RATIO)
        whisker(axes, row, y)
        axes.plot(
            [at], [y], "o" if at == row["ratio"] else ">", color=color, markersize=5, clip_on=False
        )
    bounds = [(row["bound"], y) for y, row in enumerate((*climbing, *others), 1) if row["bound"]]
    if bounds:
        style = {"color": "#009e73", "markersize": 12, "markeredgewidth": 2}
        axes.plot(
            *zip(*bounds, strict=True),
            "|",
            label="the fastest that the baseline's trace allows",
            **style,
        )
        legend(axes, name)
    else:
        axes.set_title(name, loc="left", fontsize=10)
    axes.axvline(1, color="#404040", linewidth=0.8, linestyle=":")
    names = [f"+ {last_flag(row['flags'])}" for row in climbing] + [
        shortened(row["flags"], 40) for row in others
    ]
    axes.set_yticks(range(1 + len(names)), ["baseline", *names], fontsize=8)
    axes.set_ylim(len(names) + 0.6, -0.6)
    axes.margins(x=0.05)
    axes.set_xlim(0, min(axes.get_xlim()[1], LARGEST_RATIO))
    axes.set_xlabel("step time, as a share of the baseline's; at the right: how many times as fast")
    bare(axes)
    beside(axes, [f"{1 / row['ratio']:.2f}x" for row in ({"ratio": 1.0}, *climbing, *others)])


def whisker(axes, row: dict, y: float) -> None:
    """The interval of the ratio, where there is one."""
    if row["ratio_low"] is not None:
        axes.plot([row["ratio_low"], row["ratio_high"]], [y, y], color="black", linewidth=1.2)
