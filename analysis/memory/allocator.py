"""How much memory does PyTorch's caching allocator reserve for a step?  By replaying its
allocations with the rules of c10/cuda/CUDACachingAllocator.cpp.

What is reserved is more than what is live: a tensor takes the smallest free block that has room for
it, the rest of the block stays free only for tensors that are no larger, and each stream has blocks
of its own.
"""

import bisect
from collections.abc import Sequence

from harness.base.units import MB
from harness.instruments.memory_timeline import StepMemory

ROUNDING = 512  # sizes are multiples of it
SMALL = MB  # what is no larger has pools of its own, in segments of
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MB, 20 * MB
OWN_SEGMENT = (
    10 * MB
)  # from here on a segment is as large as what asks for it, in multiples of SMALL_SEGMENT
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
        self.least_rest = (
            ROUNDING if small or expandable else SMALL + 1
        )  # that is split off a block
        self.free: list[
            tuple[int, int, Block]
        ] = []  # size, address, block: the smallest, then the lowest, first
        self.reserved = 0
        self.last: Block | None = None  # of the segment that can grow

    def allocate(self, size: int) -> Block:
        """The smallest free block of this size, rounded, or a new one; the block that can grow only
        if no other has room."""
        at = bisect.bisect_left(self.free, (size,))
        if self.expandable and at + 1 < len(self.free) and self.free[at][2] is self.last:
            at += 1
        block = (
            self.free.pop(at)[2]
            if at < len(self.free)
            else self.grown(size)
            if self.expandable
            else None
        )
        if block is None:
            rounded = (
                SMALL_SEGMENT
                if self.small
                else LARGE_SEGMENT
                if size < OWN_SEGMENT
                else up(size, SMALL_SEGMENT)
            )
            block = Block(self, self.reserved, rounded)
            self.reserved += rounded
        block.free = False
        if block.size - size >= self.least_rest:
            rest = Block(self, block.address + size, block.size - size, block)
            rest.next, block.next, block.size = block.next, rest, size
            if rest.next:
                rest.next.prev = rest
            if self.last is block:
                self.last = rest
            self.keep(rest)
        return block

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
    libraries in the pool.  sizes: of the allocations, where they are not those of this step.

    The first step has no optimizer state before its optimizer does; what outlives a step is freed
    at its end.
    """
    allocator = CachingAllocator(expandable)
    blocks: dict[int, Block] = {}  # by index of the allocation

    def allocate(indices: Sequence[int]) -> None:
        for i in indices:
            blocks[i] = allocator.allocate(sizes[i], made[i].stream)

    def free(indices: Sequence[int]) -> None:
        for i in indices:
            block = blocks.pop(i)
            block.pool.release(block)

    made = memory.allocations
    sizes = [one.bytes for one in made] if sizes is None else sizes
    held = [i for i, size in enumerate(sizes) if size]
    before = [i for i in held if made[i].born == 0]
    state = [i for i in before if made[i].category == "optimizer"]
    events = [(made[i].born, i, allocate) for i in held if made[i].born > 0]
    events = sorted(events + [(made[i].died, i, free) for i in held if made[i].died is not None])
    updates = min(
        (phase.first for phase in memory.phases if phase.name == "optimizer"),
        default=len(memory.places),
    )
    for size in workspaces:
        allocator.allocate(size)
    allocate([i for i in before if made[i].category != "optimizer"])
    for _ in range(1 + STEPS):
        for event, i, change in events:
            if event > updates and state:
                allocate(state)
                state = []
            change([i])
        free([i for i in blocks if made[i].born > 0])
        allocate([i for i in before if i not in blocks])
    return allocator.reserved
