"""How much memory does PyTorch's caching allocator reserve for a step?  By replaying its
allocations with the rules of c10/cuda/CUDACachingAllocator.cpp.

What is reserved is more than what is live: a tensor takes the smallest free block that has room for
it, the rest of the block stays free only for tensors that are no larger, and each stream has blocks
of its own.
"""

import bisect
from collections.abc import Iterable, Sequence

from harness.base.units import MB
from harness.instruments.memory_timeline import StepMemory

ROUNDING = 512  # sizes are multiples of it
SMALL = MB  # what is no larger has pools of its own, in segments of
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MB, 20 * MB
# From here on a segment is as large as what asks for it, in multiples of SMALL_SEGMENT.
OWN_SEGMENT = 10 * MB
STEPS = 3  # replayed after the first: later ones find the same blocks


class Block:
    """A part of a segment, between its neighbors."""

    __slots__ = ("address", "free", "next", "pool", "prev", "size")

    def __init__(self, pool: "Pool", address: int, size: int, prev: "Block | None" = None):
        self.pool, self.address, self.size, self.prev = pool, address, size, prev
        self.next, self.free = None, False


class Pool:
    """The blocks of one stream, small or large.  With expandable segments it has a single segment,
    which grows."""

    def __init__(self, small: bool, expandable: bool):
        self.small, self.expandable = small, expandable
        # That is split off a block.
        self.least_rest = ROUNDING if small or expandable else SMALL + 1
        # Size, address, block: the smallest, then the lowest, first.
        self.free: list[tuple[int, int, Block]] = []
        self.reserved = 0
        self.last: Block | None = None  # of the segment that can grow

    def allocate(self, size: int) -> Block:
        """The smallest free block of this size, rounded, or a new one; the block that can grow only
        if no other has room."""
        at = bisect.bisect_left(self.free, (size,))
        if self.expandable and at + 1 < len(self.free) and self.free[at][2] is self.last:
            at += 1
        if at < len(self.free):
            block = self.free.pop(at)[2]
        elif self.expandable:
            block = self.grown(size)
        else:
            block = self.new_segment(size)
        block.free = False
        if block.size - size >= self.least_rest:
            self.split(block, size)
        return block

    def new_segment(self, size: int) -> Block:
        """Of a pool whose segments do not grow."""
        if self.small:
            length = SMALL_SEGMENT
        elif size < OWN_SEGMENT:
            length = LARGE_SEGMENT
        else:
            length = up(size, SMALL_SEGMENT)
        block = Block(self, self.reserved, length)
        self.reserved += length
        return block

    def split(self, block: Block, size: int) -> None:
        """The block keeps this size, and the rest of it is free."""
        rest = Block(self, block.address + size, block.size - size, block)
        rest.next, block.next, block.size = block.next, rest, size
        if rest.next:
            rest.next.prev = rest
        if self.last is block:
            self.last = rest
        self.keep(rest)

    def grown(self, size: int) -> Block:
        """The end of the segment that grows, with what is free there."""
        tail = self.last if self.last and self.last.free else None
        more = up(size - (tail.size if tail else 0), SMALL_SEGMENT if self.small else LARGE_SEGMENT)
        if tail:
            self.discard(tail)
            tail.size += more
        else:
            tail = Block(self, self.reserved, more, self.last)
            if self.last:
                self.last.next = tail
        self.last, self.reserved = tail, self.reserved + more
        return tail

    def release(self, block: Block) -> None:
        """Merged with the free ones beside it."""
        for first, second in ((block, block.next), (block.prev, block)):
            if first and second and (first.free or second.free):
                self.discard(first if first.free else second)
                first.size, first.next = first.size + second.size, second.next
                if first.next:
                    first.next.prev = first
                if self.last is second:
                    self.last = first
                block = first
        self.keep(block)

    def keep(self, block: Block) -> None:
        block.free = True
        bisect.insort(self.free, (block.size, block.address, block))

    def discard(self, block: Block) -> None:
        block.free = False
        del self.free[bisect.bisect_left(self.free, (block.size, block.address))]


