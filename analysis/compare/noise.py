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
# A two-sided interval of 95%: of what is equal, one pair in twenty is called different.
CONFIDENT = 0.975
OF_MEDIAN = math.sqrt(math.pi / 2)  # standard error of a median, in those of a mean
# From which on order statistics tell the error of a median, whatever the outliers.
STEPS_FOR_RANKS = 10
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
# The share of pairs of the same code that differ by more than what is called noise.
FALSE_ALARMS = 1e-3


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
        time = sum(part.time for part in parts)
        error = sum(part.error for part in parts)
        return cls(time, error, min(part.freedom for part in parts))


def noise_of_difference(*measured: Measured) -> float:
    """The smallest difference between times that can be told from none by their own errors, in
    their unit."""
    return half_width(*((time.error**2, time.freedom) for time in measured))


def interval_of_ratio(
    time: Measured | None, baseline: Measured | None, ratio: float
) -> list[float] | None:
    """Of times of two processes.  None: the error of one is not known."""
    if time is None or baseline is None:
        return None
    of_time = ((time.error / time.time) ** 2, time.freedom)
    of_baseline = ((baseline.error / baseline.time) ** 2, baseline.freedom)
    between_processes = (2 * RESTARTS**2, IN_A_ROW)
    return interval_around(ratio, half_width(of_time, of_baseline, between_processes))


def interval_over_processes(times: Runs, baseline: Runs, ratio: float) -> list[float] | None:
    """The same where several processes measured each, as launches of ranks: what varies between
    them is known by them, and is not less than is usual.  None: one side has but one process, of
    too few steps."""
    sides = (times, baseline)
    between = spread_between(sides)
    deviation = max(RESTARTS, between.deviation)
    freedom = between.freedom + IN_A_ROW * (RESTARTS / deviation) ** 2
    parts = [(deviation**2 * between.per_run, freedom)]
    for runs in sides:
        medians = [Measured.median(steps) for steps in runs]
        known = [median for median in medians if median is not None]
        if len(known) == len(runs):
            variance = sum((median.error / median.time) ** 2 for median in known)
            parts.append((variance / len(known) ** 2, known[0].freedom * len(known)))
        elif len(runs) == 1:
            return None
    return interval_around(ratio, half_width(*parts))


class Spread(NamedTuple):
    """How far the medians of runs of the same code lie apart."""

    deviation: float  # standard deviation of their logarithms, pooled over the sides
    freedom: int  # of it
    per_run: float  # the sum of 1 / runs over the sides: of the variance of their difference


def spread_between(sides: Sequence[Runs]) -> Spread:
    squares, freedom, per_run = 0.0, 0, 0.0
    for runs in sides:
        logs = np.log([np.median(steps) for steps in runs])
        squares += float(((logs - logs.mean()) ** 2).sum())
        freedom += len(logs) - 1
        per_run += 1 / len(logs)
    return Spread(math.sqrt(squares / max(1, freedom)), freedom, per_run)


def interval_in_turn(
    times: Sequence[float], baseline: Sequence[float], ratio: float
) -> list[float] | None:
    """Of steps that one process took in turn, a pair in each round: what slows the machine down
    slows both.  Rounds of the same code are as often slower as faster, by whatever spread, so that
    the signed ranks of their ratios tell (Wilcoxon's interval).  None: too few rounds."""
    n = len(times)
    logs = np.log(np.asarray(times, dtype=float) / np.asarray(baseline, dtype=float))
    if n < STEPS_FOR_INTERVAL:
        return None
    if n < ROUNDS_FOR_RANKS:
        middle = float(logs.mean())
        width = half_width((float(logs.var(ddof=1)) / n, n - 1))
        low, high = middle - width, middle + width
    else:
        first, second = np.triu_indices(n)
        means = np.sort((logs[first] + logs[second]) / 2)
        cut = signed_rank_cut(n)
        low, high = float(means[cut]), float(means[len(means) - 1 - cut])
    return [min(math.exp(low), ratio), max(math.exp(high), ratio)]


def interval_around(ratio: float, width: float) -> list[float]:
    """width: of the logarithm."""
    return [ratio * math.exp(-width), ratio * math.exp(width)]


def half_width(*parts: tuple[float, float]) -> float:
    """Of an interval about a sum of independent errors, their variances with degrees of freedom:
    Student's t, with the freedom of Welch and Satterthwaite."""
    total = sum(variance for variance, _ in parts)
    if not total:
        return 0.0
    freedom = total**2 / sum(variance**2 / own for variance, own in parts)
    return t_quantile(math.floor(10 * freedom) / 10) * math.sqrt(total)


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
        if inside < CONFIDENT - 0.5:
            low = middle
        else:
            high = middle
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


