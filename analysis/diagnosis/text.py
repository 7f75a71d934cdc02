"""The answer of a trace: the last lines of every command that reads one, and the sentences that
reports share."""

from collections.abc import Sequence
from typing import TypeVar

from analysis.advice.text import line_of
from analysis.attribution.breakdown import largest_text
from analysis.attribution.collectives import communication_text
from analysis.attribution.once import once_text
from analysis.diagnosis.document import OperatorAnalysis
from analysis.diagnosis.headline import DECIDING, headline_lines, of_ranks
from analysis.diagnosis.stragglers import straggler_text
from analysis.trust.gpu_events import UNEXPLAINED, UNLINKED_KERNELS
from analysis.trust.missing_from_trace import missing_text
from analysis.trust.times import overhead_text, profile_disturbance_text
from harness.base.tables import ANSWER_LINES, answer
from harness.base.text import count_of, printable
from harness.schema import ABSENT

T = TypeVar("T")

Named = Sequence[tuple[str, OperatorAnalysis]]  # names and answers of traces
# Of the lines of an answer: those that are shown whole, and those that are left out first.
TOLD = ("Headline", "Try first", "Read on", "Verdict")
OPTIONAL = ("Not recorded", "Profiler overhead", "Communication", "Once", "Ranks")


def profile_answer(
    own: OperatorAnalysis, read_on: str, limit: int = ANSWER_LINES, others: Named = ()
) -> list[str]:
    """What a command that profiles ends with: headline, verdict with trust and disturbance, parts,
    what to try.

    limit: of its lines.  others: names and answers of the traces that were read with it; of those
    of other runs the bounds are told too.
    """
    trust = own.integrity
    # Verdict, parts, communication and what to try are of one rank: that which was judged.
    traces = judged_first([("", own), *others])
    shown = traces[0][1]
    rank = ""
    if own.verdict.rank_judged is not ABSENT:
        rank = f"rank {shown.integrity.rank}: "
    first, *then = best_three(shown)
    rows = {"Headline": headline_lines(own), "Verdict": own.verdict.line}
    if trust.not_compared:
        rows["Ranks"] = not_compared_text(trust.not_compared, others)
    rows["Trust"] = trust_of_ranks(rank, traces)
    rows["Disturbance"] = profile_disturbance_text(trust.disturbance)
    if trust.profiler_overhead.ratio is not None:
        rows["Profiler overhead"] = overhead_text(trust.profiler_overhead)
    rows["Largest parts"] = rank + largest_text(shown.breakdown, shown.steps.count)
    rows["Try first"] = [f"{rank}{first}", *then]
    if shown.once:
        rows["Once"] = f"{rank}{'; '.join(map(once_text, shown.once[:2]))}"
    if shown.communication:
        rows["Communication"] = rank + communication_text(shown.communication)
    if own.ranks:
        late = late_text(own)
        if late != shown.headline.finding:
            rows["Ranks"] = late
    if trust.not_recorded:
        rows["Not recorded"] = missing_text(trust.not_recorded)
    rows["Read on"] = read_on
    return [printable(line) for line in answer(rows, limit, TOLD, OPTIONAL)]


def best_three(own: OperatorAnalysis) -> list[str]:
    """What to try first, with its gain and its flag, or the change in a few words, that of the
    headline before all; or why there is nothing."""
    rows = [row for row in own.opportunities if row.memory_bound_mb is ABSENT]
    rows.sort(key=lambda row: not own.headline.finding.startswith(row.finding))
    if rows and own.integrity.disturbance.is_seen:
        names = ", ".join(row.name for row in rows[:3])
        return [f"repeat it on a quiet machine, which tells what these gain: {names}"]
    texts = [line_of(row, own.headline.next) for row in rows[:3]]
    return texts or [own.opportunities_reason or "nothing that this trace could support"]


