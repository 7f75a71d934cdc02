"""What disturbs a measurement, on purpose: processes that keep cores busy, and CPU quotas."""

import contextlib
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

BUSY = """
import time
while True:
    end = time.perf_counter() + 0.1 * {share}
    while time.perf_counter() < end:
        pass
    time.sleep(0.1 * (1 - {share}))
"""


@contextlib.contextmanager
def busy_processes(n: float) -> Iterator[list[subprocess.Popen]]:
    """Processes that each keep a core busy, as another user's would; the last one for a part of the
    time, as in 1.5."""
    shares = [min(1.0, n - i) for i in range(math.ceil(n))]
    processes = [
        subprocess.Popen([sys.executable, "-c", BUSY.format(share=share)]) for share in shares
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def cpu_quota(cores: float | None, groups: list[Path]) -> Iterator[tuple[str, ...]]:
    """A command that runs another one under a CPU quota, in a new control group below the first of
    these; () without.

    Raises OSError where this user may not make one.
    """
    if cores is None:
        yield ()
        return
    if not groups:
        raise FileNotFoundError(
            2, "no control group of this process with a CPU controller", "/sys/fs/cgroup"
        )
    folder = groups[0] / f"tiny_llama_quota_{os.getpid()}"
    folder.mkdir()
    try:
        if (groups[0] / "cpu.cfs_quota_us").exists():  # version 1
            (folder / "cpu.cfs_period_us").write_text("100000")
            (folder / "cpu.cfs_quota_us").write_text(str(int(100_000 * cores)))
        else:
            (folder / "cpu.max").write_text(f"{int(100_000 * cores)} 100000")
        yield ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(folder / "cgroup.procs"))
    finally:
        folder.rmdir()


def why_no_quota(groups: list[Path]) -> str | None:
    """Why this user cannot set a CPU quota; None if that works."""
    try:
        with cpu_quota(1.0, groups):
            return None
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
