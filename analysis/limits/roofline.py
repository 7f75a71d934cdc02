"""Which limit is each kind of work near?  Its rate and its operations per byte, under the roofs of
the device."""

from analysis.hardware.ceilings import NO_PEAK
from harness.base.text import count_of
from harness.documents.flops import NO_TRACE, RooflineData
from harness.schema import because, explained


def roofline(profile: dict, intensity: dict, trace: dict | None) -> dict:
    """roofline_data.json from flops_profile.json and computational_intensity.json: the roofs, a
    point for the step and one for each class of operators.  Their times are those of the trace,
    an operator_analysis.json.
    """
    compute, bandwidth = (
        profile["efficiency_metrics"][name] for name in ("peaks", "bandwidth_peaks")
    )
    rates, roofs = profile["performance_metrics"], {"compute": compute, "bandwidth": bandwidth}
    classes = trace["classes"] if trace else []
    times = {row["class"]: row["ms_per_step"] for row in classes}
    profiled_ms, step_ms = sum(times.values()), rates["avg_step_time_ms"]
    source = f"mean of the profiled steps, {profiled_ms:.2f} ms each" if times else NO_TRACE
    if trace and not trace["integrity"]["trustworthy"]:
        source += f"; NOT TRUSTWORTHY: {'; '.join(trace['integrity']['problems'])}"
    masked = sum(row["masked_flops"] for row in intensity["classes"])
    step = {
        "class": "step",
        "flops": intensity["step_flops"],
        "masked_flops": masked,
        "element_operations": 0,
    }
    step["bytes"] = intensity["step_bytes"]
    unrated = "it has no time in the trace" if times else NO_TRACE
    counted = {row["class"] for row in intensity["classes"]}
    ridges = [
        {
            "compute": one["kind"],
            "bandwidth": other["kind"],
            "operations_per_byte": one["rate"] / other["rate"],
        }
        for one in compute
        for other in bandwidth
    ]
    of_step = f"mean of {count_of(rates['steps_averaged'], 'step')}; {rates['steps_averaged_note']}"
    document = {
        "device": profile["environment"]["device"]["name"],
        "precision": profile["efficiency_metrics"]["precision"],
        "roofs": roofs,
        "ridges": ridges,
        "step": point(step, roofs, step_ms, step_ms, unrated),
        "points": [
            point(row, roofs, times.get(row["class"]), profiled_ms, unrated)
            for row in intensity["classes"]
        ],
        "time_elsewhere": [row for row in classes if row["class"] not in counted],
        "profiled_step_ms": profiled_ms if times else None,
        "time_source": {"step": of_step, "classes": source},
        "convention": intensity["convention"],
    }
    return explained(document, RooflineData)


def point(row: dict, roofs: dict, ms: float | None, total_ms: float, unrated: str) -> dict:
    """A class of operators that takes ms, or has no time for the reason `unrated`: its rate and its
    roof.

    The level roof is that of matmuls: other work is limited by the bandwidth alone.  Scores that
    fused attention may skip are not among the operations.
    """
    operations, moved = row["flops"] - row["masked_flops"] + row["element_operations"], row["bytes"]
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
    }
    values |= {"time_ms": ms, "share_of_time": ms / total_ms if ms else None}
    values |= {"operations_per_sec": rate, "bytes_per_sec": moved / (ms / 1e3) if ms else None}
    share = rate / roof if rate is not None and roof else None
    values |= {"roof_operations_per_sec": roof, "share_of_roof": share}
    no_share = unrated
    if ms:
        no_share = NO_PEAK if operations else "it does no arithmetic"
    untimed = because(unrated, "time_ms", "share_of_time", "operations_per_sec", "bytes_per_sec")
    return values | untimed | because(no_share, "share_of_roof")
