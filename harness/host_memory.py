"""Memory of the host: how much there is, and how much of it this process can use."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

ROOT = Path("/")  # tests put another one in its place


def host_memory_bytes() -> int:
    """Physical memory of this machine, or what the cgroup allows if that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(limit for limit, _ in cgroup_limits())])


def available_host_memory() -> int | None:
    """Bytes that can still be allocated here without swapping; None where the system does not report it (no /proc)."""
    with contextlib.suppress(OSError, KeyError):
        lines = dict(line.split(":", 1) for line in (ROOT / "proc/meminfo").read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
        return max(0, min([available, *(limit - used for limit, used in cgroup_limits())]))
    return None


def cgroup_limits() -> list[tuple[int, int]]:
    """(limit, bytes in use that cannot be reclaimed) of this process's cgroup and those above it, where they are set: a
    container and a Slurm job have one (version 2 of cgroups)."""
    limits = []
    with contextlib.suppress(OSError, StopIteration):
        entries = (ROOT / "proc/self/cgroup").read_text().splitlines()
        group = next(line for line in entries if line.startswith("0::")).removeprefix("0::/")
        base = ROOT / "sys/fs/cgroup"
        for folder in (base / group, *(base / group).parents):
            with contextlib.suppress(OSError, ValueError):  # no limit is written as "max"
                limit, current = (int((folder / f"memory.{name}").read_text()) for name in ("max", "current"))
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                limits.append((limit, current - int(stat["file"])))
            if folder == base:
                break
    return limits
