"""What does a trace show?  All questions, in the order in which they are asked, of one trace and of
those of several ranks.  operator_analysis.json is the answers, as they are."""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.advice.efficiency import counters
from analysis.advice.opportunities import Advised, opportunities
from analysis.advice.who_reads import TracedRun
from analysis.attribution.breakdown import Attribution, step_breakdown
from analysis.attribution.collectives import (
    ONE_TRACE,
    CommunicationTimes,
    MeasuredCollectiveRow,
    StepCommunication,
    collective_rows,
    collectives_of,
    communication_of_steps,
)
from analysis.attribution.critical_path import critical_path
from analysis.attribution.gpu_time import gpu_timeline
from analysis.attribution.ledger.host_activity import occasional_times
from analysis.attribution.ledger.of_steps import (
    cut_at_arrivals,
    exposed_communication,
    hidden_communication_us,
    start_up_slices,
)
from analysis.attribution.model_flops import model_flops_per_step
from analysis.attribution.once import once_rows
from analysis.attribution.operators import KernelRow, kernel_rows, operator_tables
from analysis.diagnosis.arrivals import (
    Comparison,
    RankTrace,
    compare_arrivals,
    not_of_one_run,
    rank_facts,
)
from analysis.diagnosis.document import Findings, Headline, OperatorAnalysis
from analysis.diagnosis.headline import headline
from analysis.diagnosis.stragglers import OwnAnswers, Ranks, compare_ranks
from analysis.diagnosis.timelines import memory_series, step_timeline
from analysis.diagnosis.verdict import Verdict, verdict, verdict_of_ranks, with_communication
from analysis.limits.shape_rates import shape_rates
from analysis.limits.timeline import NO_FLAGS, timeline_of
from analysis.program.lines import line_rows
from analysis.trace.tables import Trace, read_traces
from analysis.trace.timeline import DeviceFlags, Timeline
from analysis.trust.beside import summary_beside
from analysis.trust.integrity import Integrity, integrity, not_compared, with_missing_ranks
from analysis.trust.steps import profiled_steps
from harness.base.console import progress_bar
from harness.base.errors import UserError
from harness.instruments.audit import findings_text
from harness.instruments.no_sync import NoSyncSteps
from harness.schema import ABSENT, Unknown

NOT_TRUSTWORTHY = "the trace is not trustworthy, see integrity"
NOTHING_ADVISED = Advised([], [])

# ---- Of one trace --------------------------------------------------------------------------------


class Asked(NamedTuple):
    """What one trace answers, before others that were read with it are heard."""

    integrity: Integrity  # of the trace alone
    verdict: Verdict  # without what communication costs
    attribution: Attribution
    kernels: list[KernelRow]
    findings: Callable[..., Findings]  # takes what others may change: see findings_of()
    document: Callable[..., OperatorAnalysis]  # takes the findings and the headline
    times: CommunicationTimes
    by_difference: NoSyncSteps | None  # what the run measured without a profiler
    predicted: list[dict] | None  # collectives of a step, by a dry run of it
    peak_mb: float | None  # of memory


