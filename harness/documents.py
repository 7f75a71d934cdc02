"""The JSON documents as types: every field, its unit, and when it is null.  docs/files.md is generated from this file.

A field whose type allows None has a sibling <name>_reason, a string, wherever it is null.  Every document that a file
holds also has schema_version.  Times are milliseconds, sizes bytes or MB (2^20 bytes), rates per second, shares between
0 and 1, as the names say.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typing_extensions import NotRequired, TypedDict

from harness.errors import UserError

SCHEMA_VERSION = 2


def read_document(path: Path) -> dict | None:
    """A JSON document of ours; None where there is none, or a JSON file of another program.

    Raises UserError, naming the file, for one that is damaged or was written under another schema version.
    """
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise UserError(f"{path}: cannot be read as JSON of a run: {error}") from error
    version = document.get("schema_version") if isinstance(document, dict) else None
    if not isinstance(version, int):
        return None
    if version != SCHEMA_VERSION:
        raise UserError(f"{path}: schema version {version}, this workshop reads version {SCHEMA_VERSION}")
    return document


# ---- Every run -----------------------------------------------------------------------------------------------------


class Device(TypedDict, total=False):
    type: str  # cpu, or cuda for CUDA and ROCm
    name: str
    arch: str  # gcnArchName or sm_XY; GPUs only
    compute_units: int  # multiprocessors; GPUs only
    memory_bytes: int  # GPUs only


class Environment(TypedDict):
    timestamp: str  # ISO 8601 with time zone, when the run began
    command_line: str
    commit: str | None  # of the project; null: not in a git checkout
    uncommitted_changes: bool | None  # null: not in a git checkout
    host: str
    platform: str
    python: str  # version
    packages: dict[str, str | None]  # version by package; null: not installed
    hip: str | None  # version that torch was built for; null: not a ROCm build
    cuda: str | None  # version that torch was built for; null: not a CUDA build
    device: Device
    cpu: dict[str, Any]  # name, logical_cores, torch_threads
    variables: dict[str, str]  # environment variables that matter to PyTorch


class RunConfig(TypedDict):
    model: dict[str, Any]  # fields of TinyLlamaConfig, parameters, and size: the --size given; null: none was
    training: dict[str, Any]  # fields of TrainingConfig: flags as they took effect; null: PyTorch's choice or not given
    profiling: dict[str, Any]  # fields of ProfilerConfig; null: not given
    environment: Environment


class Timing(TypedDict):
    mean: float | None  # ms; null: no step was completed
    median: float | None  # ms; null: no step was completed
    std: float | None  # ms, sample standard deviation; null: fewer than two steps
    p95: float | None  # ms, 95th percentile; null: no step was completed
    count: int  # steps


class CompilationTimes(TypedDict):
    compile_s: float  # seconds, before step 1
    from_cache: bool  # compiled code of an earlier run was used
    uncompiled_pass_ms: float  # median of a forward and backward pass
    compiled_pass_ms: float  # median of a forward and backward pass
    passes: int  # timed for each median
    saved_ms_per_step: float
    break_even_step: int | None  # from which on compiling has saved time; null: it saves none


class Progress(TypedDict):
    num_steps: int  # asked for
    completed_steps: int
    batch_size: int  # samples of a step and rank
    sequence_length: int  # tokens
    world_size: int  # ranks


class Performance(TypedDict):
    avg_step_time_ms: float | None  # mean over the averaged steps; null: no step was completed
    median_step_time_ms: float | None  # null: no step was completed
    std_step_time_ms: float | None  # null: fewer than two steps
    p95_step_time_ms: float | None  # null: no step was completed
    first_step_time_ms: float | None  # the first step is in no average; null: no step was completed
    samples_per_sec: float | None  # of all ranks; null: no step was completed
    tokens_per_sec: float | None  # of all ranks; null: no step was completed
    avg_data_time_ms: float | None  # mean; null: no step was completed
    avg_forward_time_ms: float | None  # mean; null: no step was completed
    avg_backward_time_ms: float | None  # mean; null: no step was completed
    avg_optimizer_time_ms: float | None  # mean; null: no step was completed
    model_flops_per_step: int | None  # matmul FLOPs of one rank, forward and backward; null: no formula
    achieved_tflops: float | None  # 10^12 FLOP/s of one rank; null: no step was completed, or no formula
    gpu_utilization_percent: float | None  # mean of ten samples a second; null: no GPU, or its driver does not tell
    steps_averaged: int
    steps_averaged_note: str  # which steps were excluded
    compilation: CompilationTimes | None  # null: --compile is off
    timings_ms: dict[str, Timing]  # of the step and each phase: data, forward, backward, optimizer


class Memory(TypedDict):
    peak_mb: float | None  # MB; null: training did not start
    average_mb: float | None  # MB; null: training did not start
    source: str  # what was counted


class Losses(TypedDict):
    first: float | None  # null: not a finite number, or no step was completed
    final: float | None  # null: not a finite number, or no step was completed


class StepColumns(TypedDict):
    step: list[int]  # numbers, from 1
    loss: list[float | None]  # null: not a finite number
    time_ms: list[float]
    exclusion_reason: list[str | None]  # why a step is in no average; null: it is in them


class PerformanceSummary(TypedDict):
    status: str  # completed, interrupted, failed
    error: str | None  # one line; null: completed
    config: dict[str, Any]  # model, training and profiling, as in config.json
    environment: Environment
    training: Progress
    performance: Performance
    memory: Memory
    loss: Losses
    steps: StepColumns


# ---- Memory --------------------------------------------------------------------------------------------------------


class TensorRow(TypedDict):
    bytes: int
    shape: list[int]
    dtype: str
    where: str  # the part of the model that made it, or whose gradient it serves
    phase: str | None  # of the step; null: it was there before the step
    category: str  # parameters, gradients, optimizer, activations, temporaries, buffers
    born: int  # event of the step
    died: int | None  # event of the step; null: it outlives the step


class MemoryPhase(TypedDict):
    name: str
    start_us: float  # microseconds after the step began
    end_us: float
    peak_bytes: int


class MemoryPeak(TypedDict):
    time_us: float
    phase: str | None  # null: between phases
    where: str  # part of the model
    bytes_by_category: dict[str, int]
    largest_tensors: list[TensorRow]


class MemoryTimeline(TypedDict):
    step: int  # the one that was tracked
    source: str
    peak_bytes: int  # of live tensors
    average_bytes: float  # over the time of the step
    allocations: int  # made by the step
    kept_for_backward: list[dict[str, Any]]  # component, layer (if it is in one), bytes
    allocator: list[dict[str, Any]] | None  # what, bytes: from live tensors to what the driver reports; null: no GPU
    largest_tensor: TensorRow | None  # null: the step made none
    phases: list[MemoryPhase]
    peak: MemoryPeak
    timeline: dict[str, list]  # columns by event: time_us, total_bytes, bytes of each category, layer
    predicted: dict[str, Any] | None  # peak_bytes, error_percent, bytes by category; null: cannot run on fake tensors


class TimeBounds(TypedDict):
    compute_ms: float | None  # FLOPs at the peak rate; null: no peak of this device is known
    compute_peak: str | None  # the peak and its source; null: none is known
    bandwidth_ms: float | None  # least bytes at the peak rate; null: no peak of this device is known
    bandwidth_peak: str | None  # the peak and its source; null: none is known
    least_bytes: int  # that a step must move if all it makes and drops stays on the chip


class Prediction(TypedDict):
    device: Device
    model: dict[str, Any]  # as in config.json
    training: dict[str, Any]  # as in config.json
    peak_memory_mb: float  # MB
    memory_by_category_mb: dict[str, float]  # MB at the peak
    peak_where: str  # phase and part of the model
    largest_tensors: list[TensorRow]  # at the peak
    kept_for_backward: list[dict[str, Any]]  # component, mb, quadratic_mb: the part quadratic in the sequence length
    device_memory_mb: float  # MB that the device has
    device_memory_source: str
    used_by_process_mb: float  # MB in use before there is a model
    fits: bool
    max_batch_size: int  # samples; 0: not even one
    max_seq_len: int  # tokens; 0: not even one
    parameters: int
    forward_flops: int | None  # matmul FLOPs; null: the workload has no formula
    step_flops: int | None  # forward and backward; null: the workload has no formula
    step_time_lower_bound_ms: float | None  # null: no peak of this device is known
    step_time_bounds: TimeBounds


# ---- Traces --------------------------------------------------------------------------------------------------------


class Integrity(TypedDict):
    trustworthy: bool
    problems: list[str]  # why it is not
    notes: list[str]
    unreliable: dict[str, str]  # parts of the analysis that should not be relied on, and why
    events: int
    malformed_events: int
    operators: int
    gpu_events: int
    steps: int
    steps_without_gpu_events: int | None  # null: no GPU events
    kernel_launches: int
    launches_without_kernel: int
    kernels_linked_to_an_operator: int | None  # null: no GPU events
    gpu_events_launched_before_the_trace: int
    graph_launches: int
    rank: int | None  # null: the trace names none
    world_size: int | None  # null: the trace names none
    shapes_recorded: bool
    stacks_recorded: bool
    modules_recorded: bool
    profiler_overhead: dict[str, Any] | None  # ratio of medians, profiled to unprofiled; null: no summary of the run
    ranks_missing: list[int]


class Verdict(TypedDict):
    bound: str  # compute-bound, memory-bound, launch-bound, data-bound, communication-bound, undecided
    trustworthy: bool
    line: str  # the answer in one line
    shares: dict[str, float]  # of the step's time, by bound
    meaning: dict[str, str]
    thresholds: dict[str, Any]


class ProfiledStep(TypedDict):
    number: int
    duration_ms: float
    gpu_events: int
    kernels_during: int  # that ran while the host was in the step
    kernels: int  # that the step launched
    kernel_launches: int
    kernels_of_launches: int
    incomplete: bool


class ProfiledSteps(TypedDict):
    mean_ms: float | None  # on the host; null: the trace holds no ProfilerStep marks
    median_ms: float | None  # null: no ProfilerStep marks
    std_ms: float | None  # null: fewer than two steps
    p95_ms: float | None  # null: no ProfilerStep marks
    min_ms: float | None  # null: no ProfilerStep marks
    max_ms: float | None  # null: no ProfilerStep marks
    count: int
    rows: list[ProfiledStep]


class Attribution(TypedDict):
    clock: str  # GPU or host
    source: str  # of the components' names
    steps: int
    ms_per_step: float
    unattributed_share: float


class ComponentRow(TypedDict):
    component: str
    ms_per_step: float
    std_ms: float | None  # over the steps; null: fewer than two steps
    share: float  # of the step
    phases_ms: dict[str, float]  # the same by phase


class Opportunity(TypedDict):
    name: str
    how: str
    evidence: str
    share: float  # of the step that it concerns
    ms_per_step: float  # that it concerns
    part_speedup: float | None  # of that part at most; null: the part could vanish
    speedup_bound: float | None  # of the step, by Amdahl's law; null: all of the step is of this kind
    basis: str  # of the bound
    memory_bound_mb: NotRequired[float]  # MB that it saves at most; checkpointing only
    flag: str | None  # that does it; null: no flag of the workshop does


class OperatorRow(TypedDict):
    name: str
    shapes: NotRequired[str]  # of the inputs; by shape only
    calls: int
    self_cpu_us: float  # over all calls
    cpu_us: float  # with the operators that it calls
    self_device_us: float | None  # null: no GPU events
    device_us: float | None  # null: no GPU events
    flops: int | None  # over all calls; null: the recorded inputs do not determine it
    bytes: int | None  # read and written; null: the recorded inputs do not determine it
    share: float  # of all operators' own time


class KernelRow(TypedDict):
    name: str
    count_per_step: float
    mean_us: float
    p95_us: float
    share: float  # of the kernels' time
    launched_by: str | None  # operator; null: it is linked to none
    component: str


class GpuTimeline(TypedDict):
    total_ms: float | None  # from the first GPU event to the end of the last; null: no GPU events
    computation_ms: float | None  # null: no GPU events
    exposed_comm_ms: float | None  # communication that no computation overlaps; null: no GPU events
    exposed_memcpy_ms: float | None  # copies that nothing else overlaps; null: no GPU events
    busy_ms: float | None  # null: no GPU events
    idle_ms: float | None  # null: no GPU events
    devices: list[dict[str, Any]]  # the same for each device, and for each of its streams
    idle_by_cause: list[dict[str, Any]] | None  # cause, ms, share_of_total, meaning; null: no GPU events
    launch_delay_us: dict[str, float] | None  # from launch to start; null: no launch call is in the trace
    queue_depth: dict[str, float] | None  # kernels launched and not begun; null: no launch call is in the trace


class OperatorAnalysis(TypedDict):
    trace: str  # file name
    integrity: Integrity
    verdict: Verdict
    steps: ProfiledSteps
    attribution: Attribution
    phases: list[dict[str, Any]]  # phase, ms_per_step, share
    components: list[ComponentRow]
    classes: list[dict[str, Any]]  # class of operator, ms_per_step, share
    opportunities: list[Opportunity]
    gpu_timeline: GpuTimeline
    operators: list[OperatorRow]
    operators_by_shape: list[OperatorRow]
    kernels: list[KernelRow]
    step_timeline: dict[str, Any]  # one step as lanes of [start_ms, end_ms, component number], for the figure
    memory: dict[str, Any]  # peak_mb, time_ms, allocated_mb; null: the trace has no memory events


# ---- FLOPs and limits ----------------------------------------------------------------------------------------------


class ComponentFlops(TypedDict):
    component: str
    forward_flops: int  # of a step, over all layers
    backward_flops: int
    forward_flops_per_layer: int
    share: float


class CounterRow(TypedDict):
    counter: str  # formula, FlopCounterMode, DeepSpeed
    forward_flops: int | None  # matmul FLOPs of one micro-batch; null: it did not count
    backward_flops: int | None  # null: it counts forward passes alone
    beyond_matmuls: int | None  # FLOPs of other operators that it counts; null: it did not count


class Reconciliation(TypedDict):
    batch_size: int  # of the micro-batch
    sequence_length: int
    recomputed_flops: int  # part of the backward pass here
    rows: list[CounterRow]
    agree: bool
    forward_flops_by_module: dict[str, int]


class Peak(TypedDict):
    rate: float  # FLOP/s, or bytes/s of a bandwidth
    kind: str  # datasheet, measured, given
    source: str
    mfu_percent: NotRequired[float]  # of FLOP/s


class FlopsAnalysis(TypedDict):
    forward_flops: int  # matmul FLOPs of a step's forward passes
    step_flops: int  # forward and backward
    recomputed_flops: int  # beyond step_flops
    forward_flops_by_component: dict[str, int]
    parameters: int
    flops_per_parameter: float  # of a step
    flops_per_token: float  # of a step
    flops_per_token_by_6n: int  # the rule of thumb: six for each parameter
    by_component: list[ComponentFlops]
    reconciliation: Reconciliation
    deepspeed: dict[str, Any] | None  # counts of one micro-batch; null: DeepSpeed did not count


class PerformanceMetrics(TypedDict):
    avg_step_time_ms: float
    std_step_time_ms: float | None  # null: fewer than two steps
    steps_averaged: int
    steps_averaged_note: str
    flops_per_sec: float  # of one rank
    throughput_samples_per_sec: float  # of all ranks
    world_size: int
    scope: str


class EfficiencyMetrics(TypedDict):
    mfu_percent: float | None  # null: no peak of this device is known
    hfu_percent: float | None  # recomputation included; null: nothing is recomputed, or no peak
    device_peak_flops: float | None  # FLOP/s; null: no peak of this device is known
    peak_source: str | None  # null: no peak of this device is known
    precision: str
    peaks: list[Peak]  # the first is what MFU is a share of
    bandwidth_peaks: list[Peak]


class FlopsProfile(TypedDict):
    convention: str  # what counts as a FLOP
    config: dict[str, Any]  # as in config.json
    environment: Environment
    flops_analysis: FlopsAnalysis
    performance_metrics: PerformanceMetrics
    efficiency_metrics: EfficiencyMetrics


class ComputationalIntensity(TypedDict):
    convention: dict[str, str]  # what is counted
    step_flops: int  # with recomputation
    step_bytes: int  # every operator reads its inputs and writes its outputs
    minimum_step_bytes: int  # if all that a step makes and drops stays on the chip
    arithmetic_intensity_flops_per_byte: float
    intensity_at_minimum_flops_per_byte: float
    memory_bandwidth_used_gb_per_sec: float  # 10^9 bytes/s
    memory_bandwidth_peak_gb_per_sec: float | None  # 10^9 bytes/s; null: no peak of this device is known
    memory_bandwidth_peak_source: str | None  # null: no peak of this device is known
    memory_bandwidth_utilization_percent: float | None  # null: no peak of this device is known
    memory_bound_vs_compute_bound: str  # memory_bound below 10 FLOPs/byte, mixed to 100, compute_bound above
    ridge_point_flops_per_byte: float | None  # null: no peak of this device is known
    side_of_ridge_point: str | None  # memory or compute; null: no peak of this device is known
    device_peak_flops: float | None  # FLOP/s; null: no peak of this device is known
    peak_source: str | None  # null: no peak of this device is known
    classes: list[dict[str, Any]]  # class, calls, flops, element_operations, bytes, operations_per_byte, side
    phases: list[dict[str, Any]]  # phase, flops, bytes, minimum_bytes
    operators: list[dict[str, Any]]  # phase, class, operator, calls, flops, elements, bytes


class RooflineData(TypedDict):
    device: str
    precision: str
    roofs: dict[str, list[Peak]]  # compute and bandwidth
    ridges: list[dict[str, Any]]  # operations per byte where a pair of roofs meet
    step: dict[str, Any]  # a point, as below
    points: list[dict[str, Any]]  # name, operations, bytes, time_ms, operations_per_sec, share_of_roof; null: no time
    time_elsewhere: list[dict[str, Any]]  # classes of operators that are not counted
    time_source: dict[str, str]
    convention: dict[str, str]


# ---- Comparisons and sweeps ----------------------------------------------------------------------------------------


class Comparison(TypedDict, total=False):
    baseline: str
    sweep: str  # of sweeps: which one
    key: list[str]  # of sweeps: the columns that say which row it is
    rows: list[dict[str, Any]]  # of sweeps: a figure of a row in each sweep
    runs: list[dict[str, Any]]  # of runs: a row a run, with the ratio of medians and its 95% interval
    repeats: dict[str, Any] | None  # runs of the same settings and their spread; null: there are none
    differences: list[dict[str, Any]]  # settings and surroundings that differ: name, values
    scaling: dict[str, Any] | None  # step time ~ FLOPs^exponent; null: all steps have the same FLOPs
    components: list[dict[str, Any]]  # ms per step in both runs, change, noise
    operators: list[dict[str, Any]]  # the same by operator
    profiles_reason: str  # why profiles are not compared


class SweepDocument(TypedDict, total=False):
    settings: dict[str, Any]  # what decides what the rows hold
    environment: Environment
    sweep: str  # its name
    notes: list[str]  # what was left out, and why
    key: list[str]  # the columns that say which row it is
    figures: dict[str, str | None]  # the columns that were measured, and the column of the spread of each; null: none
    rows: list[dict[str, Any]]  # as below
    device_memory_bytes: int  # available to a row


class SweepRow(TypedDict):
    status: str  # ok, oom, skipped, failed; a column is null where it is not ok
    reason: str  # why it is not ok


class MemoryStudyRow(SweepRow):
    batch_size: int
    seq_len: int  # tokens
    predicted_bytes: int | None  # peak; null: cannot run on fake tensors
    peak_bytes: int | None
    peak_phase: str | None
    bytes_by_category: dict[str, int] | None  # at the peak
    bytes_per_token: float | None
    step_time_ms: float | None
    samples_per_sec: float | None
    tokens_per_sec: float | None


class TrainingBenchmarkRow(SweepRow):
    size: str
    seq_len: int  # tokens
    batch_size: int
    mode: str  # forward, train
    precision: str
    compiled: bool
    warmup_steps: int  # excluded before the repetitions
    step_ms: float | None  # median; also forward_ms, backward_ms, optimizer_ms, and _mean_ms and _std_ms of each
    compile_s: float | None  # null: not compiled
    peak_bytes: int | None  # null: no GPU, whose allocator would know
    predicted_peak_bytes: int | None  # null: cannot run on fake tensors
    achieved_tflops: float | None


class AttentionBenchmarkRow(SweepRow):
    implementation: str  # manual, eager, compiled, sdpa-<backend>
    dtype: str
    batch_size: int
    d_head: int
    seq_len: int  # tokens
    forward_ms: float | None  # median; also _mean_ms and _std_ms
    backward_ms: float | None  # median; also _mean_ms and _std_ms
    memory_bytes: int | None  # in use before the backward pass
    predicted_memory_bytes: int | None  # null: no such kernel on this device
    predicted_peak_bytes: int | None
    tensors: list[dict[str, Any]] | None  # name, shape, dtype, bytes: alive when the backward pass begins
    kernel: str | None  # that did the forward pass
    compile_s: float | None


class PrecisionStudyRow(SweepRow):
    size: str
    seq_len: int  # tokens
    batch_size: int
    precision: str
    step_ms: float | None  # median; also of each phase, and _mean_ms and _std_ms
    peak_bytes: int | None
    predicted_peak_bytes: int | None
    first_loss: float | None
    final_loss: float | None


class TimingStudyRow(SweepRow):
    way: str  # of timing
    baseline_ms: float | None
    changed_ms: float | None
    ratio: float | None  # changed / baseline
    ratio_95: list[float] | None  # interval; null: of the right way alone
    baseline_factor: float | None  # baseline / baseline of the right way
    conclusion: str | None  # what this way says the change does


# ---- Exercises -----------------------------------------------------------------------------------------------------


class ExerciseAnswers(TypedDict):
    exercise: int
    text: str  # file name
    environment: dict[str, Any]  # as in config.json, less the command line
    answers: dict[str, dict[str, Any]]  # by field: value, where this machine can tell, and evidence
