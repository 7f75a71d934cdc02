"""Comparisons of runs, and sweeps: a document and the columns of its rows each."""

from __future__ import annotations

from typing import Any

from typing_extensions import NotRequired

from harness.documents.memory import NO_PEAK, ONE_RANK
from harness.instruments.memory_timeline import CollectiveRow
from harness.machine.environment import Environment
from harness.run.run_summary import NO_STEP, ONE_STEP
from harness.schema import Document, field

NO_RATIO = "no step was completed, or the baseline took no time"
NO_BOUND = (
    "no step in common, or another model, data, seed, learning rate or number of samples per step"
)
NO_LOSS = "how much time was lost to other processes is not known"
NOT_IN_TRACE = "not in a trace"
UNMEASURED, UNTOLD = "not measured by the run", "not measured"
EITHER, FEW_ROUNDS = "either was not measured", "an interval needs 3 rounds"
NOT_COMPILED, FORWARD_ALONE, APART = (
    "not compiled",
    "the forward pass alone",
    "measured alone, or the reference",
)
NO_FAKE, NO_KERNEL = "it cannot run on fake tensors", "no such kernel on this device"
NO_ALLOCATOR = "only the allocator of a GPU records it; see predicted_peak_bytes"
NO_FIT = (
    "a fit needs three runs, at two sequence lengths or more, whose peak is not in the optimizer"
    " step"
)
FEW_LENGTHS = "known for fewer than two sequence lengths"
NOT_IN_TURN = "there is none that was measured in turn with this one"

# ---- Comparisons ---------------------------------------------------------------------------------


class PhaseTimes(Document):
    data: float | None = field("ms, mean", null=NO_STEP)
    forward: float | None = field("ms, mean", null=NO_STEP)
    backward: float | None = field("ms, mean", null=NO_STEP)
    optimizer: float | None = field("ms, mean", null=NO_STEP)


class ComparedRow(Document):
    name: str = field("of its folder or trace")
    folder: str = field("or the trace")
    started: str | None = field("ISO 8601 with time zone", null=NOT_IN_TRACE)
    status: str = field("completed, interrupted, failed")
    size: str | None = field("as given with --size", null="no --size was given")
    device: str | None = field("its name", null=NOT_IN_TRACE)
    parameters: int | None = field("of the model", null=NOT_IN_TRACE)
    steps_counted: int = field("that the times are taken from")
    mean_ms: float | None = field("of a step", null=NO_RATIO)
    median_ms: float | None = field("of a step", null=NO_RATIO)
    std_ms: float | None = field("sample standard deviation", null=ONE_STEP)
    p95_ms: float | None = field("95th percentile", null=NO_RATIO)
    phases_ms: PhaseTimes = field("of a step")
    samples_per_sec: float | None = field("of all ranks", null=NO_STEP)
    tokens_per_sec: float | None = field("of all ranks", null=NO_STEP)
    step_flops: int | None = field("matmul FLOPs of one rank", null=NO_STEP)
    achieved_tflops: float | None = field("10^12 FLOP/s of one rank", null=NO_STEP)
    mfu_percent: float | None = field("Model FLOPS Utilization", null=f"{NO_STEP}, or {NO_PEAK}")
    peak_mb: float | None = field("MB", null=NO_STEP)
    memory_source: str = field("what was counted")
    peak_ratio: float | None = field(
        "to the baseline's", null="the peak of one of them is not known"
    )
    final_loss: float | None = field("of the last step", null=NO_STEP)
    largest_loss_difference: float | None = field(
        "from the baseline's, over all steps", null=NO_STEP
    )
    audit_ok: bool | None = field("whether its audit has no finding", null=UNMEASURED)
    audit: str = field("ok, or the findings")
    loss_bound: float | None = field("the difference that rounding explains", null=NO_BOUND)
    not_the_same: str | None = field(
        "why it is another training", null="neither its audit nor its losses say so"
    )
    verdict: str | None = field("what bounds its step", null="not profiled")
    profiler: str | None = field("that recorded it", null="not profiled")
    profiler_overhead: float | None = field(
        "profiled to other steps, ratio of medians", null="no such steps"
    )
    disturbed: bool | None = field("whether something made it slower", null=UNMEASURED)
    waited_share: float | None = field("of thread time, waiting for a core", null=UNMEASURED)
    lost_share: float | None = field(
        "of the steps' time, that is due to it at most", null=UNMEASURED
    )
    disturbance: str = field("by what")
    ratio: float | None = field("of medians, to the baseline's", null=NO_RATIO)
    ratio_95: list[float] | None = field(
        "95% interval", null="an interval needs three steps of each run"
    )
    difference: str = field("in words")


