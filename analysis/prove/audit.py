"""Does a changed program train the same?  How far runs are apart, beside what rounding makes of the
same program."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from harness.model.changes import EXACT, PRECISION, ROUNDING

DIFFERS = "differs"

# How many times what nudged parameters made of it, and at least: first loss, gradient, later
# losses, moves.  Of a chaotic program, nudges make much of the last two, and these decide nothing.
BEYOND = {
    ROUNDING: ((30.0, 30.0, 30.0, 10.0), (1e-6, 1e-5, 1e-5, 1e-4)),
    PRECISION: ((5.0, 5.0, 5.0, 5.0), (1e-3, 1e-3, 1e-2, 1e-1)),
}
# How far parameters are moved, with which seed, by what rounding, or bfloat16, makes of each.
NUDGES = {ROUNDING: ("6e-8:1", "6e-8:2", "6e-8:3"), PRECISION: ("2e-3:1",)}
UNLIKE = {"settings": "settings of the optimizer", "in_training": "modules in training mode"}
# Share of the norm over all parameters: what is smaller, as gradients that should be zero, is told
# by that norm
LEAST_NORM = 1e-4


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
        losses = max(self.first_loss, other.first_loss), max(self.later_loss, other.later_loss)
        pairs = ((self.gradients, other.gradients), (self.moves, other.moves))
        return Apart(
            *losses,
            *({name: max(one[name], two.get(name, 0.0)) for name in one} for one, two in pairs),
        )

    def beyond(self, kind: str, yardstick: Apart) -> list[str]:
        """What is further apart than this kind of change makes it, losses and parameters: in the
        first step, or if nothing is, in those that follow."""
        (first, gradient, later, move), (least_first, least_gradient, least_later, least_move) = (
            BEYOND[kind]
        )
        found = [*self.unlike]
        found += ["the first loss"] * (
            not self.first_loss <= max(first * yardstick.first_loss, least_first)
        )
        most = (
            kind == PRECISION
        )  # whose noise takes the place of what should be zero, and an optimizer may enlarge it
        if found := found + exceeding(
            self.gradients, yardstick.gradients, gradient, least_gradient, most
        ):
            return found
        found += ["later losses"] * (
            not self.later_loss <= max(later * yardstick.later_loss, least_later)
        )
        return found + exceeding(self.moves, yardstick.moves, move, least_move, most)


def exceeding(
    of: Mapping, yardstick: Mapping, factor: float, least: float, most: bool
) -> list[str]:
    """Each parameter is judged by itself: of one whose gradient should be zero rounding makes
    everything.  By the median, too, since a nudge may hardly change one of them.  most: nothing is,
    unless more than half are beyond, or one is no number."""
    middle = median(yardstick.values() or [0.0])
    found = [
        name
        for name, far in of.items()
        if not far <= max(factor * max(yardstick.get(name, 0.0), middle), least)
    ]
    return found if not most or 2 * len(found) > len(of) or math.inf in of.values() else []


def distances(
    one: Mapping[str, Sequence[float]], plain: Mapping[str, Sequence[float]]
) -> dict[str, float]:
    """By name, relative to the second, or to a small share of all of them; infinite if one is not
    there, or no number."""
    least = LEAST_NORM * math.hypot(*(math.hypot(*of) for of in plain.values())) or 1.0
    found = dict.fromkeys([*reversed(plain), *one], math.inf)  # in the order of the backward pass
    for name in plain:
        if len(one.get(name, ())) == len(plain[name]):
            far = math.dist(one[name], plain[name]) / max(math.hypot(*plain[name]), least)
            found[name] = far if math.isfinite(far) else math.inf
    return found


def apart(one: dict, plain: dict) -> Apart:
    """one, plain: what runs told (harness.program.hooks.trial)."""
    scale = fmean(map(abs, plain["losses"])) or 1.0 if plain["losses"] else 1.0
    losses = [abs(a - b) / scale for a, b in zip(one["losses"], plain["losses"], strict=False)]
    losses = [math.inf if math.isnan(loss) else loss for loss in losses] or [0.0]
    of = (distances(one[name], plain[name]) for name in ("gradients", "moves"))
    unlike = tuple(what for name, what in UNLIKE.items() if one[name] != plain[name])
    return Apart(losses[0], max(losses), *of, unlike)


def yardsticks_of(plain: dict, again: dict, nudged: Iterable[tuple[str, dict]]) -> dict[str, Apart]:
    """How far a program is from itself: of bit-equal when it runs again, of the others when its
    parameters are moved by what they make of them (kind, what that run told)."""
    noise = apart(again, plain)
    of = {EXACT: noise, ROUNDING: noise, PRECISION: noise}
    for kind, told in nudged:
        of[kind] = of[kind].largest(apart(told, plain))
    return of


def trains(marks: Apart, yardsticks: Mapping[str, Apart], may: str) -> tuple[str, list[str]]:
    """`bit-equal`, `rounding`, `lower precision` or `differs`, and what does.

    yardsticks: what nudges of the size of each made of the plain program; of bit-equal, how it
    repeats itself.  may: the most that the change may do: one that may only round is never excused
    by what a lower precision does.
    """
    if not marks.any:
        return EXACT, []
    beyond, exact = [], may == EXACT and not yardsticks[EXACT].any
    for kind in (ROUNDING, PRECISION)[: 1 + (may == PRECISION)]:
        if not (beyond := marks.beyond(kind, yardsticks[kind])) and not exact:
            return kind, []
    return DIFFERS, beyond
