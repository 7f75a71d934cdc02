"""Will it fit, what will fill the memory, and how fast could a step be at best?  All before anything runs."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import asdict, replace

import numpy as np
import torch

from analysis.documents import cell
from analysis.hardware import NO_PEAK, bandwidth_ceilings, compute_ceilings
from analysis.memory import MemoryLedger, kept_by_component, place_of_peak, tensor_name
from analysis.rehearsal import NotRehearsable, rehearse
from tiny_llama_v1 import (
    MB,
    PRECISIONS,
    TinyLlamaConfig,
    TrainingConfig,
    describe_environment,
    host_memory,
    range_observers,
    total_memory,
    with_reasons,
)

ALWAYS_THERE = 12  # bytes a parameter: itself and two moments of the optimizer, float32 at any precision
LONGEST = 2**31  # samples or tokens: no search goes further


@functools.lru_cache(maxsize=8)
def predicted_memory(config: TinyLlamaConfig, training: TrainingConfig, on_gpu: bool) -> MemoryLedger:
    """The ledger of a step's tensors, as --profile-memory would write it, by rehearsal."""
    config = replace(config, max_seq_len=training.seq_len)
    return rehearse(config, training, on_gpu, lambda *model: MemoryLedger(*model, 1, range_observers))


def largest_that_fits(live: Callable[[int], np.ndarray], at: int, degree: int, capacity: int) -> int:
    """The largest n for which no moment of a step needs more than capacity; live(n) are its live bytes, allocation by
    allocation.

    The allocations of a step are the same whatever n is, from 2 on, and each storage is a polynomial in n of a degree
    that is known, 1 or 2: so many rehearsals and one more tell all others exactly.  0 if not even one fits.
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


def largest_batch(config: TinyLlamaConfig, training: TrainingConfig, on_gpu: bool, capacity: int) -> int:
    """Samples per step, a multiple of the micro-batches; 0 if not even one each fits."""
    if ALWAYS_THERE * config.parameter_count() > capacity:
        return 0
    micro_steps = training.gradient_accumulation_steps

    def live(n: int) -> np.ndarray:
        return predicted_memory(config, replace(training, batch_size=n * micro_steps), on_gpu).live_at_births()

    return micro_steps * largest_that_fits(live, training.batch_size // micro_steps, 1, capacity)


def longest_sequence(config: TinyLlamaConfig, training: TrainingConfig, on_gpu: bool, capacity: int) -> int:
    """Tokens per sample; 0 if not even one fits."""
    if ALWAYS_THERE * config.parameter_count() > capacity:
        return 0

    def live(n: int) -> np.ndarray:
        return predicted_memory(config, replace(training, seq_len=n), on_gpu).live_at_births()

    return largest_that_fits(live, training.seq_len, 2, capacity)


def least_bytes_of_a_step(config: TinyLlamaConfig, training: TrainingConfig) -> int:
    """Bytes that a step must move if all that it makes and drops stays on the chip: weights, two moments and a step
    count of each tensor, read and written, float32 at any precision; tokens, mask, cosines and sines, read."""
    tensors, tokens = 3 + 9 * config.n_layers, training.batch_size * training.seq_len
    mask = training.seq_len**2 if training.attention == "eager" else 0
    constants = mask + 2 * training.seq_len * config.head_dim
    return 2 * 4 * (3 * config.parameter_count() + tensors) + 2 * 8 * tokens + 4 * constants


def kept_by_formula(config: TinyLlamaConfig, training: TrainingConfig) -> dict[str, tuple[int, int]]:
    """Bytes that the forward pass of a micro-batch keeps for the backward one, by component over all layers: the part
    that is linear in the tokens (and what does not grow with them), and the part that is quadratic in the sequence.

    Under autocast the copies of weights and inputs in the narrow type are kept too.  With checkpointing the blocks keep
    their output alone.
    """
    batch_size = training.batch_size // training.gradient_accumulation_steps
    tokens, size = batch_size * training.seq_len, PRECISIONS[training.precision].itemsize
    low = size < 4
    d, f, kv, heads = config.hidden_dim, config.intermediate_dim, config.kv_dim, config.n_heads
    wide, square = tokens * d, batch_size * heads * training.seq_len**2
    norm = 4 * (wide + tokens + (0 if low else wide))
    copies = low * size  # bytes for each element of a weight or input that is copied to the narrow type
    # Keys and values are copied for the heads that share them, and where a product cannot read them transposed.  Of a
    # single sample it can read them as they are, if each head has its own or all have the same.  A fused kernel
    # also reads those of more samples in place.
    eager = training.attention == "eager"
    values_stay = config.n_kv_heads in (1, heads) and (batch_size == 1 or not eager)
    keys_stay = values_stay and not low
    layer = {
        "attention_norm": (norm, 0),
        "attention.q_proj": (copies * (d * d + wide), 0),
        "attention.k_proj": (copies * (d * kv + wide), 0),
        "attention.v_proj": (copies * (d * kv + wide) + values_stay * size * tokens * kv, 0),
        "attention.rope": (keys_stay * size * tokens * kv + (not (eager or low)) * size * wide, 0),
        "attention.scores": (eager * size * wide * (2 - keys_stay), 0),
        "attention.softmax": (0, eager * 4 * square),
        "attention.weighted_sum": (eager * (1 - values_stay) * size * wide, eager * copies * square),
        # What the fused kernel takes that is not kept already, its output, and the logarithm of each row's sum.
        "attention.sdpa": (
            (not eager) * (size * wide * (1 + low + (not keys_stay) + (not values_stay)) + 4 * tokens * heads),
            0,
        ),
        "attention.o_proj": (copies * d * d + eager * size * wide, 0),
        "attention_residual": (4 * wide, 0),
        "mlp_norm": (norm, 0),
        "mlp.gate_proj": (copies * (d * f + wide) + size * tokens * f, 0),
        "mlp.up_proj": (copies * (d * f + wide) + size * tokens * f, 0),
        "mlp.activation": (2 * size * tokens * f, 0),
        "mlp.down_proj": (copies * d * f, 0),
    }
    if training.activation_checkpointing:
        layer = {}
    kept = {name: tuple(config.n_layers * part for part in parts) for name, parts in layer.items()}
    kept["mlp_residual"] = (config.n_layers * 4 * wide, 0)
    kept["embedding"], kept["norm"] = (4 * wide, 0), (norm, 0)
    kept["lm_head"] = (copies * (config.vocab_size * d + wide), 0)
    kept["loss"] = (4 * (tokens * config.vocab_size + 2), 0)
    return {name: parts for name, parts in kept.items() if any(parts)}


def library_workspaces(device: torch.device) -> int:
    """Bytes that the libraries behind matrix products keep on a GPU, found by letting them do one, there and back."""
    if device.type == "cpu":
        return 0
    before = torch.cuda.memory_allocated(device)
    x = torch.ones(16, 16, device=device, requires_grad=True)
    (x @ x).sum().backward()
    del x
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device) - before


def memory_prediction(
    config: TinyLlamaConfig,
    training: TrainingConfig,
    device: torch.device,
    device_memory: int | None = None,
    after_failure: bool = False,
) -> dict:
    """What fills the memory of a step, and what would fit.

    device_memory is that of another device, a GPU, in bytes; without it, this one's, less what the process takes
    without a model.  after_failure: memory is full now, so neither that nor the libraries' workspaces can be found out.
    """
    on_gpu = device.type == "cuda" or bool(device_memory)
    memory = predicted_memory(config, training, on_gpu).document()
    workspaces = 0 if after_failure or device_memory else library_workspaces(device)
    categories = memory["peak"]["bytes_by_category"] | ({"library workspaces": workspaces} if workspaces else {})
    whole = memory["peak_bytes"] + workspaces
    whole_device, taken = (device_memory, 0) if device_memory else memory_of_a_rank(device)
    taken = 0 if after_failure else taken
    capacity = max(0, whole_device - taken)
    about = describe_environment(device)["device"]
    if training.compile:
        kept = {"compiled model": (sum(kept_by_component(memory).values()), 0)}
    else:
        kept = kept_by_formula(config, training)
    searched = replace(training, compile=False)  # what a compiler keeps follows no formula, and it takes its time
    return {
        "device": about,
        "model": asdict(config),
        "training": asdict(training),
        "peak_memory_mb": whole / MB,
        "memory_by_category_mb": {name: size / MB for name, size in categories.items()},
        "peak_where": place_of_peak(memory),
        "largest_tensors": memory["peak"]["largest_tensors"],
        "kept_for_backward": [
            with_reasons(
                {"component": name, "mb": sum(parts) / MB, "quadratic_mb": None if training.compile else parts[1] / MB},
                "what a compiler keeps follows no formula",
            )
            for name, parts in sorted(kept.items(), key=lambda item: -sum(item[1]))
        ],
        "device_memory_mb": whole_device / MB,
        "device_memory_source": "--device-memory, a GPU; what its libraries keep comes on top"
        if device_memory
        else about["name"],
        "taken_by_process_mb": taken / MB,
        "fits": whole <= capacity,
        "max_batch_size": largest_batch(config, searched, on_gpu, capacity - workspaces),
        "max_seq_len": longest_sequence(config, searched, on_gpu, capacity - workspaces),
    }


def memory_of_a_rank(device: torch.device) -> tuple[int, int]:
    """Bytes that there are, and that the process takes already: a GPU's own, of a host the share of each rank."""
    if device.type == "cuda":
        return total_memory(device), 0
    return total_memory(device) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)), host_memory()[0]


