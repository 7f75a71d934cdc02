"""The JSON documents as types: every field, its unit, and when it is null.  docs/files.md is generated from this file.

A field whose type allows None has a sibling <name>_reason, a string, wherever it is null.  Every document in a file
also has schema_version.  Times are milliseconds, sizes bytes or MB (2^20 bytes), rates per second, shares between
0 and 1, as the names say.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typing_extensions import NotRequired, TypedDict

from harness.base.errors import UserError

SCHEMA_VERSION = 3
READABLE_VERSIONS = (2, 3)  # 3 adds fields to 2; a reader takes those that a document may lack with get()


def read_document(path: Path) -> dict | None:
    """A JSON document of this project; None if the file does not exist or was written by another program.

    Raises UserError, which names the file, if it is damaged or has a schema version other than READABLE_VERSIONS.
    """
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}") from error
    version = document.get("schema_version") if isinstance(document, dict) else None
    if not isinstance(version, int):
        return None
    if version not in READABLE_VERSIONS:
        known = " and ".join(map(str, READABLE_VERSIONS))
        raise UserError(f"{path}: has schema version {version}, but this workshop reads versions {known}")
    return document


# ---- Every run -----------------------------------------------------------------------------------------------------


class Device(TypedDict, total=False):
    type: str  # cpu, or cuda for CUDA and ROCm
    name: str
    arch: str  # gcnArchName or sm_XY; GPUs only
    compute_units: int  # multiprocessors; GPUs only
    memory_bytes: int  # GPUs only


class Environment(TypedDict):
    timestamp: str  # start of the run, ISO 8601 with time zone
    command_line: str
    commit: str | None  # of the project; null: not in a git checkout
    uncommitted_changes: bool | None  # null: not in a git checkout
    host: str
    platform: str
    python: str  # version
    packages: dict[str, str | None]  # version by package; null: not installed
    hip: str | None  # version that PyTorch was built for; null: not a ROCm build
    cuda: str | None  # version that PyTorch was built for; null: not a CUDA build
    device: Device
    cpu: dict[str, Any]  # name, logical_cores, torch_threads
    variables: dict[str, str]  # environment variables that affect PyTorch
    warnings: list[str]  # such as a GPU that PyTorch does not see; empty: none


class RunConfig(TypedDict):
    model: dict[
        str, Any
    ]  # parameters; fields of TinyLlamaConfig and --size, or file and class of --workload; null: none
    training: dict[
        str, Any
    ]  # fields of TrainingConfig: flags as they took effect; null: PyTorch's default or not given
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
    from_cache: bool  # code compiled by an earlier run was used
    uncompiled_pass_ms: float  # median of a forward and backward pass
    compiled_pass_ms: float  # median of a forward and backward pass
    passes: int  # timed for each median
    saved_ms_per_step: float
    break_even_step: int | None  # first step by which compiling has saved time; null: it saves none


class GradientNorm(TypedDict):  # the 2-norm of all gradients as one vector, before they are clipped
    first: float | None  # at the first step; null: not a finite number, or no step was completed
    last: float | None  # at the last step; null: not a finite number, or no step was completed
    max: float | None  # the largest; null: no step has one that is finite
    clipped_steps: int  # steps whose norm was larger than --grad-clip; none that fp16's gradient scaler skipped


class Progress(TypedDict):
    num_steps: int  # requested
    completed_steps: int
    batch_size: int  # samples per step and rank
    sequence_length: int  # tokens
    rank: int  # which measured this; figures that are not of all ranks are its own
    world_size: int  # ranks
    parallel: str | None  # how they share the work: ddp, zero1, fsdp; null: one rank
    grad_norm: GradientNorm | None  # of all gradients, before they are clipped; null: --grad-clip was not given


class Performance(TypedDict):
    avg_step_time_ms: float | None  # mean over the averaged steps; null: no step was completed
    median_step_time_ms: float | None  # null: no step was completed
    std_step_time_ms: float | None  # null: fewer than two steps
    p95_step_time_ms: float | None  # null: no step was completed
    first_step_time_ms: float | None  # excluded from averages; null: no step was completed
    samples_per_sec: float | None  # of all ranks; null: no step was completed
    tokens_per_sec: float | None  # of all ranks; null: no step was completed
    avg_data_time_ms: float | None  # mean; null: no step was completed
    avg_forward_time_ms: float | None  # mean; null: no step was completed
    avg_backward_time_ms: float | None  # mean; null: no step was completed
    avg_optimizer_time_ms: float | None  # mean; null: no step was completed
    model_flops_per_step: int | None  # matmul FLOPs of one rank, forward and backward; null: not known
    achieved_tflops: float | None  # 10^12 FLOP/s of one rank; null: no step was completed, or FLOPs are not known
    gpu_utilization_percent: float | None  # mean of ten samples a second; null: no GPU, or its driver reports none
    steps_averaged: int
    steps_averaged_note: str  # which steps were excluded
    compilation: CompilationTimes | None  # null: --compile is off
    timings_ms: dict[str, Timing]  # by step, data, forward, backward, optimizer


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
    grad_norm: NotRequired[list[float | None]]  # with --grad-clip, before clipping; null: not a finite number
    exclusion_reason: list[str | None]  # why a step is excluded from averages; null: it is included
    waited_share: list[float | None]  # of thread time, waiting for a core; null: not reported by the system
    longest_wait_share: list[float | None]  # of the step, for the thread that waited longest; null: as for waited_share
    lost_share: list[float | None]  # of the step, that is due to waiting at most; null: not reported by the system
    disturbed: list[bool | None]  # whether it waited long enough to be longer; null: not reported by the system


class GpuDisturbance(TypedDict):
    other_processes: int | None  # on the GPU, the most of before and after the run; null: not reported by the driver
    memory_in_use_mb: float  # MB before the run: other processes, and the context of this one
    clock_mhz: float | None  # mean, read once a second; null: not reported by the driver
    max_clock_mhz: int | None  # null: not reported by the driver
    lowered_by: dict[str, float] | None  # causes other than the power limit, share of the time; null: not known


class Disturbance(TypedDict):  # of several ranks, that of the one that was disturbed most
    disturbed: bool | None  # null: not reported by the system
    waited_share: float | None  # of thread time, waiting for a core; null: not reported by the system
    longest_wait_share: float | None  # of the steps, for the thread that waited longest in each; null: not known
    lost_share: float | None  # of the steps' time, that is due to it at most, sum over ranks; null: not known
    steps_disturbed: int | None  # null: not reported by the system
    threads: int  # that PyTorch uses for one operator
    cores: int  # that the affinity mask allows
    quota_cores: float | None  # least CPU quota of the control groups; null: no quota, or not known
    load_before: float | None  # load average of the minute before the run; null: the system has none
    throttled_share: float | None  # of the quota's periods, those in which it was used up; null: no quota, or not known
    pressure_share: float | None  # of the time, some process of the machine waited for a core; null: not known
    steal_share: float | None  # of the cores' busy time, taken by other virtual machines; null: not known
    switches_per_sec: float | None  # involuntary context switches; null: nothing was measured
    sample_us: float | None  # microseconds that a sample takes, median, two per step; null: nothing was measured
    gpu: GpuDisturbance | None  # null: no GPU in use
    reasons: list[str]  # what disturbed it, with figures


class NoSyncSteps(TypedDict):
    steps: int  # of each kind, in turn, after training
    step_ms: float  # median of steps as in training
    no_sync_step_ms: float  # median of steps that do not reduce gradients
    difference_ms: float  # median of pairs: what the reduction of gradients costs a step
    difference_95_ms: list[float]  # its 95% interval, by bootstrap over the pairs
    share: float  # of step_ms


class RankFacts(TypedDict):
    rank: int
    host: str
    mean_step_ms: float | None  # over the averaged steps; null: no step was completed
    peak_memory_mb: float  # MB, as memory.source says
    disturbance: Disturbance


class AuditFinding(TypedDict):
    # missing_gradient, zero_gradient, non_finite_gradient, unmoved_parameter, first_loss, backward_time, rate
    check: str
    detail: str  # the finding with its figures
    parameters: NotRequired[list[str]]  # names, 20 at most; checks of parameters only


class Audit(TypedDict):
    ok: bool | None  # whether there is no finding; null: no step was completed
    findings: list[AuditFinding]
    not_checked: list[dict[str, str]]  # check and reason
    gradient_norms: dict[str, float]  # of the first step, by part of the model over all layers


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
    ranks: list[RankFacts]  # those that reached the end together; empty: one rank, or none did
    no_sync: NoSyncSteps | None  # null: --no-sync-steps was not given
    disturbance: Disturbance
    audit: Audit  # whether the run trains


# ---- Memory --------------------------------------------------------------------------------------------------------


class TensorRow(TypedDict):
    bytes: int
    shape: list[int]
    dtype: str
    where: str  # part of the model that allocated it, or whose gradient it is used for
    phase: str | None  # of the step; null: allocated before the step
    category: str  # parameters, gradients, optimizer, activations, temporaries, buffers, gathered parameters, buckets
    born: int  # event that allocated it
    died: int | None  # event that freed it; null: it outlives the step


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


class CollectiveRow(TypedDict):
    kind: str  # all_reduce, all_gather, reduce_scatter, broadcast
    calls: int  # of a step and rank
    bytes: int  # of the larger of input and output, summed over calls


class MemoryTimeline(TypedDict):
    step: int  # number of the tracked step
    source: str
    peak_bytes: int  # of live tensors
    average_bytes: float  # over the time of the step
    allocations: int  # during the step
    collectives: list[CollectiveRow]  # of the step, that of the loss included; empty: one rank
    kept_for_backward: list[dict[str, Any]]  # saved tensors: component, layer (if it is in one), bytes
    allocator: list[dict[str, Any]] | None  # what, bytes: from live tensors to what the driver reports; null: no GPU
    largest_tensor: TensorRow | None  # null: the step allocated none
    phases: list[MemoryPhase]
    peak: MemoryPeak
    timeline: dict[str, list]  # columns by event: time_us, total_bytes, bytes of each category, layer
    predicted: dict[str, Any] | None  # peak_bytes, error_percent, bytes by category; null: cannot run on fake tensors


class PredictedCollectiveRow(CollectiveRow):
    group_size: int  # ranks
    sent_bytes: int  # by each rank at least, as bus bandwidth counts


class Communication(TypedDict):
    sent_bytes: int  # by each rank and step at least
    network_gb_per_sec: float | None  # 10^9 bytes/s of a rank, bus bandwidth; null: no --network was given
    network_latency_us: float | None  # of a call; null: no --network was given, or in GB/s, which counts none
    network_source: str | None  # where these come from; null: no --network was given
    network_ms: float | None  # null: no --network was given
    overlapped_ms: float | None  # least step time, all communication hidden; null: no --network, or no peak is known
    not_overlapped_ms: float | None  # the same, none hidden; null: no --network, or no peak is known
    weak_scaling_bound_from: int | None  # ranks, same batch on each; null: never, no --network, or no peak is known
    strong_scaling_bound_from: int | None  # ranks, same global batch; null: never, no --network, or no peak is known
    efficiency_overlapped: float | None  # weak scaling at most; null: no --network, or no peak is known
    efficiency_not_overlapped: float | None  # with no communication hidden; null: no --network, or no peak is known


class FitRow(TypedDict):
    flags: str  # in addition to those given; --world-size in place of the one given
    peak_memory_mb: float  # MB
    fits: bool


class TimeBounds(TypedDict):
    compute_ms: float | None  # FLOPs at the peak rate; null: no peak of this device is known
    compute_peak: str | None  # the peak and its source; null: none is known
    bandwidth_ms: float | None  # least_bytes at the peak bandwidth; null: no peak of this device is known
    bandwidth_peak: str | None  # the peak and its source; null: none is known
    least_bytes: int  # that a step must move if all temporaries stay in on-chip memory
    network_ms: float | None  # communication at --network; null: not given, or one rank


class TargetDevice(Device):
    source: str  # of its figures
    other_rows: list[str]  # names of other devices that --target-device could stand for


class Prediction(TypedDict):
    device: Device  # of this machine
    target_device: TargetDevice | None  # null: no --target-device was given
    model: dict[str, Any]  # as in config.json
    training: dict[str, Any]  # as in config.json
    world_size: int  # ranks; memory is that of rank 0
    parallel: str | None  # ddp, zero1, fsdp; null: one rank
    collectives: list[PredictedCollectiveRow]  # of a step; empty: one rank
    peak_memory_mb: float  # MB
    memory_by_category_mb: dict[str, float]  # MB at the peak
    library_workspaces_mb: float | None  # MB, part of the peak; null: not measured, or for another device
    peak_where: str  # phase and part of the model
    largest_tensors: list[TensorRow]  # at the peak
    kept_for_backward: list[dict[str, Any]]  # component, mb, quadratic_mb: the part quadratic in the sequence length
    device_memory_mb: float  # MB that the device has
    device_memory_source: str
    in_use_mb: float  # MB of it that other processes, the driver and this process, such as its context, use
    context_mb: float | None  # MB of in_use_mb for the context of this process, at least; null: a CPU
    reserve_mb: float  # MB of it kept free: the least of what is not counted
    reserve_source: str
    on_top_mb: float  # MB that may come on top
    on_top_source: str
    fragmentation_share: list[float] | None  # least and most, of the peak, not part of it; null: no caching allocator
    fits: bool  # an upper bound: fragmentation may come on top
    margin_mb: float  # MB left; negative: missing
    max_batch_size: int | None  # samples; 0: not even one fits; null: a file's step takes no other batch size
    max_seq_len: int | None  # tokens; 0: not even one fits; null: of --workload, whose model may be made for one length
    would_fit: list[FitRow] | None  # other flags; null: it fits, or one rank
    smallest_world_size: int | None  # on which it fits; null: one rank, on none, or nothing is sharded
    parameters: int
    forward_flops: int  # matmul FLOPs of a step
    step_flops: int  # forward and backward
    step_time_lower_bound_ms: float | None  # null: no peak of this device is known, as a prediction measures none
    step_time_bounds: TimeBounds
    communication: Communication | None  # null: one rank


# ---- Traces --------------------------------------------------------------------------------------------------------


class ProfileDisturbance(TypedDict):
    text: str | None  # what disturbed the profiled steps, or none seen; null: no summary, or not reported by the system
    lost_share: float | None  # of the disturbed steps, that is due to waiting at most; null: as for text


class MissingPart(TypedDict):
    part: str
    cost: str  # what the analysis cannot tell without it
    how: str  # to record it


class Integrity(TypedDict):
    trustworthy: bool
    problems: list[str]  # why it is not trustworthy
    notes: list[str]
    unreliable: dict[str, str]  # parts of the analysis that should not be relied on, and why
    events: int
    cut_off: bool  # the file ends before its document does, or is damaged from there on
    malformed_events: int
    operators: int
    gpu_events: int
    steps: int
    steps_without_gpu_events: int | None  # null: no GPU events
    kernel_launches: int
    launches_without_kernel: int
    kernels_linked_to_an_operator: int | None  # null: no GPU events
    gpu_events_launched_before_the_trace: int
    unexplained_share: float | None  # of the steps' time: the GPU was idle for no recorded reason; null: clocks differ
    graph_launches: int
    graph_events: int  # GPU events that they started
    graph_events_attributed: int  # of these, to the operators of which a capture or a warm-up tells
    graphs_attributed_through: list[str]  # what tells of them, as 'the capture trace FILE'
    unclassified_kernels: int  # names of which neither they nor their operator tell what the kernel does
    unclassified_share: float  # of the time of all GPU events
    rank: int | None  # null: not in the trace
    ranks_in_file: list[int]  # whose traces were merged into this file; empty: that of one
    world_size: int | None  # null: not in the trace
    shapes_recorded: bool
    stacks_recorded: bool
    modules_recorded: bool
    not_recorded: list[MissingPart]  # what the trace should contain and does not, the costliest first
    profiler_overhead: dict[str, Any] | None  # ratio of medians, profiled to unprofiled; null: no summary of the run
    disturbance: ProfileDisturbance
    ranks_missing: list[int]
    not_compared: NotRequired[str]  # why the traces that were read together are not those of the ranks of one run


class Verdict(TypedDict):
    bound: str  # compute-bound, memory-, launch-, data-, communication- or host-code-bound, undecided
    trustworthy: bool  # if false, bound is undecided and line says untrustworthy
    line: str  # the verdict in one line
    shares: dict[str, float]  # of the step's time: compute, memory, launch, ..., unexplained; they add up to 1
    meaning: dict[str, str]
    thresholds: dict[str, Any]  # of the rule; ridge_flops_per_byte is null for a GPU of which no peak is known


class ProfiledStep(TypedDict):
    number: int
    duration_ms: float
    gpu_events: int
    kernels_during: int | None  # kernels that ran while the host was in the step; null: clocks of GPU and host differ
    kernels: int  # kernels that the step launched
    kernel_launches: int  # launch calls of the step
    kernels_of_launches: int  # launch calls whose kernel is in the trace
    incomplete: bool  # events of the step are missing


class ProfiledSteps(TypedDict):
    mean_ms: float | None  # on the host; null: no ProfilerStep marks
    median_ms: float | None  # null: no ProfilerStep marks
    std_ms: float | None  # null: fewer than two steps
    p95_ms: float | None  # null: no ProfilerStep marks
    min_ms: float | None  # null: no ProfilerStep marks
    max_ms: float | None  # null: no ProfilerStep marks
    count: int
    rows: list[ProfiledStep]


class Attribution(TypedDict):
    clock: str  # GPU or host
    source: str  # where the names of the components come from
    steps: int
    ms_per_step: float
    unattributed_share: float


class ComponentRow(TypedDict):
    component: str
    ms_per_step: float
    std_ms: float | None  # over the steps; null: fewer than two steps
    share: float  # of the step
    phases_ms: dict[str, float]  # ms per step by phase


class Opportunity(TypedDict):
    name: str
    how: str
    evidence: str
    share: float  # of the step that it affects
    ms_per_step: float  # that it affects
    part_speedup: float | None  # upper bound for the affected part; null: the affected part could vanish
    speedup_bound: float | None  # upper bound for the step, by Amdahl's law; null: the whole step is affected
    speedup_estimate: float | None  # the likely speedup of the step; null: no rate is known to estimate it from
    basis: str  # how bound and estimate were derived
    memory_bound_mb: NotRequired[float]  # MB that it saves at most; checkpointing only
    flag: str | None  # flag that enables it; null: no flag of the workshop does


class OperatorRow(TypedDict):
    name: str
    shapes: NotRequired[str]  # of the inputs; by shape only
    calls: int
    self_cpu_us: float  # over all calls
    cpu_us: float  # over all calls, with the operators that it calls
    self_device_us: float | None  # null: no GPU events
    device_us: float | None  # null: no GPU events
    flops: int | None  # over all calls; null: the recorded inputs do not determine it
    bytes: int | None  # read and written; null: the recorded inputs do not determine it
    share: float  # of the self time of all operators


class KernelRow(TypedDict):
    name: str
    count_per_step: float
    mean_us: float
    p95_us: float
    share: float  # of the time of all kernels
    launched_by: str | None  # operator; null: not linked to one
    component: str


class ShapeRate(TypedDict):
    name: str  # of a matmul, convolution or attention operator
    shapes: str  # of its inputs
    precision: str  # of what it multiplies
    calls: int
    ms: float  # over all calls, on the device: self time
    share: float  # of the self time of all operators
    tflops: float  # TFLOP/s in its own time
    at_most: bool  # tflops is an upper limit: attention over packed sequences, whose lengths are not recorded
    tb_per_sec: float | None  # 10^12 bytes per second; null: the recorded inputs do not determine it
    roof: str | None  # compute or memory, the nearer limit; null: no peak of this device is known for it, or at_most
    share_of_roof: float | None  # the least time that the peaks allow over its time; null: no peak is known


class CriticalPath(TypedDict):
    step: int
    length_ms: float
    rows: list[dict[str, Any]]  # where (GPU, host, kernel start), component, ms, share; they add up to length_ms


class GpuTimeline(TypedDict):
    total_ms: float | None  # from the first GPU event to the end of the last; null: no GPU events
    computation_ms: float | None  # null: no GPU events
    exposed_comm_ms: float | None  # communication that no computation overlaps; null: no GPU events
    exposed_memcpy_ms: float | None  # copies that nothing else overlaps; null: no GPU events
    busy_ms: float | None  # null: no GPU events
    idle_ms: float | None  # null: no GPU events
    of_steps: dict[str, Any]  # the same for what the steps launched; null: no GPU events
    devices: list[dict[str, Any]]  # the same for each device, and for each of its streams
    idle_by_cause: list[dict[str, Any]] | None  # cause, ms, share_of_total, meaning; null: no GPU events, clocks differ
    launch_delay_us: dict[str, float] | None  # from launch to start; null: no launch calls, clocks differ
    queue_depth: dict[str, float] | None  # kernels launched but not started; null: no launch calls, clocks differ
    kernel_durations: list[dict[str, Any]]  # up_to_us, kernels_per_step, share_of_kernels, share_of_time
    queue_over_step: dict[str, Any] | None  # one step: time_ms, kernels queued, ms ahead; null: no launch calls


class MeasuredCollectiveRow(TypedDict):
    kind: str  # all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, ...; unknown
    group: str | None  # description or name of the process group; null: not in the trace
    group_size: int | None  # ranks; null: not in the trace
    phase: str | None  # in which it was begun; null: in none
    component: str  # part of the model that it was begun for
    calls: int  # in the steps of the trace
    bytes: int | None  # of the larger of input and output, summed over calls; null: recorded inputs do not determine it
    time_ms: float  # summed over calls, waiting for other ranks included
    exposed_ms: float  # of it, that no computation overlapped; the rest was hidden
    waiting_ms: float | None  # of exposed_ms, until the last rank arrived; the rest was transfer; null: ranks missing
    algorithm_bandwidth_gb_per_sec: float | None  # 10^9 bytes/s, of transfer alone if known; null: no bytes
    bus_bandwidth_gb_per_sec: float | None  # as nccl-tests define it; null: no bytes, not defined for this kind


class PredictedBesideRow(TypedDict):
    kind: str
    group_size: int  # ranks
    predicted_calls: int  # per step
    calls: float  # per step, measured
    predicted_bytes: int  # per step
    bytes: float | None  # per step, measured; null: not in the trace
    time_ms: float  # per step, measured
    bus_bandwidth_gb_per_sec: float | None  # measured; null: no bytes


class StepCommunication(TypedDict):
    steps: int  # of which the mean is taken
    time_ms: float  # per step, in which some collective was in progress
    exposed_ms: float  # per step, of time_ms: no computation overlapped it
    hidden_ms: float  # per step, the rest
    waiting_ms: float | None  # per step, of exposed_ms: until the last rank arrived; null: ranks missing
    transfer_ms: float | None  # per step, of exposed_ms: the rest; null: ranks missing
    exposed_backward_ms: float  # per step, of exposed_ms: begun in the backward pass, which by_difference measures
    by_difference: NoSyncSteps | None  # measured without a profiler; null: --no-sync-steps was not given
    predicted: list[PredictedBesideRow] | None  # beside the measurement; null: not a run of several ranks of ours


class RankRow(TypedDict, total=False):
    rank: int
    file: str
    mean_step_ms: float | None  # null: no ProfilerStep marks
    bound: str  # as in verdict
    ms_per_step: float  # as in attribution
    gpu_busy_ms: float | None  # of the steps; null: no GPU events
    peak_memory_mb: float | None  # MB; null: neither in the summary of the run nor in the trace
    in_collectives_ms: float  # of the whole trace
    collectives: int  # of the whole trace
    exposed_comm_ms: float | None  # per step; null: no collectives
    waiting_ms: float | None  # per step, of exposed_comm_ms; null: no collectives, or ranks missing
    clock_offset_us: float  # of its clock against that of the first; here and below: absent if not compared
    mean_lateness_us: float  # after the first to arrive, over the collectives compared
    median_lateness_us: float
    caused_waiting_ms: float  # in which only this rank was missing, over the collectives compared
    last_to_arrive: int  # collectives in which ranks arrived apart, and this one last


class Ranks(TypedDict):
    rows: list[RankRow]
    one_clock: NotRequired[bool]  # of their host; false: clocks were aligned by the ends of collectives
    caution: NotRequired[str]  # why waiting is more than that for other ranks; absent: no reason was seen
    collectives_compared: int
    collectives_with_spread: NotRequired[int]  # in which ranks arrived further apart than their clocks may differ
    excess_waiting_ms: NotRequired[float]  # caused by all ranks together
    straggler: int | None  # rank; null: none, or it cannot be told


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
    not_here: list[dict[str, str]]  # name, reason: what cannot make this step faster on this device
    gpu_timeline: GpuTimeline
    collectives: list[MeasuredCollectiveRow]  # sums over the steps; empty: none
    communication: StepCommunication | None  # null: no collectives in the steps
    ranks: NotRequired[Ranks]  # only with the traces of several ranks of one run
    operators: list[OperatorRow]
    operators_by_shape: list[OperatorRow]
    kernels: list[KernelRow]
    shape_rates: list[ShapeRate]
    critical_path: CriticalPath | None  # null: no GPU events in the step, clocks differ
    step_timeline: dict[str, Any]  # one step as lanes of [start_ms, end_ms, component index], for the figure
    memory: dict[str, Any]  # peak_mb, time_ms, allocated_mb; null: the trace has no memory events


# ---- FLOPs and limits ----------------------------------------------------------------------------------------------


class ComponentFlops(TypedDict):
    component: str
    forward_flops: int  # per step, over all layers
    backward_flops: int
    forward_flops_per_layer: int
    share: float


class CounterRow(TypedDict):
    counter: str  # formula, FlopCounterMode, DeepSpeed
    forward_flops: int | None  # matmul FLOPs of one micro-batch; null: it did not count
    backward_flops: int | None  # null: it counts only forward passes
    beyond_matmuls: int | None  # FLOPs of other operators that it counts; null: it did not count


class Reconciliation(TypedDict):
    batch_size: int  # of the micro-batch
    sequence_length: int
    recomputed_flops: int  # included in the backward pass
    rows: list[CounterRow]
    agree: bool | None  # null: there is one count alone
    forward_flops_by_module: dict[str, int]


class Peak(TypedDict):
    rate: float  # FLOP/s, or bytes/s of a bandwidth
    kind: str  # datasheet, measured, given (by the user)
    source: str
    disturbed: NotRequired[bool]  # while it was measured
    mfu_percent: NotRequired[float]  # only for FLOP/s


class FlopsAnalysis(TypedDict):
    forward_flops: int  # matmul FLOPs of a step's forward passes
    step_flops: int  # forward and backward
    recomputed_flops: int  # not included in step_flops
    forward_flops_by_component: dict[str, int]
    parameters: int
    flops_per_parameter: float  # per step
    flops_per_token: float  # forward and backward
    flops_per_token_by_6n: int  # by the rule of thumb, six per parameter
    by_component: list[ComponentFlops]
    reconciliation: Reconciliation
    deepspeed: dict[str, Any] | None  # counts for one micro-batch; null: DeepSpeed did not count


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
    hfu_percent: float | None  # includes recomputation; null: nothing is recomputed, or no peak
    device_peak_flops: float | None  # FLOP/s; null: no peak of this device is known
    peak_source: str | None  # null: no peak of this device is known
    precision: str
    peaks: list[Peak]  # MFU refers to the first
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
    step_flops: int  # includes recomputation
    step_bytes: int  # every operator reads its inputs and writes its outputs
    minimum_step_bytes: int  # if all temporaries stay in on-chip memory
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
    roofs: dict[str, list[Peak]]  # limits of the device: compute and bandwidth
    ridges: list[dict[str, Any]]  # operations per byte at which a compute and a bandwidth limit meet
    step: dict[str, Any]  # a point, as below
    points: list[dict[str, Any]]  # name, operations, bytes, time_ms, operations_per_sec, share_of_roof; null: no time
    time_elsewhere: list[dict[str, Any]]  # time of the classes of operators that are not counted
    profiled_step_ms: float | None  # the sum of all these times; null: no trace
    time_source: dict[str, str]
    convention: dict[str, str]


# ---- Comparisons and sweeps ----------------------------------------------------------------------------------------


class Comparison(TypedDict, total=False):
    baseline: str
    sweep: str  # sweeps only: which one
    key: list[str]  # sweeps only: the columns that identify a row
    rows: list[dict[str, Any]]  # sweeps only: the values of a row in each sweep
    runs: list[dict[str, Any]]  # runs only: one row per run, with the ratio of medians and its 95% interval
    repeats: dict[str, Any] | None  # runs with the same settings and their spread; null: there are none
    differences: list[dict[str, Any]]  # settings and environment that differ: name, values
    scaling: dict[str, Any] | None  # step time ~ FLOPs^exponent; null: nearly equal FLOPs per step
    components: list[dict[str, Any]]  # ms per step in both runs, change, noise; parts of one run alone are one row
    classes: list[dict[str, Any]]  # the same for classes of operators
    operators: list[dict[str, Any]]  # the same for operators
    components_reason: str  # why some profiles are compared by class only
    profiles_reason: str  # why profiles are not compared


class SweepDocument(TypedDict, total=False):
    settings: dict[str, Any]  # the flags that decide what the rows contain
    environment: Environment
    sweep: str  # its name
    notes: list[str]  # which defaults a CPU changed, and what was left out
    key: list[str]  # the columns that identify a row
    figures: dict[str, str | None]  # the measured columns, each with the column of its spread; null: it has none
    rows: list[dict[str, Any]]  # as below
    device_memory_bytes: int  # available to the tensors of a row, the workspaces of libraries unknown
    fit: dict[str, Any]  # memory study: peak = constant + B (linear S + quadratic S^2); collectives: CollectiveFit
    fits: list[CollectiveFit]  # collective benchmark: by kind and number of ranks
    verdicts: list[FaultVerdict]  # scaling study: of each planted fault
    factors: list[dict[str, Any]]  # memory study: memory and throughput from one batch size or sequence to the next
    growth: list[dict[str, Any]]  # attention benchmark: exponents of time and memory in the sequence length
    dtypes: list[dict[str, Any]]  # precision study: data type of every tensor under autocast
    formats: list[dict[str, Any]]  # precision study: range and precision of each number format
    squares: list[dict[str, Any]]  # precision study: where sums and means of squares become 0 or infinite
    accumulation: list[dict[str, Any]]  # precision study: a sum of equal terms in each pair of types
    lacking: dict[str, str]  # precision study: precisions that the device does not have, and why
    methods: dict[str, str]  # timing study: what each method of timing does
    reference: list[dict[str, Any]]  # optimization study: transformers' LLaMA, a row like the others for each size


class SweepRow(TypedDict):
    status: str  # ok, oom, skipped, failed
    reason: str  # why it is not ok; every measured column is null then
    disturbed: bool | None  # whether other processes may have made it slower; null: not measured, or not known
    disturbance: str | None  # by what; null: not disturbed


class MemoryStudyRow(SweepRow):
    batch_size: int
    seq_len: int  # tokens
    predicted_bytes: int | None  # peak; null: the model cannot run on fake tensors
    peak_bytes: int | None  # null: not measured
    peak_phase: str | None  # null: not measured
    bytes_by_category: dict[str, int] | None  # at the peak; null: not measured
    bytes_per_token: float | None  # null: not measured
    step_time_ms: float | None  # mean, tracking included in one step; null: not measured
    samples_per_sec: float | None  # null: not measured
    tokens_per_sec: float | None  # null: not measured
    folder: str | None  # of the run, in the folder of the sweep; null: not measured
    shares_of_fit: dict[str, float] | None  # constant, linear, quadratic; null: there is no fit


class StepTimesRow(SweepRow):
    size: str  # as for --size; the file and function of --workload
    seq_len: int  # tokens
    batch_size: int
    precision: str
    parameters: NotRequired[int]  # absent where the device lacks the precision
    warmup_steps: int  # excluded before the repetitions
    repetitions: int | None  # steps measured; null: not measured
    step_ms: float | None  # median; null: not measured
    step_mean_ms: float | None  # null: not measured
    step_std_ms: float | None  # sample standard deviation; null: fewer than two steps
    forward_ms: float | None  # median; null: not measured
    forward_mean_ms: float | None  # null: not measured
    forward_std_ms: float | None  # null: fewer than two steps
    backward_ms: float | None  # median; null: not measured, or the forward pass alone
    backward_mean_ms: float | None  # null: not measured, or the forward pass alone
    backward_std_ms: float | None  # null: fewer than two steps, or the forward pass alone
    optimizer_ms: float | None  # median; null: not measured, or the forward pass alone
    optimizer_mean_ms: float | None  # null: not measured, or the forward pass alone
    optimizer_std_ms: float | None  # null: fewer than two steps, or the forward pass alone
    achieved_tflops: float | None  # 10^12 FLOP/s at the median; null: not measured, or FLOPs cannot be counted
    compile_s: float | None  # seconds; null: not compiled
    peak_bytes: int | None  # of the allocator; null: not measured, or no GPU
    predicted_peak_bytes: int | None  # with workspace_bytes where measured; null: it cannot run on fake tensors
    workspace_bytes: int | None  # of the matmul libraries, part of both peaks; null: not measured
    first_loss: float | None  # null: not measured
    final_loss: float | None  # null: not measured


class TrainingBenchmarkRow(StepTimesRow):
    mode: str  # forward, train
    compiled: bool


class PrecisionStudyRow(StepTimesRow):
    pass


class AttentionBenchmarkRow(SweepRow):
    implementation: str  # manual, eager, compiled, sdpa-<backend>
    dtype: str
    batch_size: int
    n_heads: int
    d_head: int
    seq_len: int  # tokens
    causal: bool
    repetitions: int | None  # null: not measured
    forward_ms: float | None  # median; null: not measured
    forward_mean_ms: float | None  # null: not measured
    forward_std_ms: float | None  # sample standard deviation; null: fewer than two repetitions
    backward_ms: float | None  # median; null: not measured
    backward_mean_ms: float | None  # null: not measured
    backward_std_ms: float | None  # null: fewer than two repetitions
    memory_bytes: int | None  # in use before the backward pass; null: not measured
    rounding_bytes: int | None  # of it the allocator's rounding; null: not measured
    workspace_bytes: int | None  # of libraries, not part of memory_bytes; null: not measured
    predicted_memory_bytes: int | None  # null: no such kernel on this device
    predicted_peak_bytes: int | None  # null: no such kernel on this device
    tensors: list[dict[str, Any]] | None  # name, shape, dtype, bytes before the backward pass; null: no such kernel
    kernel: str | None  # operator that did the forward pass; null: not measured
    compile_s: float | None  # seconds; null: not compiled


class CollectiveBenchmarkRow(SweepRow):
    kind: str  # all_reduce, all_gather, reduce_scatter, broadcast
    world_size: int  # ranks
    bytes: int  # of the larger of input and output
    repetitions: int | None  # each of several calls; null: not measured
    time_us: float | None  # microseconds of a call on the slowest rank, median of the repetitions; null: not measured
    time_std_us: float | None  # sample standard deviation; null: fewer than two repetitions
    algorithm_bandwidth_gb_per_sec: float | None  # bytes / time, 10^9 bytes/s; null: not measured
    bus_bandwidth_gb_per_sec: float | None  # bytes that a rank sends at least / time, 10^9 bytes/s; null: not measured


class CollectiveFit(TypedDict):
    kind: NotRequired[str]  # absent: all kinds but broadcast, on the most ranks
    world_size: int  # ranks
    alpha_us: float  # microseconds of a call, whatever its bytes
    beta_gb_per_sec: float  # bus bandwidth, 10^9 bytes/s
    half_bytes: float  # sent bytes from which on latency is less than half of the time: alpha times beta
    residual: float  # relative error of the fitted times, root mean square


class ScalingStudyRow(SweepRow):
    scaling: str  # weak: same batch on each rank; strong: same global batch
    parallel: str | None  # ddp, zero1, fsdp; null: one rank
    world_size: int  # ranks
    bucket_mb: float | None  # MB; null: PyTorch's size, or the mode has no buckets
    fault: str | None  # that was planted; null: none
    batch_size: int  # samples of a step and rank
    global_batch_size: int  # samples of a step, counted once over all ranks
    base_world_size: int  # ranks of the row that efficiency refers to
    launches: NotRequired[int]  # of which the times come, each a new set of processes; absent: not measured
    step_ms: float | None  # of the slowest rank, median over steps and launches; null: not measured
    step_times_ms: list[list[float]] | None  # by launch and step; null: not measured
    tokens_per_sec: float | None  # of all ranks; null: not measured
    efficiency: float | None  # tokens per second and rank, relative to the base; null: either was not measured
    efficiency_95: list[float] | None  # 95% interval over launches and steps; null: fewer than two launches
    predicted_efficiency: list[float] | None  # communication not hidden, and hidden; null: see the reason
    predicted_memory_bytes: int | None  # peak of rank 0; null: it cannot run on fake tensors
    measured_memory_bytes: int | None  # live tensors of rank 0 at the peak; null: not measured
    predicted_memory_by_category: dict[str, int] | None  # at the peak; null: it cannot run on fake tensors
    measured_memory_by_category: dict[str, int] | None  # at the peak; null: not measured
    memory_bytes_by_rank: list[int] | None  # measured; null: not measured
    predicted_collective_bytes: int | None  # of a step and rank, all kinds; null: it cannot run on fake tensors
    measured_collective_bytes: int | None  # the same, counted; null: not measured
    predicted_collectives: list[CollectiveRow] | None  # null: it cannot run on fake tensors
    measured_collectives: list[CollectiveRow] | None  # null: not measured
    samples_by_rank: list[int] | None  # of a step, counted; null: not measured
    local_step_ms: list[float] | None  # by rank, the fastest without communication; null: one rank, or not ddp
    exposed_ms: float | None  # fastest step beyond the longest local step; null: as for local_step_ms
    waiting_ms: float | None  # longest local step beyond the mean of the ranks'; null: as for local_step_ms
    communication_share: float | None  # 1 - mean local step / fastest step; null: as for local_step_ms
    overlapped_share: float | None  # of reduced bytes: reduction begun in the backward pass; null: one rank, or fsdp
    findings: list[str] | None  # what is wrong, by the measured columns alone; empty: nothing; null: not measured


class FaultVerdict(TypedDict):
    fault: str
    named: bool  # the findings of its row name it, and those of the same row without it do not
    text: str  # the finding, or what was measured instead


class TimingStudyRow(SweepRow):
    method: str  # of timing
    baseline_ms: float | None  # null: not measured
    changed_ms: float | None  # null: not measured
    ratio: float | None  # changed / baseline; null: not measured
    ratio_95: list[float] | None  # 95% interval; null: a wrong method, or fewer than three repetitions
    baseline_factor: float | None  # baseline / baseline of the right method; null: not measured
    conclusion: str | None  # what this method concludes about the change; null: not measured
    baseline_times_ms: NotRequired[list[float]]
    changed_times_ms: NotRequired[list[float]]
    ratios_of_pairs: NotRequired[list[float]]  # of the right method


class OptimizationStudyRow(SweepRow):
    size: str  # or the file of --workload
    seq_len: int  # tokens
    batch_size: int
    precision: str  # of the baseline
    flags: str  # of tiny_llama_v1.py, in addition to the baseline's, which has none; of the reference: what it is
    ladder: int | None  # its rung, 0 the baseline; null: measured alone, or the reference
    step_ms: float | None  # median over the rounds; null: not measured
    step_mean_ms: float | None  # null: not measured
    step_std_ms: float | None  # null: not measured, or one round
    step_times_ms: list[float] | None  # round by round; null: not measured
    ratio: float | None  # step time / baseline's, medians; null: either was not measured
    ratio_low: float | None  # 95% interval over rounds; null: fewer than three, or no ratio
    ratio_high: float | None  # null: as for ratio_low
    bound: float | None  # least ratio that the opportunities of the baseline's trace allow; null: see the reason
    estimate: float | None  # the likely one; null: see the reason
    ratio_to_previous: float | None  # step time / that of the rung below; null: not on the ladder, or not in turn
    ratio_to_previous_low: float | None  # 95% interval; null: fewer than three rounds, or no ratio
    ratio_to_previous_high: float | None  # null: as for ratio_to_previous_low
    ratio_to_reference: float | None  # step time / that of transformers' LLaMA; null: it was not measured in turn
    ratio_to_reference_low: float | None  # 95% interval; null: fewer than three rounds, or no ratio
    ratio_to_reference_high: float | None  # null: as for ratio_to_reference_low
    predicted_memory_bytes: int | None  # peak of a step; null: it cannot run on fake tensors
    measured_memory_bytes: int | None  # live tensors at the peak; null: not measured, compiled or CUDA graphs
    largest_loss_difference: float | None  # from the baseline's, over all steps; null: either was not measured
    loss_bound: float | None  # the difference that rounding explains; null: either was not measured
    audit_ok: bool | None  # null: not measured
    audit: str | None  # ok, or the findings; null: not measured
    not_the_same: str | None  # why it is another training than the baseline's; null: nothing says so
    achieved_tflops: float | None  # 10^12 FLOP/s of the model's matmuls, at the median; null: not measured
    measured_peak_tflops: float | None  # of a matmul, measured in the same process; null: not measured
    share_of_measured_peak: float | None  # achieved / measured peak; null: either was not measured
    compile_s: float | None  # seconds, without a cache; null: not compiled
    break_even_step: int | None  # from which on compiling has saved time; null: not compiled, or not faster


# ---- Exercises -----------------------------------------------------------------------------------------------------


class ExerciseCommand(TypedDict):
    command: str  # the first command of a shell block
    seconds: float | None  # of the block; null: skipped here


class ExerciseAnswers(TypedDict):
    exercise: int
    text: str  # file name of the exercise
    environment: dict[str, Any]  # as in config.json, without the command line
    answers: dict[str, dict[str, Any]]  # by field: value (null if this machine cannot determine it) and evidence
    commands: list[ExerciseCommand] | None  # how long each took; null: they were run by hand
