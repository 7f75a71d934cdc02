"""A training step on fake tensors: the model, the optimizer and the loop of a run, without memory or computation.

A step of any size can thus be analyzed in seconds, even on a machine that could not run it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode_temporarily

from harness.errors import UserError, first_line
from harness.timing import UntimedMeter, trace_range
from harness.workload import TrainingState, Workload

Watcher = TypeVar("Watcher", bound=AbstractContextManager)


class FakeRunError(UserError):
    """The model does something that fake tensors do not support, such as branching on a value."""


@contextlib.contextmanager
def explained_fake_run(what: str) -> Iterator[None]:
    """Turn whatever a model raises on fake tensors into a FakeRunError."""
    try:
        yield
    except Exception as error:  # any code of the model may raise here
        raise FakeRunError(f"{what} cannot run on fake tensors: {first_line(error)}") from error


def fake_step(workload: Workload, on_gpu: bool, watch: Callable[..., Watcher], world_size: int = 1) -> Watcher:
    """Run one step on fake tensors inside the context manager watch(model, optimizer), and return that.

    It is the second step of a run: the optimizer has its state.  on_gpu: optimizers default to foreach there, as in
    PyTorch.  world_size: with several ranks, each has buckets for its gradients.  Raises FakeRunError.
    """
    with FakeTensorMode(), explained_fake_run("the step"):
        state = workload.build(torch.device("cpu"))
        model, optimizer = state.model, state.optimizer
        for group in optimizer.param_groups:
            if on_gpu and group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        watcher = watch(model, optimizer)
        stream = workload.fake_batches()
        called = compiled_model(workload, state, watcher, next(stream)) if workload.compiled else model
        called = FakeDataParallel(called, model) if world_size > 1 else called
        # An enabled gradient scaler would read values.
        state = state._replace(model=called, scaler=torch.amp.GradScaler("cpu", enabled=False))
        workload.train(state, stream, 1, UntimedMeter(), UntimedMeter(watcher))
    return watcher


class FakeDataParallel:
    """Stands in for DistributedDataParallel with its gradients as views of buckets, which live as long as the model: a
    gradient is computed in a tensor of its own, copied to its bucket, and freed."""

    def __init__(self, called: Callable, model: torch.nn.Module):
        self.called, self.syncs = called, True
        for parameter in model.parameters():
            bucket = torch.zeros_like(parameter, requires_grad=False)
            parameter.register_post_accumulate_grad_hook(functools.partial(self._to_bucket, bucket))

    def _to_bucket(self, bucket: torch.Tensor, parameter: torch.Tensor) -> None:
        if self.syncs:
            bucket.copy_(parameter.grad)
            parameter.grad = bucket

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.syncs = False
        yield
        self.syncs = True

    def __call__(self, *arguments):
        return self.called(*arguments)


def fake_forward(workload: Workload, watch: Callable[..., Watcher]) -> Watcher:
    """Run one forward pass on fake tensors without gradients inside watch(model, optimizer), and return that."""
    with FakeTensorMode(), torch.no_grad(), explained_fake_run("the forward pass"):
        state = workload.build(torch.device("cpu"))
        watcher, batch = watch(state.model, state.optimizer), next(workload.fake_batches())
        called = compiled_model(workload, state, watcher, batch) if workload.compiled else state.model
        with watcher, trace_range("forward"), state.autocast:
            loss = workload.loss(called, batch)
            del loss
    return watcher


class CompiledCall:
    """Runs the graphs that torch.compile passes to its code generator operator by operator, so that a dispatch mode
    sees their tensors.

    They keep the same tensors for the backward pass as compiled code.  Intermediate results that fused kernels never
    write to memory are allocated here, so that the peak is an upper bound.
    """

    def __init__(self, compiled: Callable, warm_up: Callable, watching: TorchDispatchMode):
        """compiled(backend) returns the callable; warm_up(callable) runs it once, with its backward pass, because
        dynamo does not compile under another dispatch mode."""
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
            """Runs the graph, and frees each tensor after its last use, as generated code does."""
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


def compiled_model(workload: Workload, state: TrainingState, watching: TorchDispatchMode, batch) -> CompiledCall:
    def compiled(backend):
        state.model.compile(backend=backend, dynamic=False)
        return state.model

    def warm_up(called):
        with state.autocast:
            loss = workload.loss(called, batch)
        if loss.requires_grad:
            loss.backward()
            state.model.zero_grad(set_to_none=True)

    return CompiledCall(compiled, warm_up, watching)


@contextlib.contextmanager
def pushed(mode: TorchDispatchMode) -> Iterator[None]:
    """Pushes an active mode onto the stack again, without the __enter__ of its class."""
    TorchDispatchMode.__enter__(mode)
    try:
        yield
    finally:
        TorchDispatchMode.__exit__(mode, None, None, None)
