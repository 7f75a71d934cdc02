"""How much do changes gain?  By turns of steps with and without each, in one process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median, variance
from typing import NamedTuple

import numpy as np

from analysis.compare.noise import t_draws
from harness.program.hooks.trial import SETTLE, TURN

TELLING = 0.01  # a smaller gain is not told from none, whatever the interval
# Where the ends of the interval of turns without a change are so many times apart, that no
# difference was seen says nothing.
TOO_NOISY = 1.5
CONFIDENCE = 0.99  # that the intervals of all contests of a run hold
# Times the others: a spread of a contest's own, which chance makes of one in a hundred.
OUTLIER = 3.8
FASTER, SLOWER, NO_DIFFERENCE = "faster", "slower", "no difference"
NO_VERDICT = "no verdict"  # of times: it passes its audit, and nothing is said of them
# With the changes of a contest or without, in the turns of a round: drifts cancel.
ORDERS = ((False, True, True, False), (True, False, False, True))


class Turn(NamedTuple):
    """Some steps of a process, one after another, the same for all of them."""

    pair: int  # of one turn with the changes of the contest and one without, of which a round has 2
    contest: str
    changed: bool  # with the changes of the contest


class Interval(NamedTuple):
    """Of the ratio of a contest: the time of steps with its changes, by that of steps without."""

    low: float
    ratio: float
    high: float


class Signs(NamedTuple):
    """By what it is seen that the changes of a contest took effect: of each of its turns."""

    changed: list[dict]
    plain: list[dict]


class Timed(NamedTuple):
    """Contests that were timed in turn."""

    intervals: dict[str, Interval]  # by contest
    step_ms: float  # of the program as it is, the median
    signs: dict[str, Signs]  # by contest
    rounds: int = 0  # that were over
    cut_short: str = ""  # why not all of them


def turns_of_round(number: int, contests: Sequence[str]) -> list[Turn]:
    turns = []
    for contest in contests:
        for place, changed in enumerate(ORDERS[number % 2]):
            turns.append(Turn(2 * number + place // 2, contest, changed))
    return turns


def counted_times(times_ms: Sequence[float], place: int) -> Sequence[float]:
    """Of the steps of the turn at this place, those that count."""
    return times_ms[TURN * place + SETTLE : TURN * (place + 1)]


def timed(
    times_ms: Mapping[Turn, Sequence[float]], signs: dict[str, Signs], contests: Sequence[str]
) -> Timed:
    """times_ms: of the steps of each turn that count."""
    medians = {turn: median(times) for turn, times in times_ms.items()}
    ratios: dict[str, list[float]] = {contest: [] for contest in contests}
    for turn, with_it in medians.items():
        if turn.changed:
            ratios[turn.contest].append(with_it / medians[turn._replace(changed=False)])
    step_ms = median(value for turn, value in medians.items() if not turn.changed)
    return Timed(intervals(ratios), step_ms, signs)


def intervals(ratios: Mapping[str, Sequence[float]]) -> dict[str, Interval]:
    """Of the ratio of each contest, from those of its pairs of turns.

    All hold together with CONFIDENCE.  The spread of the logarithms is pooled, since each contest
    has few of them: by its median, so that one that varies more than others does not hide what they
    gain; that one has its own.
    """
    logs = {name: np.log(values) for name, values in ratios.items()}
    spreads = {name: variance(values.tolist()) for name, values in logs.items()}
    freedom = min(len(values) for values in logs.values()) - 1
    share = 1 - (1 - CONFIDENCE) / 2 / len(logs)
    # Of variances, the median lies below the mean.
    pooled = median(spreads.values()) / (1 - 2 / 9 / freedom) ** 3
    # It tells about half as much of the spread as all of them.
    freedom_of_pooled = max(freedom, freedom * len(logs) // 2)
    t_of_pooled = float(np.quantile(t_draws(freedom_of_pooled), share))
    t_of_own = float(np.quantile(t_draws(freedom), share))
    ends = {}
    for name, values in logs.items():
        has_its_own = spreads[name] > OUTLIER * pooled
        t = t_of_own if has_its_own else t_of_pooled
        width = t * math.sqrt(max(pooled, spreads[name]) / len(values))
        middle = values.mean()
        ends[name] = Interval(math.exp(middle - width), math.exp(middle), math.exp(middle + width))
    return ends


def gain(interval: Interval, nothing: Interval) -> str:
    """What a contest shows, which must be more than what turns without a change differ by.

    nothing: of those; where they vary by as much as the contest gains or loses, NO_VERDICT.
    """
    low, ratio, high = interval
    if high < 1 and ratio < min(1.0, nothing.ratio) - TELLING:
        return FASTER if ratio < nothing.low - TELLING else NO_VERDICT
    if low > 1 and ratio > max(1.0, nothing.ratio) + TELLING:
        return SLOWER if ratio > nothing.high + TELLING else NO_VERDICT
    return NO_VERDICT if nothing.high > TOO_NOISY * nothing.low else NO_DIFFERENCE
