"""The command that starts the program, with our hooks in its processes, and what becomes of it."""

import contextlib
import functools
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from harness.base.console import say
from harness.base.errors import UserError
from harness.program.hooks import EXIT_S, GRACE_S, SETTINGS, SITECUSTOMIZE
from harness.program.hooks.processes import running_parents
from harness.program.process_tree import PR_SET_PDEATHSIG, ProcessTree, prctl

LOOK_S = 0.05  # between two looks at what processes have written, once the first is about to end
IDLE_S = 1.0  # the same before that: signals wake us anyway, and the program is not to be disturbed


@dataclass(frozen=True)
class Ended:
    """How the program ended, and what each of its processes told."""

    exit_code: int
    processes: list[dict]  # what harness.program.hooks.watch told, where torch was imported
    started: int  # Python processes that loaded the hooks
    by_tool: bool  # whether it was ended after its recorded steps
    signal: int | None = None  # the last that we received meanwhile, of Ctrl-C and SIGTERM

    @property
    def recorded(self) -> list[dict]:
        """Of the processes whose steps were recorded, by rank; without those in which something
        failed after the trace was written."""
        recorded = []
        for process in self.processes:
            if all(process.get(key) for key in ("trace", "memory", "observed")):
                recorded.append(process)
        return sorted(recorded, key=lambda process: (process["rank"], process["pid"]))


def command_of(words: Sequence[str], python: str = sys.executable) -> list[str]:
    """What is started: a file or module of Python by this interpreter.
    Raises UserError, exit code 2."""
    words = list(words)
    if words and words[0] == "--":
        del words[0]
    if not words:
        raise UserError(
            "give the program after --, as in: profile_program.py -- train.py --its flags", 2
        )
    program = words[0]
    if program in ("-m", "-c"):
        return [python, *words]
    if program.endswith(".py"):
        if not Path(program).is_file():
            raise UserError(f"{program}: there is no such file", 2)
        return [python, *words]
    if not shutil.which(program):
        raise UserError(f"{program}: there is no such program", 2)
    return words


def run(
    command: Sequence[str],
    settings: dict,
    environment: dict[str, str],
    output: IO | None = None,
    limit_s: float = 0,
    so_far: Callable[[], object] | None = None,
) -> Ended:
    """Run it to its end.  environment: that in which we were started; output: where its own goes,
    by default to ours; limit_s: after which it is ended, 0 for none; so_far: called at SIGUSR1,
    while it runs."""
    with tempfile.TemporaryDirectory(prefix="profile_program_") as folder:
        processes = Path(folder, "processes")
        processes.mkdir()
        Path(folder, "sitecustomize.py").write_text(SITECUSTOMIZE)
        of_hooks = dict(settings, tool=os.getpid(), processes=str(processes), folder=os.getcwd())
        path = folder
        if environment.get("PYTHONPATH"):
            path = f"{folder}{os.pathsep}{environment['PYTHONPATH']}"
        environment = dict(environment, PYTHONPATH=path)
        environment[SETTINGS] = json.dumps(of_hooks)
        start = functools.partial(
            subprocess.Popen,
            command,
            env=environment,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
        )
        code, received = Run(processes, settings["then"], limit_s, so_far).to_its_end(start)
        results = results_in(processes)
        for result in results:
            observed = processes / f"{result['pid']}.observed"
            if observed.exists():
                result["observed"] = json.loads(observed.read_text())
            sketches = observed.with_suffix(".sketches")
            if sketches.exists():
                result["sketches"] = json.loads(sketches.read_text())
        if "out" in settings:
            name_trace_of_the_only_process(results, Path(settings["out"]))
        started = len(list(processes.glob("*.started")))
        return Ended(code, results, started, any(processes.glob("*.ended")), received)


def results_in(processes: Path) -> list[dict]:
    """What each process has written of itself."""
    return [json.loads(file.read_text()) for file in processes.glob("*.json")]


def name_trace_of_the_only_process(results: list[dict], folder: Path) -> None:
    """A process that is no rank names its trace by its process id, as there may be others.  There
    are none: it is rank 0 of one."""
    recorded = [result for result in results if "trace" in result]
    if len(recorded) != 1 or recorded[0]["is_rank"]:
        return
    result = recorded[0]
    named = result["trace"].replace(f"_process{result['pid']}.", "_rank0.")
    (folder / result["trace"]).replace(folder / named)
    result["trace"] = named


