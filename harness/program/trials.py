"""Runs of the program with changes, one after another, that leave its files as they were."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.base.errors import UserError
from harness.base.units import MB
from harness.program.command import run

MOST_TO_COPY = 500 * MB
# Within it, what the program writes to its working folder goes to a folder of ours.
OVERLAY = 'mount -t overlay overlay -o "lowerdir=$1,upperdir=$2,workdir=$3" "$1" && cd "$1" && shift 3 && exec "$@"'
SAME_RUN = {"PYTHONHASHSEED": "0", "WANDB_MODE": "disabled"}


@dataclass
class Trial:
    """What rank 0 of a run told (harness.program.hooks.trial), or why it told nothing."""

    found: dict
    seconds: float
    error: str = ""


@dataclass
class Trials:
    """Of one command.  scratch: a folder for what its runs write."""

    command: Sequence[str]
    environment: dict[str, str]
    scratch: Path
    limit_s: float
    prefix: Sequence[str] = ()

    def run(self, changes: Sequence[str] = (), plan: Sequence[Sequence[str]] = (), audit: bool = False) -> Trial:
        """Raises SystemExit if it was ended by Ctrl-C or SIGTERM, which is for us, too."""
        trial = {"audit": audit, "changes": [*changes], "plan": [*map(list, plan)]}
        settings = {"steps": "optimizer", "every": 1, "data": [], "then": "kill", "trial": trial}
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(self.scratch / "inductor")}
        began, log = time.monotonic(), self.scratch / "output.txt"
        with log.open("wb") as output:
            environment = self.environment | SAME_RUN | caches
            ended = run([*self.prefix, *self.command], settings, environment, output, self.limit_s)
        if ended.signal:
            raise SystemExit(128 + ended.signal)
        seconds = time.monotonic() - began
        told = [one for one in ended.processes if one["state"] in ("recorded", "ended") and one["steps"]]
        if told:
            return Trial(min(told, key=lambda one: (one["rank"], -one["steps"])), seconds)
        failed = next((one["error"] for one in ended.processes if one["state"] == "failed"), None)
        late = f"longer than {self.limit_s:.0f} s" if seconds >= self.limit_s else None
        return Trial({}, seconds, failed or late or f"exit code {ended.exit_code}: {last_error(log)}")


def last_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line and "ChildFailed" not in line and not line.startswith("raise")]
    return (errors or lines or ["no output, and no step of an optimizer"])[-1]


@contextlib.contextmanager
def trials_of(command: Sequence[str], environment: dict[str, str], limit_s: float, keep: bool) -> Iterator[Trials]:
    """keep: let the program write its files where it always does; otherwise to an overlay of the working folder, or to
    a copy of it.  Raises UserError if neither can be had."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="prove_changes_") as folder:
        scratch = Path(folder)
        of = Trials(command, environment, scratch, limit_s)
        if keep:
            yield of
            return
        upper, work = scratch / "upper", scratch / "work"
        upper.mkdir()
        work.mkdir()
        overlay = ["unshare", "-Urm", "sh", "-c", OVERLAY, "sh", str(here), str(upper), str(work)]
        if shutil.which("unshare") and subprocess.run([*overlay, "true"], capture_output=True).returncode == 0:
            of.prefix = overlay
            yield of
            return
        size = sum(file.stat().st_size for file in here.rglob("*") if file.is_file() and not file.is_symlink())
        if size > MOST_TO_COPY:
            why = f"no overlay can be had here, and {here} has {size / MB:,.0f} MB, too much to copy"
            raise UserError(
                f"the program's files cannot be kept as they are: {why}; --keep-files lets it write them", 2
            )
        with contextlib.chdir(shutil.copytree(here, scratch / "copy", symlinks=True)):
            yield of
