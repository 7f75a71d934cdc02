"""Which changes of the program as a whole does the trace suggest: of its optimizer, its precision,
its compilation and what it keeps in memory?"""

import os

import numpy as np
import pandas as pd

from analysis.advice.evidence import (
    WORTH_LISTING,
    Evidence,
    Found,
    NotApplicable,
    Proposal,
    at_roof,
)
from analysis.advice.who_reads import Reader
from analysis.attribution import regions
from analysis.hardware.matching import datasheet
from analysis.limits.peaks import kernel_precision, ran_here
from analysis.trace.tables import by_name, has_role, take_or
from analysis.vocabulary import roles
from analysis.vocabulary.kernel_classes import FUSABLE_CLASSES, MATMUL_CLASSES
from analysis.vocabulary.operators import is_of_pytorch
from analysis.work.operator_costs import factor_type
from analysis.work.update_bytes import adam_bytes
from harness.base.units import MB
from harness.model.changes import CHANGES

IN_A_CACHE = 512 * MB  # what is smaller may be read faster than memory can be
NARROW_TYPES = ("c10::BFloat16", "c10::Half")
TORCH_NAME = {"bf16": "bfloat16", "fp16": "float16"}
# Of torch.optim: what their constructors take.
WITH_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
WITH_FOREACH = (
    *WITH_FUSED,
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
)

UPDATES = (  # in names of what a fused update replaces
    "addcdiv|addcmul|lerp|sqrt|foreach_mul|multi_tensor"
)


def fused_optimizer(evidence: Evidence) -> Found:
    """The part of the optimizer step that is not fused yet."""
    if not evidence.trains:
        return None
    name, events = "fused optimizer", evidence.events
    table = evidence.timeline.gpu if evidence.timeline.on_gpu else evidence.timeline.host
    # What multiplies or communicates too, as Muon does, does not become less.
    multiplies = take_or(
        table["named_category"].isin(MATMUL_CLASSES).to_numpy(), events.index.to_numpy(), False
    )
    updates = (events["phase"] == "optimizer") & (events["category"] != "communication")
    mask = (updates & ~multiplies).to_numpy()
    is_done = mask & evidence.runs(roles.FUSED_UPDATE)
    done = "already fused" if is_done.any() else ""
    mask = mask & ~is_done
    if (
        done
    ):  # else steps that are counted and gradients that are cleared would be what is left to fuse
        mask = mask & events["name"].astype(str).str.contains(UPDATES, regex=True).to_numpy(bool)
    if not mask.any():
        return NotApplicable(name, done) if done else None
    rows, us = evidence.part(mask)
    optimizer, moved = optimizer_of(evidence), None
    if optimizer in ("Adam", "AdamW") and evidence.summary and not done:
        moved = adam_bytes(evidence.summary)
    if moved and evidence.best_bytes_per_us:
        likely = min(us, moved * evidence.steps / evidence.best_bytes_per_us)
        best, bound = at_roof(moved * evidence.steps, evidence.bandwidth_roofs, "GB/s", likely)
        if moved < IN_A_CACHE:
            best, bound = 0.0, "its time could vanish, since a cache may hold them"
        basis = (
            f"{optimizer} must read weights, gradients, two moments and write all but gradients,"
            f" {moved / MB:,.0f} MB; at most: {bound}; estimate: at"
            f" {evidence.best_bytes_per_us / 1e3:.1f} GB/s, the highest rate of any operator in"
            " this trace"
        )
    else:
        best, basis = 0.0, "its time could vanish; estimate: as long as its two longest operators"
        likely = min(us, float(rows.groupby("name", observed=True)["us"].sum().nlargest(2).sum()))
    foreach = evidence.part(mask & evidence.runs(roles.FOREACH))[1] > us / 2
    compiled = evidence.part(mask & evidence.compiled)[1] > us / 2
    how, line = "a compiled or fused version of its step", "torch.compile(optimizer.step)"
    if optimizer in WITH_FUSED:
        how = line = f"torch.optim.{optimizer}(..., fused=True)" + (
            "" if foreach else ", or foreach=True"
        )
    elif optimizer in WITH_FOREACH and not foreach:
        how = line = f"torch.optim.{optimizer}(..., foreach=True)"
    elif compiled:
        how = line = "a fused version of its step: one kernel for many tensors"
    finding = f"The optimizer takes {evidence.share(us)} of the step"
    if done:
        finding = (
            f"The part of the optimizer that is not fused takes {evidence.share(us)} of the step"
        )
    words = {"filled": {"line": line}, "done": done}
    return evidence.proposal(name, finding, how, mask, basis, best, likely, **words)


