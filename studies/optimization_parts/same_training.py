"""Does a set of flags train as the baseline does?  Its first steps beside the baseline's, as
prove_changes.py does it: how far apart they may be is told by the baseline with its parameters
moved as by rounding, or by a lower precision.
"""

import torch
from torch import nn

from analysis.prove.audit import Apart, apart, trains
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
        if name != "optimizer":
            return
        with unobserved():
            for parameter, p in self.model.named_parameters():
                if p.grad is not None:
                    self.told["gradients"][parameter] = sketch(p.grad).float().tolist()

    def range_pop(self) -> None:
        pass

    def stepped(self, loss: float) -> None:
        self.told["losses"].append(loss)
        if len(self.told["losses"]) not in (1, AUDIT_STEPS):
            return
        now = {name: sketch(p) for name, p in self.model.named_parameters()}
        moves = {}
        for name, before in self.before.items():
            moves[name] = (now[name] - before).float().tolist()
        self.before, self.told["moves"] = now, moves


def may_of(workload: Workload, baseline: Workload) -> str:
    """The most that its flags, beside those of the baseline, may do to gradients."""
    of_baseline = in_use(vars(baseline.training))
    for flag in in_use(vars(workload.training)):
        if flag.may == PRECISION and flag not in of_baseline:
            return PRECISION
    return ROUNDING


def same_training(
    told: dict, of_baseline: dict, yardsticks: dict[str, Apart], may: str
) -> tuple[str, list[str]]:
    """bit-equal, rounding, lower precision or differs; and what differs.  told and of_baseline: of
    FirstSteps.  Parameters that one of both does not have, as fused projections, are not
    compared."""
    both = told["gradients"].keys() & of_baseline["gradients"].keys()
    runs = [of_parameters(run, both) for run in (told, of_baseline)]
    return trains(apart(*runs), yardsticks, may)


def of_parameters(told: dict, names: set[str]) -> dict:
    """The same of these parameters alone."""
    chosen = dict(told)
    for part in ("gradients", "moves"):
        values = told[part]
        chosen[part] = {name: values[name] for name in values if name in names}
    return chosen