def time_bounds(config: TinyLlamaConfig, training: TrainingConfig, device: dict, peak: str | float) -> dict:
    """The least time that a step can take, by arithmetic and by bandwidth, in ms."""
    flops = config.step_flops(training.batch_size, training.seq_len)
    flops += config.recomputed_flops(training)
    least = least_bytes_of_a_step(config, training)
    compute, bandwidth = compute_ceilings(device, training.precision, peak), bandwidth_ceilings(device, peak)
    bounds = {
        "compute_ms": 1e3 * flops / compute[0].rate if compute else None,
        "compute_peak": compute[0].label if compute else None,
        "bandwidth_ms": 1e3 * least / bandwidth[0].rate if bandwidth else None,
        "bandwidth_peak": bandwidth[0].label if bandwidth else None,
        "least_bytes": least,
    }
    return with_reasons(bounds, NO_PEAK)


def prediction(
    config: TinyLlamaConfig,
    training: TrainingConfig,
    device: torch.device,
    peak: str | float = "auto",
    device_memory: int | None = None,
) -> dict:
    """prediction.json"""
    memory = memory_prediction(config, training, device, device_memory)
    bounds = time_bounds(config, training, memory["device"], peak)
    known = [bounds[name] for name in ("compute_ms", "bandwidth_ms") if bounds[name] is not None]
    counts = {
        "parameters": config.parameter_count(),
        "forward_flops": config.forward_flops(training.batch_size, training.seq_len),
        "step_flops": config.step_flops(training.batch_size, training.seq_len),
    }
    times = {"step_time_lower_bound_ms": max(known, default=None), "step_time_bounds": bounds}
    return memory | counts | with_reasons(times, NO_PEAK)


