"""Which kernels are far from what the device can do; what would they take at a realistic rate?"""

import re
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.advice.evidence import Evidence
from analysis.advice.proposals import Found, Proposal, at_roof
from analysis.advice.who_reads import TracedRun
from analysis.attribution.operators import shapes_text
from analysis.hardware.nearer_roof import nearer_roof
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
from analysis.vocabulary.words import Reader
from analysis.work.operator_costs import factor_type
from harness.model.changes import CHANGES
from harness.schema import Unknown

# Times as fast: what should become faster by more has another reason than its kernel.
FORECAST = 10.0
OF_RUNTIME = "^__amd_rocclr_"  # kernels by which the runtime copies and fills memory
KERNEL_NAME = 60  # letters by which profilers find a kernel: mangled names have thousands
SHORTEST_US = 5.0  # of a kernel that does something, with its first and last blocks
LAYOUT = r"(?i)nchwToNhwc|nhwcToNchw|nchw2nhwc|nhwc2nchw|batched_transpose_|transpose_(NCHW|CNHW)2"
PERF = "perf stat -e cycles,instructions,cache-misses, of a program with this shape alone"
# What makes kernels better.
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


# ---- Far below their roof ------------------------------------------------------------------------


class FarShape(NamedTuple):
    """All calls of an operator with inputs of one shape, which are far below their roof."""

    kind: str  # matmul, convolution, attention
    name: str  # with its shapes
    us: float
    at_roof_us: float
    likely_us: float
    best_us: float
    peak: str  # which it is, and where it is from
    rows: pd.Index  # of the events
    longest: int  # of these rows


def better_kernels(what: str, evidence: Evidence) -> Found:
    """Attention, or all else that multiplies, whose shapes say that they are far below the nearer
    of the two roofs."""
    classes = [ATTENTION]
    if what != ATTENTION:
        classes = [what, *(name for name in MATMUL_CLASSES if name not in (what, ATTENTION))]
    realistic_share = CLASS_OF_NAME[what].realistic_share
    far = far_shapes(evidence, classes, realistic_share)
    if not far:
        return None
    total = total_of(far)
    worst = max(far, key=lambda shape: shape.us - shape.likely_us)
    bound = "at most: its time could vanish"
    if total.best_us:
        bound = f"at most: the FLOPs that they need, at the peak {worst.peak}"
    likely_us: float | None = total.likely_us
    estimate = f"estimate: at {realistic_share:.0%} of the nearer roof, which good kernels reach"
    if total.us > FORECAST * total.likely_us:
        likely_us = None
        estimate = (
            "no estimate: from so far below its roof a kernel that runs otherwise is no forecast"
        )
    rate = f"{100 * total.at_roof_us / total.us:.2g}% of the nearer roof"
    share = evidence.share(total.us)
    command = counters(evidence.timeline, worst.longest)
    index = evidence.events.index
    kinds = {shape.kind for shape in far}
    return Proposal(
        name=name_of_kernels(what, kinds),
        finding=f"{runners(what, kinds, classes)} at {rate} for {share} of the step",
        how=HOW[what],
        us=total.us,
        basis=f"{bound}; {estimate}",
        best_us=total.best_us,
        likely_us=likely_us,
        filled={"counters": command if isinstance(command, str) else PERF},
        evidence=f"{share} of the step at {rate}; most is lost in {worst.name}",
        shown=index == worst.longest,
        of_events=index.isin(total.rows),
    )


def name_of_kernels(what: str, kinds: set[str]) -> str:
    """'better matmul kernels'"""
    return f"better {CONVOLUTION if kinds == {CONVOLUTION} else what} kernels"


def runners(what: str, kinds: set[str], classes: list[str]) -> str:
    """'Matmuls and convolutions run': those of the classes that there are."""
    plurals = [CLASS_OF_NAME[name].plural for name in classes if name in kinds]
    return f"{' and '.join(plurals).capitalize()} {'runs' if what == ATTENTION else 'run'}"


class Total(NamedTuple):
    """Of several shapes."""

    us: float
    at_roof_us: float
    likely_us: float
    best_us: float
    rows: np.ndarray  # of the events


def total_of(shapes: list[FarShape]) -> Total:
    return Total(
        us=sum(shape.us for shape in shapes),
        at_roof_us=sum(shape.at_roof_us for shape in shapes),
        likely_us=sum(shape.likely_us for shape in shapes),
        best_us=sum(shape.best_us for shape in shapes),
        rows=np.concatenate([shape.rows for shape in shapes]),
    )


def far_shapes(evidence: Evidence, classes: list[str], realistic_share: float) -> list[FarShape]:
    """The shapes of these classes of operators that would be faster at this share of their roof."""
    events = evidence.events
    is_known = events["class"].isin(classes).to_numpy() & (events["signature"] >= 0).to_numpy()
    # Of these, other proposals tell.
    is_known = is_known & ~evidence.kernels(LAYOUT) & ~evidence.kernels(MISALIGNED)
    if not is_known.any():
        return []
    groups = events[is_known].groupby(["code", "signature", "class"], observed=True)
    far = []
    for (code, signature, kind), rows in groups:
        shape = timed_at_roof(evidence, code, signature, kind, rows, realistic_share)
        if shape is not None and shape.likely_us < shape.us:
            far.append(shape)
    return far


