"""How often is the same code called faster or slower?  In at most one of twenty comparisons, by
seeded simulation; and a difference that is there is found."""

import itertools

import numpy as np
import pytest

from analysis.compare.noise import (
    Measured,
    interval_in_turn,
    interval_over_processes,
    noise_of_difference,
    ratio_of_medians,
    signed_rank_cut,
    t_quantile,
)
from studies.engine.columns import compared, time_statistics
from studies.engine.rows import PassTimesRow, StepRow

PAIRS = 800
AT_MOST = 0.05
LUCK = 0.015  # two standard errors of the share of so many pairs


def with_pauses(rng, n):
    return rng.normal(100, 2, n) + np.where(rng.random(n) < 0.1, 50.0, 0.0)


WITHIN = {
    "normal": lambda rng, n: rng.normal(100, 3, n),
    "lognormal": lambda rng, n: 100 * rng.lognormal(0, 0.03, n),
    "pauses": with_pauses,
}
BETWEEN = {
    "none": lambda rng: 1.0,
    "one process in three 1% slower": lambda rng: rng.choice([1, 1, 1.01]),
    "1%": lambda rng: np.exp(rng.normal(0, 0.01)),
}


class TimedRow(StepRow, PassTimesRow):
    """A row whose step was timed."""


def row_of(times) -> TimedRow:
    return TimedRow(**time_statistics("step", list(times)), repetitions=len(times))


def unequal_pairs() -> list[tuple[str, str, int]]:
    """Every spread within a process with every one between processes; numbers of steps in turn."""
    pairs = itertools.product(WITHIN, BETWEEN)
    return [(*pair, n) for pair, n in zip(pairs, itertools.cycle((5, 10, 50, 5)), strict=False)]


def decided(words) -> float:
    return np.mean([word in ("faster", "slower") for word in words])


@pytest.mark.slow_cases
@pytest.mark.parametrize(("within", "between", "n"), unequal_pairs())
def test_rows_of_the_same_code_are_decided_in_one_of_twenty(within, between, n):
    rng, words, of_runs = np.random.default_rng(0), [], []
    for _ in range(PAIRS):
        one, other = (WITHIN[within](rng, n) * BETWEEN[between](rng) for _ in range(2))
        words.append(compared(row_of(one), row_of(other), "step").word)
        of_runs.append(ratio_of_medians(one, other).difference)
    assert decided(words) <= AT_MOST + LUCK
    assert decided(of_runs) <= AT_MOST + LUCK


@pytest.mark.parametrize("n", (3, 5, 6, 10, 50))
@pytest.mark.parametrize("within", WITHIN)
def test_steps_in_turn_of_the_same_code_are_decided_in_one_of_twenty(within, n):
    """What slows the machine down slows both steps of a round."""
    rng, misses = np.random.default_rng(0), 0
    for _ in range(PAIRS):
        slow = rng.lognormal(0, 0.1, n)
        one, other = (WITHIN[within](rng, n) * slow for _ in range(2))
        low, high = interval_in_turn(one, other, float(np.median(one) / np.median(other)))
        misses += not low <= 1 <= high
    assert misses / PAIRS <= AT_MOST + LUCK


@pytest.mark.slow_cases
@pytest.mark.parametrize("launches", (2, 3, 5))
def test_launches_of_the_same_code_are_decided_in_one_of_twenty(launches):
    rng, misses = np.random.default_rng(0), 0
    for _ in range(PAIRS):
        one, other = (
            rng.normal(100, 2, (launches, 10)) * np.exp(rng.normal(0, 0.01, (launches, 1)))
            for _ in "ab"
        )
        low, high = interval_over_processes(one, other, float(np.median(one) / np.median(other)))
        misses += not low <= 1 <= high
    assert misses / PAIRS <= AT_MOST + LUCK


def test_differences_that_are_there_are_found():
    rng, found, in_turn = np.random.default_rng(0), [], 0
    for _ in range(200):
        one, other = rng.normal(108, 2, 20), rng.normal(100, 2, 20)
        found.append(compared(row_of(one), row_of(other), "step").word)
        low, _ = interval_in_turn(rng.normal(103, 2, 20), other, 1.03)
        in_turn += low > 1
    assert found.count("slower") > 190
    assert in_turn > 190


def test_forward_and_backward_passes_are_slow_together():
    times = {"forward_ms": 10.0, "forward_std_ms": 1.0, "backward_ms": 20.0, "backward_std_ms": 1.0}
    row, passes = PassTimesRow(repetitions=9, **times), ("forward", "backward")
    parts = [Measured.median_of_normal(ms, 1.0, 9) for ms in (10.0, 20.0)]
    total = Measured.sum(parts)
    assert total.time == 30.0
    assert total.error == pytest.approx(2 * 1.2533 / 3, rel=1e-3)
    ratio, (low, high), word = compared(row, row, *passes)
    assert (ratio, word) == (1.0, "within noise") and low < 1 < high
    other = PassTimesRow(repetitions=9, **times)
    other.backward_std_ms = None
    assert compared(row, other, *passes) == (1.0, None, "spread unknown")


def test_quantiles_are_those_of_the_tables():
    assert [round(t_quantile(freedom), 3) for freedom in (1.0, 2.0, 4.0, 30.0)] == [
        12.706,
        4.303,
        2.776,
        2.042,
    ]
    assert t_quantile(1e9) == pytest.approx(1.96, abs=1e-3)
    assert [signed_rank_cut(n) for n in (6, 8, 10, 20)] == [0, 3, 8, 52]
    assert noise_of_difference(Measured(5.0, 0.3, 4), Measured(6.0, 0.4, 4)) == pytest.approx(
        0.5 * t_quantile(7.4)
    )
