"""What bounds the step?  One answer, by the same rules on a CPU, an AMD and an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd
from typing_extensions import NotRequired

from analysis.attribution.collectives import StepCommunication
from analysis.attribution.components import IDLE
from analysis.attribution.critical_path import CriticalPath, host_share
from analysis.attribution.ledger.of_steps import capture_share, of_steps, us_by
from analysis.diagnosis.rules import (
    BOUND_FROM,
    LEAD,
    MOST,
    ON_HOST,
    SLOW_BELOW,
    Asked,
    Decision,
    Facts,
    ask,
    named,
)
from analysis.limits.shape_rates import ShapeRate
from analysis.limits.slice_limits import basis_shares
from analysis.trace.timeline import Timeline
from analysis.trust.integrity import Integrity
from analysis.vocabulary.bounds import MEANINGS, OF_GPU, OF_HOST, TAKES
from harness.base.sections import Section
from harness.schema import Document, field, known_or

NAMES = {"gpu": "GPU-bound", "capture": "recording of a graph", "undecided": "undecided"}


class VerdictRule(Document):
    name: str = field("of its case")
    rule: str = field("when it holds")
    figures: str = field("that it looks at")
    holds: bool = field("whether they meet it")
    decides: bool = field("whether it is the first that holds")


class Thresholds(Document):
    bound_from_share: float = field("of the step, that makes a bound")
    lead_share: float = field("of the step, by which it must be ahead of the next")
    ridge_flops_per_byte: float | None = field(
        "of the device", null="several are possible, or none is known"
    )
    ridge_source: str = field("where it is from")


class Verdict(Document):
    bound: str = field(
        "compute, memory, launch, ..., as shares; capture: of a graph; gpu: work of either;"
        " undecided"
    )
    strength: str = field(
        "is; probably: evidence is missing or disturbed; between: it and runner_up; undecided"
    )
    because: str = field("in a sentence")
    runner_up: str | None = field(
        "with between, the other share", null="no second share is as close"
    )
    trustworthy: bool = field("if false, bound is undecided and line says untrustworthy")
    line: str = field("the verdict in one line, with the shares")
    shares: dict[str, float] = field(
        "of the step's time: compute, memory, launch, ..., unexplained; they add up to 1"
    )
    unclassified_share: float = field("of it: work that may be limited by compute or by memory")
    unrecorded_idle_share: float = field(
        "of it: the GPU was idle for no recorded reason; both make up unexplained"
    )
    basis_shares: dict[str, float] = field(
        "of it: matmuls, attention and convolutions by what classified them"
    )
    unknown_kind_share: float = field(
        "of unclassified_share: kernels or operators that no rule knows"
    )
    rules: list[VerdictRule] = field("in order; the first that holds decides")
    rank_judged: NotRequired[int] = field(
        "of several: the rank that waits least, whose bound this is"
    )
    meaning: dict[str, str] = field("of each share")
    thresholds: Thresholds = field("of the rules")

    @staticmethod
    def contradiction(value: dict) -> str | None:
        """There is a share of what is not known, if only 0."""
        return None if "unexplained" in value["shares"] else "shares.unexplained: is missing"


# ---- Of one trace --------------------------------------------------------------------------------


def verdict(
    timeline: Timeline, trust: Integrity, path: CriticalPath | None, rates: list[ShapeRate]
) -> Verdict:
    """What bounds the step of a trace.  Why communication does, with_communication() tells."""
    roofs = timeline.context.roofs
    of_step = shares_of_step(timeline)
    facts = facts_of(timeline, of_step, trust, path, rates)
    asked = ask(facts)
    decision = next(one.outcome.decision for one in asked if one.decides)
    thresholds = Thresholds(
        bound_from_share=BOUND_FROM,
        lead_share=LEAD,
        ridge_flops_per_byte=known_or(roofs.exact_ridge, roofs.ridge_source),
        ridge_source=roofs.ridge_source,
    )
    return Verdict(
        bound=decision.bound,
        strength=decision.strength,
        because=decision.because,
        runner_up=decision.runner_up,
        trustworthy=trust.trustworthy,
        line=verdict_line(asked, facts, notes_on(decision, facts, trust)),
        shares=of_step.by_bound,
        unclassified_share=of_step.unclassified,
        unrecorded_idle_share=of_step.unrecorded,
        basis_shares=of_step.by_basis,
        unknown_kind_share=of_step.unknown_kind,
        meaning=MEANINGS,
        thresholds=thresholds,
        rules=[rule_row(one) for one in asked],
    )


def facts_of(
    timeline: Timeline,
    of_step: StepShares,
    trust: Integrity,
    path: CriticalPath | None,
    rates: list[ShapeRate],
) -> Facts:
    """What the rules look at."""
    roofs = timeline.context.roofs
    launches = timeline.has_launches
    no_ridge = None if roofs.ridge() else roofs.ridge_source
    slow = [row.share for row in rates if (row.share_of_roof or 1.0) < SLOW_BELOW]
    return Facts(
        shares=of_step.by_bound,
        unclassified=of_step.unclassified,
        unrecorded=of_step.unrecorded,
        capture=capture_share(timeline),
        # Without a recorded launch the path never comes to the GPU.
        on_host=host_share(path) if path and launches else 0.0,
        guessed=of_step.by_basis.get("length", 0.0),
        slow=sum(slow),
        problems=trust.problems,
        doubt=trust.unreliable.get("verdict"),
        lost=trust.disturbance.lost_share or 0.0,
        on_gpu=timeline.on_gpu,
        missing=what_to_record(trust, no_ridge, of_step.unrecorded, launches),
        idle=of_step.idle if timeline.idle_left < 1 else 1.0,
        unknown_kind=of_step.unknown_kind,
    )


class StepShares(NamedTuple):
    """Shares of the steps' time."""

    by_bound: dict[str, float]  # compute, memory, ..., unexplained
    by_basis: dict[str, float]  # of matmuls, attention and convolutions: what classified them
    unrecorded: float  # idle time without a recorded cause
    unclassified: float  # of unexplained, the rest
    unknown_kind: float  # of unclassified, kernels or operators that nothing knows
    idle: float  # without work


