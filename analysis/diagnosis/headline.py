"""What pays most?  One finding of a trace in one sentence, what it costs a step, and what to do
about it next.

A finding that names its cause, such as a synchronization, comes before a kind of change that often
helps, such as fusion or compilation, unless that saves far more: it is nearer to the line that has
to change.  A rank that holds up the others comes before both, unless they save several times as
much: what the judged rank does too long is often why it is late.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from analysis.advice.catalogue import BY_NAME, HOST, KERNELS, KERNELS_AND_LAUNCHES
from analysis.advice.opportunities import Opportunity
from analysis.advice.places import Place, place_text
from analysis.attribution.collectives import MeasuredCollectiveRow, StepCommunication
from analysis.attribution.operators import KernelRow, OperatorRow
from analysis.diagnosis.document import Findings, Headline, OperatorAnalysis
from analysis.diagnosis.rules import LATE_HOST, MOST, Rule
from analysis.diagnosis.stragglers import Ranks
from analysis.diagnosis.verdict import Verdict
from analysis.program.lines import line_findings
from analysis.trust.missing_from_trace import MissingPart
from analysis.trust.times import profile_disturbance_text
from analysis.vocabulary.bounds import NEXT, OF_GPU
from analysis.vocabulary.words import Reader, Words
from harness.base.text import shortened, significant
from harness.instruments.audit import RANKS_DIFFER
from harness.schema import Unknown

# A kind of change comes before the best finding with a cause if it saves so many times as much
FAR_MORE = 2.0
# What a bound counts beside a forecast, since nothing tells how much of it can be had.
OF_A_BOUND = 0.5
# Proposals for the host's time, to which lines of the program are nearer.
TOLD_BY_LINES = ("less host code", "larger batch")
WORTH_TELLING = 0.03  # of the step
LARGE_PART = 0.10  # of the step
NAME = 60  # letters of a kernel's name
# What to record where one trace cannot tell waiting from transfer
TELLS_WAITING = NEXT["communication"]
# Verdicts about the recording rather than the program, and how to record it instead.
NOT_OF_A_STEP = {
    "capture": Words(
        our_model="record later steps, which replay the graph: --warmup-steps 10",
        own_program="record steps that replay the graph: --warmup-steps, past its capture",
        file_only=(
            "a trace of steps that replay the graph tells more: schedule(wait=..., warmup=...) past"
            " its capture"
        ),
    ),
    "start_up": Words(
        our_model="record later steps: --warmup-steps 10",
        own_program="record later steps: --warmup-steps 10",
        file_only=(
            "a trace of later steps tells more: torch.profiler.schedule(wait=2, warmup=3, active=5)"
        ),
    ),
}
# What is wrong with a recording, as a pattern of the problem, and what makes a better one.
BOTH_ACTIVITIES = "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
CURES = (
    ("cut off|damaged", "let the profiler finish writing, and copy the whole file"),
    (
        "GPU events are missing",
        "torch.cuda.synchronize() before the profiler stops, and record fewer steps",
    ),
    ("no GPU events", BOTH_ACTIVITIES),
    ("step marks overlap", "one profiler at a time, and a file for each rank"),
)
# Nothing that makes wrong training faster helps.
AUDIT_FIRST = (
    "mend this before anything else. What usually takes gradients away: detach() or no_grad(),"
    " checkpoint(use_reentrant=True) of inputs that need none, a kernel without a backward pass"
)
RANKS_FIRST = (
    "mend this before anything else: the last backward pass before the optimizer's step must reduce"
    " the gradients, on all ranks and of all parameters"
)
QUIET = "close other programs or take a node of your own"
# Parts of a recording that a verdict may lack.
DECIDING = ("calls", "steps", "shapes", "other ranks")
# What PyTorch does itself where no library can, and how a library can.
FALLBACK = re.compile("slow_conv|thnn_conv")
BY_A_LIBRARY = (
    "let oneDNN do it: torch.backends.mkldnn.is_available(), float32 or bfloat16, no double, no"
    " complex numbers"
)


class Finding(NamedTuple):
    """What may pay most."""

    finding: str  # a sentence
    saves_ms: float  # of a step
    next: str
    # How near it is to the line that has to change: 0 a kind of change, 1 a cause, 2 the rank or
    # the line with the cause
    nearness: int = 1
    is_late_rank: bool = False
    is_bound: bool = False  # no forecast, but at most
    is_gain: bool = True  # else the whole step could vanish, which tells no gain
    place: Place | None = None  # in Perfetto
    line: str | None = None  # of the program, train.py:77

    @property
    def likely_ms(self) -> float:
        return self.saves_ms * OF_A_BOUND if self.is_bound else self.saves_ms

    @property
    def weight(self) -> float:
        return self.likely_ms * FAR_MORE**self.nearness


def headline(own: Findings) -> Headline:
    """By all other answers, the comparison of ranks among them."""
    verdict_text = own.verdict.because[:1].upper() + own.verdict.because[1:]
    if own.failed_audit:
        finding = f"This does not train as it should: {own.failed_audit}"
        is_of_ranks = own.failed_audit.startswith(RANKS_DIFFER)
        return of_verdict(finding, RANKS_FIRST if is_of_ranks else AUDIT_FIRST, own)
    if not own.integrity.trustworthy:
        return of_verdict(verdict_text, recorded_better(own), own)
    if own.verdict.bound in NOT_OF_A_STEP:
        words = NOT_OF_A_STEP[own.verdict.bound]
        return of_verdict(verdict_text, words.to(own.reader), own)
    best = best_finding(own)
    if own.integrity.disturbance.is_seen:
        return disturbed_headline(best, verdict_text, own)
    if best is None:
        return of_verdict(verdict_text, next_without_finding(own), own)
    no_gain = Unknown("the whole step is affected, and nothing tells how much of it would remain")
    return Headline(
        finding=best.finding,
        saves_ms=best.saves_ms if best.is_gain else no_gain,
        at_most=best.is_bound and best.is_gain,
        next=without_stacks(best.next, own),
        place=best.line,
        in_perfetto=best.place,
    )


def best_finding(own: Findings) -> Finding | None:
    """A rank that holds up the others for a large part of the step before everything else, else
    what weighs most; None: nothing is worth telling."""
    step_ms, worth = own.attribution.ms_per_step, WORTH_TELLING
    if own.verdict.bound == "undecided":  # what is unknown may hide what pays more
        worth = max(worth, own.verdict.unrecorded_idle_share)
    worth_telling = []
    lines = of_lines(own)
    for finding in (*of_ranks(own), *proposals(own, lines), *lines):
        if finding.saves_ms >= worth * step_ms:
            worth_telling.append(finding)
    for finding in worth_telling:
        if finding.is_late_rank and finding.saves_ms >= LARGE_PART * step_ms:
            return finding
    return max(worth_telling, key=lambda finding: finding.weight, default=None)


def disturbed_headline(best: Finding | None, verdict_text: str, own: Findings) -> Headline:
    """To record it again: times that the machine made longer tell no gains.  best: what stands out
    in them."""
    otherwise = best.finding if best else verdict_text
    text = profile_disturbance_text(own.integrity.disturbance)
    if best is None or best.line is None:  # which may begin with the name of a file
        otherwise = f"{otherwise[:1].lower()}{otherwise[1:]}"
    seen = f"{QUIET}, and record it again. Until then without a gain: {otherwise}"
    finding = f"Repeat this on a quiet machine, since these steps were disturbed: {text}"
    no_gain = Unknown("the steps were disturbed, so no gain can be told")
    headline = of_verdict(finding, seen, own)
    return headline.replaced(saves_ms=no_gain, place=best.line if best else None)


def recorded_better(own: Findings) -> str:
    """What makes a recording without these problems."""
    problems = "; ".join(own.integrity.problems)
    cures = dict.fromkeys(cure for pattern, cure in CURES if re.search(pattern, problems))
    how = f": {'; '.join(cures)}" if cures else "; until then no figure here can be relied on"
    words = Words(
        our_model=f"record it again{how}",
        own_program=f"record it again{how}",
        file_only=f"it has to be recorded again{how}",
    )
    return words.to(own.reader)


def of_verdict(finding: str, what: str, own: Findings) -> Headline:
    """The verdict's own sentence; of arithmetic in a fallback, with its name."""
    fallback = in_fallback(own)
    if fallback and own.verdict.bound == "compute":
        finding += (
            f", most of it in {fallback.name}, which runs where no library does the convolution"
        )
        what = BY_A_LIBRARY
    return Headline(
        finding=finding,
        saves_ms=None,
        at_most=False,
        next=without_stacks(what, own),
        place=None,
        in_perfetto=None,
    )


