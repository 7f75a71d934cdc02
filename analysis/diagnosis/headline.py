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
from analysis.advice.places import Place, place_text
from analysis.advice.who_reads import Reader, Words, the_same
from analysis.diagnosis.rules import LATE_HOST, MOST, Rule
from analysis.trace.reasons import NO_GAIN, NO_PLACE
from analysis.trust.times import is_disturbed, profile_disturbance_text
from analysis.vocabulary.bounds import OF_GPU
from harness.base.text import shortened, significant
from harness.schema import Document, Unknown, field

# A kind of change comes before the best finding with a cause if it saves so many times as much
FAR_MORE = 2.0
# What a bound counts beside a forecast, since nothing tells how much of it can be had.
OF_A_BOUND = 0.5
WORTH_TELLING = 0.03  # of the step
LARGE_PART = 0.10  # of the step
NAME = 60  # letters of a kernel's name
# What to do next, by the bound of the verdict, of a GPU where nothing that was found pays.
NEXT = {
    "launch": Words(
        our_model="--cuda-graphs, or a larger --batch-size: more work per launch",
        own_program=(
            "capture a CUDA graph of the step, or take a larger batch: more work per launch"
        ),
        file_only="capture a CUDA graph of the step, or take a larger batch: more work per launch",
    ),
    "host_code": Words(
        our_model="--profile-stacks, which shows the lines that run between the operators",
        own_program=(
            "profile_program.py --profile-stacks, which shows the lines that run between the"
            " operators"
        ),
        file_only="look at what the host's thread does between the operators: its gaps in Perfetto",
    ),
    "data": the_same(
        "batches made ready while the step before runs: more workers, or less work for each sample"
    ),
    "communication": Words(
        our_model=(
            "read the traces of all ranks together: they tell waiting for one another from transfer"
        ),
        own_program="record traces of all ranks: they tell waiting for one another from transfer",
        file_only=(
            "read the traces of all ranks together with it: they tell waiting for one another from"
            " transfer"
        ),
    ),
}
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
QUIET = "close other programs or take a node of your own"
# Parts of a recording that a verdict may lack.
DECIDING = ("calls", "steps", "shapes", "other ranks")
# What PyTorch does itself where no library can, and how a library can.
FALLBACK = re.compile("slow_conv|thnn_conv")
BY_A_LIBRARY = (
    "let oneDNN do it: torch.backends.mkldnn.is_available(), float32 or bfloat16, no double, no"
    " complex numbers"
)


class Headline(Document):
    finding: str = field("what pays most, in a sentence; where nothing pays, what the verdict says")
    saves_ms: float | None = field("per step, by its estimate, else its bound", null=NO_GAIN)
    at_most: bool = field("saves_ms is a bound; how much of it can be gained is not known")
    next: str = field("the command to run, or the line of code to change")
    place: Place | None = field(
        "of the longest event behind the finding in Perfetto", null=NO_PLACE
    )


class Finding(NamedTuple):
    """What may pay most."""

    finding: str  # a sentence
    saves_ms: float  # of a step
    next: str
    # How near it is to the line that has to change: 0 a kind of change, 1 a cause, 2 the rank with
    # the cause
    nearness: int = 1
    is_late_rank: bool = False
    is_bound: bool = False  # no forecast, but at most
    is_gain: bool = True  # else the whole step could vanish, which tells no gain
    place: dict | None = None  # in Perfetto

    @property
    def likely_ms(self) -> float:
        return self.saves_ms * OF_A_BOUND if self.is_bound else self.saves_ms

    @property
    def weight(self) -> float:
        return self.likely_ms * FAR_MORE**self.nearness


def headline(document: dict) -> Headline:
    """By the other parts of operator_analysis.json, the comparison of ranks among them."""
    trust, verdict = document["integrity"], document["verdict"]
    because = verdict["because"]
    verdict_text = because[:1].upper() + because[1:]
    if not trust["trustworthy"]:
        return of_verdict(verdict_text, recorded_better(document), document)
    if verdict["bound"] in NOT_OF_A_STEP:
        words = NOT_OF_A_STEP[verdict["bound"]]
        return of_verdict(verdict_text, words.to(reader_of(document)), document)
    best = best_finding(document)
    if is_disturbed(trust):
        return disturbed_headline(best.finding if best else verdict_text, document)
    if best is None:
        return of_verdict(verdict_text, next_without_finding(document), document)
    no_gain = Unknown("the whole step is affected, and nothing tells how much of it would remain")
    return Headline(
        finding=best.finding,
        saves_ms=best.saves_ms if best.is_gain else no_gain,
        at_most=best.is_bound and best.is_gain,
        next=without_stacks(best.next, document),
        place=Place.from_json(best.place) if best.place else None,
    )


