"""Which regions of the model are written out as many operators, and what would remain as one?"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.advice.evidence import Evidence, Found, NotApplicable, at_roof
from analysis.attribution import regions
from analysis.attribution.components import forward_of_nodes
from analysis.trace.nesting import nearest_marked_ancestor
from analysis.trace.steps import step_around, step_at
from analysis.trace.tables import by_name, take_or
from analysis.vocabulary.letters import LETTERS, letter_of
from analysis.vocabulary.operators import COMPILED
from harness.base.text import significant
from harness.model.optimizations import answering, flags_in_use


class Fusion(NamedTuple):
    """Operators of a region that can become fewer."""

    name: str
    kind: str  # of region
    how: str
    how_compiled: str = ""  # instead, where there is no GPU
    # The part of its time that remains, or what tells it in us, with their number; None: by its
    # matmuls, or unknown
    likely: float | Callable[[Evidence, pd.DataFrame], tuple[float, int]] | None = None
    basis: str = ""  # without it: by its FLOPs
    needed: float = 1.0  # of its FLOPs


def one_operator_each(evidence: Evidence, rows: pd.DataFrame) -> tuple[float, int]:
    """The time in us of norms that are fused, and how many there are: each still passes once over
    its tensor, as the most expensive of its operators does, forward and backward."""
    timeline, found = evidence.timeline, regions.regions(evidence.timeline)
    in_step = (step_at if timeline.on_gpu else step_around)(
        timeline.host["start"].to_numpy(), timeline.steps
    ) >= 0
    calls = found["instance"][in_step & (found["kind"] == regions.NORM)].nunique()
    phases = rows[rows["launches"] > 0].groupby("phase", observed=True)
    best = sum(
        calls * phase.groupby("name", observed=True)["us"].mean().max() for _, phase in phases
    )
    return min(float(rows["us"].sum()), best), calls


FUSIONS = (
    Fusion(
        name="fuse q, k and v",
        kind=regions.QKV,
        how="concatenate the three weights into one matmul, and split its output",
    ),
    Fusion(
        name="fuse gate and up",
        kind=regions.GATE_UP,
        how="concatenate both weights into one matmul, and split its output",
    ),
    Fusion(
        name="fused attention",
        kind=regions.ATTENTION,
        how="F.scaled_dot_product_attention: the scores are never written to memory",
        needed=0.5,  # a causal one computes no scores of later tokens
    ),
    Fusion(
        name="fused SwiGLU",
        kind=regions.SWIGLU,
        how="one kernel forward and one backward",
        how_compiled="a compiled activation: one loop forward and one backward",
        likely=8 / 14,
        basis=(
            "its time could vanish; estimate: five operators become two, which move 8 tensors"
            " instead of 14"
        ),
    ),
    Fusion(
        name="fused rotary embedding",
        kind=regions.ROPE,
        how="halves swapped by one copy, multiplied and added by one kernel",
        likely=7 / 9,
        basis=(
            "its time could vanish; estimate: five operators become three, which move 7 tensors"
            " instead of 9"
        ),
    ),
    Fusion(
        name="fused loss",
        kind=regions.LOSS,
        how=(
            "loss from a part of the vocabulary at a time: the logits stay in the cache, and are"
            " never in memory whole"
        ),
        basis=(
            "its time could vanish; its chunks are computed again in the backward pass, one more"
            " matmul"
        ),
    ),
    Fusion(
        name="fused norm",
        kind=regions.NORM,
        how="F.rms_norm or a compiled norm: one pass instead of one per operator",
        how_compiled=(
            "a compiled norm: one pass instead of one per operator, which F.rms_norm has on GPUs"
        ),
        likely=one_operator_each,
        basis=(
            "at most: its time could vanish; estimate: {:.0f} norms per step, each as long as its"
            " most expensive operator, forward and backward"
        ),
    ),
)
PLURAL = (regions.NORM, regions.QKV, regions.GATE_UP)
# Why the attention of PyTorch takes its math kernels: (what tells it, what to change)
WHY_MATH = (
    (
        "dropout",
        "a CPU has no fused kernel with dropout: dropout_p=0.0, which changes the training",
    ),
    (
        "a mask",
        (
            "is_causal=True instead of a mask where that is what it says, else one that needs no"
            " gradient"
        ),
    ),
    ("double precision", "fused kernels take fp32 or narrower"),
)
FUSED_ATTENTION = "F.scaled_dot_product_attention(q, k, v, is_causal=True)"
OF_TRANSFORMERS = 'from_pretrained(..., attn_implementation="sdpa")'


def fusion(of: Fusion, evidence: Evidence) -> Found:
    region = (evidence.events["region"] == of.kind).to_numpy()
    in_use = {*answering(of.name)} & {*flags_in_use(evidence.config.get("training", {}))}
    if of.kind == regions.LOSS and not evidence.trains:
        return None
    if not region.any() or in_use:
        fused = in_use or (evidence.events["region"] == regions.FUSED[of.kind]).any()
        return NotApplicable(of.name, "already fused") if fused else None
    generated = region & evidence.kernels(COMPILED)
    of_compiler = evidence.part(generated)[1] >= evidence.part(region)[1] / 2
    # What the compiler fused is done; of a loss, the logits are in memory whole nevertheless.
    mask = region if of.kind == regions.LOSS else region & ~generated
    done = ""
    if generated.any() and of.kind != regions.LOSS:
        done = "already fused by the compiler"
    elif (evidence.events["region"] == regions.FUSED[of.kind]).any():
        done = "already fused"
    if not mask.any():
        return NotApplicable(of.name, done)
    (rows, us), how, flag, line = evidence.part(mask), of.how, None, of.how
    if of.how_compiled and not evidence.timeline.on_gpu:
        how, flag = of.how_compiled, answering("compile")[0]
        line = how
    what, verb = (
        {regions.NORM: "norms"}.get(of.kind, of.kind),
        "take" if of.kind in PLURAL else "takes",
    )
    finding = f"{what[0].upper()}{what[1:]} {verb} {evidence.share(us)} of the step"
    if of.kind == regions.LOSS and of_compiler:
        finding += ", with logits that are in memory whole"
    else:
        finding += " as operators of their own"
    if of.kind == regions.ATTENTION:
        line = OF_TRANSFORMERS if evidence.uses_transformers else FUSED_ATTENTION
        if why := math_kernels(evidence):
            how = "F.scaled_dot_product_attention runs its math kernels"
            because = f", because of {why[0]}" if why[0] else ""
            finding, how = f"{finding}: {how}{because}", f"{how}: {why[1]}"
            line = how
    words = {"filled": {"line": line}, "done": done}
    if of.basis:
        likely, n = (
            of.likely(evidence, rows) if callable(of.likely) else (of.likely and us * of.likely, 0)
        )
        basis = of.basis.format(n / evidence.steps)
        return evidence.proposal(
            of.name, finding, how, mask, basis, likely_us=likely, other_flag=flag, **words
        )
    flops, rate = rows["flops"].sum(), evidence.best_flops_per_us
    if not (flops and rate):
        return NotApplicable(of.name, "the trace has no shapes of its matmuls")
    likely = min(us, flops / rate)
    best, bound = at_roof(of.needed * flops, evidence.compute_roofs, "GFLOP/s", likely)
    bound = f"its FLOPs, at most: {bound}, without the waits beside them"
    if of.kind in (regions.QKV, regions.GATE_UP):
        best, bound = None, "no bound: fewer gradients are added up, and fewer weights updated, too"
    basis = (
        f"{bound}; estimate: at {significant(rate / 1e3)} GFLOP/s, the highest rate of any matmul"
        " in this trace"
    )
    return evidence.proposal(of.name, finding, how, mask, basis, best, likely, **words)


def is_dropout(name: str) -> bool:
    return letter_of(name) == LETTERS["dropout"]


def math_kernels(evidence: Evidence) -> tuple[str, str] | None:
    """Why most of PyTorch's attention ran its math kernels, '' if nothing tells it, and what to
    change; None: most of it did not."""
    host, trace = evidence.timeline.host, evidence.timeline.trace
    is_math = by_name(host["name"], lambda name: letter_of(name) == LETTERS["math_attention"], bool)
    if not is_math.any():
        return None
    parent = host["parent"].to_numpy()
    # The backward pass belongs to the call of its forward pass, which tells how it is computed.
    forward = (evidence.events["region"] == regions.ATTENTION).to_numpy() & (
        evidence.events["phase"] != "backward"
    ).to_numpy()
    call = take_or(nearest_marked_ancestor(parent, is_math), evidence.owners, -1)
    rows = evidence.events[forward]
    us_by_call = rows["us"].groupby(call[forward]).sum()
    in_math = us_by_call[us_by_call.index >= 0]
    if in_math.sum() <= us_by_call.sum() / 2:
        return None
    drops = by_name(host["name"], is_dropout, bool)
    dropped = np.isin(in_math.index, nearest_marked_ancestor(parent, is_math)[drops])
    signatures = take_or(trace.operators["signature"].to_numpy(), in_math.index.to_numpy(), -1)
    longest = signatures[int(in_math.to_numpy().argmax())]
    shapes, types, _ = trace.signatures[longest] if longest >= 0 else ([], [], [])
    most_dropped = in_math[dropped].sum() > in_math.sum() / 2
    masked, double = len(shapes) > 3 and bool(shapes[3]), "double" in (types or [])[:1]
    for why, holds in zip(WHY_MATH, (most_dropped, masked, double), strict=True):
        if holds:
            return why
    return "", "it has fused ones for other inputs: no dropout, no mask that needs a gradient"


def without_dropout(evidence: Evidence) -> Found:
    """Dropout of a training step, forward and backward; where the math kernels of attention run
    because of it, what they take too."""
    name, host = "without dropout", evidence.timeline.host
    dropped = by_name(host["name"], is_dropout, bool)
    if not evidence.trains or not dropped.any():
        return None
    parent = host["parent"].to_numpy()
    is_node = host["node"].to_numpy() == np.arange(len(host))
    drops = nearest_marked_ancestor(parent, dropped) >= 0
    forward = forward_of_nodes(host, (host["node"] < 0).to_numpy(), is_node)  # of each node
    drops |= take_or(take_or(drops, forward, False), host["node"].to_numpy(), False)
    owners = (
        evidence.events["operator"] if evidence.timeline.on_gpu else evidence.events.index
    ).to_numpy()
    mask = (
        take_or(drops, owners, False) & (evidence.events["category"] != "communication").to_numpy()
    )
    us, why = evidence.part(mask)[1], math_kernels(evidence)
    finding = f"Dropout takes {evidence.share(us)} of the step"
    likely, whole = 0.0, mask
    if why and why[0] == WHY_MATH[0][0]:
        finding += " and keeps attention from the fused kernel"
        whole = mask | (evidence.events["region"] == regions.ATTENTION).to_numpy()
        likely = evidence.part(whole)[1] - us
    how = (
        "dropout 0 where the data do not need it: large models that see each sample once train"
        " without"
    )
    basis = (
        "its time could vanish, and that of attention that it keeps from being fused; estimate: its"
        " own alone"
    )
    return evidence.proposal(name, finding, how, whole, basis, likely_us=likely)
