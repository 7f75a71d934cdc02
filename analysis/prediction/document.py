"""Will a step fit, what fills its memory, and how fast could it be at best?  prediction.json,
before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from analysis.hardware.carried import carried_rates
from analysis.hardware.datasheets import Datasheet
from analysis.hardware.matching import datasheet, described
from analysis.memory.allocator import needed_bytes, reserved_bytes
from analysis.memory.predicted import KeptRow, kept_for_backward, predicted_memory
from analysis.memory.tables import place_of_peak
from analysis.prediction.capacity import (
    CONTEXT,
    RESERVES,
    Capacity,
    capacity_elsewhere,
    capacity_of,
)
from analysis.prediction.communication import (
    NO_NETWORK,
    Communication,
    PredictedCollectiveRow,
    communication,
)
from analysis.prediction.expected_time import expected_step_time, multiplies_in
from analysis.prediction.network import Network, links_inside_node, network_of
from analysis.prediction.operators import watch_step
from analysis.prediction.search import ONE_RANK, FitRow, Room, changes_that_fit, largest_sizes
from analysis.prediction.time_bounds import ALONE, BoundsOfRank, TimeBounds, time_bounds
from analysis.work.flop_counts import flops_of_step
from analysis.work.sent_bytes import sent_bytes
from harness.base.units import MB
from harness.documents.flops import NO_PEAK
from harness.instruments.memory_timeline import StepMemory, TensorRow
from harness.machine.environment import Device, describe_device, describe_environment
from harness.model.workload import Workload
from harness.run.run_summary import NO_RATES, ExpectedTime
from harness.schema import Document, Unknown, field, known_or

FIXED_SIZE = "its file decides how long a sequence is, and its model may take no longer one"
NO_WORKSPACES = "neither measured nor known of the architecture; the reserve stands for them"
NO_CACHING = "a CPU has no caching allocator and no context"


class TargetDevice(Device):
    source: str = field("of its figures")
    other_rows: list[str] = field("names of other devices that --target-device could stand for")


class MemoryPrediction(Document):
    """What fills the memory of a step, and what would fit."""

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


class Prediction(MemoryPrediction):
    would_fit: list[FitRow] | None = field("other flags", null="it fits")
    smallest_world_size: int | None = field("on which it fits", null=ONE_RANK)
    parameters: int = field("of the model")
    forward_flops: int = field("matmul FLOPs of a step")
    step_flops: int = field("forward and backward")
    step_time_lower_bound_ms: float | None = field("the longest of step_time_bounds", null=NO_PEAK)
    step_time_bounds: TimeBounds = field("by arithmetic, bandwidth and network")
    expected_step_time_ms: ExpectedTime | None = field("from achievable rates", null=NO_RATES)
    communication: Communication | None = field("between ranks", null=ALONE)


class Meant(NamedTuple):
    """The device that a prediction is of."""

    about: dict  # as in environment.json; of an unknown one, its name is empty
    measure: str  # as for the ceilings: what was measured on this machine tells of no other


def predict(
    workload: Workload,
    device: torch.device,
    peak: str | float = "auto",
    device_memory: int | None = None,
    targets: Sequence[Datasheet] = (),
    network: float | str | None = None,
    measured: Path | None = None,
) -> Prediction:
    """For the first of the targets if there are any.  Nothing is measured: peaks are those of
    datasheets, or of earlier measurements of this machine.  network: bus bandwidth of a rank in
    10^9 bytes/s, or measured.  measured: flops_profile.json of such a device.  Raises UserError if
    nothing is measured, or for a file of another device."""
    elsewhere = bool(targets or device_memory)
    if elsewhere:
        target = targets[0] if targets else None
        capacity = capacity_elsewhere(device_memory, target)
        meant = Meant(described(target) if target else {"name": ""}, "never")
    else:
        capacity = capacity_of(device, [workload.precision])
        meant = Meant(describe_device(device).as_json(), "kept")
    rates = None
    if measured is not None:
        rates = carried_rates(measured, meant.about, multiplies_in(workload))
    link = network_between(workload, device, meant.about, network, elsewhere)
    watch_step(workload, capacity.on_gpu)
    memory = memory_prediction(workload, device, capacity, targets)
    bounds = time_bounds(workload, meant.about, peak, meant.measure)
    sending = None
    ranks = workload.parallel.world_size
    if ranks > 1:
        collectives = [row.as_json() for row in memory.collectives]
        sending = communication(collectives, ranks, bounds.longest_ms(), link)
    would_fit = changes_that_fit(workload, room_on(capacity, workload), memory.fits)
    forward_flops, step_flops = flops_of_step(workload)
    expected = expected_step_time(workload, meant.about, link, peak, meant.measure, rates)
    return Prediction(
        **memory.field_values(),
        would_fit=would_fit.rows,
        smallest_world_size=would_fit.smallest_world_size,
        parameters=workload.parameter_count(),
        forward_flops=forward_flops,
        step_flops=step_flops,
        step_time_lower_bound_ms=least_ms(bounds, sending),
        step_time_bounds=bounds_document(bounds, sending),
        expected_step_time_ms=expected,
        communication=sending,
    )


def network_between(
    workload: Workload,
    device: torch.device,
    about: dict,
    choice: float | str | None,
    elsewhere: bool,
) -> Network | None:
    """Of the ranks: that of --network, else the links inside a node between such devices, which are
    described as in environment.json.  None: of one rank, or unknown, as between parts of a card."""
    ranks = workload.parallel.world_size
    if ranks == 1:
        return None
    environment = describe_environment(device).as_json()
    chosen = network_of(choice, environment, elsewhere)
    known = datasheet(about)
    is_part = known is not None and known[1] < 1
    return chosen or (None if is_part else links_inside_node(about["name"], ranks))


def least_ms(bounds: BoundsOfRank, sending: Communication | None) -> float | Unknown:
    """The longest of the bounds of a step."""
    longest = bounds.longest_ms()
    if sending is None or sending.network_ms is None:
        return longest
    return sending.network_ms if isinstance(longest, Unknown) else max(longest, sending.network_ms)


def bounds_document(bounds: BoundsOfRank, sending: Communication | None) -> TimeBounds:
    why = bounds.why_unknown
    return TimeBounds(
        compute_ms=known_or(bounds.compute_ms, why),
        compute_peak=known_or(bounds.compute_peak, why),
        bandwidth_ms=known_or(bounds.bandwidth_ms, why),
        bandwidth_peak=known_or(bounds.bandwidth_peak, why),
        least_bytes=bounds.least_bytes,
        network_ms=known_or(sending.network_ms, NO_NETWORK) if sending else None,
    )


# ---- Memory --------------------------------------------------------------------------------------


def memory_prediction(
    workload: Workload,
    device: torch.device,
    capacity: Capacity | None = None,
    targets: Sequence[Datasheet] = (),
) -> MemoryPrediction:
    """capacity: into which it may fit; by default that of the device."""
    capacity = capacity or capacity_of(device, [workload.precision], measure=True)
    memory = predicted_memory(workload, capacity.on_gpu)
    tensors = memory.document()
    room = room_on(capacity, workload)
    needed = needed_bytes(memory, room.on_gpu, room.workspaces)
    workspaces = capacity.workspaces.get(workload.precision)
    settings = workload.settings()
    ranks = workload.parallel.world_size
    on_top, why_on_top = on_top_of(workload, capacity)
    sizes = largest_sizes(workload, room)
    return MemoryPrediction(
        device=describe_device(device),
        target_device=target_device(targets),
        model=settings["model"],
        training=settings["training"],
        world_size=ranks,
        parallel=workload.parallel.parallel,
        collectives=[collective_row(row, ranks) for row in tensors["collectives"]],
        peak_memory_mb=(tensors["peak_bytes"] + room.workspaces) / MB,
        memory_by_category_mb=memory_by_category_mb(tensors, workspaces),
        library_workspaces_mb=None if workspaces is None else workspaces / MB,
        reserved_memory_mb=(needed + room.workspaces) / MB if room.on_gpu else None,
        reserved_memory_expandable_mb=reserved_expandable_mb(memory, room),
        peak_where=place_of_peak(tensors),
        largest_tensors=[TensorRow.from_json(row) for row in tensors["peak"]["largest_tensors"]],
        kept_for_backward=kept_for_backward(workload, tensors, room.on_gpu),
        device_memory_mb=capacity.total / MB,
        device_memory_source=capacity.source,
        in_use_mb=capacity.in_use / MB,
        reserve_mb=capacity.reserve(workload.precision) / MB,
        reserve_source=RESERVES[capacity.kind].source,
        on_top_mb=on_top / MB,
        on_top_source=why_on_top,
        context_mb=CONTEXT.least / MB if room.on_gpu else None,
        fits=needed <= room.capacity,
        margin_mb=(room.capacity - needed) / MB,
        max_batch_size=sizes.batch_size,
        max_seq_len=sizes.seq_len,
    )


def room_on(capacity: Capacity, workload: Workload) -> Room:
    """What a step of this workload can use."""
    precision = workload.precision
    workspaces = capacity.workspaces.get(precision, 0)
    return Room(capacity.on_gpu, capacity.for_tensors(precision), workspaces)


def target_device(targets: Sequence[Datasheet]) -> TargetDevice | None:
    """The first of those that --target-device could stand for."""
    if not targets:
        return None
    target, *others = targets
    return TargetDevice(
        **described(target), source=target.source, other_rows=[row.name for row in others]
    )


def collective_row(row: dict, ranks: int) -> PredictedCollectiveRow:
    """row: of memory_timeline.json."""
    sent = round(sent_bytes([row], ranks))
    return PredictedCollectiveRow(**row, group_size=ranks, sent_bytes=sent)


def memory_by_category_mb(tensors: dict, workspaces: int | None) -> dict[str, float]:
    """At the peak.  tensors: memory_timeline.json of the predicted step."""
    sizes = {name: size / MB for name, size in tensors["peak"]["bytes_by_category"].items()}
    if workspaces:
        sizes["library workspaces"] = workspaces / MB
    return sizes


def reserved_expandable_mb(memory: StepMemory, room: Room) -> float | None:
    """With expandable segments; None on a CPU."""
    if not room.on_gpu:
        return None
    return reserved_bytes(memory, [room.workspaces // 2] * 2, expandable=True) / MB


def on_top_of(workload: Workload, capacity: Capacity) -> tuple[int, str]:
    """What may come on top of the peak, in bytes, and why."""
    size, why = capacity.on_top(workload.precision)
    unpredicted = workload.unpredicted_memory(capacity.on_gpu)
    return size, "; ".join(reason for reason in (why, unpredicted) if reason)
