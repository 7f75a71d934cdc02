"""Which roof of a device is nearer to some work: its arithmetic or its bandwidth?"""

from typing import NamedTuple

COMPUTE, MEMORY = "compute", "memory"  # the names of the roofs


class NearerRoof(NamedTuple):
    """The limit that takes longer for some work, which no kernel can be faster than."""

    name: str  # COMPUTE, MEMORY
    least_time: float  # that the work takes under it; seconds, or the unit of longer_limit()


def nearer_roof(
    flops: float, n_bytes: float | None, flops_per_sec: float | None, bytes_per_sec: float | None
) -> NearerRoof | None:
    """Of work that needs so many FLOPs and moves so many bytes, at these peaks; None where neither
    limit is known.

    flops_per_sec: None for work that the peak of matmuls does not limit, or without a known peak;
    n_bytes, bytes_per_sec: None where they are not known."""
    compute_sec = None if flops_per_sec is None else flops / flops_per_sec
    memory_sec = None
    if n_bytes is not None and bytes_per_sec is not None:
        memory_sec = n_bytes / bytes_per_sec
    return longer_limit(compute_sec, memory_sec)


def longer_limit(compute: float | None, memory: float | None) -> NearerRoof | None:
    """The same of times in one unit: what the arithmetic takes, and what moving the bytes does."""
    roofs = []
    if compute is not None:
        roofs.append(NearerRoof(COMPUTE, compute))
    if memory is not None:
        roofs.append(NearerRoof(MEMORY, memory))
    return max(roofs, key=lambda roof: roof.least_time, default=None)


def ridge_of_rates(flops_per_sec: float, bytes_per_sec: float) -> float:
    """FLOPs per byte at which both limits take as long.  Rates in any unit that both share: GFLOP/s
    and GB/s, say."""
    return flops_per_sec / bytes_per_sec


def is_beyond_ridge(flops_per_byte: float, ridge: float) -> bool:
    """Whether arithmetic is the nearer roof.  ridge: FLOPs per byte at which both take as long."""
    return flops_per_byte >= ridge
