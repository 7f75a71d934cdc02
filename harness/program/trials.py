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
from harness.program.command import run

MOST_TO_COPY = 500 * MB
# Within it, what the program writes to its working folder goes to a folder of ours.
OVERLAY = (
    'mount -t overlay overlay -o "lowerdir=$1,upperdir=$2,workdir=$3" "$1" && cd "$1" && shift 3 &&'
    ' exec "$@"'
)
SAME_RUN = {"PYTHONHASHSEED": "0", "WANDB_MODE": "disabled"}


@dataclass
class Trial:
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
        self,
        changes: Sequence[str] = (),
        plan: Sequence[Sequence[str]] = (),
        audit: bool = False,
        **more: object,
    ) -> Trial:
        """more: of harness.program.hooks.trial.  Raises SystemExit if it was ended by Ctrl-C or
        SIGTERM, which is for us, too."""
        trial = {
            "audit": audit,
            "changes": [*changes],
            "plan": [*map(list, plan)],
            "inside": None,
            **more,
        }
        settings = {"steps": "optimizer", "every": 1, "data": [], "then": "kill", "trial": trial}
        environment = (
            self.environment
            | SAME_RUN
            | {"TORCHINDUCTOR_CACHE_DIR": str(self.scratch / "inductor")}
        )
        began, log = time.monotonic(), self.scratch / "output.txt"
        with self.own_folder() as prefix, log.open("wb") as output:
            ended = run([*prefix, *self.command], settings, environment, output, self.limit_s)
        if ended.signal:
            raise SystemExit(128 + ended.signal)
        seconds = time.monotonic() - began
        told = [
            one for one in ended.processes if one["state"] in ("recorded", "ended") and one["steps"]
        ]
        if told:
            return Trial(min(told, key=lambda one: (one["rank"], -one["steps"])), seconds)
        failed = next((one["error"] for one in ended.processes if one["state"] == "failed"), None)
        late = f"longer than {self.limit_s:.0f} s" if seconds >= self.limit_s else None
        none = "no step of an optimizer of torch.optim was seen; " * (not ended.exit_code)
        return Trial(
            {}, seconds, failed or late or f"{none}exit code {ended.exit_code}: {last_error(log)}"
        )

    def departs(self, python: str, program: str) -> bool:
        """Whether a program that compares a compiled graph with itself finds
        that a gradient departs."""
        if not program:
            return False
        file = self.scratch / "reproduce.py"
        file.write_text(program)
        with contextlib.suppress(subprocess.TimeoutExpired):
            ended = subprocess.run(
                [python, str(file)], env=self.environment, capture_output=True, timeout=self.limit_s
            )
            return ended.returncode == 1 and b"compiled" in ended.stdout
        return False

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
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [
        line
        for line in lines
        if "Error" in line and "ChildFailed" not in line and not line.startswith("raise")
    ]
    return (errors or lines or ["no output"])[-1]


@contextlib.contextmanager
def trials_of(
    command: Sequence[str], environment: dict[str, str], limit_s: float, keep: bool
) -> Iterator[Trials]:
    """keep: let the program write its files where it always does; otherwise to an overlay of the
    working folder, or to a copy of it.  Raises UserError if neither can be had."""
    with tempfile.TemporaryDirectory(prefix="prove_changes_", ignore_cleanup_errors=True) as folder:
        of = Trials(command, environment, Path(folder), limit_s, "as it is" if keep else "overlay")
        if not keep and Path(folder).is_relative_to(
            Path.cwd()
        ):  # an overlay would hide what runs tell
            why = f"{Path.cwd()} holds the folder of temporary files, {tempfile.gettempdir()}"
            raise UserError(
                f"cannot keep the program's files: {why}; run it from a folder of its own", 2
            )
        if not keep and not can_overlay(of):
            of.kept, here = "copy", Path.cwd()
            size = sum(file.lstat().st_size for file in here.rglob("*"))
            if size > MOST_TO_COPY:
                why = (
                    f"no overlay can be had here, and {here} has {size / MB:,.0f} MB, too much to"
                    " copy"
                )
                raise UserError(
                    f"cannot keep the program's files: {why}; --keep-files lets it write them", 2
                )
        yield of


def can_overlay(trials: Trials) -> bool:
    if not shutil.which("unshare"):
        return False
    with trials.own_folder() as prefix:
        return subprocess.run([*prefix, "true"], capture_output=True).returncode == 0