def optimizer_of(evidence: Evidence) -> str | None:
    """The class of the optimizer whose steps take longest; None: no range names one."""
    host = evidence.timeline.host
    steps = host[has_role(host, roles.OPTIMIZER_STEP)].dropna(subset="about")
    us = (steps["end"] - steps["start"]).groupby(steps["about"].astype(str)).sum()
    return us.idxmax() if len(us) else None


def mixed_precision(evidence: Evidence) -> Found:
    """Of the matmuls that are still in fp32, where it can help: on a GPU by its datasheet; on a CPU
    by a small matmul, timed if this machine ran it."""
    name, events, trace = "mixed precision", evidence.events, evidence.timeline.trace
    types = np.array([factor_type(shapes, kinds) for shapes, kinds, _ in trace.signatures], object)
    types = take_or(types, events["signature"].to_numpy(), None)
    in_fp32, in_narrow = types == "float", np.isin(types.astype(str), NARROW_TYPES)
    multiplies = (events["class"].isin(MATMUL_CLASSES) & in_fp32).to_numpy()
    rows, us = evidence.part(multiplies)
    if rows.empty:
        return NotApplicable(name, "no matmul in the trace is known to be in fp32")
    now = wide_precision(evidence, multiplies)
    narrow, gain, roof, basis = gain_of_narrow_type(evidence, now)
    if gain is None and not evidence.timeline.on_gpu:
        return NotApplicable(name, f"not known whether it helps: {basis}")
    if gain is not None and gain < 1 + WORTH_LISTING:
        return NotApplicable(name, basis)
    how = f"torch.autocast in {narrow} around the forward pass"
    # What is between matmuls moves half the bytes; attention that is written out may become a fused
    # kernel.
    between = (
        evidence.of_model & ~events["class"].isin(("communication", *MATMUL_CLASSES)).to_numpy()
    )
    between &= (events["launches"] > 0).to_numpy() & ~in_narrow
    beside = evidence.part(between)[1]
    whole = evidence.part(between & (events["region"] == regions.ATTENTION).to_numpy())[1]
    likely = us / gain + beside if gain else None
    best = min(us if gain is None else us / gain, rows["flops"].sum() / roof * 1e6) if roof else 0.0
    text = f"{evidence.described(rows)}, matmuls in fp32, and {evidence.share(beside)} between them"
    finding = f"Matmuls in {now} take {evidence.share(us)} of the step"
    basis += "; what is between them could move half the bytes"
    best += (beside - whole) / 2
    filled = {"line": CHANGES["bf16"].line().replace("bfloat16", TORCH_NAME[narrow])}
    flag = f"--precision {narrow}"
    us += beside
    of = {"shown": multiplies, "of_events": multiplies}
    return Proposal(name, finding, how, us, basis, best, likely, filled, text, flag, **of)


def multiplies_tf32(name: str) -> bool:
    return kernel_precision(name) == "tf32"


def wide_precision(evidence: Evidence, multiplies: np.ndarray) -> str:
    """fp32 or tf32: what most of the time of these matmuls,
    whose factors are fp32, is computed in."""
    usual = evidence.timeline.context.precision
    if usual in ("fp32", "tf32"):
        return usual
    in_tf32 = evidence.of_gpu(by_name(evidence.timeline.gpu["name"], multiplies_tf32, bool))
    us, us_tf32 = (evidence.part(which)[1] for which in (multiplies, multiplies & in_tf32))
    return "tf32" if us_tf32 > us / 2 else "fp32"


