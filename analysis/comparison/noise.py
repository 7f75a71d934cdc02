"""Is a difference more than noise?"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from harness.instruments.phases import median_interval

NOISE = "within noise"
UNDECIDED, SPREAD_UNKNOWN = "undecided: disturbed", "spread unknown"
STANDARD_ERRORS = 2.0  # of a difference of means, below which it is noise
STEPS_FOR_INTERVAL = 3  # of each run: fewer have no interval


def noise_of_means(*standard_errors: float) -> float:
    """The smallest difference of means with these standard errors that can be told from none."""
    return STANDARD_ERRORS * math.hypot(*standard_errors)


def ratio_of_medians(times: np.ndarray, baseline: np.ndarray) -> dict:
    """Ratio of the medians, with its 95% bootstrap interval over the steps of both; `difference`: in words."""
    if not len(times) or not len(baseline):
        return {"ratio": None, "ratio_95": None, "difference": "no steps to compare"}
    value = float(np.median(times) / np.median(baseline))
    if min(len(times), len(baseline)) < STEPS_FOR_INTERVAL:
        return {"ratio": value, "ratio_95": None, "difference": SPREAD_UNKNOWN}
    interval = median_interval(np.divide, [times], [baseline])
    return {"ratio": value, "ratio_95": interval, "difference": slower_or_faster(interval)}


def slower_or_faster(ratio_95: Sequence[float]) -> str:
    low, high = ratio_95
    if low <= 1 <= high:
        return NOISE
    return "slower" if low > 1 else "faster"


def within_spread(ratio: float, spread: float) -> bool:
    """Whether runs with the same settings differ as much: the most distant of them lies exactly at the spread, and
    rounding must not turn it into a difference."""
    return abs(math.log(ratio)) <= math.log1p(spread) + 1e-9


def may_be_disturbance(ratio: float, disturbance: dict, of_baseline: dict) -> bool:
    """Whether a ratio of step times could be 1 without the largest possible effect of what disturbed either run.

    The disturbance of each has `disturbed` and `lost_share`: of its step time, None if it is not known.
    """
    if not (disturbance["disturbed"] or of_baseline["disturbed"]):
        return False
    shorter, longer = (least_left(one) for one in (disturbance, of_baseline))
    return ratio * shorter <= 1 <= ratio / max(longer, 1e-9)


def least_left(disturbance: dict) -> float:
    """The least share of the step time that was not lost."""
    if not disturbance["disturbed"]:
        return 1.0
    return 0.0 if disturbance["lost_share"] is None else 1.0 - disturbance["lost_share"]
