"""What was allocated at each time, from when until when, and in which category?

Events tell requested sizes, blocks those that the allocator rounded.  What the recording made
counts as requested; what was there before it, as the blocks that are left of it at the end, and
what was freed of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from analysis.hardware.datasheets import LIBRARY_WORKSPACES
from analysis.memory.snapshot.phases import Phases, phases_of
from analysis.memory.snapshot.reading import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Block,
    Mark,
    Recording,
)
from analysis.memory.snapshot.stacks import Line, Phase

NEVER = np.iinfo(np.int64).max  # an event that does not come
# In the order of their codes.
CATEGORIES = ("gradients", "optimizer_state", "activations", "kept", "temporaries")
GRADIENTS, STATE, ACTIVATIONS, KEPT, TEMPORARIES = range(5)
BEFORE = "before_the_recording"
ALLOCATED = "active_allocated"  # of a block that the program holds
FREE = "inactive"


class Lifetimes(NamedTuple):
    """What the recording saw being allocated, and what it did not."""

    made_at: np.ndarray  # number of the event [allocations]
    freed_at: np.ndarray  # number of the event, NEVER within the recording [allocations]
    unseen_at: np.ndarray  # events that free what was there before [frees]
    left: list[Block]  # what was there before and still is


def lifetimes_of(recording: Recording) -> Lifetimes:
    """Which event freed what each allocation made."""
    action = recording.action
    # What ends an allocation: the request, or where a writer kept the completion alone, that.
    end = FREE_REQUESTED if (action == FREE_REQUESTED).any() else FREE_COMPLETED
    live: dict[int, int] = {}  # number of the allocation, by address
    made_at, freed_at, unseen_at = [], [], []
    for event, (code, address) in enumerate(zip(action.tolist(), recording.address, strict=True)):
        if code == ALLOC:
            if address in live:  # its end was not noted
                freed_at[live[address]] = event
            live[address] = len(made_at)
            made_at.append(event)
            freed_at.append(NEVER)
        elif code == end:
            number = live.pop(address, None)
            if number is None:
                unseen_at.append(event)
            else:
                freed_at[number] = event
    left = []
    for block in recording.blocks:
        if block.state == ALLOCATED and block.address not in live:
            left.append(block)
    return Lifetimes(
        np.array(made_at, dtype=np.int64),
        np.array(freed_at, dtype=np.int64),
        np.array(unseen_at, dtype=np.int64),
        left,
    )


class Replay:
    """One device's recording with the lifetime and the category of each allocation.

    phase, category: codes; made_at, freed_at: numbers of events [allocations].  before_bytes: what
    was allocated as the recording began.  peak_event: None where the most was allocated before the
    first event.
    """

    def __init__(self, recording: Recording, marks: Sequence[Mark]):
        self.recording = recording
        self.phases: Phases = phases_of(recording, marks)
        lifetimes = lifetimes_of(recording)
        self.made_at, self.freed_at = lifetimes.made_at, lifetimes.freed_at
        self.unseen_at, self.left = lifetimes.unseen_at, lifetimes.left
        self.size_bytes = recording.size_bytes[self.made_at]
        self.stack = recording.stack[self.made_at]
        self.phase = self.phases.of_event[self.made_at]
        self.category = self._categories()
        left_bytes = sum(block.size_bytes for block in self.left)
        self.before_bytes = left_bytes + int(recording.size_bytes[self.unseen_at].sum())
        totals = self.before_bytes + np.cumsum(self.changes())
        self.peak_event: int | None = None
        self.peak_bytes = self.before_bytes
        if len(totals) and totals.max() > self.before_bytes:
            self.peak_event = int(totals.argmax())
            self.peak_bytes = int(totals[self.peak_event])

    # ---- Categories --------------------------------------------------------------------------

    def _categories(self) -> np.ndarray:
        """Codes of CATEGORIES [allocations]."""
        outlives = self.freed_at >= self._ends_of_phases()
        in_forward = ~np.isin(self.phase, (Phase.BACKWARD, Phase.OPTIMIZER))
        is_left = self.freed_at == NEVER
        category = np.full(len(self.phase), TEMPORARIES, dtype=np.int8)
        category[(self.phase == Phase.OPTIMIZER) & outlives] = STATE
        category[(self.phase == Phase.BACKWARD) & outlives] = GRADIENTS
        category[in_forward & self._meets_backward()] = ACTIVATIONS
        category[in_forward & is_left] = KEPT
        # A library takes a workspace in each thread, also in those of the backward pass, and keeps
        # it.
        of_library = np.array([stack.of_library for stack in self.recording.stacks] + [False])
        is_workspace = of_library[self.stack] | self._are_workspaces(in_forward & is_left)
        category[is_workspace & is_left] = KEPT
        return category

    def _are_workspaces(self, kept_in_forward: np.ndarray) -> np.ndarray:
        """Workspaces of the matmul libraries in threads of the backward pass, where no frame of C++
        tells them [allocations, bool]: the first without any frame that has a size of PyTorch's
        defaults and stays, if the forward pass took one of the same size in the recording."""
        is_workspace = np.zeros(len(self.phase), dtype=bool)
        stays = (self.phase == Phase.BACKWARD) & (self.stack < 0) & (self.freed_at == NEVER)
        for size in LIBRARY_WORKSPACES:
            of_size = self.size_bytes == size
            if (kept_in_forward & of_size).any() and (stays & of_size).any():
                is_workspace[(stays & of_size).argmax()] = True
        return is_workspace

    def _ends_of_phases(self) -> np.ndarray:
        """The event by which the phase that made an allocation has ended, NEVER where it lasts to
        the end of the recording [allocations]."""
        phase = self.phases.of_event
        # Frees of which no stack is known tell nothing.
        is_told = (self.recording.action == ALLOC) | (phase != Phase.NOT_TOLD)
        ends = np.full(len(self.made_at), NEVER, dtype=np.int64)
        for code in Phase:
            of_others = np.flatnonzero(is_told & (phase != code))
            mine = self.phase == code
            ends[mine] = _next_of(of_others, self.made_at[mine])
        return ends

    def _meets_backward(self) -> np.ndarray:
        """Whether a part of a backward pass lies between an allocation and its end
        [allocations]."""
        of_backward = np.flatnonzero(self.phases.of_event == Phase.BACKWARD)
        first = _next_of(of_backward, self.made_at)
        return (first <= self.freed_at) & (first != NEVER)

    # ---- Sums over time ----------------------------------------------------------------------

    def changes(self, chosen: np.ndarray | None = None) -> np.ndarray:
        """Bytes by which each event changes what is allocated [events].

        chosen: of these allocations alone [allocations, bool]; None: of all, and of what was there
        before."""
        changes = np.zeros(len(self.recording.action), dtype=np.int64)
        of_these = np.ones(len(self.made_at), dtype=bool) if chosen is None else chosen
        changes[self.made_at[of_these]] = self.size_bytes[of_these]
        ended = of_these & (self.freed_at != NEVER)
        changes[self.freed_at[ended]] -= self.size_bytes[ended]
        if chosen is None:
            changes[self.unseen_at] = -self.recording.size_bytes[self.unseen_at]
        return changes

    def totals(self) -> np.ndarray:
        """Bytes that are allocated after each event [events]."""
        return self.before_bytes + np.cumsum(self.changes())

    def totals_of_category(self, code: int) -> np.ndarray:
        """Bytes of one of CATEGORIES after each event [events]."""
        return np.cumsum(self.changes(self.category == code))

    @cached_property
    def at_peak(self) -> np.ndarray:
        """Whether an allocation is there at the peak [allocations]."""
        if self.peak_event is None:
            return np.zeros(len(self.made_at), dtype=bool)
        return (self.made_at <= self.peak_event) & (self.freed_at > self.peak_event)

    @cached_property
    def held(self) -> dict[str, int]:
        """Bytes at the peak by category; they add up to it."""
        held = {}
        for code, name in enumerate(CATEGORIES):
            chosen = self.at_peak & (self.category == code)
            held[name] = int(self.size_bytes[chosen].sum())
        held[BEFORE] = self.peak_bytes - sum(held.values())
        return held

    def peak_phase(self) -> Phase:
        """The phase that made the peak."""
        if self.peak_event is None:
            return Phase.NOT_TOLD
        return Phase(int(self.phases.of_event[self.peak_event]))

    def line_of(self, stack: int) -> Line | None:
        """The line of the program in a stack, if it has one."""
        return self.recording.stacks[stack].line if stack >= 0 else None

    # ---- The allocator -----------------------------------------------------------------------

    def end_bytes(self) -> int:
        """What torch.cuda.memory_allocated() would tell at the end."""
        return sum(b.size_bytes for b in self.recording.blocks if b.state == ALLOCATED)

    def free_blocks(self, in_pools: bool = False) -> list[int]:
        """Sizes of the blocks that are reserved and free at the end.

        in_pools: of those alone that are in a pool of their own."""
        sizes = []
        for block in self.recording.blocks:
            if block.state == FREE and (block.in_own_pool or not in_pools):
                sizes.append(block.size_bytes)
        return sizes

    def count_of(self, *actions: int) -> int:
        return int(np.isin(self.recording.action, actions).sum())

    def peak_reserved_bytes(self) -> int:
        """The most that was reserved within the recording."""
        recording = self.recording
        taken = np.isin(recording.action, (SEGMENT_ALLOC, SEGMENT_MAP))
        given_back = np.isin(recording.action, (SEGMENT_FREE, SEGMENT_UNMAP))
        changes = np.where(taken, recording.size_bytes, 0)
        changes = np.where(given_back, -recording.size_bytes, changes)
        after = np.cumsum(changes)
        if not len(after):
            return recording.reserved_bytes
        at_begin = recording.reserved_bytes - int(after[-1])
        return at_begin + max(0, int(after.max()))


def _next_of(events: np.ndarray, after: np.ndarray) -> np.ndarray:
    """The first of these events that comes after each of others; NEVER without one."""
    following = np.append(events, NEVER)
    return following[np.searchsorted(events, after, side="right")]
