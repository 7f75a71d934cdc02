"""Is a difference more than noise?  The one rule of all that compares times, by interval and by
what disturbed them."""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

NOISE = "within noise"
UNDECIDED, SPREAD_UNKNOWN = "undecided: disturbed", "spread unknown"
BASELINE, REPEAT = "the baseline", "a repeat of the baseline"
AGAIN = "repeat on an idle machine"
CONFIDENT = (
    0.975  # a two-sided interval of 95%: of what is equal, one pair in twenty is called different
)
OF_MEDIAN = math.sqrt(math.pi / 2)  # standard error of a median, in those of a mean
STEPS_FOR_RANKS = (
    10  # from which on order statistics tell the error of a median, whatever the outliers
)
ROUNDS_FOR_RANKS = 6  # of steps in turn: fewer have no set of signs as rare as 5%
STEPS_FOR_INTERVAL = 3  # of each run: fewer have no interval
STEPS_OF_RUN = 4  # one in each quarter: fewer do not show how much a run wavers
# How far runs of the same code lie apart at least: the standard deviation of the logarithm of a
# run's median over restarts, each with another place in memory, clock and temperature.  It is as
# sure as if five runs had shown it, and less where repeats lie further apart.
RESTARTS, ASSUMED = 0.01, 4
# The same freedom of rows and runs measured one after another, as those that an interval compares
IN_A_ROW = 20
REPEATED = 3  # runs on both sides, from which on their own spread is enough
FALSE_ALARMS = (
    1e-3  # the share of pairs of the same code that differ by more than what is called noise
)


Runs = Sequence[np.ndarray]  # step times of each
Interval = Sequence[float] | None  # its ends; None: unknown


# ---- Intervals of 95% ----------------------------------------------------------------------------


class Measured(NamedTuple):
    """A time that one process measured, its standard error and the degrees of freedom of that, in
    any unit."""

    time: float
    error: float
    freedom: float

    @classmethod
    def median(cls, times: Sequence[float]) -> "Measured | None":
        """Of single times; None: too few."""
        times = np.sort(np.asarray(times, dtype=float))
        n = len(times)
        if n < STEPS_FOR_INTERVAL:
            return None
        error = OF_MEDIAN * np.std(times, ddof=1) / math.sqrt(n)
        if n >= STEPS_FOR_RANKS:  # McKean and Schrader, Communications in Statistics B 13 (1984)
            below = max(0, round((n + 1) / 2 - 1.96 * math.sqrt(n) / 2) - 1)
            error = (times[n - 1 - below] - times[below]) / (2 * 1.96)
        return cls(float(np.median(times)), float(error), n - 1)

    @classmethod
    def median_of_normal(cls, median: float, std: float | None, n: int | None) -> "Measured | None":
        """The same where only the standard deviation of n times is known."""
        if std is None or n is None or n < 2:
            return None
        return cls(median, OF_MEDIAN * std / math.sqrt(n), n - 1)

    @classmethod
    def sum(cls, parts: "Sequence[Measured]") -> "Measured":
        """Of parts of the same steps, which are slow together."""
        total, error = (sum(getattr(one, name) for one in parts) for name in ("time", "error"))
        return cls(total, error, min(one.freedom for one in parts))


def noise_of_difference(*measured: Measured) -> float:
    """The smallest difference between times that can be told from none by their own errors, in
    their unit."""
    return half_width(*((one.error**2, one.freedom) for one in measured))


def interval_of_ratio(
    time: Measured | None, baseline: Measured | None, ratio: float
) -> list[float] | None:
    """Of times of two processes.  None: the error of one is not known."""
    if time is None or baseline is None:
        return None
    parts = [((one.error / one.time) ** 2, one.freedom) for one in (time, baseline)]
    return interval_around(ratio, half_width(*parts, (2 * RESTARTS**2, IN_A_ROW)))


