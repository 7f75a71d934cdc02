"""What does this trace suggest trying, and how large could the speedup be at most?

Each proposal names the share p of the step that it affects, and the factor s by which that part
could at best become faster; Amdahl's law, 1 / (1 - p + p / s), gives the bound: `at most`.  It uses
the device's roof, or that the part may vanish.  What is only likely, such as the highest rate that
this trace shows, gives an `estimate`.  Neither is a promise: the gain has to be measured.  What
cannot help here is listed separately, with the reason.
"""

import math
from dataclasses import asdict, replace

from analysis.advice.catalogue import CATALOGUE, KERNELS, Advice
from analysis.advice.evidence import WORTH_LISTING, Evidence, NotApplicable, Proposal
from analysis.trace.timeline import Timeline
from harness.schema import because

WHOLE = 0.999  # of the step: a change to all of it has no bound
ON_HOST = 0.005  # of a proposal's part that is not on the critical path: from here on it is told
Listed = tuple[Advice, Proposal]


def opportunities(timeline: Timeline, path_is_known: bool = True) -> dict[str, list[dict]]:
    """`opportunities`: what the trace supports, most saved first; `not_here`: what cannot win, and
    why.

    path_is_known: as Evidence takes it."""
    evidence = Evidence(timeline, path_is_known)
    if not evidence.total_us:
        return {"opportunities": [], "not_here": []}
    listed: list[Listed] = []
    not_here: list[NotApplicable] = []
    for advice in CATALOGUE:
        found = asked(advice, evidence)
        if isinstance(found, NotApplicable):
            not_here.append(found)
        elif found is not None:
            listed.append((advice, found))
    rows = [row_of(advice, proposal, evidence) for advice, proposal in merged(listed)]
    # What says that nothing can be told of later steps is first if it is most of the time; what
    # saves memory is last.
    rows.sort(key=lambda row: ("memory_bound_mb" in row, -weight(row)))
    return {"opportunities": rows, "not_here": [asdict(one) for one in not_here]}


def weight(row: dict) -> float:
    """By which proposals are sorted, in ms of a step."""
    return row["share"] * row["ms_per_step"] if row["saves_ms"] is None else row["saves_ms"]


def asked(advice: Advice, evidence: Evidence) -> Proposal | NotApplicable | None:
    """What a record proposes for this trace, or why it does not pay; None: nothing of the kind."""
    for condition in advice.applies:
        if why_not := condition(evidence):
            return NotApplicable(advice.name, why_not)
    proposal = advice.look(evidence)
    if proposal is None or isinstance(proposal, NotApplicable):
        return proposal
    least_us = WORTH_LISTING * evidence.total_us
    if proposal.us < least_us and not advice.said_if_absent:
        return None
    path_share = 1.0
    if advice.shortens == KERNELS and proposal.of_events is not None:
        path_share = evidence.path_share(proposal.of_events)
        proposal = on_path_alone(proposal, path_share)
    if proposal.memory_mb is not None or proposal.saved_us is None or proposal.saved_us >= least_us:
        return proposal
    if proposal.done and path_share >= 1 - ON_HOST:
        return NotApplicable(advice.name, proposal.done)
    limit = "at most" if proposal.likely_us is None else "by its estimate"
    saved = f"{proposal.evidence}; {evidence.share(proposal.saved_us)} could be saved {limit}"
    if path_share < 1 - ON_HOST:
        saved += (
            f": {1 - path_share:.0%} of it would only wait for the host, which has the critical"
            " path"
        )
    return NotApplicable(advice.name, saved)


def on_path_alone(proposal: Proposal, path_share: float) -> Proposal:
    """What is left of a proposal that makes kernels shorter,
    of which this share is on the critical path."""
    if path_share >= 1 - ON_HOST:
        return proposal
    basis = (
        f"{proposal.basis}; of what it saves, {path_share:.0%} counts, as the rest is not on the"
        " critical path"
    )
    best, likely = proposal.best_us, proposal.likely_us
    if best is not None:
        best = proposal.us - (proposal.us - best) * path_share
    if likely is not None:
        likely = proposal.us - (proposal.us - likely) * path_share
    return replace(proposal, best_us=best, likely_us=likely, basis=basis)


def merged(listed: list[Listed]) -> list[Listed]:
    """Proposals that save the same time are one, which names each way."""
    out: list[Listed] = []
    for advice, proposal in listed:
        same = next((other for _, other in out if saves_the_same(proposal, other)), None)
        if same is None:
            out.append((advice, proposal))
            continue
        same.how += f"; or {proposal.name}: {proposal.how}"
        if proposal.other_flag:
            same.how += f" ({proposal.other_flag})"
    return out


def saves_the_same(one: Proposal, other: Proposal) -> bool:
    """The same time by the same estimate and bound; a way without a bound saves
    what another one bounds."""
    if one.memory_mb is not None or other.memory_mb is not None:
        return False
    if None in (one.saved_us, other.saved_us) or not math.isclose(one.saved_us, other.saved_us):
        return False
    return None in (one.best_us, other.best_us) or math.isclose(
        one.us - one.best_us, other.us - other.best_us
    )


def row_of(advice: Advice, proposal: Proposal, evidence: Evidence) -> dict:
    """A row of `opportunities`: times in ms of a step, speedups of the step by Amdahl's law."""
    flag, reasons = advice.flag_of(proposal.other_flag), {}
    if flag and not evidence.has_flag(flag):
        reasons["flag_reason"] = f"nothing beside the trace says that its run takes {flag}"
        flag = None
    words = advice.words.to(evidence.reader).format(how=proposal.how, flag=flag, **proposal.filled)
    row = {
        name: getattr(proposal, name) for name in ("name", "finding", "how", "evidence", "basis")
    }
    row |= {"next": (flag and evidence.with_flag(flag)) or words, "flag": flag}
    row |= {"place": evidence.place(proposal.shown), "share": proposal.us / evidence.total_us}
    row |= {"ms_per_step": proposal.us / 1e3 / evidence.steps}
    if proposal.memory_mb is not None:
        return row | costs_of(proposal, evidence) | reasons
    whole = evidence.total_us / evidence.slowed  # what the profiler added may all be in other parts
    saved = None if proposal.best_us is None else (proposal.us - proposal.best_us) / whole
    likely = (
        None
        if proposal.likely_us is None
        else (proposal.us - proposal.likely_us) / evidence.total_us
    )
    saves = saved if likely is None else likely
    if saved is None:
        reasons |= because(proposal.basis, "speedup_bound", "saves_ms")
    if why := proposal.basis.partition("no estimate: ")[2].partition(";")[0]:
        reasons["speedup_estimate_reason"] = why
    row |= {
        "saves_ms": (
            None if saves is None else min(saves, 1.0) * evidence.total_us / 1e3 / evidence.steps
        )
    }
    row |= {"part_speedup": proposal.us / proposal.best_us if proposal.best_us else None}
    row |= {"speedup_bound": 1 / (1 - saved) if saved is not None and saved < WHOLE else None}
    row |= {"speedup_estimate": 1 / (1 - likely) if likely is not None and likely < WHOLE else None}
    return row | reasons


def costs_of(proposal: Proposal, evidence: Evidence) -> dict:
    """The same fields of what saves memory and costs time: the part that it affects runs twice."""
    bound = 1 / (1 + proposal.us / evidence.total_us)
    row = {"part_speedup": 0.5, "speedup_bound": bound, "speedup_estimate": None}
    row |= {"memory_bound_mb": proposal.memory_mb, "saves_ms": None}
    return row | {"saves_ms_reason": "it costs time, and saves memory"}
