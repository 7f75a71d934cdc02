"""How is a step timed, rightly and wrongly?  Milliseconds of baseline and changed
step by each method."""

import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from harness.machine.clock import time_synced
from harness.machine.devices import choose_device, synchronize
from harness.session.session import Session
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


def cold_steps(workload: TinyLlamaWorkload, steps: int) -> list[float]:
    """Milliseconds of the first steps of a new process, each synchronized."""
    return steps_ms(Session(workload, choose_device(workload.training.device)), steps)


def steps_ms(session: Session, steps: int) -> list[float]:
    """Milliseconds of each of so many steps, synchronized.  The clock begins once the session's
    settings of the process are in force, so that it does not time a change of them."""
    with session:
        return [time_synced(session.step, session.device) for _ in range(steps)]


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
    pair = [Session(workload, device) for workload in (baseline, changed)]
    for session in pair:
        steps_ms(session, warmup)
    right = alternating(*pair, range(repetitions))
    pause_s = PAUSE * statistics.median(right[0]) / 1e3
    return {
        RIGHT: right,
        "one run": [times[:1] for times in right],
        "no synchronization": [dispatch_ms(session, wrong_repetitions) for session in pair],
        "profiler left on": [profiled_ms(session, wrong_repetitions) for session in pair],
        "mean with an outlier": [
            interrupted_ms(pair[0], wrong_repetitions, pause_s),
            steps_ms(pair[1], wrong_repetitions),
        ],
    }


def alternating(a: Session, b: Session, rounds: Iterable[int]) -> tuple[list, list]:
    """Milliseconds of a step of a and of b in each round, in alternating order, so that drift of
    the machine affects both."""
    a_ms: list[float] = []
    b_ms: list[float] = []
    for i in rounds:
        in_turn = [(a, a_ms), (b, b_ms)]
        if i % 2:
            in_turn.reverse()
        for session, times in in_turn:
            times += steps_ms(session, 1)
    return a_ms, b_ms


def dispatch_ms(session: Session, steps: int) -> list[float]:
    """Milliseconds until each call returns, while the device still works.  On a CPU a worker thread
    takes the role of the device, and dispatching to it is timed."""
    if session.device.type == "cuda":
        synchronize(session.device)
        with session:
            return [return_ms(session.step) for _ in range(steps)]
    with session, ThreadPoolExecutor(1) as worker:
        worker.submit(int).result()  # the thread has started
        return [return_ms(lambda: worker.submit(session.step)) for _ in range(steps)]


def return_ms(work: Callable[[], object]) -> float:
    """Milliseconds until the call returns, without synchronization."""
    started = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - started)


def profiled_ms(session: Session, steps: int) -> list[float]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if session.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, record_shapes=True, with_stack=True):
        return steps_ms(session, steps)


def interrupted_ms(session: Session, steps: int, pause_s: float) -> list[float]:
    """Milliseconds of each step; the one in the middle includes a pause."""

    def interrupted_step() -> None:
        session.step()
        time.sleep(pause_s)

    times = []
    with session:
        for i in range(steps):
            work = interrupted_step if i == steps // 2 else session.step
            times.append(time_synced(work, session.device))
    return times
