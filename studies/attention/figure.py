"""The figure of the attention benchmark."""

from matplotlib.figure import Figure

from analysis.report.axes import log_axis
from analysis.report.palette import series
from harness.base.units import MB
from studies.engine.drawing import new_panels

PANELS = {  # title: the measured column, and the predicted one
    "forward pass (ms)": ("forward_ms", None),
    "backward pass (ms)": ("backward_ms", None),
    "memory before the backward pass (MB)": ("memory_bytes", "predicted_memory_bytes"),
}


def attention_figure(rows: list[dict], about: str) -> Figure:
    """Forward time, backward time and memory over sequence length, a line for each implementation;
    what is known."""
    known = {
        title: keys
        for title, keys in PANELS.items()
        if any(row[key] for row in rows for key in keys if key)
    }
    figure, panels = new_panels(4.2, "Attention alone, by sequence length", about, len(known))
    implementations = list(dict.fromkeys(row["implementation"] for row in rows))
    for axes, (title, (measured, predicted)) in zip(panels, known.items(), strict=True):
        axes.set_title(title, loc="left", fontsize=10)
        scale = MB if predicted else 1
        for n, name in enumerate(implementations):
            some = [row for row in rows if row["implementation"] == name]
            lines_over_sequence(axes, some, measured, n, scale, predicted=False)
            if predicted:
                lines_over_sequence(axes, some, predicted, n, scale, predicted=True)
        log_axis(axes.xaxis)
        log_axis(axes.yaxis)
        axes.margins(0.1, tight=False)
        axes.set_xlabel("sequence length (tokens)")
    lines = {
        label: line
        for axes in panels
        for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    style = {"fontsize": 8, "frameon": False, "handlelength": 4, "labelspacing": 1}
    figure.legend(lines.values(), lines, loc="outside right center", **style)
    return figure


def lines_over_sequence(
    axes, rows: list[dict], key: str, n: int, scale: float, *, predicted: bool
) -> None:
    """The n-th implementation.  Its predictions are rings, the larger the earlier, so that equal
    ones all show."""
    color, marker, dashes = series(n)
    points = [(row["seq_len"], row[key] / scale) for row in rows if row[key]]
    style = {"markersize": 5, "label": rows[0]["implementation"], "linewidth": 1.4}
    if predicted:
        style = {"markersize": 16 - 2.5 * min(n, 4), "markerfacecolor": "none", "linewidth": 0.6}
        style["label"] = f"{rows[0]['implementation']}, predicted"
    if points:
        axes.plot(*zip(*points, strict=True), marker=marker, linestyle=dashes, color=color, **style)
