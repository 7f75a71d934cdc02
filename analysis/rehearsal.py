"""A training step rehearsed on tensors without data: the loop, the model and the optimizer of a run, whatever its size.

Nothing is allocated or computed, so what a step would do can be watched in seconds, before it runs or where it never
could.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tiny_llama_v1 import (
    PRECISIONS,
    TinyLlamaConfig,
    TinyLlamaModel,
    TrainingConfig,
    UserError,
    first_line,
    trace_range,
    train,
)


class NotRehearsable(UserError):
    """The model does something that tensors without data cannot: nothing can be predicted of it."""


class Rehearsal:
    """Stands where the loop has its timer and its instruments: names the phases, and may watch the step."""

    def __init__(self, watching: AbstractContextManager | None = None):
        self.watching = watching or contextlib.nullcontext()
        self.losses: list[torch.Tensor] = []

    def step(self, step: int) -> AbstractContextManager:
        return self.watching

    def phase(self, name: str) -> AbstractContextManager:
        return trace_range(name)

    def forward(self, step: int) -> AbstractContextManager:
        return contextlib.nullcontext()

    def add_loss(self, loss: torch.Tensor) -> None:
        self.losses.append(loss.detach())  # a run keeps those of a step's micro-batches until it reads them


def rehearse(
    config: TinyLlamaConfig, training: TrainingConfig, on_gpu: bool, watch: Callable[..., AbstractContextManager]
):
    """Run one step under watch(model, optimizer), the second of a run: the optimizer has its state; returns the watch.

    on_gpu: AdamW works on lists of tensors there, and one by one on a CPU.
    """
    with FakeTensorMode():
        model = TinyLlamaModel(config)
        model.activation_checkpointing = training.activation_checkpointing
        optimizer = torch.optim.AdamW(model.parameters(), lr=training.learning_rate, foreach=on_gpu)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dtype = PRECISIONS[training.precision]
        autocast = torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        instrument = watch(model, optimizer)
        once = TrainingConfig(num_steps=1, gradient_accumulation_steps=training.gradient_accumulation_steps)
        stream = batches_without_data(training)
        try:
            train(model, optimizer, scaler, autocast, stream, once, Rehearsal(), Rehearsal(instrument))
        except Exception as error:  # a model that was changed may do what only data can answer
            raise NotRehearsable(f"the step cannot be rehearsed without data: {first_line(error)}") from error
    return instrument


def batches_without_data(training: TrainingConfig) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """As the batches of a run: two copies of windows into one tensor of tokens."""
    micro_batch_size = training.batch_size // training.gradient_accumulation_steps
    while True:
        tokens = torch.zeros(micro_batch_size, training.seq_len + 1, dtype=torch.int64)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
