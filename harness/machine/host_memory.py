"""Memory of the host: how much there is, and how much of it this process can use."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from harness.machine.cgroups import cgroup_folders

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
    """(limit, bytes in use that cannot be reclaimed) of this process's cgroups, where they have a limit: a container
    and a Slurm job have one."""
    limits = []
    for folder in cgroup_folders("memory", ROOT / "proc", ROOT / "sys/fs/cgroup"):
        with contextlib.suppress(OSError, ValueError, KeyError):  # no limit is written as "max"
            is_first = (folder / "memory.limit_in_bytes").exists()  # version
            names = ("limit_in_bytes", "usage_in_bytes") if is_first else ("max", "current")
            limit, current = (int((folder / f"memory.{name}").read_text()) for name in names)
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            limits.append((limit, current - int(stat["total_cache" if is_first else "file"])))
    return limits