def best_finding(document: dict) -> Finding | None:
    """A rank that holds up the others for a large part of the step before everything else, else
    what weighs most; None: nothing is worth telling."""
    verdict, step_ms = document["verdict"], document["attribution"]["ms_per_step"]
    worth = WORTH_TELLING
    if verdict["bound"] == "undecided":  # what is unknown may hide what pays more
        worth = max(worth, verdict["unrecorded_idle_share"])
    worth_telling = []
    for finding in (*of_ranks(document), *proposals(document)):
        if finding.saves_ms >= worth * step_ms:
            worth_telling.append(finding)
    for finding in worth_telling:
        if finding.is_late_rank and finding.saves_ms >= LARGE_PART * step_ms:
            return finding
    return max(worth_telling, key=lambda finding: finding.weight, default=None)


def disturbed_headline(otherwise: str, document: dict) -> Headline:
    """To record it again: times that the machine made longer tell no gains.  otherwise: what stands
    out in them."""
    text = profile_disturbance_text(document["integrity"]["disturbance"])
    seen = (
        f"{QUIET}, and record it again. Until then without a gain:"
        f" {otherwise[:1].lower()}{otherwise[1:]}"
    )
    finding = f"Repeat this on a quiet machine, since these steps were disturbed: {text}"
    no_gain = Unknown("the steps were disturbed, so no gain can be told")
    return of_verdict(finding, seen, document).replaced(saves_ms=no_gain)


def reader_of(document: dict) -> str:
    return document.get("reader", Reader.FILE_ONLY)


def recorded_better(document: dict) -> str:
    """What makes a recording without these problems."""
    problems = "; ".join(document["integrity"]["problems"])
    cures = dict.fromkeys(cure for pattern, cure in CURES if re.search(pattern, problems))
    how = f": {'; '.join(cures)}" if cures else "; until then no figure here can be relied on"
    words = Words(
        our_model=f"record it again{how}",
        own_program=f"record it again{how}",
        file_only=f"it has to be recorded again{how}",
    )
    return words.to(reader_of(document))


def of_verdict(finding: str, what: str, document: dict) -> Headline:
    """The verdict's own sentence; of arithmetic in a fallback, with its name."""
    fallback = in_fallback(document)
    if fallback and document["verdict"]["bound"] == "compute":
        finding += (
            f", most of it in {fallback['name']}, which runs where no library does the convolution"
        )
        what = BY_A_LIBRARY
    return Headline(
        finding=finding,
        saves_ms=None,
        at_most=False,
        next=without_stacks(what, document),
        place=None,
    )


def without_stacks(what: str, document: dict) -> str:
    """What to do next: before a cure of the host,
    record again without what makes its part longer."""
    if not document["integrity"]["stacks_recorded"] or document["verdict"]["bound"] != "launch":
        return what
    if reader_of(document) == Reader.FILE_ONLY:
        return (
            f"{what}; less than it seems, since stacks were recorded, which lengthen the host's"
            " part"
        )
    return f"record without stacks, which lengthen the host's part, then {what}"


def of_ranks(document: dict) -> list[Finding]:
    """The straggler; without one, waiting for other ranks."""
    ranks, communication = document.get("ranks"), document["communication"]
    step_ms = document["attribution"]["ms_per_step"]
    if ranks and ranks["straggler"] is not None:
        return [of_straggler(ranks, step_ms)]
    if communication and communication["waiting_ms"]:
        waits_ms = communication["waiting_ms"]
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


def of_straggler(ranks: dict, step_ms: float) -> Finding:
    """step_ms: of this rank; the mean over all is the same in the documents of all ranks."""
    steps_ms = [row["ms_per_step"] for row in ranks.get("rows", ()) if "ms_per_step" in row]
    if steps_ms:
        step_ms = sum(steps_ms) / len(steps_ms)
    saves_ms = ranks["straggler_saves_ms"]
    finding = (
        f"Rank {ranks['straggler']} holds up the others for {saves_ms:.2f} ms of a step"
        f" ({saves_ms / step_ms:.1%}): {ranks['straggler_why']}"
    )
    return Finding(finding, saves_ms, ranks["straggler_next"], nearness=2, is_late_rank=True)


def proposals(document: dict) -> list[Finding]:
    findings = []
    for row in document["opportunities"]:
        if row["saves_ms"] is not None and fits(row, document):
            findings.append(of_proposal(row, document))
    return findings


def of_proposal(row: dict, document: dict) -> Finding:
    """row: of `opportunities`."""
    text, what, advice = row["finding"], row["next"], BY_NAME.get(row["name"])
    communication = document["communication"]
    if communication and row["name"].startswith("reduce or overlap"):
        text += f", {communication_cause(communication, document['collectives'])}"
        if communication["waiting_ms"] is None:
            what = NEXT["communication"].to(reader_of(document))
    estimate = row["speedup_estimate"]
    return Finding(
        finding=text,
        saves_ms=row["saves_ms"],
        next=what,
        nearness=1 if advice is None or advice.is_cause else 0,
        is_bound=not estimate,
        is_gain=bool(estimate or row["speedup_bound"]),
        place=row.get("place"),
    )


