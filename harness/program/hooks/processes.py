"""Which processes descend from another, and how all of them are ended at once, with nothing going
on meanwhile."""

# The tool uses this, and so do the hooks when the tool is gone: it imports the standard library
# alone.

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

ENDED_STATES = "ZX"  # of proc(5): a zombie, which its parent has not waited for, and a dead process


def running_parents() -> dict[int, int]:
    """The parent's process id of each process that runs or is stopped, by its own id."""
    parents = {}
    for pid, parent, state in _listed():
        if state[0] not in ENDED_STATES:
            parents[pid] = parent
    return parents


def ended_children(parent: int) -> list[int]:
    """Process ids of children that have ended, and that the parent has not waited for."""
    return [pid for pid, of, state in _listed() if of == parent and state[0] in ENDED_STATES]


def _listed() -> list[tuple[int, int, str]]:
    """Process id, parent's id and state of every process:
    from proc(5), or by ps where there is none."""
    rows = []
    if not Path("/proc/self/stat").exists():
        listed = subprocess.run(["ps", "-axo", "pid=,ppid=,stat="], capture_output=True, text=True)
        for line in listed.stdout.splitlines():
            pid, parent, state = line.split()[:3]
            rows.append((int(pid), int(parent), state))
        return rows
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            # pid (name) state parent ...: the name may contain anything
            state, parent = file.read_text(errors="replace").rpartition(")")[2].split()[:2]
            rows.append((int(file.parent.name), int(parent), state))
    return rows


def descendants(ancestors: Iterable[int], parents: dict[int, int]) -> list[int]:
    """Process ids of all children, grandchildren and so on of some processes,
    parents before their children."""
    children = defaultdict(list)
    for pid, parent in parents.items():
        children[parent].append(pid)
    reached, seen = list(ancestors), set(ancestors)
    for pid in reached:  # which grows
        for child in children[pid]:
            if child not in seen:
                seen.add(child)
                reached.append(child)
    return reached[len(set(ancestors)) :]


def with_in_environment(text: str) -> list[int]:
    """Process ids of those in whose first environment the text stands; none where the system does
    not tell."""
    pids = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
            if text.encode() in file.read_bytes():
                pids.append(int(file.parent.name))
    return pids


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def stop_all(listed: Callable[[], Iterable[int]]) -> set[int]:
    """Stop every process that is listed, until no new one appears; returns their ids.

    A parent that is stopped cannot go on when its child ends, and starts no other child.
    """
    stopped: set[int] = set()
    while True:
        new = set(listed()) - stopped
        if not new:
            return stopped
        for pid in new:
            send(pid, signal.SIGSTOP)
        stopped |= new


def kill_all_with(text: str) -> None:
    """End at once all other processes in whose first environment the text stands."""
    itself = {os.getpid()}
    for pid in stop_all(lambda: set(with_in_environment(text)) - itself):
        send(pid, signal.SIGKILL)
