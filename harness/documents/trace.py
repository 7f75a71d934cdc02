"""The analysis of a trace: operator_analysis.json."""

from __future__ import annotations

from typing import Any

from typing_extensions import NotRequired, TypedDict

from harness.documents.run import NoSyncSteps


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
    overlap_ms: float  # time that two steps share; the tables count it once
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
    flag: str | None  # flag that enables it; null: no flag of the workshop does, or its run is not known to take it


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
    gpu_idle_ms: float  # of it, in which the GPU ran nothing: a faster host alone saves no more
    rows: list[dict[str, Any]]  # where (GPU, host, kernel start), component, ms, share; they add up to length_ms


class GpuTimeline(TypedDict):
    total_ms: float | None  # from the first GPU event to the end of the last; null: no GPU events
    computation_ms: float | None  # null: no GPU events
    exposed_comm_ms: float | None  # communication that no computation overlaps, of the host too; null: no GPU events
    exposed_memcpy_ms: float | None  # copies that nothing else overlaps; null: no GPU events
    busy_ms: float | None  # null: no GPU events
    idle_ms: float | None  # null: no GPU events
    of_steps: dict[str, Any]  # the same for the time of the steps; null: no GPU events
    devices: list[dict[str, Any]]  # the same for each device, and for each of its streams
    idle_by_cause: list[dict[str, Any]] | None  # cause, ms, share_of_total, meaning; null: no GPU events, clocks differ
    idle_of_step_ms: dict[str, float] | None  # by cause; adds up to idle in `components`; null: no GPU, clocks differ
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
    gpu_busy_ms: float | None  # per step; null: no GPU events
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
    caution: NotRequired[str]  # what is not compared, or what else than other ranks was waited for; absent: nothing
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
