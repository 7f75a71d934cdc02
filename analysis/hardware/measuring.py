"""Rates that matmuls and copies reach on this machine."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from harness.base.console import progress_bar
from harness.base.errors import out_of_memory
from harness.base.text import count_of
from harness.machine.clock import elapsed_ms, mark
from harness.machine.devices import PRECISIONS, matmul_precision
from harness.machine.disturbance import DisturbanceMeter, disturbance_text
from harness.machine.gpu_watch import gpu_reasons, gpu_text
from harness.machine.workspaces import library_workspaces

SQUARES = {
    "cpu": (256, 512, 1024, 2048, 4096),
    "cuda": (2048, 4096, 8192, 16384),
}  # a cache may favor a small one
LAYOUTS = (
    "x w'",
    "g w",
    "g' x",
)  # of a layer y = x w': forward, the gradient of x, the gradient of w
COPIED_BYTES = {"cpu": 2**28, "cuda": 2**29}  # far more than any cache holds
ROUNDS = 8  # over all shapes, so that a slow moment does not spoil all of one
SECONDS = (
    0.1  # that a shape is repeated for in each round, five times at least; a copy ten times as long
)
# Size of the matmul that measures the speedup of a narrow type: it takes milliseconds even where
# the type is emulated
GAIN_SQUARE = 512
EMULATED = 10  # times as slow as in fp32: further rounds would take seconds, and tell the same


class Measurement(NamedTuple):
    rate: float  # FLOPs or bytes per second; of a gain, a ratio
    source: str  # how it was measured
    disturbed: bool = False
    disturbance: str = "not watched"  # by what, with figures


def watch(
    device_type: str, measure: Callable[[], Measurement | None]
) -> tuple[Measurement | None, dict]:
    """The measurement, and the document of DisturbanceMeter about it."""
    meter = DisturbanceMeter(
        torch.device(device_type, torch.cuda.current_device() if device_type == "cuda" else None)
    )
    with meter.long_interval():
        found = measure()
    return found, meter.document()


def watched(device_type: str, measure: Callable[[], Measurement | None]) -> Measurement | None:
    """The measurement, with how far it was disturbed.  A GPU is timed by its events, so that only
    what else it does counts, not what the host's threads wait for."""
    found, during = watch(device_type, measure)
    if found is None:
        return None
    if device_type == "cuda":
        return found._replace(
            disturbed=bool(gpu_reasons(during["gpu"])), disturbance=gpu_text(during["gpu"])
        )
    return found._replace(disturbed=bool(during["disturbed"]), disturbance=disturbance_text(during))


def durations(device_type: str, work: Callable[[], object], seconds: float) -> list[float]:
    """Seconds that work() takes, repeated until so much time has passed; five times at least, after
    one warm-up.

    On a GPU by events, so that launching is no part of it.
    """
    work()
    on_gpu = device_type == "cuda"
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < deadline:
        start = mark(on_gpu)
        work()
        end = mark(on_gpu)
        if on_gpu:
            end.synchronize()
        times.append(elapsed_ms(start, end) / 1e3)
    return times


def measured_flops(device_type: str, precision: str, rounds: int = ROUNDS) -> Measurement | None:
    """The best of many square matmuls, of a few sizes, in the three layouts of a layer's forward
    and backward pass; None where memory does not suffice for any.  Sizes that take too long in a
    layout or do not fit are left out."""
    times: dict[tuple[str, int], list[float]] = {}
    passes = [layout for _ in range(rounds) for layout in LAYOUTS]
    with matmul_precision(precision), torch.no_grad():
        for layout in progress_bar(f"Measuring matmuls in {precision}", passes):
            for n in SQUARES[device_type]:
                smaller = times.get((layout, n // 2))
                if smaller and 8 * 6 * min(smaller) > 3 * SECONDS:
                    break  # some types are slow on some CPUs
                with skip_if_out_of_memory():
                    a, b = (
                        torch.randn(n, n, device=device_type).to(PRECISIONS[precision])
                        for _ in range(2)
                    )
                    left, right = (
                        (a.t() if layout == "g' x" else a),
                        (b.t() if layout == "x w'" else b),
                    )
                    multiply = functools.partial(torch.mm, left, right, out=torch.empty_like(a))
                    times.setdefault((layout, n), []).extend(
                        durations(device_type, multiply, SECONDS)
                    )
    if not times:
        return None
    layout, n = min(times, key=lambda key: min(times[key]) / key[1] ** 3)
    sizes = [size for _, size in times]
    threads = f", {count_of(torch.get_num_threads(), 'thread')}" if device_type == "cpu" else ""
    how = f"best of {len(times[layout, n])} matmuls {layout} of {n} x {n} in {precision}{threads}, "
    how += f"among {len(times)} shapes from {min(sizes)} to {max(sizes)}"
    return Measurement(2 * n**3 / min(times[layout, n]), how)


def measured_bandwidth(device_type: str, precision: str = "") -> Measurement | None:
    """The best of many copies much larger than a cache, each byte read once and written once; None
    where memory does not suffice."""
    with skip_if_out_of_memory():
        source = torch.ones(COPIED_BYTES[device_type] // 4, device=device_type)
        target = torch.empty_like(source)
        times = durations(device_type, lambda: target.copy_(source), 10 * SECONDS)
        how = f"best of {len(times)} copies of {source.nbytes // 2**20} MB"
        return Measurement(2 * source.nbytes / min(times), how)
    return None


def measured_gain(device_type: str, precision: str) -> Measurement | None:
    """How many times as fast as in fp32 a small matmul is in a narrow type, below 1 where it is
    emulated.

    On one thread: next to other processes, several would wait for each other and distort the ratio.
    """
    n, dtypes = GAIN_SQUARE, (torch.float32, PRECISIONS[precision])
    pairs = {
        dtype: [torch.randn(n, n, device=device_type).to(dtype) for _ in range(2)]
        for dtype in dtypes
    }
    best = dict.fromkeys(dtypes, float("inf"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with matmul_precision("fp32"), torch.no_grad():
            for _ in range(ROUNDS):
                for dtype in dtypes:  # alternating
                    multiply = functools.partial(torch.mm, *pairs[dtype])
                    times = durations(device_type, multiply, SECONDS / ROUNDS)
                    best[dtype] = min(best[dtype], *times)
                wide, narrow = best.values()
                if narrow > EMULATED * wide:
                    break
    finally:
        torch.set_num_threads(threads)
    took = f"{1e3 * wide:.3g} ms in fp32, {1e3 * narrow:.3g} ms in {precision}"
    return Measurement(wide / narrow, f"a matmul of {n} x {n} takes {took}, on one thread")


def measured_workspaces(device_type: str, precision: str) -> Measurement | None:
    """Bytes of the matmul libraries on this process's GPU; None if no other process can use it."""
    found = library_workspaces(torch.device(device_type, torch.cuda.current_device()), precision)
    return (
        None
        if found is None
        else Measurement(found, "a matmul and a batched one, forward and backward")
    )


@contextlib.contextmanager
def skip_if_out_of_memory() -> Iterator[None]:
    """Leave out what does not fit into memory: a GPU and a CPU report that in different ways."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
