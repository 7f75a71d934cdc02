"""What pays most?  One finding of a trace in one sentence, what it costs a step, and what to do
about it next.

A finding that names its cause, such as a synchronization, comes before a kind of change that often
helps, such as fusion or compilation, unless that saves far more: it is nearer to the line that has
to change.  A rank that holds up the others comes before both, unless they save several times as
much: what the judged rank does too long is often why it is late.
"""

import re
from typing import NamedTuple

from analysis.advice.catalogue import BY_NAME, HOST, KERNELS, KERNELS_AND_LAUNCHES
from analysis.advice.text import place_text
from analysis.advice.who_reads import Reader, Words, the_same
from analysis.diagnosis.rules import LATE_HOST, MOST
from analysis.trust.times import is_disturbed, profile_disturbance_text
from analysis.vocabulary.bounds import OF_GPU
from harness.base.text import shortened, significant
from harness.schema import because

# A kind of change comes before the best finding with a cause if it saves so many times as much
FAR_MORE = 2.0
OF_A_BOUND = (
    0.5  # what a bound counts beside a forecast, since nothing tells how much of it can be had
)
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
DECIDING = (
    "calls",
    "steps",
    "shapes",
    "other ranks",
)  # parts of a recording that a verdict may lack
# What PyTorch does itself where no library can, and how a library can.
FALLBACK = re.compile("slow_conv|thnn_conv")
BY_A_LIBRARY = (
    "let oneDNN do it: torch.backends.mkldnn.is_available(), float32 or bfloat16, no double, no"
    " complex numbers"
)


class Finding(NamedTuple):
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


def headline(document: dict) -> dict:
    """`headline` of operator_analysis.json, from its other parts,
    the comparison of ranks among them."""
    trust, verdict = document["integrity"], document["verdict"]
    verdict_text = verdict["because"][:1].upper() + verdict["because"][1:]
    if not trust["trustworthy"]:
        return of_verdict(verdict_text, recorded_better(document), document)
    if words := NOT_OF_A_STEP.get(verdict["bound"]):
        return of_verdict(verdict_text, words.to(reader_of(document)), document)
    best = best_finding(document)
    if is_disturbed(trust):
        return disturbed_headline(best.finding if best else verdict_text, document)
    if best is None:
        return of_verdict(verdict_text, next_without_finding(document), document)
    saves = best.saves_ms if best.is_gain else None
    row = {
        "finding": best.finding,
        "saves_ms": saves,
        "at_most": best.is_bound and best.is_gain,
        "place": best.place,
    }
    row["next"] = without_stacks(best.next, document)
    return row | because(
        "the whole step is affected, and nothing tells how much of it would remain", "saves_ms"
    )


def best_finding(document: dict) -> Finding | None:
    """A rank that holds up the others for a large part of the step before everything else, else
    what weighs most; None: nothing is worth telling."""
    verdict, step = document["verdict"], document["attribution"]["ms_per_step"]
    unknown = (
        verdict["bound"] == "undecided" and verdict["unrecorded_idle_share"]
    ) or 0.0  # may hide what pays more
    worth = max(WORTH_TELLING, unknown) * step
    found = []
    for finding in (*of_ranks(document), *proposals(document)):
        if finding.saves_ms >= worth:
            found.append(finding)
    for finding in found:
        if finding.is_late_rank and finding.saves_ms >= LARGE_PART * step:
            return finding
    return max(found, key=lambda finding: finding.weight, default=None)


def disturbed_headline(otherwise: str, document: dict) -> dict:
    """To record it again: times that the machine made longer tell no gains.  otherwise: what stands
    out in them."""
    text = profile_disturbance_text(document["integrity"]["disturbance"])
    seen = (
        f"{QUIET}, and record it again. Until then without a gain:"
        f" {otherwise[:1].lower()}{otherwise[1:]}"
    )
    out = of_verdict(
        f"Repeat this on a quiet machine, since these steps were disturbed: {text}", seen, document
    )
    return out | because("the steps were disturbed, so no gain can be told", "saves_ms")


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


def of_verdict(finding: str, what: str, document: dict) -> dict:
    """The verdict's own sentence; of arithmetic in a fallback, with its name."""
    fallback = in_fallback(document)
    if fallback and document["verdict"]["bound"] == "compute":
        finding += (
            f", most of it in {fallback['name']}, which runs where no library does the convolution"
        )
        what = BY_A_LIBRARY
    next_step = without_stacks(what, document)
    return {
        "finding": finding,
        "saves_ms": None,
        "at_most": False,
        "next": next_step,
        "place": None,
    }


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
    ranks, about, step = (
        document.get("ranks"),
        document["communication"],
        document["attribution"]["ms_per_step"],
    )
    if ranks and ranks["straggler"] is not None:
        saves = ranks["straggler_saves_ms"]
        steps = [row["ms_per_step"] for row in ranks.get("rows", ()) if "ms_per_step" in row]
        step = sum(steps) / len(steps) if steps else step  # the same in the documents of all ranks
        text = (
            f"Rank {ranks['straggler']} holds up the others for {saves:.2f} ms of a step"
            f" ({saves / step:.1%}): "
        )
        why, what = ranks["straggler_why"], ranks["straggler_next"]
        return [Finding(text + why, saves, what, nearness=2, is_late_rank=True)]
    if about and about["waiting_ms"]:
        waits = about["waiting_ms"]
        text = f"Ranks wait for one another for {waits:.2f} ms of a step ({waits / step:.1%})"
        what = (
            "make their work equal: batches of the same tokens, the same shapes and cores on each"
            " rank"
        )
        return [Finding(f"{text}, now for this, now for that one", waits, what)]
    return []


