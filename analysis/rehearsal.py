"""A training step rehearsed on tensors without data: the loop, the model and the optimizer of a run, whatever its size.

Nothing is allocated or computed, so what a step would do can be watched in seconds, before it runs or where it never
could.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode_temporarily

from tiny_llama_v1 import (
    TinyLlamaConfig,
    TrainingConfig,
    UserError,
    build,
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

    on_gpu: AdamW works on lists of tensors there, and one by one on a CPU, if it is not told.
    """
    if on_gpu and training.optimizer_impl is None:
        training = replace(training, optimizer_impl="foreach")
    with FakeTensorMode():
        model, optimizer, _, autocast = build(config, training, torch.device("cpu"))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scaler = torch.amp.GradScaler("cpu", enabled=False)  # it looks at data
        instrument = watch(model, optimizer)
        once = TrainingConfig(num_steps=1, gradient_accumulation_steps=training.gradient_accumulation_steps)
        stream = batches_without_data(training)
        try:
            called = compiled_model(model, instrument, autocast, next(stream)) if training.compile else model
            train(called, optimizer, scaler, autocast, stream, once, Rehearsal(), Rehearsal(instrument))
        except Exception as error:  # a model that was changed may do what only data can answer
            raise NotRehearsable(f"the step cannot be rehearsed without data: {first_line(error)}") from error
    return instrument


def rehearse_forward(config: TinyLlamaConfig, training: TrainingConfig, watch: Callable[..., AbstractContextManager]):
    """Run one forward pass without gradients or optimizer, as inference is, under watch(model, optimizer)."""
    with FakeTensorMode(), torch.no_grad():
        model, optimizer, _, autocast = build(config, training, torch.device("cpu"))
        instrument, batch = watch(model, optimizer), next(batches_without_data(training))
        try:
            called = compiled_model(model, instrument, autocast, batch) if training.compile else model
            with instrument, trace_range("forward"), autocast:
                loss = called(*batch)[1]
                del loss
        except Exception as error:
            raise NotRehearsable(f"the pass cannot be rehearsed without data: {first_line(error)}") from error
    return instrument


class CompiledCall:
    """Stands where a compiled model or function is called: the graphs that torch.compile would hand to its code
    generator, run operator by operator, so that the mode which watches the step sees what they make.

    What they keep for the backward pass is what the compiled code keeps.  What its fused kernels never write counts
    here as if they did: the peak is an upper bound.
    """

    def __init__(self, compiled: Callable, warm_up: Callable, watching: TorchDispatchMode):
        """compiled(backend) gives what is called; warm_up(it) calls it, and its backward pass, once: compiled before
        anything watches, because dynamo leaves alone what runs under a mode of others."""
        from functorch.compile import min_cut_rematerialization_partition
        from torch._dynamo.backends.common import aot_autograd
        from torch._inductor.decomposition import select_decomp_table

        self.watching, self.inside = watching, False
        torch.compiler.reset()
        self.called = compiled(
            aot_autograd(
                fw_compiler=self.graph_runner,
                bw_compiler=self.graph_runner,
                partition_fn=min_cut_rematerialization_partition,
                decompositions=select_decomp_table(),
            )
        )
        warm_up(self.called)

    def graph_runner(self, graph: torch.fx.GraphModule, inputs):
        def run(arguments: list):
            """Frees each tensor after its last use, as generated code does."""
            with pushed(self.watching) if self.inside else contextlib.nullcontext():
                return torch.fx.Interpreter(graph).boxed_run(arguments)

        run._boxed_call = True
        return run

    def __call__(self, *arguments):
        with _pop_mode_temporarily():
            self.inside = True
            try:
                return self.called(*arguments)
            finally:
                self.inside = False


def compiled_model(model: torch.nn.Module, watching: TorchDispatchMode, autocast, batch) -> CompiledCall:
    def compiled(backend):
        model.compile(backend=backend, dynamic=False)
        return model

    def warm_up(called):
        with autocast:
            loss = called(*batch)[1]
        if loss.requires_grad:
            loss.backward()
            model.zero_grad(set_to_none=True)

    return CompiledCall(compiled, warm_up, watching)


@contextlib.contextmanager
def pushed(mode: TorchDispatchMode) -> Iterator[None]:
    """A mode that is entered already, put on top again; its own bookkeeping of entering is not for this."""
    TorchDispatchMode.__enter__(mode)
    try:
        yield
    finally:
        TorchDispatchMode.__exit__(mode, None, None, None)


def batches_without_data(training: TrainingConfig) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """As the batches of a run: two copies of windows into one tensor of tokens."""
    micro_batch_size = training.batch_size // training.gradient_accumulation_steps
    while True:
        tokens = torch.zeros(micro_batch_size, training.seq_len + 1, dtype=torch.int64)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
