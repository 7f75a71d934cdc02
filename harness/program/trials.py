"""Runs of the program with changes, one after another, that leave its files as they were."""

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

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
    """What the ranks of a run told (harness.program.hooks.trial), or why they told nothing."""

    found: dict
    seconds: float
    error: str = ""
    stopped: bool = False  # after the time that it had
    signal: int = 0  # of Ctrl-C and SIGTERM: it was ended by one


@dataclass
class Trials:
    """Of one command.  scratch: a folder for what its runs write; kept: how the working folder is:
    `as it is`, by an `overlay`, or by a `copy` of it for each run."""

    command: Sequence[str]
    environment: dict[str, str]
    scratch: Path
    kept: str

    def run(
        self,
        changes: Sequence[str] = (),
        plan: Sequence[Sequence[str]] = (),
        audit: bool = False,
        limit_s: float = 0,
    ) -> TrialResult:
        """changes, plan, audit: of harness.program.hooks.trial; limit_s: after which it is stopped,
        0 for none.  Of a plan, turns that were over by then have been told."""
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
            ended = run([*prefix, *self.command], settings, environment, output, limit_s)
        seconds = time.monotonic() - began_s
        result = TrialResult({}, seconds, signal=ended.signal or 0)
        result.stopped = 0 < limit_s <= seconds
        told = by_rank(filter(has_told, ended.processes))
        if told:
            result.found = of_all_ranks(told)
            if len(told) < result.found["world_size"]:
                result.error = (
                    f"{len(told)} of its {result.found['world_size']} ranks told of their steps:"
                    " those of other nodes, and what has ended, cannot be judged"
                )
        elif result.stopped:
            result.error = f"stopped after {limit_s:,.0f} s"
        else:
            result.error = self.why_nothing(ended, log)
        return result

    def why_nothing(self, ended: Ended, log: Path) -> str:
        """Why no process told of a step."""
        for process in ended.processes:
            if process["state"] == "failed":
                return process["error"]
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


def has_told(process: dict) -> bool:
    """Whether a process has told all that it was to tell, or of turns until it was ended."""
    if process["state"] == "counting":
        return bool(process["turn_signs"])
    return process["state"] in ("recorded", "ended") and process["steps"] > 0


def by_rank(processes: Iterable[dict]) -> list[dict]:
    """Of each rank the process that took the most steps, rank 0 first."""
    of_rank: dict[int, dict] = {}
    for process in sorted(processes, key=lambda process: process["steps"]):
        of_rank[process["rank"]] = process
    return [of_rank[rank] for rank in sorted(of_rank)]


def of_all_ranks(told: list[dict]) -> dict:
    """What all ranks of a run told, as one: a step takes as long as its slowest rank, and every
    rank's gradients are compared; a change takes effect where it does on all of them."""
    first = dict(told[0])
    first["times_ms"] = [max(times) for times in of_each_rank("times_ms", told)]
    first["losses"] = [fmean(losses) for losses in of_each_rank("losses", told)]
    first["in_training"] = sum(rank["in_training"] for rank in told)
    first["signs"] = fewest([rank["signs"] for rank in told])
    first["turn_signs"] = [fewest(signs) for signs in of_each_rank("turn_signs", told)]
    if first["peak_bytes"] is not None:
        first["peak_bytes"] = max(rank["peak_bytes"] for rank in told)
    for name in ("gradients", "moves"):
        sketches = dict(told[0][name])
        for rank in told[1:]:
            for parameter, sketch in rank[name].items():
                sketches[f"{parameter} of rank {rank['rank']}"] = sketch
        first[name] = sketches
    return first


def of_each_rank(name: str, told: list[dict]) -> list[tuple]:
    """The values of a list that every rank has, up to the end of the shortest."""
    return list(zip(*(rank[name] for rank in told), strict=False))


def fewest(signs: Sequence[dict[str, int]]) -> dict[str, int]:
    """Of each sign, the count of the rank that has the fewest."""
    names = dict.fromkeys(name for of_rank in signs for name in of_rank)
    return {name: min(of_rank.get(name, 0) for of_rank in signs) for name in names}


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
def trials_of(command: Sequence[str], environment: dict[str, str], keep: bool) -> Iterator[Trials]:
    """keep: let the program write its files where it always does; otherwise to an overlay of the
    working folder, or to a copy of it.  Raises UserError if neither can be had."""
    with tempfile.TemporaryDirectory(prefix="prove_changes_", ignore_cleanup_errors=True) as folder:
        scratch, here = Path(folder), Path.cwd()
        trials = Trials(command, environment, scratch, "as it is" if keep else "overlay")
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
