"""Which changes of the program as a whole does the trace suggest: of its optimizer, its precision,
its compilation and what it keeps in memory?"""

import os
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.advice.evidence import Evidence
from analysis.advice.proposals import WORTH_LISTING, Found, NotApplicable, Proposal, at_roof
from analysis.attribution import regions
from analysis.hardware.datasheets import Datasheet
from analysis.hardware.matching import datasheet
from analysis.limits.peaks import kernel_precision, ran_here
from analysis.trace.tables import by_name, has_role, take_or
from analysis.vocabulary import roles
from analysis.vocabulary.kernel_classes import FUSABLE_CLASSES, MATMUL_CLASSES
from analysis.vocabulary.operators import is_of_pytorch
from analysis.vocabulary.words import Reader
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

# In names of what a fused update replaces.
UPDATES = "addcdiv|addcmul|lerp|sqrt|foreach_mul|multi_tensor"
GROWS = 0.5  # of its peak: memory that grows by less within the steps is not that of activations


# ---- The optimizer -------------------------------------------------------------------------------


class Update(NamedTuple):
    """What would remain of the optimizer's step."""

    likely_us: float
    best_us: float
    basis: str


def fused_optimizer(evidence: Evidence) -> Found:
    """The part of the optimizer step that is not fused yet."""
    if not evidence.trains:
        return None
    is_update = updates(evidence)
    is_fused = is_update & evidence.runs(roles.FUSED_UPDATE)
    done = ""
    mask = is_update & ~is_fused
    if is_fused.any():
        done = "already fused"
        # Else steps that are counted and gradients that are cleared would be what is left to fuse.
        names = evidence.events["name"].astype(str)
        mask = mask & names.str.contains(UPDATES, regex=True).to_numpy(bool)
    if not mask.any():
        return NotApplicable("fused optimizer", done) if done else None
    rows, us = evidence.part(mask)
    optimizer, share = optimizer_of(evidence), evidence.share(us)
    finding = f"The optimizer takes {share} of the step"
    if done:
        finding = f"The part of the optimizer that is not fused takes {share} of the step"
    update = None if done else moved_at_most(evidence, optimizer, us)
    if update is None:
        two_longest = rows.groupby("name", observed=True)["us"].sum().nlargest(2)
        update = Update(
            likely_us=min(us, float(two_longest.sum())),
            best_us=0.0,
            basis="its time could vanish; estimate: as long as its two longest operators",
        )
    is_foreach = evidence.part(mask & evidence.runs(roles.FOREACH))[1] > us / 2
    is_compiled = evidence.part(mask & evidence.compiled)[1] > us / 2
    how, line = how_to_fuse(optimizer, is_foreach, is_compiled)
    return evidence.proposal(
        name="fused optimizer",
        finding=finding,
        how=how,
        mask=mask,
        basis=update.basis,
        best_us=update.best_us,
        likely_us=update.likely_us,
        filled={"line": line},
        done=done,
    )


def updates(evidence: Evidence) -> np.ndarray:
    """[events], which are the optimizer's.  What multiplies or communicates too, as Muon does, does
    not become less."""
    timeline, events = evidence.timeline, evidence.events
    table = timeline.gpu if timeline.on_gpu else timeline.host
    multiplies = table["named_category"].isin(MATMUL_CLASSES).to_numpy()
    in_step = (events["phase"] == "optimizer") & (events["category"] != "communication")
    return in_step.to_numpy() & ~take_or(multiplies, events.index.to_numpy(), False)


def moved_at_most(evidence: Evidence, optimizer: str | None, us: float) -> Update | None:
    """By what Adam must move at least, of weights, gradients and moments; None: not known."""
    summary, bytes_per_us = evidence.run.summary, evidence.best_bytes_per_us
    if optimizer not in ("Adam", "AdamW") or summary is None or bytes_per_us is None:
        return None
    moved = adam_bytes(summary)
    if not moved:
        return None
    likely_us = min(us, moved * evidence.steps / bytes_per_us)
    best_us, bound = at_roof(moved * evidence.steps, evidence.bandwidth_roofs, "GB/s", likely_us)
    if moved < IN_A_CACHE:
        best_us, bound = 0.0, "its time could vanish, since a cache may hold them"
    basis = (
        f"{optimizer} must read weights, gradients, two moments and write all but gradients,"
        f" {moved / MB:,.0f} MB; at most: {bound}; estimate: at {bytes_per_us / 1e3:.1f} GB/s, the"
        " highest rate of any operator in this trace"
    )
    return Update(likely_us, best_us, basis)


