"""Which changes to the optimizer, the precision, the compiler and what is kept in memory does the trace suggest?"""

import numpy as np
import pandas as pd

from analysis.advice.evidence import WORTH_LISTING, Evidence, Found, NotApplicable, Proposal, at_roof, row_of
from analysis.attribution import regions
from analysis.hardware.matching import datasheet
from analysis.limits.peaks import device_of, precision_of, ran_here
from analysis.trace.tables import has_role, take_or
from analysis.vocabulary import roles
from analysis.vocabulary.operators import MATMUL_CLASSES, is_of_pytorch
from analysis.work.operator_costs import factor_type
from analysis.work.update_bytes import adam_bytes
from harness.base.command_line import compiler_problem
from harness.base.units import MB
from harness.model.changes import CHANGES

IN_A_CACHE = 512 * MB  # what is smaller may be read faster than memory can be
TORCH_NAME = {"bf16": "bfloat16", "fp16": "float16"}
WITH_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")  # of torch.optim


def fused_optimizer(evidence: Evidence) -> Found:
    if not evidence.trains:
        return None
    events, table = evidence.events, evidence.links.gpu if evidence.links.on_gpu else evidence.links.host
    # What multiplies or communicates too, as Muon does, does not become less.
    multiplies = take_or(table["named_category"].isin(MATMUL_CLASSES).to_numpy(), events.index.to_numpy(), False)
    updates = (events["phase"] == "optimizer") & (events["category"] != "communication")
    mask = (updates & ~multiplies).to_numpy()
    rows, us = evidence.part(mask)
    if evidence.runs(rows, roles.FUSED_UPDATE):
        return NotApplicable("fused optimizer", "already fused")
    host = evidence.links.host
    classes = host["about"][has_role(host, roles.OPTIMIZER_STEP)].dropna()
    optimizer = classes.iloc[0] if len(classes) else "optimizer"
    moved = adam_bytes(evidence.summary) if evidence.summary and optimizer in ("Adam", "AdamW") else None
    if moved and evidence.best_bytes_per_us:
        likely = min(us, moved * evidence.steps / evidence.best_bytes_per_us)
        best, bound = at_roof(moved * evidence.steps, evidence.bandwidth_roofs, "GB/s", likely)
        if moved < IN_A_CACHE:
            best, bound = 0.0, "its time could vanish, since a cache may hold them"
        basis = (
            f"{optimizer} must read weights, gradients, two moments and write all but gradients, {moved / MB:,.0f} MB; "
            f"at most: {bound}; estimate: at {evidence.best_bytes_per_us / 1e3:.1f} GB/s, the highest rate of any "
            "operator in this trace"
        )
    else:
        best, basis = 0.0, "its time could vanish; estimate: as long as its two longest operators"
        likely = min(us, float(rows.groupby("name", observed=True)["us"].sum().nlargest(2).sum()))
    how = f"a {'compiled or ' * (not evidence.links.trace.is_compiled)}fused version of its step"
    how = CHANGES["fused"].line(optimizer) if optimizer in WITH_FUSED else how
    if optimizer != "optimizer" and not evidence.runs(rows, roles.FOREACH):
        how += ", or foreach=True"
    finding = f"The optimizer takes {evidence.share(us)} of the step"
    return evidence.proposal("fused optimizer", finding, how, mask, basis, best, likely)


