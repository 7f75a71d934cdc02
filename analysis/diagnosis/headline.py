"""What pays most?  One finding of a trace in one sentence, what it costs a step, and what to do about it next.

A finding that names its cause, such as a synchronization, comes before a kind of change that often helps, such as
fusion or compilation, unless that saves far more: it is nearer to the line that has to change.  A rank that holds up
the others comes before both, unless they save several times as much: what the judged rank does too long is often why it
is late.
"""

import re
from pathlib import Path
from typing import NamedTuple

from analysis.advice.text import place_text
from analysis.diagnosis.verdict import MOST, OF_GPU, RULES, late_host
from analysis.trust.integrity import UNDISTURBED
from harness.base.text import read_ini, significant
from harness.documents.schema import because

# How the names of proposals begin that tell no cause.
KINDS_OF_CHANGE = re.compile("fuse|compile|CUDA graphs|larger batch|mixed precision|reduce or overlap|activation")
FAR_MORE = 2.0  # times what the best finding with a cause saves: by so much a kind of change comes before it
RANK_FIRST = 4.0  # times what a late rank costs: what saves more than that comes before it
OF_A_BOUND = 0.5  # what a bound counts beside a forecast, since nothing tells how much of it can be had
WORTH_TELLING = 0.03  # of the step
# What the verdict leaves of a finding: a late host gains nothing from faster kernels, a busy GPU little from the host.
LATE_HOST = next(rule for rule, ask in RULES.items() if ask is late_host)
OF_KERNELS = re.compile("mixed precision|better|aligned|channels-last|fuse")
OF_HOST_ALONE = re.compile("CUDA graphs|larger batch|less host code")
LARGE_PART = 0.10  # of the step
_TABLES = read_ini(Path(__file__).with_name("what_to_do.ini"))
NEXT, NOT_OF_A_STEP, IN_FALLBACK = _TABLES["bound"], _TABLES["not of a step"], _TABLES["fallback"]
FALLBACK = re.compile("slow_conv|thnn_conv")
DECIDING = ("calls", "steps", "shapes", "other ranks")  # parts of a recording that a verdict may lack


class Finding(NamedTuple):
    finding: str  # a sentence
    saves_ms: float  # of a step
    next: str
    nearness: int = 1  # to the line that has to change: 0 a kind of change, 1 a cause
    is_bound: bool = False  # no forecast, but at most
    is_gain: bool = True  # else the whole step could vanish, which tells no gain
    place: dict | None = None  # in Perfetto

    is_rank: bool = False  # it names the rank that holds up the others

    @property
    def likely_ms(self) -> float:
        return self.saves_ms * OF_A_BOUND if self.is_bound else self.saves_ms

    @property
    def weight(self) -> float:
        return self.likely_ms * FAR_MORE**self.nearness


def headline(document: dict) -> dict:
    """`headline` of operator_analysis.json, from its other parts, the comparison of ranks among them."""
    trust, verdict, step = document["integrity"], document["verdict"], document["attribution"]["ms_per_step"]
    verdict_text = verdict["because"][:1].upper() + verdict["because"][1:]
    if not trust["trustworthy"]:
        return of_verdict(verdict_text, "record it again: docs/reading_a_profile.md says what for", document)
    if how := NOT_OF_A_STEP.get(verdict["bound"]):
        return of_verdict(verdict_text, how, document)
    unknown = (verdict["bound"] == "undecided" and verdict["unrecorded_idle_share"]) or 0.0  # may hide what pays more
    worth = max(WORTH_TELLING, unknown) * step
    found = [one for one in (*of_ranks(document), *proposals(document)) if one.saves_ms >= worth]
    if not found:
        return of_verdict(verdict_text, next_without_finding(document), document)
    best = max(found, key=lambda one: one.weight)
    for late in found:
        if late.is_rank and best.likely_ms <= RANK_FIRST * late.saves_ms:
            best = late
    saves = best.saves_ms if best.is_gain else None
    row = {"finding": best.finding, "saves_ms": saves, "at_most": best.is_bound and best.is_gain, "place": best.place}
    row["next"] = repeated(best.next, document)
    return row | because("the whole step is affected, and nothing tells how much of it would remain", "saves_ms")


def of_verdict(finding: str, what: str, document: dict) -> dict:
    """The verdict's own sentence; of arithmetic in a fallback, with its name."""
    fallback = in_fallback(document)
    if fallback and document["verdict"]["bound"] == "compute":
        finding += f", most of it in {fallback['name']}, which runs where no library does the convolution"
        what = IN_FALLBACK["convolution"]
    return {"finding": finding, "saves_ms": None, "at_most": False, "next": repeated(what, document), "place": None}


def repeated(what: str, document: dict) -> str:
    """What to do next: first of all to record again what was disturbed by the machine, or by the recording itself."""
    trust = document["integrity"]
    if trust["disturbance"]["text"] not in (None, UNDISTURBED):
        return f"repeat on an idle machine, then {what}"
    if trust["stacks_recorded"] and document["verdict"]["bound"] == "launch":
        return f"record without stacks, which lengthen the host's part, then {what}"
    return what


