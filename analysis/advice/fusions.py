"""Which regions of the model are written out as many operators, and what would remain of them as one?"""

from collections.abc import Callable
from configparser import SectionProxy
from fractions import Fraction
from functools import partial
from pathlib import Path
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
from harness.base.text import read_ini, significant
from harness.model.optimizations import answering, flags_in_use


class Fusion(NamedTuple):
    """Operators of a region that can become fewer."""

    name: str
    kind: str  # of region
    how: str
    how_compiled: str = ""  # instead, where there is no GPU
    # The part of its time that remains, or what tells it in us, with their number; None: by its matmuls, or unknown
    likely: float | Callable[[Evidence, pd.DataFrame], tuple[float, int]] | None = None
    basis: str = ""  # without it: by its FLOPs
    needed: float = 1.0  # of its FLOPs


def one_operator_each(evidence: Evidence, rows: pd.DataFrame) -> tuple[float, int]:
    """The time in us of norms that are fused, and how many there are: each still passes once over its tensor, as the
    most expensive of its operators does, forward and backward."""
    links, found = evidence.links, regions.regions(evidence.links)
    in_step = (step_at if links.on_gpu else step_around)(links.host["start"].to_numpy(), links.steps) >= 0
    calls = found["instance"][in_step & (found["kind"] == regions.NORM)].nunique()
    phases = rows[rows["launches"] > 0].groupby("phase")
    best = sum(calls * phase.groupby("name")["us"].mean().max() for _, phase in phases)
    return min(float(rows["us"].sum()), best), calls


def _record(row: SectionProxy) -> Fusion:
    """That of a section of fusions.ini."""
    likely = row.get("likely")
    told = one_operator_each if likely == one_operator_each.__name__ else likely and float(Fraction(likely))
    texts = (row.get(name, "") for name in ("kind", "how", "how_compiled"))
    return Fusion(row.name, *texts, told, row.get("basis", "").replace("\n", " "), row.getfloat("needed", 1.0))


_TABLE = read_ini(Path(__file__).with_suffix(".ini"))
FUSIONS = [_record(_TABLE[name]) for name in _TABLE.sections()]
PLURAL = (regions.NORM, regions.QKV, regions.GATE_UP)
# Why the attention of PyTorch takes its math kernels: (what tells it, what to change)
WHY_MATH = (
    ("dropout", "a CPU has no fused kernel with dropout: dropout_p=0.0, which changes the training"),
    ("a mask", "is_causal=True instead of a mask where that is what it says, else one that needs no gradient"),
    ("double precision", "fused kernels take fp32 or narrower"),
)


def fusion(of: Fusion, evidence: Evidence) -> Found:
    mask = (evidence.events["region"] == of.kind).to_numpy()
    in_use = {*answering(of.name)} & {*flags_in_use(evidence.config.get("training", {}))}
    if of.kind == regions.LOSS and not evidence.trains:
        return None
    if not mask.any() or in_use:
        fused = in_use or (evidence.events["region"] == regions.FUSED[of.kind]).any()
        return NotApplicable(of.name, "already fused") if fused else None
    (rows, us), how, flag = evidence.part(mask), of.how, None
    written_out = evidence.part(mask & ~evidence.kernels(COMPILED))[1] > us / 2
    if not written_out and of.kind != regions.LOSS:
        return NotApplicable(of.name, "already fused by the compiler")
    if of.how_compiled and not evidence.links.on_gpu:
        how, flag = of.how_compiled, answering("compile")[0]
    what, verb = {regions.NORM: "norms"}.get(of.kind, of.kind), "take" if of.kind in PLURAL else "takes"
    finding = f"{what[0].upper()}{what[1:]} {verb} {evidence.share(us)} of the step"
    finding += " as operators of their own" if written_out else ", with logits that are in memory whole"
    if of.kind == regions.ATTENTION and (why := math_kernels(evidence)):
        how = "F.scaled_dot_product_attention runs its math kernels"
        finding, how = f"{finding}: {how}{why[0] and f', because of {why[0]}'}", f"{how}: {why[1]}"
    if of.basis:
        likely, n = of.likely(evidence, rows) if callable(of.likely) else (of.likely and us * of.likely, 0)
        basis = of.basis.format(n / evidence.steps)
        return evidence.proposal(of.name, finding, how, mask, basis, likely_us=likely, other_flag=flag)
    flops, rate = rows["flops"].sum(), evidence.best_flops_per_us
    if not (flops and rate):
        return NotApplicable(of.name, "the trace has no shapes of its matmuls")
    likely = min(us, flops / rate)
    best, bound = at_roof(of.needed * flops, evidence.compute_roofs, "GFLOP/s", likely)
    bound = f"its FLOPs, at most: {bound}, without the waits beside them"
    if of.kind in (regions.QKV, regions.GATE_UP):
        best, bound = None, "no bound: fewer gradients are added up, and fewer weights updated, too"
    basis = f"{bound}; estimate: at {significant(rate / 1e3)} GFLOP/s, the highest rate of any matmul in this trace"
    return evidence.proposal(of.name, finding, how, mask, basis, best, likely)


