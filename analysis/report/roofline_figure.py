"""The figure of the roofline, from roofline_data.json."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.figure import Figure

from analysis.hardware.ceilings import NO_PEAK
from analysis.report.axes import SEAM, WIDTH, bare, beside, entitle, log_axis
from analysis.report.palette import color_of, hatches_of, series
from analysis.work.sections import by_time
from harness.base.units import MB

STYLES = {"datasheet": "-", "given": "-.", "measured": "--"}  # of roofs, by kind


def draw_roofline(data: dict, about: str = "") -> Figure:
    """Above, the points under the roofs, with areas by time; below, how close each class comes to the bandwidth."""
    points = by_time(data["points"])
    rated, moving = ([row for row in points if row[key]] for key in ("operations_per_sec", "bytes_per_sec"))
    figure = Figure(figsize=(WIDTH, 7.6 if moving else 5.6), layout="constrained")
    above, *below = figure.subplots(2 if moving else 1, 1, squeeze=False, height_ratios=(3, 1.3)[: 1 + bool(moving)])[
        :, 0
    ]
    draw_points(above, data, rated)
    for axes in below:
        draw_bandwidth(axes, data, moving)
    entitle(figure, "Roofline of a training step", about or f"{data['precision']}, {data['device']}")
    return figure


def draw_points(axes, data: dict, points: list[dict]) -> None:
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
        axes.scatter(
            [row["operations_per_byte"]],
            [y],
            s=200 if is_step else 60 + 1200 * row["share_of_time"],
            color="black" if is_step else color_of(row["name"]),
            marker="*" if is_step else series(n)[1],
            alpha=0.8,
            edgecolor="white",
            label=label,
            zorder=3,
        )
    draw_roofs(axes, compute, bandwidth, unit, scale)
    if not compute or not bandwidth:
        axes.annotate(NO_PEAK, (0.5, 0.95), xycoords="axes fraction", ha="center")
    axes.set(xlabel="operations per byte moved", ylabel=f"rate ({unit})")
    axes.spines[["top", "right"]].set_visible(False)
    legend = axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, fontsize=8, frameon=False)
    for handle in legend.legend_handles:
        if hasattr(handle, "set_sizes"):
            handle.set_sizes([60])


def draw_roofs(axes, compute: list[dict], bandwidth: list[dict], unit: str, scale: float) -> None:
    """Slanted: bandwidth; level: arithmetic; all that are known of each, named in the legend."""
    low, high = axes.get_xlim()
    top = max((one["rate"] for one in compute), default=math.inf)
    for roof in bandwidth:
        xs = np.array([low, max(low, min(top / roof["rate"], high))])
        ys, label = xs * roof["rate"] / scale, f"{roof['rate'] / 1e9:,.4g} GB/s, {roof['kind']}"
        axes.plot(xs, ys, color="#444444", linestyle=STYLES[roof["kind"]], linewidth=1.3, zorder=1, label=label)
    for roof in compute:
        start = min((roof["rate"] / one["rate"] for one in bandwidth), default=low)
        xs, y = [max(start, low), high], roof["rate"] / scale
        label = f"{y:,.4g} {unit}, {roof['kind']}"
        axes.plot(xs, [y, y], color="#aa3377", linestyle=STYLES[roof["kind"]], linewidth=1.3, zorder=1, label=label)


def draw_bandwidth(axes, data: dict, rows: list[dict]) -> None:
    used, parts = [row["bytes_per_sec"] / 1e9 for row in rows], [row["name"] for row in rows]
    peaks = [(one["rate"] / 1e9, STYLES[one["kind"]]) for one in data["roofs"]["bandwidth"]]
    colors, hatched = [color_of(part) for part in parts], hatches_of(parts)
    style = {"color": colors, "hatch": [hatched[part] for part in parts], "edgecolor": SEAM, "linewidth": 0}
    axes.barh(parts, used, height=0.7, **style)
    for rate, style in peaks:
        axes.axvline(rate, color="#444444", linestyle=style, linewidth=1.2, zorder=0)
    limit = max([1e-9, *used, *(rate for rate, _ in peaks)])
    axes.set(xlim=(0, 1.02 * limit), xlabel="bytes counted / time of the class (GB/s)")
    axes.invert_yaxis()
    bare(axes)
    beside(axes, [f"{rate:,.1f} GB/s, {row['bytes'] / MB:,.1f} MB" for rate, row in zip(used, rows, strict=True)])
    axes.set_title("Bandwidth of each class (bars) and of the device (lines)", loc="left", fontsize=10)
