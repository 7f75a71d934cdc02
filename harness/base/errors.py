"""Errors for the user, signals as errors, and what an error says of itself."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path


class UserError(Exception):
    """Something that the user can fix, printed as one line.  Exit code 2 for arguments, 1 for
    everything else.

    shown: lines that are printed before it: the traceback of the user's own code, or an example of
    what to write."""

    def __init__(self, message: str, exit_code: int = 1, shown: str = ""):
        super().__init__(message)
        self.exit_code, self.shown = exit_code, shown


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM.  Not an Exception, so that no `except Exception` catches it."""

    def __init__(self, signum: int):
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum


# ---- Signals -------------------------------------------------------------------------------------

OF_TORCHRUN = "TORCHELASTIC_RUN_ID"  # in the environment of the ranks that it starts
SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Python swallows exceptions raised in a finalizer, so signals are recorded as well.
_received: list[int] = []
HOW_TO_END = b"writing what is known of the run; Ctrl-C again ends it without the rest\n"


def is_interruption(error: BaseException) -> bool:
    """Whether a signal ended the run, that of this rank or of another."""
    codes = [128 + signum for signum in SIGNALS]
    return isinstance(error, (UserError, Interrupted)) and error.exit_code in codes


def _raise_interrupted(signum: int, frame) -> None:
    """The failure of another rank, or the error of a collective, that is being handled is not
    replaced by torchrun's SIGTERM, which follows from the same death: nothing would be written of
    the run."""
    _received.append(signum)
    is_ending = isinstance(sys.exc_info()[1], (UserError, RuntimeError))
    if signum != signal.SIGTERM or not (is_ending and OF_TORCHRUN in os.environ):
        raise Interrupted(signum)


@contextlib.contextmanager
def _handled_by(handle: Callable[[int, object], None]) -> Iterator[None]:
    """Signals that arrive in the block are given to this function."""
    handlers = {signum: signal.signal(signum, handle) for signum in SIGNALS}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def signals_as_errors() -> Iterator[None]:
    """Signals that arrive in the block raise Interrupted."""
    try:
        with _handled_by(_raise_interrupted):
            yield
    finally:
        _received.clear()


def raise_if_signaled() -> None:
    """Raise Interrupted for a signal whose exception was swallowed."""
    if _received:
        raise Interrupted(_received[-1])


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Signals that arrive in the block count at its end, by the rule of the block around it: they
    are raised, or those of ending_despite_signals()."""
    arrived: list[int] = []
    with _handled_by(lambda signum, frame: arrived.append(signum)):
        yield
    for signum in arrived:
        rule = signal.getsignal(signum)
        if not callable(rule) or rule is signal.default_int_handler:
            raise Interrupted(signum)
        rule(signum, None)


@contextlib.contextmanager
def ending_despite_signals() -> Iterator[None]:
    """For what a failed run still writes: a signal in the block changes nothing, as torchrun sends
    SIGTERM to the ranks that are left as soon as one has died, and passes on the Ctrl-C that they
    have received themselves.  A second Ctrl-C raises Interrupted: what is left to do may take
    minutes."""
    interrupts: list[int] = []
    # What has ended the run is known: a prediction of its steps must not end with it again
    _received.clear()

    def heed(signum: int, frame: object) -> None:
        if signum != signal.SIGINT:
            return
        interrupts.append(signum)
        if len(interrupts) > 1:
            raise Interrupted(signum)
        if os.environ.get("RANK", "0") == "0":
            os.write(2, HOW_TO_END)  # print() may be at work already where the signal arrives

    with _handled_by(heed):
        yield


# ---- Errors as text ------------------------------------------------------------------------------


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def innermost_cause(error: BaseException) -> str:
    """The line of a compiler error that names the cause: the compiler wraps it in other errors, and
    adds advice."""
    inner = getattr(error, "inner_exception", None) or error.__cause__
    return innermost_cause(inner) if inner else f"{type(error).__name__}: {first_line(error)}"


def imported_torch():
    """PyTorch, if this process uses it; reading a trace does not, and its import takes seconds."""
    return sys.modules.get("torch")


def out_of_memory(error: BaseException) -> bool:
    """Whether a GPU or the host ran out of memory, also if a library or the compiler reports it in
    its own words."""
    cause = getattr(error, "inner_exception", None) or error.__cause__
    if cause is not None and out_of_memory(cause):
        return True
    if isinstance(error, UserError):
        return False
    signs = ("can't allocate memory", "out of memory", "STATUS_ALLOC_FAILED")
    torch = imported_torch()
    kinds = (torch.OutOfMemoryError, MemoryError) if torch else MemoryError
    return isinstance(error, kinds) or any(sign in first_line(error) for sign in signs)


def print_error(line: str) -> None:
    print(f"{Path(sys.argv[0]).name}: error: {' '.join(line.split())}", file=sys.stderr, flush=True)
