"""The analysis of a trace: operator_analysis.json."""

from __future__ import annotations

from typing_extensions import NotRequired

from harness.instruments.no_sync import NoSyncSteps
from harness.run.run_summary import ONE_STEP
from harness.schema import Document, different_lengths, field, fields_of

NO_GPU, NO_LAUNCH = "the trace has no GPU events", "the trace has no launch call of any kernel"
NO_MARKS = "the trace has no ProfilerStep marks"
NO_COLLECTIVES = "no collectives in the steps of the trace"
NO_MEMORY = "no memory events in the trace (profile_memory)"
NO_SUMMARY = "no performance_summary.json next to the trace"
NO_ROOF = "no peak of this device is known for it, or not its FLOPs"
NOT_IN_TRACE = "not in the trace"
TWO_CLOCKS = "the clocks of GPU and host differ"
UNDETERMINED = "the recorded inputs do not determine it"
ONE_TRACE = "needs the traces of all ranks"
NO_BYTES = "its bytes are not in the trace"
NO_DIFFERENCE = "--no-sync-steps was not given, or there is no summary"
NO_PLACE = "no single event of a file that Perfetto reads shows it"
SINGLE_STEP = "one step was recorded, which does not tell what happens in every one"
NO_GAIN = "nothing that the trace shows can be told to pay"


class ProfileDisturbance(Document):
    text: str | None = field("what disturbed the profiled steps, or none seen", null=NO_SUMMARY)
    lost_share: float | None = field(
        "of the disturbed steps, that is due to waiting at most", null=NO_SUMMARY
    )


class ProfilerOverhead(Document):
    ratio: float | None = field("of medians, profiled to unprofiled", null=NO_SUMMARY)
    idle_left: float = field(
        "of the GPU's recorded idle time, what counts, as steps without the profiler have no more"
    )
    profiled_median_ms: NotRequired[float] = field(
        "of the steps in the trace; these are absent without a ratio"
    )
    profiled_steps: NotRequired[int] = field("in the trace")
    unprofiled_median_ms: NotRequired[float] = field("of the averaged steps")
    unprofiled_std_ms: NotRequired[float | None] = field("sample standard deviation", null=ONE_STEP)
    unprofiled_steps: NotRequired[int] = field("averaged")


class MissingPart(Document):
    part: str = field("of a trace")
    cost: str = field("what the analysis cannot tell without it")
    how: str = field("to record it")


class Integrity(Document):
    trustworthy: bool = field("whether there are no problems")
    problems: list[str] = field("why it is not trustworthy")
    notes: list[str] = field("what a reader should know of the trace")
    unreliable: dict[str, str] = field(
        "parts of the analysis that should not be relied on, and why"
    )
    recorded_by: str = field("torch.profiler, nsys, rocprofv3, rocmProfileData")
    events: int = field("in the file")
    cut_off: bool = field("the file ends before its document does, or is damaged from there on")
    malformed_events: int = field("that were skipped")
    operators: int = field("events of operators")
    gpu_events: int = field("kernels, copies, memory sets")
    steps: int = field("that are marked or were found")
    steps_without_gpu_events: int | None = field("of these", null=NO_GPU)
    kernel_launches: int = field("calls on the host")
    launches_without_kernel: int = field("of these, in the steps, whose kernel is not in the trace")
    kernels_linked_to_an_operator: float | None = field(
        "share of the GPU events that the host launched", null=NO_GPU
    )
    kernels_launched_outside_operators: float | None = field(
        "share of the same: by an extension, say", null=NO_GPU
    )
    gpu_events_launched_before_the_trace: int = field("whose launch is not in the trace")
    unexplained_share: float | None = field(
        "of the steps: the GPU was idle for no recorded reason", null=TWO_CLOCKS
    )
    graph_launches: int = field("of CUDA graphs")
    graph_events: int = field("GPU events that they started")
    graph_events_attributed: int = field(
        "of these, to the operators of which a capture or a warm-up tells"
    )
    graphs_attributed_through: list[str] = field("what tells of them, as 'the capture trace FILE'")
    unclassified_kernels: int = field("kernels whose name and operator do not tell what they do")
    unclassified_share: float = field("of the time of all GPU events")
    unused_gpu: NotRequired[str] = field(
        "the GPU of the machine, where nothing in the trace used it; absent: used, or none"
    )
    rank: int | None = field("of the process", null=NOT_IN_TRACE)
    ranks_in_file: list[int] = field("whose traces were merged into this file; empty: that of one")
    world_size: int | None = field("ranks", null=NOT_IN_TRACE)
    shapes_recorded: bool = field("of the operators' inputs")
    stacks_recorded: bool = field("of Python")
    modules_recorded: bool = field("names of modules")
    not_recorded: list[MissingPart] = field(
        "what the trace should contain and does not, the costliest first"
    )
    profiler_overhead: ProfilerOverhead = field("by the run's own timers")
    disturbance: ProfileDisturbance = field("by the run's own measurement")
    ranks_missing: list[int] = field("of the run, whose traces were not read")
    not_compared: NotRequired[str] = field(
        "why the traces read together are not those of the ranks of one run"
    )


