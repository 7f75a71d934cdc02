"""What does this trace suggest trying, and how large could the speedup be at most?

Each proposal names the share p of the step that it affects, and the factor s by which that part
could at best become faster; Amdahl's law, 1 / (1 - p + p / s), gives the bound: `at most`.  It uses
the device's roof, or that the part may vanish.  What is only likely, such as the highest rate that
this trace shows, gives an `estimate`.  Neither is a promise: the gain has to be measured.  What
cannot help here is listed separately, with the reason.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from typing_extensions import NotRequired

from analysis.advice.catalogue import CATALOGUE, KERNELS, Advice
from analysis.advice.evidence import Evidence
from analysis.advice.places import Place
from analysis.advice.proposals import WORTH_LISTING, Found, NotApplicable, Proposal
from analysis.trace.reasons import NO_GAIN, NO_PLACE
from analysis.trace.timeline import Timeline
from harness.schema import ABSENT, Document, Unknown, field

WHOLE = 0.999  # of the step: a change to all of it has no bound
ON_HOST = 0.005  # of a proposal's part that is not on the critical path: from here on it is told
Listed = tuple[Advice, Proposal]


class Opportunity(Document):
    name: str = field("of the change")
    finding: str = field("what is wrong, with its figure")
    how: str = field("to change it")
    next: str = field("the command to run; for another program, the line of code to change")
    evidence: str = field("in the trace")
    share: float = field("of the step that it affects")
    ms_per_step: float = field("that it affects")
    saves_ms: float | None = field("of a step, by its estimate, else at most", null=NO_GAIN)
    part_speedup: float | None = field(
        "upper bound for the affected part", null="the affected part could vanish"
    )
    speedup_bound: float | None = field(
        "of the step, by Amdahl's law", null="the whole step is affected"
    )
    speedup_estimate: float | None = field(
        "the likely one", null="no rate is known to estimate it from"
    )
    basis: str = field("how bound and estimate were derived")
    memory_bound_mb: NotRequired[float] = field("MB that it saves at most; checkpointing only")
    flag: str | None = field("flag that enables it", null="no flag of the workshop enables it")
    place: Place | None = field(
        "of the longest event behind the finding in Perfetto", null=NO_PLACE
    )

    @property
    def weight(self) -> float:
        """By which proposals are sorted, in ms of a step."""
        return self.share * self.ms_per_step if self.saves_ms is None else self.saves_ms


class Advised(NamedTuple):
    """What a trace suggests."""

    opportunities: list[Opportunity]  # what it supports, most saved first
    not_here: list[NotApplicable]  # what cannot win


def opportunities(timeline: Timeline, path_is_known: bool = True) -> Advised:
    """path_is_known: as Evidence takes it."""
    evidence = Evidence(timeline, path_is_known)
    listed: list[Listed] = []
    not_here: list[NotApplicable] = []
    if not evidence.total_us:
        return Advised([], [])
    for advice in CATALOGUE:
        found = asked(advice, evidence)
        if isinstance(found, NotApplicable):
            not_here.append(found)
        elif found is not None:
            listed.append((advice, found))
    rows = [row_of(advice, proposal, evidence) for advice, proposal in merged(listed)]
    # What says that nothing can be told of later steps is first if it is most of the time; what
    # saves memory is last.
    rows.sort(key=lambda row: (row.memory_bound_mb is not ABSENT, -row.weight))
    return Advised(rows, not_here)


# ---- What is proposed ----------------------------------------------------------------------------


def asked(advice: Advice, evidence: Evidence) -> Found:
    """What a record proposes for this trace, or why it does not pay; None: nothing of the kind."""
    for condition in advice.applies:
        why_not = condition(evidence)
        if why_not:
            return NotApplicable(advice.name, why_not)
    proposal = advice.look(evidence)
    if proposal is None or isinstance(proposal, NotApplicable):
        return proposal
    return worth_listing(advice, proposal, evidence)


def worth_listing(advice: Advice, proposal: Proposal, evidence: Evidence) -> Found:
    """The proposal with what counts of it, if it saves enough."""
    least_us = WORTH_LISTING * evidence.total_us
    if proposal.us < least_us and not advice.said_if_absent:
        return None
    path_share = 1.0
    if advice.shortens == KERNELS and proposal.of_events is not None:
        path_share = evidence.path_share(proposal.of_events)
        proposal = on_path_alone(proposal, path_share)
    saved_us = proposal.saved_us
    if proposal.memory_mb is not None or saved_us is None or saved_us >= least_us:
        return proposal
    if proposal.done and path_share >= 1 - ON_HOST:
        return NotApplicable(advice.name, proposal.done)
    return NotApplicable(advice.name, too_little(proposal, evidence.share(saved_us), path_share))


def too_little(proposal: Proposal, saved: str, path_share: float) -> str:
    """Why a proposal does not pay.  saved: the share of the step."""
    limit = "at most" if proposal.likely_us is None else "by its estimate"
    text = f"{proposal.evidence}; {saved} could be saved {limit}"
    if path_share < 1 - ON_HOST:
        text += (
            f": {1 - path_share:.0%} of it would only wait for the host, which has the critical"
            " path"
        )
    return text


def on_path_alone(proposal: Proposal, path_share: float) -> Proposal:
    """What is left of a proposal that makes kernels shorter,
    of which this share is on the critical path."""
    if path_share >= 1 - ON_HOST:
        return proposal
    basis = (
        f"{proposal.basis}; of what it saves, {path_share:.0%} counts, as the rest is not on the"
        " critical path"
    )
    best_us, likely_us = proposal.best_us, proposal.likely_us
    if best_us is not None:
        best_us = proposal.us - (proposal.us - best_us) * path_share
    if likely_us is not None:
        likely_us = proposal.us - (proposal.us - likely_us) * path_share
    return replace(proposal, best_us=best_us, likely_us=likely_us, basis=basis)


def merged(listed: list[Listed]) -> list[Listed]:
    """Proposals that save the same time are one, which names each way."""
    kept: list[Listed] = []
    for advice, proposal in listed:
        same = next((i for i, (_, other) in enumerate(kept) if saves_the_same(proposal, other)), -1)
        if same < 0:
            kept.append((advice, proposal))
            continue
        first_advice, first = kept[same]
        how = f"{first.how}; or {proposal.name}: {proposal.how}"
        if proposal.other_flag:
            how += f" ({proposal.other_flag})"
        kept[same] = (first_advice, replace(first, how=how))
    return kept


def saves_the_same(proposal: Proposal, other: Proposal) -> bool:
    """The same time by the same estimate and bound; a way without a bound saves
    what another one bounds."""
    if proposal.memory_mb is not None or other.memory_mb is not None:
        return False
    if proposal.saved_us is None or other.saved_us is None:
        return False
    if not math.isclose(proposal.saved_us, other.saved_us):
        return False
    if proposal.best_us is None or other.best_us is None:
        return True
    return math.isclose(proposal.us - proposal.best_us, other.us - other.best_us)


# ---- A row of the document -----------------------------------------------------------------------


class Gains(NamedTuple):
    """What a proposal saves: ms of a step, and speedups of the step by Amdahl's law."""

    saves_ms: float | Unknown
    part_speedup: float | None  # of the part that it affects
    bound: float | Unknown | None
    estimate: float | Unknown | None
    memory_mb: float = ABSENT


