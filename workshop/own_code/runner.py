"""Check a file that a learner has written, in a process of its own: whatever it does ends there."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import PROJECT
from harness.base.console import say
from harness.base.errors import UserError
from workshop.own_code.tasks import TASKS

LIMIT_S = 120.0
ENDING_S = 5.0  # that a process may take to end


def check_code(path: Path, number: int) -> bool:
    """Print what exercise `number` asks of the file, and what is wrong.  Returns whether all is
    right.

    Raises UserError if there is no such file or task, or if the file does not run to its end."""
    if number not in TASKS:
        asked = ", ".join(map(str, TASKS))
        raise UserError(f"exercise {number} asks for no code; exercises {asked} do", 2)
    if not path.is_file():
        raise UserError(f"{path}: is not a file")
    say(f"Exercise {number}, {path}: {TASKS[number].title}")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "workshop.own_code.child", f"{number}"]
        exit_code = run_limited([*command, str(path.absolute()), str(result)], path)
        if not result.is_file():
            raise UserError(
                f"{path}: ended with exit code {exit_code} before all was checked; the lines above"
                " say why"
            )
        is_right = json.loads(result.read_text())
    end = "All of it is right." if is_right else "What is asked after that was not checked yet."
    say("", end)
    return is_right


def run_limited(command: list[str], path: Path) -> int:
    """The exit code of the command.  Raises UserError, which begins with the path, if it runs on
    for too long; nothing of it is left running."""
    folders = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        command,
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(folders)),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        raise UserError(f"{path}: had not ended after {LIMIT_S:g} s, and was stopped") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