def how_to_fuse(optimizer: str | None, is_foreach: bool, is_compiled: bool) -> tuple[str, str]:
    """In words, and as a line of code."""
    if optimizer in WITH_FUSED:
        line = f"torch.optim.{optimizer}(..., fused=True)"
        if not is_foreach:
            line += ", or foreach=True"
        return line, line
    if optimizer in WITH_FOREACH and not is_foreach:
        line = f"torch.optim.{optimizer}(..., foreach=True)"
        return line, line
    if is_compiled:
        line = "a fused version of its step: one kernel for many tensors"
        return line, line
    return "a compiled or fused version of its step", "torch.compile(optimizer.step)"


def optimizer_of(evidence: Evidence) -> str | None:
    """The class of the optimizer whose steps take longest; None: no range names one."""
    host = evidence.timeline.host
    steps = host[has_role(host, roles.OPTIMIZER_STEP)].dropna(subset="about")
    us = (steps["end"] - steps["start"]).groupby(steps["about"].astype(str)).sum()
    return us.idxmax() if len(us) else None


# ---- The precision of matmuls --------------------------------------------------------------------


class NarrowType(NamedTuple):
    """bf16, or fp16 where there is no bf16, beside what matmuls are computed in now."""

    name: str
    gain: float | None  # times as fast its matmuls are; None: not known
    peak_flops: float | None  # per second, of its matmuls; None: not known
    basis: str


def mixed_precision(evidence: Evidence) -> Found:
    """Of the matmuls that are still in fp32, where it can help: on a GPU by its datasheet; on a CPU
    by a small matmul, timed if this machine ran it."""
    events = evidence.events
    types = types_of_factors(evidence)
    multiplies = events["class"].isin(MATMUL_CLASSES).to_numpy() & (types == "float")
    rows, us = evidence.part(multiplies)
    if rows.empty:
        return NotApplicable("mixed precision", "no matmul in the trace is known to be in fp32")
    now = wide_precision(evidence, multiplies)
    narrow = narrow_type(evidence, now)
    if narrow.gain is None and not evidence.timeline.on_gpu:
        return NotApplicable("mixed precision", f"not known whether it helps: {narrow.basis}")
    if narrow.gain is not None and narrow.gain < 1 + WORTH_LISTING:
        return NotApplicable("mixed precision", narrow.basis)
    # What is between matmuls moves half the bytes; attention that is written out may become a fused
    # kernel.
    is_other = ~events["class"].isin(("communication", *MATMUL_CLASSES)).to_numpy()
    is_narrow = np.isin(types.astype(str), NARROW_TYPES)
    between = evidence.of_model & is_other & (events["launches"] > 0).to_numpy() & ~is_narrow
    in_attention = (events["region"] == regions.ATTENTION).to_numpy()
    beside_us = evidence.part(between)[1]
    vanishing_us = evidence.part(between & in_attention)[1]
    faster_us = us / narrow.gain if narrow.gain else None
    best_us = 0.0
    if narrow.peak_flops:
        best_us = rows["flops"].sum() / narrow.peak_flops * 1e6
        best_us = min(us if faster_us is None else faster_us, best_us)
    line = CHANGES["bf16"].line().replace("bfloat16", TORCH_NAME[narrow.name])
    return Proposal(
        name="mixed precision",
        finding=f"Matmuls in {now} take {evidence.share(us)} of the step",
        how=f"torch.autocast in {narrow.name} around the forward pass",
        us=us + beside_us,
        basis=f"{narrow.basis}; what is between them could move half the bytes",
        best_us=best_us + (beside_us - vanishing_us) / 2,
        likely_us=None if faster_us is None else faster_us + beside_us,
        filled={"line": line},
        evidence=(
            f"{evidence.described(rows)}, matmuls in fp32, and {evidence.share(beside_us)} between"
            " them"
        ),
        other_flag=f"--precision {narrow.name}",
        shown=multiplies,
        of_events=multiplies,
    )


def types_of_factors(evidence: Evidence) -> np.ndarray:
    """[events], what each multiplies, as torch names it; None: not recorded."""
    signatures = evidence.timeline.trace.signatures
    types = np.array([factor_type(shapes, kinds) for shapes, kinds, _ in signatures], object)
    return take_or(types, evidence.events["signature"].to_numpy(), None)


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


CAN_VANISH = "at most: the time of matmuls could vanish"


