"""One row of the attention benchmark: predicted and measured memory, and the time of both passes."""

from __future__ import annotations

import contextlib
import statistics
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from analysis.work.fake_step import CompiledCall
from harness.base.errors import first_line
from harness.base.ranges import trace_range
from harness.instruments.memory_tracker import MemoryTracker
from harness.machine.clock import elapsed_ms, mark, time_synced
from harness.machine.devices import PRECISIONS, choose_device, set_matmul_precision, synchronize
from harness.machine.workspaces import workspace_bytes
from studies.engine.sweep import cold_compiler, time_statistics, unique
from tiny_llama_v1 import eager_attention, fused_attention, repeat_kv

IMPLEMENTATIONS = ("manual", "eager", "compiled", "sdpa")
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
ON_CPU = ("flash", "math")  # the others exist only for GPUs
NOT_USED = {  # how PyTorch's warning about each kernel begins
    "flash": "Flash attention kernel not used",
    "efficient": "Memory efficient kernel not used",
    "cudnn": "CuDNN attention kernel not used",
}
PREDICTED = ("predicted_memory_bytes", "predicted_peak_bytes", "tensors")

# A spec is a dictionary of implementation, dtype, batch_size, n_heads, d_head, seq_len and causal.


def manual_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Eager attention with softmax written out: exp and quotient, [B, H, S, S] each, are saved for the backward pass.

    The maximum that keeps exp in range cancels in the quotient, so it needs no gradient.
    """
    with trace_range("attention.scores"):
        scores = (q @ repeat_kv(k, q.shape[1]).transpose(2, 3)) * q.shape[-1] ** -0.5  # [B, H, S, S]
        scores = scores if mask is None else scores + mask
        scores = scores - scores.detach().amax(-1, keepdim=True)
    with trace_range("attention.exp"):
        scores = scores.exp()
    with trace_range("attention.sum"):
        total = scores.sum(-1, keepdim=True)  # [B, H, S, 1]
    with trace_range("attention.quotient"):
        weights = scores / total
    with trace_range("attention.weighted_sum"):
        return weights @ repeat_kv(v, q.shape[1])


def names_of(wanted: list[str], device: torch.device) -> list[str]:
    """The implementations asked for, with sdpa replaced by every kernel that PyTorch has for the device."""
    offered = [f"sdpa-{name}" for name in (ON_CPU if device.type == "cpu" else BACKENDS)]
    return unique([name for one in wanted for name in (offered if one == "sdpa" else [one])])


def function_of(spec: dict) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    """(q, k, v, mask) -> output; for `compiled`, the function to compile."""
    if spec["implementation"] == "manual":
        return manual_attention
    if spec["implementation"] in ("eager", "compiled"):
        return eager_attention
    return lambda q, k, v, mask: fused_attention(q, k, v, spec["causal"])


def backend_of(spec: dict) -> str | None:
    """The backend of scaled_dot_product_attention that the implementation names."""
    name = spec["implementation"].removeprefix("sdpa-")
    return name if name in BACKENDS else None


def selected_kernel(spec: dict) -> contextlib.AbstractContextManager:
    """A context in which scaled_dot_product_attention may use one backend only."""
    backend = backend_of(spec)
    return sdpa_kernel(BACKENDS[backend]) if backend else contextlib.nullcontext()


class Inputs(nn.Module):
    """Query, key, value [B, H, S, E] and, unless a fused kernel applies it, the causal mask [S, S]."""

    def __init__(self, spec: dict, device: torch.device):
        super().__init__()
        shape = [spec[name] for name in ("batch_size", "n_heads", "seq_len", "d_head")]
        options = {"device": device, "dtype": PRECISIONS[spec["dtype"]]}
        self.query, self.key, self.value = (nn.Parameter(torch.randn(shape, **options)) for _ in range(3))
        mask = None
        if spec["causal"] and not backend_of(spec):
            mask = torch.full((spec["seq_len"],) * 2, float("-inf"), **options).triu_(1)
        self.register_buffer("mask", mask)

    def attend(self, function: Callable) -> Tensor:
        return function(self.query, self.key, self.value, self.mask)


# ---- Prediction ----------------------------------------------------------------------------------------------------


def predicted(spec: dict, device: torch.device) -> dict:
    """Live bytes at the start of the backward pass, tensor by tensor, and at the peak, from fake tensors.

    Raises RuntimeError if the selected kernel does not support the inputs.
    """
    with FakeTensorMode(), selected_kernel(spec):
        inputs = Inputs(spec, device)
        tracker = MemoryTracker(inputs, torch.optim.SGD(inputs.parameters()))
        function = compiled_call(inputs, tracker) if spec["implementation"] == "compiled" else function_of(spec)
        with tracker:
            with trace_range("forward"):
                output = inputs.attend(function)
            with trace_range("upstream gradient"):
                gradient = torch.ones_like(output)
            with trace_range("backward"):
                output.backward(gradient)
    timeline = tracker.timeline
    live = timeline.live_at(next(phase.first for phase in timeline.phases if phase.name == "backward"))
    names = ["query", "key", "value"] + ([] if inputs.mask is None else ["mask"])
    names += [allocation.where.removeprefix("attention.") for allocation in live[len(names) :]]
    tensors = [
        {"name": name, "shape": a.shape, "dtype": a.dtype, "bytes": a.bytes}
        for name, a in zip(names, live, strict=True)
    ]
    if device.type == "cpu" and spec["implementation"] in ("manual", "eager"):
        # The factor of the scores, a Python number, is saved as a tensor too, created where no dispatch mode sees it.
        tensors.append({"name": "scale", "shape": [], "dtype": "float64", "bytes": 8})
    return {
        "predicted_memory_bytes": sum(tensor["bytes"] for tensor in tensors),
        "predicted_peak_bytes": int(timeline.live_bytes().sum(axis=0).max()),
        "tensors": tensors,
    }


def compiled_call(inputs: Inputs, tracker: MemoryTracker) -> CompiledCall:
    def warm_up(called: Callable) -> None:
        forward_and_backward(called, inputs)
        inputs.zero_grad(set_to_none=True)

    def compiled(backend: Callable) -> Callable:
        return torch.compile(eager_attention, backend=backend, dynamic=False)

    return CompiledCall(compiled, warm_up, tracker)


def predicted_or_refused(spec: dict, device: torch.device) -> dict | str:
    """The prediction, or why the device has no kernel for these inputs."""
    backend = backend_of(spec)
    if backend and device.type == "cpu" and backend not in ON_CPU:
        return "PyTorch has this kernel for GPUs only"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            return predicted(spec, device)
        except RuntimeError as error:
            why = first_line(error)
    if backend:
        return reason_in([str(one.message) for one in caught], backend) or why
    # The other implementations can be measured even if they cannot run on fake tensors.
    return dict.fromkeys(PREDICTED) | {f"{name}_reason": why for name in PREDICTED}


def reason_in(messages: list[str], backend: str) -> str:
    """Those of PyTorch's warnings that are about one backend: for each backend a headline, then the reasons."""
    reasons, ours = [], False
    for message in (text.split(" (Triggered")[0] for text in messages):
        if "kernel not used because" in message:
            ours = message.startswith(NOT_USED.get(backend, "no backend"))
        elif ours:
            reasons.append(message)
    return "; ".join(unique(reasons))


