"""Does a set of flags train as the baseline does?  Its first steps beside the baseline's, as
prove_changes.py does it: how far apart they may be is told by the baseline with its parameters
moved as by rounding, or by a lower precision.
"""

import torch
from torch import nn

from analysis.comparison.training import Apart, apart, trains
from harness.base.ranges import range_observers
from harness.instruments.first_step import unobserved
from harness.model.changes import PRECISION, ROUNDING
from harness.model.optimizations import in_use
from harness.model.workload import Workload
from harness.program.hooks.trial import AUDIT_STEPS, settings_of, sketch


class FirstSteps:
    """What a run does in its first steps, as harness.program.hooks.trial tells it of a program.

    A context of the first step, which is one of the `range_observers`; told of every step.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.model, self.optimizer, self.before = model, optimizer, {}
        self.told: dict = {"losses": [], "gradients": {}, "moves": {}, "in_training": 0}
        self.told["settings"] = [settings_of(group) for group in optimizer.param_groups]

    def __enter__(self) -> None:
        range_observers.append(self)

    def __exit__(self, *exception) -> None:
        range_observers.remove(self)

    def range_push(self, name: str) -> None:
        if name == "optimizer":
            with unobserved():
                named = [
                    (name, p.grad)
                    for name, p in self.model.named_parameters()
                    if p.grad is not None
                ]
                self.told["gradients"] |= {
                    name: sketch(grad).float().tolist() for name, grad in named
                }

    def range_pop(self) -> None:
        pass

    def stepped(self, loss: float) -> None:
        self.told["losses"] += [loss]
        if len(self.told["losses"]) in (1, AUDIT_STEPS):
            now = {name: sketch(p) for name, p in self.model.named_parameters()}
            moves = {
                name: (now[name] - before).float().tolist() for name, before in self.before.items()
            }
            self.before, self.told["moves"] = now, moves


def may_of(workload: Workload, baseline: Workload) -> str:
    """The most that its flags, beside those of the baseline, may do to gradients."""
    flags, known = (in_use(vars(one.training)) for one in (workload, baseline))
    return PRECISION if any(one.may == PRECISION for one in flags if one not in known) else ROUNDING


def same_training(one: dict, plain: dict, yardsticks: dict[str, Apart], may: str) -> dict:
    """`trains`: bit-equal, rounding, lower precision or differs; `differs_in`: what does.
    Parameters that one of both does not have, as fused projections, are not compared."""
    both = one["gradients"].keys() & plain["gradients"].keys()
    one, plain = (
        told
        | {
            name: {p: of for p, of in told[name].items() if p in both}
            for name in ("gradients", "moves")
        }
        for told in (one, plain)
    )
    word, beyond = trains(apart(one, plain), yardsticks, may)
    return {"trains": word, "differs_in": beyond}