class VerdictRule(Document):
    rule: str = field("its name")
    figures: str = field("that it looks at")
    holds: bool = field("whether they meet it")
    decides: bool = field("whether it is the first that holds")


class Thresholds(Document):
    bound_from_share: float = field("of the step, that makes a bound")
    lead_share: float = field("of the step, by which it must be ahead of the next")
    ridge_flops_per_byte: float | None = field(
        "of the device", null="several are possible, or none is known"
    )
    ridge_source: str = field("where it is from")


class Verdict(Document):
    bound: str = field(
        "compute, memory, launch, ..., as shares; capture: of a graph; gpu: work of either;"
        " undecided"
    )
    strength: str = field(
        "is; probably: evidence is missing or disturbed; between: it and runner_up; undecided"
    )
    because: str = field("in a sentence")
    runner_up: str | None = field(
        "with between, the other share", null="no second share is as close"
    )
    trustworthy: bool = field("if false, bound is undecided and line says untrustworthy")
    line: str = field("the verdict in one line, with the shares")
    shares: dict[str, float] = field(
        "of the step's time: compute, memory, launch, ..., unexplained; they add up to 1"
    )
    unclassified_share: float = field("of it: work that may be limited by compute or by memory")
    unrecorded_idle_share: float = field(
        "of it: the GPU was idle for no recorded reason; both make up unexplained"
    )
    basis_shares: dict[str, float] = field(
        "of it: matmuls, attention and convolutions by what classified them"
    )
    unknown_kind_share: float = field(
        "of unclassified_share: kernels or operators that no rule knows"
    )
    rules: list[VerdictRule] = field("in order; the first that holds decides")
    rank_judged: NotRequired[int] = field(
        "of several: the rank that waits least, whose bound this is"
    )
    meaning: dict[str, str] = field("of each share")
    thresholds: Thresholds = field("of the rules")

    @staticmethod
    def contradiction(value: dict) -> str | None:
        """There is a share of what is not known, if only 0."""
        return None if "unexplained" in value["shares"] else "shares.unexplained: is missing"


class Place(Document):
    trace: str = field("the file")
    began_ms: float = field("after the first event of the file, from where Perfetto counts")
    duration_ms: float = field("of it")
    thread: str = field("process and thread, or the stream of a GPU, as Perfetto calls them")
    event: str = field("its name, or which event a GPU is idle before")


class Headline(Document):
    finding: str = field("what pays most, in a sentence; where nothing pays, what the verdict says")
    saves_ms: float | None = field("per step, by its estimate, else its bound", null=NO_GAIN)
    at_most: bool = field("saves_ms is a bound; how much of it can be gained is not known")
    next: str = field("the command to run, or the line of code to change")
    place: Place | None = field(
        "of the longest event behind the finding in Perfetto", null=NO_PLACE
    )


class ProfiledStep(Document):
    number: int = field("as marked, or from 0")
    duration_ms: float = field("on the host")
    gpu_events: int = field("that the step launched")
    kernels_during: int | None = field(
        "kernels that ran while the host was in the step", null=TWO_CLOCKS
    )
    kernels: int = field("kernels that the step launched")
    kernel_launches: int = field("launch calls of the step")
    kernels_of_launches: int = field("launch calls whose kernel is in the trace")
    incomplete: bool = field("events of the step are missing")


