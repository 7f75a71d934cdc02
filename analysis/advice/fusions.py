"""Which regions of the model are written out as many operators, and what would remain as one?"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.advice.evidence import Evidence
from analysis.advice.proposals import Found, NotApplicable, at_roof
from analysis.attribution import regions
from analysis.attribution.components import forward_of_nodes
from analysis.trace.nesting import nearest_marked_ancestor
from analysis.trace.steps import step_around, step_at
from analysis.trace.tables import by_name, take_or
from analysis.vocabulary.letters import LETTERS, letter_of
from analysis.vocabulary.operators import COMPILED
from harness.base.text import significant
from harness.model.optimizations import answering, flags_in_use


class Remains(NamedTuple):
    """What remains of the time of a region once it is fused."""

    basis: str  # where the figures come from
    likely_us: float | None = None  # None: not known
    best_us: float | None = 0.0  # None: there is no bound


# From the events of the region; None where the trace has no shapes of its matmuls.
Estimate = Callable[[Evidence, pd.DataFrame], Remains | None]


class Fusion(NamedTuple):
    """Operators of a region that can become fewer."""

    name: str
    kind: str  # of region
    how: str
    remains: Estimate
    how_compiled: str = ""  # instead, where there is no GPU


# ---- What remains --------------------------------------------------------------------------------


def of_tensors(after: int, before: int, basis: str) -> Estimate:
    """By how many tensors its operators move before and after."""

    def remains(evidence: Evidence, rows: pd.DataFrame) -> Remains:
        return Remains(basis, float(rows["us"].sum()) * (after / before))

    return remains


def of_norms(evidence: Evidence, rows: pd.DataFrame) -> Remains:
    """A fused norm still passes once over its tensor, as the most expensive of its operators does,
    forward and backward."""
    timeline, of_regions = evidence.timeline, regions.regions(evidence.timeline)
    step_of = step_at if timeline.on_gpu else step_around
    in_step = step_of(timeline.host["start"].to_numpy(), timeline.steps) >= 0
    norms = of_regions["instance"][in_step & (of_regions["kind"] == regions.NORM)].nunique()
    likely_us = 0.0
    for _, phase in rows[rows["launches"] > 0].groupby("phase", observed=True):
        likely_us += norms * phase.groupby("name", observed=True)["us"].mean().max()
    basis = (
        f"at most: its time could vanish; estimate: {norms / evidence.steps:.0f} norms per step,"
        " each as long as its most expensive operator, forward and backward"
    )
    return Remains(basis, min(float(rows["us"].sum()), likely_us))


def of_loss(evidence: Evidence, rows: pd.DataFrame) -> Remains:
    return Remains(
        "its time could vanish; its chunks are computed again in the backward pass, one more matmul"
    )


def of_attention(evidence: Evidence, rows: pd.DataFrame) -> Remains | None:
    likely_us = at_best_rate(evidence, rows)
    if likely_us is None:
        return None
    # A causal one computes no scores of later tokens.
    needed_flops = 0.5 * rows["flops"].sum()
    best_us, roof = at_roof(needed_flops, evidence.compute_roofs, "GFLOP/s", likely_us)
    bound = f"its FLOPs, at most: {roof}, without the waits beside them"
    return Remains(f"{bound}; {best_rate_text(evidence)}", likely_us, best_us)


def of_one_matmul(evidence: Evidence, rows: pd.DataFrame) -> Remains | None:
    likely_us = at_best_rate(evidence, rows)
    if likely_us is None:
        return None
    bound = "no bound: fewer gradients are added up, and fewer weights updated, too"
    return Remains(f"{bound}; {best_rate_text(evidence)}", likely_us, None)


def at_best_rate(evidence: Evidence, rows: pd.DataFrame) -> float | None:
    """The time in us of the FLOPs of these events at the highest rate of any matmul in the trace;
    None: neither may be known."""
    flops, rate = rows["flops"].sum(), evidence.best_flops_per_us
    return min(float(rows["us"].sum()), flops / rate) if flops and rate else None


def best_rate_text(evidence: Evidence) -> str:
    rate = significant(evidence.best_flops_per_us / 1e3)
    return f"estimate: at {rate} GFLOP/s, the highest rate of any matmul in this trace"


FUSIONS = (
    Fusion(
        name="fuse q, k and v",
        kind=regions.QKV,
        how="concatenate the three weights into one matmul, and split its output",
        remains=of_one_matmul,
    ),
    Fusion(
        name="fuse gate and up",
        kind=regions.GATE_UP,
        how="concatenate both weights into one matmul, and split its output",
        remains=of_one_matmul,
    ),
    Fusion(
        name="fused attention",
        kind=regions.ATTENTION,
        how="F.scaled_dot_product_attention: the scores are never written to memory",
        remains=of_attention,
    ),
    Fusion(
        name="fused SwiGLU",
        kind=regions.SWIGLU,
        how="one kernel forward and one backward",
        how_compiled="a compiled activation: one loop forward and one backward",
        remains=of_tensors(
            after=8,
            before=14,
            basis=(
                "its time could vanish; estimate: five operators become two, which move 8 tensors"
                " instead of 14"
            ),
        ),
    ),
    Fusion(
        name="fused rotary embedding",
        kind=regions.ROPE,
        how="halves swapped by one copy, multiplied and added by one kernel",
        remains=of_tensors(
            after=7,
            before=9,
            basis=(
                "its time could vanish; estimate: five operators become three, which move 7 tensors"
                " instead of 9"
            ),
        ),
    ),
    Fusion(
        name="fused loss",
        kind=regions.LOSS,
        how=(
            "loss from a part of the vocabulary at a time: the logits stay in the cache, and are"
            " never in memory whole"
        ),
        remains=of_loss,
    ),
    Fusion(
        name="fused norm",
        kind=regions.NORM,
        how="F.rms_norm or a compiled norm: one pass instead of one per operator",
        how_compiled=(
            "a compiled norm: one pass instead of one per operator, which F.rms_norm has on GPUs"
        ),
        remains=of_norms,
    ),
)


# ---- What is written out as several operators ----------------------------------------------------

PLURAL = (regions.NORM, regions.QKV, regions.GATE_UP)
# Whether the mask is a causal one, operators do not tell.
FUSED_ATTENTION = (
    "F.scaled_dot_product_attention(q, k, v), with is_causal=True if no token sees a later one"
)
OF_TRANSFORMERS = 'from_pretrained(..., attn_implementation="sdpa")'


class WrittenOut(NamedTuple):
    """What of a region is still several operators."""

    events: np.ndarray  # which of the evidence's events
    fused_by: str  # what fuses other parts of it; empty: nothing


def fusion(of: Fusion, evidence: Evidence) -> Found:
    if of.kind == regions.LOSS and not evidence.trains:
        return None
    is_fused = (evidence.events["region"] == regions.FUSED[of.kind]).any()
    in_region = (evidence.events["region"] == of.kind).to_numpy()
    flags = flags_in_use(evidence.run.training)
    if any(flag in flags for flag in answering(of.name)):
        return NotApplicable(of.name, "already fused")
    if not in_region.any():
        return NotApplicable(of.name, "already fused") if is_fused else None
    left = written_out(of, evidence, in_region, is_fused)
    if not left.events.any():
        return NotApplicable(of.name, left.fused_by)
    rows, us = evidence.part(left.events)
    remains = of.remains(evidence, rows)
    if remains is None:
        return NotApplicable(of.name, "the trace has no shapes of its matmuls")
    change = change_to(of, evidence)
    return evidence.proposal(
        of.name,
        finding_text(of, evidence, in_region, us) + change.because,
        change.how,
        left.events,
        remains.basis,
        remains.best_us,
        remains.likely_us,
        other_flag=change.flag,
        filled={"line": change.line},
        done=left.fused_by,
    )


class Change(NamedTuple):
    """What fuses a region here."""

    how: str
    line: str  # of code
    flag: str | None = None  # in place of those that answer the fusion
    because: str = ""  # behind the finding


def change_to(of: Fusion, evidence: Evidence) -> Change:
    if of.how_compiled and not evidence.timeline.on_gpu:
        return Change(of.how_compiled, of.how_compiled, flag=answering("compile")[0])
    if of.kind != regions.ATTENTION:
        return Change(of.how, of.how)
    reason = why_math_kernels(evidence)
    if reason is None:
        return Change(of.how, OF_TRANSFORMERS if evidence.uses_transformers else FUSED_ATTENTION)
    runs = "F.scaled_dot_product_attention runs its math kernels"
    how = f"{runs}: {reason.remedy}"
    because = f": {runs}, because of {reason.why}" if reason.why else f": {runs}"
    return Change(how, how, because=because)


def written_out(
    of: Fusion, evidence: Evidence, in_region: np.ndarray, is_fused: bool
) -> WrittenOut:
    """in_region: which events.  is_fused: some of the other events are this kind of region,
    fused."""
    by_compiler = in_region & evidence.kernels(COMPILED)
    if by_compiler.any() and of.kind != regions.LOSS:
        return WrittenOut(in_region & ~by_compiler, "already fused by the compiler")
    # Of a loss that the compiler fused, the logits are in memory whole nevertheless.
    return WrittenOut(in_region, "already fused" if is_fused else "")


def finding_text(of: Fusion, evidence: Evidence, in_region: np.ndarray, us: float) -> str:
    """'Norms take 8.1% of the step as operators of their own'"""
    what = "norms" if of.kind == regions.NORM else of.kind
    verb = "take" if of.kind in PLURAL else "takes"
    text = f"{what[0].upper()}{what[1:]} {verb} {evidence.share(us)} of the step"
    if of.kind == regions.LOSS:
        _, compiled_us = evidence.part(in_region & evidence.kernels(COMPILED))
        _, region_us = evidence.part(in_region)
        if compiled_us >= region_us / 2:
            return f"{text}, with logits that are in memory whole"
    return f"{text} as operators of their own"


# ---- Attention that PyTorch writes out itself ----------------------------------------------------


class MathKernels(NamedTuple):
    """Why PyTorch's attention takes its math kernels."""

    why: str  # empty: nothing tells
    remedy: str


