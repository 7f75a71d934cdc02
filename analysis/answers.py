"""What does a trace show?  All questions, in the order in which they are asked, of one trace and of
those of several ranks.  operator_analysis.json is the answers, as they are."""

from collections.abc import Collection, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from analysis.advice.efficiency import counters
from analysis.advice.opportunities import Advised, opportunities
from analysis.advice.who_reads import TracedRun
from analysis.attribution.breakdown import step_breakdown
from analysis.attribution.collectives import (
    MeasuredCollectiveRow,
    PredictedBesideRow,
    StepCommunication,
    collective_rows,
    collectives_of,
    communication_of_steps,
    predicted_beside,
)
from analysis.attribution.critical_path import CriticalPath, critical_path
from analysis.attribution.gpu_time import gpu_timeline
from analysis.attribution.ledger import (
    cut_at_arrivals,
    exposed_communication,
    hidden_communication_us,
    occasional_times,
    start_up_slices,
)
from analysis.attribution.model_flops import model_flops_per_step
from analysis.attribution.once import once_rows
from analysis.attribution.operators import kernel_rows, operator_tables
from analysis.diagnosis.arrivals import (
    Comparison,
    RankTrace,
    compare_arrivals,
    not_of_one_run,
    rank_facts,
)
from analysis.diagnosis.document import OperatorAnalysis
from analysis.diagnosis.headline import headline
from analysis.diagnosis.stragglers import Ranks, compare_ranks
from analysis.diagnosis.timelines import memory_series, step_timeline
from analysis.diagnosis.verdict import verdict, verdict_of_ranks, with_communication
from analysis.limits.shape_rates import ShapeRate, shape_rates
from analysis.limits.timeline import NO_FLAGS, timeline_of
from analysis.trace.tables import Trace, read_traces
from analysis.trace.timeline import DeviceFlags, Timeline
from analysis.trust.beside import summary_beside
from analysis.trust.integrity import integrity, not_compared, with_missing_ranks
from analysis.trust.steps import profiled_steps
from harness.base.console import progress_bar
from harness.base.errors import UserError
from harness.schema import ABSENT, Unknown

NOT_TRUSTWORTHY = "the trace is not trustworthy, see integrity"
NOTHING_ADVISED = Advised([], [])

# ---- Of one trace --------------------------------------------------------------------------------


def answers(timeline: Timeline) -> OperatorAnalysis:
    """What one trace shows, without the comparison of ranks."""
    summary = timeline.context.summary
    kernels = kernel_rows(timeline)
    trust = integrity(timeline, kernels)
    why_no_path = trust.unreliable.get("step_timeline")
    path = None if why_no_path else critical_path(timeline)
    rates = shape_rates(timeline)
    exposed = exposed_communication(timeline)
    collectives = collective_rows(collectives_of(timeline).events, exposed)
    n_steps = len(timeline.steps)
    exposed_ms = float(exposed["us"].sum() / 1e3 / n_steps)
    hidden_ms = float(hidden_communication_us(timeline) / 1e3 / n_steps)
    communication = communication_of_steps(collectives, n_steps, exposed_ms, hidden_ms)
    if communication:
        communication["by_difference"] = (summary or {}).get("no_sync")
        communication["predicted"] = None
    breakdown = step_breakdown(timeline)
    step_ms = breakdown.attribution.ms_per_step
    advised = NOTHING_ADVISED
    if trust.trustworthy:
        advised = opportunities(timeline, path is not None)
    tables = operator_tables(timeline)
    return with_headline(
        OperatorAnalysis(
            trace=timeline.trace.path.name,
            integrity=trust,
            headline=ABSENT,  # it is made of all others
            reader=TracedRun(summary).reader.value,
            verdict=verdict(timeline, trust, path, rates, communication),
            steps=profiled_steps(timeline),
            **breakdown._asdict(),
            once=once_rows(
                timeline, occasional_times(timeline), start_up_slices(timeline), step_ms
            ),
            opportunities=advised.opportunities,
            opportunities_reason=ABSENT if trust.trustworthy else NOT_TRUSTWORTHY,
            not_here=[asdict(row) for row in advised.not_here],
            gpu_timeline=gpu_timeline(timeline, trust.unreliable.get("idle_by_cause")),
            collectives=[MeasuredCollectiveRow.from_json(row) for row in collectives],
            communication=StepCommunication.from_json(communication) if communication else None,
            operators=tables.operators,
            operators_by_shape=tables.operators_by_shape,
            kernels=kernels,
            counters=counters(timeline),
            model_flops_per_step=model_flops_per_step(timeline),
            shape_rates=[ShapeRate.from_json(row) for row in rates],
            critical_path=path_answer(path, why_no_path),
            step_timeline=step_timeline(timeline),
            memory=memory_series(timeline),
        )
    )