def optimisations(training: dict) -> list[str]:
    """Those that are on, as the command line has them."""
    named = {"attention": "eager", "optimizer_impl": None}
    flags = [f"--{name.replace('_', '-')} {training[name]}" for name in named if training[name] != named[name]]
    return flags + [f"--{name.replace('_', '-')}" for name in ("activation_checkpointing", "compile") if training[name]]


def limit(n: int) -> str:
    return f"{n:,}" if n < LONGEST - 1 else f"more than {LONGEST:,}"


def prediction_lines(document: dict) -> list[str]:
    """What a dry run prints."""
    training, bounds = document["training"], document["step_time_bounds"]
    shape = f"batch {training['batch_size']} x {training['seq_len']} tokens in {training['precision']}"
    shape += "".join(f", {name}" for name in optimisations(training))
    lines = [
        "Prediction: nothing was allocated or trained",
        f"{'Parameters:':<26}{document['parameters']:,}",
        f"{'FLOPs per step:':<26}{document['step_flops']:,} ({shape})",
        f"{'Peak memory:':<26}{document['peak_memory_mb']:,.1f} MB, in {document['peak_where']}",
    ]
    for name, size in document["memory_by_category_mb"].items():
        lines.append(f"  {name:<24}{size:>14,.1f} MB{size / document['peak_memory_mb']:>8.1%}")
    lines += ["", f"{'largest tensors at the peak':<58}{'dtype':>10}{'MB':>14}"]
    for row in document["largest_tensors"][:5]:
        lines.append(f"{tensor_name(row)[:57]:<58}{row['dtype']:>10}{row['bytes'] / MB:>14,.1f}")
    lines += ["", f"{'kept for the backward pass, all layers':<58}{'MB':>24}{'of it quadratic in S':>24}"]
    for row in document["kept_for_backward"]:
        lines.append(f"{row['component']:<58}{row['mb']:>24,.1f}{cell(row['quadratic_mb'], 24, ',.1f')}")
    has = f"{document['device_memory_mb']:,.0f} MB, {document['device_memory_source']}"
    if document["taken_by_process_mb"]:
        has += f", of which the process takes {document['taken_by_process_mb']:,.0f} MB without a model"
    lines += [
        "",
        f"{'Fits:':<26}{'yes' if document['fits'] else 'NO'}: {has}",
        f"{'Largest batch:':<26}{limit(document['max_batch_size'])} samples of {training['seq_len']:,} tokens",
        f"{'Longest sequence:':<26}{limit(document['max_seq_len'])} tokens, {training['batch_size']:,} samples",
    ]
    if training["compile"]:
        lines.append(
            "--compile: the peak is at most this, as fused kernels write less; what fits is what does without --compile"
        )
    if document["step_time_lower_bound_ms"] is None:
        return [*lines, f"{'Least time of a step:':<26}unknown: {document['step_time_lower_bound_ms_reason']}"]
    lines.append(f"{'Least time of a step:':<26}{document['step_time_lower_bound_ms']:,.2f} ms")
    if bounds["compute_ms"] is not None:
        lines.append(f"  {bounds['compute_ms']:,.2f} ms of products at the peak, {bounds['compute_peak']}")
    if bounds["bandwidth_ms"] is not None:
        moved = f"{bounds['least_bytes'] / MB:,.1f} MB that it cannot but move"
        lines.append(f"  {bounds['bandwidth_ms']:,.2f} ms for the {moved}, {bounds['bandwidth_peak']}")
    return lines