class ChangeRow(Document):
    run: str = field("its name")
    baseline_ms: float = field("per step")
    ms: float = field("per step")
    change_ms: float = field("per step")
    ratio: float | None = field("to the baseline's", null=NO_RATIO)
    noise_ms: float | None = field(
        "the smallest told from zero", null="one of the profiles has a single step"
    )
    difference: str = field("in words")


class ComponentChange(ChangeRow):
    component: str = field("parts of one run alone are one row")


class ClassChange(ChangeRow):
    class_: str = field("of operators")


class OperatorChange(ChangeRow):
    operator: str = field("by self time")


class Repeats(Document):
    groups: list[list[str]] = field("names of runs with the same settings")
    spread: float = field("of their medians, relative")


class DifferentSetting(Document):
    name: str = field("of the setting, or of the environment")
    values: list = field("by run", null="it has none")


class FlopScaling(Document):
    exponent: float = field("of step time ~ FLOPs^exponent")
    points: int = field("runs")
    meaning: str = field("of the exponent")


class Gate(Document):
    base: list[str] = field("names of the runs")
    new: list[str] = field("names of the runs")
    left_out: list[str] = field("runs that cannot be judged, and why")
    allowed_percent: float = field("as given")
    slower_percent: float = field("of the geometric means of the runs' medians; negative: faster")
    smallest_percent: float | None = field("slowdown that would not be called noise", null=NO_LOSS)
    difference: str = field("faster, slower, within noise, undecided")
    failed: bool = field("slower by more than allowed, beyond noise")


class Comparison(Document):
    baseline: str = field("name of the run that the others are compared with")
    runs: list[ComparedRow] = field("one for each")
    repeats: Repeats | None = field(
        "what a restart alone changes", null="no two of the runs have the same settings"
    )
    differences: list[DifferentSetting] = field("settings and environment that differ")
    scaling: FlopScaling | None = field(
        "by size", null="all runs have nearly the same FLOPs per step"
    )
    components: list[ComponentChange] = field("the largest change first")
    classes: list[ClassChange] = field("the same for classes of operators")
    operators: list[OperatorChange] = field("the same for operators")
    components_reason: NotRequired[str] = field("why some profiles are compared by class only")
    profiles_reason: NotRequired[str] = field("why profiles are not compared")
    gate: NotRequired[Gate] = field("with --fail-if-slower")
    not_read: NotRequired[list[str]] = field("documents of the runs that cannot be read, and why")


# ---- Sweeps --------------------------------------------------------------------------------------


class SweepConfig(Document):
    settings: dict[str, Any] = field("the flags that decide what the rows contain")
    environment: Environment = field("enough to repeat the sweep")


class SweepDocument(SweepConfig):
    sweep: str = field("its name")
    notes: list[str] = field("which defaults a CPU changed, and what was left out")
    key: list[str] = field("the columns that identify a row")
    device_memory_bytes: NotRequired[int] = field(
        "available to the tensors of a row; once all are measured"
    )


class SweepRow(Document):
    status: str = field("ok, oom, skipped, failed")
    reason: str = field("why it is not ok; measured columns are null then, for this reason")
    disturbed: bool | None = field("whether other processes may have made it slower", null=UNTOLD)
    disturbance: str | None = field("by what", null="not disturbed")
    lost_share: float | None = field("the most of its time that this can have cost", null=UNTOLD)


class MemoryStudyRow(SweepRow):
    batch_size: int = field("samples")
    seq_len: int = field("tokens")
    predicted_bytes: int | None = field("peak", null=NO_FAKE)
    peak_bytes: int | None = field("of live tensors", null=UNTOLD)
    peak_phase: str | None = field("in which it is", null=UNTOLD)
    bytes_by_category: dict[str, int] | None = field("at the peak", null=UNTOLD)
    bytes_per_token: float | None = field("of the peak", null=UNTOLD)
    step_time_ms: float | None = field("mean, tracking included in one step", null=UNTOLD)
    samples_per_sec: float | None = field("at the mean", null=UNTOLD)
    tokens_per_sec: float | None = field("at the mean", null=UNTOLD)
    folder: str | None = field("of the run, in the folder of the sweep", null=UNTOLD)


