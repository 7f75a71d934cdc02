"""What is the least time of a step?  By arithmetic and by memory traffic, at the peaks of a
device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from analysis.hardware.achievable import convolutions_of_float32
from analysis.hardware.ceilings import NOT_MEASURED, Ceiling, bandwidth_ceilings, compute_ceilings
from analysis.hardware.matching import datasheet
from analysis.hardware.nearer_roof import longer_limit
from analysis.memory.predicted import bytes_on_other_ranks
from analysis.work.bytes_moved import WorkCounter, step_work
from harness.documents.flops import NO_PEAK
from harness.model.workload import Workload
from harness.schema import Document, Unknown, field

ALONE = "one rank has nobody to communicate with"


class TimeBounds(Document):
    compute_ms: float | None = field(
        "FLOPs at the peak rate, without scores that may be skipped", null=NO_PEAK
    )
    compute_peak: str | None = field("the peak and its source", null=NO_PEAK)
    bandwidth_ms: float | None = field("least_bytes at the peak bandwidth", null=NO_PEAK)
    bandwidth_peak: str | None = field("the peak and its source", null=NO_PEAK)
    least_bytes: int = field("that a step must move if all temporaries stay in on-chip memory")
    network_ms: float | None = field("communication at --network", null=ALONE)


class BoundsOfRank(NamedTuple):
    """The least time that one rank needs, without communication."""

    compute_ms: float | None
    compute_peak: str | None
    bandwidth_ms: float | None
    bandwidth_peak: str | None
    least_bytes: int
    why_unknown: str  # why one of them is None

    def longest_ms(self) -> float | Unknown:
        roof = longer_limit(self.compute_ms, self.bandwidth_ms)
        return Unknown(self.why_unknown) if roof is None else roof.least_time


def time_bounds(
    workload: Workload, device: dict, peak: str | float, measure: str = "kept"
) -> BoundsOfRank:
    """device: as in environment.json.  measure: as for the ceilings."""
    work = step_work(workload, device.get("type") != "cpu")
    # What a step finds and leaves is read and written once; that which is sharded, by one of the
    # ranks.  The optimizer of a file may keep less than that.
    least_bytes = max(0, work.minimum() - 2 * bytes_on_other_ranks(workload))
    bandwidth = bandwidth_ceilings(device, peak, measure)
    flops = flops_by_precision(workload, work, device.get("arch", ""))
    compute = {}
    for precision in flops:
        compute[precision] = compute_ceilings(device, precision, peak, measure=measure)
    if "tf32" in compute and not compute["tf32"]:  # convolutions, where there is none
        name = precision_of_float32(workload)
        compute["tf32"] = compute_ceilings(device, name, peak, measure=measure)
    most, _ = flops.most_common(1)[0]
    return BoundsOfRank(
        compute_ms=compute_ms(flops, compute) if compute[most] else None,
        compute_peak=compute[most][0].label if compute[most] else None,
        bandwidth_ms=1e3 * least_bytes / bandwidth[0].rate if bandwidth else None,
        bandwidth_peak=bandwidth[0].label if bandwidth else None,
        least_bytes=least_bytes,
        why_unknown=why_no_peak(device, most, measure),
    )


def precision_of_float32(workload: Workload) -> str:
    """In which tensors of float32 are multiplied."""
    cast = workload.parallel.param_precision
    if cast != "fp32":
        # What FSDP gathers, and the work of one rank alone does not show.
        return cast
    return "tf32" if workload.precision == "tf32" else "fp32"


def flops_by_precision(workload: Workload, work: WorkCounter, arch: str) -> Counter[str]:
    """Matmul FLOPs that a step must do on this architecture, by what it multiplies in."""
    names = {"float32": precision_of_float32(workload), "bfloat16": "bf16", "float16": "fp16"}
    cast = workload.parallel.param_precision
    if cast != "fp32":
        names["tf32"] = cast
    elif convolutions_of_float32(arch) == "fp32":
        names["tf32"] = "fp32"
    flops: Counter[str] = Counter()
    for kind, amount in work.least_flops().items():
        flops[names.get(kind, kind)] += amount
    return flops or Counter({workload.precision: 0})


def compute_ms(flops: Counter[str], compute: dict[str, Sequence[Ceiling]]) -> float:
    """Matmuls of another type than most are not counted if its rate is not known: the bound stays
    one.  compute: ceilings by precision."""
    seconds = sum(
        amount / compute[precision][0].rate
        for precision, amount in flops.items()
        if compute[precision]
    )
    return 1e3 * seconds


def why_no_peak(device: dict, precision: str, measure: str) -> str:
    row = datasheet(device)
    if row:
        return f"the datasheet of {row[0].name} has no {precision}"
    if measure == "kept":
        return NOT_MEASURED
    return "--device-memory does not name a device; use --target-device"
