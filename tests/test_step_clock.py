"""Times of a program's steps on a GPU, which works through its queue while the host is steps
ahead."""

import os
import statistics
import textwrap
import time

import pytest
import torch
from test_profile_program import profiled  # noqa: F401 - a fixture

from harness.program.hooks.observing.step_disturbance import StepDisturbance
from harness.program.hooks.watch import Watch

PRETENDED = os.path.join(os.path.dirname(__file__), "pretend_gpu")


class Device:
    """A host's clock and a device's queue, in seconds that pass only where they are told to.
    events_see: whether events stand in the queue that has the work."""

    def __init__(self, monkeypatch, events_see: bool = True):
        self.now = self.free_at = 0.0
        device = self

        class Event:
            def __init__(self, enable_timing: bool):
                assert enable_timing

            def record(self, stream) -> None:
                self.at = max(device.now, device.free_at) if events_see else device.now

            def query(self) -> bool:
                return device.now >= self.at

            def synchronize(self) -> None:
                device.now = max(device.now, self.at)

            def elapsed_time(self, end: "Event") -> float:
                assert self.query() and end.query()
                return 1e3 * (end.at - self.at)

        for name, function in {
            "is_initialized": lambda: True,
            "Event": Event,
            "current_stream": lambda: None,
            "synchronize": self.synchronize,
            "max_memory_allocated": lambda: 0,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def synchronize(self) -> None:
        self.now = max(self.now, self.free_at)

    def queue(self, seconds: float) -> None:
        self.free_at = max(self.now, self.free_at) + seconds


@pytest.fixture
def timed(monkeypatch, tmp_path):
    """The timed steps of a program: timed(host_s, device_s of each step in turn, **how)."""
    monkeypatch.setattr(StepDisturbance, "restart", lambda self: None)
    monkeypatch.setattr(Watch, "record", lambda self: setattr(self, "left", -1))

    def times(host_s: float, device_s: list[float], events_see: bool = True) -> list[float]:
        settings = {
            "tool": os.getpid(),
            "processes": str(tmp_path),
            "every": 1,
            "warmup": 3,
            "timed": 5,
        }
        with monkeypatch.context() as patch:
            device = Device(patch, events_see)
            watch = Watch(settings)
            for step in range(40):
                device.now += host_s
                device.queue(device_s[step % len(device_s)])
                watch.boundary()
                if watch.left:
                    return watch.times_ms
        raise AssertionError("the steps were never recorded")

    return times


@pytest.mark.parametrize("host_s", (0.01, 0.15, 0.28))
def test_a_step_takes_as_long_as_the_device_works_on_it(timed, host_s):
    assert timed(host_s, [0.3]) == pytest.approx([300] * 5)


def test_a_step_takes_as_long_as_the_host_where_that_is_slower(timed):
    assert timed(0.5, [0.3]) == pytest.approx([500] * 5)


@pytest.mark.parametrize("events_see", (True, False))
def test_the_spread_of_steps_is_that_of_the_device(timed, events_see):
    times_ms = timed(0.01, [0.3, 0.3, 0.3, 0.3, 0.6], events_see)
    assert sorted(times_ms) == pytest.approx([300, 300, 300, 300, 600], rel=0.05)


@pytest.mark.parametrize("host_s", (0.01, 0.28))
def test_work_that_no_event_waits_for_is_timed_by_synchronizations(timed, host_s):
    """As of streams that the current one never waits for: then a step is the host's part and the
    device's."""
    assert timed(host_s, [0.3], events_see=False) == pytest.approx([1e3 * (host_s + 0.3)] * 5)


QUEUED = textwrap.dedent("""
    import torch
    from pretended.clock import CLOCK
    model = torch.nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(24):
        model(torch.randn(64, 64, device="cuda")).square().mean().backward()
        CLOCK.work(0.1)
        optimizer.step()
        optimizer.zero_grad()
""")
# As above, but where only torch.cuda.synchronize() knows of the work.
HIDDEN = textwrap.dedent("""
    import time
    import torch
    free_at, known = [0.0], torch.cuda.synchronize
    def synchronize(device=None):
        time.sleep(max(0.0, free_at[0] - time.perf_counter()))
        known()
    torch.cuda.synchronize = synchronize
    model = torch.nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(24):
        model(torch.randn(64, 64, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        free_at[0] = max(free_at[0], time.perf_counter()) + 0.1
""")


@pytest.mark.usefixtures("warm_programs")
@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("source", (QUEUED, HIDDEN), ids=("queued", "hidden"))
def test_a_program_that_is_far_ahead_of_its_gpu(profiled, monkeypatch, source):  # noqa: F811 - the fixture
    monkeypatch.setenv("PRETEND_GPU", "h100")
    monkeypatch.setenv("PYTHONPATH", PRETENDED)
    process = profiled(source, warmup=3, timed=5).recorded[0]
    for times_ms in (process["times_ms"], process["recorded_ms"][1:]):
        assert statistics.median(times_ms) == pytest.approx(100, rel=0.05)
        # Times of the host alone spread by more than a step; a busy machine adds some ms to one of
        # them.
        assert statistics.stdev(times_ms) < 20