class PassTimesRow(SweepRow):
    repetitions: int | None = field("steps or passes measured", null=UNTOLD)
    forward_ms: float | None = field("median", null=UNTOLD)
    forward_mean_ms: float | None = field("mean", null=UNTOLD)
    forward_std_ms: float | None = field("sample standard deviation", null=ONE_STEP)
    backward_ms: float | None = field("median", null=FORWARD_ALONE)
    backward_mean_ms: float | None = field("mean", null=FORWARD_ALONE)
    backward_std_ms: float | None = field("sample standard deviation", null=FORWARD_ALONE)
    workspace_bytes: int | None = field("of the matmul libraries", null=UNTOLD)
    compile_s: float | None = field("seconds, without a cache", null=NOT_COMPILED)


class StepRow(SweepRow):
    size: str = field("as for --size; the file and function of --workload")
    seq_len: int = field("tokens")
    batch_size: int = field("samples")
    precision: str = field("as for --precision; of the baseline, where flags are compared with it")
    step_ms: float | None = field("median", null=UNTOLD)
    step_mean_ms: float | None = field("mean", null=UNTOLD)
    step_std_ms: float | None = field("sample standard deviation", null=ONE_STEP)
    achieved_tflops: float | None = field(
        "10^12 FLOP/s, median", null="its FLOPs cannot be counted on fake tensors"
    )


class StepTimesRow(StepRow, PassTimesRow):
    parameters: NotRequired[int] = field("absent where the device lacks the precision")
    warmup_steps: int = field("excluded before the repetitions")
    optimizer_ms: float | None = field("median", null=FORWARD_ALONE)
    optimizer_mean_ms: float | None = field("mean", null=FORWARD_ALONE)
    optimizer_std_ms: float | None = field("sample standard deviation", null=FORWARD_ALONE)
    peak_bytes: int | None = field("of the allocator, with workspace_bytes", null=NO_ALLOCATOR)
    predicted_peak_bytes: int | None = field("with workspace_bytes where measured", null=NO_FAKE)
    first_loss: float | None = field("of the first step", null=UNTOLD)
    final_loss: float | None = field("of the last step", null=UNTOLD)


class TrainingBenchmarkRow(StepTimesRow):
    mode: str = field("forward, train")
    compiled: bool = field("whether by --compile")


class AttentionTensor(Document):
    name: str = field("of the tensor")
    shape: list[int] = field("of the tensor")
    dtype: str = field("data type")
    bytes: int = field("of it")


class AttentionBenchmarkRow(PassTimesRow):
    implementation: str = field("manual, eager, compiled, sdpa-<backend>")
    dtype: str = field("data type")
    batch_size: int = field("samples")
    n_heads: int = field("heads")
    d_head: int = field("width of a head")
    seq_len: int = field("tokens")
    causal: bool = field("whether with a causal mask")
    memory_bytes: int | None = field(
        "in use before the backward pass, without workspace_bytes", null=UNTOLD
    )
    rounding_bytes: int | None = field("of it the allocator's rounding", null=UNTOLD)
    predicted_memory_bytes: int | None = field("before the backward pass", null=NO_KERNEL)
    predicted_peak_bytes: int | None = field("of live tensors", null=NO_KERNEL)
    tensors: list[AttentionTensor] | None = field("before the backward pass", null=NO_KERNEL)
    kernel: str | None = field("operator that did the forward pass", null=UNTOLD)


class CollectiveBenchmarkRow(SweepRow):
    kind: str = field("all_reduce, all_gather, reduce_scatter, broadcast")
    world_size: int = field("ranks")
    bytes: int = field("of the larger of input and output")
    repetitions: int | None = field("each of several calls", null=UNTOLD)
    time_us: float | None = field(
        "of a call on the slowest rank, median of the repetitions", null=UNTOLD
    )
    time_std_us: float | None = field("sample standard deviation", null=ONE_STEP)
    algorithm_bandwidth_gb_per_sec: float | None = field("bytes / time, 10^9 bytes/s", null=UNTOLD)
    bus_bandwidth_gb_per_sec: float | None = field(
        "bytes that a rank sends at least / time", null=UNTOLD
    )


