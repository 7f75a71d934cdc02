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
# Of the lines of an answer: those that are shown whole, and those that are left out first.
TOLD = ("Headline", "Try first", "Read on", "Verdict")
OPTIONAL = ("Not recorded", "Profiler overhead", "Communication", "Once", "Ranks")


def profile_answer(
    analysis: dict, read_on: str, limit: int = ANSWER_LINES, others: Named = ()
) -> list[str]:
    """What a command that profiles ends with: headline, verdict with trust and disturbance, parts,
    what to try.

    limit: of its lines.  others: names and analyses of the traces that were read with it; of those
    of other runs the bounds are told too.
    """
    trust = analysis["integrity"]
    # Verdict, parts, communication and what to try are of one rank: that which was judged.
    traces = judged_first([("", analysis), *others])
    shown = traces[0][1]
    rank = ""
    if "rank_judged" in analysis["verdict"]:
        rank = f"rank {shown['integrity']['rank']}: "
    answers = OperatorAnalysis.from_json(shown)
    first, *then = best_three(shown)
    rows = {"Headline": headline_lines(analysis), "Verdict": analysis["verdict"]["line"]}
    if "not_compared" in trust:
        rows["Ranks"] = not_compared_text(trust, others)
    rows["Trust"] = trust_of_ranks(rank, traces)
    rows["Disturbance"] = profile_disturbance_text(trust["disturbance"])
    if trust["profiler_overhead"]["ratio"] is not None:
        rows["Profiler overhead"] = overhead_text(trust["profiler_overhead"])
    rows["Largest parts"] = rank + largest_text(answers.breakdown, answers.steps.count)
    rows["Try first"] = [f"{rank}{first}", *then]
    if answers.once:
        rows["Once"] = f"{rank}{'; '.join(map(once_text, answers.once[:2]))}"
    if shown["communication"]:
        rows["Communication"] = rank + communication_text(shown["communication"])
    if "ranks" in analysis:
        late = late_text(analysis)
        if late != shown["headline"]["finding"]:
            rows["Ranks"] = late
    if trust["not_recorded"]:
        rows["Not recorded"] = missing_text(trust["not_recorded"])
    rows["Read on"] = read_on
    return [printable(line) for line in answer(rows, limit, TOLD, OPTIONAL)]


def not_compared_text(trust: dict, others: Named) -> str:
    """Why traces of several runs are not compared, and what bounds each of the others."""
    texts = [f"not compared: {trust['not_compared']}"]
    for name, analysis in others:
        bound = analysis["verdict"]["line"].partition(":")[0]
        texts.append(f"{name}: {bound}")
    return "; ".join(texts)


def late_text(analysis: dict) -> str:
    """The straggler, as the headline tells of it; or why there is none."""
    if analysis["ranks"]["straggler"] is None:
        return straggler_text(analysis["ranks"])
    return of_ranks(analysis)[0].finding


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
    trust, verdict = analysis["integrity"], analysis["verdict"]
    by_another = trust["trustworthy"] and "rank_judged" in verdict and not verdict["trustworthy"]
    why = list(trust["problems"])
    if by_another:
        why.append(f"rank {verdict['rank_judged']}, by which all are judged, is not")
    if is_disturbed(trust):
        why.append("times NOT trustworthy")
    why += what_is_missing(analysis)
    if by_another or not trust["trustworthy"]:
        word = "NOT trustworthy"
    elif is_disturbed(trust):
        word = "disturbed"
    else:
        word = "incomplete" if why else "complete"
    if "unused_gpu" in trust:
        why.append(f"nothing in it used the GPU ({trust['unused_gpu']})")
    return f"{word}: {'; '.join(why)}" if why else word


def what_is_missing(analysis: dict) -> list[str]:
    """What makes a trace incomplete that is no problem of it."""
    trust, verdict = analysis["integrity"], analysis["verdict"]
    texts = []
    if trust["malformed_events"]:
        texts.append(f"{count_of(trust['malformed_events'], 'event')} skipped as damaged")
    missing = [row["part"] for row in trust["not_recorded"] if row["part"] in DECIDING]
    if missing and verdict["strength"] != "is":
        texts.append(f"not recorded, and might decide: {', '.join(missing)}")
    if verdict["shares"]["unexplained"] >= UNEXPLAINED:
        texts.append(unexplained_text(analysis))
    linked = trust["kernels_linked_to_an_operator"]
    outside = trust["kernels_launched_outside_operators"] or 0.0
    if linked is not None and linked + outside < 1 - UNLINKED_KERNELS:
        texts.append(f"{linked:.1%} of the steps' GPU events linked to operators")
    return texts


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
