"""Does the program train?  Gradients and moves of its parameters, in one step that is neither timed
nor recorded."""

import math

import torch

from . import our_modules
from .memory import local

WIDTH = 256  # of a tensor's sketch
PIECE = 1 << 18  # elements that are folded at once: their copy in float64 fits in a cache


def sketch(tensor: torch.Tensor) -> torch.Tensor:
    """WIDTH numbers of all elements: rows of so many are added with random signs, so that two
    tensors are as far apart as their sketches, whichever elements differ.
    Of a short tensor, its elements."""
    flat = local(tensor.detach()).reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    width = min(WIDTH, len(flat))
    folded = flat.new_zeros(width, dtype=torch.float64)
    if not width:
        return folded.cpu()
    generator = torch.Generator().manual_seed(0)
    for piece in flat.split(PIECE):
        padded = torch.nn.functional.pad(piece, (0, -len(piece) % width))
        rows = padded.reshape(-1, width).double()
        signs = 1 - 2 * torch.randint(2, (len(rows),), generator=generator)
        folded += signs.to(folded) @ rows if len(rows) > 1 else rows[0]
    return folded.cpu()


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
        # The same where it may be: what the optimizer adds is not known.
        self.untold: dict[str, str] = {}
        self.stepped = False

    @torch.no_grad()
    def before(self, optimizer: torch.optim.Optimizer) -> None:
        # GradScaler leaves it to a fused optimizer to skip the step.
        if getattr(optimizer, "found_inf", False):
            return
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.norms[self.name_of(p)] = norm_of(local(p.grad))
                    self.kept[id(p)] = sketch(p)

    @torch.no_grad()
    def after(self, optimizer: torch.optim.Optimizer) -> None:
        if self.kept:
            self.stepped = True
        for group in optimizer.param_groups:
            for p in group["params"]:
                kept = self.kept.pop(id(p), None)
                if kept is not None:
                    self.note_move(optimizer, group, p, kept)

    def name_of(self, p: torch.Tensor) -> str:
        return self.names.get(id(p), "a parameter of no module")

    def note_move(
        self, optimizer: torch.optim.Optimizer, group: dict, p: torch.Tensor, before: torch.Tensor
    ) -> None:
        name, now = self.name_of(p), sketch(p)
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
        result = self.gradients_found()
        result.update(self.moves_found(result["norms"]))
        result.update(self.owners_found())
        return result

    def gradients_found(self) -> dict:
        norms = {name: norm for name, norm in self.norms.items() if math.isfinite(norm)}
        return {
            "norms": norms,
            "zero": [name for name, norm in norms.items() if norm == 0],
            "non_finite": [name for name in self.norms if name not in norms],
        }

    def moves_found(self, norms: dict[str, float]) -> dict:
        """Of parameters that did not move, though their gradient is a number and not zero."""
        unmoved, rounded, untold = [], {}, {}
        for name, moved in self.moved.items():
            if moved or not norms.get(name):
                continue
            if name in self.rounded:
                rounded[name] = self.rounded[name]
            elif name in self.untold:
                untold[name] = self.untold[name]
            else:
                unmoved.append(name)
        return {"unmoved": unmoved, "rounded": rounded, "untold": untold}

    def owners_found(self) -> dict:
        """Of parameters without an update: frozen, without an optimizer, or without a gradient.  By
        design: without both, and as large as one that is trained: a target network, or weights that
        are trained by copies of them."""
        frozen, unowned, by_design = [], [], []
        owned_shapes = {p.shape for _, p, owned in self.parameters if owned}
        owned_names: dict[str, None] = {}  # each once
        for name, p, owned in self.parameters:
            if not p.requires_grad:
                frozen.append(name)
            elif owned:
                owned_names[name] = None
            elif p.grad is None and p.shape in owned_shapes:
                by_design.append(name)
            else:
                unowned.append(name)
        missing = [name for name in owned_names if name not in self.norms]
        found = {"missing": missing, "frozen": frozen, "unowned": unowned}
        found["by_design"] = by_design
        return found


def norm_of(gradient: torch.Tensor) -> float:
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    return float(torch.linalg.vector_norm(gradient.reshape(-1).float()))
