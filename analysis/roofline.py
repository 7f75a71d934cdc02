"""Which limit is each kind of work near?  Its rate and its operations per byte, under the roofs of the device."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import NullFormatter

from analysis.figures import PALETTE, WIDTH, bare
from analysis.hardware import NO_PEAK
from harness.files import explain_nulls
from harness.tables import cell
from harness.units import MB

NO_TRACE = "no trace of this run: --generate-roofline records one"


def roofline(profile: dict, intensity: dict, trace: dict | None) -> dict:
    """roofline_data.json from flops_profile.json and computational_intensity.json: the roofs, a point for the step and
    one for each class of operators.  Their times are those of the trace, an operator_analysis.json.
    """
    compute, bandwidth = (profile["efficiency_metrics"][name] for name in ("peaks", "bandwidth_peaks"))
    rates = profile["performance_metrics"]
    step_ms, n = rates["avg_step_time_ms"], rates["steps_averaged"]
    classes = trace["classes"] if trace else []
    times = {row["class"]: row["ms_per_step"] for row in classes}
    profiled_ms = sum(times.values())
    doubt = "" if not trace or trace["integrity"]["trustworthy"] else "; NOT TO BE TRUSTED: "
    doubt += "; ".join(trace["integrity"]["problems"]) if doubt else ""

    def point(name: str, operations: int, products: bool, moved: int, ms: float | None, whole_ms: float) -> dict:
        rate = operations / (ms / 1e3) if ms else None
        roof = operations / moved * bandwidth[0]["rate"] if bandwidth else None
        if products:  # the level roof is that of products: other work is held against the bandwidth alone
            roof = min(compute[0]["rate"], roof) if compute and roof else None
        share = rate / roof if rate is not None and roof else None
        values = {
            "name": name,
            "operations": operations,
            "bytes": moved,
            "operations_per_byte": operations / moved,
            "time_ms": ms,
            "share_of_time": ms / whole_ms if ms else None,
            "operations_per_sec": rate,
            "bytes_per_sec": moved / (ms / 1e3) if ms else None,
            "roof_operations_per_sec": roof,
            "share_of_roof": share,
        }
        unrated = NO_PEAK if ms else "it has no time in the trace" if times else NO_TRACE
        no_roof = "it does no arithmetic" if ms and not operations else unrated
        reasons = {"roof_operations_per_sec": NO_PEAK, "share_of_roof": no_roof}
        return explain_nulls(values, unrated, **reasons)

    counted = {row["class"] for row in intensity["classes"]}
    return {
        "device": profile["environment"]["device"]["name"],
        "precision": profile["efficiency_metrics"]["precision"],
        "roofs": {"compute": compute, "bandwidth": bandwidth},
        "ridges": [
            {"compute": one["kind"], "bandwidth": other["kind"], "operations_per_byte": one["rate"] / other["rate"]}
            for one in compute
            for other in bandwidth
        ],
        "step": point("step", intensity["step_flops"], True, intensity["step_bytes"], step_ms, step_ms),
        "points": [
            point(
                row["class"],
                row["flops"] + row["element_operations"],
                row["flops"] > 0,
                row["bytes"],
                times.get(row["class"]),
                profiled_ms,
            )
            for row in intensity["classes"]
        ],
        "time_elsewhere": [row for row in classes if row["class"] not in counted],
        "time_source": {
            "step": f"mean of {n} step{'s' * (n > 1)}; {rates['steps_averaged_note']}",
            "classes": f"mean of the profiled steps, {profiled_ms:.2f} ms each{doubt}" if times else NO_TRACE,
        },
        "convention": intensity["convention"],
    }


def roofline_lines(data: dict) -> list[str]:
    """A class a line: how fast it ran, and how near its roof."""
    titles = f"{'ms':>10}{'share':>8}{'op/byte':>10}{'Gop/s':>11}{'GB/s':>9}{'of its roof':>13}"
    lines = [f"{'Roofline':<22}{titles}"]

    def line(row: dict) -> str:
        rates = (row[name] and row[name] / 1e9 for name in ("operations_per_sec", "bytes_per_sec"))
        return (
            f"{row['name']:<22}{cell(row['time_ms'], 10, ',.2f')}{cell(row['share_of_time'], 8, '.1%')}"
            f"{row['operations_per_byte']:>10.2f}{cell(next(rates), 11, ',.2f')}{cell(next(rates), 9, ',.2f')}"
            f"{cell(row['share_of_roof'] if row['operations'] else None, 13, '.1%')}"
        )

    lines += [line(row) for row in by_time(data["points"])]
    for row in data["time_elsewhere"]:
        lines.append(f"{row['class']:<22}{row['ms_per_step']:>10.2f}{row['share']:>8.1%}")
    lines.append(line(data["step"]))
    lines.append(f"Time of the step: {data['time_source']['step']}.")
    lines.append(f"Times of classes: {data['time_source']['classes']}.")
    for name, unit, scale in (("compute", "TFLOP/s", 1e12), ("bandwidth", "GB/s", 1e9)):
        for roof in data["roofs"][name]:
            lines.append(f"Roof: {roof['rate'] / scale:,.4g} {unit}, {roof['kind']}: {roof['source']}")
    if any((row["share_of_roof"] or 0) > 1 for row in data["points"]):
        lines.append("More than 100% of a roof: caches served part of it, or it was updated in place, as no copy is.")
    return lines


def by_time(points: list[dict]) -> list[dict]:
    return sorted(points, key=lambda row: -(row["time_ms"] or 0))


def draw_roofline(data: dict) -> Figure:
    """Above, the points under the roofs, their area the time; below, how near each class comes to the bandwidth."""
    figure = Figure(figsize=(WIDTH, 8.2), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(3.2, 1.2))
    points = by_time(data["points"])
    colors = dict(zip((row["name"] for row in points), PALETTE, strict=False))
    draw_points(above, data, [row for row in points if row["operations_per_sec"]], colors)
    above.set_title(f"Roofline of a training step in {data['precision']}: {data['device']}", loc="left", fontsize=11)
    draw_bandwidth(below, data, [row for row in points if row["bytes_per_sec"]], colors)
    return figure


def draw_points(axes, data: dict, points: list[dict], colors: dict[str, str]) -> None:
    step = data["step"]
    shown = [*points, *([step] if step["operations_per_sec"] else [])]
    compute, bandwidth = (data["roofs"][name] for name in ("compute", "bandwidth"))
    tops = [one["rate"] for one in compute]
    unit, scale = (
        ("TFLOP/s", 1e12)
        if max([*tops, *(row["operations_per_sec"] for row in shown)], default=0) >= 1e12
        else ("GFLOP/s", 1e9)
    )
    xs = [
        *(row["operations_per_byte"] for row in shown),
        *(one["operations_per_byte"] for one in data["ridges"]),
        10,
        100,
    ]
    rates = [row["operations_per_sec"] / scale for row in shown] + [top / scale for top in tops]
    floor = min(rates, default=1) / 6
    axes.set(xscale="log", yscale="log", xlim=(min(xs) / 5, 4 * max(xs)), ylim=(floor, 4 * max(rates, default=10)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")  # and not by formulas, which the report does not typeset
        axis.set_minor_formatter(NullFormatter())
    for row in points:
        y = row["operations_per_sec"] / scale
        label = f"{row['name']}: {row['time_ms']:.2f} ms ({row['share_of_time']:.1%}), {y:,.3g} {unit}"
        label += f", {row['share_of_roof']:.0%} of its roof" if row["share_of_roof"] is not None else ""
        draw_point(axes, row["operations_per_byte"], y, area(row), colors[row["name"]], label)
    if step["operations_per_sec"]:
        y = step["operations_per_sec"] / scale
        share = f", {step['share_of_roof']:.0%} of its roof" if step["share_of_roof"] is not None else ""
        label = f"whole step, products alone: {step['time_ms']:.2f} ms, {y:,.3g} {unit}{share}"
        draw_point(axes, step["operations_per_byte"], y, 200, "black", label, marker="*")
    for at in (10, 100):
        axes.axvline(at, color="#bbbbbb", linewidth=0.8, linestyle=":", zorder=0)
        axes.annotate(f"{at}", (at, floor), xytext=(2, 3), textcoords="offset points", fontsize=7.5, color="#888888")
    draw_roofs(axes, compute, bandwidth, unit, scale)
    name_points(axes, points, scale)
    if not compute or not bandwidth:
        axes.annotate(NO_PEAK, (0.5, 0.95), xycoords="axes fraction", ha="center")
    axes.set(xlabel="operations per byte moved", ylabel=unit)
    axes.spines[["top", "right"]].set_visible(False)
    legend = axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2, fontsize=8, frameon=False)
    for handle in legend.legend_handles:
        handle.set_sizes([60])


def area(row: dict) -> float:
    """Of a point, in square points: the share of the time."""
    return 60 + 1200 * row["share_of_time"]


def draw_point(axes, x: float, y: float, size: float, color: str, label: str, marker: str = "o") -> None:
    axes.scatter([x], [y], s=size, color=color, alpha=0.75, edgecolor="white", label=label, marker=marker, zorder=3)


def name_points(axes, points: list[dict], scale: float) -> None:
    """The name to the right of each point, lower where another name is in the way; a halo keeps it off the lines."""
    (x0, x1), (y0, y1) = axes.get_xlim(), axes.get_ylim()
    width, height = 620, 300  # of the axes in points, nearly
    placed: list[tuple[float, float]] = []
    for row in sorted(points, key=lambda row: -row["operations_per_sec"]):
        x, y = row["operations_per_byte"], row["operations_per_sec"] / scale
        right = math.sqrt(area(row)) / 2 + 4
        across, up = width * math.log(x / x0) / math.log(x1 / x0) + right, height * math.log(y / y0) / math.log(y1 / y0)
        at = up - 3
        while any(abs(at - other) < 12 and abs(across - there) < 90 for there, other in placed):
            at -= 12
        placed.append((across, at))
        halo = [withStroke(linewidth=2.5, foreground="white")]
        place = {"xytext": (right, at - up), "textcoords": "offset points", "fontsize": 8.5, "zorder": 5}
        axes.annotate(row["name"], (x, y), path_effects=halo, **place)


STYLES = {"datasheet": "-", "given": "-.", "measured": "--"}


def draw_roofs(axes, compute: list[dict], bandwidth: list[dict], unit: str, scale: float) -> None:
    """Slanted: bandwidth; level: arithmetic; of each kind all that are known, the one that counts first.

    The first is labelled above its line and the others below theirs, for two may lie close together.
    """
    low, high = axes.get_xlim()
    top = max((one["rate"] for one in compute), default=None)
    least = min((top / pipe["rate"] for pipe in bandwidth), default=high) if top else high
    for i, pipe in enumerate(bandwidth):
        end = min(top / pipe["rate"], high) if top else high
        xs = np.array([low, max(end, low)])
        axes.plot(
            xs, xs * pipe["rate"] / scale, color="#444444", linestyle=STYLES[pipe["kind"]], linewidth=1.3, zorder=1
        )
        floor = axes.get_ylim()[0] * scale / pipe["rate"]  # where the line comes up into the axes
        at = max(low, floor) ** 0.35 * max(least, low) ** 0.65
        axes.text(
            at,
            at * pipe["rate"] / scale * (1.15 if i == 0 else 0.87),
            f"{pipe['rate'] / 1e9:,.4g} GB/s, {pipe['kind']}",
            rotation=math.degrees(math.atan(pipe["rate"] / scale)),
            rotation_mode="anchor",
            transform_rotates_text=True,
            ha="right" if i == 0 else "left",
            va="bottom" if i == 0 else "top",
            fontsize=8,
            clip_on=True,
        )
    for i, peak in enumerate(compute):
        y = peak["rate"] / scale
        start = min((peak["rate"] / pipe["rate"] for pipe in bandwidth), default=low)
        axes.plot(
            [max(start, low), high], [y, y], color="#444444", linestyle=STYLES[peak["kind"]], linewidth=1.3, zorder=1
        )
        text, above = f"{y:,.4g} {unit}, {peak['kind']}", i == 0
        place = {"xytext": (-4, 3 if above else -3), "textcoords": "offset points", "va": "bottom" if above else "top"}
        axes.annotate(text, (high, y), ha="right", fontsize=8, **place)


def draw_bandwidth(axes, data: dict, rows: list[dict], colors: dict[str, str]) -> None:
    used = [row["bytes_per_sec"] / 1e9 for row in rows]
    axes.barh([row["name"] for row in rows], used, color=[colors[row["name"]] for row in rows], height=0.7)
    peaks = data["roofs"]["bandwidth"]
    limit = max([*used, *(pipe["rate"] / 1e9 for pipe in peaks), 1e-9])
    for at, (row, value) in enumerate(zip(rows, used, strict=True)):
        text = f" {value:,.1f} GB/s, {row['bytes'] / MB:,.1f} MB"
        axes.text(value, at, text, va="center", fontsize=8, bbox={"facecolor": "white", "linewidth": 0, "pad": 0.5})
    for pipe in peaks:
        rate = pipe["rate"] / 1e9
        axes.axvline(rate, color="#444444", linestyle=STYLES[pipe["kind"]], linewidth=1.2, zorder=0)
    axes.set(xlim=(0, 1.3 * limit), xlabel="GB/s: bytes counted over the time of the class")
    axes.invert_yaxis()
    bare(axes)
    axes.set_title("Bandwidth of each class, and the device's", loc="left", fontsize=10)
