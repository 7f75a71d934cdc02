"""Which kernels are far from what the device can do; what would they take at a realistic rate?"""

import re
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.advice.evidence import Evidence, Found, Proposal, at_roof
from analysis.advice.who_reads import Reader, command_of, who_reads
from analysis.attribution.operators import shapes_text
from analysis.trace.tables import by_name
from analysis.trace.timeline import Timeline
from analysis.vocabulary.kernel_classes import (
    ATTENTION,
    CLASS_OF_NAME,
    CONVOLUTION,
    MATMUL,
    MATMUL_CLASSES,
)
from analysis.vocabulary.kernels import MISALIGNED
from analysis.work.operator_costs import factor_type
from harness.model.changes import CHANGES

FORECAST = (
    10.0  # times as fast: what should become faster by more has another reason than its kernel
)
OF_RUNTIME = "^__amd_rocclr_"  # kernels by which the runtime copies and fills memory
KERNEL_NAME = 60  # letters by which profilers find a kernel: mangled names have thousands
SHORTEST_US = 5.0  # of a kernel that does something, with its first and last blocks
# What makes kernels better
HOW = {
    MATMUL: (
        "wider, padded dimensions, a larger batch, or kernels chosen by timing:"
        " torch.compile(mode='max-autotune')"
    ),
    ATTENTION: (
        "another fused kernel of attention, longer sequences or more heads per call, a head width"
        " of 64 or 128"
    ),
}
LAYOUT = r"(?i)nchwToNhwc|nhwcToNchw|nchw2nhwc|nhwc2nchw|batched_transpose_|transpose_(NCHW|CNHW)2"


class Shape(NamedTuple):
    """Calls of one operator on inputs of one shape, which are far below the nearer roof."""

    name: str  # of the operator, with the shapes
    kind: str  # class of its kernels
    us: float  # of the steps
    roof_us: float  # what it would take at the nearer roof
    likely_us: float  # at the share of it that good kernels reach
    best_us: float
    peak_origin: str
    event: int  # the longest one, by its row in the evidence's events


def better_kernels(what: str, evidence: Evidence) -> Found:
    """Attention, or all else that multiplies, whose shapes say that they are far below the nearer
    of the two roofs."""
    classes = [ATTENTION]
    if what != ATTENTION:
        classes = [what, *(name for name in MATMUL_CLASSES if name not in (what, ATTENTION))]
    events = evidence.events
    known = events["class"].isin(classes).to_numpy() & (events["signature"] >= 0).to_numpy()
    known &= ~evidence.kernels(LAYOUT) & ~evidence.kernels(MISALIGNED)
    of_events = np.zeros(len(events), bool)
    far = []
    keys = ["code", "signature", "class"]
    for (code, signature, kind), rows in events[known].groupby(keys, observed=True):
        shape = far_below_roof(evidence, code, signature, kind, rows)
        if shape is not None:
            of_events |= events.index.isin(rows.index)
            far.append(shape)
    if not far:
        return None
    us, roof_us = sum(shape.us for shape in far), sum(shape.roof_us for shape in far)
    likely_us, best_us = sum(shape.likely_us for shape in far), sum(shape.best_us for shape in far)
    worst = max(far, key=lambda shape: shape.us - shape.likely_us)
    basis = "at most: its time could vanish"
    if best_us:
        basis = f"at most: the FLOPs that they need, at the peak {worst.peak_origin}"
    share = CLASS_OF_NAME[worst.kind].realistic_share
    estimate = f"estimate: at {share:.0%} of the nearer roof, which good kernels reach"
    if us > FORECAST * likely_us:
        likely_us = None
        estimate = (
            "no estimate: from so far below its roof a kernel that runs otherwise is no forecast"
        )
    kinds = {shape.kind for shape in far}
    who = " and ".join(CLASS_OF_NAME[name].plural for name in classes if name in kinds)
    verb = "runs" if what == ATTENTION else "run"
    rate = f"{100 * roof_us / us:.2g}% of the nearer roof"
    command = counters(evidence.timeline, worst.event)["counters"]
    if command is None:
        command = (
            "perf stat -e cycles,instructions,cache-misses, of a program with this shape alone"
        )
    return Proposal(
        f"better {CONVOLUTION if kinds == {CONVOLUTION} else what} kernels",
        f"{who.capitalize()} {verb} at {rate} for {evidence.share(us)} of the step",
        HOW[what],
        us,
        f"{basis}; {estimate}",
        best_us,
        likely_us,
        {"counters": command},
        f"{evidence.share(us)} of the step at {rate}; most is lost in {worst.name}",
        shown=events.index == worst.event,
        of_events=of_events,
    )