def proposals(document: dict) -> list[Finding]:
    found, about = [], document["communication"]
    for row in document["opportunities"]:
        if row["saves_ms"] is None or not fits(row, document):
            continue
        text, what, advice = row["finding"], row["next"], BY_NAME.get(row["name"])
        if about and row["name"].startswith("reduce or overlap"):
            text += f", {communication_cause(about, document['collectives'])}"
            if about["waiting_ms"] is None:
                what = NEXT["communication"].to(reader_of(document))
        estimate = row["speedup_estimate"]
        finding = Finding(
            finding=text,
            saves_ms=row["saves_ms"],
            next=what,
            nearness=1 if advice is None or advice.is_cause else 0,
            is_bound=not estimate,
            is_gain=bool(estimate or row["speedup_bound"]),
            place=row.get("place"),
        )
        found.append(finding)
    return found


def fits(row: dict, document: dict) -> bool:
    """Whether the verdict allows that this pays most: a late host gains nothing from faster
    kernels, a busy GPU little from the host."""
    verdict, step = document["verdict"], document["attribution"]["ms_per_step"]
    advice = BY_NAME.get(row["name"])
    shortens = advice.shortens if advice else ""
    if any(rule["decides"] and rule["name"] == LATE_HOST.name for rule in verdict["rules"]):
        return shortens not in (KERNELS, KERNELS_AND_LAUNCHES)
    small = row["saves_ms"] < LARGE_PART * step and verdict["bound"] in ("gpu", *OF_GPU)
    if (
        small
        and verdict["bound"] == "compute"
        and in_fallback(document)
        and advice
        and not advice.is_cause
    ):
        return False
    return not (small and shortens == HOST)


def in_fallback(document: dict) -> dict | None:
    """The operator that takes most of the time, if it is what PyTorch falls back to where no
    library does the work."""
    first = next(iter(document["operators"]), None)
    return first if first and first["share"] >= MOST and FALLBACK.search(first["name"]) else None


def communication_cause(about: dict, collectives: list[dict]) -> str:
    """Does it wait, transfer, or lack computation to overlap with?"""
    hidden = (
        f"{about['hidden_ms'] / about['time_ms']:.0%} of all communication is hidden"
        if about["time_ms"]
        else ""
    )
    rate = collectives[0]["bus_bandwidth_gb_per_sec"]  # of those that take longest
    at = f" at {significant(rate, 2)} GB/s of bus bandwidth" if rate else ""
    if about["waiting_ms"] is None:
        return (
            f"waiting for other ranks or transfer{at}, which only traces of all ranks tell apart;"
            f" {hidden}"
        )
    if about["waiting_ms"] > about["exposed_ms"] / 2:
        return f"most of it waiting for other ranks; {hidden}"
    return f"most of it transfer{at}; {hidden}"


def next_without_finding(document: dict) -> str:
    """What to record where that is what the verdict lacks; else where to look."""
    trust, reader = document["integrity"], reader_of(document)
    if trust.get("unused_gpu"):
        unused = trust["unused_gpu"]
        return (
            f"move model and batches to the GPU, which nothing in this trace used ({unused}):"
            " .to('cuda')"
        )
    missing = [row for row in trust["not_recorded"] if row["part"] in DECIDING]
    if missing and document["verdict"]["strength"] != "is":
        return what_to_record(missing[0], reader)
    if not trust["gpu_events"]:
        return "--verbose, for the operators that take longest"
    if words := NEXT.get(document["verdict"]["bound"]):
        return words.to(reader)
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
    found, saves = analysis["headline"], saves_text(analysis)
    return [found["finding"], f"{saves} Next: {found['next']}".lstrip()]


def headline_place(analysis: dict) -> str:
    """Where Perfetto shows it: 'rank1.json: 4,123.456 ms, ...'; empty where nothing does."""
    place = analysis["headline"].get("place")
    return f"{place['trace']}: {place_text(place)}" if place else ""


def saves_text(analysis: dict, per: str = "step") -> str:
    """'Saves about 27.4 of 32.4 ms per step.'; empty where nothing is known to pay."""
    found, step = analysis["headline"], significant(analysis["attribution"]["ms_per_step"], 3)
    how = "at most" if found["at_most"] else "about"
    return (
        f"Saves {how} {significant(found['saves_ms'], 3)} of {step} ms per {per}."
        if found["saves_ms"]
        else ""
    )
