"""The files of one process: a row for each step, written now and then, so that a process that is
killed has told what it did."""

import json
import os
import socket
from array import array
from pathlib import Path

PHASES = ("data", "backward", "optimizer")
# Of a step, in seconds: itself, its phases, what its thread waited for a core, and what we did
# after it, which is no part of it.
COLUMNS = ("seconds", *PHASES, "waited", "ours")
MOST_SLOW = 20_000  # steps that are told of one by one
EARLY_S, SELDOM_S = 1.0, 60.0  # between two writes, at the beginning and later
SHARE = 0.05  # of the run so far, that may be lost with a process


class StepFiles:
    """In a folder: NAME.steps (float32, COLUMNS), NAME.device (float32, seconds, on a GPU),
    NAME.memory (float64: step, bytes of the process, of the GPU's allocator), NAME.slow (JSON, a
    line for each), NAME.json (what the process is), NAME.sketches (JSON, numbers of its tensors, to
    compare ranks)."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{socket.gethostname()}_{os.getpid()}"
        self.began_s = self.due_s = 0.0  # the first step, and when to write
        self.about: dict = {}
        self.forget()

    def forget(self) -> None:
        """All steps so far."""
        self.steps, self.device, self.memory = array("f"), array("f"), array("d")
        self.slow: list[str] = []
        self.n_slow = 0
        for kind in ("steps", "device", "memory", "slow"):
            self.path.with_name(f"{self.path.name}.{kind}").write_bytes(b"")

    def longer(self, share: float) -> float:
        """How many ordinary steps a slow one lasts at least: from 1 + share on, and the more the
        more there have been, so that a million of them leave room for the longest."""
        return 1 + share * 2 ** (8 * self.n_slow // MOST_SLOW)

    def add_slow(self, row: dict) -> None:
        self.n_slow += 1
        if self.n_slow <= MOST_SLOW:
            self.slow.append(json.dumps(row) + "\n")

    def write(self, now_s: float) -> None:
        """Once a second at first, then less often, at last once a minute."""
        period_s = min(SELDOM_S, max(EARLY_S, SHARE * (now_s - self.began_s)))
        self.due_s = now_s + period_s
        for kind in ("steps", "device", "memory"):
            values = getattr(self, kind)
            self.append(kind, values.tobytes())
            del values[:]
        self.append("slow", "".join(self.slow).encode())
        self.slow.clear()
        self.replace("json", self.about)

    def write_sketches(self, sketches: dict) -> None:
        self.replace("sketches", sketches)

    def replace(self, kind: str, document: dict) -> None:
        target = self.path.with_name(f"{self.path.name}.{kind}")
        partial = target.with_suffix(".partial")
        partial.write_text(json.dumps(document))
        partial.replace(target)

    def append(self, kind: str, data: bytes) -> None:
        if data:
            with self.path.with_name(f"{self.path.name}.{kind}").open("ab") as file:
                file.write(data)
