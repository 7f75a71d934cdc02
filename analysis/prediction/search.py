"""What is the largest step that fits, or the smallest change that makes it fit?"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from analysis.memory.allocator import needed_bytes
from analysis.memory.predicted import (
    bytes_on_other_ranks,
    peak_bytes,
    persistent_bytes,
    predicted_memory,
)
from analysis.work.fake_step import FakeRunError
from harness.base.console import progress_bar
from harness.base.text import flag_of
from harness.base.units import MB
from harness.instruments.memory_timeline import StepMemory
from harness.model.optimizations import OPTIMIZATIONS
from harness.model.workload import Workload, most_ranks
from harness.ranks.parallel import SHARDING
from harness.schema import Document, Unknown, field

MOST_TOKENS = 2**31  # or samples: no search goes further
MOST_RANKS = 2**20
ONE_RANK = "one rank"


class FitRow(Document):
    flags: str = field("in addition to those given; --world-size in place of the one given")
    peak_memory_mb: float = field("MB")
    fits: bool = field("in the memory of the device")


class Room(NamedTuple):
    """For the tensors of a step."""

    on_gpu: bool
    capacity: int  # bytes that tensors and workspaces can use
    workspaces: int = 0  # bytes of the matmul libraries

    def has_room_for(self, memory: StepMemory, sizes: Sequence[int] | None = None) -> bool:
        """sizes: of the allocations, where they are not those of this step."""
        return needed_bytes(memory, self.on_gpu, self.workspaces, sizes) <= self.capacity


def first_where(holds: Callable[[int], bool], above: int, most: int) -> int | None:
    """The smallest n > above for which holds(n), by bisection; None if there is none up to `most`.

    Where it holds, it must hold for every larger n.
    """
    first = bisect_left(range(most + 1), True, lo=above + 1, key=holds)
    return first if first <= most else None


# ---- Samples and tokens --------------------------------------------------------------------------


class OtherStepError(Exception):
    """A step of another size cannot be run, or does not make the same allocations: only a file's
    may be so."""


class LargestSizes(NamedTuple):
    """Samples of a step and tokens of a sample that fit; None: the file of --workload decides it,
    Unknown: it cannot be predicted."""

    batch_size: int | Unknown | None
    seq_len: int | Unknown | None


def largest_sizes(workload: Workload, room: Room) -> LargestSizes:
    # Compiling for each size of a search would take minutes.
    workload = workload.with_settings(compile=False)
    sizes: list[int | Unknown | None] = []
    for setting in progress_bar("Searching for what fits", LargestSizes._fields):
        try:
            known = setting in workload.scales
            sizes.append(largest_size(workload, room, setting) if known else None)
        except OtherStepError as error:
            sizes.append(Unknown(str(error)))
    return LargestSizes(*sizes)


class StepsOfSizes:
    """The steps of a workload with n samples, or with sequences of n tokens.

    From n = 2 on a step makes the same allocations whatever n is, and the size of each is a
    polynomial in n.
    """

    def __init__(self, workload: Workload, on_gpu: bool, setting: str):
        """setting: batch_size or seq_len.  Of the former, n is a multiple of the micro-batches."""
        self.workload, self.on_gpu, self.setting = workload, on_gpu, setting
        self.unit = workload.micro_steps if setting == "batch_size" else 1
        self.degree = 1 if setting == "batch_size" else 2  # attention weights are [seq, seq]
        self.now = max(2, getattr(workload, setting) // self.unit)
        self.allocations: set[int] = set()  # how many the steps that were looked at make

    def memory(self, n: int) -> StepMemory:
        changed = self.workload.with_settings(**{self.setting: n * self.unit})
        try:
            return predicted_memory(changed, self.on_gpu)
        except FakeRunError as error:
            what = self.setting.replace("_", " ")
            raise OtherStepError(f"it takes no other {what}: {error}") from error

    def live_bytes(self, n: int) -> np.ndarray:
        """[allocation] After each of them."""
        live = self.memory(n).live_bytes_at_allocations()
        if n > 1:
            self.allocations.add(len(live))
        if len(self.allocations) > 1:
            what = self.setting.replace("_", " ")
            raise OtherStepError(f"with another {what} it is another step, with other tensors")
        return live

    def sizes_at(self) -> Callable[[int], np.ndarray]:
        """The bytes of every allocation, by n - now."""
        known = []
        for more in range(self.degree + 1):
            allocations = self.memory(self.now + more).allocations
            known.append(np.array([allocation.bytes for allocation in allocations]))
        return polynomials(known)


def largest_size(workload: Workload, room: Room, setting: str) -> int:
    """The largest `batch_size`, in samples per step and a multiple of the micro-batches, or
    `seq_len`, in tokens per sample, that fits; 0 if not even one does."""
    if persistent_bytes(workload) - bytes_on_other_ranks(workload) > room.capacity:
        return 0
    steps = StepsOfSizes(workload, room.on_gpu, setting)
    most = largest_that_fits(steps.live_bytes, steps.now, steps.degree, room.capacity)
    if not room.on_gpu or most == 0:
        return steps.unit * most
    sizes_at = steps.sizes_at()

    def reserves_too_much(n: int) -> bool:
        if n == 1:
            return not room.has_room_for(steps.memory(1))
        return not room.has_room_for(steps.memory(steps.now), sizes_at(n - steps.now))

    too_many = first_where(reserves_too_much, 0, most) or most + 1
    return steps.unit * (too_many - 1)


def polynomials(known: list[np.ndarray]) -> Callable[[int], np.ndarray]:
    """The values of polynomials at any whole number, from those at 0 and 1, or at 0, 1 and 2."""
    # Python's numbers, which have no largest.
    zero, one, *two = (values.astype(object) for values in known)
    first = one - zero
    second = two[0] - 2 * one + zero if two else 0
    return lambda k: zero + k * first + (k * (k - 1) // 2) * second


def largest_that_fits(
    live: Callable[[int], np.ndarray], at: int, degree: int, capacity: int
) -> int:
    """The largest n for which a step never needs more than capacity; live(n) are its live bytes at
    each allocation.

    0 if not even one fits.

    The size of each allocation is a polynomial in n of known degree, 1 or 2: fake-tensor runs at
    degree + 1 values of n determine all others exactly.
    """
    at = max(2, at)
    live_at = polynomials([live(at + i) for i in range(degree + 1)])

    def too_large(n: int) -> bool:
        return max(live_at(n - at)) > capacity

    if too_large(2):
        return int(max(live(1)) <= capacity)
    return (first_where(too_large, 2, MOST_TOKENS) or MOST_TOKENS) - 1


# ---- Ranks and other settings --------------------------------------------------------------------


def first_world_size(holds: Callable[[int], bool]) -> int | None:
    """The fewest ranks, at least two, from which on `holds` is true; None if it never is."""
    return first_where(holds, 1, MOST_RANKS)


def smallest_world_size(workload: Workload, room: Room) -> int | None:
    """The fewest ranks, at least two, on which a step of this batch per rank fits; None if there is
    no such number."""
    if workload.parallel.parallel not in SHARDING:
        return None
    limit = most_ranks(workload)[0]

    @functools.cache
    def live_and_needed(ranks: int) -> tuple[np.ndarray, int]:
        memory = predicted_memory(workload.with_settings(world_size=ranks), room.on_gpu)
        needed = needed_bytes(memory, room.on_gpu, room.workspaces)
        return memory.live_bytes_at_allocations(), needed

    def live(ranks: int) -> np.ndarray:
        return live_and_needed(ranks)[0]

    def fits(ranks: int) -> bool:
        return ranks > limit or live_and_needed(ranks)[1] <= room.capacity

    if workload.parallel.parallel == "zero1":  # deals out whole tensors: no formula
        fewest = first_world_size(fits)
    else:
        now = workload.parallel.world_size
        # If as large a share is free there.
        most_live = room.capacity * int(live(now).max()) // live_and_needed(now)[1]
        fewest = first_world_size_with_shards(live, fits, now, most_live, limit)
    return fewest if fewest and fewest <= limit else None


def first_world_size_with_shards(
    live: Callable[[int], np.ndarray],
    fits: Callable[[int], bool],
    now: int,
    capacity: int,
    limit: int,
) -> int | None:
    """The same, from few calls of live(ranks), the bytes at each allocation: any number of ranks
    makes the same allocations, constants plus shards.  Two numbers tell about where the limit is,
    neighbors find it exactly."""
    other = max(2, now // 2) if now > 2 else 2 * now
    if live(now).shape != live(other).shape:
        return first_world_size(fits)
    # Bytes that are divided among the ranks.
    shards = (live(other) - live(now)) / (1 / other - 1 / now)
    constant = live(now) - shards / now
    if constant.max() >= capacity:
        return None
    guess = min(max(math.ceil((shards / (capacity - constant)).max()), 2), limit)
    while not fits(guess):
        guess += 1
    while guess > 2 and fits(guess - 1):
        guess -= 1
    return guess


def remedies(workload: Workload) -> list[dict]:
    """Settings of this workload that lower the peak, one at a time, and all together at the end."""
    settings = workload.settings()["training"]
    changes, together = [], {}
    for flag in OPTIMIZATIONS:
        if flag.saves_memory and settings.get(flag.setting, flag.value) != flag.value:
            changes.append({flag.setting: flag.value})
            together[flag.setting] = flag.value
    return [*changes, together] if len(changes) > 1 else changes


def with_change(workload: Workload, change: dict, room: Room) -> FitRow:
    """The flags of these settings, the peak of a step with them, and whether it fits."""
    workload = workload.with_settings(**change)
    return FitRow(
        flags=" ".join(flag_of(name, value) for name, value in change.items()),
        peak_memory_mb=peak_bytes(workload, room.on_gpu) / MB,
        fits=room.has_room_for(predicted_memory(workload, room.on_gpu)),
    )


def what_would_fit(workload: Workload, room: Room) -> list[FitRow]:
    """Such a row for each of the remedies."""
    changes = progress_bar("Searching for what would fit", remedies(workload))
    return [with_change(workload, change, room) for change in changes]


class WouldFit(NamedTuple):
    """What makes a step of several ranks fit."""

    rows: list[FitRow] | Unknown | None  # None: it fits as it is
    smallest_world_size: int | Unknown


def changes_that_fit(workload: Workload, room: Room, fits: bool) -> WouldFit:
    """fits: it does as it is."""
    if workload.parallel.world_size == 1:
        return WouldFit(Unknown(ONE_RANK), Unknown(ONE_RANK))
    workload = workload.with_settings(compile=False)
    rows = None if fits else what_would_fit(workload, room)
    fewest = smallest_world_size(workload, room)
    if fewest is not None:
        return WouldFit(rows, fewest)
    if rows and not any(row.fits for row in rows):
        together = remedies(workload)[-1]
        fewest = smallest_world_size(workload.with_settings(**together), room)
        if fewest:
            rows.append(with_change(workload, {"world_size": fewest, **together}, room))
    mode = workload.parallel.parallel
    if mode in SHARDING:
        return WouldFit(rows, Unknown("fits on no number of them"))
    return WouldFit(rows, Unknown(f"{mode} needs as much on any number"))