class ProfiledSteps(Document):
    mean_ms: float | None = field("on the host", null=NO_MARKS)
    median_ms: float | None = field("on the host", null=NO_MARKS)
    std_ms: float | None = field("sample standard deviation", null=ONE_STEP)
    p95_ms: float | None = field("95th percentile", null=NO_MARKS)
    min_ms: float | None = field("the shortest", null=NO_MARKS)
    max_ms: float | None = field("the longest", null=NO_MARKS)
    count: int = field("steps that are marked")
    overlap_ms: float = field("time that two steps share; the tables count it once")
    rows: list[ProfiledStep] = field("in order")

    @staticmethod
    def contradiction(value: dict) -> str | None:
        """Times are known of steps that are marked, and of no others."""
        for name in ("mean_ms", "median_ms", "min_ms", "max_ms"):
            if (value.get(name) is None) != (value["count"] == 0):
                return f"{name}: is {value.get(name)} of {value['count']} steps"
        return None


class OnceRow(Document):
    what: str = field(
        "first step, start-up, compilation, save, evaluation, logging, code of the program"
    )
    where: str = field("the step, the call, the range, or what follows")
    steps: int = field("in which it happens")
    of_steps: int = field("that were recorded")
    ms: float = field("of one; of a first step, beyond the median of the others")
    ms_per_step: float = field("over all steps that were recorded")


class Opportunity(Document):
    name: str = field("of the change")
    finding: str = field("what is wrong, with its figure")
    how: str = field("to change it")
    next: str = field("the command to run; for another program, the line of code to change")
    evidence: str = field("in the trace")
    share: float = field("of the step that it affects")
    ms_per_step: float = field("that it affects")
    saves_ms: float | None = field("of a step, by its estimate, else at most", null=NO_GAIN)
    part_speedup: float | None = field(
        "upper bound for the affected part", null="the affected part could vanish"
    )
    speedup_bound: float | None = field(
        "of the step, by Amdahl's law", null="the whole step is affected"
    )
    speedup_estimate: float | None = field(
        "the likely one", null="no rate is known to estimate it from"
    )
    basis: str = field("how bound and estimate were derived")
    memory_bound_mb: NotRequired[float] = field("MB that it saves at most; checkpointing only")
    flag: str | None = field("flag that enables it", null="no flag of the workshop enables it")
    place: Place | None = field(
        "of the longest event behind the finding in Perfetto", null=NO_PLACE
    )


class OperatorRow(Document):
    name: str = field("as PyTorch calls it")
    shapes: NotRequired[str] = field("of the inputs; by shape only")
    calls: int = field("in the trace")
    self_cpu_us: float = field("over all calls")
    cpu_us: float = field("over all calls, with the operators that it calls")
    self_device_us: float | None = field("of the kernels that it launched itself", null=NO_GPU)
    device_us: float | None = field("with the operators that it calls", null=NO_GPU)
    flops: int | None = field("over all calls", null=UNDETERMINED)
    bytes: int | None = field("read and written", null=UNDETERMINED)
    share: float = field("of the self time of all operators")


class KernelRow(Document):
    name: str = field("as the driver calls it")
    kind: str = field("kernel, copy or memory set")
    count: int = field("in the trace")
    count_per_step: float = field("that the steps launched")
    total_us: float = field("over all")
    mean_us: float = field("of one")
    p50_us: float = field("the median")
    p95_us: float = field("95th percentile")
    share: float = field("of the time of all kernels")
    launched_by: str | None = field("operator", null="it is linked to no operator")
    component: str = field("part of the model")
    category: str | None = field(
        "class of operators", null="neither its name nor its operator tells it"
    )


class ShapeRate(Document):
    name: str = field("of a matmul, convolution or attention operator")
    shapes: str = field("of its inputs")
    precision: str = field("of what it multiplies")
    calls: int = field("in the trace")
    ms: float = field("over all calls, on the device: self time")
    share: float = field("of the self time of all operators")
    tflops: float = field(
        "TFLOP/s in its own time; of attention the full S x T scores, causal or not"
    )
    at_most: bool = field(
        "tflops is an upper limit: attention over packed sequences, whose lengths are not recorded"
    )
    unmasked_tflops: float | None = field(
        "without masked scores: what a kernel must do", null=UNDETERMINED
    )
    tb_per_sec: float | None = field("10^12 bytes per second", null=UNDETERMINED)
    roof: str | None = field("compute or memory, the nearer limit", null=NO_ROOF)
    share_of_roof: float | None = field(
        "the least time that the peaks allow over its time", null=NO_ROOF
    )


class PathRow(Document):
    where: str = field("GPU, host, kernel start")
    component: str = field("part of the model")
    ms: float = field("on the path")
    share: float = field("of the path")


