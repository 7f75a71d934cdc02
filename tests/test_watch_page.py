"""The chart of a watched run: every step a point, of many the longest of each group."""

from types import SimpleNamespace

import numpy as np
import pytest

from analysis.program.slow_steps import Cause, SlowSteps, slow_steps
from analysis.report.watched import MOST_POINTS, slow_points, steps_chart


def watched(n_steps: int, slow_places, causes: int = 1):
    """A process of so many steps of 10 ms; those at slow_places take 50 ms and 1 us more each
    time."""
    seconds = np.full(n_steps, 0.01)
    seconds[slow_places] = 0.05 + 1e-6 * np.arange(len(slow_places))
    found = {}
    for number, place in enumerate(slow_places):
        found[int(place)] = {Cause(f"cause {number % causes}", "save", None): 0.04}
    ran = SimpleNamespace(rank=0, seconds=seconds, memory=np.array([[2, 2.0**20, 0]]), on_gpu=False)
    return ran, SlowSteps(np.full(n_steps, 0.01), seconds > 0.01, found)


def test_slow_steps_are_points_by_cause():
    process, slow = watched(100, [5, 20, 21], causes=2)
    first, second = slow_points(2, process, slow)
    assert (first["name"], first["x"]) == ("cause 0", [7, 23])
    assert (second["name"], second["x"], second["y"]) == ("cause 1", [22], [50.001])


@pytest.mark.parametrize("n_steps", [MOST_POINTS, 10 * MOST_POINTS + 7])
def test_points_are_few_and_the_longest_is_among_them(n_steps):
    """Also of slow steps, which may be most of a long run."""
    process, slow = watched(n_steps, np.arange(n_steps))
    every, of_cause, memory = steps_chart(SimpleNamespace(processes=[process], slow=[slow]))["data"]
    for trace in (every, of_cause):
        assert len(trace["x"]) == len(trace["y"]) == MOST_POINTS
        assert trace["x"][-1] == n_steps + 1  # steps begin with 2, and the last is the longest
        assert trace["y"][-1] == pytest.approx(1e3 * process.seconds[-1], abs=1e-3)
    assert (memory["x"], memory["y"]) == ([2.0], [1.0])


def test_a_step_is_slow_beyond_five_standard_deviations_of_the_others():
    seconds = np.tile([0.9, 1.0, 1.1], 67)  # of which that is 1.4826 x 0.1
    seconds[[50, 150]] = 1.7, 1.8
    steps = {name: np.zeros(len(seconds)) for name in ("data", "waited")}
    process = SimpleNamespace(seconds=seconds, steps=steps, slow={})
    assert np.flatnonzero(slow_steps(process).is_slow).tolist() == [150]