# ---- Measurement, in a new process ---------------------------------------------------------------------------------


def measure(spec: dict, device_name: str, repetitions: int, warmup_steps: int) -> dict:
    """The measured columns of a row: memory before the backward pass, times, and the kernel that ran."""
    device = choose_device(device_name)
    torch.manual_seed(0)
    set_matmul_precision("fp32")
    workspace = workspace_bytes(device, spec["dtype"])
    function = function_of(spec)
    row: dict = {"workspace_bytes": workspace, "compile_s": None, "repetitions": repetitions}
    with selected_kernel(spec):
        if spec["implementation"] == "compiled":
            function, first_s = compile_attention(function, spec, device)
        row |= memory_and_kernel(function, spec, device, workspace)
        forward_ms, backward_ms = pass_times(function, Inputs(spec, device), repetitions, warmup_steps)
    if spec["implementation"] == "compiled":  # the first call includes one pass
        pass_ms = statistics.median(forward_ms) + statistics.median(backward_ms)
        row["compile_s"] = max(0.0, first_s - pass_ms / 1e3)
    return row | time_statistics("forward", forward_ms) | time_statistics("backward", backward_ms)


def compile_attention(function: Callable, spec: dict, device: torch.device) -> tuple[Callable, float]:
    """The compiled function, and the seconds of its first forward and backward pass."""
    inputs = Inputs(spec, device)
    forward_and_backward(function, inputs)  # one-time initialization is not compile time
    function = torch.compile(function, dynamic=False)
    with cold_compiler():
        first_ms = time_synced(lambda: forward_and_backward(function, inputs), device)
    return function, first_ms / 1e3


