"""Snapshots of torch.cuda.memory that are made up: what an allocator would have noted of a few
allocations."""

import pickle
from pathlib import Path

MB = 2**20
TORCH = "/env/lib/python3.11/site-packages/torch"
MODULE = {"name": "_call_impl", "filename": f"{TORCH}/nn/modules/module.py", "line": 1747}
OPTIMIZER = {"name": "wrapper", "filename": f"{TORCH}/optim/optimizer.py", "line": 493}


def frame(where: str, function: str = "train") -> dict:
    """Of the program: 'train.py:88'."""
    name, _, line = where.partition(":")
    return {"name": function, "filename": f"/home/user/work/{name}", "line": int(line)}


MAIN = frame("train.py:1", "<module>")
FORWARD = [frame("model.py:39", "forward"), MODULE, MAIN]
BACKWARD = []  # a thread of the engine has no frame of Python
OPTIMIZER_STEP = [OPTIMIZER, MAIN]


class Allocator:
    """One device: its events, and at the end a segment for each block."""

    def __init__(self, device: int = 0):
        self.device, self.events, self.live, self.reserved = device, [], {}, []
        self.next_address, self.time_us = 2**40, 1_700_000_000_000_000

    def note(self, action: str, address: int, size: int, frames: list[dict]) -> None:
        self.time_us += 10
        event = {"action": action, "addr": address, "size": size, "stream": 0, "frames": frames}
        self.events.append({**event, "time_us": self.time_us})

    def make(self, size: int, frames: list[dict]) -> int:
        """Allocates; returns the address."""
        address = self.next_address
        self.next_address += size + 512
        self.live[address] = size
        self.note("alloc", address, size, frames)
        return address

    def free(self, address: int, frames: list[dict]) -> None:
        size = self.live.pop(address)
        self.note("free_requested", address, size, frames)
        self.note("free_completed", address, size, frames)

    def had(self, size: int) -> None:
        """Something that was there before the recording."""
        self.live[self.next_address] = size
        self.next_address += size + 512

    def reserves(self, size: int, pool: tuple[int, int] = (0, 0)) -> None:
        """A segment that is free at the end, in a pool of its own unless that is (0, 0)."""
        self.reserved.append(self.segment(self.next_address, size, "inactive", pool))
        self.next_address += size + 512

    def segment(self, address: int, size: int, state: str, pool: tuple[int, int] = (0, 0)) -> dict:
        block = {"address": address, "size": size, "requested_size": size, "frames": []}
        segment = {"device": self.device, "address": address, "total_size": size}
        blocks = [{**block, "state": state}]
        return {**segment, "segment_pool_id": pool, "blocks": blocks}

    def segments(self) -> list[dict]:
        segments = list(self.reserved)
        for address, size in self.live.items():
            segments.append(self.segment(address, size, "active_allocated"))
        return segments


def step(
    allocator: Allocator,
    first: bool = False,
    leaks: int = 0,
    activations: int = 8,
    optimizer: list = OPTIMIZER_STEP,
) -> None:
    """A training step of 10 MB of parameters with Adam, in MB; `leaks` is left at train.py:88.
    optimizer: the frames of its step."""
    kept = [allocator.make(activations * MB, FORWARD)]
    if leaks:
        allocator.make(leaks, [frame("train.py:88", "append"), MAIN])
    gradient = allocator.make(10 * MB, BACKWARD)
    scratch = allocator.make(2 * MB, BACKWARD)
    allocator.free(scratch, BACKWARD)
    for address in kept:
        allocator.free(address, BACKWARD)
    if first:
        allocator.make(20 * MB, optimizer)
    update = allocator.make(5 * MB, optimizer)
    allocator.free(update, optimizer)
    allocator.free(gradient, [MAIN])


def write_snapshot(path: Path, *allocators: Allocator, **more: object) -> Path:
    """The pickle that torch would write of these devices, in the order of their numbers."""
    traces = [[] for _ in range(1 + max(allocator.device for allocator in allocators))]
    segments = []
    for allocator in allocators:
        traces[allocator.device] = allocator.events
        segments += allocator.segments()
    snapshot = {"device_traces": traces, "segments": segments, **more}
    path.write_bytes(pickle.dumps(snapshot))
    return path
