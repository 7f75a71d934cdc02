"""How much memory does attention need before its backward pass?  From fake tensors, tensor by tensor."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from analysis.work.interpreted_graphs import InterpretedGraphs
from harness.base.errors import first_line
from harness.base.ranges import trace_range
from harness.instruments.memory_tracker import MemoryTracker
from studies.attention.implementations import (
    ON_CPU,
    AttentionInputs,
    backend_of,
    forward_and_backward,
    function_of,
    selected_kernel,
)
from tiny_llama_v1 import eager_attention

NOT_USED = {  # how PyTorch's warning about each kernel begins
    "flash": "Flash attention kernel not used",
    "efficient": "Memory efficient kernel not used",
    "cudnn": "CuDNN attention kernel not used",
}
COLUMNS = ("predicted_memory_bytes", "predicted_peak_bytes", "tensors")


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
    return dict.fromkeys(COLUMNS) | {f"{name}_reason": why for name in COLUMNS}


def predicted_tensors(spec: dict, device: torch.device) -> dict:
    """Live bytes at the start of the backward pass, tensor by tensor, and at the peak, from fake tensors.

    Raises RuntimeError if the selected kernel does not support the inputs.
    """
    with FakeTensorMode(), selected_kernel(spec):
        inputs = AttentionInputs(spec, device)
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
    values = (sum(tensor["bytes"] for tensor in tensors), int(timeline.live_bytes().sum(axis=0).max()), tensors)
    return dict(zip(COLUMNS, values, strict=True))


def compiled_call(inputs: AttentionInputs, tracker: MemoryTracker) -> Callable:
    """The compiled function, for calls under the tracker."""
    graphs = InterpretedGraphs(tracker)
    compiled = torch.compile(eager_attention, backend=graphs.backend(), dynamic=False)
    forward_and_backward(compiled, inputs)
    inputs.zero_grad(set_to_none=True)
    return graphs.watched(compiled)


def reason_in(messages: list[str], backend: str) -> str:
    """Those of PyTorch's warnings that are about one backend: for each backend a headline, then the reasons."""
    reasons, ours = [], False
    for message in (text.split(" (Triggered")[0] for text in messages):
        if "kernel not used because" in message:
            ours = message.startswith(NOT_USED.get(backend, "no backend"))
        elif ours:
            reasons.append(message)
    return "; ".join(dict.fromkeys(reasons))