def row_of(advice: Advice, proposal: Proposal, evidence: Evidence) -> Opportunity:
    run = evidence.run
    flag = shown_flag = advice.flag_of(proposal.other_flag)
    if flag and not run.has_flag(flag):
        shown_flag = Unknown(f"nothing beside the trace says that its run takes {flag}")
        flag = None
    words = advice.words.to(run.reader).format(how=proposal.how, flag=flag, **proposal.filled)
    gains = gains_of(proposal, evidence)
    return Opportunity(
        name=proposal.name,
        finding=proposal.finding,
        how=proposal.how,
        next=(flag and run.with_flag(flag)) or words,
        evidence=proposal.evidence,
        share=proposal.us / evidence.total_us,
        ms_per_step=proposal.us / 1e3 / evidence.steps,
        saves_ms=gains.saves_ms,
        part_speedup=gains.part_speedup,
        speedup_bound=gains.bound,
        speedup_estimate=gains.estimate,
        basis=proposal.basis,
        memory_bound_mb=gains.memory_mb,
        flag=shown_flag,
        place=evidence.place(proposal.shown),
    )


def gains_of(proposal: Proposal, evidence: Evidence) -> Gains:
    if proposal.memory_mb is not None:
        return costs_of(proposal, evidence)
    saved, likely = None, None  # shares of the step
    if proposal.best_us is not None:
        # What the profiler added may all be in other parts.
        saved = (proposal.us - proposal.best_us) / (evidence.total_us / evidence.slowed)
    if proposal.likely_us is not None:
        likely = (proposal.us - proposal.likely_us) / evidence.total_us
    saves = saved if likely is None else likely
    saves_ms = Unknown(proposal.basis)
    if saves is not None:
        saves_ms = min(saves, 1.0) * evidence.total_us / 1e3 / evidence.steps
    return Gains(
        saves_ms=saves_ms,
        part_speedup=proposal.us / proposal.best_us if proposal.best_us else None,
        bound=Unknown(proposal.basis) if saved is None else speedup(saved),
        estimate=estimate_of(likely, proposal.basis),
    )


def speedup(saved: float) -> float | None:
    """Of a step, of which this share is saved; None: all of it."""
    return 1 / (1 - saved) if saved < WHOLE else None


def estimate_of(likely: float | None, basis: str) -> float | Unknown | None:
    """likely: the share of the step that is saved.  basis: which may tell why there is none."""
    estimate = None if likely is None else speedup(likely)
    why = basis.partition("no estimate: ")[2].partition(";")[0]
    return Unknown(why) if estimate is None and why else estimate


def costs_of(proposal: Proposal, evidence: Evidence) -> Gains:
    """Of what saves memory and costs time: the part that it affects runs twice."""
    return Gains(
        saves_ms=Unknown("it costs time, and saves memory"),
        part_speedup=0.5,
        bound=1 / (1 + proposal.us / evidence.total_us),
        estimate=None,
        memory_mb=proposal.memory_mb,
    )
