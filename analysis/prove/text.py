"""What of a program was proven: its section, those of the changes that help first."""

from analysis.compare.noise import as_fast
from analysis.prove.audit import DIFFERS
from harness.base.sections import Section
from harness.base.tables import column, text_columns
from harness.base.text import significant

FASTER, SLOWER, FAILS = "faster", "slower", "fails"
REPEATS = {
    "bit-equal": "two runs of it are bit-equal",
    "rounding": "two runs of it differ by rounding",
}
IN_ORDER = (
    FASTER,
    "passes",
    "no difference",
    SLOWER,
    DIFFERS,
    FAILS,
    "already so",
    "does not apply",
)
# What torch/_dynamo/config.py calls repro_after and repro_level: 4 is for gradients that are wrong.
MINIFIER = "TORCHDYNAMO_REPRO_AFTER=aot TORCHDYNAMO_REPRO_LEVEL=4"
COLUMNS = [
    *text_columns("change", "verdict"),
    column("as fast", "as_fast", left=True),
    column("trains", "audit", left=True),
    column("could tell", "smallest_gain", ".1%"),
    column("memory, MB", "peak_memory_difference_mb", "+,.0f"),
    column("start, s", "extra_start_s", "+.1f"),
    column("pays after steps", "pays_after_steps", ","),
]


def as_fast_text(row: dict) -> str:
    return (
        ""
        if row["ratio"] is None
        else as_fast(row["ratio"], (row["ratio_low"], row["ratio_high"]), short=True)
    )


def is_of_compiler(row: dict) -> bool:
    """Whether compilation trains differently, so that PyTorch's minifier has a graph to reduce."""
    return row["verdict"] == DIFFERS and row["change"].startswith("compile")


def line_text(row: dict) -> str:
    return row["line"] + f" ({row['where']})" * bool(row["where"])


def proof_section(document: dict) -> Section:
    """The changes, those that help first; together; and the noise."""
    rows = [row | {"as_fast": as_fast_text(row)} for row in document["rows"]]
    places = {verdict: place for place, verdict in enumerate(IN_ORDER)}
    rows.sort(key=lambda row: (places.get(row["verdict"], len(places)), row["ratio"] or 0))
    plain = document["plain"]
    repeats = REPEATS.get(plain["repeats"], plain["repeats"])
    facts = {"The program as it is": f"{significant(plain['step_ms'])} ms a step; {repeats}"}
    if nothing := document["nothing"]:
        facts["Turns with nothing changed"] = f"{as_fast_text(nothing)}; a gain has to be more"
    if document["not_timed"]:
        facts["No times"] = document["not_timed"]
    for row in document["rows"]:
        if row["verdict"] == FAILS:
            facts[f"{row['change']} fails"] = row.get("audit_reason", "")
        if row["verdict"] == DIFFERS:
            far = row["gradient_difference"]
            how = (
                "a gradient is missing, or no number"
                if far is None
                else f"a gradient by {far:.2g} of itself"
            )
            where = f"; what differs: {', '.join(row['departs'])}" if row["departs"] else ""
            facts[f"{row['change']} differs"] = how + where
            if is_of_compiler(row):
                facts[f"The graph of {row['change']}"] = (
                    "the program with this change, started with these variables, has PyTorch write"
                    " it to repro.py, and a minifier_launcher.py that makes it smaller:"
                    f" {MINIFIER}"
                )
        if row["verdict"] in ("does not apply", "already so"):
            facts[f"{row['change']}: {row['verdict']}"] = row.get("applied_reason", "")
    if both := document["together"]:
        facts[f"Together ({', '.join(both['changes'])})"] = (
            f"{both['verdict']} {as_fast_text(both)}; {both['audit']}"
        )
    note = [
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
    effects, lines = {}, {}
    for row in rows:
        if row["applied"]:
            effects[row["change"]] = row["applied"]
        if row["line"]:
            lines[row["change"]] = line_text(row)
    parts = [Section("By what it is seen that they took effect", facts=effects)]
    parts.append(Section("The lines of code", facts=lines))
    return Section("Changes, tried", COLUMNS, rows, note, facts, parts=parts)
