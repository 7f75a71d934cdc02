"""What is the largest step that fits, or the smallest change that makes it fit?"""

import functools
import math
from bisect import bisect_left
from collections.abc import Callable

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
from harness.schema import because, unknown

MOST_TOKENS = 2**31  # or samples: no search goes further
MOST_RANKS = 2**20


def first_where(holds: Callable[[int], bool], above: int, most: int) -> int | None:
    """The smallest n > above for which holds(n), by bisection; None if there is none up to `most`.

    Where it holds, it must hold for every larger n.
    """
    found = bisect_left(range(most + 1), True, lo=above + 1, key=holds)
    return found if found <= most else None


# ---- Samples and tokens --------------------------------------------------------------------------


class OtherStepError(Exception):
    """A step of another size cannot be run, or does not make the same allocations: only a file's
    may be so."""


def largest_sizes(workload: Workload, on_gpu: bool, capacity: int, workspaces: int = 0) -> dict:
    """`max_batch_size` and `max_seq_len` of prediction.json, null if that cannot be predicted."""
    not_compiled = workload.with_settings(
        compile=False
    )  # compiling for each size of a search would take minutes
    sizes = {}
    for name in progress_bar("Searching for what fits", ("batch_size", "seq_len")):
        if name not in workload.scales:
            sizes[f"max_{name}"] = None
            continue
        try:
            sizes[f"max_{name}"] = largest_size(not_compiled, on_gpu, capacity, name, workspaces)
        except OtherStepError as error:
            sizes |= unknown(str(error), f"max_{name}")
    return sizes


