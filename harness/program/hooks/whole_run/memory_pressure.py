"""How long did processes wait for memory of the host?  As Linux tells of the cgroup of this one."""

import os
from pathlib import Path

CGROUPS = "/sys/fs/cgroup"
OF_VERSION_2 = "0::"  # begins its line in proc(5)
WAITS = "waits for memory of the host"


class MemoryPressure:
    """Its file stays open.  Of the whole machine nothing is read: others may be the ones that
    wait."""

    def __init__(self):
        self.file: int | None = None
        self.why_not: str | None = None  # nothing is known
        path = f"{CGROUPS}{own_cgroup()}/memory.pressure"
        try:
            if not os.path.exists(f"{os.path.dirname(path)}/cgroup.type"):
                self.why_not = f"{WAITS}: this process is in no cgroup of its own"
                return
            self.file = os.open(path, os.O_RDONLY)
            self.read()  # some systems have the file and do not count
        except OSError as error:
            self.file = None
            self.why_not = f"{WAITS}: {error.strerror}: {path}"

    def seconds(self) -> float:
        """So far, in which at least one of them waited; 0 where the system does not tell."""
        if self.file is None:
            return 0.0
        try:
            return self.read()
        except OSError as error:  # the cgroup is gone
            self.file = None
            self.why_not = f"{WAITS}: {error.strerror}"
            return 0.0

    def read(self) -> float:
        first, _, _ = os.pread(self.file, 200, 0).partition(b"\n")
        return 1e-6 * int(first.rpartition(b"total=")[2] or 0)


def own_cgroup() -> str:
    """Of this process, in version 2, from the root on; empty where it has none."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith(OF_VERSION_2):
            return line.removeprefix(OF_VERSION_2).rstrip("/")
    return ""
