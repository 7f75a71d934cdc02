"""Memory and predictions: memory_timeline.json and prediction.json."""

from __future__ import annotations

from typing import Any

from typing_extensions import TypedDict

from harness.documents.run import Device


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
