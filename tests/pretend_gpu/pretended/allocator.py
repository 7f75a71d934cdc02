"""The caching allocator in numbers: what c10/cuda/CUDACachingAllocator.cpp would do with the same
requests.

Sizes are rounded to 512 bytes.  Up to 1 MiB they come out of blocks of 2 MiB; up to 10 MiB out of
blocks of 20 MiB; larger ones have a block of their own, rounded to 2 MiB.  The smallest free block
that suffices is taken and split; neighbors that are free become one again.  Blocks go back to the
driver only when memory runs out.
"""

from __future__ import annotations

import torch

from pretended.cards import MIB, Card, other_memory

ROUND, SMALL = 512, MIB
CONTEXT = 400 * MIB  # of the driver and of the loaded kernels, for each process


def rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def shown(size: int) -> str:
    """As the allocator's messages have it."""
    unit, name = next(
        (pair for pair in ((2**30, "GiB"), (MIB, "MiB"), (1024, "KiB")) if size >= pair[0]),
        (1, "bytes"),
    )
    return f"{size / unit:.2f} {name}"


class Block:
    """A piece of a segment, in a list with its neighbors."""

    def __init__(
        self, size: int, small: bool, before: Block | None = None, after: Block | None = None
    ):
        self.size, self.small, self.before, self.after = size, small, before, after
        self.requested: int | None = None  # bytes; None: free


class Allocator:
    """Of one device in one process."""

    def __init__(self, card: Card):
        self.card = card
        self.free_blocks: list[Block] = []
        self.counts = {
            name: dict.fromkeys(("current", "peak", "allocated", "freed"), 0) for name in self.KINDS
        }
        self.retries = self.ooms = 0

    KINDS = ("allocated_bytes", "requested_bytes", "reserved_bytes", "allocation", "segment")

    def _count(self, kind: str, change: int) -> None:
        count = self.counts[kind]
        count["current"] += change
        count["peak"] = max(count["peak"], count["current"])
        count["allocated" if change > 0 else "freed"] += abs(change)

    def __getitem__(self, kind: str) -> int:
        return self.counts[kind]["current"]

    @property
    def free(self) -> int:
        """What the driver calls free."""
        return max(0, self.card.memory - CONTEXT - other_memory(self.card) - self["reserved_bytes"])

    def allocate(self, requested: int) -> Block:
        """Raises OutOfMemoryError."""
        size = rounded(max(requested, 1), ROUND)
        small = size <= SMALL
        fitting = [
            block for block in self.free_blocks if block.small == small and block.size >= size
        ]
        if fitting:
            block = min(fitting, key=lambda block: block.size)
            self.free_blocks.remove(block)
        else:
            block = self._segment(size, small, requested)
        rest = block.size - size
        if rest >= ROUND if small else rest > SMALL:
            tail = Block(rest, small, block, block.after)
            if tail.after:
                tail.after.before = tail
            block.size, block.after = size, tail
            self.free_blocks.append(tail)
        block.requested = requested
        for kind, change in (
            ("allocated_bytes", block.size),
            ("requested_bytes", requested),
            ("allocation", 1),
        ):
            self._count(kind, change)
        return block

    def _segment(self, size: int, small: bool, requested: int) -> Block:
        length = 2 * MIB if small else 20 * MIB if size < 10 * MIB else rounded(size, 2 * MIB)
        if length > self.free:
            self.retries += 1
            self.empty_cache()
        if length > self.free:
            self.ooms += 1
            raise torch.OutOfMemoryError(self.message(requested))
        self._count("reserved_bytes", length)
        self._count("segment", 1)
        return Block(length, small)

    def message(self, requested: int) -> str:
        allocated, reserved = self["allocated_bytes"], self["reserved_bytes"]
        return (
            f"{'HIP' if self.card.is_rocm else 'CUDA'} out of memory. Tried to allocate"
            f" {shown(requested)}. GPU 0 has a total capacity of {shown(self.card.memory)} of which"
            f" {shown(self.free)} is free. Of the allocated memory {shown(allocated)} is allocated"
            f" by PyTorch, and {shown(reserved - allocated)} is reserved by PyTorch but"
            " unallocated."
        )

    def release(self, block: Block) -> None:
        for kind, change in (
            ("allocated_bytes", block.size),
            ("requested_bytes", block.requested),
            ("allocation", 1),
        ):
            self._count(kind, -change)
        block.requested = None
        for other in (block.before, block.after):
            if other and other.requested is None:
                self.free_blocks.remove(other)
                first, second = (other, block) if other is block.before else (block, other)
                first.size, first.after = first.size + second.size, second.after
                if second.after:
                    second.after.before = first
                block = first
        self.free_blocks.append(block)

    def empty_cache(self) -> None:
        for block in [block for block in self.free_blocks if not block.before and not block.after]:
            self.free_blocks.remove(block)
            self._count("reserved_bytes", -block.size)
            self._count("segment", -1)

    def reset_peaks(self) -> None:
        for count in self.counts.values():
            count["peak"] = count["current"]

    def stats(self) -> dict[str, int]:
        """As torch.cuda.memory_stats, as far as it goes."""
        found = {
            f"{kind}.all.{name}": value
            for kind, count in self.counts.items()
            for name, value in count.items()
        }
        return found | {"num_alloc_retries": self.retries, "num_ooms": self.ooms}