def path_answer(path: dict | None, why_not: str | None) -> CriticalPath | Unknown | None:
    if path is None:
        return Unknown(why_not) if why_not else None
    return CriticalPath.from_json(path)


def with_headline(own: OperatorAnalysis) -> OperatorAnalysis:
    """The answers with what pays most of what they say."""
    return own.replaced(headline=headline(own.as_json()))


def with_prediction(own: OperatorAnalysis, predicted: list[dict]) -> OperatorAnalysis:
    """The answers with the collectives that a dry run predicts beside those that the trace has.

    predicted: rows of kind, group_size, calls and bytes of a step."""
    if own.communication is None:
        return own
    measured = [row.as_json() for row in own.collectives]
    rows = []
    for row in predicted_beside(predicted, measured, own.communication.steps):
        rows.append(PredictedBesideRow.from_json(row))
    return own.replaced(communication=own.communication.replaced(predicted=rows))


# ---- Of several traces ---------------------------------------------------------------------------


def analyze_all(
    paths: list[Path],
    summary: dict | None = None,
    reading: dict | None = None,
    slices: list | None = None,
    captures: set[Path] | None = None,
    flags: DeviceFlags = NO_FLAGS,
) -> tuple[list[tuple[Path, dict]], list[UserError]]:
    """Each readable trace with its operator_analysis.json, and the errors of the others.

    summary is the performance_summary.json of the run; without it, the one beside each trace is
    used.  reading: options of read_trace().  slices: takes those of each trace, with names.
    captures: takes the files that told of the graphs of the traces.  If the traces are those of
    several ranks of one run, each document contains the comparison of the ranks.
    """
    refused: list[UserError] = []
    captures = set() if captures is None else captures
    alone: list[OfTrace] = []
    for trace in traces_of(paths, reading or {}, refused):
        timeline = timeline_of(trace, summary or summary_beside(trace.path), flags)
        facts = rank_facts(timeline, keep_slices=slices is not None)
        alone.append(OfTrace(trace.path, answers(timeline), facts, timeline.context.summary))
        if timeline.replayed:
            captures.update(timeline.replayed.files)
    together = answers_of_traces([own for own in alone if is_of_run(own, captures)])
    if slices is not None:
        slices += [own.rank.slices for own in together]
    return [(own.path, own.answers.as_json()) for own in together], refused


def traces_of(paths: list[Path], reading: dict, refused: list[UserError]) -> Iterator[Trace]:
    """The trace in each file, or those of the ranks that were merged into it.  refused: takes why
    others cannot."""
    for path in progress_bar("Reading traces", paths):
        try:
            yield from read_traces(path, **reading)
        except UserError as error:
            refused.append(error)


class OfTrace(NamedTuple):
    """What is known of one trace."""

    path: Path
    answers: OperatorAnalysis
    rank: RankTrace
    summary: dict | None  # performance_summary.json of its run


def is_of_run(own: OfTrace, captures: Collection[Path]) -> bool:
    """A trace of captures tells of the graphs of the others, and is no rank of its own."""
    return own.path not in captures or own.answers.integrity.graph_events > 0