def ask(timeline: Timeline, predicted: list[dict] | None) -> Asked:
    """The questions of one trace.  predicted: rows of kind, group_size, calls and bytes."""
    summary = timeline.context.summary
    kernels = kernel_rows(timeline)
    trust = integrity(timeline, kernels)
    why_no_path = trust.unreliable.get("step_timeline")
    path = None if why_no_path else critical_path(timeline)
    rates = shape_rates(timeline)
    exposed = exposed_communication(timeline)
    n_steps = len(timeline.steps)
    times = CommunicationTimes(
        steps=n_steps,
        exposed_ms=float(exposed["us"].sum() / 1e3 / n_steps),
        hidden_ms=float(hidden_communication_us(timeline) / 1e3 / n_steps),
    )
    by_difference = (summary or {}).get("no_sync")
    if by_difference:
        by_difference = NoSyncSteps.from_json(by_difference)
    breakdown = step_breakdown(timeline)
    step_ms = breakdown.attribution.ms_per_step
    advised = NOTHING_ADVISED
    if trust.trustworthy:
        advised = opportunities(timeline, path is not None)
    tables, memory = operator_tables(timeline), memory_series(timeline)
    findings = functools.partial(
        Findings,
        reader=TracedRun(summary).reader.value,
        failed_audit=failed_audit(summary) or ABSENT,
        attribution=breakdown.attribution,
        opportunities=advised.opportunities,
        lines=line_rows(timeline),
        operators=tables.operators,
        kernels=kernels,
        counters=counters(timeline),
    )
    document = functools.partial(
        OperatorAnalysis,
        trace=timeline.trace.path.name,
        device=timeline.context.device["name"] or None,
        steps=profiled_steps(timeline),
        phases=breakdown.phases,
        components=breakdown.components,
        classes=breakdown.classes,
        once=once_rows(timeline, occasional_times(timeline), start_up_slices(timeline), step_ms),
        opportunities_reason=ABSENT if trust.trustworthy else NOT_TRUSTWORTHY,
        not_here=[asdict(row) for row in advised.not_here],
        gpu_timeline=gpu_timeline(timeline, trust.unreliable.get("idle_by_cause")),
        operators_by_shape=tables.operators_by_shape,
        model_flops_per_step=model_flops_per_step(timeline),
        shape_rates=rates,
        critical_path=Unknown(why_no_path) if why_no_path else path,
        step_timeline=step_timeline(timeline),
        memory=memory,
    )
    return Asked(
        integrity=trust,
        verdict=verdict(timeline, trust, path, rates),
        attribution=breakdown.attribution,
        kernels=kernels,
        findings=findings,
        document=document,
        times=times,
        by_difference=by_difference,
        predicted=predicted,
        peak_mb=memory.peak_mb,
    )


class Communicated(NamedTuple):
    """What the collectives of a trace cost."""

    collectives: list[MeasuredCollectiveRow]
    of_step: StepCommunication | None


def communicated(
    asked: Asked,
    events: pd.DataFrame,
    exposed: pd.DataFrame,
    waiting_us: np.ndarray | None = None,
    why: str = ONE_TRACE,
) -> Communicated:
    """The arguments are those of collective_rows()."""
    rows = collective_rows(events, exposed, waiting_us, why)
    of_step = communication_of_steps(rows, asked.times, asked.by_difference, asked.predicted)
    return Communicated(rows, of_step)


def findings_of(
    asked: Asked, trust: Integrity, own_verdict: Verdict, cost: Communicated, ranks: Ranks = ABSENT
) -> Findings:
    """From which what pays most is chosen.  trust: with what is known of other ranks."""
    return asked.findings(
        integrity=trust,
        verdict=own_verdict,
        collectives=cost.collectives,
        communication=cost.of_step,
        ranks=ranks,
    )


def answers(timeline: Timeline, present: Collection[int | None] | None = None) -> OperatorAnalysis:
    """What one trace shows, with which no others are read.  present: the ranks of its run whose
    traces there are; None: others are not looked for."""
    asked = ask(timeline, None)
    trust = asked.integrity
    if present is not None:
        trust = with_missing_ranks(trust, present)
    cost = communicated(asked, collectives_of(timeline).events, exposed_communication(timeline))
    return answered_alone(asked, trust, cost)


def answered_alone(
    asked: Asked, trust: Integrity, cost: Communicated, not_read: list[str] | None = None
) -> OperatorAnalysis:
    """What a trace shows that is compared with no others."""
    own_verdict = with_communication(asked.verdict, cost.of_step)
    findings = findings_of(asked, trust, own_verdict, cost)
    return answered(asked, findings, headline(findings), not_read)


def answered(
    asked: Asked, findings: Findings, pays_most: Headline, not_read: list[str] | None = None
) -> OperatorAnalysis:
    """The document, which is not changed afterwards.  not_read: files that are no traces, each with
    the error; None: they were not looked for."""
    if not_read is None:
        not_read = ABSENT
    return asked.document(**findings._asdict(), headline=pays_most, not_read=not_read)


