"""How a command starts: its interpreter, what must be set up before PyTorch is imported, and its
exit code.

Imports nothing slow, and runs on any Python 3.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from harness import PROJECT
from harness.base.slurm import problem_of_address, slurm_ranks

HANDED_OVER = "TINY_LLAMA_HANDED_OVER"  # set by the interpreter that handed over: it happens once
# By all commands that train, or plan to.
IMPORTED_BY_ALL = ("torch", "numpy", "pandas", "tabulate", "tqdm")
# If the user sets one, none is set here.
WAITING_POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def begin_command(packages: Sequence[str] = IMPORTED_BY_ALL) -> None:
    """Make sure that these packages are there, and set process-wide state before the slow imports.

    Imports take seconds before the command itself runs:
    Ctrl-C and SIGTERM end them without a traceback.
    """
    hand_over(packages)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda received, frame: os._exit(128 + received))
    os.environ.update(slurm_ranks(os.environ))
    problem = problem_of_address(os.environ) or problem_of_ranks(os.environ)
    if problem:
        print(f"{Path(sys.argv[0]).name}: error: {problem}", file=sys.stderr)
        sys.exit(2)
    os.environ.update(default_variables())


def problem_of_ranks(environ: Mapping[str, str]) -> str | None:
    """Why torchrun's variables do not say which rank of how many this process is, and where they
    meet; None: they do, or this process is the only one."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if not environ.get(name, "1").isdecimal():
            return f"{name}={environ[name]}: is not a number"
    world_size = environ.get("WORLD_SIZE", "1")
    if int(world_size) == 0:
        return f"WORLD_SIZE={world_size}: a run has at least one rank"
    if int(world_size) == 1:
        return None
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if missing:
        return _problem_of_missing(missing, world_size)
    if int(environ["RANK"]) >= int(world_size):
        return f"RANK={environ['RANK']}: there is no such rank of WORLD_SIZE={world_size}"
    return _problem_of_port(environ["MASTER_PORT"]) or _problem_of_timeout(environ)


def _problem_of_missing(names: list[str], world_size: str) -> str:
    listed, verb = names[0], "is"
    if len(names) > 1:
        listed, verb = f"{', '.join(names[:-1])} and {names[-1]}", "are"
    return (
        f"WORLD_SIZE={world_size}, but {listed} {verb} not set; start ranks with torchrun or srun,"
        " or unset WORLD_SIZE"
    )


def _problem_of_port(port: str) -> str | None:
    if port.isdecimal() and 0 < int(port) < 2**16:
        return None
    return f"MASTER_PORT={port}: is not the number of a port"


def _problem_of_timeout(environ: Mapping[str, str]) -> str | None:
    limit_s = environ.get("TINY_LLAMA_RANKS_TIMEOUT", "0")
    try:
        float(limit_s)
    except ValueError:
        return f"TINY_LLAMA_RANKS_TIMEOUT={limit_s}: is not a number of seconds"
    return None


def default_variables() -> dict[str, str]:
    """Environment variables that libraries read when they are loaded, as far as the user has not
    set them."""
    # Otherwise the profiler warns about tensors created before its window, and prints when it
    # starts and stops.
    defaults = {"TORCH_CPP_LOG_LEVEL": "ERROR", "KINETO_LOG_LEVEL": "99"}
    # How often a thread of libgomp looks for new work before it sleeps.  By default it does so
    # 300,000 times, and keeps a core from other processes or from the thread that it waits for.  Of
    # the counts that cost nothing on a quiet machine, 3,000 lost least next to busy processes.
    if not any(name in os.environ for name in WAITING_POLICIES):
        defaults["GOMP_SPINCOUNT"] = "3000"
    return {name: value for name, value in defaults.items() if name not in os.environ}


def venv_of(environ: Mapping[str, str]) -> Path:
    """The environment that the launchers make: VENV, as they take it, else .venv of the project."""
    return Path(environ.get("VENV") or PROJECT / ".venv").absolute()


def hand_over(packages: Sequence[str] = IMPORTED_BY_ALL) -> None:
    """Continue with the interpreter of VENV if this one lacks a package.  If there is none, exit
    with code 1, or show the usage if --help asks for it."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if not missing and sys.version_info >= (3, 10):
        return
    problem = f"no {missing[0]}" if missing else "Python 3.10 or newer is needed"
    venv = venv_of(os.environ)
    is_another = Path(sys.prefix).resolve() != venv.resolve()
    if (venv / "bin" / "python").exists() and is_another and HANDED_OVER not in os.environ:
        _continue_with(venv / "bin" / "python", problem, runs_programs="torch" not in missing)
    _exit_without(problem)


def _continue_with(python: Path, problem: str, runs_programs: bool) -> NoReturn:
    """Replace this process by the same command of another interpreter.  runs_programs: whether this
    one has what programs of others need, and so goes on running those."""
    name = Path(sys.argv[0]).name
    line = f"{name}: {sys.executable}: {problem}; continuing with {python}"
    print(line, file=sys.stderr, flush=True)
    os.environ[HANDED_OVER] = sys.executable if runs_programs else str(python)
    typed = getattr(sys, "orig_argv", [None, *sys.argv])
    os.execv(str(python), [str(python), *typed[1:]])


def _exit_without(problem: str) -> NoReturn:
    """Say what is missing and how to set it up; with --help also the usage, which needs no package
    as the parser with all flags does."""
    name = Path(sys.argv[0]).name
    place = "." if Path.cwd() == PROJECT else str(PROJECT)
    launcher = f"{place}/run_baseline.sh"
    folder = os.environ.get("VENV") or f"{place}/.venv"
    advice = f"run {launcher} once, which installs it in {folder}; then type this again"
    if "-h" in sys.argv[1:] or "--help" in sys.argv[1:]:
        print(sys.modules["__main__"].__doc__ or f"usage: {name}")  # python -OO drops docstrings
        print(f"{problem}: all flags are shown after set-up; {advice}")
        sys.exit(0)
    print(f"{name}: error: {sys.executable}: {problem}; {advice}", file=sys.stderr)
    sys.exit(1)


def run_command(main: Callable[[], object], packages: Sequence[str] = IMPORTED_BY_ALL) -> NoReturn:
    """Run main() as this process, which needs these packages, and exit with its code; an error
    becomes one line."""
    begin_command(packages)
    from harness.ranks.failures import exit_code_of

    sys.exit(exit_code_of(main))
