"""FLOPs and limits: flops_profile.json, computational_intensity.json and roofline_data.json."""

from __future__ import annotations

from typing import Any

from typing_extensions import NotRequired, TypedDict

from harness.documents.run import Environment


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
