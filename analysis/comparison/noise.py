"""Is a difference more than noise?  The one rule of all that compares times, by interval and by what disturbed them."""

import math
from collections.abc import Sequence
from functools import cache

import numpy as np

from harness.instruments.phases import median_interval

NOISE = "within noise"
UNDECIDED, SPREAD_UNKNOWN = "undecided: disturbed", "spread unknown"
BASELINE, REPEAT = "the baseline", "a repeat of the baseline"
AGAIN = "repeat on an idle machine"
STANDARD_ERRORS = 2.0  # of a difference of means, below which it is noise
STEPS_FOR_INTERVAL = 3  # of each run: fewer have no interval
STEPS_OF_RUN = 4  # one in each quarter: fewer do not show how much a run wavers
# How far runs of the same code lie apart at least: the standard deviation of the logarithm of a run's median over
# restarts, each with another place in memory, clock and temperature.  It is as sure as if five runs had shown it, and
# less where repeats lie further apart.
RESTARTS, ASSUMED = 0.01, 4
REPEATED = 3  # runs on both sides, from which on their own spread is enough
FALSE_ALARMS = 1e-3  # the share of pairs of the same code that differ by more than what is called noise


def noise_of_means(*standard_errors: float) -> float:
    """The smallest difference of means with these standard errors that can be told from none."""
    return STANDARD_ERRORS * math.hypot(*standard_errors)


def ratio_of_medians(times: np.ndarray, baseline: np.ndarray) -> dict:
    """Ratio of the medians, with its 95% bootstrap interval over the steps of both; `difference`: in words."""
    if not len(times) or not len(baseline):
        return {"ratio": None, "ratio_95": None, "difference": "no steps to compare"}
    value = float(np.median(times) / np.median(baseline))
    enough = min(len(times), len(baseline)) >= STEPS_FOR_INTERVAL
    interval = median_interval(np.divide, [times], [baseline]) if enough else None
    return {"ratio": value, "ratio_95": interval, "difference": judged(value, interval)}


Runs = Sequence[np.ndarray]  # step times of each
Interval = Sequence[float] | None  # its ends; None: unknown


def noise_between_runs(base: Runs, new: Runs, spread: tuple[float, int] = (0.0, 0)) -> float | None:
    """How much slower runs of the same code may be by chance: 0.04 is 4%.  None: a run has too few steps.

    spread: of further repeats, squares of the logarithms of their medians summed about their mean, and degrees of
    freedom.

    What varies is the run, not the step: steps share the clock, the memory and the neighbors of their run (Kalibera and
    Jones, Rigorous benchmarking in reasonable time, ISMM 2013).  So this is a one-sided t-test on the means of the
    logarithms of the runs' medians, with the variance pooled over both sides, and not less than is usual: runs of one
    side were recorded at one time, and are closer than those of another day.  Runs that were not repeated differ by as
    much more as the quarters of a run do, undivided by their number: the next run may meet the machine as any quarter
    did.
    """
    if min(map(len, (*base, *new))) < STEPS_OF_RUN:
        return None
    medians = [np.log([np.median(times) for times in runs]) for runs in (base, new)]
    squares = sum(float(((one - one.mean()) ** 2).sum()) for one in medians) + spread[0]
    measured = sum(len(one) - 1 for one in medians) + spread[1]
    deviation = max(RESTARTS, math.sqrt(squares / max(1, measured)))
    chance = t_draws(measured + math.ceil(ASSUMED * (RESTARTS / deviation) ** 2)) * deviation
    if measured < 2 * (REPEATED - 1):
        quarters = [[np.log(np.median(part)) for part in np.array_split(times, 4)] for times in (*base, *new)]
        wavering = math.sqrt(float(np.var(quarters, axis=1, ddof=1).mean()))
        chance = chance + t_draws(3 * len(quarters))[::-1] * wavering
    return math.expm1(float(np.quantile(chance, 1 - FALSE_ALARMS)) * math.sqrt(sum(1 / len(one) for one in medians)))


@cache
def t_draws(freedom: int) -> np.ndarray:
    """Of Student's t-distribution: sums of such variables have no quantile in closed form."""
    return np.random.default_rng(freedom).standard_t(freedom, 400_000)


def around(ratio: float, noise: float) -> tuple[float, float]:
    """The interval of a ratio of runs that judged() takes; noise: of noise_between_runs()."""
    return ratio / (1 + noise), ratio * (1 + noise)


def judged(
    ratio: float,
    ratio_95: Interval,
    disturbance: dict | None = None,
    of_baseline: dict | None = None,
    in_turn: bool = False,
) -> str:
    """`faster` or `slower`; NOISE if the interval contains 1; SPREAD_UNKNOWN without one.  Where a disturbance could
    explain the difference, UNDECIDED, or `probably faster` if the steps were taken in turn: it affected both alike.

    The disturbance of each has `disturbed` and `lost_share`: of its step time, None if it is not known.
    """
    low, high = ratio_95 or (None, None)
    word = SPREAD_UNKNOWN if low is None else NOISE if low <= 1 <= high else "slower" if low > 1 else "faster"
    if word == NOISE or not may_be_disturbance(ratio, disturbance or {}, of_baseline or {}):
        return word
    return f"probably {word}" if in_turn and low is not None else UNDECIDED


def is_decided(word: str) -> bool:
    return word in ("faster", "slower")


def as_fast(ratio: float, ratio_95: Interval = None, word: str = "", than: str = "", short: bool = False) -> str:
    """'1.28x as fast as eager (95%: 1.20 to 1.35)', and the word if it decides nothing: what people read of a ratio of
    times.  than: ' as eager'; short: '1.28x (1.20 to 1.35)', in a table whose titles say the rest."""
    text = f"{1 / ratio:.2f}x" + f" as fast{than}" * (not short)
    if ratio_95:
        low, high = sorted(1 / end for end in ratio_95)
        text += f" ({'' if short else '95%: '}{low:.2f} to {high:.2f})"
    return text if not word or is_decided(word) else f"{text}, {word}"


def within_spread(ratio: float, spread: float) -> bool:
    """Whether runs with the same settings differ as much: the most distant of them lies exactly at the spread, and
    rounding must not turn it into a difference."""
    return abs(math.log(ratio)) <= math.log1p(spread) + 1e-9


def may_be_disturbance(ratio: float, disturbance: dict, of_baseline: dict) -> bool:
    """Whether a ratio of step times could be 1 without the largest possible effect of what disturbed either run."""
    if not (disturbance.get("disturbed") or of_baseline.get("disturbed")):
        return False
    shorter, longer = (least_left(one) for one in (disturbance, of_baseline))
    return ratio * shorter <= 1 <= ratio / max(longer, 1e-9)


def least_left(disturbance: dict) -> float:
    """The least share of the step time that was not lost."""
    if not disturbance.get("disturbed"):
        return 1.0
    lost = disturbance.get("lost_share")
    return 0.0 if lost is None else 1.0 - lost