def shares_of_step(timeline: Timeline) -> StepShares:
    slices = of_steps(timeline)
    us = us_by(slices, "bound", "state")
    total_us = float(us.sum()) or 1.0
    by_bound = {}
    for bound in MEANINGS:
        by_bound[bound] = float(us.get(bound, us.iloc[:0]).sum()) / total_us
    unrecorded = float(us.get(("unexplained", IDLE), 0.0)) / total_us
    of_unknown_kind = slices["unknown_kind"].to_numpy()
    return StepShares(
        by_bound=by_bound,
        by_basis=basis_shares(slices),
        unrecorded=unrecorded,
        unclassified=max(0.0, by_bound["unexplained"] - unrecorded),
        unknown_kind=float(slices["us"].to_numpy()[of_unknown_kind].sum()) / total_us,
        idle=idle_us(us) / total_us,
    )


def idle_us(us: pd.Series) -> float:
    """us: by bound and state."""
    is_idle = us.index.get_level_values("state") == IDLE
    return float(us[is_idle].sum())


def rule_row(asked: Asked) -> VerdictRule:
    return VerdictRule(
        name=asked.rule.name,
        rule=asked.rule.condition,
        figures=asked.outcome.figures,
        holds=asked.holds,
        decides=asked.decides,
    )


def what_to_record(
    trust: Integrity, no_ridge: str | None, unrecorded: float, launches: bool
) -> str:
    """What would decide, of a trace that decides nothing.

    no_ridge: why no ridge point is known, if none is.  unrecorded: share of the step in which the
    GPU is idle for no recorded reason."""
    if unrecorded >= LEAD and not launches:
        how = "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
        for row in trust.not_recorded:
            if row.part == "calls":  # of a system profiler
                how = row.how
        return f"record the host too: {how}"
    if no_ridge and unrecorded < LEAD:
        return no_ridge.removeprefix("unknown: ")
    if not trust.shapes_recorded:
        return "record with profile(record_shapes=True)"
    if unrecorded >= LEAD:
        return (
            "record the other ranks and processes too: the GPU waits for what this trace does not"
            " contain"
        )
    return "record more steps"


def notes_on(decision: Decision, facts: Facts, trust: Integrity) -> list[str]:
    """What else belongs to a verdict: what it may owe to the recording, and to the machine."""
    notes = []
    if facts.held_up >= ON_HOST:
        notes += notes_on_path(decision, facts)
    if decision.bound == "gpu" and facts.slow_kernels >= MOST:
        notes.append(f"{facts.slow_kernels:.0%} in kernels below {SLOW_BELOW:.0%} of their roof")
    if trust.stacks_recorded and decision.bound in ("launch", "host_code"):
        notes.append("recorded with stacks, which lengthen the host's part")
    if trust.disturbance.is_seen:
        notes.append("repeat on an idle machine")
    elif facts.doubt:
        notes.append(f"unreliable: {facts.doubt}")
    return notes


def notes_on_path(decision: Decision, facts: Facts) -> list[str]:
    """Where most of the critical path is on the host."""
    on_host = f"{facts.on_host:.0%} of the critical path"
    if decision.bound in ("gpu", *OF_GPU) and facts.total(OF_HOST) >= LEAD:
        return [f"a faster GPU would soon wait for the host, which has {on_host}"]
    if decision.bound in OF_HOST and facts.gpu > max(map(facts.share, OF_HOST)):
        return [f"{on_host} is on the host"]
    return []


