"""The analysis of a trace: operator_analysis.json."""

from __future__ import annotations

from harness.instruments.no_sync import NoSyncSteps
from harness.schema import Document, field

NO_GPU = "the trace has no GPU events"
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
