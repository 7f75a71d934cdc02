"""What the first step of a run does with each parameter: its gradient, and whether the optimizer
moves it."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _disable_current_modes

from harness.base.ranges import range_observers
from harness.instruments.audit import FirstStep
from harness.instruments.memory_tracker import local_part
from harness.instruments.rounding import is_narrow, lost_updates, type_name


class Seen(NamedTuple):
    """What is read of a parameter's part on this rank before the optimizer's phase."""

    ends: Tensor  # [2]: where its gradient is largest and smallest
    gradients: Tensor  # [2]: the gradient there
    norm: Tensor  # 0-d, of the gradient
    weights: Tensor  # [2]: the parameter there


class Row(NamedTuple):
    """What the optimizer's phase did with a parameter: numbers that ranks add up, and of which the
    larger counts where a step has several phases."""

    has_gradient: float
    squared_norm: float
    is_not_zero: float
    is_not_finite: float
    has_moved: float
    knows_update: float  # how the optimizer computes what it adds
    keeps_update: float  # it is not lost to rounding


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
        # Whoever else looks at the gradients: called before each of the step's optimizer phases.
        self.before_optimizer: Callable[[], object] | None = None
        # Names: which ask for a gradient may change within a step of a file's own.
        self._trained: list[str] = []
        self._ranges: list[str] = []
        self._seen: dict[str, Seen] = {}
        # Whether rounding hides the last update of these two numbers.
        self._lost: dict[str, Tensor] = {}
        self._owned: set[str] = set()  # names: an optimizer has stepped with them
        self._rows: Tensor | None = None  # [parameters, 7], of the optimizer phases so far

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
                if self.before_optimizer:
                    self.before_optimizer()

    def range_pop(self) -> None:
        if self._ranges.pop() == "optimizer":
            with unobserved():
                self._rows = self._joined(self._rows_of_phase())
                self.result = self._first_step(self._rows)

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
            # The squares of fp16 overflow.
            wide = torch.promote_types(gradient.dtype, torch.float32)
            norm = torch.linalg.vector_norm(gradient, dtype=wide)
            weights = local_part(parameter).reshape(-1)[ends]
            self._seen[name] = Seen(ends, gradient[ends], norm, weights)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Gradients and state are there, as the optimizer has just used them."""
        if not self._seen:
            return
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        parameters = dict(self.model.named_parameters())
        with unobserved():
            for name, seen in self._seen.items():
                parameter = parameters[name]
                if id(parameter) not in groups:
                    continue
                self._owned.add(name)
                group = groups[id(parameter)]
                lost = lost_updates(optimizer, group, parameter, seen.weights, seen.ends)
                if lost is not None:
                    self._lost[name] = lost

    def _rows_of_phase(self) -> Tensor:
        """A Row of each trained parameter, over all ranks: [parameters, 7]."""
        parameters = dict(self.model.named_parameters())
        rows = []
        for name in self._trained:
            local = local_part(parameters[name])
            if name in self._seen:
                rows.append(self._row(name, self._seen[name], local))
            else:
                rows.append(torch.zeros(len(Row._fields), device=local.device))
        is_sharded = any(
            local_part(parameters[name]) is not parameters[name] for name in self._trained
        )
        self._seen.clear()
        self._lost.clear()
        found = torch.stack(rows)
        if is_sharded:
            torch.distributed.all_reduce(found)
        return found

    def _row(self, name: str, seen: Seen, local: Tensor) -> Tensor:
        """A Row as a tensor, [7]."""
        has_moved = (local.reshape(-1)[seen.ends] != seen.weights).any()
        is_finite = seen.norm.isfinite() & seen.gradients.isfinite().all()
        knows_update = torch.full_like(has_moved, name in self._lost)
        keeps_update = knows_update & ~self._lost.get(name, knows_update)
        row = Row(
            has_gradient=seen.ends[0] >= 0,
            squared_norm=seen.norm**2,
            is_not_zero=seen.gradients.any(),
            is_not_finite=~is_finite,
            has_moved=has_moved,
            knows_update=knows_update,
            keeps_update=keeps_update,
        )
        return torch.stack([value.float() for value in row])

    def _joined(self, rows: Tensor) -> Tensor:
        """With those of earlier phases, [parameters, 7]: a step of a file's own may have several,
        and what holds after one of them counts."""
        if self._rows is None:
            return rows
        has_gradient, squared_norm = rows[:, 0] > 0, Row._fields.index("squared_norm")
        norms = torch.where(has_gradient, rows[:, squared_norm], self._rows[:, squared_norm])
        joined = torch.maximum(rows, self._rows)
        joined[:, squared_norm] = norms
        return joined

    def _first_step(self, rows: Tensor) -> FirstStep:
        parameters = dict(self.model.named_parameters())
        trained = [parameters[name] for name in self._trained]
        frozen = [name for name in parameters if name not in self._trained]
        result = FirstStep(frozen=frozen, trained_elements=sum(p.numel() for p in trained))
        for name, parameter, row in zip(self._trained, trained, rows.tolist(), strict=True):
            self._note(result, name, parameter, Row(*row))
        if result.non_finite and self.scaler.is_enabled():
            # The scale was too large: so it is lowered, and no fault.
            result.non_finite, result.unmoved, result.skipped = [], [], True
            result.rounded, result.untold = {}, {}
        return result

    def _note(self, result: FirstStep, name: str, parameter: Tensor, row: Row) -> None:
        """What is to be said of one parameter."""
        if not row.has_gradient:
            result.missing.append(name)
            return
        if row.is_not_finite:
            result.norms[name] = math.nan
            result.non_finite.append(name)
            return
        result.norms[name] = math.sqrt(row.squared_norm) / self._scale
        if not row.is_not_zero:
            result.zero.append(name)
        elif not row.has_moved:
            self._note_unmoved(result, name, parameter, row)

    def _note_unmoved(self, result: FirstStep, name: str, parameter: Tensor, row: Row) -> None:
        """Why a parameter with a gradient stays what it was, as far as it is known."""
        if row.knows_update and not row.keeps_update:
            result.rounded[name] = type_name(parameter)
        elif not row.knows_update and name in self._owned and is_narrow(parameter):
            result.untold[name] = type_name(parameter)
        else:
            result.unmoved.append(name)


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Not seen by memory trackers and FLOP counters, a part of its own in a trace."""
    with _disable_current_modes(), torch.no_grad(), torch.profiler.record_function("audit"):
        yield
