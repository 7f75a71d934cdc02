"""What does attention alone cost?  Memory by fake tensors, and in a new process time, memory and
the kernel."""

import warnings
from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from analysis.work.interpreted_graphs import InterpretedGraphs
from harness.base.errors import first_line
from harness.base.ranges import trace_range
from harness.instruments.compilation import compile_and_time
from harness.instruments.memory_tracker import MemoryTracker
from harness.machine.clock import elapsed_ms, mark
from harness.machine.devices import choose_device, set_matmul_precision, synchronize
from harness.machine.workspaces import workspace_bytes
from harness.schema import unknown
from studies.attention.implementations import (
    ON_CPU,
    AttentionInputs,
    backend_of,
    function_of,
    selected_kernel,
)
from studies.engine.columns import time_statistics
from studies.engine.isolation import cold_compiler
from tiny_llama_v1 import eager_attention

# As PyTorch's warnings begin.
KERNELS = {"flash": "Flash attention", "efficient": "Memory efficient", "cudnn": "CuDNN attention"}
PREDICTED_COLUMNS = ("predicted_memory_bytes", "predicted_peak_bytes", "tensors")


# ---- Prediction ----------------------------------------------------------------------------------


def predicted_or_refused(spec: dict, device: torch.device) -> dict | str:
    """The prediction, or why the device has no kernel for these inputs."""
    backend = backend_of(spec)
    if backend and device.type == "cpu" and backend not in ON_CPU:
        return "PyTorch has this kernel for GPUs only"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            return predicted_tensors(spec, device)
        except RuntimeError as error:
            why = first_line(error)
    if backend:
        return reason_in([str(warning.message) for warning in caught], backend) or why
    # The other implementations can be measured even if they cannot run on fake tensors.
    return unknown(why, *PREDICTED_COLUMNS)


def predicted_tensors(spec: dict, device: torch.device) -> dict:
    """Live bytes at the start of the backward pass, tensor by tensor, and at the peak, from fake
    tensors.

    Raises RuntimeError if the selected kernel does not support the inputs.
    """
    with FakeTensorMode(), selected_kernel(spec):
        inputs = AttentionInputs(spec, device)
        tracker = MemoryTracker(inputs, torch.optim.SGD(inputs.parameters()))
        function = (
            compiled_call(inputs, tracker)
            if spec["implementation"] == "compiled"
            else function_of(spec)
        )
        with tracker:
            with trace_range("forward"):
                output = inputs.attend(function)
            with trace_range("upstream gradient"):
                gradient = torch.ones_like(output)
            with trace_range("backward"):
                output.backward(gradient)
    timeline = tracker.timeline
    live = timeline.live_at(
        next(phase.first for phase in timeline.phases if phase.name == "backward")
    )
    names = ["query", "key", "value"] + ([] if inputs.mask is None else ["mask"])
    names += [allocation.where.removeprefix("attention.") for allocation in live[len(names) :]]
    tensors = [
        {"name": name, "shape": a.shape, "dtype": a.dtype, "bytes": a.bytes}
        for name, a in zip(names, live, strict=True)
    ]
    if device.type == "cpu" and spec["implementation"] in ("manual", "eager"):
        # The factor of the scores, a Python number, is saved as a tensor too, created where no
        # dispatch mode sees it.
        tensors.append({"name": "scale", "shape": [], "dtype": "float64", "bytes": 8})
    values = (
        sum(tensor["bytes"] for tensor in tensors),
        int(timeline.live_bytes().sum(axis=0).max()),
        tensors,
    )
    return dict(zip(PREDICTED_COLUMNS, values, strict=True))


def compiled_call(inputs: AttentionInputs, tracker: MemoryTracker) -> Callable:
    """The compiled function, for calls under the tracker."""
    graphs = InterpretedGraphs(tracker)
    compiled = torch.compile(eager_attention, backend=graphs.backend(), dynamic=False)
    forward_and_backward(compiled, inputs)
    inputs.zero_grad(set_to_none=True)
    return graphs.watched(compiled)


def forward_and_backward(function: Callable, inputs: AttentionInputs) -> None:
    output = inputs.attend(function)
    output.backward(torch.ones_like(output))
    synchronize(output.device)