def gain_of_narrow_type(
    evidence: Evidence, now: str
) -> tuple[str, float | None, float | None, str]:
    """bf16, or fp16 where there is no bf16; how many times as fast its matmuls are as in the
    precision `now`; their peak in FLOP/s; the sources.

    None is unknown."""
    device, summary = evidence.timeline.context.device, evidence.summary
    vanish = "at most: the time of matmuls could vanish"
    if found := datasheet(device):
        row = found[0]
        narrow = "bf16" if row.bf16 else "fp16"
        rates = getattr(row, now), getattr(row, narrow)
        roof = 1e12 * found[1] * rates[1] if rates[1] else None
        bound = f"at most: its FLOPs at {rates[1]:,.4g} TFLOP/s" if roof else vanish
        if not all(rates):
            return (
                narrow,
                None,
                roof,
                f"{bound}; no estimate: the datasheet of {row.name} has no {now}",
            )
        gain = rates[1] / rates[0]
        times = f"{narrow} is {gain:.1f} times as fast as {now} by the datasheet of {row.name}"
        return narrow, gain, roof, f"{bound}; estimate: {times}"
    if ran_here(summary) and device["type"] == "cpu":
        from analysis.hardware import cache  # PyTorch takes seconds to import

        if timed := cache.measured(device, "bf16", "gain"):
            times = f"bf16 is {timed.rate:.2g} times as fast as fp32 on this CPU: {timed.source}"
            return (
                "bf16",
                timed.rate,
                None,
                times if timed.rate < 1 else f"{vanish}; estimate: {times}",
            )
    return (
        "bf16",
        None,
        None,
        f"{vanish}; no datasheet gives the speedup, and a CPU may be slower in bf16",
    )


# Share of the work between matmuls: so much uncompiled tells that the model is compiled as it
# should be
LITTLE_LEFT = 0.1


def compilation(evidence: Evidence) -> Found:
    """What the compiler could fuse of the operators that it did not compile yet."""
    events, inside = evidence.events, evidence.of_model & ~evidence.compiled
    fusable = (
        inside
        & events["category"].isin(FUSABLE_CLASSES).to_numpy()
        & ~evidence.of_copies(*roles.HOST_COPIES)
    )
    if (
        evidence.timeline.on_gpu
    ):  # the kernels of others, as inference engines call them, are what they are
        known = [*filter(is_of_pytorch, events["name"].cat.categories)]
        fusable &= events["name"].isin(known).to_numpy() | evidence.kernels("at::native")
    rows, us = evidence.part(fusable)
    # Attention that is written out is a pattern that the compiler knows; the overhead is that of
    # all operators.
    multiplies = events["class"].isin(MATMUL_CLASSES) & (events["region"] != regions.ATTENTION)
    whole = inside & ~(multiplies | (events["class"] == "communication")).to_numpy()
    whole &= ~evidence.of_copies(*roles.HOST_COPIES)
    affected, waits = evidence.part(whole)[1], evidence.waits_for(inside)
    overhead = waits + evidence.part(whole & (events["launches"] == 0).to_numpy())[1]
    saved, fewer = in_chains(evidence, fusable, inside)
    beside = "wait for launches" if evidence.timeline.on_gpu else "overhead between operators"
    text = (
        f"{evidence.described(rows)}, none of them a matmul, and {evidence.share(overhead)}"
        f" {beside}"
    )
    finding = (
        f"Operators between matmuls take {evidence.share(us)} of the step, each a kernel of its own"
    )
    finding += f", and {evidence.share(overhead)} {beside}" * (overhead > us)
    how, done = "compile the model: chains of element-wise operators become one kernel each", ""
    line = CHANGES["compile"].line()
    if evidence.compiled.any():
        done = "already compiled"
        of_vectors = ~events["class"].isin((*MATMUL_CLASSES, "communication")).to_numpy()
        compiled_us = evidence.part(evidence.of_model & evidence.compiled & of_vectors)[1]
        if us < LITTLE_LEFT * (us + compiled_us):
            return NotApplicable("compile", done)
        finding = f"Outside of what is compiled, o{finding[1:]}"
        how = (
            "compile the rest of the model too: chains of element-wise operators become one kernel"
            " each"
        )
        line = "torch.compile() of the parts of the model that no compiled region contains"
    basis = (
        "all work between matmuls could be fused into them, and all overhead vanish; estimate:"
        f" each chain takes as long as its longest operator, and the overhead of {fewer:.0%} of the"
        " operators vanishes"
    )
    likely = affected + waits - saved - overhead * fewer
    affected += waits
    words = {"filled": {"line": line}, "done": done}
    return Proposal(
        "compile", finding, how, affected, basis, 0.0, likely, evidence=text, shown=fusable, **words
    )


