"""How a command starts: what must be set up before PyTorch is imported, and its exit code.  Imports nothing slow."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from harness.slurm import slurm_ranks


def begin_command() -> None:
    """Set process-wide state before the slow imports.

    Imports take seconds before the command itself runs: Ctrl-C and SIGTERM end them without a traceback.
    """
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda received, frame: os._exit(128 + received))
    os.environ.update(slurm_ranks(os.environ))
    # Otherwise the profiler warns about tensors created before its window, and prints when it starts and stops.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def run_command(main: Callable[[], object]) -> NoReturn:
    """Run main() as this process and exit with its code; an error becomes one line."""
    begin_command()
    from harness.errors import exit_code_of

    sys.exit(exit_code_of(main))
