"""Exercise 3: what limits a matmul, on made-up devices and on this one, where the same matmul with
1 to 64 tokens is timed."""

from collections.abc import Callable, Iterator
from types import ModuleType

from harness.base.text import count_of
from workshop.own_code.findings import Finding, differs, function_of
from workshop.own_code.roofline_here import Device, show_regimes

SIGNATURE = "(tokens, width, device)"
REGIMES = ("launch", "memory", "compute")


SMALL_CPU = Device(60e9, 15e9, 4e-6)
GPU = Device(60e12, 3e12, 5e-6)
SHAPES = (  # tokens, width, and what limits them
    (SMALL_CPU, "a CPU", 1, 16, "launch"),
    (SMALL_CPU, "a CPU", 1, 4096, "memory"),
    (SMALL_CPU, "a CPU", 64, 4096, "compute"),
    (GPU, "a GPU", 64, 256, "launch"),
    (GPU, "a GPU", 16, 4096, "memory"),
    (GPU, "a GPU", 512, 4096, "compute"),
)


def findings(load: Callable[[], ModuleType]) -> Iterator[Finding]:
    """load: imports the learner's file."""
    module = load()
    flops_and_bytes = function_of(module, "flops_and_bytes", "(tokens, width)")
    regime = function_of(module, "regime", SIGNATURE)
    flops, moved_bytes = flops_and_bytes(3, 5)
    yield Finding("counts FLOPs", wrong_flops(flops))
    yield Finding("counts bytes", wrong_bytes(moved_bytes))
    for device, name, tokens, width, right in SHAPES:
        told = regime(tokens, width, device)
        problem = None if told == right else wrong_regime(device, tokens, width, right, told)
        yield Finding(f"{name}, {count_of(tokens, 'token')}, width {width}", problem)
    show_regimes(regime, flops_and_bytes)


def seconds_of(device: Device, tokens: int, width: int) -> dict[str, float]:
    """Least time by each limit."""
    moved_bytes = 4 * (2 * tokens * width + width**2)
    return {
        "launch": device.launch_s,
        "memory": moved_bytes / device.bytes_per_s,
        "compute": 2 * tokens * width**2 / device.flops_per_s,
    }


def wrong_flops(flops: float) -> str | None:
    right = 2 * 3 * 5 * 5
    found = f"{flops:g}; one for each multiplication and one for each addition"
    return None if flops == right else differs("3 tokens, width 5", f"{right}", found)


def wrong_bytes(moved_bytes: float) -> str | None:
    right = 4 * (3 * 5 + 5 * 5 + 3 * 5)
    found = f"{moved_bytes:g}; 4 for each number of x, w and the result"
    return None if moved_bytes == right else differs("3 tokens, width 5", f"{right}", found)


def wrong_regime(device: Device, tokens: int, width: int, right: str, told: object) -> str:
    times = []
    for name, seconds in seconds_of(device, tokens, width).items():
        times.append(f"{name} {1e6 * seconds:.3g} us")
    return differs("limit", right, f"{told!r}; at least: {', '.join(times)}")
