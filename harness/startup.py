"""How a command starts: what must be set up before PyTorch is imported, and its exit code.  Imports nothing slow."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from harness.slurm import slurm_ranks

WAITING_POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # if the user sets one, none is set here


def begin_command() -> None:
    """Set process-wide state before the slow imports.

    Imports take seconds before the command itself runs: Ctrl-C and SIGTERM end them without a traceback.
    """
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda received, frame: os._exit(128 + received))
    os.environ.update(slurm_ranks(os.environ))
    os.environ |= default_variables()


def default_variables() -> dict[str, str]:
    """Environment variables that libraries read when they are loaded, as far as the user has not set them."""
    # Otherwise the profiler warns about tensors created before its window, and prints when it starts and stops.
    defaults = {"TORCH_CPP_LOG_LEVEL": "ERROR", "KINETO_LOG_LEVEL": "99"}
    # How often a thread of libgomp looks for new work before it sleeps.  By default it does so 300,000 times, and keeps
    # a core from other processes or from the thread that it waits for: see benchmarks/waiting_policies.py.
    if not any(name in os.environ for name in WAITING_POLICIES):
        defaults["GOMP_SPINCOUNT"] = "1000"
    return {name: value for name, value in defaults.items() if name not in os.environ}


def run_command(main: Callable[[], object]) -> NoReturn:
    """Run main() as this process and exit with its code; an error becomes one line."""
    begin_command()
    from harness.errors import exit_code_of

    sys.exit(exit_code_of(main))
