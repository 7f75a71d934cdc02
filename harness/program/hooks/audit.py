"""Does the program train?  Gradients and moves of its parameters, in one step that is neither timed
nor recorded."""

import math

import torch

from . import our_modules
from .memory import local

WIDTH, PIECE = 256, 1 << 22  # of a tensor's sketch; elements that are folded at once


def sketch(tensor: torch.Tensor) -> torch.Tensor:
    """WIDTH numbers of all elements: rows of so many are added with random signs, so that two
    tensors are as far apart as their sketches, whichever elements differ.
    Of a short tensor, its elements."""
    flat, chance = local(tensor.detach()).reshape(-1), torch.Generator().manual_seed(0)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    found = flat.new_zeros(min(WIDTH, len(flat)), dtype=torch.float64)
    for piece in flat.split(PIECE) if len(flat) else ():
        rows = torch.nn.functional.pad(piece, (0, -len(piece) % len(found))).reshape(-1, len(found))
        signs = 1 - 2 * torch.randint(2, (len(rows),), generator=chance)
        found += signs.to(found) @ rows.double() if len(rows) > 1 else rows[0].double()
    return found.cpu()


class StepAudit:
    """Told before and after each optimizer's step.  parameters: name, parameter, whether an
    optimizer owns it."""

    def __init__(self, parameters: list[tuple[str, torch.nn.Parameter, bool]]):
        self.parameters = parameters
        self.names = {id(p): name for name, p, _ in parameters}
        self.norms: dict[str, float] = {}
        self.moved: dict[str, bool] = {}
        self.kept: dict[int, torch.Tensor] = {}  # sketches before the step
        self.rounded: dict[str, str] = {}  # by name, the type in which the last update is lost
        self.untold: dict[
            str, str
        ] = {}  # the same where it may be: what the optimizer adds is not known
        self.stepped = False

    @torch.no_grad()
    def before(self, optimizer: torch.optim.Optimizer) -> None:
        if getattr(
            optimizer, "found_inf", False
        ):  # GradScaler leaves it to a fused one to skip the step
            return
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p.grad is None:
                continue
            gradient = local(p.grad)
            gradient = gradient.coalesce().values() if gradient.is_sparse else gradient
            name = self.names.get(id(p), "a parameter of no module")
            self.norms[name] = float(torch.linalg.vector_norm(gradient.reshape(-1).float()))
            self.kept[id(p)] = sketch(p)

    @torch.no_grad()
    def after(self, optimizer: torch.optim.Optimizer) -> None:
        self.stepped |= bool(self.kept)
        for group in optimizer.param_groups:
            for p in group["params"]:
                kept = self.kept.pop(id(p), None)
                if kept is not None:
                    self.note_move(optimizer, group, p, kept)

    def note_move(
        self, optimizer: torch.optim.Optimizer, group: dict, p: torch.Tensor, before: torch.Tensor
    ) -> None:
        name, now = self.names.get(id(p), "a parameter of no module"), sketch(p)
        same = before.shape == now.shape and torch.equal(before, now)
        self.moved[name] = self.moved.get(name, False) or not same
        if not same:
            return
        with our_modules():
            from harness.instruments.rounding import is_narrow, lost_entirely, type_name
        lost = lost_entirely(optimizer, group, p, local(p.detach()))
        if lost:
            self.rounded[name] = type_name(p)
        elif lost is None and is_narrow(p):
            self.untold[name] = type_name(p)

    def result(self) -> dict | None:
        """Names by what was found of them; None if no optimizer stepped."""
        if not self.stepped:
            return None
        finite = {name: math.isfinite(norm) for name, norm in self.norms.items()}
        still = {
            name
            for name, moved in self.moved.items()
            if not moved and finite[name] and self.norms[name]
        }
        rounded = {name: kind for name, kind in self.rounded.items() if name in still}
        untold = {
            name: kind
            for name, kind in self.untold.items()
            if name in still and name not in rounded
        }
        owned = {name: p for name, p, owned in self.parameters if owned and p.requires_grad}
        return {
            "norms": {name: norm for name, norm in self.norms.items() if finite[name]},
            "missing": [name for name in owned if name not in self.norms],
            "zero": [name for name, norm in self.norms.items() if norm == 0],
            "non_finite": [name for name in self.norms if not finite[name]],
            "unmoved": [
                name for name in self.moved if name in still and name not in {*rounded, *untold}
            ],
            "rounded": rounded,
            "untold": untold,
            "frozen": [name for name, p, _ in self.parameters if not p.requires_grad],
            "unowned": [
                name for name, p, owned in self.parameters if p.requires_grad and not owned
            ],
        }
