"""The answers to all questions of a trace, as one document: operator_analysis.json."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from typing_extensions import NotRequired

from analysis.advice.opportunities import Opportunity
from analysis.advice.places import Place
from analysis.attribution.breakdown import Attribution, Breakdown, ClassRow, ComponentRow, PhaseRow
from analysis.attribution.collectives import MeasuredCollectiveRow, StepCommunication
from analysis.attribution.critical_path import CriticalPath
from analysis.attribution.gpu_time import GpuTimeline
from analysis.attribution.once import OnceRow
from analysis.attribution.operators import KernelRow, OperatorRow, OperatorTables
from analysis.diagnosis.stragglers import Ranks
from analysis.diagnosis.timelines import MemorySeries, StepTimeline
from analysis.diagnosis.verdict import Verdict
from analysis.limits.shape_rates import ShapeRate
from analysis.program.lines import NOT_SAMPLED, LineRow
from analysis.trace.reasons import NO_COLLECTIVES, NO_GAIN, NO_GPU, NO_PLACE, UNDETERMINED
from analysis.trust.integrity import Integrity
from analysis.trust.steps import ProfiledSteps
from harness.base.documents import read_or_leave_out
from harness.schema import Document, Unknown, field

SINGLE_STEP = "one step was recorded, which does not tell what happens in every one"


class Headline(Document):
    finding: str = field("what pays most, in a sentence; where nothing pays, what the verdict says")
    saves_ms: float | None = field("per step, by its estimate, else its bound", null=NO_GAIN)
    at_most: bool = field("saves_ms is a bound; how much of it can be gained is not known")
    next: str = field("the command to run, or the line of code to change")
    place: str | None = field("train.py:77: the line of the program", null="no line is known")
    in_perfetto: Place | None = field("of the longest event behind the finding", null=NO_PLACE)


class Findings(NamedTuple):
    """The answers that a headline is chosen from, as OperatorAnalysis has them."""

    reader: str
    failed_audit: str
    integrity: Integrity
    verdict: Verdict
    attribution: Attribution
    opportunities: list[Opportunity]
    lines: list[LineRow] | None
    ranks: Ranks
    collectives: list[MeasuredCollectiveRow]
    communication: StepCommunication | None
    operators: list[OperatorRow]
    kernels: list[KernelRow]
    counters: str | Unknown | None


class OperatorAnalysis(Document):
    trace: str = field("file name")
    device: str | None = field(
        "its name: of what ran, or of what stands for it",
        null="neither the trace nor its run tell it",
    )
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
    failed_audit: NotRequired[str] = field(
        "what the audit of the run found wrong; absent: nothing, or there was none"
    )
    lines: list[LineRow] | None = field(
        "of the program, by samples of the stack: those that take the host's time, most first",
        null=NOT_SAMPLED,
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

    @staticmethod
    def bring_up_to_date(value: dict) -> None:
        """In version 3, `place` of the headline was that in Perfetto."""
        headline = value.get("headline")
        if isinstance(headline, dict) and isinstance(headline.get("place"), dict):
            headline["in_perfetto"] = headline.pop("place")

    @property
    def findings(self) -> Findings:
        return Findings(*(getattr(self, name) for name in Findings._fields))

    @property
    def breakdown(self) -> Breakdown:
        return Breakdown(self.attribution, self.phases, self.components, self.classes)

    @property
    def operator_tables(self) -> OperatorTables:
        return OperatorTables(self.operators, self.operators_by_shape)


def read_answers(file: Path, left_out: list[str]) -> OperatorAnalysis | None:
    """What an operator_analysis.json tells; None without one that can be read: left_out takes
    why."""
    document = read_or_leave_out(file, OperatorAnalysis, left_out)
    return OperatorAnalysis.from_json(document) if document else None
