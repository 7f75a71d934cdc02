"""How near is each shape of matmul to the device's roofs, how short are kernels, and how far ahead
runs the host?"""

import numpy as np

from analysis.attribution.gpu_time import launched_events
from analysis.attribution.operators import costs_of_operators, operator_calls, shapes_text
from analysis.trace.timeline import Timeline, median_step
from analysis.vocabulary.kernel_classes import MATMUL_CLASSES
from analysis.work.operator_costs import factor_type
from harness.base.sections import Section
from harness.base.tables import Column, column
from harness.base.text import significant

DURATIONS_US = (2, 5, 10, 20, 50, 100, 1000, None)  # upper limits of the histogram of kernels
POINTS = 200  # of the queue over a step


def shape_rates(timeline: Timeline) -> list[dict]:
    """Each matmul, convolution and attention with its inputs' shapes, most time first: rates in its
    own time on the device, and the share of the nearer roof, which is the least time that the
    device's peaks allow over its time."""
    trace, clock = timeline.trace, "self_device_us" if timeline.on_gpu else "self_cpu_us"
    calls = operator_calls(timeline)
    total = calls[clock].sum()
    named = trace.operators["named_category"].isin(MATMUL_CLASSES).to_numpy()
    rated = named & (calls["signature"] >= 0).to_numpy() & (calls[clock] > 0).to_numpy()
    names, rows = trace.operators["name"].cat.categories, []
    roofs = timeline.context.roofs
    costs, which = costs_of_operators(timeline)
    for (code, signature), same in calls[rated].groupby(["code", "signature"]):
        name, (shapes, types, _) = names[code], trace.signatures[signature]
        one, n, us = costs[which[same.index[0]]], same["call"].nunique(), float(same[clock].sum())
        if not (flops := one.flops or one.most_flops):
            continue
        precision, peak = roofs.peak(factor_type(shapes, types))
        # A kernel may skip what a causal mask hides, so the roof is above what it must do.
        least = {"compute": n * one.least_flops / peak.rate} if peak and one.flops else {}
        if roofs.bandwidth and one.bytes:
            least["memory"] = n * one.bytes / roofs.bandwidth[0].rate
        roof = max(least, key=least.get) if "compute" in least else None
        inputs = shapes_text(shapes) + (f", up to {one.keys:,} keys each" if one.keys else "")
        row = {
            "name": name,
            "shapes": inputs,
            "precision": precision,
            "calls": n,
            "ms": us / 1e3,
            "share": us / total,
        }
        row |= {"tflops": n * flops / us / 1e6, "at_most": one.flops is None}
        row |= {"unmasked_tflops": n * one.least_flops / us / 1e6 if one.least_flops else None}
        row |= {"tb_per_sec": n * one.bytes / us / 1e6 if one.bytes else None}
        rows.append(row | {"roof": roof, "share_of_roof": 1e6 * least[roof] / us if roof else None})
    return sorted(rows, key=lambda row: -row["ms"])


def kernel_durations(timeline: Timeline) -> list[dict]:
    """How many of the steps' kernels are how short, and their share of the kernels' time."""
    gpu = timeline.gpu[
        (timeline.gpu["kind"] == "kernel").to_numpy() & (timeline.gpu["step"] >= 0).to_numpy()
    ]
    us = (gpu["end"] - gpu["start"]).to_numpy()
    limits = [limit for limit in DURATIONS_US if limit]
    which = np.searchsorted(limits, us)
    counts, sums = (np.bincount(which, weights=w, minlength=len(DURATIONS_US)) for w in (None, us))
    return [
        {
            "up_to_us": limit,
            "kernels_per_step": float(n / len(timeline.steps)),
            "share_of_kernels": float(n / len(us)),
            "share_of_time": float(time / us.sum()) if us.sum() else 0.0,
        }
        for limit, n, time in zip(DURATIONS_US, counts, sums, strict=True)
        if n
    ]


def queue_over_step(timeline: Timeline) -> dict | None:
    """Kernels, copies, memory sets, and graphs as a whole, launched but not started, and how long
    the latest one has to wait, over the step of median duration."""
    events = launched_events(timeline)
    if not ((events["kind"] == "kernel") | events["of_graph"]).any():
        return None
    which = median_step(timeline)
    number, first, last = (timeline.steps[name].iloc[which] for name in ("number", "start", "end"))
    times = np.linspace(first, last, POINTS)
    launched, began = events["launched"].to_numpy(), events["start"].to_numpy()
    at = np.searchsorted(launched, times, side="right")
    queued = np.maximum(0, at - np.searchsorted(np.sort(began), times, side="right"))
    ahead = np.where(at > 0, np.maximum(0.0, began[at - 1] - times), 0.0)
    time_ms, ahead_ms = ((us / 1e3).round(4).tolist() for us in (times - first, ahead))
    return {
        "step": int(number),
        "time_ms": time_ms,
        "queued": queued.tolist(),
        "ahead_ms": ahead_ms,
    }


# ---- For a reader --------------------------------------------------------------------------------

RATE_COLUMNS = [
    Column("matmul, input shapes", lambda row: f"{row['name']} {row.get('shapes', '')}", left=True),
    column("precision", "precision", left=True),
    column("calls", "calls", ","),
    column("ms", "ms", "~3"),
    column("share", "share", ".1%"),
    Column(
        "TFLOP/s",
        lambda row: (
            f"{'<= ' * row['at_most']}{significant(row['tflops'])}" if "tflops" in row else None
        ),
    ),
    column("unmasked", "unmasked_tflops", "~9"),
    column("GB/s", "tb_per_sec", "~1", 1e-3),
    column("roof", "roof", left=True),
    column("of its roof", "share_of_roof", ".1%"),
]
DURATION_COLUMNS = [
    Column(
        "kernels of",
        lambda row: f"up to {row['up_to_us']} us" if row["up_to_us"] else "more",
        left=True,
    ),
    column("per step", "kernels_per_step", "~1"),
    column("share of kernels", "share_of_kernels", ".1%"),
    column("share of time", "share_of_time", ".1%"),
]


def rate_section(analysis: dict) -> Section:
    note = (
        "Matmuls, convolutions and attention by shape: rates in their own time, and the share of"
        " the nearer roof"
    )
    rows, sums = analysis["shape_rates"], ("calls", "ms", "share")
    return Section(
        "Rates by shape", RATE_COLUMNS, rows, [note] * bool(rows), label="name", sums=sums
    )


def duration_section(analysis: dict) -> Section:
    return Section(
        "Durations of the steps' kernels",
        DURATION_COLUMNS,
        analysis["gpu_timeline"]["kernel_durations"],
    )
