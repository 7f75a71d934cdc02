"""Runs of the program with changes, one after another, that leave its files as they were."""

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
from harness.program.command import Ended, run

MOST_TO_COPY = 500 * MB
# Within it, what the program writes to its working folder goes to a folder of ours.
OVERLAY = (
    'mount -t overlay overlay -o "lowerdir=$1,upperdir=$2,workdir=$3" "$1" && cd "$1" && shift 3 &&'
    ' exec "$@"'
)
SAME_RUN = {"PYTHONHASHSEED": "0", "WANDB_MODE": "disabled"}


@dataclass
class TrialResult:
    """What rank 0 of a run told (harness.program.hooks.trial), or why it told nothing."""

    found: dict
    seconds: float
    error: str = ""


@dataclass
class Trials:
    """Of one command.  scratch: a folder for what its runs write; kept: how the working folder is:
    `as it is`, by an `overlay`, or by a `copy` of it for each run."""

    command: Sequence[str]
    environment: dict[str, str]
    scratch: Path
    limit_s: float
    kept: str

    def run(
        self, changes: Sequence[str] = (), plan: Sequence[Sequence[str]] = (), audit: bool = False
    ) -> TrialResult:
        """changes, plan, audit: of harness.program.hooks.trial.  Raises SystemExit if it was ended
        by Ctrl-C or SIGTERM, which is for us, too."""
        settings = {
            "steps": "optimizer",
            "every": 1,
            "data": [],
            "then": "kill",
            "trial": {
                "audit": audit,
                "changes": list(changes),
                "plan": [list(turn) for turn in plan],
            },
        }
        environment = dict(self.environment)
        environment.update(SAME_RUN, TORCHINDUCTOR_CACHE_DIR=str(self.scratch / "inductor"))
        log = self.scratch / "output.txt"
        began_s = time.monotonic()
        with self.own_folder() as prefix, log.open("wb") as output:
            ended = run([*prefix, *self.command], settings, environment, output, self.limit_s)
        if ended.signal:
            raise SystemExit(128 + ended.signal)
        seconds = time.monotonic() - began_s
        trained = [
            process
            for process in ended.processes
            if process["state"] in ("recorded", "ended") and process["steps"]
        ]
        if trained:
            rank_0 = min(trained, key=lambda process: (process["rank"], -process["steps"]))
            return TrialResult(rank_0, seconds)
        return TrialResult({}, seconds, self.why_nothing(ended, seconds, log))

    def why_nothing(self, ended: Ended, seconds: float, log: Path) -> str:
        """Why no process told of a step."""
        for process in ended.processes:
            if process["state"] == "failed":
                return process["error"]
        if seconds >= self.limit_s:
            return f"longer than {self.limit_s:.0f} s"
        error = f"exit code {ended.exit_code}: {last_error(log)}"
        if ended.exit_code == 0:
            return f"no step of an optimizer of torch.optim was seen; {error}"
        return error

    @contextlib.contextmanager
    def own_folder(self) -> Iterator[Sequence[str]]:
        """Within it, commands with this before them write to their own working folder."""
        with tempfile.TemporaryDirectory(dir=self.scratch, ignore_cleanup_errors=True) as folder:
            if self.kept == "copy":
                copy = shutil.copytree(Path.cwd(), Path(folder, "copy"), symlinks=True)
                yield ["sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", str(copy)]
            else:
                yield overlay(Path(folder)) if self.kept == "overlay" else []


def overlay(folder: Path) -> list[str]:
    layers = [folder / "upper", folder / "work"]
    for layer in layers:
        layer.mkdir()
    return ["unshare", "-Urm", "sh", "-c", OVERLAY, "sh", str(Path.cwd()), *map(str, layers)]


def last_error(log: Path) -> str:
    """The last line of an output that names an error, else its last line."""
    last, error = "no output", None
    for line in log.read_text(errors="replace").splitlines():
        line = line.strip()
        if line:
            last = line
        if "Error" in line and "ChildFailed" not in line and not line.startswith("raise"):
            error = line
    return error or last


@contextlib.contextmanager
def trials_of(
    command: Sequence[str], environment: dict[str, str], limit_s: float, keep: bool
) -> Iterator[Trials]:
    """keep: let the program write its files where it always does; otherwise to an overlay of the
    working folder, or to a copy of it.  Raises UserError if neither can be had."""
    with tempfile.TemporaryDirectory(prefix="prove_changes_", ignore_cleanup_errors=True) as folder:
        scratch, here = Path(folder), Path.cwd()
        trials = Trials(command, environment, scratch, limit_s, "as it is" if keep else "overlay")
        if not keep:
            if scratch.is_relative_to(here):  # an overlay would hide what runs tell
                raise cannot_keep(
                    f"{here} holds the folder of temporary files, {tempfile.gettempdir()}; run it"
                    " from a folder of its own"
                )
            if not can_overlay(trials):
                check_copy(here)
                trials.kept = "copy"
        yield trials


def check_copy(folder: Path) -> None:
    """Raises UserError if a folder is too large to be copied for each run."""
    size = sum(file.lstat().st_size for file in folder.rglob("*"))
    if size > MOST_TO_COPY:
        raise cannot_keep(
            f"no overlay can be had here, and {folder} has {size / MB:,.0f} MB, too much to copy;"
            " --keep-files lets it write them"
        )


def cannot_keep(why: str) -> UserError:
    return UserError(f"cannot keep the program's files: {why}", 2)


def can_overlay(trials: Trials) -> bool:
    if not shutil.which("unshare"):
        return False
    with trials.own_folder() as prefix:
        return subprocess.run([*prefix, "true"], capture_output=True).returncode == 0