def reason_in(messages: list[str], backend: str) -> str:
    """Those of PyTorch's warnings that are about one backend:
    for each backend a headline, then the reasons."""
    reasons, ours = [], False
    for message in (text.split(" (Triggered")[0] for text in messages):
        if "kernel not used because" in message:
            ours = message.startswith(f"{KERNELS.get(backend)} kernel not used")
        elif ours:
            reasons.append(message)
    return "; ".join(dict.fromkeys(reasons))


# ---- Measurement, in a new process ---------------------------------------------------------------


def measure_attention(spec: dict, device_name: str, repetitions: int, warmup_steps: int) -> dict:
    """The measured columns of a row: memory before the backward pass,
    times, and the kernel that ran."""
    device = choose_device(device_name)
    torch.manual_seed(0)
    set_matmul_precision("fp32")
    workspace = workspace_bytes(device, spec["dtype"])
    function, compile_s = function_of(spec), None
    with selected_kernel(spec):
        if spec["implementation"] == "compiled":
            function, compile_s = compile_attention(function, spec, device)
        memory = memory_and_kernel(function, spec, device, workspace)
        inputs = AttentionInputs(spec, device)
        forward_ms, backward_ms = pass_times(function, inputs, repetitions, warmup_steps)
    return {
        "workspace_bytes": workspace,
        "compile_s": compile_s,
        "repetitions": repetitions,
        **memory,
        **time_statistics("forward", forward_ms),
        **time_statistics("backward", backward_ms),
    }


def compile_attention(
    function: Callable, spec: dict, device: torch.device
) -> tuple[Callable, float]:
    """The compiled function, and the seconds that the compiler took."""
    inputs, called = AttentionInputs(spec, device), function

    def compile_it() -> None:
        nonlocal called
        called = torch.compile(function, dynamic=False)

    with cold_compiler():
        times = compile_and_time(
            lambda: forward_and_backward(called, inputs), compile_it, device, "attention"
        )
    return called, times.compile_s


def memory_and_kernel(function: Callable, spec: dict, device: torch.device, workspace: int) -> dict:
    """Bytes in use before the backward pass, and the operator that computed the forward pass.

    On a GPU, bytes allocated without library workspaces, and how much of them is the allocator's
    rounding; on a CPU, allocations less frees, as torch.profiler records them.
    """
    on_gpu = device.type == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=kinds, profile_memory=True) as recorded:
        inputs = AttentionInputs(spec, device)
        output = inputs.attend(function)
        gradient = torch.ones_like(output)
    if on_gpu:
        used_bytes, stats = (
            torch.cuda.memory_allocated(device) - workspace,
            torch.cuda.memory_stats(device),
        )
        rounding = stats["allocated_bytes.all.current"] - stats["requested_bytes.all.current"]
    else:
        events = recorded.profiler.kineto_results.events()
        used_bytes, rounding = (
            sum(event.nbytes() for event in events if event.name() == "[memory]"),
            0,
        )
    output.backward(gradient)
    synchronize(device)
    kernel = kernel_in([event.key for event in recorded.key_averages()])
    return {"memory_bytes": used_bytes, "rounding_bytes": rounding, "kernel": kernel}


def kernel_in(names: list[str]) -> str | None:
    """A fused operator if there is one, else `generated code`, else the matmul operator."""
    for part in (
        "_attention_forward",
        "cudnn_attention",
        "flash_attention_for_cpu",
        "_attention_math",
    ):
        for name in names:
            if part in name and "backward" not in name:
                return name
    if any("CompiledFxGraph" in name for name in names):
        return "generated code"
    matmuls = [name for name in names if name in ("aten::bmm", "aten::baddbmm", "aten::mm")]
    return matmuls[0] if matmuls else None


def pass_times(
    function: Callable, inputs: AttentionInputs, repetitions: int, warmup_steps: int
) -> tuple[list, list]:
    """Milliseconds of each forward and backward pass; a GPU's events are read after the last."""
    device = inputs.query.device
    on_gpu, gradient, marks = device.type == "cuda", None, []
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
    forward_ms = [elapsed_ms(start, end) for start, end, _, _ in timed]
    return forward_ms, [elapsed_ms(start, end) for _, _, start, end in timed]