FOR_DROPOUT = MathKernels(
    "dropout", "a CPU has no fused kernel with dropout: dropout_p=0.0, which changes the training"
)
FOR_MASK = MathKernels(
    "a mask",
    "is_causal=True instead of a mask where that is what it says, else one that needs no gradient",
)
FOR_DOUBLE = MathKernels("double precision", "fused kernels take fp32 or narrower")
FOR_ANYTHING = MathKernels(
    "", "it has fused ones for other inputs: no dropout, no mask that needs a gradient"
)


def is_dropout(name: str) -> bool:
    return letter_of(name) == LETTERS["dropout"]


def why_math_kernels(evidence: Evidence) -> MathKernels | None:
    """None: most of PyTorch's attention ran fused kernels, or there is none."""
    host, trace = evidence.timeline.host, evidence.timeline.trace
    is_math = by_name(host["name"], lambda name: letter_of(name) == LETTERS["math_attention"], bool)
    if not is_math.any():
        return None
    around = nearest_marked_ancestor(host["parent"].to_numpy(), is_math)
    # The backward pass belongs to the call of its forward pass, which tells how it is computed.
    in_attention = (evidence.events["region"] == regions.ATTENTION).to_numpy()
    is_forward = in_attention & (evidence.events["phase"] != "backward").to_numpy()
    call = take_or(around, evidence.owners, -1)
    us_by_call = evidence.events["us"][is_forward].groupby(call[is_forward]).sum()
    in_math = us_by_call[us_by_call.index >= 0]
    if in_math.sum() <= us_by_call.sum() / 2:
        return None
    with_dropout = np.isin(in_math.index, around[by_name(host["name"], is_dropout, bool)])
    if in_math[with_dropout].sum() > in_math.sum() / 2:
        return FOR_DROPOUT
    longest = in_math.index[int(in_math.to_numpy().argmax())]
    signature = take_or(trace.operators["signature"].to_numpy(), longest, -1)
    shapes, types, _ = trace.signatures[signature] if signature >= 0 else ([], [], [])
    if len(shapes) > 3 and shapes[3]:  # its input after query, key and value
        return FOR_MASK
    if types and types[0] == "double":
        return FOR_DOUBLE
    return FOR_ANYTHING


