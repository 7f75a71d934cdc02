"""Which kernels are far from what the device can do; what would they take at a realistic rate?"""

import re

import numpy as np

from analysis.advice.evidence import Evidence, Found, Proposal, at_roof
from analysis.advice.who_reads import Reader, command_of, who_reads
from analysis.attribution.operators import shapes_text
from analysis.trace.tables import by_name
from analysis.trace.timeline import Timeline
from analysis.vocabulary.kernel_classes import CLASS_OF_NAME
from analysis.vocabulary.kernels import MISALIGNED
from analysis.work.operator_costs import factor_type
from harness.model.changes import CHANGES

FORECAST = (
    10.0  # times as fast: what should become faster by more has another reason than its kernel
)
OF_RUNTIME = "^__amd_rocclr_"  # kernels by which the runtime copies and fills memory
KERNEL_NAME = 60  # letters by which profilers find a kernel: mangled names have thousands
SHORTEST_US = 5.0  # of a kernel that does something, with its first and last blocks
LAYOUT = r"(?i)nchwToNhwc|nhwcToNchw|nchw2nhwc|nhwc2nchw|batched_transpose_|transpose_(NCHW|CNHW)2"


def better_kernels(what: str, evidence: Evidence) -> Found:
    """Matmuls or attention whose shapes say that they are far below the nearer of the two roofs."""
    events, trace = evidence.events, evidence.timeline.trace
    classes = ("attention",) if what == "attention" else ("matmul", "convolution")
    realistic_share = CLASS_OF_NAME[what].realistic_share
    known = events["class"].isin(classes).to_numpy() & (events["signature"] >= 0).to_numpy()
    known &= ~evidence.kernels(LAYOUT) & ~evidence.kernels(MISALIGNED)
    roofs = evidence.timeline.context.roofs
    of_events = np.zeros(len(events), bool)
    far = []  # us, at its roof, likely, at best, name and shapes, a row of the events, peak, class
    for (code, signature, kind), rows in events[known].groupby(
        ["code", "signature", "class"], observed=True
    ):
        shapes, types, _ = trace.signatures[signature]
        peak = roofs.peak(factor_type(shapes, types))[1]
        us, flops, moved = (float(rows[one].sum()) for one in ("us", "flops", "bytes"))
        if not (peak and flops and roofs.bandwidth):
            continue
        # What was measured is no limit, and Winograd's convolution multiplies less.
        needed = 0.0 if peak.kind == "measured" or kind == "convolution" else 1.0
        roof_us = 1e6 * max(flops / peak.rate, moved / roofs.bandwidth[0].rate)
        likely = max(
            roof_us / realistic_share,
            SHORTEST_US * rows["launches"].sum() * evidence.timeline.on_gpu,
        )
        if likely < us:
            name = f"{trace.operators['name'].cat.categories[code]} {shapes_text(shapes)}"
            best = min(likely, 1e6 * needed * flops / peak.rate)
            of_events |= events.index.isin(rows.index)
            far.append((us, roof_us, likely, best, name, rows["us"].idxmax(), peak.origin, kind))
    if not far:
        return None
    us, roof_us, likely, best = (sum(one[i] for one in far) for i in range(4))
    worst = max(far, key=lambda one: one[0] - one[2])
    rate = f"{100 * roof_us / us:.2g}% of the nearer roof"
    text = f"{evidence.share(us)} of the step at {rate}; most is lost in {worst[4]}"
    basis = (
        f"at most: the FLOPs that they need, at the peak {worst[6]}"
        if best
        else "at most: its time could vanish"
    )
    if us > FORECAST * likely:
        likely = None
        basis += (
            "; no estimate: from so far below its roof a kernel that runs otherwise is no forecast"
        )
    else:
        basis += (
            f"; estimate: at {realistic_share:.0%} of the nearer roof, which good kernels reach"
        )
    how = (
        "wider, padded dimensions, a larger batch, or kernels chosen by timing:"
        " torch.compile(mode='max-autotune')"
    )
    kinds = {one[-1] for one in far}
    who = " and ".join(CLASS_OF_NAME[name].plural for name in classes if name in kinds)
    who = who.capitalize()
    if what == "attention":
        how = (
            "another fused kernel of attention, longer sequences or more heads per call, a head"
            " width of 64 or 128"
        )
    finding = (
        f"{who} run{'s' * (what == 'attention')} at {rate} for {evidence.share(us)} of the step"
    )
    command = counters(evidence.timeline, worst[5])["counters"]
    if command is None:
        command = (
            "perf stat -e cycles,instructions,cache-misses, of a program with this shape alone"
        )
    what = "convolution" if kinds == {"convolution"} else what
    name, shown = f"better {what} kernels", events.index == worst[5]
    filled = {"counters": command}
    return Proposal(
        name, finding, how, us, basis, best, likely, filled, text, shown=shown, of_events=of_events
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
        roofs[0].rate / 1e6 * CLASS_OF_NAME["matmul"].realistic_share if roofs else None
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
