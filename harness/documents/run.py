"""What every run writes: config.json and performance_summary.json.

In all documents: a field whose type allows None has a sibling <name>_reason, a string, wherever it is null.  What is a
file also has schema_version.  Times are milliseconds, sizes bytes or MB (2^20 bytes), rates per second, shares between
0 and 1, as the names say.
"""

from __future__ import annotations

from typing import Any

from typing_extensions import NotRequired, TypedDict


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
    system_share: float | None  # of CPU time, in the kernel, from step 3 on; null: fewer steps
    minor_faults_per_sec: float | None  # pages that the kernel hands out, median from step 3 on; null: fewer steps
    major_faults_per_sec: float | None  # page faults that wait for a disk, median from step 3 on; null: fewer steps
    fault_slowdown: float | None  # time of the kernel over that which page faults need; null: too few steps or faults
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