def interval_over_processes(times: Runs, baseline: Runs, ratio: float) -> list[float] | None:
    """The same where several processes measured each, as launches of ranks: what varies between
    them is known by them, and is not less than is usual.  None: one side has but one process, of
    too few steps."""
    sides = (times, baseline)
    logs = [np.log([np.median(steps) for steps in runs]) for runs in sides]
    squares, freedom = (
        sum(float(((one - one.mean()) ** 2).sum()) for one in logs),
        sum(len(one) - 1 for one in logs),
    )
    deviation = max(RESTARTS, math.sqrt(squares / max(1, freedom)))
    freedom += IN_A_ROW * (RESTARTS / deviation) ** 2
    parts = [(deviation**2 * sum(1 / len(one) for one in logs), freedom)]
    for runs in sides:
        own = [one for one in map(Measured.median, runs) if one]
        if len(own) == len(runs):
            parts.append(
                (
                    sum((one.error / one.time) ** 2 for one in own) / len(own) ** 2,
                    own[0].freedom * len(own),
                )
            )
        elif len(runs) == 1:
            return None
    return interval_around(ratio, half_width(*parts))


def interval_in_turn(
    times: Sequence[float], baseline: Sequence[float], ratio: float
) -> list[float] | None:
    """Of steps that one process took in turn, a pair in each round: what slows the machine down
    slows both.  Rounds of the same code are as often slower as faster, by whatever spread, so that
    the signed ranks of their ratios tell (Wilcoxon's interval).  None: too few rounds."""
    logs, n = np.log(np.asarray(times, dtype=float) / np.asarray(baseline, dtype=float)), len(times)
    if n < STEPS_FOR_INTERVAL:
        return None
    if n < ROUNDS_FOR_RANKS:
        middle, width = float(logs.mean()), half_width((float(logs.var(ddof=1)) / n, n - 1))
        low, high = middle - width, middle + width
    else:
        first, second = np.triu_indices(n)
        means = np.sort((logs[first] + logs[second]) / 2)
        cut = signed_rank_cut(n)
        low, high = float(means[cut]), float(means[len(means) - 1 - cut])
    low, high = min(math.exp(low), ratio), max(math.exp(high), ratio)
    return [low, high]


def interval_around(ratio: float, width: float) -> list[float]:
    """width: of the logarithm."""
    return [ratio * math.exp(-width), ratio * math.exp(width)]


def half_width(*parts: tuple[float, float]) -> float:
    """Of an interval about a sum of independent errors, their variances with degrees of freedom:
    Student's t, with the freedom of Welch and Satterthwaite."""
    variance = sum(one for one, _ in parts)
    if not variance:
        return 0.0
    freedom = variance**2 / sum(one**2 / freedom for one, freedom in parts)
    return t_quantile(math.floor(10 * freedom) / 10) * math.sqrt(variance)


@cache
def t_quantile(freedom: float) -> float:
    """What Student's t stays below with CONFIDENT."""
    freedom = min(freedom, 1e6)
    scale = (
        math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(freedom * math.pi) / 2
    )
    low, high = 0.0, 1000.0
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        # By the angle whose tangent is t / sqrt(freedom), in which the density is smooth.
        angles = np.linspace(0.0, math.atan(middle / math.sqrt(freedom)), 2001)
        density = math.exp(scale) * math.sqrt(freedom) * np.cos(angles) ** (freedom - 1)
        inside = float(((density[1:] + density[:-1]) / 2 * np.diff(angles)).sum())
        low, high = (middle, high) if inside < CONFIDENT - 0.5 else (low, middle)
    return high


@cache
def signed_rank_cut(n: int) -> int:
    """How many of the n (n + 1) / 2 means of two of n values are left out at each end of an
    interval of 95%."""
    total = n * (n + 1) // 2
    if n > 100:
        return int(total / 2 - 1.96 * math.sqrt(n * (n + 1) * (2 * n + 1) / 24) - 0.5)
    ways = np.zeros(total + 1)  # of signs, by the sum of the ranks with a plus
    ways[0] = 1.0
    for rank in range(1, n + 1):
        ways[rank:] = ways[rank:] + ways[:-rank]
        ways /= 2
    return int(np.searchsorted(np.cumsum(ways), 1 - CONFIDENT, side="right")) - 1