def narrow_type(evidence: Evidence, now: str) -> NarrowType:
    """now: the precision of the matmuls."""
    context = evidence.timeline.context
    matched = datasheet(context.device)
    if matched:
        return narrow_type_of_datasheet(*matched, now)
    if ran_here(context.summary) and context.device["type"] == "cpu":
        from analysis.hardware import cache  # PyTorch takes seconds to import

        timed = cache.measured(context.device, "bf16", "gain")
        if timed:
            basis = f"bf16 is {timed.rate:.2g} times as fast as fp32 on this CPU: {timed.source}"
            if timed.rate >= 1:
                basis = f"{CAN_VANISH}; estimate: {basis}"
            return NarrowType("bf16", timed.rate, None, basis)
    basis = f"{CAN_VANISH}; no datasheet gives the speedup, and a CPU may be slower in bf16"
    return NarrowType("bf16", None, None, basis)


def narrow_type_of_datasheet(row: Datasheet, part: float, now: str) -> NarrowType:
    """part: of the datasheet's device, that this one is."""
    narrow = "bf16" if row.bf16 else "fp16"
    rate_now, rate = getattr(row, now), getattr(row, narrow)  # TFLOP/s
    bound, peak_flops = CAN_VANISH, None
    if rate:
        bound = f"at most: its FLOPs at {rate:,.4g} TFLOP/s"
        peak_flops = 1e12 * part * rate
    if not rate or not rate_now:
        basis = f"{bound}; no estimate: the datasheet of {row.name} has no {now}"
        return NarrowType(narrow, None, peak_flops, basis)
    gain = rate / rate_now
    basis = (
        f"{bound}; estimate: {narrow} is {gain:.1f} times as fast as {now} by the datasheet of"
        f" {row.name}"
    )
    return NarrowType(narrow, gain, peak_flops, basis)


# ---- Compilation ---------------------------------------------------------------------------------

# Share of the work between matmuls: so much uncompiled tells that the model is compiled as it
# should be.
LITTLE_LEFT = 0.1


def compilation(evidence: Evidence) -> Found:
    """What the compiler could fuse of the operators that it did not compile yet."""
    inside = evidence.of_model & ~evidence.compiled
    can_fuse = fusable(evidence, inside)
    rows, us = evidence.part(can_fuse)
    is_compiled = evidence.compiled.any()
    if is_compiled and us < LITTLE_LEFT * (us + compiled_us(evidence)):
        return NotApplicable("compile", "already compiled")
    affected = affected_by_compiler(evidence, inside)
    affected_us, waits_us = evidence.part(affected)[1], evidence.waits_for(inside)
    does_not_launch = (evidence.events["launches"] == 0).to_numpy()
    overhead_us = waits_us + evidence.part(affected & does_not_launch)[1]
    saved_us, fewer = in_chains(evidence, can_fuse, inside)
    beside = "wait for launches" if evidence.timeline.on_gpu else "overhead between operators"
    operators, model, done = "Operators", "the model", ""
    line = CHANGES["compile"].line()
    if is_compiled:
        operators, model = "Outside of what is compiled, operators", "the rest of the model too"
        line = "torch.compile() of the parts of the model that no compiled region contains"
        done = "already compiled"
    finding = (
        f"{operators} between matmuls take {evidence.share(us)} of the step, each a kernel of its"
        " own"
    )
    if overhead_us > us:
        finding += f", and {evidence.share(overhead_us)} {beside}"
    return Proposal(
        name="compile",
        finding=finding,
        how=f"compile {model}: chains of element-wise operators become one kernel each",
        us=affected_us + waits_us,
        basis=(
            "all work between matmuls could be fused into them, and all overhead vanish; estimate:"
            f" each chain takes as long as its longest operator, and the overhead of {fewer:.0%} of"
            " the operators vanishes"
        ),
        likely_us=affected_us + waits_us - saved_us - overhead_us * fewer,
        filled={"line": line},
        evidence=(
            f"{evidence.described(rows)}, none of them a matmul, and"
            f" {evidence.share(overhead_us)} {beside}"
        ),
        shown=can_fuse,
        done=done,
    )


def fusable(evidence: Evidence, inside: np.ndarray) -> np.ndarray:
    """Which of these events the compiler can fuse."""
    events = evidence.events
    can_fuse = events["category"].isin(FUSABLE_CLASSES).to_numpy()
    can_fuse = inside & can_fuse & ~evidence.of_copies(*roles.HOST_COPIES)
    if not evidence.timeline.on_gpu:
        return can_fuse
    # The kernels of others, as inference engines call them, are what they are.
    known = [name for name in events["name"].cat.categories if is_of_pytorch(name)]
    of_pytorch = events["name"].isin(known).to_numpy() | evidence.kernels("at::native")
    return can_fuse & of_pytorch


