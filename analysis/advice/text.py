"""What to try, for a reader: a table with how it is done, and each in a line."""

from analysis.advice.opportunities import Opportunity
from analysis.advice.places import place_text
from harness.base.sections import Section
from harness.base.tables import COLUMNS, Column, column

LINE = COLUMNS - 20  # letters of a line of an answer, beside its label
NO_GAINS = "The steps were disturbed, so no gains are told: repeat it on a quiet machine"
NOTES = [
    "How many times as fast by Amdahl's law, each on its own: they do not add up",
    (
        "At most: the part runs at the device's peak, or vanishes; estimate: what the highest"
        " rate in this trace, or a ratio of peaks, makes likely"
    ),
]


def speedup_text(speedup: float | None) -> str | None:
    return f"{speedup:.2f}x" if speedup else None


OPPORTUNITY_COLUMNS = [
    column("try", "name", left=True),
    column("saves ms per step", "saves_ms", "~3"),
    Column("estimate", lambda row: speedup_text(row.speedup_estimate)),
    Column("at most", lambda row: speedup_text(row.speedup_bound)),
    column("share", "share", ".1%"),
    Column("flag, or change", lambda row: row.flag or row.next, left=True),
]


def gain_text(row: Opportunity) -> str:
    """'about 1.22x as fast, at most 1.31x'; the bound alone if that is all that is known."""
    estimate, bound = speedup_text(row.speedup_estimate), speedup_text(row.speedup_bound)
    if not estimate:
        return f"at most {bound} as fast" if bound else "gain not known"
    text = f"about {estimate} as fast"
    return text if bound in (None, estimate) else f"{text}, at most {bound}"


def line_of(row: Opportunity, told: str) -> str:
    """'compile: about 1.22x as fast (--compile)', as far as it fits.  told: what the headline says
    to do, which is not repeated."""
    gain = f"{row.name}: {gain_text(row)}"
    change = row.flag or ("" if row.next in told else row.next)
    if len(change) > LINE - len(gain):
        change = change.partition(": ")[0]
    if not change or len(change) > LINE - len(gain):
        return gain
    return f"{gain} ({change})"


def opportunity_section(
    rows: list[Opportunity],
    not_here: list[dict[str, str]],
    why_none: str,
    *,
    disturbed: bool,
    unreliable: str = "",
) -> Section:
    """What to try, most saved first; how, with its evidence; and what cannot win here.

    disturbed: the machine made the steps longer.  unreliable: why it should not be relied on."""
    note = NOTES
    if disturbed:
        rows = [without_gains(row) for row in rows]
        note = [NO_GAINS]
    places = {row.name: place_text(row.place) for row in rows if row.place}
    return Section(
        "What to try",
        OPPORTUNITY_COLUMNS,
        rows,
        note if rows else [why_none],
        warning=unreliable,
        parts=[
            Section("In Perfetto", facts=places),
            Section("How to do it", facts={row.name: how_text(row) for row in rows}),
            Section("Not worthwhile here", facts={row["name"]: row["reason"] for row in not_here}),
        ],
    )


def without_gains(row: Opportunity) -> Opportunity:
    """Without what disturbed times do not tell."""
    return row.replaced(saves_ms=None, speedup_estimate=None, speedup_bound=None)


def how_text(row: Opportunity) -> str:
    """What was found and what supports it, what to change, and the basis of bound and estimate."""
    evidence = "" if row.evidence.lower() == row.finding.lower() else f" ({row.evidence})"
    code = "" if row.flag or row.next == row.how else f": {row.next}"
    return f"{row.finding}{evidence}. How: {row.how}{code}. Basis: {row.basis}"