def without_stacks(what: str, own: Findings) -> str:
    """What to do next: before a cure of the host,
    record again without what makes its part longer."""
    if not own.integrity.stacks_recorded or own.verdict.bound != "launch":
        return what
    if own.reader == Reader.FILE_ONLY:
        return (
            f"{what}; less than it seems, since stacks were recorded, which lengthen the host's"
            " part"
        )
    return f"record without stacks, which lengthen the host's part, then {what}"


def of_ranks(own: Findings) -> list[Finding]:
    """The straggler; without one, waiting for other ranks."""
    step_ms = own.attribution.ms_per_step
    if own.ranks and own.ranks.straggler is not None:
        return [of_straggler(own.ranks)]
    if own.communication and own.communication.waiting_ms:
        waits_ms = own.communication.waiting_ms
        finding = (
            f"Ranks wait for one another for {waits_ms:.2f} ms of a step"
            f" ({waits_ms / step_ms:.1%}), now for this, now for that one"
        )
        cure = (
            "make their work equal: batches of the same tokens, the same shapes and cores on each"
            " rank"
        )
        return [Finding(finding, waits_ms, cure)]
    return []


def of_straggler(ranks: Ranks) -> Finding:
    """Its share is of the mean step, which is the same in the answers of all ranks."""
    step_ms = sum(row.ms_per_step for row in ranks.rows) / len(ranks.rows)
    saves_ms = ranks.straggler_saves_ms
    finding = (
        f"Rank {ranks.straggler} holds up the others for {saves_ms:.2f} ms of a step"
        f" ({saves_ms / step_ms:.1%}): {ranks.straggler_why}"
    )
    return Finding(finding, saves_ms, ranks.straggler_next, nearness=2, is_late_rank=True)


