"""Exercise 2: what a snapshot of memory says of its peak, tried on a few made-up events and on a
stored snapshot, of which the analysis tells the same."""

from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from analysis.memory.snapshot.analyzed import analyze_snapshot
from analysis.memory.snapshot.document import SnapshotDevice
from analysis.memory.snapshot.reading import load_plain_data, read_snapshot
from harness import PROJECT
from workshop.own_code.findings import Finding, differs, function_of

STORED = PROJECT / "benchmarks/results/nvidia-h200/memory_snapshot_step.pickle.gz"
SIGNATURE = "(events)"
SEGMENT_BYTES = 2**21
TOLERANCE = 0.001  # relative: of what was there before, some is freed


def event(action: str, address: int, size: int, line: int = 1) -> dict[str, Any]:
    frames = [
        {"filename": "/lib/python3/site-packages/torch/nn/functional.py", "line": 7, "name": "f"},
        {"filename": "/home/me/train.py", "line": line, "name": "forward"},
        {"filename": "/home/me/train.py", "line": 99, "name": "<module>"},
    ]
    return {"action": action, "addr": address, "size": size, "frames": frames}


def freed(address: int, size: int) -> list[dict[str, Any]]:
    return [event("free_requested", address, size), event("free_completed", address, size)]


EVENTS = [
    *freed(0xA0, 5000),  # allocated before the recording
    event("segment_alloc", 0xB0, SEGMENT_BYTES),
    event("alloc", 0xB0, 1000, line=10),
    event("alloc", 0xC0, 300, line=20),
    *freed(0xB0, 1000),
    event("alloc", 0xB0, 800, line=30),  # where something else was
    event("alloc", 0xD0, 400, line=20),
    *freed(0xC0, 300),
    event("alloc", 0xE0, 100, line=10),
]
PEAK_BYTES = 1500
NOTHING_FREED = (2600, 1600)  # of all that was allocated, or of the last at each address
FREED_TWICE = 1300
HELD = {"train.py:30": 800, "train.py:20": 700}


def findings(load: Callable[[], ModuleType]) -> Iterator[Finding]:
    """load: imports the learner's file."""
    at_peak = function_of(load(), "at_peak", SIGNATURE)
    told = at_peak(EVENTS)
    yield Finding("tells of a peak, and of lines", wrong_kind(told))
    peak_bytes, held = told
    yield Finding("finds the peak of ten made-up events", wrong_peak(peak_bytes))
    held = {line: size for line, size in held.items() if size}
    problem = None if held == HELD else differs("lines", HELD, held)
    yield Finding("says which lines hold it", problem)
    peak_bytes, held = at_peak(load_plain_data(STORED)["device_traces"][0])
    device = analyze_snapshot(read_snapshot(STORED)).document.fullest
    expected = device.peak_bytes - device.before_bytes
    problem = None
    if abs(peak_bytes - expected) > TOLERANCE * expected:
        problem = differs("bytes", f"{expected:,}", f"{peak_bytes:,}")
    yield Finding(f"finds the peak of {STORED.name}", problem)
    yield Finding("says which line holds most there", wrong_line(device, held))


def wrong_kind(told: object) -> str | None:
    is_right = isinstance(told, tuple | list) and len(told) == 2 and isinstance(told[1], dict)
    form = "(bytes, {'train.py:77': bytes, ...})"
    return None if is_right else differs("returned", form, repr(told))


def wrong_peak(peak_bytes: int) -> str | None:
    if peak_bytes == PEAK_BYTES:
        return None
    found = f"{peak_bytes:,}"
    if peak_bytes >= SEGMENT_BYTES:
        found += "; a segment is what the allocator takes from the driver, not a tensor"
    elif peak_bytes in NOTHING_FREED:
        found += "; `free_completed` gives the memory of an address back"
    elif peak_bytes == FREED_TWICE:
        found += "; each tensor is freed once: `free_requested` asks, `free_completed` does it"
    elif peak_bytes <= 0:
        found += "; what was allocated before the recording is freed in it, and was never counted"
    return differs("bytes", f"{PEAK_BYTES:,}", found)


def wrong_line(device: SnapshotDevice, held: dict[str, int]) -> str | None:
    """What is wrong with the line that holds most at the peak of the stored snapshot."""
    sums = Counter()
    for row in device.lines:
        if row.where and row.category != "before_the_recording":
            sums[row.where] += row.bytes
    where, size = sums.most_common(1)[0]
    of_program = {line: bytes_held for line, bytes_held in held.items() if line}
    largest = max(of_program, key=of_program.get, default=None)
    if largest == where and of_program[largest] == size:
        return None
    found = f"{largest} with {of_program.get(largest, 0):,}"
    return differs("line", f"{where} with {size:,} bytes", found)