class CachingAllocator:
    """Of one device; nothing is returned to the driver, which the real one does before it runs out
    of memory."""

    def __init__(self, expandable: bool = False):
        self.expandable = expandable
        self.pools: dict[tuple[int, bool], Pool] = {}

    @property
    def reserved(self) -> int:
        return sum(pool.reserved for pool in self.pools.values())

    def allocate(self, size: int, stream: int = 0) -> Block:
        size = max(ROUNDING, up(size, ROUNDING))
        key = (stream, size <= SMALL)
        if key not in self.pools:
            self.pools[key] = Pool(key[1], self.expandable)
        return self.pools[key].allocate(size)


def up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def needed_bytes(
    memory: StepMemory, on_gpu: bool, workspaces: int = 0, sizes: Sequence[int] | None = None
) -> int:
    """What has to be free for a step beside these workspaces: what a GPU's allocator reserves, else
    what is live."""
    if on_gpu:
        return reserved_bytes(memory, [workspaces // 2] * 2, sizes=sizes) - workspaces
    return int(memory.live_bytes_at_allocations().max())


def reserved_bytes(
    memory: StepMemory,
    workspaces: Sequence[int] = (),
    expandable: bool = False,
    sizes: Sequence[int] | None = None,
) -> int:
    """What is reserved after the first steps of a run, with these workspaces of the matmul
    libraries in the pool.  sizes: of the allocations, where they are not those of this step."""
    allocator = CachingAllocator(expandable)
    for size in workspaces:
        allocator.allocate(size)
    if sizes is None:
        sizes = [allocation.bytes for allocation in memory.allocations]
    Replay(memory, sizes, allocator).run(1 + STEPS)
    return allocator.reserved


class Replay:
    """The allocations of a step, made again and again.

    The first step has no optimizer state before its optimizer does; what outlives a step is freed
    at its end.
    """

    def __init__(self, memory: StepMemory, sizes: Sequence[int], allocator: CachingAllocator):
        """sizes: of the allocations of the step, in bytes."""
        self.allocations, self.sizes, self.allocator = memory.allocations, sizes, allocator
        self.blocks: dict[int, Block] = {}  # by index of the allocation
        self.before: list[int] = []  # what is there when a step begins
        self.state: list[int] = []  # of it, the optimizer's
        self.events: list[tuple[int, int, bool]] = []  # event, index, whether it allocates
        for index, allocation in enumerate(self.allocations):
            if not sizes[index]:
                continue
            if allocation.born == 0:
                self.before.append(index)
                if allocation.category == "optimizer":
                    self.state.append(index)
            else:
                self.events.append((allocation.born, index, True))
            if allocation.died is not None:
                self.events.append((allocation.died, index, False))
        self.events.sort()
        updates = [phase.first for phase in memory.phases if phase.name == "optimizer"]
        self.updates = min(updates, default=len(memory.places))

    def run(self, steps: int) -> None:
        missing = self.state  # until the optimizer's first step
        for index in self.before:
            if self.allocations[index].category != "optimizer":
                self.allocate([index])
        for _ in range(steps):
            for event, index, allocates in self.events:
                if missing and event > self.updates:
                    self.allocate(missing)
                    missing = []
                if allocates:
                    self.allocate([index])
                else:
                    self.free([index])
            self.end_step()

    def end_step(self) -> None:
        """All is as before the step."""
        self.free([index for index in self.blocks if self.allocations[index].born > 0])
        self.allocate(index for index in self.before if index not in self.blocks)

    def allocate(self, indices: Iterable[int]) -> None:
        for index in indices:
            stream = self.allocations[index].stream
            self.blocks[index] = self.allocator.allocate(self.sizes[index], stream)

    def free(self, indices: Iterable[int]) -> None:
        for index in indices:
            block = self.blocks.pop(index)
            block.pool.release(block)