def answers_of_traces(traces: list[OfTrace]) -> list[OfTrace]:
    """The traces that were read together, with what each says of the others; those of several ranks
    of one run are compared."""
    ranks = [trace.rank for trace in traces]
    apart = not_of_one_run(ranks)
    if not apart and len(traces) > 1:
        return answers_of_ranks(traces)
    alone = []
    for trace in traces:
        own = with_present_ranks(trace.answers, {trace.rank.rank})
        if len(traces) > 1:
            own = own.replaced(integrity=not_compared(own.integrity, len(traces), apart))
        alone.append(trace._replace(answers=own))
    return alone


def with_present_ranks(own: OperatorAnalysis, present: Collection[int | None]) -> OperatorAnalysis:
    """The answers with what the lack of other ranks' traces means.  present: whose were read."""
    trust = with_missing_ranks(own.integrity, present)
    if not trust.ranks_missing:
        return own
    return with_headline(own.replaced(integrity=trust))  # which may be to record them


def answers_of_ranks(traces: list[OfTrace]) -> list[OfTrace]:
    """The traces of ranks of one run, with `ranks`, the same in all, and with how far the
    collectives of each were waiting for other ranks."""
    by_rank = sorted(traces, key=lambda trace: trace.rank.rank)
    comparison = compare_arrivals([trace.rank for trace in by_rank])
    present = {trace.rank.rank for trace in traces}
    cut = []
    for place, trace in enumerate(by_rank):
        trace = with_waiting(trace, comparison, place)
        trust = with_missing_ranks(trace.answers.integrity, present)
        cut.append(trace._replace(answers=trace.answers.replaced(integrity=trust)))
    documents = [trace.answers.as_json() for trace in cut]
    run = traces[0].summary  # which has the memory of every rank
    ranks = compare_ranks([trace.rank for trace in cut], comparison, documents, run)
    compared = []
    for trace in cut:
        compared.append(trace._replace(answers=trace.answers.replaced(ranks=ranks)))
    judged = judged_by_least(compared, ranks)
    in_order = {id(before): after for before, after in zip(by_rank, judged, strict=True)}
    return [in_order[id(trace)] for trace in traces]


def with_waiting(trace: OfTrace, comparison: Comparison, place: int) -> OfTrace:
    """A rank with how far its collectives were waiting for others.  place: among the ranks that are
    compared."""
    rank, waiting_us = trace.rank, None
    if comparison.waiting_us is not None:
        waiting_us = comparison.waiting_us[place]
        events = rank.found.events
        slices = rank.slices
        if slices is not None:
            slices = cut_at_arrivals(slices, events, waiting_us)
        exposed = cut_at_arrivals(rank.exposed, events, waiting_us)
        rank = replace(rank, exposed=exposed, slices=slices)
    rows = collective_rows(rank.found.events, rank.exposed, waiting_us, comparison.why)
    own = trace.answers
    communication = None
    if own.communication:
        before = own.communication
        measured = communication_of_steps(rows, before.steps, before.exposed_ms, before.hidden_ms)
        beside = {"by_difference": None, "predicted": None}
        communication = StepCommunication.from_json({**measured, **beside})
        communication = communication.replaced(by_difference=before.by_difference)
    told = communication.as_json() if communication else None
    compared = own.replaced(
        collectives=[MeasuredCollectiveRow.from_json(row) for row in rows],
        communication=communication,
        verdict=with_communication(own.verdict, told),
    )
    return trace._replace(rank=rank, answers=compared)


def judged_by_least(traces: list[OfTrace], ranks: Ranks) -> list[OfTrace]:
    """The ranks with one verdict and headline: those of the rank that waits least, for which the
    others wait; where that is not known, each with its own."""
    waiting_ms = [row.waiting_ms for row in ranks.rows]
    if None in waiting_ms:
        return [trace._replace(answers=with_headline(trace.answers)) for trace in traces]
    least = traces[waiting_ms.index(min(waiting_ms))]
    told = headline(least.answers.as_json())
    judged = []
    for trace in traces:
        of_all = verdict_of_ranks(trace.answers.verdict, least.answers.verdict, least.rank.rank)
        own = trace.answers.replaced(verdict=of_all, headline=told)
        judged.append(trace._replace(answers=own))
    return judged
