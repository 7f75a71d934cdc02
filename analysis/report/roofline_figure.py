"""The figure of the roofline, from roofline_data.json."""

import numpy as np
from matplotlib.figure import Figure

from analysis.hardware.ceilings import NO_PEAK
from analysis.report.axes import log_axis, new_axes
from analysis.report.charts import roof_lines
from analysis.report.palette import color_of, series
from analysis.work.sections import by_time

STYLES = {"datasheet": "-", "given": "-.", "measured": "--"}  # of roofs, by kind


def draw_roofline(data: dict, about: str = "") -> Figure:
    """The points under the roofs, with areas by time."""
    points = [row for row in by_time(data["points"]) if row["operations_per_sec"]]
    about = about or f"{data['precision']}, {data['device']}"
    figure, axes = new_axes("Roofline of a training step", 5.6, about)
    axes.spines["left"].set_visible(True)
    axes.tick_params(axis="y", length=3.5)
    step, compute, bandwidth = data["step"], data["roofs"]["compute"], data["roofs"]["bandwidth"]
    shown = [*points, *([step] if step["operations_per_sec"] else [])]
    rates = [row["operations_per_sec"] for row in shown] + [one["rate"] for one in compute]
    unit, scale = ("TFLOP/s", 1e12) if max(rates, default=0) >= 1e12 else ("GFLOP/s", 1e9)
    xs = [1, 10, *(row["operations_per_byte"] for row in (*shown, *data["ridges"]))]
    log_axis(axes.xaxis)
    log_axis(axes.yaxis)
    floor, top = min(rates, default=scale) / scale / 6, 4 * max(rates, default=10 * scale) / scale
    axes.set(xlim=(min(xs) / 5, 4 * max(xs)), ylim=(floor, top))
    for n, row in enumerate(shown):
        y, is_step = row["operations_per_sec"] / scale, row is step
        label = "step, matmuls only" if is_step else row["name"]
        label += f": {row['time_ms']:.2f} ms ({row['share_of_time']:.1%}), {y:,.3g} {unit}"
        if row["share_of_roof"] is not None:
            label += f", {row['share_of_roof']:.0%} of its roof"
        look = {"s": 200, "color": "black", "marker": "*"}
        if not is_step:
            look = {
                "s": 60 + 1200 * row["share_of_time"],
                "color": color_of(row["name"]),
                "marker": series(n)[1],
            }
        axes.scatter(
            [row["operations_per_byte"]],
            [y],
            alpha=0.8,
            edgecolor="white",
            label=label,
            zorder=3,
            **look,
        )
    for roof, xs, ys, level in roof_lines(data["roofs"], *axes.get_xlim()):
        text = f"{roof['rate'] / scale:,.4g} {unit}" if level else f"{roof['rate'] / 1e9:,.4g} GB/s"
        look = {
            "color": "#aa3377" if level else "#444444",
            "linestyle": STYLES[roof["kind"]],
            "linewidth": 1.3,
        }
        axes.plot(xs, np.divide(ys, scale), zorder=1, label=f"{text}, {roof['kind']}", **look)
    if not compute or not bandwidth:
        axes.annotate(NO_PEAK, (0.5, 0.95), xycoords="axes fraction", ha="center")
    axes.set(xlabel="operations per byte moved", ylabel=f"rate ({unit})")
    legend = axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, fontsize=8, frameon=False
    )
    for handle in legend.legend_handles:
        if hasattr(handle, "set_sizes"):
            handle.set_sizes([60])
    return figure
