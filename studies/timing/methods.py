"""How is a step timed, rightly and wrongly?  Milliseconds of baseline and changed
step by each method."""

import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from harness.instruments.timing import NullMeter
from harness.machine.clock import time_synced
from harness.machine.devices import choose_device, synchronize
from harness.model.cuda_graphs import captured
from tiny_llama_v1 import TinyLlamaWorkload

RIGHT = "right"
NO_WARM_UP = "no warm-up"
METHODS = {
    RIGHT: "warmed up, interleaved, synchronized, no profiler; median of the repetitions",
    "no synchronization": "the clock is read when the call returns, before the device is done",
    NO_WARM_UP: "the mean of the first steps of a process, the very first included",
    "profiler left on": "torch.profiler records shapes and stacks while the steps are timed",
    "one run": "a single step of each",
    "mean with an outlier": "the mean, when one step of the baseline was interrupted by a pause",
}
MEANS = (NO_WARM_UP, "mean with an outlier")  # the others report a median
PAUSE = 3.0  # median baseline steps; stands for writing a checkpoint, or another user's job


class Step:
    """Calling it runs one training step of the workload, without waiting for the device, under the
    workload's settings of the process.  A clock begins within workload.step_settings(), so that it
    does not time a change of them."""

    def __init__(self, workload: TinyLlamaWorkload, device: torch.device):
        self.workload, self.stream = workload, workload.batches(device)
        self.meter = NullMeter()
        with workload.step_settings():
            torch.manual_seed(workload.training.seed)
            state = workload.build(device)
            self.state = captured(workload, state, workload.batches(device))

    def __call__(self) -> None:
        with self.workload.step_settings():
            self.workload.train(self.state, self.stream, 1, self.meter, self.meter)


def cold_steps(workload: TinyLlamaWorkload, steps: int) -> list[float]:
    """Milliseconds of the first steps of a new process, each synchronized."""
    device = choose_device(workload.training.device)
    step = Step(workload, device)
    return steps_ms(step, steps, device)


def steps_ms(step: Step, steps: int, device: torch.device) -> list[float]:
    """Milliseconds of each of so many steps, synchronized."""
    with step.workload.step_settings():
        return [time_synced(step, device) for _ in range(steps)]


def interleaved(
    baseline: TinyLlamaWorkload,
    changed: TinyLlamaWorkload,
    repetitions: int,
    wrong_repetitions: int,
    warmup: int,
) -> dict[str, list[list[float]]]:
    """Milliseconds of (baseline, changed) steps by method:
    all but the one that needs a new process."""
    device = choose_device(baseline.training.device)
    pair = [Step(workload, device) for workload in (baseline, changed)]
    for step in pair:
        steps_ms(step, warmup, device)
    right = alternating(*pair, device, range(repetitions))
    pause_s = PAUSE * statistics.median(right[0]) / 1e3
    return {
        RIGHT: right,
        "one run": [times[:1] for times in right],
        "no synchronization": [dispatch_ms(step, wrong_repetitions, device) for step in pair],
        "profiler left on": [profiled_ms(step, wrong_repetitions, device) for step in pair],
        "mean with an outlier": [
            interrupted_ms(pair[0], wrong_repetitions, pause_s, device),
            steps_ms(pair[1], wrong_repetitions, device),
        ],
    }


def alternating(a: Step, b: Step, device: torch.device, rounds: Iterable[int]) -> tuple[list, list]:
    """Milliseconds of a() and b() in each round, in alternating order, so that drift of the machine
    affects both."""
    a_ms, b_ms = [], []
    for i in rounds:
        for step, times in ((a, a_ms), (b, b_ms)) if i % 2 == 0 else ((b, b_ms), (a, a_ms)):
            times += steps_ms(step, 1, device)
    return a_ms, b_ms


def dispatch_ms(step: Step, steps: int, device: torch.device) -> list[float]:
    """Milliseconds until each call returns, while the device still works.  On a CPU a worker thread
    takes the role of the device, and dispatching to it is timed."""
    if device.type == "cuda":
        synchronize(device)
        with step.workload.step_settings():
            return [return_ms(step) for _ in range(steps)]
    with step.workload.step_settings(), ThreadPoolExecutor(1) as worker:
        worker.submit(int).result()  # the thread has started
        return [return_ms(lambda: worker.submit(step)) for _ in range(steps)]


def return_ms(work: Callable[[], object]) -> float:
    """Milliseconds until the call returns, without synchronization."""
    started = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - started)


def profiled_ms(step: Step, steps: int, device: torch.device) -> list[float]:
    activity = torch.profiler.ProfilerActivity
    activities = [activity.CPU, activity.CUDA] if device.type == "cuda" else [activity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True, with_stack=True):
        return steps_ms(step, steps, device)


def interrupted_ms(step: Step, steps: int, pause_s: float, device: torch.device) -> list[float]:
    """Milliseconds of each step; the one in the middle includes a pause."""

    def interrupted() -> None:
        step()
        time.sleep(pause_s)

    with step.workload.step_settings():
        return [time_synced(interrupted if i == steps // 2 else step, device) for i in range(steps)]
