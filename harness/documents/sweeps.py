"""Comparisons of runs, and sweeps: a document and the columns of its rows each."""

from __future__ import annotations

from typing import Any

from typing_extensions import NotRequired, TypedDict

from harness.documents.memory import CollectiveRow
from harness.documents.run import Environment


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
