"""Does a changed program train the same?  How far runs are apart, beside what rounding makes of the same program."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

import numpy as np

from analysis.comparison.noise import t_draws
from analysis.comparison.proof import DIFFERS
from harness.model.changes import EXACT, PRECISION, ROUNDING

# How many times what nudged parameters made of it, and at least: first loss, gradient, later losses, moves.  Of a
# chaotic program, nudges make much of the last two, and these decide nothing.
BEYOND = {
    ROUNDING: ((30.0, 30.0, 30.0, 10.0), (1e-6, 1e-6, 1e-5, 1e-4)),
    PRECISION: ((5.0, 5.0, 5.0, 5.0), (1e-3, 1e-3, 1e-2, 1e-1)),
}
UNLIKE = {"settings": "settings of the optimizer", "in_training": "modules in training mode"}
TELLING = 0.01  # a smaller gain is not told from none, whatever the interval
CONFIDENCE = 0.99  # that the intervals of all contests of a run hold
VARIANCE = 0.01  # of a logarithm, where there is one round


@dataclass(frozen=True)
class Apart:
    """Relative differences of two runs."""

    first_loss: float
    gradient: float  # of any parameter, the largest, in the first step
    later_loss: float
    moves: float  # how parameters moved in all steps
    parameters: tuple[str, ...] = ()  # with that gradient or one near it, in the order of the backward pass
    unlike: tuple[str, ...] = ()  # what must be the same, and is not

    @property
    def marks(self) -> tuple[float, float, float, float]:
        return self.first_loss, self.gradient, self.later_loss, self.moves

    @property
    def any(self) -> bool:
        return any(self.marks) or bool(self.unlike)

    def largest(self, other: Apart) -> Apart:
        return Apart(*map(max, self.marks, other.marks))


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Relative to the second; infinite if they have not the same length, or one has no number."""
    if len(one) != len(other):
        return math.inf
    apart = math.dist(one, other) / (math.hypot(*other) or 1.0)
    return apart if math.isfinite(apart) else math.inf


def apart(one: dict, plain: dict) -> Apart:
    """one, plain: what runs told (harness.program.hooks.trial)."""
    scale = fmean(map(abs, plain["losses"])) or 1.0 if plain["losses"] else 1.0
    losses = [abs(a - b) / scale for a, b in zip(one["losses"], plain["losses"], strict=False)]
    losses = [math.inf if math.isnan(loss) else loss for loss in losses] or [0.0]
    names = one["gradients"].keys() | plain["gradients"].keys()
    of = {name: distance(one["gradients"].get(name, ()), plain["gradients"].get(name, ())) for name in names}
    largest = max(of.values(), default=math.inf)
    where = [name for name in reversed(plain["gradients"]) if of[name] >= largest / 10] if largest else []
    unlike = tuple(what for name, what in UNLIKE.items() if one[name] != plain[name])
    return Apart(losses[0], largest, max(losses), distance(one["moves"], plain["moves"]), tuple(where), unlike)


def trains(marks: Apart, yardsticks: Mapping[str, Apart], may: str) -> str:
    """`bit-equal`, `rounding`, `lower precision` or `differs`.

    yardsticks: what nudges of the size of each made of the plain program.  may: the most that the change may do: one
    that may only round is never excused by what a lower precision does.
    """
    if not marks.any:
        return EXACT
    for kind in (ROUNDING, PRECISION)[: 1 + (may == PRECISION)]:
        beyond = zip(*BEYOND[kind], yardsticks[kind].marks, strict=True)
        limits = (max(factor * mark, least) for factor, least, mark in beyond)
        if not marks.unlike and all(map(operator.le, marks.marks, limits)):
            return kind
    return DIFFERS


def intervals(ratios: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float, float]]:
    """Low end, mean and high end of the ratio of each contest, from those of its rounds.

    All hold together with CONFIDENCE.  The spread of the logarithms is pooled: each contest has few rounds.
    """
    logs = {name: np.log(values) for name, values in ratios.items()}
    freedom = max(1, sum(len(one) - 1 for one in logs.values()))
    spread = math.sqrt(fmean(variance(one.tolist()) if len(one) > 1 else VARIANCE for one in logs.values()))
    t = float(np.quantile(t_draws(freedom), 1 - (1 - CONFIDENCE) / 2 / len(logs)))
    ends = {name: t * spread / math.sqrt(len(one)) for name, one in logs.items()}
    return {
        name: (math.exp(one.mean() - ends[name]), math.exp(one.mean()), math.exp(one.mean() + ends[name]))
        for name, one in logs.items()
    }


def gain(interval: tuple[float, float, float], nothing: float) -> str:
    """`faster`, `slower` or `no difference`, which must be more than what turns without a change differ by."""
    low, ratio, high = interval
    if high < 1 and ratio < min(1.0, nothing) - TELLING:
        return "faster"
    return "slower" if low > 1 and ratio > max(1.0, nothing) + TELLING else "no difference"
