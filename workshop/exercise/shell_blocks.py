"""Run the shell blocks of a page, in order, in a folder with links to the project's files."""

import contextlib
import fnmatch
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from harness import PROJECT
from harness.base.console import say
from harness.base.errors import UserError
from harness.base.files import FOLDERS, kind_of
from harness.base.tables import COLUMNS
from workshop.exercise.page import Block

PROGRESS_S = 15.0  # between two lines about a command that is running
SERVER_START_S = 180.0  # how long a block that stays open may take to print its address


@contextlib.contextmanager
def linked_project(folder: Path) -> Iterator[None]:
    """Links in the folder to the project's files, so that commands find them there;
    removed at the end."""
    links = [folder / path.name for path in PROJECT.iterdir() if not is_generated(path)]
    links = [link for link in links if not os.path.lexists(link)]
    try:
        for link in links:
            link.symlink_to(PROJECT / link.name)
        yield
    finally:
        for link in links:
            link.unlink(missing_ok=True)


def is_generated(path: Path) -> bool:
    """Whether the path was written by a tool or a run and is not part of the project."""
    if path.is_dir() and not path.name.startswith((".", "__")):
        return any(fnmatch.fnmatch(path.name, pattern.rstrip("/")) for pattern in FOLDERS)
    kind = None if path.is_dir() else kind_of(path.name)
    return path.name.startswith((".", "__")) or (kind is not None and not kind.is_folder)


def reason_to_skip(block: Block, gpu: str | None, long: bool) -> str | None:
    """Why the block is not run here; None if it is.  gpu: rocm, cuda or None."""
    can_run = {
        None: True,
        "stays open": True,
        "needs a GPU": gpu is not None,
        "needs an AMD GPU": gpu == "rocm",
        "needs an NVIDIA GPU": gpu == "cuda",
        "takes minutes": long,
        "takes minutes without a GPU": long or gpu is not None,
    }
    if can_run[block.mark]:
        return None
    return f"{block.mark}; --long runs it" if block.mark.startswith("takes") else block.mark


def gpu_kind() -> str | None:
    """rocm or cuda if PyTorch sees a GPU, else None."""
    import torch

    if not torch.cuda.is_available():
        return None
    return "rocm" if torch.version.hip else "cuda"


def run_blocks(
    blocks: list[Block],
    name: str,
    folder: Path,
    log: Path,
    long: bool,
    known: Mapping[str, float],
    before: Callable[[Block], None] = lambda block: None,
) -> list[dict]:
    """Run each block that can be run here, its output into the log.

    known: seconds that blocks took elsewhere, by title, for a guess of the time left.  before:
    called with each block that is about to run.  Returns a row for each block:
    line, command, seconds, and why it was skipped if it was.  Raises UserError if one fails, with
    its line on the page and the last line that it printed.
    """
    gpu = gpu_kind()
    reasons = [reason_to_skip(block, gpu, long) for block in blocks]
    rows: list[dict] = []
    with log.open("a", errors="replace") as output, linked_project(folder):
        for i, (block, reason) in enumerate(zip(blocks, reasons, strict=True)):
            if reason:
                note = f": skipped, {reason}"
            else:
                before(block)
                ahead = list(zip(blocks[i:], reasons[i:], strict=True))
                note = time_left(rows, [b.title for b, skipped in ahead if not skipped], known)
            start = f"[{i + 1}/{len(blocks)}] "
            room = COLUMNS - len(start + note)
            say(start + textwrap.shorten(block.title, room, placeholder=" ...") + note)
            row = {"line": block.line, "command": block.title, "seconds": None, "skipped": reason}
            rows.append(row)
            if reason:
                continue
            print(f"\n$ {block.commands.rstrip()}", file=output, flush=True)
            started_s = time.monotonic()
            code = run_block(block, folder, output, log)
            if code:
                where = f"{name}:{block.line}: exit code {code}"
                raise UserError(f"{where}: {last_line(log)[:200]} (output in {log})")
            row["seconds"] = time.monotonic() - started_s
            say(f"      {row['seconds']:.1f} s")
    return rows


def time_left(done: list[dict], ahead: list[str], known: Mapping[str, float]) -> str:
    """' (about 2 min left)': the seconds known of the blocks ahead, at the pace of those done;
    empty if unknown."""
    if not all(title in known for title in ahead):
        return ""
    here_s = there_s = 0.0
    for row in done:
        if row["seconds"] and row["command"] in known:
            here_s += row["seconds"]
            there_s += known[row["command"]]
    pace = here_s / there_s if here_s else 1.0
    return f" (about {duration(pace * sum(known[title] for title in ahead))} left)"


def duration(seconds: float) -> str:
    """45 s, 3 min 20 s"""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def last_line(log: Path) -> str:
    """The last line that a command printed."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


@contextlib.contextmanager
def shell(commands: str, folder: Path, output) -> Iterator[subprocess.Popen]:
    """A shell that stops at the first command that fails; `python3` is this interpreter.

    What is still running at the end, including background processes, is stopped.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.Popen(
        [shutil.which("bash") or "bash", "-e", "-o", "pipefail", "-c", commands],
        cwd=folder,
        env=dict(os.environ, PATH=path, PYTHONUNBUFFERED="1"),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_block(block: Block, folder: Path, output, log: Path) -> int:
    """The exit code of a block."""
    if block.mark == "stays open":
        return start_server(block, folder, output, log)
    started_s = time.monotonic()
    with shell(block.commands, folder, output) as process:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(PROGRESS_S)
            say(f"      {time.monotonic() - started_s:.0f} s: {last_line(log)[:100]}")


def start_server(block: Block, folder: Path, output, log: Path) -> int:
    """0 once a block that stays open, with a free port, has printed its address; else its exit
    code, 124 if it goes on without."""
    offset = log.stat().st_size
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    commands = re.sub(r"(--port[ =])\d+", rf"\g<1>{port}", block.commands)
    with shell(commands, folder, output) as process:
        deadline = time.monotonic() + SERVER_START_S
        while time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.2)
            if b"http://" in log.read_bytes()[offset:]:
                return 0
        return process.poll() or 124