def ratio_of_medians(times: np.ndarray, baseline: np.ndarray) -> dict:
    """Ratio of the medians of two runs, with its 95% interval; `difference`: in words."""
    if not len(times) or not len(baseline):
        return {"ratio": None, "ratio_95": None, "difference": "no steps to compare"}
    value = float(np.median(times) / np.median(baseline))
    interval = interval_of_ratio(Measured.median(times), Measured.median(baseline), value)
    return {"ratio": value, "ratio_95": interval, "difference": judged(value, interval)}


# ---- Runs beside runs ----------------------------------------------------------------------------


def noise_between_runs(base: Runs, new: Runs) -> float | None:
    """How much slower runs of the same code may be by chance: 0.04 is 4%.  None: a run has too few
    steps.

    What varies is the run, not the step: steps share the clock, the memory and the neighbors of
    their run (Kalibera and Jones, Rigorous benchmarking in reasonable time, ISMM 2013).  So this is
    a one-sided t-test on the means of the logarithms of the runs' medians, with the variance pooled
    over both sides, and not less than is usual: runs of one side were recorded at one time, and are
    closer than those of another day.  Runs that were not repeated differ by as much more as the
    quarters of a run do, undivided by their number: the next run may meet the machine as any
    quarter did.
    """
    if min(map(len, (*base, *new))) < STEPS_OF_RUN:
        return None
    medians = [np.log([np.median(times) for times in runs]) for runs in (base, new)]
    squares = sum(float(((one - one.mean()) ** 2).sum()) for one in medians)
    measured = sum(len(one) - 1 for one in medians)
    deviation = max(RESTARTS, math.sqrt(squares / max(1, measured)))
    chance = t_draws(measured + math.ceil(ASSUMED * (RESTARTS / deviation) ** 2)) * deviation
    if measured < 2 * (REPEATED - 1):
        quarters = [
            [np.log(np.median(part)) for part in np.array_split(times, 4)]
            for times in (*base, *new)
        ]
        wavering = math.sqrt(float(np.var(quarters, axis=1, ddof=1).mean()))
        chance = chance + t_draws(3 * len(quarters))[::-1] * wavering
    return math.expm1(
        float(np.quantile(chance, 1 - FALSE_ALARMS))
        * math.sqrt(sum(1 / len(one) for one in medians))
    )


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
    """`faster` or `slower`; NOISE if the interval contains 1; SPREAD_UNKNOWN without one.  Where a
    disturbance could explain the difference, UNDECIDED, or `probably faster` if the steps were
    taken in turn: it affected both alike.

    The disturbance of each has `disturbed` and `lost_share`: of its step time, None if unknown.
    """
    low, high = ratio_95 or (None, None)
    word = (
        SPREAD_UNKNOWN
        if low is None
        else NOISE
        if low <= 1 <= high
        else "slower"
        if low > 1
        else "faster"
    )
    if word == NOISE or not may_be_disturbance(ratio, disturbance or {}, of_baseline or {}):
        return word
    return f"probably {word}" if in_turn and low is not None else UNDECIDED


def is_decided(word: str) -> bool:
    return word in ("faster", "slower")


def as_fast(
    ratio: float, ratio_95: Interval = None, word: str = "", than: str = "", short: bool = False
) -> str:
    """'1.28x as fast as eager (95%: 1.20 to 1.35)', and the word if it decides nothing: what people
    read of a ratio of times.  than: ' as eager'; short: '1.28x (1.20 to 1.35)', in a table whose
    titles say the rest."""
    text = f"{1 / ratio:.2f}x" + f" as fast{than}" * (not short)
    if ratio_95:
        low, high = sorted(1 / end for end in ratio_95)
        text += f" ({'' if short else '95%: '}{low:.2f} to {high:.2f})"
    return text if not word or is_decided(word) else f"{text}, {word}"


def within_spread(ratio: float, spread: float) -> bool:
    """Whether runs with the same settings differ as much: the most distant of them lies exactly at
    the spread, and rounding must not turn it into a difference."""
    return abs(math.log(ratio)) <= math.log1p(spread) + 1e-9


def may_be_disturbance(ratio: float, disturbance: dict, of_baseline: dict) -> bool:
    """Whether a ratio of step times could be 1 without the largest possible effect of what
    disturbed either run."""
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