def of_ranks(document: dict) -> list[Finding]:
    """The straggler; without one, waiting for other ranks."""
    ranks, about, step = document.get("ranks"), document["communication"], document["attribution"]["ms_per_step"]
    if ranks and ranks["straggler"] is not None:
        saves = ranks["straggler_saves_ms"]
        text = f"Rank {ranks['straggler']} holds up the others for {saves:.2f} ms of a step ({saves / step:.1%}): "
        return [Finding(text + ranks["straggler_why"], saves, ranks["straggler_next"], is_rank=True)]
    if about and about["waiting_ms"]:
        waits = about["waiting_ms"]
        text = f"Ranks wait for one another for {waits:.2f} ms of a step ({waits / step:.1%})"
        what = "make their work equal: batches of the same tokens, the same shapes and cores on each rank"
        return [Finding(f"{text}, now for this, now for that one", waits, what)]
    return []


def proposals(document: dict) -> list[Finding]:
    found, about = [], document["communication"]
    for row in document["opportunities"]:
        if row["saves_ms"] is not None and fits(row, document):
            text, what = row["finding"], row["next"]
            if about and row["name"].startswith("reduce or overlap"):
                text += f", {communication_cause(about, document['collectives'])}"
                what = what if about["waiting_ms"] is not None else NEXT["communication"]
            cause, estimate = not KINDS_OF_CHANGE.match(row["name"]), row["speedup_estimate"]
            gain = bool(estimate or row["speedup_bound"])
            found.append(Finding(text, row["saves_ms"], what, int(cause), not estimate, gain, row.get("place")))
    return found


def fits(row: dict, document: dict) -> bool:
    """Whether the verdict allows that this pays most."""
    verdict, step = document["verdict"], document["attribution"]["ms_per_step"]
    if any(rule["decides"] and rule["rule"] == LATE_HOST for rule in verdict["rules"]):
        return not OF_KERNELS.match(row["name"])
    small = row["saves_ms"] < LARGE_PART * step and verdict["bound"] in ("gpu", *OF_GPU)
    if small and verdict["bound"] == "compute" and in_fallback(document) and KINDS_OF_CHANGE.match(row["name"]):
        return False
    return not (small and OF_HOST_ALONE.match(row["name"]))


def in_fallback(document: dict) -> dict | None:
    """The operator that takes most of the time, if it is what PyTorch falls back to where no library does the work."""
    first = next(iter(document["operators"]), None)
    return first if first and first["share"] >= MOST and FALLBACK.search(first["name"]) else None


def communication_cause(about: dict, collectives: list[dict]) -> str:
    """Does it wait, transfer, or lack computation to overlap with?"""
    hidden = f"{about['hidden_ms'] / about['time_ms']:.0%} of all communication is hidden" if about["time_ms"] else ""
    rate = collectives[0]["bus_bandwidth_gb_per_sec"]  # of those that take longest
    at = f" at {significant(rate, 2)} GB/s of bus bandwidth" if rate else ""
    if about["waiting_ms"] is None:
        return f"waiting for other ranks or transfer{at}, which only traces of all ranks tell apart; {hidden}"
    if about["waiting_ms"] > about["exposed_ms"] / 2:
        return f"most of it waiting for other ranks; {hidden}"
    return f"most of it transfer{at}; {hidden}"


def next_without_finding(document: dict) -> str:
    """What to record where that is what the verdict lacks; else where to look."""
    if unused := document["integrity"].get("unused_gpu"):
        return f"move model and batches to the GPU, which nothing in this trace used ({unused}): .to('cuda')"
    missing = [row for row in document["integrity"]["not_recorded"] if row["part"] in DECIDING]
    if missing and document["verdict"]["strength"] != "is":
        return f"record {missing[0]['part']}: {missing[0]['how']}"
    if document["counters"]:
        return NEXT.get(document["verdict"]["bound"], document["counters"])
    return "--verbose, for the operators that take longest"


def headline_lines(analysis: dict) -> list[str]:
    """The finding word for word; what it costs, and what to do next."""
    found, saves = analysis["headline"], saves_text(analysis)
    return [found["finding"], f"{saves} Next: {found['next']}".lstrip()]


def headline_place(analysis: dict) -> str:
    """Where Perfetto shows it: 'rank1.json: 4,123.456 ms, ...'; empty where nothing does."""
    place = analysis["headline"].get("place")
    return f"{place['trace']}: {place_text(place)}" if place else ""


def saves_text(analysis: dict) -> str:
    """'Saves about 27.4 of 32.4 ms per step.'; empty where nothing is known to pay."""
    found, step = analysis["headline"], significant(analysis["attribution"]["ms_per_step"], 3)
    how = "at most" if found["at_most"] else "about"
    return f"Saves {how} {significant(found['saves_ms'], 3)} of {step} ms per step." if found["saves_ms"] else ""
