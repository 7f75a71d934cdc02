"""What does this trace suggest trying, and how large could the speedup be at most?

Each proposal names the share p of the step that it affects, and the factor s by which that part could at best become
faster; Amdahl's law, 1 / (1 - p + p / s), gives the bound: `at most`.  It uses the device's roof, or that the part may
vanish.  What is only likely, such as the highest rate that this trace shows, gives an `estimate`.  Neither is a
promise: the gain has to be measured.  What cannot help here is listed separately, with the reason.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.attribution import regions
from analysis.attribution.components import views_and_metadata
from analysis.attribution.ledger import events_of_steps, exposed_communication, idle_by_cause, of_steps, us_by
from analysis.attribution.operators import costs_of_operators
from analysis.diagnosis.verdict import device_of, precision_of, ran_here, roofs_of
from analysis.hardware.ceilings import Ceiling
from analysis.hardware.matching import datasheet
from analysis.trace.links import AttributedLinks, step_around, step_at
from analysis.trace.tables import has_role, take_or, take_or_none
from analysis.vocabulary import roles
from analysis.vocabulary.letters import LETTERS, letter_of
from analysis.vocabulary.operators import MATMUL_CLASSES
from analysis.work.operator_costs import factor_type
from harness.base.command_line import compiler_problem
from harness.base.tables import Column, column, narrow_table, text_of
from harness.base.text import count_of
from harness.base.units import MB
from harness.model.optimizations import ANY_MODEL, answering, flags_in_use

WORTH_LISTING = 0.01  # of the step: what affects or saves less is not proposed
WITH_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")  # of torch.optim


@dataclass
class Proposal:
    name: str
    how: str
    us: float  # time of the steps that it affects
    evidence: str
    basis: str  # where best_us and likely_us come from
    best_us: float = 0.0  # what would remain of `us` at best
    likely_us: float | None = None  # what would probably remain of it, if that is known
    other_flag: str | None = None  # of tiny_llama_v1.py, where it is not that of the optimization that answers the name

    @property
    def saved_us(self) -> float:
        """What it would probably save, else at most."""
        return self.us - (self.best_us if self.likely_us is None else self.likely_us)


@dataclass
class NotApplicable:
    """What cannot win on this device, or in this trace."""

    name: str
    reason: str


Found = Proposal | NotApplicable | None  # None: the trace has nothing of the kind


class Fusion(NamedTuple):
    """Operators of a region that can become fewer."""

    name: str
    kind: str  # of region
    how: str
    how_compiled: str = ""  # instead, where there is no GPU
    left: float | None = None  # of the time, at best; None: that of its matmuls at the highest rate
    basis: str = ""


# fmt: off
FUSIONS = (
    Fusion("fuse q, k and v", regions.QKV, "concatenate the three weights into one matmul, and split its output"),
    Fusion("fuse gate and up", regions.GATE_UP, "concatenate both weights into one matmul, and split its output"),
    Fusion("fused attention", regions.ATTENTION,
           "F.scaled_dot_product_attention: the scores are never written to memory"),
    Fusion("fused SwiGLU", regions.SWIGLU, "one kernel forward and one backward",
           "a compiled activation: one loop forward and one backward",
           8 / 14, "its five operators become two, which move 8 tensors instead of 14"),
    Fusion("fused rotary embedding", regions.ROPE, "halves swapped by one copy, multiplied and added by one kernel", "",
           7 / 9, "its five operators become three, which move 7 tensors instead of 9"),
    Fusion("fused loss", regions.LOSS,
           "loss from a part of the vocabulary at a time: the logits stay in the cache, and are never in memory whole",
           "", 0.0, "its time could vanish; its chunks are computed again in the backward pass, one more matmul"),
)
# fmt: on


class Evidence:
    """The events of the steps, with the FLOPs and bytes of each where they are known."""

    def __init__(self, links: AttributedLinks, summary: dict | None):
        self.links, self.steps, self.summary = links, len(links.steps), summary
        self.config = (summary or {}).get("config", {})
        slices, events = of_steps(links), events_of_steps(links)
        self.total_us = float(slices["us"].sum())
        operators, rows = links.trace.operators, events["operator"].to_numpy()
        names = operators["name"].cat.categories
        codes = take_or(operators["name"].cat.codes, rows, -1)
        inputs = take_or(operators["signature"], rows, -1)
        works = ~views_and_metadata(links, rows)
        costs, which = costs_of_operators(links)
        done = {work: np.array([getattr(one, work) or 0 for one in costs], float) for work in ("flops", "bytes")}
        owners = rows if links.on_gpu else events.index.to_numpy()  # rows of links.host: operators, ranges, modules
        owners = np.where(events["category"] == "communication", -1, owners)  # a hook's, within what it interrupts
        # An operator that launches several kernels does its work once.
        again = pd.Series(rows).duplicated().to_numpy() & (rows >= 0)
        self.events = events.assign(
            code=codes,
            signature=inputs,
            name=pd.Categorical.from_codes(codes, names),
            region=take_or_none(regions.regions(links)["kind"], owners),
            launches=1 if links.on_gpu else works.astype(int),
            **{work: np.where(again, 0.0, take_or(of[which], rows, 0.0)) for work, of in done.items()},
        )
        self.best_flops_per_us, self.best_bytes_per_us = self.best_rate("flops"), self.best_rate("bytes")
        self.compute_roofs, self.bandwidth_roofs = roofs_of(links, summary)
        self.idle = idle_by_cause(slices)  # us by cause; of a host, time without work on tensors
        self.launch_us = self.idle["launch"] + self.idle["latency"]
        self.of_workload_file = "file" in self.config.get("model", {})  # --workload: other settings are in it
        self.of_script = summary is not None and not self.of_workload_file

    def has_flag(self, flag: str | None) -> bool:
        """Whether the run that was traced has this flag."""
        training, name = self.config.get("training", {}), (flag or "").partition(" ")[0].strip("-").replace("-", "_")
        chooses = name == "precision" and training.get("own_step")
        return self.of_script or (self.of_workload_file and name in ANY_MODEL and name in training and not chooses)

    def best_rate(self, work: str) -> float | None:
        """The highest rate that an operator with 1% of the step or more reached, per us, over all its calls."""
        sums = self.events.groupby(["code", "signature"])[["us", work]].sum()
        sums = sums[(sums["us"] >= 0.01 * self.total_us) & (sums[work] > 0)]
        return float((sums[work] / sums["us"]).max()) if len(sums) else None

    def part(self, mask) -> tuple[pd.DataFrame, float]:
        rows = self.events[np.asarray(mask, dtype=bool)]
        return rows, float(rows["us"].sum())

    def region(self, kind: str) -> tuple[pd.DataFrame, float]:
        return self.part(self.events["region"] == kind)

    def is_fused(self, kind: str) -> bool:
        return (self.events["region"] == regions.FUSED[kind]).any()

    def runs(self, rows: pd.DataFrame, role: str) -> bool:
        """Whether one of these events is of an operator with this role."""
        return bool(take_or(has_role(self.links.trace.operators, role), rows["operator"].to_numpy(), False).any())

    def share(self, us: float) -> str:
        return f"{us / self.total_us:.1%}"

    def described(self, rows: pd.DataFrame) -> str:
        number = count_of(round(rows["launches"].sum() / self.steps), "kernel" if self.links.on_gpu else "operator")
        text = f"{self.share(rows['us'].sum())} of the step in {number}"
        moved = rows["bytes"].sum() / self.steps
        return text + (f" that move {moved / MB:,.0f} MB" if moved else "")

    def at_best_rate(self, name: str, how: str, rows: pd.DataFrame) -> Found:
        """The matmuls in these rows, at the highest rate that any matmul of the trace reached."""
        flops, us = rows["flops"].sum(), float(rows["us"].sum())
        if self.best_flops_per_us is None or not flops:
            return NotApplicable(name, "the trace has no shapes of its matmuls")
        rate = f"{self.best_flops_per_us / 1e3:.1f} GFLOP/s, the highest rate of any matmul in this trace"
        likely_us = min(us, flops / self.best_flops_per_us)
        best_us, bound = at_roof(flops, self.compute_roofs, "GFLOP/s", likely_us)
        basis = f"its FLOPs, at most: {bound}; estimate: at {rate}"
        return Proposal(name, how, us, self.described(rows), basis, best_us, likely_us)


def at_roof(work: float, roofs: list[Ceiling], unit: str, likely_us: float) -> tuple[float, str]:
    """The least time in us of the FLOPs or bytes, and why; no more than likely_us, which a cache may have allowed."""
    if not roofs:
        return 0.0, "its time could vanish, since no peak of this device is known"
    return min(likely_us, 1e6 * work / roofs[0].rate), f"at {roofs[0].rate / 1e9:,.1f} {unit}, {roofs[0].label}"


def opportunities(links: AttributedLinks, summary: dict | None) -> dict[str, list[dict]]:
    """`opportunities`: what the trace supports, by estimate, else by bound; `not_here`: what cannot win, and why."""
    evidence = Evidence(links, summary)
    if not evidence.total_us:
        return {"opportunities": [], "not_here": []}
    rows, not_here = [], []
    for one in (make(evidence) for make in MAKERS):
        if one is None:
            continue
        if isinstance(one, NotApplicable):
            not_here.append(asdict(one))
        elif one.saved_us < WORTH_LISTING * evidence.total_us:
            limit = "at most" if one.likely_us is None else "by the highest rate in this trace"
            saved = f"{one.evidence}; {evidence.share(one.saved_us)} could be saved {limit}"
            not_here.append({"name": one.name, "reason": saved})
        else:
            rows.append(row_of(one, evidence))
    rows.sort(key=lambda row: -(row["speedup_estimate"] or row["speedup_bound"] or math.inf))
    return {"opportunities": rows + checkpointing(evidence), "not_here": not_here}


def row_of(proposal: Proposal, evidence: Evidence) -> dict:
    flag = proposal.other_flag or next(iter(answering(proposal.name)), None)
    saved, likely = (proposal.us - proposal.best_us) / evidence.total_us, proposal.saved_us / evidence.total_us
    reason = {}
    if flag and not evidence.has_flag(flag):
        reason = {"flag_reason": f"nothing beside the trace says that its run takes {flag}"}
    return {
        "name": proposal.name,
        "how": proposal.how,
        "evidence": proposal.evidence,
        "share": proposal.us / evidence.total_us,
        "ms_per_step": proposal.us / 1e3 / evidence.steps,
        "part_speedup": proposal.us / proposal.best_us if proposal.best_us > 0 else None,
        "speedup_bound": 1 / (1 - saved) if saved < 1 else None,
        "speedup_estimate": 1 / (1 - likely) if proposal.likely_us is not None and likely < 1 else None,
        "basis": proposal.basis,
        "flag": None if reason else flag,
    } | reason


def fusion(of: Fusion, evidence: Evidence) -> Found:
    rows, us = evidence.region(of.kind)
    in_use = {*answering(of.name)} & {*flags_in_use(evidence.config.get("training", {}))}
    if rows.empty or in_use:
        return NotApplicable(of.name, "already fused") if in_use or evidence.is_fused(of.kind) else None
    how, flag = of.how, None
    if of.how_compiled and not evidence.links.on_gpu:
        how, flag = of.how_compiled, answering("compile")[0]
    names, of_math = evidence.links.trace.operators["name"].unique(), LETTERS["math_attention"]
    if of.kind == regions.ATTENTION and of_math in map(letter_of, names):
        how = "F.scaled_dot_product_attention runs its math kernels: it has fused ones for inputs such as no dropout"
    if of.left is None:
        return evidence.at_best_rate(of.name, how, rows)
    return Proposal(of.name, how, us, evidence.described(rows), of.basis, us * of.left, other_flag=flag)


def fused_norms(evidence: Evidence) -> Found:
    """A fused norm still passes once over its tensor, as the most expensive of its operators does."""
    name, links, found = "fused norm", evidence.links, regions.regions(evidence.links)
    rows, us = evidence.region(regions.NORM)
    if rows.empty:
        return NotApplicable(name, "already fused") if evidence.is_fused(regions.NORM) else None
    in_step = (step_at if links.on_gpu else step_around)(links.host["start"].to_numpy(), links.steps) >= 0
    calls = found["instance"][in_step & (found["kind"] == regions.NORM)].nunique()
    best = 0.0
    for _, phase in rows[rows["launches"] > 0].groupby("phase"):
        best += calls * phase.groupby("name")["us"].mean().max()
    how, flag = "F.rms_norm or a compiled norm: one pass instead of one per operator", None
    if not evidence.links.on_gpu:
        how = "a compiled norm: one pass instead of one per operator, which F.rms_norm has on GPUs"
        flag = answering("compile")[0]
    basis = (
        f"at most: its time could vanish; estimate: {calls / evidence.steps:.0f} norms per step, each as long as "
        "its most expensive operator, forward and backward"
    )
    return Proposal(name, how, us, evidence.described(rows), basis, likely_us=min(us, best), other_flag=flag)


def cuda_graphs(evidence: Evidence) -> Found:
    name = "CUDA graphs"
    if not evidence.links.on_gpu:
        return NotApplicable(name, "there is no GPU")
    if evidence.links.gpu["of_graph"].any():
        return NotApplicable(name, "already replayed")
    us = evidence.launch_us
    text = f"the GPU waits for launches for {evidence.share(us)} of the step"
    how = "one launch each for forward and backward pass; with --compile, --compile-mode reduce-overhead"
    return Proposal(name, how, us, text, "the wait for launches could vanish")


def fused_optimizer(evidence: Evidence) -> Found:
    events, table = evidence.events, evidence.links.gpu if evidence.links.on_gpu else evidence.links.host
    # What multiplies or communicates too, as Muon does, does not become less.
    multiplies = take_or(table["named_category"].isin(MATMUL_CLASSES).to_numpy(), events.index.to_numpy(), False)
    updates = (events["phase"] == "optimizer") & (events["category"] != "communication")
    rows, us = evidence.part(updates & ~multiplies)
    if evidence.runs(rows, roles.FUSED_UPDATE):
        return NotApplicable("fused optimizer", "already fused")
    host = evidence.links.host
    classes = host["about"][has_role(host, roles.OPTIMIZER_STEP)].dropna()
    optimizer = classes.iloc[0] if len(classes) else "optimizer"
    parameters = evidence.config.get("model", {}).get("parameters")
    best, likely, basis = 0.0, None, "its time could vanish"
    if parameters and evidence.best_bytes_per_us and optimizer in ("Adam", "AdamW"):
        moved = 7 * 4 * parameters  # bytes
        likely = min(us, moved * evidence.steps / evidence.best_bytes_per_us)
        best, bound = at_roof(moved * evidence.steps, evidence.bandwidth_roofs, "GB/s", likely)
        basis = (
            f"{optimizer} must read weights, gradients, two moments and write all but gradients, {moved / MB:,.0f} MB; "
            f"at most: {bound}; estimate: at {evidence.best_bytes_per_us / 1e3:.1f} GB/s, the highest rate of any "
            "operator in this trace"
        )
    how = f"a {'compiled or ' * (not evidence.links.trace.is_compiled)}fused version of its step"
    how = f"{optimizer}(..., fused=True)" if optimizer in WITH_FUSED else how
    if optimizer != "optimizer" and not evidence.runs(rows, roles.FOREACH):
        how += ", or foreach=True"
    return Proposal("fused optimizer", how, us, evidence.described(rows), basis, best, likely)


def mixed_precision(evidence: Evidence) -> Found:
    """Where it can help: on a GPU by its datasheet; on a CPU by a small matmul, timed if this machine ran it."""
    name, events, trace = "mixed precision", evidence.events, evidence.links.trace
    full = [factor_type(shapes, kinds) == "float" for shapes, kinds, _ in trace.signatures]
    in_fp32 = take_or(np.array(full, bool), events["signature"].to_numpy(), False)
    rows, us = evidence.part(events["class"].isin(MATMUL_CLASSES) & in_fp32)
    if rows.empty:
        return NotApplicable(name, "no matmul in the trace is known to be in fp32")
    narrow, gain, roof, basis = gain_of_narrow_type(evidence)
    if gain is None and not evidence.links.on_gpu:
        return NotApplicable(name, f"not known whether it helps: {basis}")
    if gain is not None and gain < 1 + WORTH_LISTING:
        return NotApplicable(name, basis)
    how = f"torch.autocast in {narrow} around the forward pass"
    text = evidence.described(rows) + ", matmuls in fp32"
    likely = us / gain if gain else None
    best = min(us if likely is None else likely, rows["flops"].sum() / roof * 1e6) if roof else 0.0
    return Proposal(name, how, us, text, basis, best, likely, f"--precision {narrow}")


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


def compilation(evidence: Evidence) -> Found:
    if evidence.links.trace.is_compiled:
        return NotApplicable("compile", "already compiled")
    if ran_here(evidence.summary) and (problem := compiler_problem(evidence.links.on_gpu)):
        return NotApplicable("compile", problem)
    kinds = ("element-wise", "normalization", "reduction", "copy")
    elsewhere = evidence.events["phase"].isin(("data", "optimizer"))
    rows, us = evidence.part(evidence.events["category"].isin(kinds) & ~elsewhere)
    text = evidence.described(rows) + ", none of them a matmul"
    if evidence.links.on_gpu and len(rows):
        # Fewer kernels are fewer launches to wait for.
        waits = evidence.launch_us * rows["launches"].sum() / evidence.events["launches"].sum()
        us += waits
        text += f", plus their share of the wait for launches, {evidence.share(waits)}"
    how = "torch.compile(model): chains of element-wise operators become one kernel each"
    return Proposal("compile", how, us, text, "all work between matmuls could be fused into them")


def larger_batch(evidence: Evidence) -> Found:
    events = evidence.events
    if evidence.links.on_gpu:
        us = evidence.launch_us
        n = events["launches"].sum() / evidence.steps
        text = f"the GPU waits for launches for {evidence.share(us)} of the step; {n:.0f} GPU events per step"
    else:
        us = evidence.idle["launch"]  # a larger batch would not make host code less
        text = f"{evidence.share(us)} of the step is Python and overhead between operators"
    batch = evidence.config.get("training", {}).get("batch_size")
    flag = batch and f"--batch-size {2 * batch}"
    how = "more work per launch at the same overhead"
    return Proposal("larger batch", how, us, text, "the overhead per sample could vanish", other_flag=flag)


def fewer_synchronizations(evidence: Evidence) -> Found:
    if not evidence.links.on_gpu:
        return NotApplicable("fewer synchronizations", "there is no GPU to synchronize with")
    calls, us = evidence.links.calls, evidence.idle["synchronization"]
    n = (calls["waits"].to_numpy(bool) & (calls["step"] >= 0).to_numpy()).sum() / evidence.steps
    text = f"the GPU is idle for {evidence.share(us)} of the step, behind {n:.1f} synchronizing calls per step"
    how = "no .item(), .cpu() or synchronize() within a step"
    return Proposal("fewer synchronizations", how, us, text, "this idle time could vanish")


def faster_data(evidence: Evidence) -> Found:
    us = float(us_by(of_steps(evidence.links), "cause").get("data", 0.0))
    text = f"fetching data takes {evidence.share(us)} of the step"
    if evidence.links.on_gpu:
        text = f"the GPU is idle for {evidence.share(us)} of the step while the host fetches data"
    return Proposal(
        "prefetch data", "workers and pinned memory in the DataLoader", us, text, "data could always be ready in time"
    )


def hidden_communication(evidence: Evidence) -> Found:
    us = float(exposed_communication(evidence.links)["us"].sum()) + evidence.idle["communication"]
    text = f"{evidence.share(us)} of the step is communication that nothing hides, or idle behind it"
    name, how = "reduce or overlap communication", "fewer, larger collectives, overlapped with the backward pass"
    flag = "--gradient-accumulation-steps 2"
    return Proposal(name, how, us, text, "computation could overlap all of it", other_flag=flag)


MAKERS = (
    *(partial(fusion, one) for one in FUSIONS),
    fused_norms,
    fused_optimizer,
    mixed_precision,
    compilation,
    cuda_graphs,
    larger_batch,
    fewer_synchronizations,
    faster_data,
    hidden_communication,
)


def checkpointing(evidence: Evidence) -> list[dict]:
    """Saves memory and costs time.  Listed if the trace recorded memory that grows and shrinks within a step."""
    memory, steps = evidence.links.trace.memory, evidence.links.steps
    memory = memory[memory["on_gpu"]] if memory["on_gpu"].any() else memory
    inside = memory[(memory["start"] >= steps["start"].min()) & (memory["start"] < steps["end"].max())]
    us = evidence.events.loc[evidence.events["phase"] == "forward", "us"].sum()
    forward = float(us / evidence.total_us)
    if inside.empty or not forward:
        return []
    grown = inside["total"].max() - inside["total"].min()
    if grown < 0.5 * inside["total"].max():
        return []
    text = f"allocated memory grows by {grown / MB:,.0f} MB within a step"
    basis = f"the forward pass, {forward:.1%} of the step, runs twice; at most that much memory is saved"
    how = "torch.utils.checkpoint around each block: saves memory, costs time"
    proposal = Proposal("activation checkpointing", how, forward * evidence.total_us, text, basis)
    changes = {"part_speedup": 0.5, "speedup_bound": 1 / (1 + forward), "memory_bound_mb": float(grown / MB)}
    return [row_of(proposal, evidence) | changes]


# ---- For a reader --------------------------------------------------------------------------------------------------

NOT_HERE_COLUMNS = [column("not worthwhile here", "name", left=True), column("reason", "reason", left=True)]
OPPORTUNITY_COLUMNS = [
    column("try", "name", left=True),
    Column("estimate", lambda row: row["speedup_estimate"] and f"{row['speedup_estimate']:.2f}x"),
    Column("at most", lambda row: row["speedup_bound"] and f"{row['speedup_bound']:.2f}x"),
    column("share", "share", ".1%"),
    column("evidence in this trace", "evidence", left=True),
]


def gain_text(row: dict) -> str:
    """'estimate 1.22x, at most 1.31x'; the bound alone if that is all that is known."""
    estimate, bound = row["speedup_estimate"], row["speedup_bound"]
    limit = f"at most {bound:.2f}x" if bound else "without limit"
    return f"estimate {estimate:.2f}x, {limit}" if estimate else limit


def best_three(analysis: dict) -> list[str]:
    """What to try first, with its gain and its flag; or why there is nothing."""
    rows = [row for row in analysis["opportunities"] if "memory_bound_mb" not in row][:3]
    texts = [f"{row['name']}: {gain_text(row)}" + f" ({row['flag']})" * bool(row["flag"]) for row in rows]
    return texts or [analysis.get("opportunities_reason", "nothing that this trace could support")]


def opportunity_lines(rows: list[dict], not_here: list[dict]) -> list[str]:
    apart = text_of([(NOT_HERE_COLUMNS, not_here)])
    if not rows:
        return ["Opportunities: none that this trace can quantify", *apart]
    lines = [
        "Opportunities, largest speedup first (Amdahl's law; each on its own, they do not add up):",
        *narrow_table(OPPORTUNITY_COLUMNS, rows),
        "",
        "How to do it, and the basis of bound and estimate:",
    ]
    for row in rows:
        flag = f" (here: {row['flag']})" if row["flag"] else ""
        lines += [f"  {row['name']}: {row['how']}{flag}", f"    {row['basis']}"]
    return lines + apart
