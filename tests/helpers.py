"""What several tests use and pytest need not know: how to run a command, in this process or as one
of its own."""

import contextlib
import fcntl
import fnmatch
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.base.documents import SCHEMA_VERSION
from harness.base.files import FILES, FOLDERS, kind_of
from harness.base.tables import ANSWER_LINES, COLUMNS
from harness.ranks.failures import exit_code_of
from harness.schema import with_parts

PROJECT = Path(__file__).resolve().parent.parent
REAL_PYTHON = (
    sys.executable
)  # in tests, sys.executable becomes one that starts warm, see tests/warm_python
# The types of all documents by name, as documents.Prediction.
documents = SimpleNamespace(
    **{kind.__name__: kind for kind in with_parts(kind.document for kind in FILES if kind.document)}
)
SMALL_MODEL = (
    "--vocab-size 64 --hidden-dim 32 --n-layers 2 --n-heads 4 --seq-len 16 --batch-size 4".split()
)
# What a study knows of a CPU, as far as it needs to say which rows it has.
CPU_PROPERTIES = SimpleNamespace(
    on_gpu=False, capacity=SimpleNamespace(for_tensors=lambda precision=None: 0)
)
ENVIRONMENT = {
    "device": {"name": "a device"},
    "cpu": {"torch_threads": 1},
    "packages": {"torch": "2"},
    "python": "3",
    "timestamp": "2026-01-01T00:00:00",
}


def exit_code(work) -> int:
    """Of a command in this process, whether it returns or exits."""
    try:
        return work()
    except SystemExit as stop:
        return stop.code


def run_command(module, *flags: str) -> int:
    """Its exit code, in this process; for tests that use the fixture `scratch`, which restores
    sys.argv."""
    sys.argv = [f"{module.__name__}.py", *flags]
    return exit_code(lambda: exit_code_of(module.main))


def start(*command: str, **options) -> subprocess.Popen:
    """A command of the project as a process of its own, output and errors together."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONUNBUFFERED": "1",
    }
    environment |= options.pop("env", {})
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
    return subprocess.Popen(command, text=True, env=environment, **options)


@contextlib.contextmanager
def time_limit(process: subprocess.Popen, seconds: float = 300):
    """What takes longer, ranks that a launcher left among it, is killed: it would take the cores of
    other tests."""

    def end():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def finish(process: subprocess.Popen) -> tuple[int, str]:
    """The exit code and the output of a process, once it ends."""
    with time_limit(process):
        out, _ = process.communicate()
    return process.returncode, out


def read_until(process: subprocess.Popen, beginning: str) -> None:
    """Read what a process prints up to the line that begins so."""
    said = []
    with time_limit(process):
        for line in process.stdout:
            said.append(line)
            if line.startswith(beginning):
                return
    raise AssertionError(f"no line begins with {beginning!r}: {''.join(said)}")


def made_once(
    tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]
) -> tuple[Path, object]:
    """A folder that one of the workers fills for all of them, and what make(folder) returned, which
    is kept as JSON."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    folder = shared / name
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # others wait until it is there
        answer = shared / f"{name}.json"
        if not answer.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed
            folder.mkdir()
            answer.write_text(json.dumps(make(folder)))
    return folder, json.loads(answer.read_text())


def free_port() -> int:
    """A port where nobody listens, below those that the system gives to outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)  # whatever seed a test has set
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def assert_answer(out: str) -> list[str]:
    """What a command printed ends with a dozen lines at most, none wider than a table may be;
    returns them."""
    lines = out.rstrip("\n").rpartition("\n\n")[2].splitlines()
    assert len(lines) <= ANSWER_LINES
    assert max(map(len, lines)) <= COLUMNS
    assert any(line.startswith("Read on:") for line in lines[-2:]), lines
    return lines


def write_part(path: Path, document: dict) -> None:
    """A JSON document that lacks what its readers do not need."""
    path.write_text(json.dumps({"schema_version": SCHEMA_VERSION} | document))


def unregistered(folder: Path) -> list[str]:
    """What lies in a folder and is not in harness/base/files.py; of a registered folder only the
    name counts."""
    strangers = []
    for path in sorted(
        one for one in folder.iterdir() if one.name != "__pycache__"
    ):  # of commands that lie there
        kind = kind_of(path.name)
        if path.is_dir() and any(
            fnmatch.fnmatch(f"{path.name}/", pattern) for pattern in ("earlier_*/", *FOLDERS)
        ):
            strangers += unregistered(path)
        elif kind is None or kind.is_folder != path.is_dir():
            strangers.append(str(path))
    return strangers


def write_results(path: Path, document: dict) -> None:
    """A document of a command, in a folder that is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schema_version": SCHEMA_VERSION} | document))
