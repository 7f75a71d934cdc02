"""Which limit is each kind of work near?  Its rate and its operations per byte, under the roofs of
the device."""

from __future__ import annotations

from analysis.attribution.breakdown import ClassRow
from analysis.hardware.ceilings import NO_PEAK
from analysis.hardware.nearer_roof import COMPUTE, nearer_roof, ridge_of_rates
from harness.base.text import count_of
from harness.documents.flops import NO_TRACE, Peak
from harness.schema import Document, Unknown, field, known_or

NOT_IN_TRACE = "it has no time in the trace"
NO_ARITHMETIC = "it does no arithmetic"


class Ridge(Document):
    compute: str = field("kind of that peak, as in roofs")
    bandwidth: str = field("kind of that peak, as in roofs")
    operations_per_byte: float = field("at which both are reached")


class RooflinePoint(Document):
    name: str = field("step, or class of operators")
    operations: int = field("of a step, without scores that fused attention may skip")
    bytes: int = field("read and written")
    operations_per_byte: float = field("where it stands on the axis")
    time_ms: float | None = field("of a step", null=NO_TRACE)
    share_of_time: float | None = field("of all classes", null=NO_TRACE)
    operations_per_sec: float | None = field("reached", null=NO_TRACE)
    bytes_per_sec: float | None = field("reached", null=NO_TRACE)
    roof_operations_per_sec: float | None = field("the least of the limits there", null=NO_PEAK)
    share_of_roof: float | None = field("reached", null=NO_PEAK)


class RooflineData(Document):
    device: str = field("its name")
    precision: str = field("of the matmuls")
    roofs: dict[str, list[Peak]] = field("limits of the device: compute and bandwidth")
    ridges: list[Ridge] = field("of each pair of limits")
    step: RooflinePoint = field("the whole of it")
    points: list[RooflinePoint] = field("one for each class of operators")
    time_elsewhere: list[ClassRow] = field("time of the classes of operators that are not counted")
    profiled_step_ms: float | None = field("the sum of all these times", null=NO_TRACE)
    time_source: dict[str, str] = field("of the step and of the classes")
    convention: dict[str, str] = field("what is counted")


def roofline(
    profile: dict, intensity: dict, classes: list[ClassRow], problems: list[str]
) -> RooflineData:
    """The roofs, a point for the step and one for each class of operators.

    profile, intensity: flops_profile.json and computational_intensity.json.  classes: times of the
    points, by a trace; without it they have none.  problems: why it is not trustworthy."""
    rates = profile["performance_metrics"]
    efficiency = profile["efficiency_metrics"]
    roofs = {"compute": efficiency["peaks"], "bandwidth": efficiency["bandwidth_peaks"]}
    ms_of_class = {row.class_: row.ms_per_step for row in classes}
    profiled_ms = sum(ms_of_class.values())
    without_time = NOT_IN_TRACE if classes else NO_TRACE
    points = []
    for row in intensity["classes"]:
        ms = ms_of_class.get(row["class"])
        points.append(point(row, roofs, ms, profiled_ms, without_time))
    counted = {row["class"] for row in intensity["classes"]}
    step_ms = rates["avg_step_time_ms"]
    of_step = f"mean of {count_of(rates['steps_averaged'], 'step')}; {rates['steps_averaged_note']}"
    return RooflineData(
        device=profile["environment"]["device"]["name"],
        precision=efficiency["precision"],
        roofs=roofs,
        ridges=ridges_of(roofs),
        step=point(step_counts(intensity), roofs, step_ms, step_ms, without_time),
        points=points,
        time_elsewhere=[row for row in classes if row.class_ not in counted],
        profiled_step_ms=profiled_ms if classes else None,
        time_source={"step": of_step, "classes": source_of_times(classes, problems)},
        convention=intensity["convention"],
    )


def ridges_of(roofs: dict[str, list[dict]]) -> list[Ridge]:
    ridges = []
    for compute in roofs["compute"]:
        for bandwidth in roofs["bandwidth"]:
            ridge = Ridge(
                compute=compute["kind"],
                bandwidth=bandwidth["kind"],
                operations_per_byte=ridge_of_rates(compute["rate"], bandwidth["rate"]),
            )
            ridges.append(ridge)
    return ridges


def step_counts(intensity: dict) -> dict:
    """The step as a row like those of its classes."""
    return {
        "class": "step",
        "flops": intensity["step_flops"],
        "masked_flops": sum(row["masked_flops"] for row in intensity["classes"]),
        "element_operations": 0,
        "bytes": intensity["step_bytes"],
    }


def source_of_times(classes: list[ClassRow], problems: list[str]) -> str:
    """Where the times of the classes are from, and why not to trust them."""
    if not classes:
        return NO_TRACE
    profiled_ms = sum(row.ms_per_step for row in classes)
    source = f"mean of the profiled steps, {profiled_ms:.2f} ms each"
    if problems:
        source += f"; NOT TRUSTWORTHY: {'; '.join(problems)}"
    return source


def point(
    row: dict, roofs: dict[str, list[dict]], ms: float | None, total_ms: float, without_time: str
) -> RooflinePoint:
    """A class of operators that takes ms of total_ms, or has no time, for the reason
    `without_time`.  Scores that fused attention may skip are not among its operations."""
    operations = row["flops"] - row["masked_flops"] + row["element_operations"]
    share = rate = bytes_per_sec = None
    if ms:
        share = ms / total_ms
        rate = operations / (ms / 1e3)
        bytes_per_sec = row["bytes"] / (ms / 1e3)
    roof = roof_of(row, operations, roofs)
    without_roof = NO_PEAK if operations else NO_ARITHMETIC
    if not ms:
        share_of_roof = Unknown(without_time)
    elif roof is None:
        share_of_roof = Unknown(without_roof)
    else:
        share_of_roof = rate / roof
    return RooflinePoint(
        name=row["class"],
        operations=operations,
        bytes=row["bytes"],
        operations_per_byte=operations / row["bytes"],
        time_ms=known_or(ms, without_time),
        share_of_time=known_or(share, without_time),
        operations_per_sec=known_or(rate, without_time),
        bytes_per_sec=known_or(bytes_per_sec, without_time),
        roof_operations_per_sec=known_or(roof, without_roof),
        share_of_roof=share_of_roof,
    )


def roof_of(row: dict, operations: int, roofs: dict[str, list[dict]]) -> float | None:
    """The operations per second that the peaks of the device allow; None for work without any, and
    where a peak is not known.  The level roof is that of matmuls: other work is limited by the
    bandwidth alone."""
    if not operations or not roofs["bandwidth"]:
        return None
    flops_per_sec = None
    if row["flops"]:
        if not roofs["compute"]:
            return None
        flops_per_sec = roofs["compute"][0]["rate"]
    roof = nearer_roof(operations, row["bytes"], flops_per_sec, roofs["bandwidth"][0]["rate"])
    return flops_per_sec if roof.name == COMPUTE else operations / roof.least_time
