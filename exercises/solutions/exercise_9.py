"""A timer for steps that run after the call has returned, as on a GPU."""

import statistics
import time


def step_ms(step, synchronize, warmup, steps):
    """Median time of a step, in ms."""
    for _ in range(warmup):
        step()
    synchronize()
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)
