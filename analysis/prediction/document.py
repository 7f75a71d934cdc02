"""Will a step fit, what fills its memory, and how fast could it be at best?  prediction.json,
before anything runs."""

from collections import Counter
from collections.abc import Sequence

import torch

from analysis.hardware.ceilings import NOT_MEASURED, bandwidth_ceilings, compute_ceilings
from analysis.hardware.datasheets import Datasheet
from analysis.hardware.matching import datasheet, described
from analysis.memory.allocator import needed_bytes, reserved_bytes
from analysis.memory.predicted import bytes_on_other_ranks, kept_for_backward, predicted_memory
from analysis.memory.tables import place_of_peak
from analysis.prediction.capacity import (
    CONTEXT,
    RESERVES,
    Capacity,
    capacity_elsewhere,
    capacity_of,
)
from analysis.prediction.communication import communication
from analysis.prediction.expected_time import expected_step_time
from analysis.prediction.network import links_inside_node, network_of
from analysis.prediction.search import changes_that_fit, largest_sizes
from analysis.work.bytes_moved import step_work
from analysis.work.flop_counts import flops_of_step
from analysis.work.sent_bytes import sent_bytes
from harness.base.units import MB
from harness.documents.memory import NO_NETWORK, Prediction
from harness.machine.environment import describe_device, describe_environment
from harness.model.workload import Workload
from harness.schema import because, explained


def predict(
    workload: Workload,
    device: torch.device,
    peak: str | float = "auto",
    device_memory: int | None = None,
    targets: Sequence[Datasheet] = (),
    network: float | str | None = None,
) -> dict:
    """prediction.json, for the first of the targets if there are any.  Nothing is measured: peaks
    are those of datasheets, or of earlier measurements of this machine.  network: bus bandwidth of
    a rank in 10^9 bytes/s, or measured.  Raises UserError if nothing is measured."""
    target, elsewhere = targets[0] if targets else None, bool(targets or device_memory)
    ranks, link = workload.parallel.world_size, None
    if ranks > 1:
        environment = describe_environment(device).as_json()
        name = target.name if target else "" if elsewhere else environment["device"]["name"]
        link = network_of(network, environment, elsewhere) or links_inside_node(name, ranks)
    capacity = (
        capacity_elsewhere(device_memory, target)
        if elsewhere
        else capacity_of(device, [workload.precision])
    )
    document = memory_prediction(workload, device, capacity, target)
    if target:
        document["target_device"] |= {
            "source": target.source,
            "other_rows": [row.name for row in targets[1:]],
        }
    about, measure = (document["device"], "kept")
    if elsewhere:
        about, measure = (described(target) if target else {"name": ""}), "never"
    bounds = time_bounds(workload, about, peak, measure)
    sending = communication(document["collectives"], ranks, bounds, link) if ranks > 1 else None
    bounds |= {"network_ms": sending and sending["network_ms"]} | (
        because(NO_NETWORK, "network_ms") if sending else {}
    )
    forward_flops, step_flops = flops_of_step(workload)
    known = [
        bounds[name]
        for name in ("compute_ms", "bandwidth_ms", "network_ms")
        if bounds[name] is not None
    ]
    document = document | changes_that_fit(
        workload, document, on_gpu=elsewhere or device.type == "cuda"
    )
    document |= {
        "parameters": workload.parameter_count(),
        "forward_flops": forward_flops,
        "step_flops": step_flops,
    }
    document |= {"step_time_lower_bound_ms": max(known, default=None)}
    document |= because(bounds["bandwidth_ms_reason"], "step_time_lower_bound_ms")
    document |= {"step_time_bounds": bounds, "communication": sending}
    document |= expected_step_time(workload, about, link, peak, measure)
    return explained(document, Prediction)


# ---- Memory --------------------------------------------------------------------------------------