def compiled_us(evidence: Evidence) -> float:
    """What compiled kernels take of the model that are no matmuls."""
    of_others = evidence.events["class"].isin((*MATMUL_CLASSES, "communication")).to_numpy()
    return evidence.part(evidence.of_model & evidence.compiled & ~of_others)[1]


def affected_by_compiler(evidence: Evidence, inside: np.ndarray) -> np.ndarray:
    """Which of these events are no matmul or communication.  Attention that is written out is a
    pattern that the compiler knows."""
    events = evidence.events
    multiplies = events["class"].isin(MATMUL_CLASSES) & (events["region"] != regions.ATTENTION)
    of_others = (multiplies | (events["class"] == "communication")).to_numpy()
    return inside & ~of_others & ~evidence.of_copies(*roles.HOST_COPIES)


def in_chains(evidence: Evidence, can_fuse: np.ndarray, inside: np.ndarray) -> tuple[float, float]:
    """What chains of fusable operators take beyond the longest operator of each, in us, and the
    share of operators that become part of another."""
    events = evidence.events
    table = evidence.timeline.gpu if evidence.timeline.on_gpu else evidence.timeline.host
    rows = np.flatnonzero(inside & (events["launches"] > 0).to_numpy() & (events.index >= 0))
    rows = rows[np.argsort(table["start"].to_numpy()[events.index[rows]], kind="stable")]
    fuses = can_fuse[rows]
    phase = pd.factorize(events["phase"].to_numpy(object)[rows])[0]
    # A chain ends at what cannot be fused, and with its phase.
    chain = np.cumsum(~fuses | (np.diff(phase, prepend=-1) != 0))[fuses]
    times = events["us"].iloc[rows[fuses]].groupby(chain)
    saved_us = float((times.sum() - times.max()).sum())
    return saved_us, (fuses.sum() - times.ngroups) / max(1, len(rows))


# ---- Memory --------------------------------------------------------------------------------------


def checkpointing(evidence: Evidence) -> Found:
    """Saves memory and costs time.  Listed if the trace recorded memory that grows and shrinks
    within a step, by a part of the device's memory that is worth the time."""
    us = evidence.part(evidence.events["phase"] == "forward")[1]
    grown = growth_within_steps(evidence)
    if not us or not evidence.trains or grown is None:
        return None
    # Our sizes stand for larger ones, and the optimization study compares what it costs with what
    # was measured.
    if evidence.run.reader != Reader.OUR_MODEL:
        device_bytes = memory_of_device(evidence)
        if device_bytes and grown < WORTH_LISTING * device_bytes:
            return NotApplicable(
                "activation checkpointing",
                f"it saves at most {grown / MB:,.0f} MB, {grown / device_bytes:.1%} of the memory"
                " there is",
            )
    return Proposal(
        name="activation checkpointing",
        finding=f"Memory grows by {grown / MB:,.0f} MB within a step",
        how="torch.utils.checkpoint around each block: saves memory, costs time",
        us=us,
        basis=(
            f"the forward pass, {us / evidence.total_us:.1%} of the step, runs twice; at most that"
            " much memory is saved"
        ),
        filled={"line": CHANGES["checkpoint"].line()},
        memory_mb=float(grown / MB),
    )


def growth_within_steps(evidence: Evidence) -> float | None:
    """By how many bytes memory grows within the steps; None: by little, or it was not recorded."""
    memory, steps = evidence.timeline.trace.memory, evidence.timeline.steps
    if memory["on_gpu"].any():
        memory = memory[memory["on_gpu"]]
    is_inside = (memory["start"] >= steps["start"].min()) & (memory["start"] < steps["end"].max())
    total = memory["total"][is_inside]
    if total.empty:
        return None
    grown = total.max() - total.min()
    return grown if grown >= max(MB, GROWS * total.max()) else None


def memory_of_device(evidence: Evidence) -> int | None:
    """In bytes: that of the GPU, or of the machine that trained without one; None: not known."""
    context = evidence.timeline.context
    if evidence.timeline.on_gpu:
        if context.device.get("memory_bytes"):
            return context.device["memory_bytes"]
        matched = datasheet(context.device)
        return matched[0].memory_mb * MB if matched else None
    if not ran_here(context.summary):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
