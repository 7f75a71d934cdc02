"""Which limit is each kind of work near?  Its rate and its operations per byte, under the roofs of the device."""

from __future__ import annotations

from analysis.hardware.ceilings import NO_PEAK
from harness.base.files import explain_nulls
from harness.base.tables import Column, column, narrow_table
from harness.base.text import count_of

NO_TRACE = "no trace of this run: --generate-roofline records one"


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
