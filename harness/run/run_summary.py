"""performance_summary.json, from what a rank of a run has measured.

In all documents: a field whose type allows None has a sibling <name>_reason, a string, wherever it
is null.  What is a file also has schema_version.  Times are milliseconds, sizes bytes or MB (2^20
bytes), rates per second, shares between 0 and 1, as the names say.
"""

from __future__ import annotations

import collections
import math
from typing import TYPE_CHECKING, NamedTuple

from typing_extensions import NotRequired

from harness.base.errors import is_interruption
from harness.base.units import MB
from harness.instruments.audit import Audit
from harness.instruments.no_sync import NoSyncSteps
from harness.instruments.phases import PHASES, break_even_step, summary_stats
from harness.machine.disturbance import Disturbance, is_disturbed
from harness.machine.environment import Environment
from harness.ranks.failures import explain_error
from harness.run.run_config import Settings
from harness.schema import Document, Unknown, different_lengths, field, known_or

# Reading what a run wrote needs no PyTorch, so what measures is imported for its types alone.
if TYPE_CHECKING:
    from harness.instruments.compilation import CompileTimes
    from harness.instruments.timing import StepRecord
    from harness.run.measurements import Measurements

NO_STEP, ONE_STEP = "no step was completed", "needs at least two steps"
NO_FLOPS = "the step has no FLOP formula, and cannot be counted on fake tensors"
NOT_FINITE = "not a finite number"
UNREPORTED = "not reported by the system"
NO_RATES = "no published or measured step time confirms what this device reaches"
NO_INTERVAL = "no steps of such devices were compared yet"
THEIRS = "not known of another program"


# ---- What the document tells ---------------------------------------------------------------------


class Timing(Document):
    mean: float | None = field("ms", null=NO_STEP)
    median: float | None = field("ms", null=NO_STEP)
    std: float | None = field("ms, sample standard deviation", null=ONE_STEP)
    p95: float | None = field("ms, 95th percentile", null=NO_STEP)
    count: int = field("steps")


class ExpectedTime(Document):
    """Of a step, from rates that the device reaches: docs/expected_time.md."""

    median: float = field("ms")
    low: float | None = field(
        "ms: from here to `high` nine of ten published and measured steps lay, or are thought to"
        " lie if provisional or from a measurement",
        null=NO_INTERVAL,
    )
    high: float | None = field("ms: the other end", null=NO_INTERVAL)
    by_class: dict[str, float] = field("ms by what takes them, which add up to the median")
    tokens_per_sec: float = field("of each rank")
    mfu_percent: float | None = field(
        "of the peak that the lower bound refers to", null="no peak of it is known"
    )
    bound: str = field(
        "compute, memory, communication, launch: the longest part; launch if the host is never"
        " ahead"
    )
    launches: int = field("of kernels, in a step")
    host_ms: float = field("that launching takes the host")
    rates_source: str = field("of the rates")
    provisional: NotRequired[bool] = field(
        "of few published steps, so the width of the interval is a judgement"
    )
    from_: NotRequired[str] = field(
        "published: steps of such devices; measured: matmuls and copies on the device"
    )


class CompilationTimes(Document):
    compile_s: float = field("seconds, before step 1")
    from_cache: bool = field("code compiled by an earlier run was used")
    uncompiled_pass_ms: float = field("median of a forward and backward pass")
    compiled_pass_ms: float = field("median of a forward and backward pass")
    passes: int = field("timed for each median")
    saved_ms_per_step: float = field("negative: lost")
    break_even_step: int | None = field(
        "step by which compiling has paid", null="a compiled pass was not faster"
    )


class GradientNorm(Document):
    """The 2-norm of all gradients as one vector, before they are clipped."""

    first: float | None = field("at the first step", null=NO_STEP)
    last: float | None = field("at the last step", null=NO_STEP)
    max: float | None = field("the largest", null=NO_STEP)
    clipped_steps: int = field(
        "steps whose norm was larger than --grad-clip; none that fp16's gradient scaler skipped"
    )


class Progress(Document):
    num_steps: int = field("requested")
    completed_steps: int = field("of these")
    batch_size: int | None = field("samples per step and rank", null=THEIRS)
    sequence_length: int | None = field("tokens", null=THEIRS)
    rank: int = field("which measured this; figures that are not of all ranks are its own")
    world_size: int = field("ranks")
    parallel: str | None = field("how they share the work: ddp, zero1, fsdp", null="one rank")
    grad_norm: GradientNorm | None = field("of all gradients", null="--grad-clip was not given")


