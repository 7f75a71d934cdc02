"""Exercise 9: a timer, tried on a made-up device whose clock is made up too, so that each mistake
shows in the time to the last digit and no other program disturbs it."""

import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import NamedTuple

from workshop.own_code.findings import Finding, differs, function_of

STEP_MS, LAUNCH_MS = 5.0, 0.1
WARM_UP_MS = (60.0, 30.0, 15.0)  # of the first steps
DISTURBED_MS, DISTURBED_EVERY = 60.0, 4
READING_S = 1e-7  # that reading the clock takes
TOLERANCE = 0.05  # relative
SIGNATURE = "(step, synchronize, warmup, steps)"


class Device:
    """Runs steps one after another.  step() launches one and returns before it has run;
    synchronize() waits for all.  The host's clock goes on by that alone."""

    def __init__(self, step_ms: Callable[[int], float]):
        self.step_ms, self.steps = step_ms, 0
        self.now_s = self.free_s = 1000.0  # when the device has run all that was launched

    def step(self) -> None:
        begin_s = max(self.now_s, self.free_s)
        self.free_s = begin_s + self.step_ms(self.steps) / 1e3
        self.now_s += LAUNCH_MS / 1e3
        self.steps += 1

    def synchronize(self) -> None:
        self.now_s = max(self.now_s, self.free_s)

    def read_clock(self) -> float:
        self.now_s += READING_S
        return self.now_s

    def read_clock_ns(self) -> int:
        return round(1e9 * self.read_clock())


def steady(number: int) -> float:
    return STEP_MS


def warming_up(number: int) -> float:
    return WARM_UP_MS[number] if number < len(WARM_UP_MS) else STEP_MS


def sometimes_disturbed(number: int) -> float:
    is_disturbed = number % DISTURBED_EVERY == DISTURBED_EVERY - 1
    return DISTURBED_MS if is_disturbed else STEP_MS


class Trial(NamedTuple):
    """A device on which one mistake shows, and what that mistake is."""

    asked: str
    step_ms: Callable[[int], float]
    warmup: int
    steps: int
    mistake: str


TRIALS = (
    Trial(
        "waits for the device",
        steady,
        0,
        5,
        "a launch takes 0.1 ms, so call synchronize() before each reading of the clock",
    ),
    Trial(
        "warms up",
        warming_up,
        3,
        3,
        "the first steps take longer; run `warmup` steps that are not timed",
    ),
    Trial(
        "starts the clock when the warm-up has ended",
        warming_up,
        3,
        1,
        "steps of the warm-up still ran when the clock was read first; call synchronize() before",
    ),
    Trial(
        "one slow step in four does not decide",
        sometimes_disturbed,
        1,
        11,
        "time each step by itself, and return the median",
    ),
)


def findings(load: Callable[[], ModuleType]) -> Iterator[Finding]:
    """load: imports the learner's file, once the clock is that of the device."""
    device = Device(steady)
    clocks = ("perf_counter", "monotonic", "time")
    kept = {name: getattr(time, name) for name in clocks}
    kept.update({f"{name}_ns": getattr(time, f"{name}_ns") for name in clocks})
    for name in clocks:
        setattr(time, name, lambda: device.read_clock())
        setattr(time, f"{name}_ns", lambda: device.read_clock_ns())
    try:
        step_ms = function_of(load(), "step_ms", SIGNATURE)
        for trial in TRIALS:
            device = Device(trial.step_ms)
            told = step_ms(device.step, device.synchronize, trial.warmup, trial.steps)
            yield Finding(trial.asked, problem_of(trial, device, told))
    finally:
        for name, clock in kept.items():
            setattr(time, name, clock)


def problem_of(trial: Trial, device: Device, told: object) -> str | None:
    """What is wrong with the time that the learner's timer told; None if it is right."""
    asked = trial.warmup + trial.steps
    if device.steps != asked:
        parts = f"{asked} steps, {trial.warmup} to warm up and {trial.steps} to time"
        return differs("ran", parts, device.steps)
    if isinstance(told, bool) or not isinstance(told, int | float):
        return differs("returned", "a number, the time of a step in ms", repr(told))
    if abs(told - STEP_MS) <= TOLERANCE * STEP_MS:
        return None
    mistake = trial.mistake
    if abs(1e3 * told - STEP_MS) <= TOLERANCE * STEP_MS:
        mistake = "that is in seconds"
    return differs("time of a step in ms", f"{STEP_MS:g}", f"{told:.3g}; {mistake}")