def is_dropout(name: str) -> bool:
    return letter_of(name) == LETTERS["dropout"]


def math_kernels(evidence: Evidence) -> tuple[str, str] | None:
    """Why PyTorch's attention ran its math kernels, '' if nothing tells it, and what to change; None: it did not."""
    host, trace = evidence.links.host, evidence.links.trace
    math = np.flatnonzero(by_name(host["name"], lambda name: letter_of(name) == LETTERS["math_attention"], bool))
    if not len(math):
        return None
    drops = nearest_marked_ancestor(host["parent"].to_numpy(), np.isin(np.arange(len(host)), math))
    dropped = (drops >= 0) & by_name(host["name"], is_dropout, bool)
    inputs = trace.operators["signature"].to_numpy()[math[math < len(trace.operators)]]
    shapes, types, _ = trace.signatures[inputs[0]] if len(inputs) and inputs[0] >= 0 else ([], [], [])
    masked, double = len(shapes) > 3 and bool(shapes[3]), "double" in (types or [])[:1]
    found = (why for why, holds in zip(WHY_MATH, (dropped.any(), masked, double), strict=True) if holds)
    return next(found, ("", "it has fused ones for other inputs: no dropout, no mask that needs a gradient"))


def without_dropout(evidence: Evidence) -> Found:
    """Dropout of a training step, forward and backward; where the math kernels of attention run because of it, what
    they take too."""
    name, host = "without dropout", evidence.links.host
    dropped = by_name(host["name"], is_dropout, bool)
    if not evidence.trains or not dropped.any():
        return None
    parent = host["parent"].to_numpy()
    is_node = host["node"].to_numpy() == np.arange(len(host))
    drops = nearest_marked_ancestor(parent, dropped) >= 0
    forward = forward_of_nodes(host, (host["node"] < 0).to_numpy(), is_node)  # of each node
    drops |= take_or(take_or(drops, forward, False), host["node"].to_numpy(), False)
    owners = (evidence.events["operator"] if evidence.links.on_gpu else evidence.events.index).to_numpy()
    mask = take_or(drops, owners, False) & (evidence.events["category"] != "communication").to_numpy()
    us, why = evidence.part(mask)[1], math_kernels(evidence)
    finding = f"Dropout takes {evidence.share(us)} of the step"
    likely, whole = 0.0, mask
    if why and why[0] == WHY_MATH[0][0]:
        finding += " and keeps attention from the fused kernel"
        whole = mask | (evidence.events["region"] == regions.ATTENTION).to_numpy()
        likely = evidence.part(whole)[1] - us
    how = "dropout 0 where the data do not need it: large models that see each sample once train without"
    basis = "its time could vanish, and that of attention that it keeps from being fused; estimate: its own alone"
    return evidence.proposal(name, finding, how, whole, basis, likely_us=likely, code="nn.Dropout(0.0), dropout_p=0.0")


MAKERS = (*(partial(fusion, one) for one in FUSIONS), without_dropout)
