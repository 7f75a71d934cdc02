"""Run the shell blocks of a text, in order, in a folder that sees the project's commands."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from harness.console import say
from harness.errors import UserError
from workshop.texts import PROJECT, Block

LEFT_ALONE = {".git", ".venv", ".ci", "tests"}
SERVING_S = 180.0  # how long a block that stays open may take until it serves


@dataclass(frozen=True)
class Outcome:
    """Of one block: what became of it (`ok`, `passed over`), why, and how long it took."""

    block: Block
    status: str
    reason: str
    seconds: float


@contextlib.contextmanager
def project_within(folder: Path) -> Iterator[None]:
    """The commands and texts of the project can be named in the folder as if it were the project's."""
    made = []
    try:
        try:
            for path in sorted(PROJECT.iterdir()):
                link = folder / path.name
                if path.name not in LEFT_ALONE and not generated(path) and not os.path.lexists(link):
                    link.symlink_to(path)
                    made.append(link)
        except OSError as error:
            raise UserError(f"cannot write to folder {folder}: {error.strerror}") from error
        yield
    finally:
        for link in made:
            link.unlink(missing_ok=True)


def generated(path: Path) -> bool:
    """What a run has left beside the project's own files: those are in no commit."""
    if path.is_dir():
        return path.name not in {"analysis", "benchmarks", "exercises", "studies", "workshop"}
    return path.name.startswith(".")


def runs_here(block: Block, gpu: str | None, long: bool) -> str | None:
    """None if the block can be run, else why it is passed over.  gpu: rocm, cuda or None."""
    return {
        "needs a GPU": None if gpu else "needs a GPU",
        "needs an AMD GPU": None if gpu == "rocm" else "needs an AMD GPU",
        "needs an NVIDIA GPU": None if gpu == "cuda" else "needs an NVIDIA GPU",
        "takes minutes": None if long else "takes minutes; --long runs it",
        "takes minutes without a GPU": None if long or gpu else "takes minutes without a GPU; --long runs it",
    }.get(block.mark)


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
            start = f"[{i}/{len(blocks)}] {block.title}"
            why = runs_here(block, gpu, long)
            if why:
                say(f"{start}: passed over, {why}")
                outcomes.append(Outcome(block, "passed over", why, 0.0))
                continue
            say(start)
            print(f"\n$ {block.commands.rstrip()}", file=output, flush=True)
            began = time.monotonic()
            code = serve(block, folder, output, log) if block.mark == "stays open" else execute(block, folder, output)
            seconds = time.monotonic() - began
            if code:
                last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1]
                raise UserError(f"{name}:{block.line}: exit code {code}: {last.strip()[:200]} (output in {log})")
            say(f"      {seconds:.1f} s")
            outcomes.append(Outcome(block, "ok", "", seconds))
    return outcomes


def start(block: Block, folder: Path, output) -> subprocess.Popen:
    """A shell that stops at the first command that fails; `python3` is the one that runs us."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [shutil.which("bash") or "bash", "-e", "-o", "pipefail", "-c", block.commands],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def execute(block: Block, folder: Path, output) -> int:
    process = start(block, folder, output)
    try:
        return process.wait()
    finally:
        end(process)


def serve(block: Block, folder: Path, output, log: Path) -> int:
    """A server is right when it says where it listens; then it is stopped.  Its port is any that is free."""
    offset = log.stat().st_size
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    commands = re.sub(r"(--port[ =])\d+", rf"\g<1>{port}", block.commands)
    process = start(replace(block, commands=commands), folder, output)
    try:
        until = time.monotonic() + SERVING_S
        while time.monotonic() < until and process.poll() is None:
            time.sleep(0.2)
            with log.open("rb") as file:
                file.seek(offset)
                if b"http://" in file.read():
                    return 0
        return process.poll() or 124
    finally:
        end(process)


def end(process: subprocess.Popen) -> None:
    """Stop what is left of a block, and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