def refusal(config: TinyLlamaConfig, training: TrainingConfig, device: torch.device) -> str | None:
    """Why a run cannot fit, None if it can; what would is searched for only where it does not."""
    whole, taken = memory_of_a_rank(device)
    room = whole - taken - library_workspaces(device)
    uncompiled = replace(training, compile=False)  # which is predicted sooner
    for one in (uncompiled, training) if training.compile else (uncompiled,):
        if int(predicted_memory(config, one, device.type == "cuda").live_at_births().max()) <= room:
            return None
    return what_fits(memory_prediction(config, training, device))


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
    room = max(0, document["device_memory_mb"] - document["taken_by_process_mb"])
    needs = f"a step needs {document['peak_memory_mb']:,.0f} MB ({parts})"
    return f"{needs}, {document['device']['type']} has {room:,.0f} MB for it; {cure}"


def beside_measured(memory: dict, config: TinyLlamaConfig, training: TrainingConfig, device: torch.device) -> dict:
    """`predicted`: the peak of a step by prediction, for the ledger of a real one, and how far off it is."""
    try:
        predicted = predicted_memory(config, training, device.type == "cuda").document()
    except NotRehearsable as error:
        return with_reasons({"predicted": None}, str(error))
    kept, formula = kept_by_component(memory), kept_by_formula(config, training)
    rows = []
    for name in sorted({*kept, *formula}, key=lambda name: -kept.get(name, 0)):
        linear, quadratic = formula.get(name, (0, 0))
        sizes = {"bytes": kept.get(name, 0), "formula_bytes": linear + quadratic, "quadratic_bytes": quadratic}
        rows.append({"component": name} | sizes)
    document = {
        "peak_bytes": predicted["peak_bytes"],
        "error_percent": 100 * (predicted["peak_bytes"] / memory["peak_bytes"] - 1),
        "bytes_by_category": predicted["peak"]["bytes_by_category"],
        "kept_for_backward": rows,
    }
    return {"predicted": document}
