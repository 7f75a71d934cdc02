"""What does a trace show?  operator_analysis.json, without the comparison of ranks."""

from __future__ import annotations

from dataclasses import asdict

from typing_extensions import NotRequired

from analysis.advice.efficiency import counters
from analysis.advice.opportunities import Opportunity, opportunities
from analysis.advice.who_reads import TracedRun
from analysis.attribution.breakdown import (
    Attribution,
    Breakdown,
    ClassRow,
    ComponentRow,
    PhaseRow,
    step_breakdown,
)
from analysis.attribution.collectives import (
    collective_rows,
    collectives_of,
    communication_of_steps,
    predicted_beside,
)
from analysis.attribution.critical_path import critical_path
from analysis.attribution.gpu_time import GpuTimeline, gpu_timeline
from analysis.attribution.ledger import (
    exposed_communication,
    hidden_communication_us,
    occasional_times,
    start_up_slices,
)
from analysis.attribution.model_flops import model_flops_per_step
from analysis.attribution.once import OnceRow, once_rows
from analysis.attribution.operators import (
    KernelRow,
    OperatorRow,
    OperatorTables,
    kernel_rows,
    operator_tables,
)
from analysis.diagnosis.headline import Headline, headline
from analysis.diagnosis.stragglers import Ranks
from analysis.diagnosis.timelines import MemorySeries, StepTimeline, memory_series, step_timeline
from analysis.diagnosis.verdict import Verdict, verdict
from analysis.limits.shape_rates import shape_rates
from analysis.trace.reasons import (
    NO_COLLECTIVES,
    NO_GPU,
    SINGLE_STEP,
    UNDETERMINED,
    CriticalPath,
    MeasuredCollectiveRow,
    ShapeRate,
    StepCommunication,
)
from analysis.trace.timeline import Timeline
from analysis.trust.integrity import Integrity, integrity
from analysis.trust.steps import ProfiledSteps, profiled_steps
from harness.schema import Document, Unknown, because, explained, field


class OperatorAnalysis(Document):
    trace: str = field("file name")
    integrity: Integrity = field("how far to trust the trace")
    headline: Headline = field("what pays most")
    reader: str = field(
        "whom `next` addresses: runs our model, runs a program of their own, has only the file"
    )
    verdict: Verdict = field("what bounds the step")
    steps: ProfiledSteps = field("their durations")
    attribution: Attribution = field("what the times below are taken from")
    phases: list[PhaseRow] = field("they add up to the step")
    components: list[ComponentRow] = field("they add up to the step")
    classes: list[ClassRow] = field("they add up to the step")
    once: list[OnceRow] | None = field(
        "what happens once or in few steps, most first; of several steps, all else is without it",
        null=SINGLE_STEP,
    )
    opportunities: list[Opportunity] = field("what would help, the most first")
    opportunities_reason: NotRequired[str] = field(
        "why there are none, of a trace that is not trustworthy"
    )
    not_here: list[dict[str, str]] = field(
        "name, reason: what cannot make this step faster on this device"
    )
    gpu_timeline: GpuTimeline = field("how a GPU's time splits, and why it idled")
    collectives: list[MeasuredCollectiveRow] = field("sums over the steps; empty: none")
    communication: StepCommunication | None = field("of a step", null=NO_COLLECTIVES)
    ranks: NotRequired[Ranks] = field("only with the traces of several ranks of one run")
    operators: list[OperatorRow] = field("by name, most time first")
    operators_by_shape: list[OperatorRow] = field("by name and shapes of the inputs")
    kernels: list[KernelRow] = field("GPU events by name, most time first")
    counters: str | None = field(
        "the command that reads the counters of the longest kernel", null=NO_GPU
    )
    model_flops_per_step: int | None = field(
        "matmul FLOPs of the trace's rank, forward and backward, without what is computed again",
        null=UNDETERMINED,
    )
    shape_rates: list[ShapeRate] = field("rates of matmuls, convolutions and attention")
    critical_path: CriticalPath | None = field(
        "of the step of median duration", null="the step has no GPU events"
    )
    step_timeline: StepTimeline = field("one step, for the figure")
    memory: MemorySeries = field("allocated over time")
    not_read: NotRequired[list[str]] = field("files that are no traces, each with the error")

    @property
    def breakdown(self) -> Breakdown:
        return Breakdown(self.attribution, self.phases, self.components, self.classes)

    @property
    def operator_tables(self) -> OperatorTables:
        return OperatorTables(self.operators, self.operators_by_shape)


def operator_analysis(timeline: Timeline) -> dict:
    """operator_analysis.json of one trace, without the comparison of ranks."""
    summary = timeline.context.summary
    kernels = kernel_rows(timeline)
    trust, exposed = integrity(timeline, kernels), exposed_communication(timeline)
    rows, unreliable = collective_rows(collectives_of(timeline).events, exposed), trust.unreliable
    n = len(timeline.steps)
    times = (float(us / 1e3 / n) for us in (exposed["us"].sum(), hidden_communication_us(timeline)))
    communication = communication_of_steps(rows, n, *times)
    beside = {
        "by_difference": (summary or {}).get("no_sync"),
        "predicted": None,
    }  # the caller may predict
    path = {"critical_path": None if "step_timeline" in unreliable else critical_path(timeline)}
    rates = shape_rates(timeline)
    communication = communication and communication | beside
    judged = verdict(timeline, trust, path["critical_path"], rates, communication)
    document = {
        "trace": timeline.trace.path.name,
        "integrity": trust.as_json(),
        "verdict": judged.as_json(),
        "steps": profiled_steps(timeline).as_json(),
    }
    breakdown = step_breakdown(timeline)
    document |= breakdown._asdict()
    document |= {"reader": TracedRun(summary).reader.value, "opportunities": [], "not_here": []}
    step_ms = breakdown.attribution.ms_per_step
    document["once"] = once_rows(
        timeline, occasional_times(timeline), start_up_slices(timeline), step_ms
    )
    if trust.trustworthy:
        advised = opportunities(timeline, path["critical_path"] is not None)
        document["opportunities"] = [row.as_json() for row in advised.opportunities]
        document["not_here"] = [asdict(row) for row in advised.not_here]
    two_clocks = unreliable.get("idle_by_cause")
    document |= {
        "gpu_timeline": gpu_timeline(timeline, two_clocks),
        "collectives": rows,
        "communication": communication,
    }
    document |= operator_tables(timeline)._asdict() | {"kernels": kernels}
    command = counters(timeline)
    document["counters"] = None if isinstance(command, Unknown) else command
    if isinstance(command, Unknown):
        document["counters_reason"] = command.reason
    document |= {
        "shape_rates": rates,
        "model_flops_per_step": model_flops_per_step(timeline),
    } | path
    document |= because(unreliable["step_timeline"], *path) if "step_timeline" in unreliable else {}
    document |= {"step_timeline": step_timeline(timeline), "memory": memory_series(timeline)}
    if not trust.trustworthy:
        document["opportunities_reason"] = "the trace is not trustworthy, see integrity"
    document = explained(document, OperatorAnalysis)
    document["headline"] = headline(document).as_json()
    return explained(document, OperatorAnalysis)


def add_prediction(document: dict, predicted: list[dict]) -> None:
    """Put the collectives that a dry run predicts beside those that the trace has."""
    if about := document["communication"]:
        about.pop("predicted_reason", None)
        about["predicted"] = predicted_beside(predicted, document["collectives"], about["steps"])
