"""What is worth trying on this very trace, and how much can it bring at most?

Each proposal names the part of the step that it touches, p, and the factor s by which that part could at best become
faster, from what the trace itself shows; Amdahl's law, 1 / (1 - p + p / s), gives the bound.  It is a bound and no
promise: what is really gained has to be measured.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.components import LAYER, UNATTRIBUTED, step_events
from analysis.costs import PRODUCTS, Cost, cost, is_view_or_metadata_op
from analysis.hardware import datasheet
from analysis.links import Links
from analysis.timeline import idle_by_cause
from harness.units import MB

WORTH_LISTING = 0.01  # a smaller share of the step is not proposed
COMPILED = re.compile("Torch-Compiled|CompiledFunction|triton_")  # names that only a compiled program's trace holds
WITH_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")  # of torch.optim
ATTENTION = ("attention.scores", "attention.softmax", "attention.weighted_sum")


@dataclass
class Proposal:
    name: str
    how: str
    us: float  # of the steps, that it touches
    evidence: str
    basis: str  # where best_us comes from
    flag: str | None = None  # of tiny_llama_v1.py, if it has one for this
    best_us: float = 0.0  # what would be left of us at best


class Evidence:
    """The events of the steps with what is known of the work behind each."""

    def __init__(self, links: Links, summary: dict | None):
        self.links, self.summary, self.steps = links, summary, len(links.steps)
        self.events, self.total_us = step_events(links)
        operators, trace = links.trace.operators, links.trace
        rows = self.events["operator"].to_numpy()
        codes = np.append(operators["name"].cat.codes.to_numpy(), -1)[rows]
        signatures = np.append(operators["signature"].to_numpy(), -1)[rows]
        names = operators["name"].cat.categories
        self.events = self.events.assign(code=codes, signature=signatures)
        self.events["name"] = np.append(np.asarray(names, dtype=object), None)[codes]
        self.events["component"] = self.events["component"].fillna(UNATTRIBUTED)
        works = np.append([not is_view_or_metadata_op(name) for name in names], False)[codes]
        self.events["launches"] = 1 if len(links.gpu) else works.astype(int)
        costs: dict[tuple[int, int], Cost] = {}
        for code, signature in set(zip(codes.tolist(), signatures.tolist(), strict=True)):
            known = code >= 0 and signature >= 0
            costs[code, signature] = cost(names[code], *trace.signatures[signature]) if known else Cost()
        pairs = [costs[pair] for pair in zip(codes.tolist(), signatures.tolist(), strict=True)]
        # An operator that launches several kernels does its work once.
        again = pd.Series(rows).duplicated().to_numpy() & (rows >= 0)
        for name in ("flops", "bytes"):
            values = np.array([getattr(pair, name) or 0 for pair in pairs], dtype=float)
            self.events[name] = np.where(again, 0.0, values)
        self.best_flops_per_us = self.best_rate("flops")
        self.best_bytes_per_us = self.best_rate("bytes")
        self.idle = idle_by_cause(links, links.window) if len(links.gpu) else {}
        self.is_ours = self.events["component"].str.startswith("attention.").any() or summary is not None

    def best_rate(self, work: str) -> float | None:
        """The highest rate that an operator with 1% of the step or more reached, per us, over all its calls."""
        sums = self.events.groupby(["code", "signature"])[["us", work]].sum()
        sums = sums[(sums["us"] >= 0.01 * self.total_us) & (sums[work] > 0)]
        return float((sums[work] / sums["us"]).max()) if len(sums) else None

    def part(self, mask) -> tuple[pd.DataFrame, float]:
        rows = self.events[np.asarray(mask, dtype=bool)]
        return rows, float(rows["us"].sum())

    def described(self, rows: pd.DataFrame) -> str:
        unit = "kernels" if len(self.links.gpu) else "operators"
        n = rows["launches"].sum() / self.steps
        text = f"{rows['us'].sum() / self.total_us:.1%} of the step in {n:.0f} {unit}"
        moved = rows["bytes"].sum() / self.steps
        return text + (f" that move {moved / MB:,.0f} MB" if moved else "")


def opportunities(links: Links, summary: dict | None) -> list[dict]:
    """Proposals that the trace supports, the largest bound first."""
    evidence = Evidence(links, summary)
    if not evidence.total_us:
        return []
    rows = []
    for make in (
        fused_products,
        fused_attention,
        fused_norms,
        fused_optimizer,
        mixed_precision,
        compilation,
        larger_batch,
        fewer_synchronisations,
        faster_data,
        hidden_communication,
    ):
        for proposal in make(evidence):
            share = proposal.us / evidence.total_us
            saved = (proposal.us - proposal.best_us) / evidence.total_us
            if share < WORTH_LISTING or saved < WORTH_LISTING:
                continue
            factor = proposal.us / proposal.best_us if proposal.best_us > 0 else None
            rows.append(
                {
                    "name": proposal.name,
                    "how": proposal.how,
                    "evidence": proposal.evidence,
                    "share": share,
                    "ms_per_step": proposal.us / 1e3 / evidence.steps,
                    "part_speedup": factor,
                    "speedup_bound": 1 / (1 - saved) if saved < 1 else None,
                    "basis": proposal.basis,
                    "try": proposal.flag if evidence.is_ours else None,
                }
            )
    rows.sort(key=lambda row: -(row["speedup_bound"] or math.inf))
    return rows + checkpointing(evidence)


def at_best_rate(evidence: Evidence, rows: pd.DataFrame, us: float) -> float | None:
    """The time of the products in these rows at the best rate that any product of the trace reached."""
    if evidence.best_flops_per_us is None or not rows["flops"].sum():
        return None
    return min(us, rows["flops"].sum() / evidence.best_flops_per_us)


def best_rate_text(evidence: Evidence) -> str:
    return f"its FLOPs at {evidence.best_flops_per_us / 1e3:.1f} GFLOP/s, the best rate of a product in this trace"


def fused_products(evidence: Evidence) -> Iterator[Proposal]:
    for name, parts, how in (
        (
            "fuse q, k and v",
            ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
            "one product with the three weights side by side, then split",
        ),
        (
            "fuse gate and up",
            ("mlp.gate_proj", "mlp.up_proj"),
            "one product with both weights side by side, then split",
        ),
    ):
        rows, us = evidence.part(evidence.events["component"].isin(parts))
        best = at_best_rate(evidence, rows, us)
        if best is not None:
            yield Proposal(name, how, us, evidence.described(rows), best_rate_text(evidence), best_us=best)


def fused_attention(evidence: Evidence) -> Iterator[Proposal]:
    events = evidence.events
    mask = events["component"].isin(ATTENTION)
    if not evidence.is_ours:  # elsewhere: softmax between batched products
        softmax = events["name"].isin(["aten::_softmax", "aten::_softmax_backward_data"])
        mask = softmax | events["name"].isin(["aten::bmm", "aten::baddbmm"]) if softmax.any() else softmax
    rows, us = evidence.part(mask)
    best = at_best_rate(evidence, rows, us)
    if best is not None:
        yield Proposal(
            "fused attention",
            "F.scaled_dot_product_attention: the scores never reach memory",
            us,
            evidence.described(rows),
            best_rate_text(evidence),
            "--attention sdpa",
            best_us=best,
        )


def fused_norms(evidence: Evidence) -> Iterator[Proposal]:
    """A fused norm still passes once over its tensor, as the dearest of its operators does."""
    if not evidence.is_ours:
        return
    events, host = evidence.events, evidence.links.host
    rows, us = evidence.part(events["component"].str.contains(r"(?:^|_)norm$"))
    if rows.empty:
        return
    starts = host["name"].cat.categories.map(lambda name: LAYER.sub("", name).endswith("norm"))
    calls = int((np.asarray(starts, dtype=bool)[host["name"].cat.codes] & (host["kind"] == 1).to_numpy()).sum())
    best = 0.0
    for _, phase in rows[rows["launches"] > 0].groupby("phase"):
        best += calls * phase.groupby("name")["us"].mean().max()
    if rows["launches"].sum() > 3 * calls:
        yield Proposal(
            "fused norm",
            "F.rms_norm or a compiled norm: one pass instead of one per operator",
            us,
            evidence.described(rows),
            f"{calls / evidence.steps:.0f} norms a step, each at the "
            "price of the dearest operator in it, forward and backward",
            best_us=min(us, best),
        )


def fused_optimizer(evidence: Evidence) -> Iterator[Proposal]:
    rows, us = evidence.part(evidence.events["phase"] == "optimizer")
    if rows["name"].str.contains("_fused_", na=False).any():
        return
    marks = (re.match(r"Optimizer\.step#(\w+)\.", name) for name in evidence.links.host["name"].cat.categories)
    optimizer = next((mark[1] for mark in marks if mark), "optimizer")
    parameters = (evidence.summary or {}).get("config", {}).get("model", {}).get("parameters")
    best, basis = 0.0, "its time could vanish"
    if parameters and evidence.best_bytes_per_us and optimizer in ("Adam", "AdamW"):
        moved = 7 * 4 * parameters * evidence.steps
        best = min(us, moved / evidence.best_bytes_per_us)
        basis = (
            f"{optimizer} must read weight, gradient and two moments and write three of them, "
            f"{7 * 4 * parameters / MB:,.0f} MB at {evidence.best_bytes_per_us / 1e3:.1f} GB/s, "
            "the best rate of an operator in this trace"
        )
    foreach = rows["name"].str.contains("_foreach_", na=False).any()
    how = f"{optimizer}(..., fused=True)" if optimizer in WITH_FUSED else "a compiled or fused version of its step"
    how += "" if foreach or optimizer == "optimizer" else ", or foreach=True"
    flag = "--optimizer-impl fused"
    yield Proposal("fused optimizer", how, us, evidence.described(rows), basis, flag, best_us=best)


def mixed_precision(evidence: Evidence) -> Iterator[Proposal]:
    events, trace = evidence.events, evidence.links.trace
    full = [bool(kinds) and "float" in kinds for _, kinds, _ in trace.signatures]
    in_fp32 = np.append(np.array(full, dtype=bool), False)[events["signature"].to_numpy()]
    rows, us = evidence.part(events["category"].isin(PRODUCTS) & in_fp32)
    found = datasheet(trace.device) if trace.device["name"] else None
    best, basis = 0.0, "products could vanish, as no datasheet says what bf16 does here; a CPU may well be slower in it"
    if found and found[0].bf16:
        ratio = found[0].bf16 / found[0].fp32
        best, basis = us / ratio, f"bf16 is {ratio:.1f} times as fast as fp32 on {found[0].name}, says its datasheet"
    yield Proposal(
        "mixed precision",
        "torch.autocast in bfloat16 around the forward pass",
        us,
        evidence.described(rows) + ", products in fp32",
        basis,
        "--precision bf16",
        best_us=best,
    )


def compilation(evidence: Evidence) -> Iterator[Proposal]:
    if any(COMPILED.search(name) for name in evidence.links.host["name"].cat.categories):
        return
    kinds = ("element-wise", "normalisation", "reduction", "copy")
    elsewhere = evidence.events["phase"].isin(("data", "optimizer"))
    rows, us = evidence.part(evidence.events["category"].isin(kinds) & ~elsewhere)
    text = evidence.described(rows) + ", none of them a product"
    if evidence.idle and len(rows):
        # Fewer kernels are fewer launches to wait for.
        waits = (evidence.idle["launch"] + evidence.idle["latency"]) * rows["launches"].sum()
        waits /= evidence.events["launches"].sum()
        us += waits
        text += f", and their part of the wait for launches, {waits / evidence.total_us:.1%}"
    how = "torch.compile(model): chains of element-wise operators become one kernel each"
    yield Proposal("compile", how, us, text, "work between products could vanish into them", "--compile")


def larger_batch(evidence: Evidence) -> Iterator[Proposal]:
    if len(evidence.links.gpu):
        us = evidence.idle["launch"] + evidence.idle["latency"]
        n = evidence.events["launches"].sum() / evidence.steps
        text = f"the GPU waits for launches {us / evidence.total_us:.1%} of the step, {n:.0f} GPU events a step"
    else:
        _, work = evidence.part(evidence.events["launches"] > 0)
        _, data = evidence.part((evidence.events["phase"] == "data") & (evidence.events["launches"] == 0))
        us = evidence.total_us - work - data
        text = f"{us / evidence.total_us:.1%} of the step is Python and bookkeeping between operators"
    batch = (evidence.summary or {}).get("config", {}).get("training", {}).get("batch_size")
    flag = batch and f"--batch-size {2 * batch}"
    how = "more work per launch, as a step's overhead stays; or one launch for all of it (torch.cuda.graphs)"
    yield Proposal("larger batch", how, us, text, "per sample, the overhead could vanish", flag)


def fewer_synchronisations(evidence: Evidence) -> Iterator[Proposal]:
    calls = evidence.links.calls
    if len(evidence.links.gpu):
        us = evidence.idle["synchronisation"]
        waits = int((calls["waits"].to_numpy(bool) & (calls["step"] >= 0).to_numpy()).sum())
        n = waits / evidence.steps
        text = f"the GPU idles {us / evidence.total_us:.1%} of the step behind {n:.1f} waits a step"
        how = "no .item(), .cpu() or synchronize() within a step"
        yield Proposal("fewer synchronisations", how, us, text, "the GPU would not idle there")


def faster_data(evidence: Evidence) -> Iterator[Proposal]:
    if len(evidence.links.gpu):
        us = evidence.idle["data"]
        text = f"the GPU idles {us / evidence.total_us:.1%} of the step while the host fetches data"
    else:
        _, us = evidence.part(evidence.events["phase"] == "data")
        text = f"{us / evidence.total_us:.1%} of the step fetches data"
    yield Proposal("prefetch data", "workers and pinned memory in the DataLoader", us, text, "data could be there")


def hidden_communication(evidence: Evidence) -> Iterator[Proposal]:
    _, us = evidence.part(evidence.events["category"] == "communication")
    us += evidence.idle.get("communication", 0.0)
    text = f"{us / evidence.total_us:.1%} of the step is communication that no computation hides"
    name, how = "less or hidden communication", "fewer, larger exchanges, overlapped with the backward pass"
    yield Proposal(name, how, us, text, "it could hide behind computation", "--gradient-accumulation-steps 2")


def checkpointing(evidence: Evidence) -> list[dict]:
    """No speed-up: memory for time.  Listed where the trace recorded memory that a step fills and frees."""
    memory = evidence.links.trace.memory
    memory = memory[memory["on_gpu"]] if memory["on_gpu"].any() else memory
    steps = evidence.links.steps
    inside = memory[(memory["start"] >= steps["start"].min()) & (memory["start"] < steps["end"].max())]
    forward = evidence.events.loc[evidence.events["phase"] == "forward", "us"].sum() / evidence.total_us
    if inside.empty or not forward:
        return []
    grown = inside["total"].max() - inside["total"].min()
    if grown < 0.5 * inside["total"].max():
        return []
    return [
        {
            "name": "activation checkpointing",
            "how": "torch.utils.checkpoint around each block: memory for time",
            "evidence": f"allocated memory grows by {grown / MB:,.0f} MB within a step",
            "share": float(forward),
            "ms_per_step": float(forward * evidence.total_us / 1e3 / evidence.steps),
            "part_speedup": 0.5,
            "speedup_bound": float(1 / (1 + forward)),
            "basis": f"the forward pass, {forward:.1%} of the step, runs twice; up to that memory is saved",
            "memory_bound_mb": float(grown / MB),
            "try": "--activation-checkpointing" if evidence.is_ours else None,
        }
    ]


def opportunity_lines(rows: list[dict]) -> list[str]:
    if not rows:
        return ["Opportunities: none that this trace supports with a number"]
    lines = ["Opportunities, by the most that each can bring (Amdahl's law; alone, not added up):"]
    lines.append(f"{'':<4}{'try':<30}{'share':>8}{'at most':>10}  evidence")
    for i, row in enumerate(rows, 1):
        bound = f"{row['speedup_bound']:.2f}x" if row["speedup_bound"] else "-"
        lines.append(f"{i:>2}. {row['name']:<30}{row['share']:>8.1%}{bound:>10}  {row['evidence']}")
        lines.append(f"{'':<54}how: {row['how']}" + (f"; here: {row['try']}" if row["try"] else ""))
        lines.append(f"{'':<54}bound: {row['basis']}")
    return lines