def without_dropout(evidence: Evidence) -> Found:
    """Dropout of a training step, forward and backward; where the math kernels of attention run
    because of it, what they take too."""
    host = evidence.timeline.host
    is_drop = by_name(host["name"], is_dropout, bool)
    if not evidence.trains or not is_drop.any():
        return None
    events, owners = evidence.events, evidence.events.index.to_numpy()
    if evidence.timeline.on_gpu:
        owners = events["operator"].to_numpy()
    drops = take_or(of_dropout(host, is_drop), owners, False)
    drops &= (events["category"] != "communication").to_numpy()
    _, us = evidence.part(drops)
    finding = f"Dropout takes {evidence.share(us)} of the step"
    whole, likely_us = drops, 0.0
    if why_math_kernels(evidence) == FOR_DROPOUT:
        finding += " and keeps attention from the fused kernel"
        whole = drops | (events["region"] == regions.ATTENTION).to_numpy()
        likely_us = evidence.part(whole)[1] - us
    how = (
        "dropout 0 where the data do not need it: large models that see each sample once train"
        " without"
    )
    basis = (
        "its time could vanish, and that of attention that it keeps from being fused; estimate: its"
        " own alone"
    )
    return evidence.proposal("without dropout", finding, how, whole, basis, likely_us=likely_us)


def of_dropout(host: pd.DataFrame, is_drop: np.ndarray) -> np.ndarray:
    """Which host events are part of a dropout, forward or backward.  is_drop: its operators."""
    within = nearest_marked_ancestor(host["parent"].to_numpy(), is_drop) >= 0
    node = host["node"].to_numpy()
    is_node = node == np.arange(len(host))
    forward = forward_of_nodes(host, node < 0, is_node)
    node_of_dropout = take_or(within, forward, False)
    return within | take_or(node_of_dropout, node, False)
