"""Memory and predictions: memory_timeline.json and prediction.json."""

from __future__ import annotations

from typing import Any

from harness.instruments.memory_timeline import CollectiveRow, StepTimeline, TensorRow
from harness.machine.environment import Device
from harness.run.run_summary import NO_RATES, ExpectedTime
from harness.schema import Document, field

ONE_RANK, ALONE = "one rank", "one rank has nobody to communicate with"
NEVER = "the network needs less time than the computation, on any number of ranks"
FIXED_SIZE = "its file decides how long a sequence is, and its model may take no longer one"
NO_NETWORK = "no --network was given"
NO_PEAK = "no peak of this device is known"
NO_WORKSPACES = "neither measured nor known of the architecture; the reserve stands for them"
NO_FORMULA = "the workload has no formula"
NO_CACHING = "a CPU has no caching allocator and no context"


class KeptBeside(Document):
    component: str = field("part of the model")
    bytes: int = field("kept for the backward pass")
    formula_bytes: int | None = field("the same by formula", null=NO_FORMULA)
    quadratic_bytes: int | None = field(
        "of these, quadratic in the sequence length", null=NO_FORMULA
    )


class PredictedMemory(Document):
    peak_bytes: int = field("of live tensors")
    error_percent: float = field("of the peak, relative to the measured one")
    bytes_by_category: dict[str, int] = field("at the peak")
    kept_for_backward: list[KeptBeside] = field("measured, beside the formula")


class MemoryTimeline(StepTimeline):
    predicted: PredictedMemory | None = field(
        "by a run on fake tensors", null="cannot run on fake tensors"
    )


class PredictedCollectiveRow(CollectiveRow):
    group_size: int = field("ranks")
    sent_bytes: int = field("by each rank at least, as bus bandwidth counts")


class Communication(Document):
    sent_bytes: int = field("by each rank and step at least")
    network_gb_per_sec: float | None = field(
        "10^9 bytes/s of a rank, bus bandwidth", null=NO_NETWORK
    )
    network_latency_us: float | None = field(
        "of a call", null="not counted, as --network GB/s gives none"
    )
    network_source: str | None = field("where these come from", null=NO_NETWORK)
    network_ms: float | None = field("time of all collectives", null=NO_NETWORK)
    overlapped_ms: float | None = field(
        "least step time, all communication hidden", null=NO_NETWORK
    )
    not_overlapped_ms: float | None = field("the same, none hidden", null=NO_NETWORK)
    weak_scaling_bound_from: int | None = field("ranks, same batch on each", null=NEVER)
    strong_scaling_bound_from: int | None = field("ranks, same global batch", null=NEVER)
    efficiency_overlapped: float | None = field("weak scaling at most", null=NO_NETWORK)
    efficiency_not_overlapped: float | None = field("with no communication hidden", null=NO_NETWORK)


class FitRow(Document):
    flags: str = field("in addition to those given; --world-size in place of the one given")
    peak_memory_mb: float = field("MB")
    fits: bool = field("in the memory of the device")


class TimeBounds(Document):
    compute_ms: float | None = field(
        "FLOPs at the peak rate, without scores that may be skipped", null=NO_PEAK
    )
    compute_peak: str | None = field("the peak and its source", null=NO_PEAK)
    bandwidth_ms: float | None = field("least_bytes at the peak bandwidth", null=NO_PEAK)
    bandwidth_peak: str | None = field("the peak and its source", null=NO_PEAK)
    least_bytes: int = field("that a step must move if all temporaries stay in on-chip memory")
    network_ms: float | None = field("communication at --network", null=ALONE)


class TargetDevice(Device):
    source: str = field("of its figures")
    other_rows: list[str] = field("names of other devices that --target-device could stand for")


class KeptRow(Document):
    component: str = field("part of the model")
    mb: float = field("MB that the forward pass keeps")
    quadratic_mb: float | None = field(
        "the part quadratic in the sequence length", null="there is no formula for it"
    )


class Prediction(Document):
    device: Device = field("of this machine")
    target_device: TargetDevice | None = field(
        "that the prediction is of", null="no --target-device was given"
    )
    model: dict[str, Any] = field("as in config.json")
    training: dict[str, Any] = field("as in config.json")
    world_size: int = field("ranks; memory is that of rank 0")
    parallel: str | None = field("ddp, zero1, fsdp", null=ONE_RANK)
    collectives: list[PredictedCollectiveRow] = field("of a step; empty: one rank")
    peak_memory_mb: float = field("MB")
    memory_by_category_mb: dict[str, float] = field("MB at the peak")
    library_workspaces_mb: float | None = field(
        "MB of the peak: measured, else of the device", null=NO_WORKSPACES
    )
    reserved_memory_mb: float | None = field(
        "MB that PyTorch's allocator would take for it", null=NO_CACHING
    )
    reserved_memory_expandable_mb: float | None = field(
        "the same with expandable segments", null=NO_CACHING
    )
    peak_where: str = field("phase and part of the model")
    largest_tensors: list[TensorRow] = field("at the peak")
    kept_for_backward: list[KeptRow] = field("by component, the largest first")
    device_memory_mb: float = field("MB that the device has")
    device_memory_source: str = field("of that figure")
    in_use_mb: float = field(
        "MB of it that other processes, the driver and this process, such as its context, use"
    )
    reserve_mb: float = field("MB of it kept free: the least of what is not counted")
    reserve_source: str = field("of that figure")
    on_top_mb: float = field("MB that may come on top")
    on_top_source: str = field("of that figure")
    context_mb: float | None = field(
        "MB of in_use_mb for the context of this process, at least", null=NO_CACHING
    )
    fits: bool = field("whether what is reserved, on a CPU the peak, does")
    margin_mb: float = field("MB left; negative: missing")
    max_batch_size: int | None = field("samples; 0: not even one fits", null=FIXED_SIZE)
    max_seq_len: int | None = field("tokens; 0: not even one fits", null=FIXED_SIZE)
    would_fit: list[FitRow] | None = field("other flags", null="it fits")
    smallest_world_size: int | None = field("on which it fits", null=ONE_RANK)
    parameters: int = field("of the model")
    forward_flops: int = field("matmul FLOPs of a step")
    step_flops: int = field("forward and backward")
    step_time_lower_bound_ms: float | None = field("the longest of step_time_bounds", null=NO_PEAK)
    step_time_bounds: TimeBounds = field("by arithmetic, bandwidth and network")
    expected_step_time_ms: ExpectedTime | None = field("from achievable rates", null=NO_RATES)
    communication: Communication | None = field("between ranks", null=ALONE)
