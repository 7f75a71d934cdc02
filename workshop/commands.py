"""Run the shell blocks of a text, in order, in a folder that sees the project's commands."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.console import say
from harness.errors import UserError
from harness.files import FOLDERS, kind_of
from workshop.texts import PROJECT, Block

SERVING_S = 180.0  # how long a block that stays open may take until it serves


@dataclass(frozen=True)
class Outcome:
    """Of one block: why it was skipped, or how long it took."""

    block: Block
    skipped: str | None
    seconds: float = 0.0


@contextlib.contextmanager
def project_within(folder: Path) -> Iterator[None]:
    """The commands and texts of the project can be named in the folder as if it were the project's."""
    links = [folder / path.name for path in PROJECT.iterdir() if not generated(path)]
    links = [link for link in links if not os.path.lexists(link)]
    try:
        try:
            for link in links:
                link.symlink_to(PROJECT / link.name)
        except OSError as error:
            raise UserError(f"cannot write to folder {folder}: {error.strerror}") from error
        yield
    finally:
        for link in links:
            link.unlink(missing_ok=True)


def generated(path: Path) -> bool:
    """What a tool or a run has left beside the project's own files."""
    if path.name.startswith((".", "__")):
        return True
    if path.is_dir():
        return any(fnmatch.fnmatch(path.name, pattern.rstrip("/")) for pattern in FOLDERS)
    return kind_of(path.name) is not None


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


def gpu_here() -> str | None:
    """The kind of GPU that PyTorch sees."""
    import torch

    if not torch.cuda.is_available():
        return None
    return "rocm" if torch.version.hip else "cuda"


def run_blocks(blocks: list[Block], name: str, folder: Path, log: Path, long: bool = False) -> list[Outcome]:
    """Run each block that can be run here, its output into the log.

    Raises UserError where one fails, with its line in the text and the last line that it printed.
    """
    gpu = gpu_here()
    outcomes = []
    with log.open("a", errors="replace") as output, project_within(folder):
        for i, block in enumerate(blocks, 1):
            skipped = reason_to_skip(block, gpu, long)
            say(f"[{i}/{len(blocks)}] {block.title}" + (f": skipped, {skipped}" if skipped else ""))
            if skipped:
                outcomes.append(Outcome(block, skipped))
                continue
            print(f"\n$ {block.commands.rstrip()}", file=output, flush=True)
            began = time.monotonic()
            code = execute(block, folder, output, log)
            if code:
                last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1]
                raise UserError(f"{name}:{block.line}: exit code {code}: {last.strip()[:200]} (output in {log})")
            outcomes.append(Outcome(block, None, time.monotonic() - began))
            say(f"      {outcomes[-1].seconds:.1f} s")
    return outcomes


@contextlib.contextmanager
def started(commands: str, folder: Path, output) -> Iterator[subprocess.Popen]:
    """A shell that stops at the first command that fails, in which `python3` is the one that runs us.

    What is left of it at the end, and all that it started, is stopped.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.Popen(
        [shutil.which("bash") or "bash", "-e", "-o", "pipefail", "-c", commands],
        cwd=folder,
        env=os.environ | {"PATH": path, "PYTHONUNBUFFERED": "1"},
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


def execute(block: Block, folder: Path, output, log: Path) -> int:
    """The exit code of a block; of one that stays open, 0 once it has printed where it listens, at any free port."""
    if block.mark != "stays open":
        with started(block.commands, folder, output) as process:
            return process.wait()
    offset = log.stat().st_size
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with started(re.sub(r"(--port[ =])\d+", rf"\g<1>{port}", block.commands), folder, output) as process:
        until = time.monotonic() + SERVING_S
        while time.monotonic() < until and process.poll() is None:
            time.sleep(0.2)
            if b"http://" in log.read_bytes()[offset:]:
                return 0
        return process.poll() or 124