def of_lines(own: Findings) -> list[Finding]:
    """Lines of the program for which the step waits."""
    on_gpu = bool(own.kernels)
    is_of_gpu = on_gpu and own.verdict.bound in ("gpu", *OF_GPU)
    findings = []
    for line in line_findings(own.lines, on_gpu):
        if is_of_gpu and line.share < LARGE_PART:  # a busy GPU gains little from the host
            continue
        finding = Finding(
            finding=line.finding,
            saves_ms=line.share * own.attribution.ms_per_step,
            next=line.next,
            nearness=2,
            is_bound=True,
            line=line.where,
        )
        findings.append(finding)
    return findings


def proposals(own: Findings, lines: list[Finding]) -> list[Finding]:
    """lines: which tell more of the host's time than a proposal that names none."""
    of_lines_ms = sum(line.saves_ms for line in lines)
    findings = []
    for row in own.opportunities:
        if row.saves_ms is None or not fits(row, own):
            continue
        is_told = row.name in TOLD_BY_LINES and of_lines_ms >= OF_A_BOUND * row.saves_ms
        if not is_told:
            findings.append(of_proposal(row, own))
    return findings


def of_proposal(row: Opportunity, own: Findings) -> Finding:
    text, what, advice = row.finding, row.next, BY_NAME.get(row.name)
    if own.communication and row.name.startswith("reduce or overlap"):
        text += f", {communication_cause(own.communication, own.collectives)}"
        if own.communication.waiting_ms is None:
            what = TELLS_WAITING.to(own.reader)
    return Finding(
        finding=text,
        saves_ms=row.saves_ms,
        next=what,
        nearness=1 if advice is None or advice.is_cause else 0,
        is_bound=not row.speedup_estimate,
        is_gain=bool(row.speedup_estimate or row.speedup_bound),
        place=row.place,
    )


def fits(row: Opportunity, own: Findings) -> bool:
    """Whether the verdict allows that this pays most: a late host gains nothing from faster
    kernels, a busy GPU little from the host."""
    advice, bound = BY_NAME.get(row.name), own.verdict.bound
    shortens = advice.shortens if advice else ""
    if decided_by(LATE_HOST, own.verdict):
        return shortens not in (KERNELS, KERNELS_AND_LAUNCHES)
    is_small = row.saves_ms < LARGE_PART * own.attribution.ms_per_step
    if not is_small or bound not in ("gpu", *OF_GPU):
        return True
    is_kind_of_change = advice is not None and not advice.is_cause
    if bound == "compute" and in_fallback(own) and is_kind_of_change:
        return False
    return shortens != HOST