class Performance(Document):
    avg_step_time_ms: float | None = field("mean over the averaged steps", null=NO_STEP)
    median_step_time_ms: float | None = field("over the averaged steps", null=NO_STEP)
    std_step_time_ms: float | None = field("sample standard deviation", null=ONE_STEP)
    p95_step_time_ms: float | None = field("95th percentile", null=NO_STEP)
    first_step_time_ms: float | None = field("excluded from averages", null=NO_STEP)
    samples_per_sec: float | None = field("of all ranks", null=NO_STEP)
    tokens_per_sec: float | None = field("of all ranks", null=NO_STEP)
    avg_data_time_ms: float | None = field("mean", null=NO_STEP)
    avg_forward_time_ms: float | None = field("mean", null=NO_STEP)
    avg_backward_time_ms: float | None = field("mean", null=NO_STEP)
    avg_optimizer_time_ms: float | None = field("mean", null=NO_STEP)
    model_flops_per_step: int | None = field(
        "matmul FLOPs of one rank, forward and backward", null=NO_FLOPS
    )
    achieved_tflops: float | None = field("10^12 FLOP/s of one rank", null=NO_STEP)
    gpu_utilization_percent: float | None = field(
        "median of ten samples a second", null="no GPU in use"
    )
    steps_averaged: int = field("that the averages are taken over")
    steps_averaged_note: str = field("which steps were excluded")
    compilation: CompilationTimes | None = field(
        "what compiling took and saves", null="--compile is off"
    )
    timings_ms: dict[str, Timing] = field("by step, data, forward, backward, optimizer")
    expected_step_time_ms: NotRequired[ExpectedTime | None] = field(
        "of a run with a prediction", null=NO_RATES
    )

    @staticmethod
    def contradiction(value: dict) -> str | None:
        """What is known where another figure is."""
        known = {name for name in value if value[name] is not None}
        follows = [
            ("avg_step_time_ms", "median_step_time_ms"),
            ("samples_per_sec", "tokens_per_sec"),
        ]
        if "avg_step_time_ms" in known:
            follows.append(("model_flops_per_step", "achieved_tflops"))
        for name, other in follows:
            if name in known and other not in known:
                return f"{other}: is null, and {name} is not"
        return None


class Memory(Document):
    peak_mb: float | None = field("MB", null="training did not start")
    average_mb: float | None = field("MB", null="training did not start")
    source: str = field("what was counted")


class Losses(Document):
    first: float | None = field("of the first step", null=NO_STEP)
    final: float | None = field("of the last step", null=NO_STEP)


class StepColumns(Document):
    step: list[int] = field("numbers, from 1")
    loss: list[float | None] = field("mean over the tokens", null=NOT_FINITE)
    time_ms: list[float] = field("of the whole step")
    grad_norm: NotRequired[list[float | None]] = field(
        "with --grad-clip, before clipping", null=NOT_FINITE
    )
    exclusion_reason: list[str | None] = field(
        "why a step is excluded from averages", null="it is included"
    )
    waited_share: list[float | None] = field("of thread time, waiting for a core", null=UNREPORTED)
    longest_wait_share: list[float | None] = field(
        "of the step, for the thread that waited longest", null=UNREPORTED
    )
    lost_share: list[float | None] = field(
        "of the step, that is due to waiting at most", null=UNREPORTED
    )
    disturbed: list[bool | None] = field(
        "whether it waited long enough to be longer", null=UNREPORTED
    )

    @staticmethod
    def contradiction(value: dict) -> str | None:
        """Every column has an entry for every step."""
        return different_lengths(value, "step")


class RankFacts(Document):
    rank: int = field("its number")
    host: str = field("name of its machine")
    mean_step_ms: float | None = field("over the averaged steps", null=NO_STEP)
    peak_memory_mb: float = field("MB, as memory.source says")
    disturbance: Disturbance = field("of its steps")