def mixed_precision(evidence: Evidence) -> Found:
    """Where it can help: on a GPU by its datasheet; on a CPU by a small matmul, timed if this machine ran it."""
    name, events, trace = "mixed precision", evidence.events, evidence.links.trace
    full = [factor_type(shapes, kinds) == "float" for shapes, kinds, _ in trace.signatures]
    in_fp32 = take_or(np.array(full, bool), events["signature"].to_numpy(), False)
    multiplies = (events["class"].isin(MATMUL_CLASSES) & in_fp32).to_numpy()
    rows, us = evidence.part(multiplies)
    if rows.empty:
        return NotApplicable(name, "no matmul in the trace is known to be in fp32")
    narrow, gain, roof, basis = gain_of_narrow_type(evidence)
    if gain is None and not evidence.links.on_gpu:
        return NotApplicable(name, f"not known whether it helps: {basis}")
    if gain is not None and gain < 1 + WORTH_LISTING:
        return NotApplicable(name, basis)
    how = f"torch.autocast in {narrow} around the forward pass"
    # What is between matmuls moves half the bytes; attention that is written out may become a fused kernel.
    between = evidence.of_model & ~events["class"].isin(("communication", *MATMUL_CLASSES)).to_numpy()
    between &= (events["launches"] > 0).to_numpy()
    beside = evidence.part(between)[1]
    whole = evidence.part(between & (events["region"] == regions.ATTENTION).to_numpy())[1]
    likely = us / gain + beside if gain else None
    best = min(us if gain is None else us / gain, rows["flops"].sum() / roof * 1e6) if roof else 0.0
    text = f"{evidence.described(rows)}, matmuls in fp32, and {evidence.share(beside)} between them"
    finding = f"Matmuls in {precision_of(evidence.links, evidence.summary)} take {evidence.share(us)} of the step"
    basis += "; what is between them could move half the bytes"
    best += (beside - whole) / 2
    code = CHANGES["bf16"].line().replace("bfloat16", TORCH_NAME[narrow])
    flag = f"--precision {narrow}"
    return Proposal(name, finding, how, us + beside, basis, best, likely, code, text, flag, multiplies)


def gain_of_narrow_type(evidence: Evidence) -> tuple[str, float | None, float | None, str]:
    """bf16, or fp16 where there is no bf16; how many times as fast its matmuls are; their peak in FLOP/s; the sources.

    None is unknown."""
    device, summary = device_of(evidence.links, evidence.summary), evidence.summary
    vanish = "at most: the time of matmuls could vanish"
    if found := datasheet(device):
        row, now = found[0], precision_of(evidence.links, summary)
        narrow = "bf16" if row.bf16 else "fp16"
        rates = getattr(row, now), getattr(row, narrow)
        roof = 1e12 * found[1] * rates[1] if rates[1] else None
        bound = f"at most: its FLOPs at {rates[1]:,.4g} TFLOP/s" if roof else vanish
        if not all(rates):
            return narrow, None, roof, f"{bound}; no estimate: the datasheet of {row.name} has no {now}"
        gain = rates[1] / rates[0]
        times = f"{narrow} is {gain:.1f} times as fast as {now} by the datasheet of {row.name}"
        return narrow, gain, roof, f"{bound}; estimate: {times}"
    if ran_here(summary) and device["type"] == "cpu":
        from analysis.hardware import cache  # PyTorch takes seconds to import

        if timed := cache.measured(device, "bf16", "gain"):
            times = f"bf16 is {timed.rate:.2g} times as fast as fp32 on this CPU: {timed.source}"
            return "bf16", timed.rate, None, times if timed.rate < 1 else f"{vanish}; estimate: {times}"
    return "bf16", None, None, f"{vanish}; no datasheet gives the speedup, and a CPU may be slower in bf16"


FUSABLE = ("element-wise", "normalization", "reduction", "copy")


