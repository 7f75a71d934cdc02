"""Does a changed program train the same?  How far runs are apart, beside what rounding makes of the
same program."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

from harness.model.changes import EXACT, PRECISION, ROUNDING

DIFFERS = "differs"
# How far parameters are moved, with which seed, by what rounding, or bfloat16, makes of each.
NUDGES = {ROUNDING: ("6e-8:1", "6e-8:2", "6e-8:3"), PRECISION: ("2e-3:1",)}
UNLIKE = {"settings": "settings of the optimizer", "in_training": "modules in training mode"}
# Share of the norm over all parameters: what is smaller, as gradients that should be zero, is told
# by that norm.
LEAST_NORM = 1e-4


class Limit(NamedTuple):
    """How far apart a number of two runs may be."""

    factor: float  # times what nudged parameters made of it
    least: float  # and at least

    def allows(self, difference: float, yardstick: float) -> bool:
        """Not if the difference is no number."""
        return difference <= max(self.factor * yardstick, self.least)


class Limits(NamedTuple):
    """Of a kind of change.  Of a chaotic program, nudges make much of later losses and moves, and
    these decide nothing."""

    first_loss: Limit
    gradient: Limit
    later_loss: Limit
    move: Limit


LIMITS = {
    ROUNDING: Limits(
        first_loss=Limit(30.0, 1e-6),
        gradient=Limit(30.0, 1e-5),
        later_loss=Limit(30.0, 1e-5),
        move=Limit(10.0, 1e-4),
    ),
    PRECISION: Limits(
        first_loss=Limit(5.0, 1e-3),
        gradient=Limit(5.0, 1e-3),
        later_loss=Limit(5.0, 1e-2),
        move=Limit(5.0, 1e-1),
    ),
}


@dataclass(frozen=True)
class Apart:
    """Relative differences of two runs: of losses, and by parameter of gradients and moves."""

    first_loss: float
    later_loss: float
    gradients: Mapping[str, float]  # in the first step
    moves: Mapping[str, float]  # in all steps
    unlike: tuple[str, ...] = ()  # what must be the same, and is not

    @property
    def any(self) -> bool:
        numbers = (self.first_loss, self.later_loss, *self.gradients.values(), *self.moves.values())
        return any(numbers) or bool(self.unlike)

    @property
    def gradient(self) -> float:
        return max(self.gradients.values(), default=math.inf)

    def largest(self, other: Apart) -> Apart:
        return Apart(
            max(self.first_loss, other.first_loss),
            max(self.later_loss, other.later_loss),
            largest_of_each(self.gradients, other.gradients),
            largest_of_each(self.moves, other.moves),
        )

    def beyond(self, kind: str, yardstick: Apart) -> list[str]:
        """What is further apart than this kind of change makes it, losses and parameters: in the
        first step, or if nothing is, in those that follow."""
        limits = LIMITS[kind]
        # A lower precision's noise takes the place of what should be zero, and an optimizer may
        # enlarge it.
        most = kind == PRECISION
        departed = [*self.unlike]
        if not limits.first_loss.allows(self.first_loss, yardstick.first_loss):
            departed.append("the first loss")
        departed += exceeding(self.gradients, yardstick.gradients, limits.gradient, most)
        if departed:
            return departed
        times = 1.0
        moves = yardstick.moves
        if not most:
            enlarged = self.enlarged(yardstick.gradients, limits.gradient.factor)
            times = median(enlarged.values()) if enlarged else 1.0
            moves = {}
            for name, far in yardstick.moves.items():
                moves[name] = far * max(times, enlarged.get(name, 1.0))
        if not limits.later_loss.allows(self.later_loss, times * yardstick.later_loss):
            departed.append("later losses")
        return departed + exceeding(self.moves, moves, limits.move, most)

    def enlarged(self, yardstick: Mapping[str, float], most: float) -> dict[str, float]:
        """By parameter: how many times as far as the yardstick's its gradient is apart, from once
        to as often as a gradient may be.  An optimizer moves the parameter so much further."""
        middle = median(yardstick.values()) if yardstick else 0.0
        enlarged = {}
        for name, far in self.gradients.items():
            own = max(yardstick.get(name, 0.0), middle)
            enlarged[name] = min(max(1.0, far / own), most) if own else 1.0
        return enlarged


def largest_of_each(
    differences: Mapping[str, float], others: Mapping[str, float]
) -> dict[str, float]:
    return {name: max(far, others.get(name, 0.0)) for name, far in differences.items()}


def exceeding(
    differences: Mapping[str, float], yardstick: Mapping[str, float], limit: Limit, most: bool
) -> list[str]:
    """Each parameter is judged by itself: of one whose gradient should be zero rounding makes
    everything.  By the median, too, since a nudge may hardly change one of them.  most: nothing is,
    unless more than half are beyond, or one is no number."""
    middle = median(yardstick.values()) if yardstick else 0.0
    beyond = []
    for name, far in differences.items():
        if not limit.allows(far, max(yardstick.get(name, 0.0), middle)):
            beyond.append(name)
    if not most or 2 * len(beyond) > len(differences) or math.inf in differences.values():
        return beyond
    return []


def distances(
    values: Mapping[str, Sequence[float]], plain: Mapping[str, Sequence[float]]
) -> dict[str, float]:
    """By name, relative to the plain values, or to a small share of all of them; infinite if one is
    not there, or no number.  In the order of the backward pass."""
    least = LEAST_NORM * math.hypot(*(math.hypot(*of) for of in plain.values())) or 1.0
    far = dict.fromkeys([*reversed(plain), *values], math.inf)
    for name in plain:
        if len(values.get(name, ())) == len(plain[name]):
            norm = max(math.hypot(*plain[name]), least)
            distance = math.dist(values[name], plain[name]) / norm
            far[name] = distance if math.isfinite(distance) else math.inf
    return far


def apart(run: dict, plain: dict) -> Apart:
    """run, plain: what runs told (harness.program.hooks.trial)."""
    losses = apart_by_loss(run["losses"], plain["losses"])
    unlike = tuple(what for name, what in UNLIKE.items() if run[name] != plain[name])
    return Apart(
        losses[0],
        max(losses),
        distances(run["gradients"], plain["gradients"]),
        distances(run["moves"], plain["moves"]),
        unlike,
    )


def apart_by_loss(losses: Sequence[float], plain: Sequence[float]) -> list[float]:
    """Of each step, relative to the mean of the plain losses; infinite if one is no number.
    [0] without a step."""
    scale = fmean(map(abs, plain)) if plain else 0.0
    far = []
    for loss, of_plain in zip(losses, plain, strict=False):
        difference = abs(loss - of_plain) / (scale or 1.0)
        far.append(math.inf if math.isnan(difference) else difference)
    return far or [0.0]


def yardsticks_of(
    noise: Apart, plain: dict, nudged: Iterable[tuple[str, dict]]
) -> dict[str, Apart]:
    """How far a program is from itself: of bit-equal when it runs again, which is noise; of the
    others when its parameters are moved by what they make of them (kind, what that run told)."""
    yardsticks = {EXACT: noise, ROUNDING: noise, PRECISION: noise}
    for kind, told in nudged:
        yardsticks[kind] = yardsticks[kind].largest(apart(told, plain))
    return yardsticks


class Training(NamedTuple):
    """How a changed program trains."""

    word: str  # bit-equal, rounding, lower precision, differs
    departs: list[str]  # what differs


def trains(marks: Apart, yardsticks: Mapping[str, Apart], may: str) -> Training:
    """yardsticks: what nudges of the size of each made of the plain program; of bit-equal, how it
    repeats itself.  may: the most that the change may do: one that may only round is never excused
    by what a lower precision does.
    """
    if not marks.any:
        return Training(EXACT, [])
    if may == EXACT and not yardsticks[EXACT].any:
        return Training(DIFFERS, marks.beyond(ROUNDING, yardsticks[ROUNDING]))
    beyond = []
    for kind in (ROUNDING, PRECISION) if may == PRECISION else (ROUNDING,):
        beyond = marks.beyond(kind, yardsticks[kind])
        if not beyond:
            return Training(kind, [])
    return Training(DIFFERS, beyond)
