"""FLOPs and limits: flops_profile.json and computational_intensity.json."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from typing_extensions import NotRequired

from harness.base.documents import read_document, read_fitting
from harness.base.errors import UserError
from harness.machine.environment import Environment
from harness.run.run_config import Settings
from harness.run.run_summary import ONE_STEP
from harness.schema import Document, field

NO_PEAK = "no peak of this device is known"
NO_COUNT = "it counts one forward pass"
NO_DATASHEET = "no datasheet row for this device and precision"
NO_RATE = (
    f"{NO_DATASHEET}; measured here, no matmul was as fast as the model's own steps, or memory"
    " ran out"
)
NO_TRACE = "no trace of this run: --generate-roofline records one"


class ComponentFlops(Document):
    component: str = field("part of the model")
    forward_flops: int = field("per step, over all layers")
    backward_flops: int = field("per step, over all layers")
    forward_flops_per_layer: int = field("of one layer, where there are several")
    share: float = field("of all components")


class CounterRow(Document):
    counter: str = field("formula, FlopCounterMode, DeepSpeed")
    forward_flops: int | None = field("matmul FLOPs of one micro-batch", null=NO_COUNT)
    backward_flops: int | None = field("the same of the backward pass", null=NO_COUNT)
    beyond_matmuls: int | None = field("FLOPs of other operators that it counts", null=NO_COUNT)


class Reconciliation(Document):
    batch_size: int = field("of the micro-batch")
    sequence_length: int = field("tokens")
    recomputed_flops: int = field("included in the backward pass")
    rows: list[CounterRow] = field("one for each counter")
    agree: bool | None = field("whether the counts are the same", null="there is one count alone")
    forward_flops_by_module: dict[str, int] = field("as PyTorch counts them")


class Peak(Document):
    rate: float = field("FLOP/s, or bytes/s of a bandwidth")
    kind: str = field("datasheet, measured, given (by the user)")
    source: str = field("of the rate")
    disturbed: NotRequired[bool] = field("while it was measured")
    mfu_percent: NotRequired[float] = field("only for FLOP/s")


class DeepSpeedCounts(Document):
    flops: int = field("of all operators, of one forward pass")
    macs: int = field("multiply-adds of matmuls")
    parameters: int = field("of the model")
    macs_by_module: dict[str, int] = field("the modules in each included")
    batch_size: int = field("of the micro-batch")
    sequence_length: int = field("tokens")


class FlopsAnalysis(Document):
    forward_flops: int = field("matmul FLOPs of a step's forward passes")
    step_flops: int = field("forward and backward")
    unmasked_step_flops: int = field(
        "the same without the scores that a causal mask hides from fused attention"
    )
    recomputed_flops: int = field("not included in step_flops")
    forward_flops_by_component: dict[str, int] = field("by formula; empty: there is none")
    parameters: int = field("of the model")
    flops_per_parameter: float = field("per step")
    flops_per_token: float = field("forward and backward")
    flops_per_token_by_6n: int = field("by the rule of thumb, six per parameter")
    by_component: list[ComponentFlops] = field("the largest first; empty: there is no formula")
    reconciliation: Reconciliation = field("what several counters say")
    deepspeed: DeepSpeedCounts | None = field(
        "counts for one micro-batch", null="DeepSpeed did not count"
    )


class PerformanceMetrics(Document):
    avg_step_time_ms: float = field("mean over the averaged steps")
    std_step_time_ms: float | None = field("sample standard deviation", null=ONE_STEP)
    steps_averaged: int = field("that the averages are taken over")
    steps_averaged_note: str = field("which steps were excluded")
    flops_per_sec: float = field("of one rank")
    throughput_samples_per_sec: float = field("of all ranks")
    world_size: int = field("ranks")
    scope: str = field("which figures are of one rank, and which of all")


class EfficiencyMetrics(Document):
    mfu_percent: float | None = field("Model FLOPS Utilization", null=NO_RATE)
    unmasked_mfu_percent: float | None = field("of unmasked_step_flops", null=NO_RATE)
    hfu_percent: float | None = field(
        "includes recomputation", null="nothing is recomputed: it would equal MFU"
    )
    device_peak_flops: float | None = field("FLOP/s", null=NO_RATE)
    peak_source: str | None = field("kind of the peak and its source", null=NO_RATE)
    precision: str = field("of the matmuls")
    peaks: list[Peak] = field("MFU refers to the first")
    bandwidth_peaks: list[Peak] = field("of the memory")


class FlopsProfile(Document):
    convention: str = field("what counts as a FLOP")
    config: Settings = field("as in config.json")
    environment: Environment = field("as in config.json")
    flops_analysis: FlopsAnalysis = field("of a step and rank")
    performance_metrics: PerformanceMetrics = field("of the averaged steps")
    efficiency_metrics: EfficiencyMetrics = field("rates beside the peaks of the device")


def read_flops_profile(path: Path, parts: Collection[str] = ()) -> dict:
    """An earlier flops_profile.json with the fields that are needed, as in read_fitting().  Raises
    UserError, naming the file, for any other file or schema version."""
    document = read_document(path)
    if document is None or "flops_analysis" not in document:
        missing = "there is no such file"
        problem = "not a flops_profile.json of this workshop" if path.exists() else missing
        raise UserError(f"{path}: {problem}")
    return read_fitting(path, FlopsProfile, parts)


class PhaseBytes(Document):
    phase: str = field("of the step")
    flops: int = field("matmul FLOPs")
    bytes: int = field("read and written by its operators")
    minimum_bytes: int = field("if all temporaries stay in on-chip memory")


class CountedClass(Document):
    class_: str = field("of operators")
    calls: int = field("of a step")
    flops: int = field("matmul FLOPs")
    masked_flops: int = field("of these, of scores that fused attention may skip")
    bytes: int = field("read and written")


class OperatorBytes(CountedClass):
    phase: str = field("of the step")
    operator: str = field("as PyTorch calls it")
    elements: int = field("operations on elements")


class ClassBytes(CountedClass):
    element_operations: int = field("operations on elements")
    operations_per_byte: float = field("all operations")
    side_of_ridge_point: str | None = field("memory or compute", null=NO_PEAK)


class ComputationalIntensity(Document):
    convention: dict[str, str] = field("what is counted")
    step_flops: int = field("includes recomputation")
    step_bytes: int = field("every operator reads its inputs and writes its outputs")
    minimum_step_bytes: int = field("if all temporaries stay in on-chip memory")
    arithmetic_intensity_flops_per_byte: float = field("of step_bytes")
    intensity_at_minimum_flops_per_byte: float = field("of minimum_step_bytes")
    memory_bandwidth_used_gb_per_sec: float = field("10^9 bytes/s")
    memory_bandwidth_peak_gb_per_sec: float | None = field("10^9 bytes/s", null=NO_PEAK)
    memory_bandwidth_peak_source: str | None = field(
        "kind of the peak and its source", null=NO_PEAK
    )
    memory_bandwidth_utilization_percent: float | None = field("of the peak", null=NO_PEAK)
    memory_bound_vs_compute_bound: str = field(
        "memory_bound below 10 FLOPs/byte, mixed to 100, compute_bound above"
    )
    ridge_point_flops_per_byte: float | None = field(
        "at which both peaks are reached", null=NO_PEAK
    )
    side_of_ridge_point: str | None = field("memory or compute", null=NO_PEAK)
    device_peak_flops: float | None = field("FLOP/s", null=NO_PEAK)
    peak_source: str | None = field("kind of the peak and its source", null=NO_PEAK)
    classes: list[ClassBytes] = field("most bytes first")
    phases: list[PhaseBytes] = field("in order")
    operators: list[OperatorBytes] = field("most bytes first")
