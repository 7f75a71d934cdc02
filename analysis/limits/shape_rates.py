"""How near is each shape of matmul to the device's roofs?"""

from __future__ import annotations

from analysis.attribution.operators import costs_of_operators, operator_calls, shapes_text
from analysis.hardware.ceilings import Ceiling
from analysis.hardware.nearer_roof import NearerRoof, nearer_roof
from analysis.trace.reasons import UNDETERMINED
from analysis.trace.timeline import Timeline
from analysis.vocabulary.kernel_classes import MATMUL_CLASSES
from analysis.work.cost import Cost
from analysis.work.operator_costs import factor_type
from harness.base.sections import Section
from harness.base.tables import Column, column, value_of
from harness.base.text import significant
from harness.schema import Document, field

NO_ROOF = "no peak of this device is known for it, or not its FLOPs"


class ShapeRate(Document):
    name: str = field("of a matmul, convolution or attention operator")
    shapes: str = field("of its inputs")
    precision: str = field("of what it multiplies")
    calls: int = field("in the trace")
    ms: float = field("over all calls, on the device: self time")
    share: float = field("of the self time of all operators")
    tflops: float = field(
        "TFLOP/s in its own time; of attention the full S x T scores, causal or not"
    )
    at_most: bool = field(
        "tflops is an upper limit: attention over packed sequences, whose lengths are not recorded"
    )
    unmasked_tflops: float | None = field(
        "without masked scores: what a kernel must do", null=UNDETERMINED
    )
    tb_per_sec: float | None = field("10^12 bytes per second", null=UNDETERMINED)
    roof: str | None = field("compute or memory, the nearer limit", null=NO_ROOF)
    share_of_roof: float | None = field(
        "the least time that the peaks allow over its time", null=NO_ROOF
    )


def shape_rates(timeline: Timeline) -> list[ShapeRate]:
    """Each matmul, convolution and attention with its inputs' shapes, most time first: rates in its
    own time on the device, and the share of the nearer roof, which is the least time that the
    device's peaks allow over its time."""
    trace, clock = timeline.trace, "self_device_us" if timeline.on_gpu else "self_cpu_us"
    calls = operator_calls(timeline)
    total_us = calls[clock].sum()
    multiplies = trace.operators["named_category"].isin(MATMUL_CLASSES).to_numpy()
    is_rated = multiplies & (calls["signature"] >= 0).to_numpy() & (calls[clock] > 0).to_numpy()
    names = trace.operators["name"].cat.categories
    roofs = timeline.context.roofs
    bandwidth = roofs.bandwidth[0] if roofs.bandwidth else None
    costs, which = costs_of_operators(timeline)
    rows = []
    for (code, signature), same in calls[is_rated].groupby(["code", "signature"]):
        cost = costs[which[same.index[0]]]
        if not (cost.flops or cost.most_flops):
            continue
        shapes, types, _ = trace.signatures[signature]
        precision, peak = roofs.peak(factor_type(shapes, types))
        us, n = float(same[clock].sum()), same["call"].nunique()
        roof = roof_of_calls(cost, n, peak, bandwidth)
        row = ShapeRate(
            name=names[code],
            shapes=inputs_text(shapes, cost),
            precision=precision,
            calls=n,
            ms=us / 1e3,
            share=us / total_us,
            tflops=per_us(n, cost.flops or cost.most_flops, us),
            at_most=cost.flops is None,
            unmasked_tflops=per_us(n, cost.least_flops, us),
            tb_per_sec=per_us(n, cost.bytes, us),
            roof=roof.name if roof else None,
            share_of_roof=1e6 * roof.least_time / us if roof else None,
        )
        rows.append(row)
    return sorted(rows, key=lambda row: -row.ms)


def per_us(n: int, amount: int | None, us: float) -> float | None:
    """The rate of n calls that take this time together, in 10^12 per second; None where it is not
    known what each does."""
    return n * amount / us / 1e6 if amount else None


def inputs_text(shapes: list, cost: Cost) -> str:
    """'[4, 128, 8, 64] [4, 128, 8, 64], up to 64 keys each'"""
    text = shapes_text(shapes)
    return f"{text}, up to {cost.keys:,} keys each" if cost.keys else text


def roof_of_calls(
    cost: Cost, n: int, peak: Ceiling | None, bandwidth: Ceiling | None
) -> NearerRoof | None:
    """The roof that is nearer to n calls of this cost; a peak is needed, or nothing is known."""
    if peak is None or not cost.flops:
        return None
    n_bytes = n * cost.bytes if cost.bytes else None
    # A kernel may skip what a causal mask hides, so the roof is above what it must do.
    return nearer_roof(
        n * cost.least_flops, n_bytes, peak.rate, bandwidth.rate if bandwidth else None
    )


# ---- For a reader --------------------------------------------------------------------------------


def name_and_inputs(row: ShapeRate | dict) -> str:
    """row: a dictionary, of several shapes together."""
    return f"{value_of(row, 'name')} {value_of(row, 'shapes') or ''}"


def tflops_text(row: ShapeRate | dict) -> str | None:
    """'<= 12.3'; None for a row of several shapes together."""
    if isinstance(row, dict):
        return None
    rate = significant(row.tflops)
    return f"<= {rate}" if row.at_most else rate


RATE_COLUMNS = [
    Column("matmul, input shapes", name_and_inputs, left=True),
    column("precision", "precision", left=True),
    column("calls", "calls", ","),
    column("ms", "ms", "~3"),
    column("share", "share", ".1%"),
    Column("TFLOP/s", tflops_text),
    column("unmasked", "unmasked_tflops", "~9"),
    column("GB/s", "tb_per_sec", "~1", 1e-3),
    column("roof", "roof", left=True),
    column("of its roof", "share_of_roof", ".1%"),
]


def rate_section(rates: list[ShapeRate]) -> Section:
    section = Section("Rates by shape", RATE_COLUMNS, rates, label="name")
    section.sums = ("calls", "ms", "share")
    if section.rows:
        section.note = [
            "Matmuls, convolutions and attention by shape: rates in their own time, and the share"
            " of the nearer roof"
        ]
    return section