class CollectiveFit(Document):
    kind: NotRequired[str] = field("absent: all kinds but broadcast, on the most ranks")
    world_size: int = field("ranks")
    alpha_us: float = field("microseconds of a call, whatever its bytes")
    beta_gb_per_sec: float = field("bus bandwidth, 10^9 bytes/s")
    half_bytes: float = field(
        "sent bytes from which on latency is less than half of the time: alpha times beta"
    )
    residual: float = field("relative error of the fitted times, root mean square")


class ProofOfPlain(Document):
    step_ms: float = field("median of the turns without a change; of audits alone, of one step")
    repeats: str = field("whether two runs are bit-equal, apart by rounding, or differ")


class RatioOfTurns(Document):
    ratio: float | None = field("step time with it / without", null=UNTOLD)
    ratio_low: float | None = field(
        "interval; those of all changes hold together with 99%", null=UNTOLD
    )
    ratio_high: float | None = field("its other end", null=UNTOLD)


class ProofRow(RatioOfTurns):
    change: str = field("as in --try")
    verdict: str = field("faster, slower, no difference, passes (not timed), differs, already so …")
    applied: str | None = field(
        "by what it is seen that it took effect, in a step of its audit", null="not tried"
    )
    audit: str | None = field("bit-equal, rounding, lower precision, differs", null=UNTOLD)
    gradient_difference: NotRequired[float | None] = field(
        "of a parameter in the first step, the largest, relative",
        null="a gradient is missing, or no number",
    )
    departs: list[str] = field(
        "what differs, the first six: losses, parameters in the order of the backward pass"
    )
    smallest_gain: NotRequired[float] = field("that its times would have told, share of the step")
    peak_memory_difference_mb: float | None = field("of its audit, with it - without", null=UNTOLD)
    extra_start_s: float | None = field("of its audit, with it - without", null=UNTOLD)
    pays_after_steps: int | None = field(
        "steps that gain what the start costs", null="not faster, or not timed"
    )
    where: str | None = field("file and line of the program", null="it applies to no line")
    line: str | None = field("of code", null="it does not apply")


class ProofTogether(RatioOfTurns):
    changes: list[str] = field("those that are faster")
    verdict: str = field("as of a change")
    applied: str | None = field("as of a change, of those that can be seen", null=UNTOLD)
    audit: str | None = field("as of a change", null=UNTOLD)


class Proof(Document):
    command: str = field("that starts it")
    plain: ProofOfPlain = field("the program as it is")
    nothing: RatioOfTurns | None = field("of turns with nothing changed", null="nothing was timed")
    rows: list[ProofRow] = field("changes")
    together: ProofTogether | None = field("those that help", null="fewer than two do")
    not_timed: str | None = field(
        "why there are no times", null="there are, or none were asked for"
    )
    seconds: float = field("all runs together")


class ScalingStudyRow(SweepRow):
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
        "of the slowest rank, median over steps and launches", null=UNTOLD
    )
    step_times_ms: list[list[float]] | None = field("by launch and step", null=UNTOLD)
    tokens_per_sec: float | None = field("of all ranks", null=UNTOLD)
    efficiency: float | None = field(
        "tokens per second and rank, relative to the base", null=EITHER
    )
    efficiency_95: list[float] | None = field(
        "95% interval over launches and steps", null="needs two launches"
    )
    predicted_efficiency: list[float] | None = field(
        "communication not hidden, and hidden", null="no network is known"
    )
    predicted_memory_bytes: int | None = field("peak of rank 0", null=NO_FAKE)
    measured_memory_bytes: int | None = field("live tensors of rank 0 at the peak", null=UNTOLD)
    predicted_memory_by_category: dict[str, int] | None = field("at the peak", null=NO_FAKE)
    measured_memory_by_category: dict[str, int] | None = field("at the peak", null=UNTOLD)
    memory_bytes_by_rank: list[int] | None = field("measured", null=UNTOLD)
    predicted_collective_bytes: int | None = field("of a step and rank, all kinds", null=NO_FAKE)
    measured_collective_bytes: int | None = field("the same, counted", null=UNTOLD)
    predicted_collectives: list[CollectiveRow] | None = field("by kind", null=NO_FAKE)
    measured_collectives: list[CollectiveRow] | None = field("by kind", null=UNTOLD)
    samples_by_rank: list[int] | None = field("of a step, counted", null=UNTOLD)
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
        "what is wrong, by measured columns alone; empty: nothing", null=UNTOLD
    )