def timed_at_roof(
    evidence: Evidence,
    code: int,
    signature: int,
    kind: str,
    rows: pd.DataFrame,
    realistic_share: float,
) -> FarShape | None:
    """How long these events of one operator and shape take, and would at their roof; None: no peak
    is known, or not their FLOPs."""
    trace, roofs = evidence.timeline.trace, evidence.timeline.context.roofs
    shapes, types, _ = trace.signatures[signature]
    peak = roofs.peak(factor_type(shapes, types))[1]
    us, flops, moved = (float(rows[name].sum()) for name in ("us", "flops", "bytes"))
    if not (peak and flops and roofs.bandwidth):
        return None
    roof = nearer_roof(flops, moved, peak.rate, roofs.bandwidth[0].rate)
    at_roof_us = 1e6 * roof.least_time
    likely_us = at_roof_us / realistic_share
    if evidence.timeline.on_gpu:
        likely_us = max(likely_us, SHORTEST_US * rows["launches"].sum())
    best_us = 0.0
    # What was measured is no limit, and Winograd's convolution multiplies less.
    if peak.kind != "measured" and kind != CONVOLUTION:
        best_us = min(likely_us, 1e6 * flops / peak.rate)
    name = trace.operators["name"].cat.categories[code]
    return FarShape(
        kind=kind,
        name=f"{name} {shapes_text(shapes)}",
        us=us,
        at_roof_us=at_roof_us,
        likely_us=likely_us,
        best_us=best_us,
        peak=peak.origin,
        rows=rows.index,
        longest=rows["us"].idxmax(),
    )


def counters(timeline: Timeline, event: int | None = None) -> str | Unknown | None:
    """The command that reads the counters of a kernel, which tell why it is slow; for who runs a
    program of their own, and of a kernel alone: those profilers repeat a kernel, which for a
    collective waits for ranks that never come, and know no copies.

    event: of the GPU, by default one of those that take longest together; none without a GPU."""
    if not timeline.on_gpu:
        return None
    run = TracedRun(timeline.context.summary)
    if run.reader != Reader.OWN_PROGRAM:
        return Unknown(f"for a program of one's own; who reads this {run.reader.value}")
    gpu = timeline.gpu if event is None else timeline.gpu.iloc[[event]]
    of_runtime = by_name(gpu["name"], lambda name: bool(re.search(OF_RUNTIME, name)), bool)
    is_kernel = (gpu["kind"] == "kernel") & (gpu["category"] != "communication")
    kernels = gpu[is_kernel.to_numpy() & ~of_runtime]
    if kernels.empty:
        return Unknown("no kernel of the program's own takes that time")
    us = (kernels["end"] - kernels["start"]).groupby(kernels["name"].astype(str)).sum()
    name = re.split(r"[<(]", us.idxmax().removeprefix("void "))[0][:KERNEL_NAME]
    command = run.command or "python3 YOUR_SCRIPT"
    if timeline.context.device.get("arch", "").startswith("gfx"):
        return f"rocprof-compute profile -n kernel -k '{name}' -- {command}"
    return f"ncu --set full --kernel-name-base demangled --kernel-name regex:'{name}' {command}"


# ---- In another form -----------------------------------------------------------------------------


def aligned_matmuls(evidence: Evidence) -> Found:
    """Kernels for matmuls with a dimension that is no multiple of 8, which load two or four bytes
    at a time."""
    mask = evidence.kernels(MISALIGNED)
    if not mask.any():
        return None
    rows, us = evidence.part(mask)
    flops, roofs = rows["flops"].sum(), evidence.compute_roofs
    rate = evidence.best_rate("flops", ~mask)  # per us
    if rate is None and roofs:
        rate = roofs[0].rate / 1e6 * CLASS_OF_NAME[MATMUL].realistic_share
    likely_us = min(us, flops / rate) if rate and flops else None
    best_us, bound = at_roof(flops, roofs, "GFLOP/s", us if likely_us is None else likely_us)
    basis = f"at most: {bound}"
    if likely_us is not None:
        basis += f"; estimate: at {rate / 1e6:,.0f} TFLOP/s, which aligned matmuls reach"
    finding = f"Matmuls of unaligned dimensions take {evidence.share(us)} of the step"
    if flops and us:
        finding += f" at {flops / us / 1e6:,.0f} TFLOP/s"
    return Proposal(
        name="aligned matmuls",
        finding=finding,
        how="pad the dimension that is no multiple of 8 to one: vocabulary, hidden width, classes",
        us=us,
        basis=basis,
        best_us=best_us,
        likely_us=likely_us,
        evidence=evidence.described(rows),
        shown=mask,
        of_events=mask,
    )


def one_layout(evidence: Evidence) -> Found:
    """Kernels that change the layout of images before and after convolutions."""
    mask = evidence.kernels(LAYOUT)
    if not mask.any():
        return None
    share = evidence.share(evidence.part(mask)[1])
    return evidence.proposal(
        name="channels-last layout",
        finding=(
            f"Changing tensors between channels-first and channels-last takes {share} of the step"
        ),
        how="model and inputs in channels-last, and no .contiguous() that changes them back",
        mask=mask,
        basis="its time could vanish, and waits for launches with it; estimate: its own",
        likely_us=0.0,
        filled={"line": CHANGES["channels-last"].line()},
    )