class CriticalPath(Document):
    step: int = field("its number")
    length_ms: float = field("from its start to its end")
    gpu_idle_ms: float = field(
        "of it, without work on the GPU, with the profiler: a faster host saves no more of it"
    )
    rows: list[PathRow] = field("they add up to length_ms")


class GpuSplit(Document):
    total_ms: float | None = field("from the first GPU event to the end of the last", null=NO_GPU)
    computation_ms: float | None = field(
        "any kernel other than communication, or a memory set", null=NO_GPU
    )
    exposed_comm_ms: float | None = field(
        "communication that no computation overlaps, of the host too", null=NO_GPU
    )
    exposed_memcpy_ms: float | None = field("copies that nothing else overlaps", null=NO_GPU)
    busy_ms: float | None = field("the sum of these", null=NO_GPU)
    idle_ms: float | None = field("the rest", null=NO_GPU)

    @staticmethod
    def contradiction(value: dict) -> str | None:
        """All are known of a GPU, and none without."""
        for name in fields_of(GpuSplit):
            if (value.get(name) is None) != (value.get("total_ms") is None):
                return f"{name}: is {value.get(name)}, and total_ms {value.get('total_ms')}"
        return None


class StreamSplit(GpuSplit):
    stream: int = field("its number")
    events: int = field("in it")


class DeviceSplit(GpuSplit):
    device: int = field("its number")
    streams: list[StreamSplit] = field("of this device")


class IdleRow(Document):
    cause: str = field("of idle time")
    ms: float = field("of it")
    share_of_total: float = field("of total_ms")
    meaning: str = field("of the cause")


class KernelDurations(Document):
    up_to_us: float | None = field(
        "microseconds, and longer than the row before", null="the longest kernels"
    )
    kernels_per_step: float = field("of these")
    share_of_kernels: float = field("of these")
    share_of_time: float = field("of all kernels")


class Queue(Document):
    step: int = field("its number")
    time_ms: list[float] = field("after it began")
    queued: list[int] = field("events launched but not started")
    ahead_ms: list[float] = field("that the latest one has to wait")


class GpuTimeline(GpuSplit):
    of_steps: GpuSplit = field("the same for the time of the steps")
    devices: list[DeviceSplit] = field("the same for each device, and for each of its streams")
    idle_by_cause: list[IdleRow] | None = field("most first", null=NO_GPU)
    idle_of_step_ms: dict[str, float] | None = field(
        "by cause; adds up to idle in `components`", null=NO_GPU
    )
    launch_delay_us: dict[str, float] | None = field(
        "from launch to start: mean, p50, ...", null=NO_LAUNCH
    )
    queue_depth: dict[str, float] | None = field(
        "events launched but not started: mean, p50, ...", null=NO_LAUNCH
    )
    kernel_durations: list[KernelDurations] = field("how many kernels are how short")
    queue_over_step: Queue | None = field("the step of median duration", null=NO_LAUNCH)


class MeasuredCollectiveRow(Document):
    kind: str = field("all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, ...; unknown")
    group: str | None = field("description or name of the process group", null=NOT_IN_TRACE)
    group_size: int | None = field("ranks", null=NOT_IN_TRACE)
    phase: str | None = field("in which it was begun", null="in none")
    component: str = field("part of the model that it was begun for")
    calls: int = field("in the steps of the trace")
    bytes: int | None = field(
        "of the larger of input and output, summed over calls", null=UNDETERMINED
    )
    time_ms: float = field("summed over calls, waiting for other ranks included")
    exposed_ms: float = field("of it, that no computation overlapped; the rest was hidden")
    waiting_ms: float | None = field(
        "of exposed_ms, until the last rank arrived; the rest: transfer", null=ONE_TRACE
    )
    algorithm_bandwidth_gb_per_sec: float | None = field(
        "10^9 bytes/s, of transfer alone if known", null=NO_BYTES
    )
    bus_bandwidth_gb_per_sec: float | None = field("as nccl-tests define it", null=NO_BYTES)


class PredictedBesideRow(Document):
    kind: str = field("as in collectives")
    group_size: int = field("ranks")
    predicted_calls: int = field("per step")
    calls: float = field("per step, measured")
    predicted_bytes: int = field("per step")
    bytes: float | None = field("per step, measured", null=NOT_IN_TRACE)
    time_ms: float = field("per step, measured")
    bus_bandwidth_gb_per_sec: float | None = field("measured", null=NOT_IN_TRACE)


