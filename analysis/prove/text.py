"""What of a program was proven: its section, those of the changes that help first."""

from analysis.compare.noise import as_fast
from analysis.prove.applied import ALREADY, NO_SIGN
from analysis.prove.audit import DIFFERS
from analysis.prove.proof import FAILS, LEFT_OUT, PASSES, Proof, ProofRow, RatioOfTurns
from analysis.prove.turns import FASTER, NO_DIFFERENCE, SLOWER
from harness.base.sections import Section
from harness.base.tables import Column, column, text_columns
from harness.base.text import significant

REPEATS = {
    "bit-equal": "two runs of it are bit-equal",
    "rounding": "two runs of it differ by rounding",
}
# Verdicts, those that help first.
IN_ORDER = (FASTER, PASSES, NO_DIFFERENCE, SLOWER, DIFFERS, FAILS, ALREADY, NO_SIGN)
WITHIN_NOISE = "turns with nothing changed vary by as much; repeat it where nothing else runs"
# What torch/_dynamo/config.py calls repro_after and repro_level: 4 is for gradients that are wrong.
MINIFIER = "TORCHDYNAMO_REPRO_AFTER=aot TORCHDYNAMO_REPRO_LEVEL=4"


NOTES = [
    (
        "As fast: in turns of steps within one run, with and without the change; the intervals"
        " hold together with 99%; could tell: the smallest gain that would have been seen, with"
        " more --rounds a smaller one"
    ),
    (
        "Trains: the first step beside the same program, bit by bit, or as far apart as"
        " rounding or a lower precision makes it; that it converges as well is not proven"
    ),
    (
        "Memory: the peak of its audit, on a GPU what is allocated, on a CPU the whole process"
        " with its compiler"
    ),
    "Start: how much longer its audit took than those of the program; of one start",
]


def as_fast_text(row: RatioOfTurns) -> str:
    if row.ratio is None:
        return ""
    return as_fast(row.ratio, (row.ratio_low, row.ratio_high), short=True)


COLUMNS = [
    *text_columns("change", "verdict"),
    Column("as fast", as_fast_text, left=True),
    column("trains", "audit", left=True),
    column("could tell", "smallest_gain", ".1%"),
    column("memory, MB", "peak_memory_difference_mb", "+,.0f"),
    column("start, s", "extra_start_s", "+.1f"),
    column("pays after steps", "pays_after_steps", ","),
]


def is_of_compiler(row: ProofRow) -> bool:
    """Whether compilation trains differently, so that PyTorch's minifier has a graph to reduce."""
    return row.verdict == DIFFERS and row.change.startswith("compile")


def line_text(row: ProofRow) -> str:
    return f"{row.line} ({row.where})" if row.where else row.line


def proof_section(proof: Proof) -> Section:
    """The changes, those that help first; together; and the noise."""
    rows = sorted(proof.rows, key=lambda row: (place_of(row.verdict), row.ratio or 0))
    facts = facts_of_program(proof)
    for row in proof.rows:
        facts.update(facts_of_change(row))
    both = proof.together
    if both:
        facts[f"Together ({', '.join(both.changes)})"] = (
            f"{both.verdict} {as_fast_text(both)}; {both.audit}"
        )
    elif proof.reason_of("together") == LEFT_OUT:
        facts["Together"] = f"not tried: {LEFT_OUT}"
    effects = {row.change: row.applied for row in rows if row.applied}
    lines = {row.change: line_text(row) for row in rows if row.line}
    parts = [
        Section("By what it is seen that they took effect", facts=effects),
        Section("The lines of code", facts=lines),
    ]
    return Section("Changes, tried", COLUMNS, rows, NOTES, facts, parts=parts)


def place_of(verdict: str) -> int:
    """Among the rows; those that no version of today knows come last."""
    return IN_ORDER.index(verdict) if verdict in IN_ORDER else len(IN_ORDER)


def facts_of_program(proof: Proof) -> dict[str, str]:
    """The program as it is, and how well it could be timed."""
    plain = proof.plain
    repeats = REPEATS.get(plain.repeats, plain.repeats)
    facts = {"The program as it is": f"{significant(plain.step_ms)} ms a step; {repeats}"}
    nothing = proof.nothing
    if nothing:
        facts["Turns with nothing changed"] = f"{as_fast_text(nothing)}; a gain has to be more"
    if proof.cut_short:
        facts["Rounds that were over"] = f"{proof.rounds}; {proof.cut_short}"
    if proof.not_timed:
        facts["No times"] = proof.not_timed
    return facts


def facts_of_change(row: ProofRow) -> dict[str, str]:
    """Why a change is not to be made; {} if nothing says so."""
    change, verdict = row.change, row.verdict
    if verdict == FAILS:
        return {f"{change} fails": row.reason_of("audit")}
    if verdict in (NO_SIGN, ALREADY):
        return {f"{change}: {verdict}": row.reason_of("applied")}
    if verdict == PASSES and row.ratio is not None:
        return {f"{change}: no verdict": f"{as_fast_text(row)}; {WITHIN_NOISE}"}
    if verdict != DIFFERS:
        return {}
    facts = {f"{change} differs": difference_text(row)}
    if is_of_compiler(row):
        facts[f"The graph of {change}"] = (
            "the program with this change, started with these variables, has PyTorch write"
            " it to repro.py, and a minifier_launcher.py that makes it smaller:"
            f" {MINIFIER}"
        )
    return facts


def difference_text(row: ProofRow) -> str:
    """How far a change that differs is from the program, and in what."""
    far = row.gradient_difference
    text = "a gradient is missing, or no number"
    if far is not None:
        text = f"a gradient by {far:.2g} of itself"
    if row.departs:
        text += f"; what differs: {', '.join(row.departs)}"
    return text
