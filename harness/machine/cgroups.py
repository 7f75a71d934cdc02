"""The control groups of this process, of version 1 or 2: what limits its cores and its memory."""

from __future__ import annotations

from pathlib import Path


def cgroup_folders(controller: str, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """The groups of a controller (cpu, memory), with their ancestors: each of them may have a limit.

    proc and cgroups are where /proc and the control groups are mounted.
    """
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and controller not in controllers.split(","):
            continue
        mount = cgroups / controllers  # version 1; version 2 names no controllers
        folder = mount / path.strip("/")
        # In a container the path may be that of the host; its own group is then the mount itself.
        every = (one for one in (folder, *folder.parents) if one.is_relative_to(mount))
        found += [one for one in every if (one / f"{controller}.stat").exists()]
    return found
