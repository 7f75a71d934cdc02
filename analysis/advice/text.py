"""What to try, for a reader: a table with how it is done, and the first three in a line each."""

from analysis.advice.places import place_text
from analysis.trust.times import is_disturbed
from harness.base.sections import Section
from harness.base.tables import COLUMNS, Column, column

LINE = COLUMNS - 20  # letters of a line of an answer, beside its label
OPPORTUNITY_COLUMNS = [
    column("try", "name", left=True),
    column("saves ms per step", "saves_ms", "~3"),
    Column("estimate", lambda row: row["speedup_estimate"] and f"{row['speedup_estimate']:.2f}x"),
    Column("at most", lambda row: row["speedup_bound"] and f"{row['speedup_bound']:.2f}x"),
    column("share", "share", ".1%"),
    Column("flag, or change", lambda row: row["flag"] or row["next"], left=True),
]


GAINS = ("saves_ms", "speedup_estimate", "speedup_bound")  # which disturbed times do not tell
NO_GAINS = "The steps were disturbed, so no gains are told: repeat it on a quiet machine"


def gain_text(row: dict) -> str:
    """'about 1.22x as fast, at most 1.31x'; the bound alone if that is all that is known."""
    estimate, bound = (
        speedup and f"{speedup:.2f}x" for speedup in (row["speedup_estimate"], row["speedup_bound"])
    )
    if not estimate:
        return f"at most {bound} as fast" if bound else "gain not known"
    return f"about {estimate} as fast" + f", at most {bound}" * (bound not in (None, estimate))


def best_three(analysis: dict) -> list[str]:
    """What to try first, with its gain and its flag, or the change in a few words, that of the
    headline before all; or why there is nothing."""
    headline, rows = analysis["headline"], []
    for row in analysis["opportunities"]:
        if "memory_bound_mb" not in row:
            rows.append(row)
    rows.sort(key=lambda row: not headline["finding"].startswith(row["finding"]))
    if rows and is_disturbed(analysis["integrity"]):
        names = ", ".join(row["name"] for row in rows[:3])
        return [f"repeat it on a quiet machine, which tells what these gain: {names}"]
    texts = [line_of(row, headline["next"]) for row in rows[:3]]
    return texts or [analysis.get("opportunities_reason", "nothing that this trace could support")]


def line_of(row: dict, told: str) -> str:
    """'compile: about 1.22x as fast (--compile)', as far as it fits.  told: what the headline says
    to do, which is not repeated."""
    gain = f"{row['name']}: {gain_text(row)}"
    change = row["flag"] or ("" if row["next"] in told else row["next"])
    if len(change) > LINE - len(gain):
        change = change.partition(": ")[0]
    if not change or len(change) > LINE - len(gain):
        return gain
    return f"{gain} ({change})"


def opportunity_section(analysis: dict) -> Section:
    """What to try, most saved first; how, with its evidence; and what cannot win here."""
    rows, disturbed = analysis["opportunities"], is_disturbed(analysis["integrity"])
    if disturbed:
        rows = [row | dict.fromkeys(GAINS) for row in rows]
    note = [
        "How many times as fast by Amdahl's law, each on its own: they do not add up",
        (
            "At most: the part runs at the device's peak, or vanishes; estimate: what the highest"
            " rate in this trace, or a ratio of peaks, makes likely"
        ),
    ]
    why = [analysis.get("opportunities_reason", "Nothing that this trace could support")]
    note = [NO_GAINS] if disturbed else note
    found = Section("What to try", OPPORTUNITY_COLUMNS, rows, note if rows else why)
    found.warning = analysis["integrity"]["unreliable"].get("opportunities", "")
    found.parts = [
        Section(
            "In Perfetto",
            facts={row["name"]: place_text(row["place"]) for row in rows if row.get("place")},
        ),
        Section("How to do it", facts={row["name"]: how_text(row) for row in rows}),
        Section(
            "Not worthwhile here",
            facts={row["name"]: row["reason"] for row in analysis["not_here"]},
        ),
    ]
    return found


def how_text(row: dict) -> str:
    """What was found and what supports it, what to change, and the basis of bound and estimate."""
    evidence = "" if row["evidence"].lower() == row["finding"].lower() else f" ({row['evidence']})"
    code = "" if row["flag"] or row["next"] == row["how"] else f": {row['next']}"
    return f"{row['finding']}{evidence}. How: {row['how']}{code}. Basis: {row['basis']}"