def verdict_line(asked: Sequence[Asked], facts: Facts, notes: list[str]) -> str:
    """The bound with its strength, and the shares: those that it names, then the largest.  Of an
    untrustworthy trace, what its events would say."""
    _, *of_events = asked
    present = next(one.outcome.decision for one in of_events if one.outcome.decision)
    order = {present.bound: 0, present.runner_up: 1}
    shares = sorted(facts.shares.items(), key=lambda item: (order.get(item[0], 2), -item[1]))
    numbers = ", ".join(f"{named(bound)} {share:.1%}" for bound, share in shares if share >= 0.005)
    line = f"{bound_text(present.bound, present.strength, present.runner_up)}: {numbers}"
    if facts.problems:
        line = f"untrustworthy: {'; '.join(facts.problems)}; from the events present: {line}"
    return "; ".join([line, *notes])


def bound_text(bound: str, strength: str, runner_up: str | None) -> str:
    """'probably compute-bound', 'between memory- and compute-bound', 'GPU-bound', 'undecided'."""
    name = bound.replace("_", "-")
    if strength == "between":
        return f"between {name}- and {runner_up.replace('_', '-')}-bound"
    text = NAMES.get(bound, f"{name}-bound")
    return f"probably {text}" if strength == "probably" else text


def why_communication(own: Verdict, communication: StepCommunication | None) -> str | None:
    """Why communication bounds a step: by bandwidth, by waiting for other ranks, or by too little
    overlap.  None where something else does, or nothing is known of it."""
    if own.bound != "communication" or own.strength == "between":
        return None
    if not communication or not communication.time_ms:
        return None
    hidden_share = communication.hidden_ms / communication.time_ms
    hidden = f"{hidden_share:.0%} of all communication is hidden by computation"
    waiting_ms, exposed_ms = communication.waiting_ms, communication.exposed_ms
    if waiting_ms is None:
        why = "the traces of the other ranks would tell bandwidth from waiting for a rank"
    else:
        waiting_share = waiting_ms / exposed_ms if exposed_ms else 0.0
        mostly = "waiting for late ranks" if waiting_share >= MOST else "transfer, by bandwidth"
        why = f"mostly {mostly}: {waiting_ms:.2f} of {exposed_ms:.2f} ms are waiting"
    share = own.shares["communication"]
    return f"{share:.0%} of the step is {TAKES['communication']}; {why}; {hidden}"


def with_communication(own: Verdict, communication: StepCommunication | None) -> Verdict:
    """The verdict of a trace, with why communication bounds its step, as far as the traces that
    were read together tell: they are heard after each was asked alone."""
    why = why_communication(own, communication)
    return own.replaced(because=why) if why else own


# ---- Of several ranks ----------------------------------------------------------------------------


def verdict_of_ranks(own: Verdict, judged: Verdict, rank: int) -> Verdict:
    """The verdict of all ranks, beside the shares of one: that of the rank that waits least, for
    which the others wait.  rank: its number."""
    of_rank = f"rank {rank}, which waits least for the others"
    return own.replaced(
        bound=judged.bound,
        strength=judged.strength,
        because=f"{of_rank}: {judged.because}",
        runner_up=judged.runner_up,
        trustworthy=judged.trustworthy,
        line=f"{of_rank}: {judged.line}",
        rules=judged.rules,
        rank_judged=rank,
    )


# ---- For a reader --------------------------------------------------------------------------------


def rule_section(verdict: Verdict) -> Section:
    """Why the verdict is what it is: the rule that decides, with its figures; the others in order;
    and how the work was classified."""
    facts = {"Because": verdict.because}
    others = {}
    for number, row in enumerate(verdict.rules, 1):
        if row.decides:
            facts[f"Rule {number} decides"] = row.rule
            facts["Its figures"] = row.figures
        else:
            holds = "holds too" if row.holds else "no"
            others[f"{number}. {row.name}"] = f"{holds}: {row.figures}"
    notes = []
    classified = [f"{basis} {share:.1%}" for basis, share in verdict.basis_shares.items() if share]
    if verdict.unclassified_share:
        classified.append(f"nothing {verdict.unclassified_share:.1%}")
    if classified:
        notes.append(
            f"Matmuls, attention and convolutions, by what classified them: {', '.join(classified)}"
            " of the step"
        )
    meanings = [f"{named(bound)}: {meaning}" for bound, meaning in verdict.meaning.items()]
    notes.append("; ".join(meanings))
    notes.append(f"Ridge point: {verdict.thresholds.ridge_source}")
    bound = bound_text(verdict.bound, verdict.strength, verdict.runner_up)
    return Section(
        f"Why {bound}",
        facts=facts,
        parts=[
            Section("The other rules, in order", facts=others),
            Section("What the shares are", note=notes),
        ],
    )