def failed_audit(summary: dict | None) -> str:
    """What the audit of the run found wrong; empty: nothing, or there was none."""
    audit = (summary or {}).get("audit")
    return findings_text(audit) if audit and audit["ok"] is False else ""


# ---- Of several traces ---------------------------------------------------------------------------


def analyze_all(
    paths: list[Path],
    summary: dict | None = None,
    reading: dict | None = None,
    slices: list | None = None,
    others: Callable[[set[Path]], list[UserError]] | None = None,
    flags: DeviceFlags = NO_FLAGS,
    predicted: Mapping[Path, list[dict]] | None = None,
) -> tuple[list[tuple[Path, OperatorAnalysis]], list[UserError]]:
    """Each readable trace with its answers, and the errors of the others.

    summary is the performance_summary.json of the run; without it, the one beside each trace is
    used.  reading: options of read_trace().  slices: takes those of each trace, with names.
    others: what else is there and no trace, each with the error, of the files that told of the
    graphs of the traces; told after the traces that cannot be read.  predicted: collectives of a
    step of the run that wrote a trace, by a dry run: rows of kind, group_size, calls and bytes.  If
    the traces are those of several ranks of one run, the answers of each contain the comparison of
    the ranks.
    """
    refused: list[UserError] = []
    alone = []
    for trace in traces_of(paths, reading or {}, refused):
        of_run = (predicted or {}).get(trace.path)
        alone.append(ask_trace(trace, summary, flags, of_run, keep_slices=slices is not None))
    captured = set.union(set(), *(own.told_by for own in alone))
    if others is not None:
        refused += others(captured)
    not_read = [str(error) for error in refused]
    together = answers_of_traces([own for own in alone if is_of_run(own, captured)], not_read)
    if slices is not None:
        slices += [own.slices for own in together]
    return [(own.path, own.answers) for own in together], refused


def traces_of(paths: list[Path], reading: dict, refused: list[UserError]) -> Iterator[Trace]:
    """The trace in each file, or those of the ranks that were merged into it.  refused: takes why
    others cannot."""
    for path in progress_bar("Reading traces", paths):
        try:
            yield from read_traces(path, **reading)
        except UserError as error:
            refused.append(error)


class AskedTrace(NamedTuple):
    """What is known of one trace alone."""

    path: Path
    asked: Asked
    rank: RankTrace
    summary: dict | None  # performance_summary.json of its run
    told_by: set[Path]  # files that told of its graphs


def ask_trace(
    trace: Trace,
    summary: dict | None,
    flags: DeviceFlags,
    predicted: list[dict] | None,
    keep_slices: bool,
) -> AskedTrace:
    timeline = timeline_of(trace, summary or summary_beside(trace.path), flags)
    return AskedTrace(
        path=trace.path,
        asked=ask(timeline, predicted),
        rank=rank_facts(timeline, keep_slices),
        summary=timeline.context.summary,
        told_by=timeline.replayed.files if timeline.replayed else set(),
    )


def is_of_run(own: AskedTrace, captures: Collection[Path]) -> bool:
    """A trace of captures tells of the graphs of the others, and is no rank of its own."""
    return own.path not in captures or own.asked.integrity.graph_events > 0


class AnsweredTrace(NamedTuple):
    path: Path
    answers: OperatorAnalysis
    slices: pd.DataFrame | None  # the ledger for a reader, where one asks for it


def answers_of_traces(traces: list[AskedTrace], not_read: list[str]) -> list[AnsweredTrace]:
    """The traces that were read together, with what each says of the others; those of several ranks
    of one run are compared.  not_read: what else could not be read, and why."""
    apart = not_of_one_run([trace.rank for trace in traces])
    if not apart and len(traces) > 1:
        return answers_of_ranks(traces, not_read)
    alone = []
    for trace in traces:
        trust = with_missing_ranks(trace.asked.integrity, {trace.rank.rank})
        if len(traces) > 1:
            trust = not_compared(trust, len(traces), apart)
        cost = communicated(trace.asked, trace.rank.found.events, trace.rank.exposed)
        own = answered_alone(trace.asked, trust, cost, not_read)
        alone.append(AnsweredTrace(trace.path, own, trace.rank.slices))
    return alone