class Ratio(NamedTuple):
    """Of the medians of two runs."""

    ratio: float | None  # None: one has no steps
    interval: list[float] | None  # of 95%; None: one has too few steps
    difference: str  # in words


def ratio_of_medians(times: np.ndarray, baseline: np.ndarray) -> Ratio:
    """times, baseline: of the steps of each run [steps]."""
    if not len(times) or not len(baseline):
        return Ratio(None, None, "no steps to compare")
    ratio = float(np.median(times) / np.median(baseline))
    interval = interval_of_ratio(Measured.median(times), Measured.median(baseline), ratio)
    return Ratio(ratio, interval, judged(ratio, interval))


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
    between = spread_between((base, new))
    deviation = max(RESTARTS, between.deviation)
    freedom = between.freedom + math.ceil(ASSUMED * (RESTARTS / deviation) ** 2)
    chance = t_draws(freedom) * deviation
    if between.freedom < 2 * (REPEATED - 1):
        quarters = []  # the logarithms of the medians of each: [runs, 4]
        for times in (*base, *new):
            quarters.append([np.log(np.median(part)) for part in np.array_split(times, 4)])
        wavering = math.sqrt(float(np.var(quarters, axis=1, ddof=1).mean()))
        chance = chance + t_draws(3 * len(quarters))[::-1] * wavering
    rare = float(np.quantile(chance, 1 - FALSE_ALARMS))
    return math.expm1(rare * math.sqrt(between.per_run))


@cache
def t_draws(freedom: int) -> np.ndarray:
    """Of Student's t-distribution: sums of such variables have no quantile in closed form."""
    return np.random.default_rng(freedom).standard_t(freedom, 400_000)


def around(ratio: float, noise: float) -> tuple[float, float]:
    """The interval of a ratio of runs that judged() takes; noise: of noise_between_runs()."""
    return ratio / (1 + noise), ratio * (1 + noise)


class Disturbance(NamedTuple):
    """What other processes did to the times of a run or a row."""

    disturbed: bool | None  # None: not measured
    lost_share: float | None  # the most of the time that this can have cost; None: not known

    def least_left(self) -> float:
        """The least share of the time that was not lost."""
        if not self.disturbed:
            return 1.0
        return 0.0 if self.lost_share is None else 1.0 - self.lost_share


QUIET = Disturbance(disturbed=False, lost_share=None)


def judged(
    ratio: float,
    ratio_95: Interval,
    disturbance: Disturbance = QUIET,
    of_baseline: Disturbance = QUIET,
    in_turn: bool = False,
) -> str:
    """`faster` or `slower`; NOISE if the interval contains 1; SPREAD_UNKNOWN without one.  Where a
    disturbance could explain the difference, UNDECIDED, or `probably faster` if the steps were
    taken in turn: it affected both alike.
    """
    word = word_of_interval(ratio_95)
    if word == NOISE or not may_be_disturbance(ratio, disturbance, of_baseline):
        return word
    return f"probably {word}" if in_turn and ratio_95 else UNDECIDED


def word_of_interval(ratio_95: Interval) -> str:
    """What an interval says of a ratio, where nothing disturbed the times."""
    if not ratio_95:
        return SPREAD_UNKNOWN
    low, high = ratio_95
    if low <= 1 <= high:
        return NOISE
    return "slower" if low > 1 else "faster"


def is_decided(word: str) -> bool:
    return word in ("faster", "slower")


def as_fast(
    ratio: float, ratio_95: Interval = None, word: str = "", than: str = "", short: bool = False
) -> str:
    """'1.28x as fast as eager (95%: 1.20 to 1.35)', and the word if it decides nothing: what people
    read of a ratio of times.  than: ' as eager'; short: '1.28x (1.20 to 1.35)', in a table whose
    titles say the rest."""
    text = f"{1 / ratio:.2f}x"
    if not short:
        text += f" as fast{than}"
    if ratio_95:
        low, high = sorted(1 / end for end in ratio_95)
        confidence = "" if short else "95%: "
        text += f" ({confidence}{low:.2f} to {high:.2f})"
    if word and not is_decided(word):
        text += f", {word}"
    return text


def within_spread(ratio: float, spread: float) -> bool:
    """Whether runs with the same settings differ as much: the most distant of them lies exactly at
    the spread, and rounding must not turn it into a difference."""
    return abs(math.log(ratio)) <= math.log1p(spread) + 1e-9


def may_be_disturbance(ratio: float, disturbance: Disturbance, of_baseline: Disturbance) -> bool:
    """Whether a ratio of step times could be 1 without the largest possible effect of what
    disturbed either run."""
    if not disturbance.disturbed and not of_baseline.disturbed:
        return False
    shortest = ratio * disturbance.least_left()
    longest = ratio / max(of_baseline.least_left(), 1e-9)
    return shortest <= 1 <= longest
