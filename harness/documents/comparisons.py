"""Comparisons of runs, and changes that were tried on another program."""

from __future__ import annotations

from typing_extensions import NotRequired

from harness.schema import Document, field

UNTOLD = "not measured"

# ---- Changes that were tried on another program -------------------------------------------------


class ProofOfPlain(Document):
    step_ms: float = field("median of the turns without a change; of audits alone, of one step")
    repeats: str = field("whether two runs are bit-equal, apart by rounding, or differ")


class RatioOfTurns(Document):
    ratio: float | None = field("step time with it / without", null=UNTOLD)
    ratio_low: float | None = field(
        "interval; those of all changes hold together with 99%", null=UNTOLD
    )
    ratio_high: float | None = field("its other end", null=UNTOLD)


class ProofRow(RatioOfTurns):
    change: str = field("as in --try")
    verdict: str = field("faster, slower, no difference, passes (not timed), differs, already so …")
    applied: str | None = field(
        "by what it is seen that it took effect, in a step of its audit", null="not tried"
    )
    audit: str | None = field("bit-equal, rounding, lower precision, differs", null=UNTOLD)
    gradient_difference: NotRequired[float | None] = field(
        "of a parameter in the first step, the largest, relative",
        null="a gradient is missing, or no number",
    )
    departs: list[str] = field(
        "what differs, the first six: losses, parameters in the order of the backward pass"
    )
    smallest_gain: NotRequired[float] = field("that its times would have told, share of the step")
    peak_memory_difference_mb: float | None = field("of its audit, with it - without", null=UNTOLD)
    extra_start_s: float | None = field("of its audit, with it - without", null=UNTOLD)
    pays_after_steps: int | None = field(
        "steps that gain what the start costs", null="not faster, or not timed"
    )
    where: str | None = field("file and line of the program", null="it applies to no line")
    line: str | None = field("of code", null="it does not apply")


class ProofTogether(RatioOfTurns):
    changes: list[str] = field("those that are faster")
    verdict: str = field("as of a change")
    applied: str | None = field("as of a change, of those that can be seen", null=UNTOLD)
    audit: str | None = field("as of a change", null=UNTOLD)


class Proof(Document):
    command: str = field("that starts it")
    plain: ProofOfPlain = field("the program as it is")
    nothing: RatioOfTurns | None = field("of turns with nothing changed", null="nothing was timed")
    rows: list[ProofRow] = field("changes")
    together: ProofTogether | None = field("those that help", null="fewer than two do")
    not_timed: str | None = field(
        "why there are no times", null="there are, or none were asked for"
    )
    seconds: float = field("all runs together")