class ComparedRank(NamedTuple):
    """One of several ranks, with how far its collectives were waiting for others."""

    trace: AskedTrace
    integrity: Integrity
    verdict: Verdict
    cost: Communicated
    rank: RankTrace

    def findings(self, verdict_of_all: Verdict, ranks: Ranks) -> Findings:
        return findings_of(self.trace.asked, self.integrity, verdict_of_all, self.cost, ranks)


def answers_of_ranks(traces: list[AskedTrace], not_read: list[str]) -> list[AnsweredTrace]:
    """The traces of ranks of one run, with `ranks`, the same in all."""
    by_rank = sorted(traces, key=lambda trace: trace.rank.rank)
    comparison = compare_arrivals([trace.rank for trace in by_rank])
    present = {trace.rank.rank for trace in traces}
    compared = []
    for place, trace in enumerate(by_rank):
        compared.append(compared_rank(trace, comparison, place, present))
    own = [own_answers(rank) for rank in compared]
    run = traces[0].summary  # which has the memory of every rank
    ranks = compare_ranks([rank.rank for rank in compared], comparison, own, run)
    judged = judged_by_least(compared, ranks, not_read)
    in_order = {id(rank.trace): own for rank, own in zip(compared, judged, strict=True)}
    return [in_order[id(trace)] for trace in traces]


def own_answers(own: ComparedRank) -> OwnAnswers:
    asked = own.trace.asked
    return OwnAnswers(
        step_ms=asked.attribution.ms_per_step,
        verdict=own.verdict,
        communication=own.cost.of_step,
        kernels=asked.kernels,
        peak_mb=asked.peak_mb,
    )


def compared_rank(
    own: AskedTrace, comparison: Comparison, place: int, present: Collection[int]
) -> ComparedRank:
    """place: among the ranks that are compared.  present: those whose traces were read."""
    rank, waiting_us = own.rank, None
    if comparison.waiting_us is not None:
        waiting_us = comparison.waiting_us[place]
        events = rank.found.events
        slices = rank.slices
        if slices is not None:
            slices = cut_at_arrivals(slices, events, waiting_us)
        exposed = cut_at_arrivals(rank.exposed, events, waiting_us)
        rank = replace(rank, exposed=exposed, slices=slices)
    asked = own.asked
    cost = communicated(asked, rank.found.events, rank.exposed, waiting_us, comparison.why)
    return ComparedRank(
        trace=own,
        integrity=with_missing_ranks(asked.integrity, present),
        verdict=with_communication(asked.verdict, cost.of_step),
        cost=cost,
        rank=rank,
    )


def judged_by_least(
    compared: list[ComparedRank], ranks: Ranks, not_read: list[str]
) -> list[AnsweredTrace]:
    """The ranks with one verdict and headline: those of the rank that waits least, for which the
    others wait; where that is not known, each with its own."""
    waiting_ms = [row.waiting_ms for row in ranks.rows]
    least = None
    if None not in waiting_ms:
        least = compared[waiting_ms.index(min(waiting_ms))]
        pays_most = headline(least.findings(least.verdict, ranks))
    judged = []
    for own in compared:
        of_all = own.verdict
        if least is not None:
            of_all = verdict_of_ranks(own.verdict, least.verdict, least.rank.rank)
        findings = own.findings(of_all, ranks)
        if least is None:
            pays_most = headline(findings)
        answers_of_rank = answered(own.trace.asked, findings, pays_most, not_read)
        judged.append(AnsweredTrace(own.trace.path, answers_of_rank, own.rank.slices))
    return judged