class PerformanceSummary(Document):
    status: str = field("completed, interrupted, failed")
    error: str | None = field("one line", null="nothing ended it early")
    config: Settings = field("as in config.json")
    environment: Environment = field("as in config.json")
    training: Progress = field("what was asked for, and how far it came")
    performance: Performance = field("times and rates")
    memory: Memory = field("of one rank")
    loss: Losses = field("mean over the tokens of a step")
    steps: StepColumns = field("a list each, with an entry for every step")
    ranks: list[RankFacts] = field(
        "those that reached the end together; empty: one rank, or none did"
    )
    no_sync: NoSyncSteps | None = field(
        "communication by difference", null="--no-sync-steps was not given"
    )
    disturbance: Disturbance = field("by other processes, the system and the GPU's clocks")
    audit: Audit = field("whether the run trains")


# ---- How it is computed --------------------------------------------------------------------------


def summarize(run: Measurements, error: BaseException | None = None) -> PerformanceSummary:
    """The summary of a run; error: what ended it, None if nothing did."""
    averages = averaged_steps(run.meter.records, run.exclusion_reasons)
    return PerformanceSummary(
        status=_status(error),
        error=explain_error(error)[0] if error else None,
        config=run.settings,
        environment=run.environment,
        training=_progress(run),
        performance=_performance(run, averages),
        memory=_memory(run),
        loss=_losses(run.meter.records),
        steps=_steps(run),
        ranks=run.ranks,
        no_sync=run.no_sync,
        disturbance=run.disturbance(),
        audit=run.audit(),
    )


class Averages(NamedTuple):
    """The steps that averages are taken over, and which steps were excluded, in words."""

    records: list[StepRecord]
    note: str


def averaged_steps(records: list[StepRecord], reasons: list[str | None]) -> Averages:
    """The steps to average.  reasons: why each is excluded, None if it is not; where all are, the
    least disturbed of them are averaged."""
    by_reason: dict[str | None, list[StepRecord]] = {}
    for record, reason in zip(records, reasons, strict=True):
        by_reason.setdefault(reason, []).append(record)
    if None in by_reason:
        counts = collections.Counter(reason for reason in reasons if reason)
        excluded = ", ".join(f"{reason} ({steps})" for reason, steps in counts.items())
        return Averages(by_reason[None], f"excluded: {excluded}")
    profiled = [
        record
        for record, reason in zip(records, reasons, strict=True)
        if reason in ("profiled", "profiler warm-up")
    ]
    if profiled:
        note = "only profiled steps to average, so profiler overhead is included"
        return Averages(profiled, note)
    if "first" in by_reason:
        note = "only the first step to average, so one-time costs are included"
        return Averages(by_reason["first"], note)
    # Counting FLOPs or recording tensors slows a step more than profiling it does.
    note = "only steps with FLOPs or memory measured to average, so their overhead is included"
    return Averages(records, note)


def facts_of_rank(run: Measurements) -> tuple[RankFacts, dict]:
    """What the summary of rank 0 tells of the rank that measured this, and the numbers by which it
    compares the ranks."""
    included_ms = [record.total_ms for record in run.included_records()]
    facts = RankFacts(
        rank=run.rank,
        host=run.environment.host,
        mean_step_ms=summary_stats(included_ms)["mean"],
        peak_memory_mb=run.sampler.peak_bytes / MB,
        disturbance=run.meter.disturbance.document(),
    )
    return facts, run.numbers.as_json()


def _status(error: BaseException | None) -> str:
    if error is None:
        return "completed"
    return "interrupted" if is_interruption(error) else "failed"


def _progress(run: Measurements) -> Progress:
    return Progress(
        num_steps=run.schedule.num_steps,
        completed_steps=len(run.meter.records),
        batch_size=run.workload.batch_size,
        sequence_length=run.workload.seq_len,
        rank=run.rank,
        world_size=run.world_size,
        parallel=run.workload.parallel.parallel,
        grad_norm=_grad_norm(run.meter.records, run.grad_clip),
    )