class StepCommunication(Document):
    steps: int = field("of which the mean is taken")
    time_ms: float = field("per step, in which some collective was in progress")
    exposed_ms: float = field("per step, of time_ms: no computation overlapped it")
    hidden_ms: float = field("per step, the rest")
    waiting_ms: float | None = field(
        "per step, of exposed_ms: until the last rank arrived", null=ONE_TRACE
    )
    transfer_ms: float | None = field("per step, of exposed_ms: the rest", null=ONE_TRACE)
    exposed_backward_ms: float = field(
        "per step, of exposed_ms: begun in the backward pass; by_difference measures it"
    )
    by_difference: NoSyncSteps | None = field("measured without a profiler", null=NO_DIFFERENCE)
    predicted: list[PredictedBesideRow] | None = field(
        "beside it", null="not a run of several ranks of this workshop"
    )


class RankRow(Document):
    rank: int = field("its number")
    file: str = field("its trace")
    mean_step_ms: float | None = field("on the host", null=NO_MARKS)
    bound: NotRequired[str] = field("as in verdict")
    ms_per_step: NotRequired[float] = field("as in attribution")
    gpu_busy_ms: float | None = field("per step", null=NO_GPU)
    peak_memory_mb: NotRequired[float | None] = field(
        "MB, by the summary of the run or by the trace", null=NO_MEMORY
    )
    in_collectives_ms: float = field("per step")
    collectives: int = field("in the steps")
    exposed_comm_ms: NotRequired[float | None] = field("per step", null=NO_COLLECTIVES)
    waiting_ms: NotRequired[float | None] = field(
        "per step, of exposed_comm_ms", null=NO_COLLECTIVES
    )
    parts_ms: NotRequired[dict[str, float]] = field(
        "per step, communication apart: work, its verdict's shares, idle"
    )
    kernels_per_step: NotRequired[float | None] = field("communication apart", null=NO_GPU)
    clock_offset_us: NotRequired[float] = field(
        "of its clock against that of the first; here and below: if compared"
    )
    mean_lateness_us: NotRequired[float] = field(
        "after the first to arrive, over the collectives compared"
    )
    median_lateness_us: NotRequired[float] = field("the same")
    caused_waiting_ms: NotRequired[float] = field("per step, in which only this rank was missing")
    last_to_arrive: NotRequired[int] = field(
        "collectives in which ranks arrived apart, and this one last"
    )


class Ranks(Document):
    rows: list[RankRow] = field("one for each trace")
    one_clock: NotRequired[bool] = field(
        "of their host; false: clocks were aligned by the ends of collectives"
    )
    caution: NotRequired[str] = field(
        "what is not compared, or what else was waited for; absent: nothing"
    )
    collectives_compared: int = field("in the steps")
    steps_compared: NotRequired[int] = field("that all ranks recorded")
    collectives_with_spread: NotRequired[int] = field(
        "in which ranks arrived further apart than clocks may differ"
    )
    excess_waiting_ms: NotRequired[float] = field("per step, caused by all ranks together")
    straggler: int | None = field(
        "rank", null="no rank causes more than half of the excess waiting"
    )
    straggler_why: NotRequired[str] = field(
        "the part of its step that differs most; absent: no straggler"
    )
    straggler_saves_ms: NotRequired[float] = field(
        "per step, of what computation does not hide, if it was as fast"
    )
    straggler_next: NotRequired[str] = field("what to do about it")


class Lane(Document):
    name: str = field("host thread, or stream of a GPU")
    pieces: list[list] = field("[start ms, end ms, index in components]")


class StepTimeline(Document):
    step: int = field("its number")
    length_ms: float = field("with its work on the GPU")
    lanes: list[Lane] = field("of one step, thinned to what a figure shows")
    lanes_left_out: int = field("beyond the first eight")
    components: list[str] = field("parts of the model")


class MemorySeries(Document):
    peak_mb: float | None = field("MB; the others are absent without it", null=NO_MEMORY)
    of: NotRequired[str] = field("what was counted")
    allocations: NotRequired[int] = field("in the trace")
    time_ms: NotRequired[list[float]] = field("in the trace")
    allocated_mb: NotRequired[list[float]] = field("MB, the highest up to the next time")

    @staticmethod
    def contradiction(value: dict) -> str | None:
        """What is told of a peak."""
        if value.get("peak_mb") is None:
            return None
        for name in ("of", "time_ms", "allocated_mb"):
            if name not in value:
                return f"{name}: is missing"
        return different_lengths(value, "time_ms")
