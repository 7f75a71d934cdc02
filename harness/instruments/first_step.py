"""What the first step of a run does with each parameter: its gradient, and whether the optimizer
moves it."""

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _disable_current_modes

from harness.base.ranges import range_observers
from harness.instruments.audit import FirstStep
from harness.instruments.memory_tracker import local_part
from harness.instruments.rounding import is_narrow, lost_updates, type_name


class FirstStepAudit:
    """Reads gradients before the optimizer's phase, and two numbers of each parameter before and
    after it.

    A context for the first step; it is one of the `range_observers`, which are told of phases.  Of
    each parameter it looks at the elements with the largest and the smallest gradient, which must
    move: it copies no tensor, so the peak of memory stays what it was.  Where one does not, it
    looks at what the optimizer would have added: a narrow type may round it away.  Of parameters in
    shards every rank looks at its own part, and the ranks add up.
    """

    def __init__(self, model: nn.Module, scaler: torch.amp.GradScaler):
        self.model, self.scaler = model, scaler
        self.result: FirstStep | None = None
        self._trained: list[
            str
        ] = []  # names: which ask for a gradient may change within a step of a file's own
        self._ranges: list[str] = []
        self._seen: dict[str, tuple[Tensor, ...]] = {}
        self._lost: dict[
            str, Tensor
        ] = {}  # whether rounding hides the last update of these two numbers
        self._owned: set[str] = set()  # names: an optimizer has stepped with them
        self._found: Tensor | None = None  # [parameters, 7], of the optimizer phases so far

    def __enter__(self) -> None:
        self._trained = [name for name, p in self.model.named_parameters() if p.requires_grad]
        self._hook = register_optimizer_step_post_hook(self._after_step)
        range_observers.append(self)

    def __exit__(self, *exception) -> None:
        range_observers.remove(self)
        self._hook.remove()

    def range_push(self, name: str) -> None:
        self._ranges.append(name)
        if name == "optimizer":
            with unobserved():
                self._read_gradients()

    def range_pop(self) -> None:
        if self._ranges.pop() == "optimizer":
            with unobserved():
                self.result = self._first_step()

    def _read_gradients(self) -> None:
        """Of each gradient the norm, and its largest and smallest element with what the parameter
        is there."""
        self._scale = self.scaler.get_scale() if self.scaler.is_enabled() else 1.0
        parameters = dict(self.model.named_parameters())
        for name in self._trained:
            parameter = parameters[name]
            gradient = None if parameter.grad is None else local_part(parameter.grad).reshape(-1)
            if gradient is None or not len(gradient):  # none, or this rank has no row of it
                continue
            ends = torch.stack((gradient.argmax(), gradient.argmin()))
            wide = torch.promote_types(
                gradient.dtype, torch.float32
            )  # the squares of fp16 overflow
            norm = torch.linalg.vector_norm(gradient, dtype=wide)
            self._seen[name] = ends, gradient[ends], norm, local_part(parameter).reshape(-1)[ends]

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Gradients and state are there, as the optimizer has just used them."""
        if not self._seen:
            return
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        parameters = dict(self.model.named_parameters())
        with unobserved():
            for name, (ends, _, _, before) in self._seen.items():
                parameter = parameters[name]
                if id(parameter) not in groups:
                    continue
                self._owned.add(name)
                lost = lost_updates(optimizer, groups[id(parameter)], parameter, before, ends)
                if lost is not None:
                    self._lost[name] = lost

    def _first_step(self) -> FirstStep:
        parameters = dict(self.model.named_parameters())
        trained = [parameters[name] for name in self._trained]
        sharded = any(local_part(p) is not p for p in trained)
        # Of each parameter: has a gradient, squared norm, not zero, not finite, moved, update told,
        # not lost.
        rows = []
        for name, parameter in zip(self._trained, trained, strict=True):
            if name not in self._seen:
                rows.append(torch.zeros(7, device=local_part(parameter).device))
                continue
            ends, values, norm, before = self._seen[name]
            moved = (local_part(parameter).reshape(-1)[ends] != before).any()
            finite = norm.isfinite() & values.isfinite().all()
            told = torch.full_like(moved, name in self._lost)
            kept = told & ~self._lost.get(name, told)
            row = (ends[0] >= 0, norm**2, values.any(), ~finite, moved, told, kept)
            rows.append(torch.stack([column.float() for column in row]))
        self._seen.clear()
        self._lost.clear()
        found = torch.stack(rows)
        if sharded:
            torch.distributed.all_reduce(found)
        if (
            self._found is not None
        ):  # a step of a file's own may have several: what holds after one of them counts
            norms = torch.where(found[:, 0] > 0, found[:, 1], self._found[:, 1])
            found = torch.maximum(found, self._found)
            found[:, 1] = norms
        self._found = found
        frozen = [name for name in parameters if name not in self._trained]
        result = FirstStep(frozen=frozen, trained_elements=sum(p.numel() for p in trained))
        for name, row in zip(self._trained, found.tolist(), strict=True):
            has, square, not_zero, not_finite, moved, told, kept = row
            if not has:
                result.missing.append(name)
                continue
            result.norms[name] = math.sqrt(square) / self._scale if not not_finite else math.nan
            if not_finite:
                result.non_finite.append(name)
            elif not not_zero:
                result.zero.append(name)
            elif not moved and told and not kept:
                result.rounded[name] = type_name(parameters[name])
            elif not moved and not told and name in self._owned and is_narrow(parameters[name]):
                result.untold[name] = type_name(parameters[name])
            elif not moved:
                result.unmoved.append(name)
        if (
            result.non_finite and self.scaler.is_enabled()
        ):  # the scale was too large: so it is lowered, and no fault
            result.non_finite, result.unmoved, result.skipped = [], [], True
            result.rounded, result.untold = {}, {}
        return result


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Not seen by memory trackers and FLOP counters, a part of its own in a trace."""
    with _disable_current_modes(), torch.no_grad(), torch.profiler.record_function("audit"):
        yield