def not_compared_text(why: str, others: Named) -> str:
    """Why traces of several runs are not compared, and what bounds each of the others."""
    texts = [f"not compared: {why}"]
    for name, other in others:
        bound = other.verdict.line.partition(":")[0]
        texts.append(f"{name}: {bound}")
    return "; ".join(texts)


def late_text(own: OperatorAnalysis) -> str:
    """The straggler, as the headline tells of it; or why there is none."""
    if own.ranks.straggler is None:
        return straggler_text(own.ranks)
    return of_ranks(own.findings)[0].finding


def judged_first(traces: Sequence[tuple[T, OperatorAnalysis]]) -> list[tuple[T, OperatorAnalysis]]:
    """Traces with their answers, that of the rank first by which all of them are judged."""
    wanted = traces[0][1].verdict.rank_judged
    return sorted(traces, key=lambda trace: trace[1].integrity.rank != wanted)


def trust_of_ranks(rank: str, traces: Named) -> str:
    """How far the rank that was judged can be trusted, and which others cannot.  rank: its name; ''
    of a single trace.  traces: of all ranks, that of the judged one first."""
    (_, judged), *others = traces
    text = rank + trust_text(judged)
    bad = [str(other.integrity.rank) for _, other in others if not other.integrity.trustworthy]
    if rank and bad:
        text += f"; NOT trustworthy: rank {', '.join(bad)}"
    return text


def trust_text(own: OperatorAnalysis) -> str:
    """How far a trace can be trusted, in a word, and why: complete, or 'incomplete: ', 'disturbed:
    ' and so on."""
    trust, judged = own.integrity, own.verdict.rank_judged
    by_another = trust.trustworthy and judged is not ABSENT and not own.verdict.trustworthy
    why = list(trust.problems)
    if by_another:
        why.append(f"rank {judged}, by which all are judged, is not")
    if trust.disturbance.is_seen:
        why.append("times NOT trustworthy")
    why += what_is_missing(own)
    if by_another or not trust.trustworthy:
        word = "NOT trustworthy"
    elif trust.disturbance.is_seen:
        word = "disturbed"
    else:
        word = "incomplete" if why else "complete"
    if trust.unused_gpu:
        why.append(f"nothing in it used the GPU ({trust.unused_gpu})")
    return f"{word}: {'; '.join(why)}" if why else word


def what_is_missing(own: OperatorAnalysis) -> list[str]:
    """What makes a trace incomplete that is no problem of it."""
    trust, verdict = own.integrity, own.verdict
    texts = []
    if trust.malformed_events:
        texts.append(f"{count_of(trust.malformed_events, 'event')} skipped as damaged")
    missing = [row.part for row in trust.not_recorded if row.part in DECIDING]
    if missing and verdict.strength != "is":
        texts.append(f"not recorded, and might decide: {', '.join(missing)}")
    if verdict.shares["unexplained"] >= UNEXPLAINED:
        texts.append(unexplained_text(own))
    linked = trust.kernels_linked_to_an_operator
    outside = trust.kernels_launched_outside_operators or 0.0
    if linked is not None and linked + outside < 1 - UNLINKED_KERNELS:
        texts.append(f"{linked:.1%} of the steps' GPU events linked to operators")
    return texts


def unexplained_text(own: OperatorAnalysis) -> str:
    """The share of the steps' time of which the verdict cannot tell what limits it, and what is not
    known of it."""
    idle, unknown = own.integrity.unexplained_share or 0.0, own.verdict.unknown_kind_share
    share = own.verdict.shares["unexplained"]
    no_ridge = own.verdict.thresholds.ridge_source.startswith("unknown")
    matmuls = "matmuls, no peaks known of the device" if no_ridge else "matmuls without shapes"
    kind = "kernels" if own.attribution.clock == "GPU" else "operators"
    parts = {
        matmuls: share - idle - unknown,
        f"{kind} of unknown kind": unknown,
        "idle, no event says why": idle,
    }
    why = "; ".join(f"{what} {part:.1%}" for what, part in parts.items() if part >= 0.001)
    return f"{share:.1%} of the steps' time unexplained ({why})"
