"""The command that starts the program, with our hooks in its processes, and what becomes of it."""

import contextlib
import ctypes
import functools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from harness.base.errors import UserError
from harness.program.hooks import SETTINGS, SITECUSTOMIZE
from harness.program.hooks.limits import EXIT_S, GRACE_S

PR_SET_PDEATHSIG = 1  # prctl(2)


@dataclass(frozen=True)
class Ended:
    """How the program ended, and what each of its processes told."""

    exit_code: int
    processes: list[dict]  # results of harness.program.hooks.watch, of processes that imported torch
    started: int  # Python processes that loaded the hooks
    by_tool: bool  # whether it was ended after its recorded steps
    signal: int | None = None  # the last that we received meanwhile, of Ctrl-C and SIGTERM

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


def run(
    command: Sequence[str], settings: dict, environment: dict[str, str], output: IO | None = None, limit_s: float = 0
) -> Ended:
    """Run it to its end.  environment: that in which we were started; output: where its own goes, by default to ours;
    limit_s: after which it is ended, 0 for none."""
    with tempfile.TemporaryDirectory(prefix="profile_program_") as folder:
        processes = Path(folder, "processes")
        processes.mkdir()
        Path(folder, "sitecustomize.py").write_text(SITECUSTOMIZE)
        settings |= {"tool": os.getpid(), "processes": str(processes)}
        path = os.pathsep.join(filter(None, [folder, environment.get("PYTHONPATH")]))
        environment = environment | {"PYTHONPATH": path, SETTINGS: json.dumps(settings)}
        grace_s = EXIT_S if settings["then"] == "exit" else GRACE_S
        streams = {"stdout": output, "stderr": output and subprocess.STDOUT}
        start = functools.partial(subprocess.Popen, command, env=environment, **streams)
        code, received = wait_for(start, processes, grace_s, limit_s)
        told = [json.loads(file.read_text()) for file in processes.glob("*.json")]
        return Ended(code, told, len([*processes.glob("*.started")]), any(processes.glob("*.ended")), received)


def wait_for(
    start: Callable[..., subprocess.Popen], processes: Path, grace_s: float, limit_s: float
) -> tuple[int, int | None]:
    """Its exit code, 128 + N if a signal ended it; and the signal that we received.  Ctrl-C reaches it from the
    terminal, SIGTERM by us; and it does not outlive us.

    processes: what they told; grace_s: for what is left once the first of them has ended.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def dies_with_us() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if libc:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    with handled_signals(processes, grace_s) as (started, received):
        process = start(preexec_fn=dies_with_us)
        signal.alarm(math.ceil(limit_s))
        started.append(process)
        code = process.wait()
    return 128 - code if code < 0 else code, received[-1] if received else None


@contextlib.contextmanager
def handled_signals(processes: Path, grace_s: float) -> Iterator[tuple[list[subprocess.Popen], list[int]]]:
    """While the program runs: Ctrl-C is for it, SIGTERM is passed on, and SIGURG, from a process that has written all
    that it recorded, ends the scripts that started it, and sets a time after which all that is left is ended: a parent
    may wait for results."""

    started: list[subprocess.Popen] = []
    received: list[int] = []
    stages = [signal.SIGTERM, signal.SIGKILL]  # should they not heed the first

    def end_all(number: int, frame: object) -> None:
        late = number == signal.SIGALRM
        received.extend([number] * (not late))
        for pid in {*processes_of(processes.parent), *(child.pid for child in started)}:
            send(pid, stages[0] if late else signal.SIGTERM)
        if late and len(stages) > 1:
            stages.pop(0)
            signal.alarm(int(GRACE_S))

    def one_ended(*_: object) -> None:
        signal.alarm(int(grace_s))
        if grace_s == GRACE_S and all_ended(processes):
            for file in processes.glob("*.ended"):
                for pid in ancestors(int(file.stem)):
                    if not (processes / f"{pid}.started").exists():  # torchrun knows how to end
                        send(pid, signal.SIGTERM)
            (processes / "go").touch()

    handlers = {
        signal.SIGINT: lambda number, frame: received.append(number),  # not SIG_IGN, which the program would inherit
        signal.SIGTERM: end_all,
        signal.SIGALRM: end_all,
        signal.SIGURG: one_ended,
    }
    earlier = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield started, received
    finally:
        signal.alarm(0)
        for number, handler in earlier.items():
            signal.signal(number, handler)


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def all_ended(processes: Path) -> bool:
    """Whether each process that has recorded is about to end."""
    told = (json.loads(file.read_text()) for file in processes.glob("*.json"))
    return all((processes / f"{one['pid']}.ended").exists() for one in told if one["state"] == "recorded")


def ancestors(pid: int) -> Iterator[int]:
    """From its parent up to our child; none where the system has no proc(5)."""
    while True:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return
        if pid in (0, 1, os.getpid()):
            return
        yield pid


def processes_of(folder: Path) -> Iterator[int]:
    """Those that have the folder in their environment: the program's, and all that it started."""
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # gone, or another user's
            if str(folder).encode() in file.read_bytes():
                yield int(file.parent.name)
