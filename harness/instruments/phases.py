"""Statistics of measured times: averages, bootstrap, power law, break-even.  And the names of a
step's phases.

Imports no PyTorch: reading a trace needs none.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

PHASES = ("data", "forward", "backward", "optimizer")
RESAMPLES = 2000  # of the bootstrap


def summary_stats(values: list[float]) -> dict[str, float | int | None]:
    """Mean, median, sample standard deviation (None for one value), 95th percentile, count; None
    for no values."""
    if not values:
        return {"mean": None, "median": None, "std": None, "p95": None, "count": 0}
    return {
        "mean": np.mean(values).item(),
        "median": np.median(values).item(),
        "std": np.std(values, ddof=1).item() if len(values) > 1 else None,
        "p95": np.percentile(values, 95).item(),
        "count": len(values),
    }


def break_even_step(compile_s: float, saved_ms: float) -> int | None:
    """The first step by which compiling has saved the time that it took; None if steps take no less
    than before."""
    return math.ceil(1e3 * compile_s / saved_ms) if saved_ms > 0 else None


def power_law_exponent(points: Iterable[tuple[float, float | None]]) -> float | None:
    """The p of y ~ x^p, by least squares on logarithms; None if y is known for fewer than two
    values of x."""
    known = [(x, y) for x, y in points if y is not None]
    if len({x for x, _ in known}) < 2:
        return None
    x, y = np.log(np.array(known, dtype=float)).T
    return float(np.polyfit(x, y, 1)[0])


def median_interval(
    combine: Callable[..., np.ndarray], *series: Sequence[Sequence[float]]
) -> list[float]:
    """95% bootstrap interval of combine(median of each series), such as np.divide for a ratio of
    medians.

    series: [launches, steps] each.  Launches are drawn for all series together, because the same
    moment of the machine affects them alike; the steps within a launch for each series on its own.
    One launch of many steps is a comparison of two runs; launches of one step each are rounds in
    which the series took turns.
    """
    rng = np.random.default_rng(0)
    launches = min(map(len, series))
    chosen = rng.integers(0, launches, (RESAMPLES, launches, 1))

    def medians(one_series: Sequence[Sequence[float]]) -> np.ndarray:
        values = np.array(one_series[:launches], dtype=float)  # [launches, steps]
        steps = rng.integers(0, values.shape[1], (RESAMPLES, launches, values.shape[1]))
        return np.median(values[chosen, steps], axis=(1, 2))

    low, high = np.percentile(combine(*map(medians, series)), (2.5, 97.5))
    return [float(low), float(high)]
