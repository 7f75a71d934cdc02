"""Which limit is each kind of work near?  Its rate and its operations per byte, under the roofs of the device."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.figure import Figure

from analysis.hardware import NO_PEAK
from analysis.report.figures import SEAM, WIDTH, bare, beside, entitle, log_axis
from analysis.report.palette import color_of, hatches_of, series
from harness.base.files import explain_nulls
from harness.base.tables import Column, column
from harness.base.text import count_of, narrow_table
from harness.base.units import MB

NO_TRACE = "no trace of this run: --generate-roofline records one"
STYLES = {"datasheet": "-", "given": "-.", "measured": "--"}  # of roofs, by kind


def roofline(profile: dict, intensity: dict, trace: dict | None) -> dict:
    """roofline_data.json from flops_profile.json and computational_intensity.json: the roofs, a point for the step and
    one for each class of operators.  Their times are those of the trace, an operator_analysis.json.
    """
    compute, bandwidth = (profile["efficiency_metrics"][name] for name in ("peaks", "bandwidth_peaks"))
    rates, roofs = profile["performance_metrics"], {"compute": compute, "bandwidth": bandwidth}
    classes = trace["classes"] if trace else []
    times = {row["class"]: row["ms_per_step"] for row in classes}
    profiled_ms, step_ms = sum(times.values()), rates["avg_step_time_ms"]
    source = f"mean of the profiled steps, {profiled_ms:.2f} ms each" if times else NO_TRACE
    if trace and not trace["integrity"]["trustworthy"]:
        source += f"; NOT TRUSTWORTHY: {'; '.join(trace['integrity']['problems'])}"
    step = {
        "class": "step",
        "flops": intensity["step_flops"],
        "element_operations": 0,
        "bytes": intensity["step_bytes"],
    }
    unrated = "it has no time in the trace" if times else NO_TRACE
    counted = {row["class"] for row in intensity["classes"]}
    return {
        "device": profile["environment"]["device"]["name"],
        "precision": profile["efficiency_metrics"]["precision"],
        "roofs": roofs,
        "ridges": [
            {"compute": one["kind"], "bandwidth": other["kind"], "operations_per_byte": one["rate"] / other["rate"]}
            for one in compute
            for other in bandwidth
        ],
        "step": point(step, roofs, step_ms, step_ms, unrated),
        "points": [point(row, roofs, times.get(row["class"]), profiled_ms, unrated) for row in intensity["classes"]],
        "time_elsewhere": [row for row in classes if row["class"] not in counted],
        **explain_nulls({"profiled_step_ms": profiled_ms if times else None}, NO_TRACE),
        "time_source": {
            "step": f"mean of {count_of(rates['steps_averaged'], 'step')}; {rates['steps_averaged_note']}",
            "classes": source,
        },
        "convention": intensity["convention"],
    }


def point(row: dict, roofs: dict, ms: float | None, total_ms: float, unrated: str) -> dict:
    """A class of operators that takes ms, or has no time for the reason `unrated`: its rate and its roof.

    The level roof is that of matmuls: other work is limited by the bandwidth alone.
    """
    operations, moved = row["flops"] + row["element_operations"], row["bytes"]
    compute, bandwidth = roofs["compute"], roofs["bandwidth"]
    rate = operations / (ms / 1e3) if ms else None
    roof = operations / moved * bandwidth[0]["rate"] if bandwidth else None
    if row["flops"]:
        roof = min(compute[0]["rate"], roof) if compute and roof else None
    values = {
        "name": row["class"],
        "operations": operations,
        "bytes": moved,
        "operations_per_byte": operations / moved,
        "time_ms": ms,
        "share_of_time": ms / total_ms if ms else None,
        "operations_per_sec": rate,
        "bytes_per_sec": moved / (ms / 1e3) if ms else None,
        "roof_operations_per_sec": roof,
        "share_of_roof": rate / roof if rate is not None and roof else None,
    }
    no_share = unrated
    if ms:
        no_share = NO_PEAK if operations else "it does no arithmetic"
    return explain_nulls(values, unrated, roof_operations_per_sec=NO_PEAK, share_of_roof=no_share)


# ---- For a reader --------------------------------------------------------------------------------------------------

POINT_COLUMNS = [
    column("class of operators", "name", left=True),
    column("ms", "time_ms", ",.2f"),
    column("share", "share_of_time", ".1%"),
    column("ops/byte", "operations_per_byte", ".2f"),
    column("Gop/s", "operations_per_sec", ",.2f", 1e9),
    column("GB/s", "bytes_per_sec", ",.2f", 1e9),
    Column("share of roof", lambda row: row["share_of_roof"] if row["operations"] else None, ".1%"),
]


NO_RATE = {"operations": None, "operations_per_byte": None, "share_of_roof": None}


def time_row(name: str, ms: float, total_ms: float) -> dict:
    """A row of which only the time is known."""
    return NO_RATE | {"name": name, "time_ms": ms, "share_of_time": ms / total_ms}


def roofline_rows(data: dict) -> list[dict]:
    """The classes, their sum, and how it differs from the step that rates and MFU refer to."""
    step, total_ms = data["step"], data["profiled_step_ms"]
    if total_ms is None:
        return [*by_time(data["points"]), step | {"name": "step"}]
    return [
        *by_time(data["points"]),
        *(time_row(row["class"], row["ms_per_step"], total_ms) for row in data["time_elsewhere"]),
        time_row("sum, a profiled step", total_ms, total_ms),
        time_row("less in unprofiled steps", step["time_ms"] - total_ms, total_ms),
        step | {"name": "step without the profiler, matmuls", "share_of_time": step["time_ms"] / total_ms},
    ]


def roofline_lines(data: dict) -> list[str]:
    """One line per class: how fast it ran, and how close to its roof."""
    roofs = [
        {"roof": f"{one['rate'] / scale:,.4g} {unit}", **one}
        for name, unit, scale in (("compute", "TFLOP/s", 1e12), ("bandwidth", "GB/s", 1e9))
        for one in data["roofs"][name]
    ]
    lines = [
        "Roofline:",
        *narrow_table(POINT_COLUMNS, roofline_rows(data)),
        f"Time of the step: {data['time_source']['step']}.",
        f"Times of classes: {data['time_source']['classes']}.",
        *(f"Roof: {one['roof']}, {one['kind']}: {one['source']}" for one in roofs),
    ]
    if any((row["share_of_roof"] or 0) > 1 for row in data["points"]):
        lines.append(
            "More than 100% of a roof: caches served part of it, or tensors were updated in place, unlike in a copy."
        )
    return lines


def by_time(points: list[dict]) -> list[dict]:
    return sorted(points, key=lambda row: -(row["time_ms"] or 0))


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
