"""The processes that a command started, and their end after the recorded steps."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from harness.program.hooks import CLEAN_UP_S, GRACE_S
from harness.program.hooks.processes import (
    descendants,
    ended_children,
    running_parents,
    send,
    stop_all,
    with_in_environment,
)

PR_SET_PDEATHSIG = 1  # prctl(2)
PR_SET_CHILD_SUBREAPER = 36
# They start ranks and wait for them, and do nothing of the program's afterwards: their own ending
# is left to them, by which ranks on other nodes and temporary files of their own come to an end.
LAUNCHERS = {
    "torchrun",
    "accelerate",
    "deepspeed",
    "srun",
    "mpirun",
    "mpiexec",
    "mpiexec.hydra",
    "orterun",
    "prterun",
    "hydra_pmi_proxy",
    "orted",
    "prted",
}
LAUNCHER_MODULES = {
    "torch.distributed.run",
    "torch.distributed.launch",
    "torch.distributed.launcher",
    "accelerate.commands.launch",
    "accelerate.commands.accelerate_cli",
    "deepspeed.launcher.runner",
    "deepspeed.launcher.launch",
}
LAUNCHER_FILES = tuple(f"/{name.replace('.', '/')}.py" for name in LAUNCHER_MODULES)
# They remove shared memory when those that use it have ended, and end then.
CLEANERS = ("multiprocessing.resource_tracker", "torch_shm_manager")
FLAGS_WITH_A_VALUE = ("-X", "-W")  # of python


def prctl(option: int, value: int) -> None:
    """Linux alone: elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


class ProcessTree:
    """All that descends from the command that is about to be started, also what has left its
    parents by a second fork: this process becomes the parent of such processes (Linux).  What ran
    before is no part of it.

    mark: a text in the environment of the command, which finds its processes where another parent
    took them.
    """

    def __init__(self, mark: str):
        self.mark = mark
        self.itself = os.getpid()
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        self.before = {self.itself, *descendants([self.itself], running_parents())}

    def close(self, child: int) -> None:
        """No other processes become children of this one.
        child: its only one that is waited for elsewhere."""
        prctl(PR_SET_CHILD_SUBREAPER, 0)
        for pid in ended_children(self.itself):
            if pid != child and pid not in self.before:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def processes(self) -> set[int]:
        parents = running_parents()
        ours = {pid for pid in with_in_environment(self.mark) if pid in parents}
        ours.update(descendants({self.itself, *ours}, parents))
        return ours - self.before

    def send(self, number: int) -> None:
        for pid in self.processes():
            send(pid, number)

    def end(self, waiting: Iterable[int], let_go: Callable[[], object]) -> None:
        """End all of them, so that none goes on with what comes after the recorded steps.

        waiting: processes that have recorded, and end by themselves after let_go(); until then
        their parents have nothing to go on from.
        """
        waiting = set(waiting)
        launchers: set[int] = set()
        cleaners: set[int] = set()

        def others() -> list[int]:
            to_stop = []
            for pid in self.processes() - waiting - launchers - cleaners:
                words = command_line(pid)
                if is_launcher(words):
                    launchers.add(pid)
                elif is_cleaner(words):
                    cleaners.add(pid)
                else:
                    to_stop.append(pid)
            return to_stop

        stopped = stop_all(others)
        parents = running_parents()
        # If one of their children were killed first, they would report an error.
        later = stopped & set(descendants([*waiting, *launchers], parents))
        for pid in stopped - later:
            send(pid, signal.SIGKILL)
        let_go()
        self.wait_for(waiting, GRACE_S)
        launchers_wait_for_stopped = stopped & set(descendants(launchers, parents))
        if not launchers_wait_for_stopped:
            self.wait_for(launchers, GRACE_S)
        cleaners = {pid for pid in self.processes() if is_cleaner(command_line(pid))}
        for pid in stop_all(lambda: self.processes() - cleaners):
            send(pid, signal.SIGKILL)
        self.wait_for(cleaners, CLEAN_UP_S)
        self.send(signal.SIGKILL)

    def wait_for(self, pids: Iterable[int], limit_s: float) -> None:
        give_up = time.monotonic() + limit_s
        while set(pids) & running_parents().keys() and time.monotonic() < give_up:
            time.sleep(0.01)


def command_line(pid: int) -> list[str]:
    """The words of a process's command; none where it has ended or the system does not tell."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return []
    return text.rstrip("\0").split("\0")


def is_launcher(words: list[str]) -> bool:
    """Whether a command is torchrun, accelerate launch or another one that starts ranks and does
    nothing else."""
    if not words:
        return False
    program = Path(words[0]).name
    if not program.startswith("python"):
        return program in LAUNCHERS
    rest = iter(words[1:])
    for word in rest:
        if word == "-m":
            return next(rest, "") in LAUNCHER_MODULES
        if word in FLAGS_WITH_A_VALUE:
            next(rest, "")
        elif word == "-c":
            return False
        elif not word.startswith("-"):
            return Path(word).name in LAUNCHERS or word.endswith(LAUNCHER_FILES)
    return False


def is_cleaner(words: list[str]) -> bool:
    return any(name in word for word in words for name in CLEANERS)
