"""The answer of a trace: the last lines of every command that reads one, and the sentences that
reports share."""

from collections.abc import Sequence

from analysis.advice.text import best_three
from analysis.attribution.breakdown import largest_text
from analysis.attribution.collectives import communication_text
from analysis.attribution.once import once_text
from analysis.diagnosis.document import OperatorAnalysis
from analysis.diagnosis.headline import DECIDING, headline_lines, of_ranks
from analysis.diagnosis.stragglers import straggler_text
from analysis.trust.gpu_events import UNEXPLAINED, UNLINKED_KERNELS
from analysis.trust.missing_from_trace import missing_text
from analysis.trust.times import is_disturbed, overhead_text, profile_disturbance_text
from harness.base.tables import ANSWER_LINES, answer
from harness.base.text import count_of, printable

Named = Sequence[tuple[str, dict]]  # names and documents of traces


def profile_answer(
    analysis: dict, read_on: str, limit: int = ANSWER_LINES, others: Named = ()
) -> list[str]:
    """What a command that profiles ends with: headline, verdict with trust and disturbance, parts,
    what to try.

    limit: of its lines.  others: names and analyses of the traces that were read with it; of those
    of other runs the bounds are told too.
    """
    trust = analysis["integrity"]
    overhead = trust["profiler_overhead"]
    # Verdict, parts, communication and what to try are of one rank: that which was judged.
    traces = judged_first([("", analysis), *others])
    shown = traces[0][1]
    rank = f"rank {shown['integrity']['rank']}: " * ("rank_judged" in analysis["verdict"])
    answers = OperatorAnalysis.from_json(shown)
    first, *then = best_three(shown)
    rows = {"Headline": headline_lines(analysis), "Verdict": analysis["verdict"]["line"]}
    if "not_compared" in trust:
        bounds = (f"{name}: {one['verdict']['line'].partition(':')[0]}" for name, one in others)
        rows["Ranks"] = "; ".join([f"not compared: {trust['not_compared']}", *bounds])
    rows |= {
        "Trust": trust_of_ranks(rank, traces),
        "Disturbance": profile_disturbance_text(trust["disturbance"]),
        **({} if overhead["ratio"] is None else {"Profiler overhead": overhead_text(overhead)}),
        "Largest parts": rank + largest_text(answers.breakdown, answers.steps.count),
        "Try first": [f"{rank}{first}", *then],
    }
    if answers.once:
        rows["Once"] = f"{rank}{'; '.join(map(once_text, answers.once[:2]))}"
    if shown["communication"]:
        rows["Communication"] = rank + communication_text(shown["communication"])
    if ranks := analysis.get("ranks"):
        late = (
            straggler_text(ranks) if ranks["straggler"] is None else of_ranks(analysis)[0].finding
        )
        rows |= {"Ranks": late} if late != shown["headline"]["finding"] else {}
    if trust["not_recorded"]:
        rows["Not recorded"] = missing_text(trust["not_recorded"])
    told = ("Headline", "Try first", "Read on", "Verdict")
    optional = ("Not recorded", "Profiler overhead", "Communication", "Once", "Ranks")
    return [printable(line) for line in answer(rows | {"Read on": read_on}, limit, told, optional)]


def judged_first(analyses: Named) -> list[tuple[str, dict]]:
    """Names and documents of traces with that of the rank first by which all of them are judged."""
    wanted = analyses[0][1]["verdict"].get("rank_judged", -1)
    return sorted(analyses, key=lambda one: one[1]["integrity"]["rank"] != wanted)


def trust_of_ranks(rank: str, traces: Named) -> str:
    """How far the rank that was judged can be trusted, and which others cannot.  rank: its name; ''
    of a single trace.  traces: of all ranks, that of the judged one first."""
    (_, judged), *others = traces
    text = rank + trust_text(judged)
    bad = [
        str(other["integrity"]["rank"])
        for _, other in others
        if not other["integrity"]["trustworthy"]
    ]
    if rank and bad:
        text += f"; NOT trustworthy: rank {', '.join(bad)}"
    return text


def trust_text(analysis: dict) -> str:
    """How far a trace can be trusted, in a word, and why: complete, or 'incomplete: ', 'disturbed:
    ' and so on."""
    trust, verdict, why = (
        analysis["integrity"],
        analysis["verdict"],
        list(analysis["integrity"]["problems"]),
    )
    by_another = trust["trustworthy"] and "rank_judged" in verdict and not verdict["trustworthy"]
    if by_another:
        why.append(f"rank {verdict['rank_judged']}, by which all are judged, is not")
    disturbed = is_disturbed(trust)
    if disturbed:
        why.append("times NOT trustworthy")
    if trust["malformed_events"]:
        why.append(f"{count_of(trust['malformed_events'], 'event')} skipped as damaged")
    missing = [row["part"] for row in trust["not_recorded"] if row["part"] in DECIDING]
    if missing and verdict["strength"] != "is":
        why.append(f"not recorded, and might decide: {', '.join(missing)}")
    if verdict["shares"]["unexplained"] >= UNEXPLAINED:
        why.append(unexplained_text(analysis))
    linked = trust["kernels_linked_to_an_operator"]
    outside = trust.get("kernels_launched_outside_operators") or 0.0
    if linked is not None and linked + outside < 1 - UNLINKED_KERNELS:
        why.append(f"{linked:.1%} of the steps' GPU events linked to operators")
    word = "disturbed" if disturbed else "incomplete" if why else "complete"
    word = "NOT trustworthy" if by_another or not trust["trustworthy"] else word
    if unused := trust.get("unused_gpu"):
        why.append(f"nothing in it used the GPU ({unused})")
    return f"{word}: {'; '.join(why)}" if why else word


def unexplained_text(analysis: dict) -> str:
    """The share of the steps' time of which the verdict cannot tell what limits it, and what is not
    known of it."""
    verdict, idle = analysis["verdict"], analysis["integrity"]["unexplained_share"] or 0.0
    share, unknown = verdict["shares"]["unexplained"], verdict.get("unknown_kind_share", 0.0)
    no_ridge = verdict["thresholds"]["ridge_source"].startswith("unknown")
    matmuls = "matmuls, no peaks known of the device" if no_ridge else "matmuls without shapes"
    kind = "kernels" if analysis["attribution"]["clock"] == "GPU" else "operators"
    parts = {
        matmuls: share - idle - unknown,
        f"{kind} of unknown kind": unknown,
        "idle, no event says why": idle,
    }
    why = "; ".join(f"{what} {part:.1%}" for what, part in parts.items() if part >= 0.001)
    return f"{share:.1%} of the steps' time unexplained ({why})"