def largest_size(
    workload: Workload, on_gpu: bool, capacity: int, setting: str, workspaces: int = 0
) -> int:
    """The largest `batch_size`, in samples per step and a multiple of the micro-batches, or
    `seq_len`, in tokens per sample, that fits into the capacity beside the workspaces; 0 if not
    even one does."""
    unit, degree = (workload.micro_steps, 1) if setting == "batch_size" else (1, 2)
    if persistent_bytes(workload) - bytes_on_other_ranks(workload) > capacity:
        return 0

    sizes: dict[int, int] = {}  # allocations of a step by n

    def memory_of(n: int) -> StepMemory:
        try:
            return predicted_memory(workload.with_settings(**{setting: n * unit}), on_gpu)
        except FakeRunError as error:
            raise OtherStepError(
                f"it takes no other {setting.replace('_', ' ')}: {error}"
            ) from error

    def live(n: int) -> np.ndarray:
        found = memory_of(n).live_bytes_at_allocations()
        if n > 1:
            sizes[n] = len(found)
        if len({*sizes.values()}) > 1:
            raise OtherStepError(
                f"with another {setting.replace('_', ' ')} it is another step, with other tensors"
            )
        return found

    at = max(2, getattr(workload, setting) // unit)
    most = largest_that_fits(live, at, degree, capacity)
    if not on_gpu or most == 0:
        return unit * most
    sizes_at = polynomials(
        [np.array([a.bytes for a in memory_of(at + i).allocations]) for i in range(degree + 1)]
    )

    def reserves_too_much(n: int) -> bool:
        sizes = sizes_at(n - at) if n > 1 else None
        return needed_bytes(memory_of(at if n > 1 else 1), on_gpu, workspaces, sizes) > capacity

    return unit * ((first_where(reserves_too_much, 0, most) or most + 1) - 1)


def polynomials(known: list[np.ndarray]) -> Callable[[int], np.ndarray]:
    """The values of polynomials at any whole number, from those at 0 and 1, or at 0, 1 and 2."""
    zero, one, *two = (
        values.astype(object) for values in known
    )  # Python's numbers, which have no largest
    first, second = one - zero, two[0] - 2 * one + zero if two else 0
    return lambda k: zero + k * first + (k * (k - 1) // 2) * second


def largest_that_fits(
    live: Callable[[int], np.ndarray], at: int, degree: int, capacity: int
) -> int:
    """The largest n for which a step never needs more than capacity; live(n) are its live bytes at
    each allocation.

    0 if not even one fits.

    From n = 2 on a step makes the same allocations whatever n is, and the size of each is a
    polynomial in n of known degree, 1 or 2: fake-tensor runs at degree + 1 values of n determine
    all others exactly.
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


def smallest_world_size(
    workload: Workload, on_gpu: bool, capacity: int, workspaces: int = 0
) -> int | None:
    """The fewest ranks, at least two, on which a step of this batch per rank fits; None if there is
    no such number."""
    if workload.parallel.parallel not in SHARDING:
        return None
    limit = most_ranks(workload)[0]

    @functools.cache
    def live_and_needed(ranks: int) -> tuple[np.ndarray, int]:
        memory = predicted_memory(workload.with_settings(world_size=ranks), on_gpu)
        return memory.live_bytes_at_allocations(), needed_bytes(memory, on_gpu, workspaces)

    def live(ranks: int) -> np.ndarray:
        return live_and_needed(ranks)[0]

    def fits(ranks: int) -> bool:
        return ranks > limit or live_and_needed(ranks)[1] <= capacity

    if workload.parallel.parallel == "zero1":  # deals out whole tensors: no formula
        found = first_world_size(fits)
    else:
        now = workload.parallel.world_size
        most_live = (
            capacity * int(live(now).max()) // live_and_needed(now)[1]
        )  # if as large a share is free there
        found = first_world_size_with_shards(live, fits, now, most_live, limit)
    return found if found and found <= limit else None


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
    shards = (live(other) - live(now)) / (
        1 / other - 1 / now
    )  # bytes that are divided among the ranks
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
    lower = [one for one in OPTIMIZATIONS if one.saves_memory]
    changes = [
        {one.setting: one.value}
        for one in lower
        if settings.get(one.setting, one.value) != one.value
    ]
    return changes + (
        [{name: value for one in changes for name, value in one.items()}]
        if len(changes) > 1
        else []
    )


def with_change(
    workload: Workload, change: dict, on_gpu: bool, capacity: int, workspaces: int = 0
) -> dict:
    """A row of `would_fit`: the flags of these settings, the peak of a step with them, and whether
    it fits."""
    workload = workload.with_settings(**change)
    fits = needed_bytes(predicted_memory(workload, on_gpu), on_gpu, workspaces) <= capacity
    flags = " ".join(flag_of(name, value) for name, value in change.items())
    return {"flags": flags, "peak_memory_mb": peak_bytes(workload, on_gpu) / MB, "fits": fits}


def what_would_fit(
    workload: Workload, on_gpu: bool, capacity: int, workspaces: int = 0
) -> list[dict]:
    """Such a row for each of the remedies."""
    changes = progress_bar("Searching for what would fit", remedies(workload))
    return [with_change(workload, change, on_gpu, capacity, workspaces) for change in changes]


def changes_that_fit(workload: Workload, document: dict, on_gpu: bool) -> dict:
    """`would_fit` and `smallest_world_size` of prediction.json, which has the rest already."""
    if workload.parallel.world_size == 1:
        return unknown("one rank", "would_fit", "smallest_world_size")
    workspaces = round((document["library_workspaces_mb"] or 0) * MB)
    needed_mb = document["reserved_memory_mb"] or document["peak_memory_mb"]
    given = (on_gpu, round((needed_mb + document["margin_mb"]) * MB) - workspaces, workspaces)
    workload = workload.with_settings(compile=False)
    rows = None if document["fits"] else what_would_fit(workload, *given)
    ranks, mode = smallest_world_size(workload, *given), workload.parallel.parallel
    if rows and ranks is None and not any(row["fits"] for row in rows):
        together = remedies(workload)[-1]
        if fewest := smallest_world_size(workload.with_settings(**together), *given):
            rows.append(with_change(workload, {"world_size": fewest, **together}, *given))
    why = "fits on no number of them" if mode in SHARDING else f"{mode} needs as much on any number"
    return {"would_fit": rows, "smallest_world_size": ranks} | because(why, "smallest_world_size")
