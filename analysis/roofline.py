"""Which limit is each kind of work near?  Its rate and its operations per byte, under the roofs of the device."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.figure import Figure

from analysis.figures import PALETTE, WIDTH, bare
from tiny_llama_v1 import with_reasons

NO_TRACE = "no trace of this run: --generate-roofline records one"
NO_ROOF = "no peak of this device is known"


def roofline(profile: dict, intensity: dict, classes: list[dict] | None) -> dict:
    """roofline_data.json from flops_profile.json and computational_intensity.json: the roofs, a point for the step and
    one for each class of operators.  classes are their times in operator_analysis.json, None without a trace.
    """
    compute, bandwidth = (profile["efficiency_metrics"][name] for name in ("peaks", "bandwidth_peaks"))
    step_ms = profile["performance_metrics"]["avg_step_time_ms"]
    times = {row["class"]: row["ms_per_step"] for row in classes or []}
    profiled_ms = sum(times.values())

    def point(name: str, operations: int, moved: int, ms: float | None, whole_ms: float) -> dict:
        rate = operations / (ms / 1e3) if ms else None
        roof = min(compute[0]["rate"], operations / moved * bandwidth[0]["rate"]) if compute and bandwidth else None
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
        unrated = NO_ROOF if ms else "it has no time in the trace" if times else NO_TRACE
        no_roof = "it does no arithmetic" if ms and not operations else unrated
        reasons = {"roof_operations_per_sec": NO_ROOF, "share_of_roof": no_roof}
        return with_reasons(values, unrated, **reasons)

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
        "step": point("step", intensity["step_flops"], intensity["step_bytes"], step_ms, step_ms),
        "points": [
            point(
                row["class"],
                row["flops"] + row["element_operations"],
                row["bytes"],
                times.get(row["class"]),
                profiled_ms,
            )
            for row in intensity["classes"]
        ],
        "time_elsewhere": [row for row in classes or [] if row["class"] not in counted],
        "time_source": {
            "step": "mean of the steps without instruments",
            "classes": f"mean of the profiled steps, {profiled_ms:.2f} ms each" if times else NO_TRACE,
        },
        "convention": intensity["convention"],
    }


def roofline_lines(data: dict) -> list[str]:
    """A class a line: how fast it ran, and how near its roof."""
    titles = f"{'ms':>10}{'share':>8}{'op/byte':>10}{'Gop/s':>11}{'GB/s':>9}{'of its roof':>13}"
    lines = [f"{'Roofline':<22}{titles}"]

    def cell(value: float | None, width: int, form: str) -> str:
        return f"{'-' if value is None else format(value, form):>{width}}"

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
    lines.append(line(data["step"] | {"name": "step, no instruments"}))
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
    colours = dict(zip((row["name"] for row in points), PALETTE, strict=False))
    draw_points(above, data, [row for row in points if row["operations_per_sec"]], colours)
    draw_roofs(above, data["roofs"])
    above.set_title(f"Roofline of a training step in {data['precision']}: {data['device']}", loc="left", fontsize=11)
    draw_bandwidth(below, data, [row for row in points if row["bytes_per_sec"]], colours)
    return figure


def name_points(axes, points: list[tuple[dict, float]]) -> None:
    """The name to the right of each point, lower where another is in the way; with each comes its area."""
    (x0, x1), (y0, y1) = axes.get_xlim(), axes.get_ylim()
    width, height = 640, 330  # of the axes in points, nearly
    placed: list[tuple[float, float]] = []
    for row, area in sorted(points, key=lambda pair: -pair[0]["operations_per_sec"]):
        x, y = row["operations_per_byte"], row["operations_per_sec"] / 1e9
        right = math.sqrt(area) / 2 + 3
        across, up = width * math.log(x / x0) / math.log(x1 / x0) + right, height * math.log(y / y0) / math.log(y1 / y0)
        at = up - 3
        while any(abs(at - other) < 10 and abs(across - there) < 80 for there, other in placed):
            at -= 10
        placed.append((across, at))
        axes.annotate(row["name"], (x, y), xytext=(right, at - up), textcoords="offset points", fontsize=8)


STYLES = {"datasheet": "-", "given": "-.", "measured": "--"}


def draw_points(axes, data: dict, points: list[dict], colours: dict[str, str]) -> None:
    step = data["step"]
    shown = [*points, *([step] if step["operations_per_sec"] else [])]
    compute, bandwidth = (data["roofs"][name] for name in ("compute", "bandwidth"))
    ridges = [one["operations_per_byte"] for one in data["ridges"]]
    xs = [*(row["operations_per_byte"] for row in shown), *ridges, 10, 100]
    rates = [row["operations_per_sec"] / 1e9 for row in shown] + [one["rate"] / 1e9 for one in compute]
    low, high = min(xs) / 3, max(xs) * 4
    floor = min(rates, default=1) / 6
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(floor, 3 * max(rates, default=10)))
    for row in points:
        x, y = row["operations_per_byte"], row["operations_per_sec"] / 1e9
        label = f"{row['name']}: {row['time_ms']:.2f} ms ({row['share_of_time']:.1%}), {y:,.3g} Gop/s"
        label += f", {row['share_of_roof']:.0%} of its roof" if row["share_of_roof"] is not None else ""
        area = 60 + 1800 * row["share_of_time"]
        axes.scatter([x], [y], s=area, color=colours[row["name"]], alpha=0.75, edgecolor="white", label=label, zorder=3)
    if step["operations_per_sec"]:
        x, y = step["operations_per_byte"], step["operations_per_sec"] / 1e9
        share = f", {step['share_of_roof']:.0%} of its roof" if step["share_of_roof"] is not None else ""
        label = f"whole step, products alone: {step['time_ms']:.2f} ms, {y:,.3g} GFLOP/s{share}"
        axes.scatter([x], [y], marker="*", s=260, color="black", edgecolor="white", label=label, zorder=4)
    for at, name in ((10, "10"), (100, "100")):
        axes.axvline(at, color="#bbbbbb", linewidth=0.8, linestyle=":", zorder=0)
        axes.annotate(name, (at, floor), xytext=(2, 3), textcoords="offset points", fontsize=7.5, color="#888888")
    name_points(axes, [(row, 60 + 1800 * row["share_of_time"]) for row in points])
    if not compute or not bandwidth:
        axes.annotate(NO_ROOF, (0.5, 0.95), xycoords="axes fraction", ha="center")
    axes.set(xlabel="operations per byte moved", ylabel="10⁹ operations per second")
    axes.xaxis.set_major_formatter("{x:g}")  # and not by formulas, which the report does not typeset
    axes.yaxis.set_major_formatter("{x:g}")
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    legend = axes.legend(
        handles, labels, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2, fontsize=8, frameon=False
    )
    for handle in legend.legend_handles:
        handle.set_sizes([60])


def draw_roofs(axes, roofs: dict) -> None:
    """Slanted: bandwidth; level: arithmetic; of each kind all that are known."""
    low, high = axes.get_xlim()
    for pipe in roofs["bandwidth"]:
        tops = [one["rate"] for one in roofs["compute"]]
        end = max(tops) / pipe["rate"] if tops else high
        xs = np.array([low, min(end, high)])
        axes.plot(xs, xs * pipe["rate"] / 1e9, color="#444444", linestyle=STYLES[pipe["kind"]], linewidth=1.3, zorder=1)
        at = min(end, high) / 10  # away from the points, most of which lie further down
        axes.text(
            at,
            1.12 * at * pipe["rate"] / 1e9,
            f"{pipe['rate'] / 1e9:,.4g} GB/s, {pipe['kind']}",
            rotation=math.degrees(math.atan(pipe["rate"] / 1e9)),
            rotation_mode="anchor",
            transform_rotates_text=True,
            fontsize=8,
        )
    for peak in roofs["compute"]:
        start = min((peak["rate"] / pipe["rate"] for pipe in roofs["bandwidth"]), default=low)
        y = peak["rate"] / 1e9
        axes.plot([max(start, low), high], [y, y], color="#444444", linestyle=STYLES[peak["kind"]], linewidth=1.3)
        text = f"{peak['rate'] / 1e12:,.4g} TFLOP/s, {peak['kind']}"
        axes.annotate(text, (high, y), xytext=(-4, 4), textcoords="offset points", ha="right", fontsize=8)


def draw_bandwidth(axes, data: dict, rows: list[dict], colours: dict[str, str]) -> None:
    used = [row["bytes_per_sec"] / 1e9 for row in rows]
    axes.barh([row["name"] for row in rows], used, color=[colours[row["name"]] for row in rows], height=0.7)
    for at, (row, value) in enumerate(zip(rows, used, strict=True)):
        axes.text(value, at, f" {value:,.1f} GB/s, {row['bytes'] / 2**20:,.1f} MB", va="center", fontsize=8)
    peaks = data["roofs"]["bandwidth"]
    for pipe in peaks:
        axes.axvline(pipe["rate"] / 1e9, color="#444444", linestyle=STYLES[pipe["kind"]], linewidth=1.2)
    limit = max([*used, *(pipe["rate"] / 1e9 for pipe in peaks), 1e-9])
    axes.set(xlim=(0, 1.3 * limit), xlabel="GB/s: bytes counted over the time of the class")
    axes.invert_yaxis()
    bare(axes)
    axes.set_title("Bandwidth of each class, and the device's", loc="left", fontsize=10)