def in_chains(evidence: Evidence, fusable: np.ndarray, inside: np.ndarray) -> tuple[float, float]:
    """What chains of fusable operators take beyond the longest operator of each, in us, and the
    share of operators that become part of another."""
    table = evidence.timeline.gpu if evidence.timeline.on_gpu else evidence.timeline.host
    rows = np.flatnonzero(
        inside & (evidence.events["launches"] > 0).to_numpy() & (evidence.events.index >= 0)
    )
    rows = rows[np.argsort(table["start"].to_numpy()[evidence.events.index[rows]], kind="stable")]
    of = fusable[rows]
    phase = pd.factorize(evidence.events["phase"].to_numpy(object)[rows])[0]
    chain = np.cumsum(~of | (np.diff(phase, prepend=-1) != 0))[of]
    times = evidence.events["us"].iloc[rows[of]].groupby(chain)
    return float((times.sum() - times.max()).sum()), (of.sum() - times.ngroups) / max(1, len(rows))


def checkpointing(evidence: Evidence) -> Found:
    """Saves memory and costs time.  Listed if the trace recorded memory that grows and shrinks
    within a step, by a part of the device's memory that is worth the time."""
    name, memory, steps = (
        "activation checkpointing",
        evidence.timeline.trace.memory,
        evidence.timeline.steps,
    )
    memory = memory[memory["on_gpu"]] if memory["on_gpu"].any() else memory
    inside = memory[
        (memory["start"] >= steps["start"].min()) & (memory["start"] < steps["end"].max())
    ]
    us = evidence.part(evidence.events["phase"] == "forward")[1]
    forward, grown = us / evidence.total_us, inside["total"].max() - inside["total"].min()
    if (
        not forward or not evidence.trains or not grown >= max(MB, 0.5 * inside["total"].max())
    ):  # NaN without memory
        return None
    # Our sizes stand for larger ones, and the optimization study compares what it costs with what
    # was measured.
    device_bytes = None if evidence.reader == Reader.OUR_MODEL else memory_of_device(evidence)
    if device_bytes and grown < WORTH_LISTING * device_bytes:
        saves = (
            f"it saves at most {grown / MB:,.0f} MB, {grown / device_bytes:.1%} of the memory"
            " there is"
        )
        return NotApplicable(name, saves)
    basis = (
        f"the forward pass, {forward:.1%} of the step, runs twice; at most that much memory is"
        " saved"
    )
    how = "torch.utils.checkpoint around each block: saves memory, costs time"
    finding = f"Memory grows by {grown / MB:,.0f} MB within a step"
    filled = {"line": CHANGES["checkpoint"].line()}
    return Proposal(name, finding, how, us, basis, filled=filled, memory_mb=float(grown / MB))


def memory_of_device(evidence: Evidence) -> int | None:
    """In bytes: that of the GPU, or of the machine that trained without one; None: not known."""
    device = evidence.timeline.context.device
    if evidence.timeline.on_gpu:
        row = datasheet(device)
        return device.get("memory_bytes") or (row[0].memory_mb * MB if row else None)
    if not ran_here(evidence.summary):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