class Run:
    """The program while it runs: signals that we receive are passed on, and it ends after its
    recorded steps.

    processes: the folder in which its processes write; then: kill, exit or continue; limit_s: after
    which it is ended, 0 for none; so_far: called at SIGUSR1, None: that signal is not ours.
    """

    def __init__(
        self, processes: Path, then: str, limit_s: float, so_far: Callable[[], object] | None = None
    ):
        self.processes, self.then, self.limit_s = processes, then, limit_s
        self.so_far = so_far
        self.tree = ProcessTree(str(processes.parent))
        self.signals: queue.SimpleQueue = queue.SimpleQueue()
        self.received: list[int] = []  # of Ctrl-C and SIGTERM
        # When we heard of a process that has recorded and is about to end, by time.monotonic().
        self.first_ended_s: float | None = None
        self.terminated = False  # the whole tree was sent SIGTERM
        self.over = False  # the whole tree was ended

    def to_its_end(self, start: Callable[..., subprocess.Popen]) -> tuple[int, int | None]:
        """Its exit code, 128 + N if a signal ended it, 0 if we did after it was recorded; and the
        signal that we received last."""
        with self.handlers():
            process = start(preexec_fn=dies_with_us)
            began_s = time.monotonic()
            while process.poll() is None:
                self.heed(self.next_signal())
                if self.limit_s and time.monotonic() - began_s > self.limit_s:
                    self.end_all()
                elif self.first_ended_s is not None:
                    self.end_after_recording()
            if self.then == "kill" and self.ended():  # it may have left processes behind
                self.end_all()
        self.tree.close(process.pid)
        received = self.received[-1] if self.received else None
        return self.exit_code_of(process), received

    def exit_code_of(self, process: subprocess.Popen) -> int:
        code = process.returncode
        if code == -signal.SIGKILL and self.over and self.ended():
            return 0
        return 128 - code if code < 0 else code

    @contextlib.contextmanager
    def handlers(self) -> Iterator[None]:
        """Signals are put in a queue: SIGURG is from a process that has written all that it
        recorded.  Not SIG_IGN for Ctrl-C, which the program would inherit."""
        numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGURG, signal.SIGCHLD]
        if self.so_far is not None:
            numbers.append(signal.SIGUSR1)
        earlier = {number: signal.signal(number, self.put) for number in numbers}
        try:
            yield
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)

    def put(self, number: int, frame: object) -> None:
        self.signals.put(number)

    def next_signal(self) -> int | None:
        """The next signal; None after a short time, to see what the
        processes have written meanwhile."""
        with contextlib.suppress(queue.Empty):
            return self.signals.get(timeout=IDLE_S if self.first_ended_s is None else LOOK_S)
        return None

    def heed(self, number: int | None) -> None:
        """Ctrl-C reaches the program from the terminal, SIGTERM by us; if it goes on all the same,
        it is ended."""
        if number in (signal.SIGINT, signal.SIGTERM):
            self.received.append(number)
            if self.received.count(signal.SIGTERM) > 1 or self.received.count(signal.SIGINT) > 2:
                self.end_all()
            elif number == signal.SIGTERM:
                self.tree.send(signal.SIGTERM)
        elif number == signal.SIGUSR1:
            self.answer_so_far()
        elif self.first_ended_s is None and (number == signal.SIGURG or self.ended()):
            self.first_ended_s = time.monotonic()

    def answer_so_far(self) -> None:
        """No error of ours, as of a full disk, ends the program."""
        try:
            self.so_far()
        except UserError as error:
            say(f"No answer so far: {error}; the program goes on")
        except Exception as error:  # noqa: BLE001 - whatever it is
            say(f"No answer so far: {type(error).__name__}: {error}; the program goes on")

    def end_after_recording(self) -> None:
        """Once all that train have written, or have had their time for it."""
        waited_s = time.monotonic() - self.first_ended_s
        if self.then == "kill":
            if self.all_ended() or waited_s > GRACE_S:
                self.end_all()
        elif self.then == "exit":
            if waited_s > EXIT_S + GRACE_S:
                self.end_all()
            elif waited_s > EXIT_S and not self.terminated:
                self.terminated = True
                self.tree.send(signal.SIGTERM)

    def end_all(self) -> None:
        if not self.over:
            self.over = True
            self.tree.end(self.ended(), (self.processes / "go").touch)

    def ended(self) -> list[int]:
        """Processes that have recorded, and wait for our leave to end."""
        return [int(file.stem) for file in self.processes.glob("*.ended")]

    def all_ended(self) -> bool:
        """Whether no process is left that has begun to train,
        and has not written what it recorded."""
        ended, running = self.ended(), running_parents()
        for result in results_in(self.processes):
            training = result["state"] in ("counting", "recording", "recorded")
            if training and result["pid"] not in ended and result["pid"] in running:
                return False
        return True


def dies_with_us() -> None:
    """In the program's first process, before it begins."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