def _performance(run: Measurements, averages: Averages) -> Performance:
    step_ms = [record.total_ms for record in averages.records]
    timings = {"step": Timing(**summary_stats(step_ms))}
    for phase in PHASES:
        phase_ms = [record.phase_ms.get(phase, 0.0) for record in averages.records]
        timings[phase] = Timing(**summary_stats(phase_ms))
    step, first_record = timings["step"], next(iter(run.meter.records), None)
    steps_per_s = 1e3 / step.mean if averages.records else math.nan
    samples = run.workload.batch_size * run.world_size
    flops = run.workload.step_flops()
    utilization = summary_stats(run.sampler.utilization_percent)["median"]
    why_no_sample = run.sampler.utilization_reason or "the run was too short for a sample"
    return Performance(
        avg_step_time_ms=step.mean,
        median_step_time_ms=step.median,
        std_step_time_ms=step.std,
        p95_step_time_ms=step.p95,
        first_step_time_ms=first_record.total_ms if first_record else None,
        samples_per_sec=_finite(samples * steps_per_s),
        tokens_per_sec=_finite(samples * run.workload.seq_len * steps_per_s),
        avg_data_time_ms=timings["data"].mean,
        avg_forward_time_ms=timings["forward"].mean,
        avg_backward_time_ms=timings["backward"].mean,
        avg_optimizer_time_ms=timings["optimizer"].mean,
        model_flops_per_step=flops,
        achieved_tflops=(
            Unknown(NO_FLOPS) if flops is None else _finite(flops * steps_per_s / 1e12)
        ),
        gpu_utilization_percent=known_or(utilization, why_no_sample),
        steps_averaged=len(averages.records),
        steps_averaged_note=averages.note,
        compilation=_compilation(run),
        timings_ms=timings,
        expected_step_time_ms=run.expected_time,
    )


def _compilation(run: Measurements) -> CompilationTimes | Unknown | None:
    if run.compilation:
        return compilation_times(run.compilation.times, run.workload.micro_steps)
    return Unknown("the run ended before compilation") if run.workload.compiled else None


def compilation_times(times: CompileTimes, micro_steps: int) -> CompilationTimes:
    """What compiling took and saves.  micro_steps: passes of a step."""
    saved_ms = micro_steps * (times.uncompiled_ms - times.compiled_ms)
    return CompilationTimes(
        compile_s=times.compile_s,
        from_cache=times.from_cache,
        uncompiled_pass_ms=times.uncompiled_ms,
        compiled_pass_ms=times.compiled_ms,
        passes=times.passes,
        saved_ms_per_step=saved_ms,
        break_even_step=break_even_step(times.compile_s, saved_ms),
    )


def _memory(run: Measurements) -> Memory:
    """On a CPU the tracker's bytes of tensors, if it ran; else samples taken during training."""
    sampler = run.sampler
    tracker = run.instruments.memory if run.instruments else None
    if tracker and tracker.finished and not sampler.on_gpu:
        timeline = tracker.timeline.document()
        return Memory(
            peak_mb=_in_mb(timeline["peak_bytes"]),
            average_mb=_in_mb(timeline["average_bytes"]),
            source=timeline["source"],
        )
    return Memory(
        peak_mb=_in_mb(sampler.peak_bytes),
        average_mb=_in_mb(summary_stats(sampler.memory_bytes)["mean"]),
        source=sampler.memory_source,
    )


def _losses(records: list[StepRecord]) -> Losses:
    if not records:
        return Losses(first=None, final=None)
    return Losses(
        first=known_or(_finite(records[0].loss), NOT_FINITE),
        final=known_or(_finite(records[-1].loss), NOT_FINITE),
    )


def _steps(run: Measurements) -> StepColumns:
    records = run.meter.records
    columns = StepColumns(
        step=[record.step for record in records],
        loss=[_finite(record.loss) for record in records],
        time_ms=[record.total_ms for record in records],
        exclusion_reason=run.exclusion_reasons,
        waited_share=[record.interval.waited_share for record in records],
        longest_wait_share=[record.interval.longest_wait_share for record in records],
        lost_share=[record.interval.lost_share for record in records],
        disturbed=[is_disturbed(record.interval) for record in records],
    )
    if run.grad_clip:
        columns.grad_norm = [_finite(record.grad_norm) for record in records]
    return columns


def _grad_norm(records: list[StepRecord], grad_clip: float | None) -> GradientNorm | None:
    """Before clipping.  A norm that is not finite is no clipped step: with fp16 the step is
    skipped, else gradients become 0 or NaN."""
    if grad_clip is None:
        return None
    if not records:
        return GradientNorm(first=None, last=None, max=None, clipped_steps=0)
    norms = [_finite(record.grad_norm) for record in records]
    finite = [norm for norm in norms if norm is not None]
    return GradientNorm(
        first=known_or(norms[0], NOT_FINITE),
        last=known_or(norms[-1], NOT_FINITE),
        max=known_or(max(finite, default=None), NOT_FINITE),
        clipped_steps=sum(norm > grad_clip for norm in finite),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _in_mb(size_bytes: float | None) -> float | None:
    return None if size_bytes is None else size_bytes / MB
