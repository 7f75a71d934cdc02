"""Does it train?  What the first step of every run is checked for, and the times of the averaged
ones.

A step that computes something else is not a faster step: a kernel without a gradient, a detached
tensor, a parameter that the optimizer does not know all make a step shorter, and its loss may fall
for a while nevertheless.  harness/instruments/first_step.py reads the tensors.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from typing_extensions import NotRequired

from harness.base.layer_names import part_of
from harness.schema import Document, Unknown
from harness.schema import field as declared

if TYPE_CHECKING:
    from harness.instruments.timing import StepRecord
    from harness.model.workload import Workload

# Backward / forward time: twice the matmuls, at twenty times the rate of the forward pass.
LEAST_RATIO = 0.1
LEAST_STEPS = 3  # whose times are looked at: fewer may all have been held up in the forward pass
FAILED = "FAILED: "  # before the findings
# Findings of what costs time or teaches nothing, and leaves the training right.
FAIL_NOTHING = (
    "reduced_too_often",
    "same_data",
    "same_random_numbers",
    "repeated_order",
    "small_collectives",
    "buffers_broadcast",
)
RANKS_DIFFER = "ranks train different models: "
NAMES_SHOWN = 20  # of the parameters of a finding


class AuditFinding(Document):
    check: str = declared(
        "missing_, zero_ or non_finite_gradient, unmoved_ or unowned_parameter, first_loss,"
        " backward_time, rate, ranks_differ; and, which fail nothing, reduced_too_often, same_data,"
        " same_random_numbers, repeated_order, small_collectives, buffers_broadcast"
    )
    detail: str = declared("the finding with its figures")
    parameters: NotRequired[list[str]] = declared("names, 20 at most; checks of parameters only")
    between_steps: NotRequired[list[int | None]] = declared(
        "ranks_differ: the last step in which they were seen equal, null if none, and the first in"
        " which they were not"
    )
    difference: NotRequired[float] = declared(
        "ranks_differ: the largest between two ranks, in norms of the tensor"
    )
    times: NotRequired[int] = declared(
        "in a step: reductions (reduced_too_often), calls (small_collectives), broadcasts"
        " (buffers_broadcast)"
    )
    where: NotRequired[str] = declared(
        "FILE:LINE that calls the model (reduced_too_often, buffers_broadcast), the checkpoint that"
        " takes gradients away (missing_gradient) or the collectives, or asks for data"
    )


class Audit(Document):
    ok: bool | None = declared(
        "whether no finding says that it trains wrongly", null="no step was done"
    )
    findings: list[AuditFinding] = declared("what is wrong or for nothing; empty: neither")
    not_checked: list[dict[str, str]] = declared("check, as in a finding, and reason")
    gradient_norms: dict[str, float] = declared(
        "of the first step, by part of the model over all layers"
    )
    notes: NotRequired[list[str]] = declared(
        "what the precision does to all updates, and is no finding"
    )


@dataclass
class FirstStep:
    """What the first step did with each parameter, by name."""

    norms: dict[str, float] = field(default_factory=dict)  # of gradients
    missing: list[str] = field(default_factory=list)  # no gradient at all
    frozen: list[str] = field(default_factory=list)  # that ask for none, with requires_grad False
    trained_elements: int = 0  # of all parameters that ask for a gradient
    zero: list[str] = field(default_factory=list)  # gradients of zeros alone
    non_finite: list[str] = field(default_factory=list)  # with a NaN or an infinity
    # Not changed by the optimizer, though there is a gradient: it should have
    unmoved: list[str] = field(default_factory=list)
    # - as their type, by name, is too narrow for what it adds
    rounded: dict[str, str] = field(default_factory=dict)
    # - or it is not known what it adds
    untold: dict[str, str] = field(default_factory=dict)
    skipped: bool = False  # the gradient scaler of fp16 skipped the update

    @property
    def parameters(self) -> int:
        """That have or should have a gradient."""
        return len(self.norms) + len(self.missing)


class RateLimit(NamedTuple):
    """What no device of this kind exceeds, in FLOP/s, and where the figure is from."""

    flops_per_s: float
    source: str


def audit_document(
    first: FirstStep | None,
    averaged: list[StepRecord],
    first_loss: float | None,
    workload: Workload,
    limit: RateLimit,
) -> Audit:
    """The section `audit` of performance_summary.json.

    averaged: the steps that averages include, none of them the first;
    first_loss: of the first step.
    """
    if first is None:
        return audit_not_done()
    if first.frozen and first.trained_elements != workload.parameter_count():
        # The closed form counts them as trainable; a file of the user's own may freeze some on
        # purpose.
        first = replace(first, missing=first.missing + first.frozen)
    findings = parameter_findings(first, workload)
    not_checked, notes = moves_that_rounding_hides(first)
    if first.skipped:
        reason = (
            "the gradient scaler of fp16 skipped the first update, as it does until its scale fits"
        )
        not_checked += not_checked_for(reason, "non_finite_gradient", "unmoved_parameter")
    expected_loss = workload.formulas.first_loss()
    if expected_loss is None:
        reason = "the workload does not say what it should be"
        not_checked += not_checked_for(reason, "first_loss")
    elif first_loss is not None:
        findings += loss_findings(first_loss, *expected_loss)
    if len(averaged) < LEAST_STEPS:
        reason = f"fewer than {LEAST_STEPS} averaged steps"
        not_checked += not_checked_for(reason, "backward_time", "rate")
    else:
        findings += time_findings(averaged, workload, limit)
    return Audit(
        ok=not findings,
        findings=findings,
        not_checked=not_checked,
        gradient_norms=norms_by_part(first.norms),
        notes=notes,
    )


def not_checked_for(reason: str, *checks: str) -> list[dict]:
    return [{"check": check, "reason": reason} for check in checks]


def loss_findings(first_loss: float, expected: float, tolerance: float) -> list[AuditFinding]:
    if abs(first_loss - expected) <= tolerance:
        return []
    detail = f"the first loss is {first_loss:.3f}, and random weights give {expected:.2f}"
    return [AuditFinding(check="first_loss", detail=f"{detail} within {tolerance:.2f}")]


def audit_not_done(why: str | None = None) -> Audit:
    """Of a run whose first step was not looked at; why: where it is not that there was none."""
    ok = Unknown(why) if why else None
    return Audit(ok=ok, findings=[], not_checked=[], gradient_norms={}, notes=[])


def moves_that_rounding_hides(first: FirstStep) -> tuple[list[dict], list[str]]:
    """What was not checked, and what is told once of all parameters: a property of the precision,
    and no fault."""
    not_checked, notes = [], []
    if first.rounded:
        lost = f"{len(first.rounded)} of {first.parameters} parameters"
        types = " and ".join(sorted(set(first.rounded.values())))
        notes.append(
            f"{types} rounds the updates of {lost} away, which are below half a unit in the last"
            " place"
        )
    if first.untold:
        types = " and ".join(sorted(set(first.untold.values())))
        reason = f"{len(first.untold)} of {first.parameters} parameters in {types} did not move"
        reason += ", perhaps by rounding: what this optimizer adds to them is not known"
        not_checked.append({"check": "unmoved_parameter", "reason": reason})
        notes.append(reason)
    return not_checked, notes


def parameter_findings(first: FirstStep, workload: Workload) -> list[AuditFinding]:
    # Attention over a single token has nothing to choose from, so its queries and keys learn
    # nothing.
    zero = first.zero if workload.seq_len > 1 else []
    kinds = {
        "missing_gradient": (first.missing, "no gradient"),
        "non_finite_gradient": (first.non_finite, "a gradient that is not finite"),
        "zero_gradient": (zero, "a gradient of zeros alone"),
        "unmoved_parameter": (first.unmoved, "a gradient, but the optimizer did not move them"),
    }
    findings = []
    for check, (names, what) in kinds.items():
        if names:
            detail = f"{len(names)} of {first.parameters} parameters have {what}"
            shown = names[:NAMES_SHOWN]
            findings.append(AuditFinding(check=check, detail=detail, parameters=shown))
    return findings


def time_findings(
    averaged: list[StepRecord], workload: Workload, limit: RateLimit
) -> list[AuditFinding]:
    """Times that arithmetic does not allow.  A step that was held up is longer, never shorter: of
    the forward pass the shortest counts, of all others the median."""
    findings = []
    backward = statistics.median(record.phase_ms.get("backward", math.nan) for record in averaged)
    forward = min(record.phase_ms.get("forward", math.nan) for record in averaged)
    if backward < LEAST_RATIO * forward:
        times = f"the backward pass takes {backward:.2f} ms, the forward pass {forward:.2f} ms"
        detail = f"{times}, for half of its matmuls"
        findings.append(AuditFinding(check="backward_time", detail=detail))
    flops = workload.formulas.least_forward_flops()
    if flops is None:
        return findings
    step = statistics.median(record.total_ms for record in averaged)
    times = {
        "step": (3 * flops, step),
        "forward pass": (flops, forward),
        "backward pass": (2 * flops, backward),
    }
    for name, (work, ms) in times.items():
        if ms > 0 and 1e3 * work / ms > limit.flops_per_s:
            rate = f"{work / ms / 1e9:,.4g} TFLOP/s"
            rate += f", more than {limit.flops_per_s / 1e12:,.4g} ({limit.source})"
            findings.append(AuditFinding(check="rate", detail=f"the {name} would reach {rate}"))
            break
    return findings


def norms_by_part(norms: dict[str, float]) -> dict[str, float]:
    """Norms of the gradients by part of the model, over all layers; without parts whose gradient is
    not finite."""
    squares: dict[str, float] = {}
    for name, norm in norms.items():
        part = part_of(name).name.removesuffix(".weight")
        squares[part] = squares.get(part, 0.0) + norm**2
    return {part: math.sqrt(square) for part, square in squares.items() if math.isfinite(square)}


def findings_text(audit: dict | None) -> str:
    """Of what makes the audit fail; empty: nothing does."""
    findings = (audit or {}).get("findings", [])
    return "; ".join(row["detail"] for row in findings if row["check"] not in FAIL_NOTHING)


def harmless_findings(audit: dict) -> list[str]:
    """What leaves the training right."""
    return [row["detail"] for row in audit["findings"] if row["check"] in FAIL_NOTHING]


def audit_text(audit: dict | None) -> str:
    """'ok', with what the precision does, or that it failed, with the findings."""
    if not audit or audit["ok"] is None:
        return f"not done: {(audit or {}).get('ok_reason', 'not measured by the run')}"
    if not audit["ok"]:
        return FAILED + findings_text(audit)
    return "; ".join(["ok", *harmless_findings(audit), *audit.get("notes", [])])
