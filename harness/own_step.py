"""The phases of a training step that is the user's own: found while it runs, from what it calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor, nn

from harness.timing import trace_range


class BackwardReached(BaseException):
    """Ends a step of the user's where its backward pass would begin; no `except Exception` of its own catches it."""

    def __init__(self, loss: Tensor):
        super().__init__()
        self.loss = loss


def loss_of_step(step: Callable, *arguments) -> Tensor:
    """What the step calls backward() on, without the backward pass.  Raises ValueError if it calls none."""

    def stop(tensors, *rest, **options):
        raise BackwardReached(tensors if isinstance(tensors, Tensor) else tensors[0])

    with mock.patch.object(torch.autograd, "backward", stop):  # Tensor.backward() calls it too
        try:
            step(*arguments)
        except BackwardReached as reached:
            return reached.loss
    raise ValueError("the step calls no backward()")


class StepPhases:
    """Around one step of the user's own: the forward pass until backward() is called and whenever the model is called
    again, the backward pass within it, the optimizer's phase from its step() on."""

    def __init__(self, meter, instruments, step: int, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.meter, self.instruments, self.step = meter, instruments, step
        self.model, self.optimizer = model, optimizer
        self._phase: str | None = None
        self._ends = contextlib.ExitStack()  # of the phase
        self._hooks = contextlib.ExitStack()

    def enter(self, phase: str | None) -> None:
        """Leave the phase that runs.  None: what comes until the next one counts with that, as clipping does with the
        optimizer."""
        if phase == self._phase:
            return
        self._ends.close()
        self._phase = phase
        if phase:
            self._ends.enter_context(self.meter.phase(phase))
        if phase == "forward":
            self._ends.enter_context(self.instruments.forward(self.step))
            self._ends.enter_context(trace_range("loss"))

    def __enter__(self) -> None:
        backward = torch.autograd.backward

        def in_its_phase(*arguments, **options) -> None:
            self.enter("backward")
            backward(*arguments, **options)
            self.enter(None)

        self._hooks.enter_context(mock.patch.object(torch.autograd, "backward", in_its_phase))
        for handle in (
            self.model.register_forward_pre_hook(lambda *call: self.enter("forward"), prepend=True),
            self.optimizer.register_step_pre_hook(lambda *call: self.enter("optimizer")),
        ):
            self._hooks.callback(handle.remove)
        self.enter("forward")

    def __exit__(self, kind, error, trace) -> None:
        self._hooks.close()
        if error is None and self._phase is None:
            self.enter("optimizer")  # what followed the backward pass
        self._ends.close()