def compilation(evidence: Evidence) -> Found:
    if evidence.links.trace.is_compiled:
        return NotApplicable("compile", "already compiled")
    if evidence.links.trace.file.is_1_x:
        return NotApplicable("compile", "it needs PyTorch 2.0, and this trace is of an older one")
    if ran_here(evidence.summary) and (problem := compiler_problem(evidence.links.on_gpu)):
        return NotApplicable("compile", problem)
    events, inside = evidence.events, evidence.of_model
    fusable = inside & events["category"].isin(FUSABLE).to_numpy() & ~evidence.of_copies(*roles.HOST_COPIES)
    if evidence.links.on_gpu:  # the kernels of others, as inference engines call them, are what they are
        known = [*filter(is_of_pytorch, events["name"].cat.categories)]
        fusable &= events["name"].isin(known).to_numpy() | evidence.kernels("at::native")
    rows, us = evidence.part(fusable)
    # Attention that is written out is a pattern that the compiler knows; the overhead is that of all operators.
    multiplies = events["class"].isin(MATMUL_CLASSES) & (events["region"] != regions.ATTENTION)
    whole = inside & ~(multiplies | (events["class"] == "communication")).to_numpy()
    whole &= ~evidence.of_copies(*roles.HOST_COPIES)
    affected, waits = evidence.part(whole)[1], evidence.waits_for(inside)
    overhead = waits + evidence.part(whole & (events["launches"] == 0).to_numpy())[1]
    saved, fewer = in_chains(evidence, fusable, inside)
    beside = "wait for launches" if evidence.links.on_gpu else "overhead between operators"
    text = f"{evidence.described(rows)}, none of them a matmul, and {evidence.share(overhead)} {beside}"
    finding = f"Operators between matmuls take {evidence.share(us)} of the step, each a kernel of its own"
    finding += f", and {evidence.share(overhead)} {beside}" * (overhead > us)
    how = "compile the model: chains of element-wise operators become one kernel each"
    basis = (
        "all work between matmuls could be fused into them, and all overhead vanish; estimate: each chain takes as "
        f"long as its longest operator, and the overhead of {fewer:.0%} of the operators vanishes"
    )
    likely = affected + waits - saved - overhead * fewer
    return Proposal("compile", finding, how, affected + waits, basis, 0.0, likely, evidence=text, shown=fusable)


def in_chains(evidence: Evidence, fusable: np.ndarray, inside: np.ndarray) -> tuple[float, float]:
    """What chains of fusable operators take beyond the longest operator of each, in us, and the share of operators that
    become part of another."""
    table = evidence.links.gpu if evidence.links.on_gpu else evidence.links.host
    rows = np.flatnonzero(inside & (evidence.events["launches"] > 0).to_numpy() & (evidence.events.index >= 0))
    rows = rows[np.argsort(table["start"].to_numpy()[evidence.events.index[rows]], kind="stable")]
    of = fusable[rows]
    phase = pd.factorize(evidence.events["phase"].to_numpy(object)[rows])[0]
    chain = np.cumsum(~of | (np.diff(phase, prepend=-1) != 0))[of]
    times = evidence.events["us"].iloc[rows[of]].groupby(chain)
    return float((times.sum() - times.max()).sum()), (of.sum() - times.ngroups) / max(1, len(rows))


def checkpointing(evidence: Evidence) -> list[dict]:
    """Saves memory and costs time.  Listed if the trace recorded memory that grows and shrinks within a step."""
    memory, steps = evidence.links.trace.memory, evidence.links.steps
    memory = memory[memory["on_gpu"]] if memory["on_gpu"].any() else memory
    inside = memory[(memory["start"] >= steps["start"].min()) & (memory["start"] < steps["end"].max())]
    us = evidence.part(evidence.events["phase"] == "forward")[1]
    forward, grown = us / evidence.total_us, inside["total"].max() - inside["total"].min()
    if not forward or not evidence.trains or not grown >= max(MB, 0.5 * inside["total"].max()):  # NaN without memory
        return []
    basis = f"the forward pass, {forward:.1%} of the step, runs twice; at most that much memory is saved"
    how = "torch.utils.checkpoint around each block: saves memory, costs time"
    finding = f"Memory grows by {grown / MB:,.0f} MB within a step"
    proposal = Proposal("activation checkpointing", finding, how, us, basis)
    changes = {"part_speedup": 0.5, "speedup_bound": 1 / (1 + forward), "memory_bound_mb": float(grown / MB)}
    costs = {"saves_ms": None, "saves_ms_reason": "it costs time, and saves memory"}
    return [row_of(proposal, evidence) | changes | costs]


MAKERS = (fused_optimizer, mixed_precision, compilation)