def far_below_roof(
    evidence: Evidence, code: int, signature: int, kind: str, rows: pd.DataFrame
) -> Shape | None:
    """What is known of these events, of one operator on inputs of one shape; None if they are near
    the roof, or it is not known."""
    trace, roofs = evidence.timeline.trace, evidence.timeline.context.roofs
    shapes, types, _ = trace.signatures[signature]
    peak = roofs.peak(factor_type(shapes, types))[1]
    us, flops, moved = float(rows["us"].sum()), float(rows["flops"].sum()), rows["bytes"].sum()
    if not (peak and flops and roofs.bandwidth):
        return None
    roof_us = 1e6 * max(flops / peak.rate, float(moved) / roofs.bandwidth[0].rate)
    likely_us = roof_us / CLASS_OF_NAME[kind].realistic_share
    if evidence.timeline.on_gpu:
        likely_us = max(likely_us, SHORTEST_US * rows["launches"].sum())
    if likely_us >= us:
        return None
    best_us = min(likely_us, 1e6 * flops / peak.rate)
    # What was measured is no limit, and Winograd's convolution multiplies less.
    if peak.kind == "measured" or kind == CONVOLUTION:
        best_us = 0.0
    return Shape(
        name=f"{trace.operators['name'].cat.categories[code]} {shapes_text(shapes)}",
        kind=kind,
        us=us,
        roof_us=roof_us,
        likely_us=likely_us,
        best_us=best_us,
        peak_origin=peak.origin,
        event=rows["us"].idxmax(),
    )


def counters(timeline: Timeline, event: int | None = None) -> dict:
    """`counters`: the command that reads the counters of a kernel, which tell why it is slow; for
    who runs a program of their own, and of a kernel alone: those profilers repeat a kernel, which
    for a collective waits for ranks that never come, and know no copies.

    event: of the GPU, by default one of those that take longest together; none without a GPU."""
    if not timeline.on_gpu:
        return {"counters": None}
    gpu, summary = timeline.gpu, timeline.context.summary
    reader = who_reads(summary)
    if reader != Reader.OWN_PROGRAM:
        return {
            "counters": None,
            "counters_reason": f"for a program of one's own; who reads this {reader.value}",
        }
    is_kernel = (gpu["kind"] == "kernel") & (gpu["category"] != "communication")
    is_kernel &= ~by_name(gpu["name"], lambda name: bool(re.search(OF_RUNTIME, name)), bool)
    kernels = (
        gpu[is_kernel.to_numpy()]
        if event is None
        else gpu.iloc[[event]][is_kernel.iloc[[event]].to_numpy()]
    )
    if kernels.empty:
        return {
            "counters": None,
            "counters_reason": "no kernel of the program's own takes that time",
        }
    us = (kernels["end"] - kernels["start"]).groupby(kernels["name"].astype(str)).sum()
    name = re.split(r"[<(]", us.idxmax().removeprefix("void "))[0][:KERNEL_NAME]
    command = command_of(summary) or "python3 YOUR_SCRIPT"
    if timeline.context.device.get("arch", "").startswith("gfx"):
        return {"counters": f"rocprof-compute profile -n kernel -k '{name}' -- {command}"}
    return {
        "counters": (
            f"ncu --set full --kernel-name-base demangled --kernel-name regex:'{name}' {command}"
        )
    }


def aligned_matmuls(evidence: Evidence) -> Found:
    """Kernels for matmuls with a dimension that is no multiple of 8, which load two or four bytes
    at a time."""
    mask = evidence.kernels(MISALIGNED)
    if not mask.any():
        return None
    rows, us = evidence.part(mask)
    flops, roofs = rows["flops"].sum(), evidence.compute_roofs
    rate = evidence.best_rate("flops", ~mask) or (
        roofs[0].rate / 1e6 * CLASS_OF_NAME[MATMUL].realistic_share if roofs else None
    )
    likely = min(us, flops / rate) if rate and flops else None
    best, bound = at_roof(flops, roofs, "GFLOP/s", us if likely is None else likely)
    basis = f"at most: {bound}"
    if likely is not None:
        basis += f"; estimate: at {rate / 1e6:,.0f} TFLOP/s, which aligned matmuls reach"
    finding = f"Matmuls of unaligned dimensions take {evidence.share(us)} of the step"
    if flops and us:
        finding += f" at {flops / us / 1e6:,.0f} TFLOP/s"
    how = "pad the dimension that is no multiple of 8 to one: vocabulary, hidden width, classes"
    text = evidence.described(rows)
    of = {"shown": mask, "of_events": mask}
    return Proposal("aligned matmuls", finding, how, us, basis, best, likely, evidence=text, **of)


def one_layout(evidence: Evidence) -> Found:
    """Kernels that change the layout of images before and after convolutions."""
    mask = evidence.kernels(LAYOUT)
    if not mask.any():
        return None
    us = evidence.part(mask)[1]
    finding = (
        f"Changing tensors between channels-first and channels-last takes {evidence.share(us)} of"
        " the step"
    )
    how = "model and inputs in channels-last, and no .contiguous() that changes them back"
    basis = "its time could vanish, and waits for launches with it; estimate: its own"
    filled = {"line": CHANGES["channels-last"].line()}
    return evidence.proposal(
        "channels-last layout", finding, how, mask, basis, likely_us=0.0, filled=filled
    )
