"""What fills the memory of a step?  By running it on fake tensors."""

import functools

import torch

from analysis.work.fake_step import FakeRunError, GpuMemoryTracker, fake_step
from harness.base.units import MB
from harness.instruments.memory_timeline import StepMemory, kept_by_component
from harness.instruments.memory_tracker import MemoryTracker
from harness.model.workload import Workload
from harness.schema import unknown


@functools.lru_cache(maxsize=8)
def predicted_memory(workload: Workload, on_gpu: bool) -> StepMemory:
    """The tensors of a step of rank 0, as --profile-memory would count them,
    by a fake-tensor run."""
    return fake_step(
        workload, on_gpu, GpuMemoryTracker if on_gpu else MemoryTracker, ranks=True
    ).timeline


def peak_bytes(workload: Workload, on_gpu: bool) -> int:
    """The most bytes that are live at once in a step of one rank of this run, by prediction."""
    return int(predicted_memory(workload, on_gpu).live_bytes_at_allocations().max())


def bytes_on_other_ranks(workload: Workload) -> int:
    """Bytes of parameters and optimizer state that only other ranks have."""
    every = (
        persistent_bytes(workload) * {"zero1": 2, "fsdp": 3}.get(workload.parallel.parallel, 0) // 3
    )
    return every - every // workload.parallel.world_size


def persistent_bytes(workload: Workload) -> int:
    """Of the parameters and of two moments for each, in their type."""
    return 3 * workload.parameter_dtype.itemsize * workload.parameter_count()


def kept_for_backward(workload: Workload, memory: dict, on_gpu: bool) -> list[dict]:
    """What the forward pass keeps for the backward pass, by component; by formula where the
    workload has one."""
    kept = kept_by_component(memory)
    formula = None if workload.compiled else workload.formulas.kept_for_backward(on_gpu)
    if workload.compiled:
        kept = {"compiled model": sum(kept.values())}
    if formula:
        kept = {name: linear + quadratic for name, (linear, quadratic) in formula.items()}
    return [
        {
            "component": name,
            "mb": size / MB,
            "quadratic_mb": formula[name][1] / MB if formula else None,
        }
        for name, size in sorted(kept.items(), key=lambda item: -item[1])
    ]


def beside_measured(memory: dict, workload: Workload, device: torch.device) -> dict:
    """`predicted`: the peak of a step by prediction, for memory_timeline.json, and how far off."""
    try:
        predicted = predicted_memory(workload, device.type == "cuda").document()
    except FakeRunError as error:
        return unknown(str(error), "predicted")
    kept, formula = (
        kept_by_component(memory),
        workload.formulas.kept_for_backward(device.type == "cuda"),
    )
    rows = []
    for name in sorted({*kept, *(formula or {})}, key=lambda name: -kept.get(name, 0)):
        row = {
            "component": name,
            "bytes": kept.get(name, 0),
            "formula_bytes": None,
            "quadratic_bytes": None,
        }
        if formula:
            linear, quadratic = formula.get(name, (0, 0))
            row |= {"formula_bytes": linear + quadratic, "quadratic_bytes": quadratic}
        rows.append(row)
    document = {
        "peak_bytes": predicted["peak_bytes"],
        "error_percent": 100 * (predicted["peak_bytes"] / memory["peak_bytes"] - 1),
        "bytes_by_category": predicted["peak"]["bytes_by_category"],
        "kept_for_backward": rows,
    }
    return {"predicted": document}