class FaultVerdict(Document):
    fault: str = field("as in the rows")
    named: bool = field(
        "the findings of its row name it, and those of the same row without it do not"
    )
    text: str = field("the finding, or what was measured instead")


class TimingStudyRow(SweepRow):
    method: str = field("of timing")
    baseline_ms: float | None = field("of the baseline, by this method", null=UNTOLD)
    changed_ms: float | None = field("with the change, by this method", null=UNTOLD)
    ratio: float | None = field("changed / baseline", null=UNTOLD)
    ratio_95: list[float] | None = field("95% interval", null="a wrong method, or fewer than three")
    baseline_factor: float | None = field("baseline / baseline of the right method", null=UNTOLD)
    conclusion: str | None = field("what this method concludes about the change", null=UNTOLD)
    baseline_times_ms: NotRequired[list[float]] = field("each")
    changed_times_ms: NotRequired[list[float]] = field("each")
    ratios_of_pairs: NotRequired[list[float]] = field("of the right method")


class OptimizationStudyRow(StepRow):
    flags: str = field(
        "in addition to the baseline's, which has none; of the reference: what it is"
    )
    ladder: int | None = field("its rung, 0 the baseline", null=APART)
    step_times_ms: list[float] | None = field("round by round", null=UNTOLD)
    ratio: float | None = field("step time / baseline's, medians", null=EITHER)
    ratio_low: float | None = field("95% interval over rounds", null=FEW_ROUNDS)
    ratio_high: float | None = field("its other end", null=FEW_ROUNDS)
    bound: float | None = field(
        "least ratio that the trace of the baseline allows", null="there is no trace"
    )
    estimate: float | None = field("the likely one", null="there is no trace")
    ratio_to_previous: float | None = field("step time / that of the rung below", null=NOT_IN_TURN)
    ratio_to_previous_low: float | None = field("95% interval", null=FEW_ROUNDS)
    ratio_to_previous_high: float | None = field("its other end", null=FEW_ROUNDS)
    ratio_to_reference: float | None = field(
        "step time / that of transformers' LLaMA", null=NOT_IN_TURN
    )
    ratio_to_reference_low: float | None = field("95% interval", null=FEW_ROUNDS)
    ratio_to_reference_high: float | None = field("its other end", null=FEW_ROUNDS)
    predicted_memory_bytes: int | None = field("peak of a step", null=NO_FAKE)
    measured_memory_bytes: int | None = field("live tensors at the peak", null=UNTOLD)
    largest_loss_difference: float | None = field(
        "from the baseline's, over all steps", null=EITHER
    )
    trains: str | None = field(
        "first steps beside the baseline's: bit-equal, rounding, lower precision", null=UNTOLD
    )
    audit_ok: bool | None = field("whether its audit has no finding", null=UNTOLD)
    audit: str | None = field("ok, or the findings", null=UNTOLD)
    not_the_same: str | None = field(
        "why it is another training than the baseline's", null="nothing says so"
    )
    measured_peak_tflops: float | None = field(
        "of a matmul, measured in the same process", null=UNTOLD
    )
    share_of_measured_peak: float | None = field("achieved / measured peak", null=EITHER)
    compile_s: float | None = field("seconds, without a cache", null=NOT_COMPILED)
    num_steps: int | None = field("of a run of this size by default", null=NOT_COMPILED)
    break_even_step: int | None = field("from which on compiling has saved time", null=NOT_COMPILED)


# ---- Their documents -----------------------------------------------------------------------------


class MemoryFit(Document):
    """peak = constant + B (linear S + quadratic S^2)"""

    constant_bytes: float | None = field("whatever batch and sequence", null=NO_FIT)
    linear_bytes: float | None = field("per token", null=NO_FIT)
    quadratic_bytes: float | None = field(
        "per sample and squared length of the sequence", null=NO_FIT
    )
    largest_error_percent: float | None = field("of a row", null=NO_FIT)
    rows: int | None = field("that it was fitted to", null=NO_FIT)


class GrowthFactor(Document):
    grows: str = field("batch or sequence")
    from_: dict[str, int] = field("batch_size and seq_len of the smaller")
    to: dict[str, int] = field("the same of the larger")
    memory_factor: float | None = field("of the peaks", null="one of the two was not measured")
    throughput_factor: float | None = field(
        "of tokens per second", null="one of the two was not measured"
    )


