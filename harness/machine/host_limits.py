"""What this process may use of its host: cores and memory, by its control groups of version 1 or
2."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

ROOT = Path("/")  # tests put another one in its place


def cgroup_folders(
    controller: str, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> list[Path]:
    """The groups of a controller (cpu, memory), with their ancestors: each of them may have a
    limit.

    proc and cgroups are where /proc and the control groups are mounted.
    """
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    groups = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = cgroups / controllers  # version 1; version 2 names no controllers
        folder = mount / path.strip("/")
        # In a container the path may be that of the host; its own group is then the mount itself.
        for group in (folder, *folder.parents):
            if group.is_relative_to(mount) and (group / f"{controller}.stat").exists():
                groups.append(group)
    return groups


# ---- Cores ---------------------------------------------------------------------------------------


def usable_cores() -> set[int]:
    """Cores that this process may run on: those of its affinity mask, where there is one (macOS has
    none)."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def unknown_quota(folders: list[Path], proc: Path, cgroups: Path) -> str | None:
    """Why it is unknown whether the control groups have a quota; None if it is known."""
    if not (proc / "self/cgroup").exists():
        return f"no {proc}/self/cgroup on this system"
    if not folders:
        return f"{cgroups} does not have the control group of this process"
    for folder in folders:
        for file in (folder / "cpu.max", folder / "cpu.cfs_quota_us"):
            try:
                file.read_text()
            except FileNotFoundError:
                continue
            except OSError as error:
                return f"{file}: {error.strerror}"
    return None


def quota_cores(folder: Path) -> float | None:
    """Cores' worth of time that a control group may use; None without a limit."""
    with contextlib.suppress(OSError, ValueError):
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else None  # "max" is no number
    return None


def least_quota(folders: Iterable[Path]) -> float | None:
    """The least quota of these control groups, each of which limits the process, in cores."""
    quotas = [quota_cores(folder) for folder in folders]
    return min([quota for quota in quotas if quota], default=None)


# ---- Memory --------------------------------------------------------------------------------------


def host_memory_bytes() -> int:
    """Physical memory of this machine, or what the cgroup allows if that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(limit for limit, _ in cgroup_limits())])


def available_host_memory() -> int | None:
    """Bytes that can still be allocated here without swapping; None where the system does not
    report it (no /proc)."""
    with contextlib.suppress(OSError, KeyError):
        text = (ROOT / "proc/meminfo").read_text()
        lines = dict(line.split(":", 1) for line in text.splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
        return max(0, min([available, *(limit - used for limit, used in cgroup_limits())]))
    return None


def cgroup_limits() -> list[tuple[int, int]]:
    """(limit, bytes in use that cannot be reclaimed) of this process's cgroups, where they have a
    limit: a container and a Slurm job have one."""
    limits = []
    for folder in cgroup_folders("memory", ROOT / "proc", ROOT / "sys/fs/cgroup"):
        with contextlib.suppress(OSError, ValueError, KeyError):  # no limit is written as "max"
            if (folder / "memory.limit_in_bytes").exists():  # version 1
                limit_name, usage_name, cache_name = (
                    "limit_in_bytes",
                    "usage_in_bytes",
                    "total_cache",
                )
            else:
                limit_name, usage_name, cache_name = "max", "current", "file"
            limit_bytes = int((folder / f"memory.{limit_name}").read_text())
            used_bytes = int((folder / f"memory.{usage_name}").read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            limits.append((limit_bytes, used_bytes - int(stat[cache_name])))
    return limits