def fits(row: dict, document: dict) -> bool:
    """Whether the verdict allows that this pays most: a late host gains nothing from faster
    kernels, a busy GPU little from the host."""
    verdict, step_ms = document["verdict"], document["attribution"]["ms_per_step"]
    advice = BY_NAME.get(row["name"])
    shortens = advice.shortens if advice else ""
    if decided_by(LATE_HOST, verdict):
        return shortens not in (KERNELS, KERNELS_AND_LAUNCHES)
    is_small = row["saves_ms"] < LARGE_PART * step_ms
    if not is_small or verdict["bound"] not in ("gpu", *OF_GPU):
        return True
    is_kind_of_change = advice is not None and not advice.is_cause
    if verdict["bound"] == "compute" and in_fallback(document) and is_kind_of_change:
        return False
    return shortens != HOST


def decided_by(rule: Rule, verdict: dict) -> bool:
    """Whether this rule decided a verdict."""
    return any(row["decides"] and row["name"] == rule.name for row in verdict["rules"])


def in_fallback(document: dict) -> dict | None:
    """The operator that takes most of the time, if it is what PyTorch falls back to where no
    library does the work."""
    if not document["operators"]:
        return None
    first = document["operators"][0]
    return first if first["share"] >= MOST and FALLBACK.search(first["name"]) else None


def communication_cause(communication: dict, collectives: list[dict]) -> str:
    """Does it wait, transfer, or lack computation to overlap with?"""
    hidden = ""
    if communication["time_ms"]:
        hidden_share = communication["hidden_ms"] / communication["time_ms"]
        hidden = f"{hidden_share:.0%} of all communication is hidden"
    rate = collectives[0]["bus_bandwidth_gb_per_sec"]  # of those that take longest
    at = f" at {significant(rate, 2)} GB/s of bus bandwidth" if rate else ""
    waiting_ms = communication["waiting_ms"]
    if waiting_ms is None:
        return (
            f"waiting for other ranks or transfer{at}, which only traces of all ranks tell apart;"
            f" {hidden}"
        )
    if waiting_ms > communication["exposed_ms"] / 2:
        return f"most of it waiting for other ranks; {hidden}"
    return f"most of it transfer{at}; {hidden}"


def next_without_finding(document: dict) -> str:
    """What to record where that is what the verdict lacks; else where to look."""
    trust, reader = document["integrity"], reader_of(document)
    bound, strength = document["verdict"]["bound"], document["verdict"]["strength"]
    if "unused_gpu" in trust:
        return (
            "move model and batches to the GPU, which nothing in this trace used"
            f" ({trust['unused_gpu']}): .to('cuda')"
        )
    missing = [row for row in trust["not_recorded"] if row["part"] in DECIDING]
    if missing and strength != "is":
        return what_to_record(missing[0], reader)
    if not trust["gpu_events"]:
        return "--verbose, for the operators that take longest"
    if bound in NEXT:
        return NEXT[bound].to(reader)
    return document["counters"] or longest_kernel(document)


def what_to_record(missing: dict, reader: str) -> str:
    """missing: a row of `not_recorded`."""
    part, how = missing["part"], missing["how"]
    if part == "other ranks" and reader == Reader.FILE_ONLY:
        return f"get the traces of the other ranks: {how}"
    words = Words(
        our_model=f"record {part}: {how}",
        own_program=f"record {part}: {how}",
        file_only=f"a recording with {part} would tell: {how}",
    )
    return words.to(reader)


def longest_kernel(document: dict) -> str:
    """Where to look on, by the kernel that takes longest; copies and collectives have tables of
    their own."""
    where = "--verbose, for the kernels that take longest"
    for row in document["kernels"]:
        if row["kind"] == "kernel" and row["category"] != "communication":
            return (
                f"{where}: first of all {shortened(row['name'], NAME)}, {row['share']:.0%} of all"
                " GPU events' time"
            )
    return where


def headline_lines(analysis: dict) -> list[str]:
    """The finding word for word; what it costs, and what to do next."""
    headline, saves = analysis["headline"], saves_text(analysis)
    return [headline["finding"], f"{saves} Next: {headline['next']}".lstrip()]


def headline_place(analysis: dict) -> str:
    """Where Perfetto shows it: 'rank1.json: 4,123.456 ms, ...'; empty where nothing does."""
    place = analysis["headline"].get("place")
    return f"{place['trace']}: {place_text(place)}" if place else ""


def saves_text(analysis: dict, per: str = "step") -> str:
    """'Saves about 27.4 of 32.4 ms per step.'; empty where nothing is known to pay."""
    headline, step_ms = analysis["headline"], analysis["attribution"]["ms_per_step"]
    if not headline["saves_ms"]:
        return ""
    how = "at most" if headline["at_most"] else "about"
    saves = significant(headline["saves_ms"], 3)
    return f"Saves {how} {saves} of {significant(step_ms, 3)} ms per {per}."
