"""What is a row of the scaling study, and what do rows say of each other: efficiency, beside what
is predicted, and findings?"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import NotRequired

from analysis.compare.noise import interval_over_processes
from analysis.prediction.network import Network
from analysis.prediction.search import ONE_RANK
from harness.instruments.memory_timeline import CollectiveRow
from harness.schema import Unknown, field
from studies.engine.rows import EITHER_NOT_MEASURED, NO_FAKE_RUN, NOT_MEASURED, SweepRow
from studies.scaling_parts.faults import Finding, small_messages, uneven_ranks, unhidden


class ScalingStudyRow(SweepRow):
    key = ("scaling", "parallel", "world_size", "bucket_mb", "fault")

    scaling: str = field("weak: same batch on each rank; strong: same global batch")
    parallel: str | None = field("ddp, zero1, fsdp", null=ONE_RANK)
    world_size: int = field("ranks")
    bucket_mb: float | None = field("MB", null="PyTorch's size")
    fault: str | None = field("that was inserted", null="none was inserted")
    batch_size: int = field("samples of a step and rank")
    global_batch_size: int = field("samples of a step, counted once over all ranks")
    base_world_size: int = field("ranks of the row that efficiency refers to")
    launches: NotRequired[int] = field(
        "of which the times come, each a new set of processes; absent: not measured"
    )
    step_ms: float | None = field(
        "of the slowest rank, median over steps and launches", null=NOT_MEASURED
    )
    step_times_ms: list[list[float]] | None = field("by launch and step", null=NOT_MEASURED)
    tokens_per_sec: float | None = field("of all ranks", null=NOT_MEASURED)
    efficiency: float | None = field(
        "tokens per second and rank, relative to the base", null=EITHER_NOT_MEASURED
    )
    efficiency_95: list[float] | None = field(
        "95% interval over launches and steps", null="needs two launches"
    )
    predicted_efficiency: list[float] | None = field(
        "communication not hidden, and hidden", null="no network is known"
    )
    predicted_memory_bytes: int | None = field("peak of rank 0", null=NO_FAKE_RUN)
    measured_memory_bytes: int | None = field(
        "live tensors of rank 0 at the peak", null=NOT_MEASURED
    )
    predicted_memory_by_category: dict[str, int] | None = field("at the peak", null=NO_FAKE_RUN)
    measured_memory_by_category: dict[str, int] | None = field("at the peak", null=NOT_MEASURED)
    memory_bytes_by_rank: list[int] | None = field("measured", null=NOT_MEASURED)
    predicted_collective_bytes: int | None = field(
        "of a step and rank, all kinds", null=NO_FAKE_RUN
    )
    measured_collective_bytes: int | None = field("the same, counted", null=NOT_MEASURED)
    predicted_collectives: list[CollectiveRow] | None = field("by kind", null=NO_FAKE_RUN)
    measured_collectives: list[CollectiveRow] | None = field("by kind", null=NOT_MEASURED)
    samples_by_rank: list[int] | None = field("of a step, counted", null=NOT_MEASURED)
    local_step_ms: list[float] | None = field(
        "by rank, the fastest without communication", null=ONE_RANK
    )
    exposed_ms: float | None = field("fastest step beyond the longest local step", null=ONE_RANK)
    waiting_ms: float | None = field(
        "longest local step beyond the mean of the ranks'", null=ONE_RANK
    )
    communication_share: float | None = field("1 - mean local step / fastest step", null=ONE_RANK)
    overlapped_share: float | None = field(
        "of reduced bytes: begun in the backward pass", null=ONE_RANK
    )
    findings: list[str] | None = field(
        "what is wrong, by measured columns alone; empty: nothing", null=NOT_MEASURED
    )

    @property
    def rounds(self) -> int:
        return self.launches

    def label(self) -> str:
        text = f"{self.scaling} {self.parallel or 'base'} x {self.world_size}"
        if self.bucket_mb is not None:
            text += f", buckets of {self.bucket_mb:g} MB"
        if self.fault is not None:
            text += f", {self.fault}"
        return text

    def result(self) -> str:
        return f"{self.step_ms:,.1f} ms a step, {self.tokens_per_sec:,.0f} tokens/s"

    def is_like(self, other: ScalingStudyRow, *names: str) -> bool:
        """Whether these columns are the same."""
        return all(getattr(self, name) == getattr(other, name) for name in names)


def conclude(rows: list[ScalingStudyRow], network: Network | None) -> None:
    """Efficiency, measured and predicted, and findings of the rows that were measured."""
    for row in rows:
        if row.is_measured:
            base = base_of(row, rows)
            fill_efficiency(row, base)
            row.predicted_efficiency = predicted_efficiency(row, base, network)
            row.findings = [told.text for told in findings(row, row_without_fault(row, rows))]


def base_of(row: ScalingStudyRow, rows: Sequence[ScalingStudyRow]) -> ScalingStudyRow | None:
    """The row with the fewest ranks, measured: of one rank, or of the same mode and bucket size."""
    for other in rows:
        if other.fault is not None or not other.is_measured or not row.is_like(other, "scaling"):
            continue
        of_mode = other.world_size == 1 or row.is_like(other, "parallel", "bucket_mb")
        if of_mode and other.world_size == row.base_world_size:
            return other
    return None


def fill_efficiency(row: ScalingStudyRow, base: ScalingStudyRow | None) -> None:
    """Tokens per second and rank, relative to the base, with the interval."""
    if base is None:
        why = Unknown("the base was not measured")
        row.set(efficiency=why, efficiency_95=why)
        return
    if row.identity == base.identity:
        row.set(efficiency=1.0, efficiency_95=Unknown("it is the base"))
        return
    of_base = base.tokens_per_sec / base.world_size
    row.efficiency = row.tokens_per_sec / row.world_size / of_base
    if min(len(row.step_times_ms), len(base.step_times_ms)) < 2:
        row.efficiency_95 = Unknown("needs two launches")
        return
    ratio = row.step_ms / base.step_ms
    low, high = interval_over_processes(row.step_times_ms, base.step_times_ms, ratio)
    scale = row.efficiency * ratio  # samples per rank, relative to the base
    row.efficiency_95 = [scale / high, scale / low]


def predicted_efficiency(
    row: ScalingStudyRow, base: ScalingStudyRow | None, network: Network | None
) -> list[float] | Unknown:
    """From the base's step, which communicates nothing, and the predicted collectives: not hidden,
    and all hidden."""
    if base is None:
        return Unknown("the base was not measured")
    if base.world_size > 1:
        return Unknown("the base communicates")
    if row.predicted_collectives is None:
        return Unknown(row.reason_of("predicted_collectives"))
    if network is None:
        return Unknown("no network is known")
    computing = base.step_ms * row.batch_size / base.batch_size
    collectives = [calls.as_json() for calls in row.predicted_collectives]
    sending = network.time_ms(collectives, row.world_size)
    return [computing / (computing + sending), computing / max(computing, sending)]


def row_without_fault(
    row: ScalingStudyRow, rows: Sequence[ScalingStudyRow]
) -> ScalingStudyRow | None:
    """The row that differs from this one by its fault, or by its bucket size, alone."""
    for other in rows:
        plain = other.fault is None and other.bucket_mb is None and other.is_measured
        if plain and other is not row and row.is_like(other, "scaling", "parallel", "world_size"):
            return other
    return None


def findings(row: ScalingStudyRow, reference: ScalingStudyRow | None) -> list[Finding]:
    """What is wrong with a row, from what was measured alone.  reference: the same row without a
    fault."""
    calls_of_reference = [] if reference is None else reference.measured_collectives
    possible = (
        uneven_ranks(row.samples_by_rank, row.local_step_ms, row.waiting_ms),
        small_messages(row.measured_collectives, calls_of_reference),
        unhidden(row.overlapped_share, row.exposed_ms),
    )
    return [told for told in possible if told is not None]