class MemoryStudy(SweepDocument):
    rows: list[MemoryStudyRow] = field("by batch size and sequence length")
    fit: NotRequired[MemoryFit] = field("of the peaks")
    factors: NotRequired[list[GrowthFactor]] = field("from one batch size or sequence to the next")


class TrainingBenchmark(SweepDocument):
    rows: list[TrainingBenchmarkRow] = field("by size, sequence, mode and what is compiled")


class AttentionGrowth(Document):
    """Exponents of the sequence length."""

    implementation: str = field("as in the rows")
    dtype: str = field("data type")
    d_head: int = field("width of a head")
    seq_lens: str = field("tokens, of the rows that were measured")
    forward_ms: float | None = field("of the time", null=FEW_LENGTHS)
    backward_ms: float | None = field("of the time", null=FEW_LENGTHS)
    memory_bytes: float | None = field("of the memory", null=FEW_LENGTHS)
    predicted_memory_bytes: float | None = field("of the memory by prediction", null=FEW_LENGTHS)


class AttentionBenchmark(SweepDocument):
    rows: list[AttentionBenchmarkRow] = field(
        "by implementation, data type, width of a head and sequence"
    )
    growth: NotRequired[list[AttentionGrowth]] = field("with the sequence length")


class TensorType(Document):
    model: str = field("the toy model, or the workshop's")
    autocast: str = field("precision")
    what: str = field("parameter, output, gradient, optimizer state, part, logits, loss")
    name: str = field("of the tensor's module or parameter")
    dtype: str = field("data type")
    count: int = field("tensors")


class NumberFormat(Document):
    type: str = field("its name")
    exponent_bits: int = field("bits")
    mantissa_bits: int = field("bits")
    largest: float = field("number")
    smallest_normal: float = field("number")
    smallest_subnormal: float = field("number")
    eps: float = field("from 1 to the next number")
    decimal_digits: int = field("that survive")


class SquareLimits(Document):
    type: str = field("of the numbers")
    width: int = field("entries of the row")
    zero_up_to: float = field("entry whose sum of squares is 0")
    sum_infinite_from: float = field("entry whose sum of squares is infinite")
    mean_infinite_from: float = field("entry whose mean of squares is infinite")
    entry: float = field("of the rows that are normalized")
    written_out: float = field("largest normalized entry; 1 is correct")
    rms_norm: float = field("the same by RMSNorm")
    layer_norm: float = field("the same by layer norm")


class AccumulationRow(Document):
    accumulator: str = field("type of the sum")
    addend: str = field("type of the terms")
    result: float = field("the sum")
    relative_error: float = field("of the sum")
    first_lost_addition: int | None = field("its number", null="the sum grew with each addition")


class PrecisionStudy(SweepDocument):
    rows: list[StepTimesRow] = field("by size and precision")
    lacking: NotRequired[dict[str, str]] = field(
        "precisions that the device does not have, and why"
    )
    dtypes: NotRequired[list[TensorType]] = field("of every tensor under autocast")
    formats: NotRequired[list[NumberFormat]] = field("range and precision of each")
    squares: NotRequired[list[SquareLimits]] = field(
        "where sums and means of squares become 0 or infinite"
    )
    accumulation: NotRequired[list[AccumulationRow]] = field(
        "a sum of equal terms in each pair of types"
    )


class TimingStudy(SweepDocument):
    rows: list[TimingStudyRow] = field("the right method first")
    methods: NotRequired[dict[str, str]] = field("what each method of timing does")


class OptimizationStudy(SweepDocument):
    rows: list[OptimizationStudyRow] = field("by size, precision and flags")
    reference: list[OptimizationStudyRow] = field("transformers' LLaMA, one for each size")


class ScalingStudy(SweepDocument):
    rows: list[ScalingStudyRow] = field("by kind of scaling, mode, ranks, buckets and fault")
    verdicts: NotRequired[list[FaultVerdict]] = field("of each inserted fault")


class CollectiveBenchmark(SweepDocument):
    rows: list[CollectiveBenchmarkRow] = field("by kind, ranks and bytes")
    fits: NotRequired[list[CollectiveFit]] = field("by kind and number of ranks")
    fit: NotRequired[CollectiveFit] = field("of all kinds but broadcast, on the most ranks")
