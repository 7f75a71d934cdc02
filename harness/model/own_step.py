"""The phases of a training step that is the user's own: found while it runs, from what it calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor, nn

from harness.base.ranges import trace_range


class BackwardReached(BaseException):
    """Ends a step of the user's where its backward pass would begin; no `except Exception` of its own catches it."""

    def __init__(self, loss: Tensor):
        super().__init__()
        self.loss = loss


def loss_of_step(step: Callable, model: nn.Module, *arguments) -> Tensor:
    """What the step calls backward() on first, without the backward pass.  Raises ValueError if it calls none."""
    asked = [(parameter, parameter.requires_grad) for parameter in model.parameters()]

    def stop(tensors, *rest, **options):
        raise BackwardReached(tensors if isinstance(tensors, Tensor) else tensors[0])

    with mock.patch.object(torch.autograd, "backward", stop):  # Tensor.backward() calls it too
        try:
            step(model, *arguments)
        except BackwardReached as reached:
            return reached.loss
        finally:  # a network that is frozen while another one trains is not left so
            for parameter, asks in asked:
                parameter.requires_grad_(asks)
    raise ValueError("the step calls no backward()")


class StepPhases:
    """Around one step of the user's own: the forward pass until backward() is called and whenever the model is called
    again, the backward pass within it, the optimizer's phase from there on, with what is done to gradients before."""

    def __init__(self, meter, instruments, step: int, model: nn.Module):
        self.meter, self.instruments, self.step, self.model = meter, instruments, step, model
        self._phase: str | None = None
        self._ends = contextlib.ExitStack()  # of the phase
        self._hooks = contextlib.ExitStack()

    def enter(self, phase: str) -> None:
        """Leave the phase that runs."""
        if phase == self._phase:
            return
        self._ends.close()
        self._phase = phase
        self._ends.enter_context(self.meter.phase(phase))
        if phase == "forward":
            self._ends.enter_context(self.instruments.forward(self.step))
            self._ends.enter_context(trace_range("loss"))

    def __enter__(self) -> None:
        backward = torch.autograd.backward

        def in_its_phase(*arguments, **options) -> None:
            self.enter("backward")
            backward(*arguments, **options)
            self.enter("optimizer")

        self._hooks.enter_context(mock.patch.object(torch.autograd, "backward", in_its_phase))
        for module in called_first(self.model):
            compiled = module._compiled_call_impl
            if compiled:  # with the hooks that it had then: a new one would not be called, or compiled too
                self._hooks.enter_context(mock.patch.object(module, "_compiled_call_impl", self._before(compiled)))
            else:
                self._hooks.callback(module.register_forward_pre_hook(self._model_is_called, prepend=True).remove)
        self.enter("forward")

    def _before(self, compiled: Callable) -> Callable:
        def call(*arguments, **options):
            self._model_is_called()
            return compiled(*arguments, **options)

        return call

    def _model_is_called(self, *call: object) -> None:
        if self._phase != "backward":  # where checkpointed modules are called again
            self.enter("forward")

    def __exit__(self, *exception: object) -> None:
        self._hooks.close()
        self._ends.close()


def called_first(model: nn.Module) -> Iterator[nn.Module]:
    """The model; if it cannot be called itself, as an nn.ModuleDict of two networks, those in it."""
    if type(model).forward is not nn.Module.forward:
        yield model
        return
    for child in model.children():
        yield from called_first(child)