def memory_prediction(
    workload: Workload,
    device: torch.device,
    capacity: Capacity | None = None,
    target: Datasheet | None = None,
) -> dict:
    """What fills the memory of a step, and what would fit into this capacity,
    by default of the device."""
    capacity = capacity or capacity_of(device, [workload.precision], measure=True)
    on_gpu, memory = capacity.kind == "cuda", predicted_memory(workload, capacity.kind == "cuda")
    tensors = memory.document()
    prediction = {
        "device": describe_device(device).as_json(),
        "target_device": target and described(target),
    }
    prediction |= workload.settings() | fields_of_ranks(workload, tensors)
    prediction |= fields_of_peak(workload, tensors, capacity) | fields_of_capacity(
        workload, capacity
    )
    available, workspaces = (
        capacity.for_tensors(workload.precision),
        capacity.workspaces.get(workload.precision, 0),
    )
    needed = needed_bytes(memory, on_gpu, workspaces)
    expandable = reserved_bytes(memory, [workspaces // 2] * 2, expandable=True) if on_gpu else None
    prediction |= {"reserved_memory_mb": (needed + workspaces) / MB if on_gpu else None}
    prediction |= {"reserved_memory_expandable_mb": expandable and expandable / MB}
    prediction |= {"fits": needed <= available, "margin_mb": (available - needed) / MB}
    return explained(
        prediction | largest_sizes(workload, on_gpu, available, workspaces), Prediction
    )


def fields_of_ranks(workload: Workload, tensors: dict) -> dict:
    """The ranks, and what one of them sends in a step.  tensors: of predicted_memory()."""
    ranks = workload.parallel.world_size
    rows = tensors["collectives"]
    rows = [
        row | {"group_size": ranks, "sent_bytes": round(sent_bytes([row], ranks))} for row in rows
    ]
    return {"world_size": ranks, "parallel": workload.parallel.parallel, "collectives": rows}


def fields_of_peak(workload: Workload, tensors: dict, capacity: Capacity) -> dict:
    """The peak, what it is made of, and what the forward pass keeps."""
    workspaces = capacity.workspaces.get(workload.precision)
    categories = tensors["peak"]["bytes_by_category"] | (
        {"library workspaces": workspaces} if workspaces else {}
    )
    return {
        "peak_memory_mb": (tensors["peak_bytes"] + (workspaces or 0)) / MB,
        "memory_by_category_mb": {name: size / MB for name, size in categories.items()},
        "library_workspaces_mb": None if workspaces is None else workspaces / MB,
        "peak_where": place_of_peak(tensors),
        "largest_tensors": tensors["peak"]["largest_tensors"],
        "kept_for_backward": kept_for_backward(workload, tensors, on_gpu=capacity.kind == "cuda"),
    }


def fields_of_capacity(workload: Workload, capacity: Capacity) -> dict:
    """The memory of the device, what is in use or in reserve,
    and what may come on top of the peak."""
    precision, on_gpu = workload.precision, capacity.kind == "cuda"
    on_top, why = capacity.on_top(precision)
    return {
        "device_memory_mb": capacity.total / MB,
        "device_memory_source": capacity.source,
        "in_use_mb": capacity.in_use / MB,
        "reserve_mb": capacity.reserve(precision) / MB,
        "reserve_source": RESERVES[capacity.kind].source,
        "on_top_mb": on_top / MB,
        "on_top_source": "; ".join(filter(None, (why, workload.unpredicted_memory(on_gpu)))),
        "context_mb": CONTEXT.least / MB if on_gpu else None,
    }


# ---- Time ----------------------------------------------------------------------------------------


def time_bounds(workload: Workload, device: dict, peak: str | float, measure: str = "kept") -> dict:
    """The least time that a step can take, by arithmetic and by bandwidth, in ms.  measure: as for
    the ceilings."""
    work, precision = step_work(workload), workload.precision
    # What a step finds and leaves is read and written once; that which is sharded, by one of the
    # ranks.  The optimizer of a file may keep less than that.
    least = max(0, work.minimum() - 2 * bytes_on_other_ranks(workload))
    cast = (
        workload.parallel.param_precision
    )  # what FSDP gathers, and the work of one rank alone does not show
    in_float32 = cast if cast != "fp32" else "tf32" if precision == "tf32" else "fp32"
    names = {"float32": in_float32, "bfloat16": "bf16", "float16": "fp16"} | (
        {} if cast == "fp32" else {"tf32": cast}
    )
    flops = Counter()
    for kind, amount in work.least_flops().items() or [(precision, 0)]:
        flops[names.get(kind, kind)] += amount
    compute = {one: compute_ceilings(device, one, peak, measure=measure) for one in flops}
    if "tf32" in compute and not compute["tf32"]:  # convolutions, where there is none
        compute["tf32"] = compute_ceilings(device, in_float32, peak, measure=measure)
    bandwidth, most = bandwidth_ceilings(device, peak, measure), flops.most_common(1)[0][0]
    # Matmuls of another type than most are not counted if its rate is not known: the bound stays
    # one.
    seconds = sum(amount / compute[one][0].rate for one, amount in flops.items() if compute[one])
    bounds = {"compute_ms": 1e3 * seconds if compute[most] else None}
    bounds |= {"bandwidth_ms": 1e3 * least / bandwidth[0].rate if bandwidth else None}
    bounds |= {"compute_peak": compute[most][0].label if compute[most] else None}
    bounds |= {"bandwidth_peak": bandwidth[0].label if bandwidth else None}
    if row := datasheet(device):
        why = f"the datasheet of {row[0].name} has no {most}"
    else:
        why = (
            NOT_MEASURED
            if measure == "kept"
            else "--device-memory does not name a device; use --target-device"
        )
    return bounds | because(why, *bounds) | {"least_bytes": least}
