"""The figure of the roofline, from roofline_data.json."""

from typing import NamedTuple

from matplotlib.figure import Figure

from analysis.hardware.ceilings import NO_PEAK
from analysis.report.figures.axes import log_axis, new_axes
from analysis.report.palette import color_of, series
from analysis.work.sections import by_time

STYLES = {"datasheet": "-", "given": "-.", "measured": "--"}  # of roofs, by kind
COMPUTE_COLOR, BANDWIDTH_COLOR = "#aa3377", "#444444"


class RateUnit(NamedTuple):
    """The unit of the rates in a figure, and how many FLOP/s it is."""

    name: str
    scale: float


def rate_unit(highest: float) -> RateUnit:
    """The unit in which the highest rate, in FLOP/s, has few digits."""
    return RateUnit("TFLOP/s", 1e12) if highest >= 1e12 else RateUnit("GFLOP/s", 1e9)


def draw_roofline(data: dict, about: str = "") -> Figure:
    """The points under the roofs, with areas by time."""
    about = about or f"{data['precision']}, {data['device']}"
    figure, axes = new_axes("Roofline of a training step", 5.6, about)
    axes.spines["left"].set_visible(True)
    axes.tick_params(axis="y", length=3.5)
    compute, bandwidth = data["roofs"]["compute"], data["roofs"]["bandwidth"]
    rows = [row for row in by_time(data["points"]) if row["operations_per_sec"]]
    if data["step"]["operations_per_sec"]:
        rows.append(data["step"])
    unit = set_limits(axes, rows, compute, data["ridges"])
    for number, row in enumerate(rows):
        draw_point(axes, row, number, unit, is_step=row is data["step"])
    draw_roofs(axes, compute, bandwidth, unit)
    if not compute or not bandwidth:
        axes.annotate(NO_PEAK, (0.5, 0.95), xycoords="axes fraction", ha="center")
    axes.set(xlabel="operations per byte moved", ylabel=f"rate ({unit.name})")
    legend = axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, fontsize=8, frameon=False
    )
    for handle in legend.legend_handles:
        if hasattr(handle, "set_sizes"):
            handle.set_sizes([60])
    return figure


def set_limits(axes, rows: list[dict], compute: list[dict], ridges: list[dict]) -> RateUnit:
    """Logarithmic axes with room for all points and roofs; returns the unit of the rates."""
    rates = [row["operations_per_sec"] for row in rows] + [roof["rate"] for roof in compute]
    unit = rate_unit(max(rates, default=0))
    lowest, highest = min(rates, default=unit.scale), max(rates, default=10 * unit.scale)
    per_byte = [1, 10, *(row["operations_per_byte"] for row in (*rows, *ridges))]
    log_axis(axes.xaxis)
    log_axis(axes.yaxis)
    axes.set_xlim(min(per_byte) / 5, 4 * max(per_byte))
    axes.set_ylim(lowest / 6 / unit.scale, 4 * highest / unit.scale)
    return unit


def draw_point(axes, row: dict, number: int, unit: RateUnit, *, is_step: bool) -> None:
    """A class of operators, or the step, with its figures in the legend."""
    rate = row["operations_per_sec"] / unit.scale
    name, look = row["name"], {"color": color_of(row["name"]), "marker": series(number)[1]}
    look["s"] = 60 + 1200 * row["share_of_time"]
    if is_step:
        name, look = "step, matmuls only", {"color": "black", "marker": "*", "s": 200}
    label = f"{name}: {row['time_ms']:.2f} ms ({row['share_of_time']:.1%}), {rate:,.3g} {unit.name}"
    if row["share_of_roof"] is not None:
        label += f", {row['share_of_roof']:.0%} of its roof"
    axes.scatter(
        [row["operations_per_byte"]],
        [rate],
        alpha=0.8,
        edgecolor="white",
        label=label,
        zorder=3,
        **look,
    )


def draw_roofs(axes, compute: list[dict], bandwidth: list[dict], unit: RateUnit) -> None:
    """Bandwidth slanted, up to the highest rate of arithmetic; arithmetic level, from where the
    highest bandwidth reaches it."""
    low, high = axes.get_xlim()
    top = max((roof["rate"] for roof in compute), default=None)
    fastest = max((roof["rate"] for roof in bandwidth), default=None)
    for roof in bandwidth:
        end = high if top is None else min(high, max(low, top / roof["rate"]))
        rates = [roof["rate"] * per_byte / unit.scale for per_byte in (low, end)]
        label = f"{roof['rate'] / 1e9:,.4g} GB/s, {roof['kind']}"
        draw_roof(axes, (low, end), rates, roof, label, BANDWIDTH_COLOR)
    for roof in compute:
        begin = low if fastest is None else max(low, roof["rate"] / fastest)
        rate = roof["rate"] / unit.scale
        label = f"{rate:,.4g} {unit.name}, {roof['kind']}"
        draw_roof(axes, (begin, high), (rate, rate), roof, label, COMPUTE_COLOR)


def draw_roof(axes, per_byte, rates, roof: dict, label: str, color: str) -> None:
    style = STYLES[roof["kind"]]
    axes.plot(per_byte, rates, zorder=1, label=label, color=color, linestyle=style, linewidth=1.3)
