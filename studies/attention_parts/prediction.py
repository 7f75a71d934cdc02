"""What memory does a call of attention take?  Predicted tensor by tensor, from fake tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from analysis.work.interpreted_graphs import InterpretedGraphs
from harness.base.errors import first_line
from harness.base.ranges import trace_range
from harness.instruments.memory_tracker import MemoryTracker
from harness.schema import Document, Unknown, field
from studies.attention_parts.implementations import (
    ON_CPU,
    AttentionCall,
    AttentionInputs,
    forward_and_backward,
)
from tiny_llama_v1 import eager_attention

# As PyTorch's warnings begin.
KERNELS = {"flash": "Flash attention", "efficient": "Memory efficient", "cudnn": "CuDNN attention"}
PREDICTED = ("predicted_memory_bytes", "predicted_peak_bytes", "tensors")


class AttentionTensor(Document):
    name: str = field("of the tensor")
    shape: list[int] = field("of the tensor")
    dtype: str = field("data type")
    bytes: int = field("of it")


class NoKernel(NamedTuple):
    """The device has no kernel for a call."""

    reason: str


def predicted_or_refused(call: AttentionCall, device: torch.device) -> dict | NoKernel:
    """The predicted columns of a row, or why the device cannot compute it."""
    if call.backend and device.type == "cpu" and call.backend not in ON_CPU:
        return NoKernel("PyTorch has this kernel for GPUs only")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            return predicted_tensors(call, device)
        except RuntimeError as error:
            why = first_line(error)
    if call.backend:
        messages = [str(warning.message) for warning in caught]
        return NoKernel(reason_in(messages, call.backend) or why)
    # The other implementations can be measured even if they cannot run on fake tensors.
    return dict.fromkeys(PREDICTED, Unknown(why))


def predicted_tensors(call: AttentionCall, device: torch.device) -> dict:
    """The predicted columns of a row: live bytes at the start of the backward pass, at the peak,
    and the tensors of the first.

    Raises RuntimeError if the selected kernel does not support the inputs.
    """
    with FakeTensorMode(), call.selected_kernel():
        inputs = AttentionInputs(call, device)
        tracker = MemoryTracker(inputs, torch.optim.SGD(inputs.parameters()))
        function = call.function
        if call.implementation == "compiled":
            function = compiled_function(inputs, tracker)
        with tracker:
            with trace_range("forward"):
                output = inputs.attend(function)
            with trace_range("upstream gradient"):
                gradient = torch.ones_like(output)
            with trace_range("backward"):
                output.backward(gradient)
    timeline = tracker.timeline
    backward = next(phase for phase in timeline.phases if phase.name == "backward")
    live = timeline.live_at(backward.first)
    names = ["query", "key", "value"]
    if inputs.mask is not None:
        names.append("mask")
    for allocation in live[len(names) :]:
        names.append(allocation.where.removeprefix("attention."))
    tensors = []
    for name, allocation in zip(names, live, strict=True):
        tensors.append(
            AttentionTensor(
                name=name, shape=allocation.shape, dtype=allocation.dtype, bytes=allocation.bytes
            )
        )
    if device.type == "cpu" and call.implementation in ("manual", "eager"):
        # The factor of the scores, a Python number, is saved as a tensor too, created where no
        # dispatch mode sees it.
        tensors.append(AttentionTensor(name="scale", shape=[], dtype="float64", bytes=8))
    return {
        "predicted_memory_bytes": sum(tensor.bytes for tensor in tensors),
        "predicted_peak_bytes": int(timeline.live_bytes().sum(axis=0).max()),
        "tensors": tensors,
    }


def compiled_function(inputs: AttentionInputs, tracker: MemoryTracker) -> Callable:
    """Eager attention, compiled, for calls under the tracker."""
    graphs = InterpretedGraphs(tracker)
    compiled = torch.compile(eager_attention, backend=graphs.backend(), dynamic=False)
    forward_and_backward(compiled, inputs)
    inputs.zero_grad(set_to_none=True)
    return graphs.watched(compiled)


def reason_in(messages: list[str], backend: str) -> str:
    """Those of PyTorch's warnings that are about one backend: for each backend a headline, then the
    reasons."""
    reasons, is_ours = [], False
    for text in messages:
        message = text.split(" (Triggered")[0]
        if "kernel not used because" in message:
            is_ours = message.startswith(f"{KERNELS.get(backend)} kernel not used")
        elif is_ours:
            reasons.append(message)
    return "; ".join(dict.fromkeys(reasons))
