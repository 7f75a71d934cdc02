"""The command that starts the program, with our hooks in its processes, and what becomes of it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.base.errors import UserError
from harness.program.hooks import SETTINGS, SITECUSTOMIZE
from harness.program.hooks.limits import GRACE_S

PR_SET_PDEATHSIG = 1  # prctl(2)


@dataclass(frozen=True)
class Ended:
    """How the program ended, and what each of its processes told."""

    exit_code: int
    processes: list[dict]  # results of harness.program.hooks.watch, of processes that imported torch
    started: int  # Python processes that loaded the hooks

    @property
    def recorded(self) -> list[dict]:
        """Of the processes whose steps were recorded, by rank."""
        found = [one for one in self.processes if one.get("trace")]
        return sorted(found, key=lambda one: (one["rank"], one["pid"]))


def command_of(words: Sequence[str], python: str = sys.executable) -> list[str]:
    """What is started: a file or module of Python by this interpreter.  Raises UserError, exit code 2."""
    words = list(words[1:] if words[:1] == ["--"] else words)
    if not words:
        raise UserError("give the program after --, as in: profile_program.py -- train.py --its flags", 2)
    if words[0] in ("-m", "-c") or words[0].endswith(".py"):
        if words[0].endswith(".py") and not Path(words[0]).is_file():
            raise UserError(f"{words[0]}: there is no such file", 2)
        return [python, *words]
    if not shutil.which(words[0]):
        raise UserError(f"{words[0]}: there is no such program", 2)
    return words


def run(command: Sequence[str], settings: dict, environment: dict[str, str]) -> Ended:
    """Run it to its end, with its output where that goes.  environment: that in which we were started."""
    with tempfile.TemporaryDirectory(prefix="profile_program_") as folder:
        processes = Path(folder, "processes")
        processes.mkdir()
        Path(folder, "sitecustomize.py").write_text(SITECUSTOMIZE)
        settings |= {"tool": os.getpid(), "processes": str(processes)}
        path = os.pathsep.join(filter(None, [folder, environment.get("PYTHONPATH")]))
        code = wait_for(command, environment | {"PYTHONPATH": path, SETTINGS: json.dumps(settings)})
        told = [json.loads(file.read_text()) for file in processes.glob("*.json")]
        return Ended(code, told, len([*processes.glob("*.started")]))


def wait_for(command: Sequence[str], environment: dict[str, str]) -> int:
    """Its exit code, 128 + N if a signal ended it.  Ctrl-C reaches it from the terminal, SIGTERM by us; and it does not
    outlive us."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def dies_with_us() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if libc:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    with handled_signals() as terminate:
        process = subprocess.Popen(command, env=environment, preexec_fn=dies_with_us)
        terminate.append(process)
        code = process.wait()
    return 128 - code if code < 0 else code


@contextlib.contextmanager
def handled_signals() -> Iterator[list[subprocess.Popen]]:
    """While the program runs: Ctrl-C is for it, SIGTERM is passed on, and SIGURG, from a process that has written all
    that it recorded, sets a time after which what is left of the program is ended: a parent may wait for results."""
    processes: list[subprocess.Popen] = []

    def end(number: int, frame: object) -> None:
        for process in processes:
            process.terminate()
        if number == signal.SIGALRM:  # and should it not heed that
            signal.signal(signal.SIGALRM, lambda *_: [process.kill() for process in processes])
            signal.alarm(int(GRACE_S))

    handlers = {
        signal.SIGINT: lambda *_: None,  # not SIG_IGN, which the program would inherit
        signal.SIGTERM: end,
        signal.SIGALRM: end,
        signal.SIGURG: lambda *_: signal.alarm(int(GRACE_S)),  # which does nothing to us when it comes late
    }
    earlier = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield processes
    finally:
        signal.alarm(0)
        for number, handler in earlier.items():
            signal.signal(number, handler)
