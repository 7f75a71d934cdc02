"""Does the program train?  Gradients and moves of its parameters, in one step that is neither timed nor recorded."""

import math

import torch

from .memory import local

SAMPLES = 256  # elements of each parameter that are compared before and after


class StepAudit:
    """Told before and after each optimizer's step.  parameters: name, parameter, whether an optimizer owns it."""

    def __init__(self, parameters: list[tuple[str, torch.nn.Parameter, bool]]):
        self.parameters = parameters
        self.names = {id(p): name for name, p, _ in parameters}
        self.norms: dict[str, float] = {}
        self.moved: dict[str, bool] = {}
        self.kept: dict[int, torch.Tensor] = {}
        self.stepped = False

    def sample(self, p: torch.Tensor) -> torch.Tensor:
        flat = local(p.detach()).reshape(-1)
        return flat[:: max(1, len(flat) // SAMPLES)].clone()

    @torch.no_grad()
    def before(self, optimizer: torch.optim.Optimizer) -> None:
        if getattr(optimizer, "found_inf", False):  # GradScaler leaves it to a fused one to skip the step
            return
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p.grad is None:
                continue
            gradient = local(p.grad)
            gradient = gradient.coalesce().values() if gradient.is_sparse else gradient
            name = self.names.get(id(p), "a parameter of no module")
            self.norms[name] = float(torch.linalg.vector_norm(gradient.reshape(-1).float()))
            self.kept[id(p)] = self.sample(p)

    @torch.no_grad()
    def after(self, optimizer: torch.optim.Optimizer) -> None:
        self.stepped |= bool(self.kept)
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if (kept := self.kept.pop(id(p), None)) is not None:
                name = self.names.get(id(p), "a parameter of no module")
                same = kept.shape == self.sample(p).shape and torch.equal(kept, self.sample(p))
                self.moved[name] = self.moved.get(name, False) or not same

    def result(self) -> dict | None:
        """Names by what was found of them; None if no optimizer stepped."""
        if not self.stepped:
            return None
        finite = {name: math.isfinite(norm) for name, norm in self.norms.items()}
        owned = {name: p for name, p, owned in self.parameters if owned and p.requires_grad}
        return {
            "norms": {name: norm for name, norm in self.norms.items() if finite[name]},
            "missing": [name for name in owned if name not in self.norms],
            "zero": [name for name, norm in self.norms.items() if norm == 0],
            "non_finite": [name for name in self.norms if not finite[name]],
            "unmoved": [name for name, moved in self.moved.items() if not moved and finite[name] and self.norms[name]],
            "frozen": [name for name, p, _ in self.parameters if not p.requires_grad],
            "unowned": [name for name, p, owned in self.parameters if p.requires_grad and not owned],
        }