def decided_by(rule: Rule, verdict: Verdict) -> bool:
    """Whether this rule decided a verdict."""
    return any(row.decides and row.name == rule.name for row in verdict.rules)


def in_fallback(own: Findings) -> OperatorRow | None:
    """The operator that takes most of the time, if it is what PyTorch falls back to where no
    library does the work."""
    if not own.operators:
        return None
    first = own.operators[0]
    return first if first.share >= MOST and FALLBACK.search(first.name) else None


def communication_cause(about: StepCommunication, rows: list[MeasuredCollectiveRow]) -> str:
    """Does it wait, transfer, or lack computation to overlap with?"""
    hidden = ""
    if about.time_ms:
        hidden = f"{about.hidden_ms / about.time_ms:.0%} of all communication is hidden"
    rate = rows[0].bus_bandwidth_gb_per_sec  # of those that take longest
    at = f" at {significant(rate, 2)} GB/s of bus bandwidth" if rate else ""
    if about.waiting_ms is None:
        return (
            f"waiting for other ranks or transfer{at}, which only traces of all ranks tell apart;"
            f" {hidden}"
        )
    if about.waiting_ms > about.exposed_ms / 2:
        return f"most of it waiting for other ranks; {hidden}"
    return f"most of it transfer{at}; {hidden}"


def next_without_finding(own: Findings) -> str:
    """What to record where that is what the verdict lacks; else where to look."""
    trust, bound = own.integrity, own.verdict.bound
    if trust.unused_gpu:
        return (
            "move model and batches to the GPU, which nothing in this trace used"
            f" ({trust.unused_gpu}): .to('cuda')"
        )
    missing = [row for row in trust.not_recorded if row.part in DECIDING]
    if missing and own.verdict.strength != "is":
        return what_to_record(missing[0], own.reader)
    if not trust.gpu_events:
        return "--verbose, for the operators that take longest"
    if bound in NEXT:
        return NEXT[bound].to(own.reader)
    if isinstance(own.counters, str):
        return own.counters
    return longest_kernel(own.kernels)


def what_to_record(missing: MissingPart, reader: str) -> str:
    part, how = missing.part, missing.how
    if part == "other ranks" and reader == Reader.FILE_ONLY:
        return f"get the traces of the other ranks: {how}"
    words = Words(
        our_model=f"record {part}: {how}",
        own_program=f"record {part}: {how}",
        file_only=f"a recording with {part} would tell: {how}",
    )
    return words.to(reader)


def longest_kernel(kernels: list[KernelRow]) -> str:
    """Where to look on, by the kernel that takes longest; copies and collectives have tables of
    their own."""
    where = "--verbose, for the kernels that take longest"
    for row in kernels:
        if row.kind == "kernel" and row.category != "communication":
            return (
                f"{where}: first of all {shortened(row.name, NAME)}, {row.share:.0%} of all"
                " GPU events' time"
            )
    return where


# ---- For a reader --------------------------------------------------------------------------------


def headline_lines(own: OperatorAnalysis) -> list[str]:
    """The finding word for word; what it costs, and what to do next."""
    return [own.headline.finding, f"{saves_text(own)} Next: {own.headline.next}".lstrip()]


def headline_place(own: OperatorAnalysis) -> str:
    """Where Perfetto shows it: 'rank1.json: 4,123.456 ms, ...'; empty where nothing does."""
    place = own.headline.in_perfetto
    return f"{place.trace}: {place_text(place)}" if place else ""


def saves_text(own: OperatorAnalysis, per: str = "step") -> str:
    """'Saves about 27.4 of 32.4 ms per step.'; empty where nothing is known to pay."""
    if not own.headline.saves_ms:
        return ""
    how = "at most" if own.headline.at_most else "about"
    saves, step_ms = own.headline.saves_ms, own.attribution.ms_per_step
    return f"Saves {how} {significant(saves, 3)} of {significant(step_ms, 3)} ms per {per}."
