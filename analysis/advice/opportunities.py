"""What does this trace suggest trying, and how large could the speedup be at most?

Each proposal names the share p of the step that it affects, and the factor s by which that part could at best become
faster; Amdahl's law, 1 / (1 - p + p / s), gives the bound: `at most`.  It uses the device's roof, or that the part may
vanish.  What is only likely, such as the highest rate that this trace shows, gives an `estimate`.  Neither is a
promise: the gain has to be measured.  What cannot help here is listed separately, with the reason.
"""

import math
from dataclasses import asdict

from analysis.advice import changes, efficiency, fusions, waits
from analysis.advice.evidence import WORTH_LISTING, Evidence, NotApplicable, Proposal, row_of
from analysis.trace.links import AttributedLinks

MAKERS = (*fusions.MAKERS, *efficiency.MAKERS, *changes.MAKERS, *waits.MAKERS)
QUIET = ("record later steps", "less host code", "keep memory", "fewer transfers")  # not said to be absent


def opportunities(links: AttributedLinks, summary: dict | None) -> dict[str, list[dict]]:
    """`opportunities`: what the trace supports, most saved first; `not_here`: what cannot win, and why."""
    evidence = Evidence(links, summary)
    if not evidence.total_us:
        return {"opportunities": [], "not_here": []}
    found, not_here = [], []
    for make in MAKERS:
        one = make(evidence)
        if isinstance(one, NotApplicable):
            not_here.append(asdict(one))
        elif one is None or (one.us < WORTH_LISTING * evidence.total_us and one.name in QUIET):
            continue
        elif one.saved_us is not None and one.saved_us < WORTH_LISTING * evidence.total_us:
            limit = "at most" if one.likely_us is None else "by its estimate"
            saved = f"{one.evidence}; {evidence.share(one.saved_us)} could be saved {limit}"
            not_here.append({"name": one.name, "reason": saved})
        else:
            found.append(one)
    rows = [row_of(one, evidence) for one in merged(found)]
    # What says that nothing can be told of later steps is first if it is most of the time.
    rows.sort(key=lambda row: -(row["share"] * row["ms_per_step"] if row["saves_ms"] is None else row["saves_ms"]))
    return {"opportunities": rows + changes.checkpointing(evidence), "not_here": not_here}


def merged(found: list[Proposal]) -> list[Proposal]:
    """Proposals that save the same time are one, which names each way."""
    out: list[Proposal] = []
    for one in found:
        if same := next((other for other in out if saves_the_same(one, other)), None):
            same.how += f"; or {one.name}: {one.how}" + f" ({one.other_flag})" * bool(one.other_flag)
        else:
            out.append(one)
    return out


def saves_the_same(one: Proposal, other: Proposal) -> bool:
    """The same time by the same estimate and bound; a way without a bound saves what another one bounds."""
    if None in (one.saved_us, other.saved_us) or not math.isclose(one.saved_us, other.saved_us):
        return False
    return None in (one.best_us, other.best_us) or math.isclose(one.us - one.best_us, other.us - other.best_us)
