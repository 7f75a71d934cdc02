"""Will it fit, what will fill the memory, and how fast could a step be at best?  All before anything runs."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch

from analysis.fake_run import FakeRunError, fake_step
from analysis.flop_counts import flops_of_step
from analysis.hardware import NO_PEAK, bandwidth_ceilings, compute_ceilings
from analysis.memory import TENSOR_COLUMNS, place_of_peak
from analysis.traffic import step_work
from analysis.wording import text_of
from harness.console import progress_bar
from harness.devices import library_workspaces, memory_of_a_rank
from harness.environment import describe_environment
from harness.files import explain_nulls
from harness.memory_tracker import MemoryTracker, kept_by_component
from harness.tables import column, labeled
from harness.units import MB, megabytes
from harness.workload import Workload

PERSISTENT_BYTES_PER_PARAM = 12  # bytes a parameter: itself and two moments of the optimizer, float32 at any precision
LONGEST = 2**31  # samples or tokens: no search goes further


@functools.lru_cache(maxsize=8)
def predicted_memory(workload: Workload, on_gpu: bool) -> MemoryTracker:
    """The tensors of a step, as --profile-memory would count them, by a fake-tensor run."""
    return fake_step(workload, on_gpu, MemoryTracker)


def largest_that_fits(live: Callable[[int], np.ndarray], at: int, degree: int, capacity: int) -> int:
    """The largest n for which no moment of a step needs more than capacity; live(n) are its live bytes, allocation by
    allocation.  0 if not even one fits.

    From n = 2 on a step makes the same allocations whatever n is, and the size of each is a polynomial in n of known
    degree, 1 or 2: fake-tensor runs at degree + 1 values of n determine all others exactly.
    """
    at = max(2, at)
    known = [live(at + i).astype(object) for i in range(degree + 1)]  # Python's numbers, which have no largest
    first = known[1] - known[0]
    second = known[2] - 2 * known[1] + known[0] if degree == 2 else 0

    def fits(n: int) -> bool:
        k = n - at
        return max(known[0] + k * first + (k * (k - 1) // 2) * second) <= capacity

    if not fits(2):
        return int(max(live(1)) <= capacity)
    low, high = 2, 4
    while high < LONGEST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_batch(workload: Workload, on_gpu: bool, capacity: int) -> int:
    """Samples per step, a multiple of the micro-batches; 0 if not even one each fits."""
    micro_steps = workload.micro_steps
    start = workload.batch_size // micro_steps
    return micro_steps * _largest(workload, on_gpu, capacity, "batch_size", start, micro_steps, degree=1)


def longest_sequence(workload: Workload, on_gpu: bool, capacity: int) -> int:
    """Tokens per sample; 0 if not even one fits."""
    return _largest(workload, on_gpu, capacity, "seq_len", workload.seq_len, 1, degree=2)


def _largest(workload: Workload, on_gpu: bool, capacity: int, setting: str, start: int, unit: int, degree: int) -> int:
    """The largest setting, in units, that fits."""
    if PERSISTENT_BYTES_PER_PARAM * workload.parameter_count() > capacity:
        return 0

    def live(n: int) -> np.ndarray:
        return predicted_memory(workload.with_settings(**{setting: n * unit}), on_gpu).live_bytes_at_allocations()

    return largest_that_fits(live, start, degree, capacity)


def memory_prediction(
    workload: Workload, device: torch.device, device_memory: int | None = None, after_failure: bool = False
) -> dict:
    """What fills the memory of a step, and what would fit.

    device_memory is that of another device, a GPU, in bytes; without it, this one's, less what the process uses
    without a model.  after_failure: memory is full now, so neither that nor the libraries' workspaces can be measured.
    """
    on_gpu = device.type == "cuda" or bool(device_memory)
    memory = predicted_memory(workload, on_gpu).document()
    workspaces = 0 if after_failure or device_memory else library_workspaces(device)
    categories = memory["peak"]["bytes_by_category"] | ({"library workspaces": workspaces} if workspaces else {})
    peak = memory["peak_bytes"] + workspaces
    total, used = (device_memory, 0) if device_memory else memory_of_a_rank(device)
    used = 0 if after_failure else used
    capacity = max(0, total - used)
    about = describe_environment(device)["device"]
    uncompiled = workload.with_settings(compile=False)  # compiling for each size of a search would take minutes
    searches = {"max_batch_size": largest_batch, "max_seq_len": longest_sequence}
    fitting = {
        name: search(uncompiled, on_gpu, capacity - workspaces)
        for name, search in progress_bar("Searching for what fits", searches.items())
    }
    return {
        "device": about,
        **workload.settings(),
        "peak_memory_mb": peak / MB,
        "memory_by_category_mb": {name: size / MB for name, size in categories.items()},
        "peak_where": place_of_peak(memory),
        "largest_tensors": memory["peak"]["largest_tensors"],
        "kept_for_backward": kept_rows(workload, memory),
        "device_memory_mb": total / MB,
        "device_memory_source": "--device-memory, a GPU; its libraries need some more"
        if device_memory
        else about["name"],
        "used_by_process_mb": used / MB,
        "fits": peak <= capacity,
        **fitting,
    }


def kept_rows(workload: Workload, memory: dict) -> list[dict]:
    """What the forward pass keeps for the backward pass, by component; by formula where the workload has one."""
    kept = kept_by_component(memory)
    formula = None if workload.compiled else workload.kept_for_backward()
    if workload.compiled:
        kept = {"compiled model": sum(kept.values())}
    if formula:
        kept = {name: linear + quadratic for name, (linear, quadratic) in formula.items()}
    rows = []
    for name, size in sorted(kept.items(), key=lambda item: -item[1]):
        quadratic_mb = formula[name][1] / MB if formula else None
        row = {"component": name, "mb": size / MB, "quadratic_mb": quadratic_mb}
        rows.append(explain_nulls(row, "there is no formula for it"))
    return rows


def time_bounds(workload: Workload, device: dict, peak: str | float) -> dict:
    """The least time that a step can take, by arithmetic and by bandwidth, in ms."""
    flops = flops_of_step(workload)[1] + workload.recomputed_flops()
    least = step_work(workload).minimum()
    compute, bandwidth = compute_ceilings(device, workload.precision, peak), bandwidth_ceilings(device, peak)
    bounds = {
        "compute_ms": 1e3 * flops / compute[0].rate if compute else None,
        "compute_peak": compute[0].label if compute else None,
        "bandwidth_ms": 1e3 * least / bandwidth[0].rate if bandwidth else None,
        "bandwidth_peak": bandwidth[0].label if bandwidth else None,
        "least_bytes": least,
    }
    return explain_nulls(bounds, NO_PEAK)


def predict(
    workload: Workload, device: torch.device, peak: str | float = "auto", device_memory: int | None = None
) -> dict:
    """prediction.json"""
    memory = memory_prediction(workload, device, device_memory)
    bounds = time_bounds(workload, memory["device"], peak)
    known = [bounds[name] for name in ("compute_ms", "bandwidth_ms") if bounds[name] is not None]
    forward_flops, step_flops = flops_of_step(workload)
    counts = {"parameters": workload.parameter_count(), "forward_flops": forward_flops, "step_flops": step_flops}
    times = {"step_time_lower_bound_ms": max(known, default=None), "step_time_bounds": bounds}
    return memory | counts | explain_nulls(times, NO_PEAK)


# ---- For a reader --------------------------------------------------------------------------------------------------


KEPT_COLUMNS = [
    column("kept for the backward pass, all layers", "component", left=True),
    column("MB", "mb", ",.1f"),
    column("quadratic in the sequence MB", "quadratic_mb", ",.1f"),
]


def limit(n: int) -> str:
    return f"{n:,}" if n < LONGEST - 1 else f"more than {LONGEST:,}"


def optimization_flags(training: dict) -> list[str]:
    """The flags of optimizations that are on."""
    defaults = {"attention": "eager", "optimizer_impl": None, "activation_checkpointing": False, "compile": False}
    flags = []
    for name, default in defaults.items():
        value = training.get(name, default)
        if value != default:
            flags.append(f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}"))
    return flags


def prediction_lines(document: dict) -> list[str]:
    """What a dry run prints."""
    training, peak_mb = document["training"], document["peak_memory_mb"]
    shape = f"batch {training['batch_size']} x {training['seq_len']} tokens in {training['precision']}"
    shape += "".join(f", {name}" for name in optimization_flags(training))
    categories = [{"name": name, "mb": mb} for name, mb in document["memory_by_category_mb"].items()]
    has = f"{document['device_memory_mb']:,.0f} MB, {document['device_memory_source']}"
    if document["used_by_process_mb"]:
        has += f", of which the process uses {document['used_by_process_mb']:,.0f} MB without a model"
    facts = {
        "Parameters": f"{document['parameters']:,}",
        "FLOPs per step": f"{document['step_flops']:,} ({shape})",
        "Peak memory": f"{peak_mb:,.1f} MB, in {document['peak_where']}",
        "Fits": f"{'yes' if document['fits'] else 'NO'}: {has}",
        "Largest batch": f"{limit(document['max_batch_size'])} samples of {training['seq_len']:,} tokens",
        "Longest sequence": f"{limit(document['max_seq_len'])} tokens, {training['batch_size']:,} samples",
        **time_facts(document),
    }
    category_columns = [
        column("at the peak", "name", left=True),
        column("MB", "mb", ",.1f"),
        column("share", "mb", ".1%", peak_mb),
    ]
    lines = ["Prediction: nothing was allocated or trained", *labeled(facts)]
    if training.get("compile"):
        lines.append("--compile: the peak is at most this, as fused kernels write less; what fits is without --compile")
    tables = (
        (category_columns, categories),
        (TENSOR_COLUMNS, document["largest_tensors"][:5]),
        (KEPT_COLUMNS, document["kept_for_backward"]),
    )
    return lines + text_of(tables)


def time_facts(document: dict) -> dict[str, str]:
    """The least time of a step, and the bounds that it is the larger of."""
    if document["step_time_lower_bound_ms"] is None:
        return {"Least time of a step": f"unknown: {document['step_time_lower_bound_ms_reason']}"}
    bounds = document["step_time_bounds"]
    facts = {"Least time of a step": f"{document['step_time_lower_bound_ms']:,.2f} ms"}
    if bounds["compute_ms"] is not None:
        facts["  for the matmuls"] = f"{bounds['compute_ms']:,.2f} ms at the peak, {bounds['compute_peak']}"
    if bounds["bandwidth_ms"] is not None:
        moved = f"the minimum bytes moved, {megabytes(bounds['least_bytes'])}"
        facts["  for memory traffic"] = f"{bounds['bandwidth_ms']:,.2f} ms for {moved}; {bounds['bandwidth_peak']}"
    return facts


def peak_bytes(workload: Workload, on_gpu: bool) -> int:
    """The most bytes that are live at once in a step, by prediction."""
    return int(predicted_memory(workload, on_gpu).live_bytes_at_allocations().max())


def refusal(workload: Workload, device: torch.device) -> str | None:
    """Why a run cannot fit, None if it can; what would fit is searched for only where it does not."""
    total, used = memory_of_a_rank(device)
    available = total - used - library_workspaces(device)
    on_gpu = device.type == "cuda"
    if peak_bytes(workload.with_settings(compile=False), on_gpu) <= available:  # which is predicted sooner
        return None
    if workload.compiled and peak_bytes(workload, on_gpu) <= available:
        return None
    return what_fits(memory_prediction(workload, device))


def what_fits(document: dict) -> str:
    """The prediction in a clause: what a step needs, what there is, what would fit."""
    named = sorted(document["memory_by_category_mb"].items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {size:,.0f}" for name, size in named[:3])
    batch, seq, now = document["max_batch_size"], document["max_seq_len"], document["training"]
    fitting = [
        *([f"--batch-size {batch}"] if 0 < batch < now["batch_size"] else []),
        *([f"--seq-len {seq}"] if 0 < seq < now["seq_len"] else []),
    ]
    cure = f"lower to {' or '.join(fitting)}" if fitting else "lower --size"
    available = max(0, document["device_memory_mb"] - document["used_by_process_mb"])
    needs = f"a step needs {document['peak_memory_mb']:,.0f} MB ({parts})"
    return f"{needs}, {document['device']['type']} has {available:,.0f} MB for it; {cure}"


def beside_measured(memory: dict, workload: Workload, device: torch.device) -> dict:
    """`predicted`: the peak of a step by prediction, for memory_timeline.json, and how far off it is."""
    try:
        predicted = predicted_memory(workload, device.type == "cuda").document()
    except FakeRunError as error:
        return explain_nulls({"predicted": None}, str(error))
    kept, formula = kept_by_component(memory), workload.kept_for_backward()
    rows = []
    for name in sorted({*kept, *(formula or {})}, key=lambda name: -kept.get(name, 0)):
        row = {"component": name, "bytes": kept.get(name, 0), "formula_bytes": None, "quadratic_bytes": None}
        if formula:
            linear, quadratic = formula.get(name, (0, 0))
            row |= {"formula_bytes": linear + quadratic, "quadratic_bytes": quadratic}
        rows.append(explain_nulls(row, "the workload has no formula"))
    document = {
        "peak_bytes": predicted["peak_bytes"],
        "error_percent": 100 * (predicted["peak_bytes"] / memory["peak_bytes"] - 1),
        "bytes_by_category": predicted["peak"]["bytes_by_category"],
        "kept_for_backward": rows,
    }
    return {"predicted": document}