def forward_and_backward(function: Callable, inputs: Inputs) -> None:
    output = inputs.attend(function)
    output.backward(torch.ones_like(output))
    synchronize(output.device)


def memory_and_kernel(function: Callable, spec: dict, device: torch.device, workspace: int) -> dict:
    """Bytes in use before the backward pass, and the operator that computed the forward pass.

    On a GPU, bytes allocated without library workspaces, and how much of them is the allocator's rounding; on a CPU,
    allocations less frees, as torch.profiler records them.
    """
    on_gpu = device.type == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=kinds, profile_memory=True) as recorded:
        inputs = Inputs(spec, device)
        output = inputs.attend(function)
        gradient = torch.ones_like(output)
    if on_gpu:
        used_bytes, stats = torch.cuda.memory_allocated(device) - workspace, torch.cuda.memory_stats(device)
        rounding = stats["allocated_bytes.all.current"] - stats["requested_bytes.all.current"]
    else:
        events = recorded.profiler.kineto_results.events()
        used_bytes, rounding = sum(event.nbytes() for event in events if event.name() == "[memory]"), 0
    output.backward(gradient)
    synchronize(device)
    kernel = kernel_in([event.key for event in recorded.key_averages()])
    return {"memory_bytes": used_bytes, "rounding_bytes": rounding, "kernel": kernel}


def kernel_in(names: list[str]) -> str | None:
    """A fused operator if there is one, else `generated code`, else the matmul operator."""
    for part in ("_attention_forward", "cudnn_attention", "flash_attention_for_cpu", "_attention_math"):
        if found := next((name for name in names if part in name and "backward" not in name), None):
            return found
    if any("CompiledFxGraph" in name for name in names):
        return "generated code"
    return next((name for name in names if name in ("aten::bmm", "aten::baddbmm", "aten::mm")), None)


def pass_times(function: Callable, inputs: Inputs, repetitions: int, warmup_steps: int) -> tuple[list, list]:
    """Milliseconds of each forward and backward pass; a GPU's events are read after the last one."""
    device = inputs.query.device
    on_gpu = device.type == "cuda"
    gradient, marks = None, []
    for _ in range(warmup_steps + repetitions):
        inputs.zero_grad(set_to_none=True)
        forward_starts = mark(on_gpu)
        output = inputs.attend(function)
        forward_ends = mark(on_gpu)
        gradient = torch.ones_like(output) if gradient is None else gradient
        backward_starts = mark(on_gpu)
        output.backward(gradient)
        marks.append((forward_starts, forward_ends, backward_starts, mark(on_gpu)))
        del output
    synchronize(device)
    timed = marks[warmup_steps:]
    return [elapsed_ms(a, b) for a, b, _, _ in timed], [elapsed_ms(c, d) for _, _, c, d in timed]
