"""How much do changes gain?  By turns of steps with and without each, in one process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median, variance

import numpy as np

from analysis.compare.noise import t_draws

TELLING = 0.01  # a smaller gain is not told from none, whatever the interval
CONFIDENCE = 0.99  # that the intervals of all contests of a run hold
OUTLIER = (
    3.8  # times the others: a spread of a contest's own, which chance makes of one in a hundred
)


def intervals(ratios: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float, float]]:
    """Low end, mean and high end of the ratio of each contest, from those of its rounds.

    All hold together with CONFIDENCE.  The spread of the logarithms is pooled, since each contest
    has few rounds: by its median, so that one that varies more than others does not hide what they
    gain; that one has its own.
    """
    logs = {name: np.log(values) for name, values in ratios.items()}
    spread = {name: variance(one.tolist()) for name, one in logs.items()}
    freedom, share = min(map(len, logs.values())) - 1, 1 - (1 - CONFIDENCE) / 2 / len(logs)
    pooled = (
        median(spread.values()) / (1 - 2 / 9 / freedom) ** 3
    )  # of variances, the median lies below the mean
    # It tells about half as much of the spread as all of them.
    t = [
        float(np.quantile(t_draws(of), share))
        for of in (max(freedom, freedom * len(logs) // 2), freedom)
    ]
    ends = {name: math.sqrt(max(pooled, spread[name]) / len(one)) for name, one in logs.items()}
    ends = {name: t[spread[name] > OUTLIER * pooled] * end for name, end in ends.items()}
    return {
        name: (
            math.exp(one.mean() - ends[name]),
            math.exp(one.mean()),
            math.exp(one.mean() + ends[name]),
        )
        for name, one in logs.items()
    }


def gain(interval: tuple[float, float, float], nothing: float) -> str:
    """`faster`, `slower` or `no difference`, which must be more than what turns without a change
    differ by."""
    low, ratio, high = interval
    if high < 1 and ratio < min(1.0, nothing) - TELLING:
        return "faster"
    return "slower" if low > 1 and ratio > max(1.0, nothing) + TELLING else "no difference"
