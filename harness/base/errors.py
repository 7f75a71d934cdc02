"""Errors for the user, signals as errors, and what an error says of itself."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path


class UserError(Exception):
    """Something that the user can fix, printed as one line.  Exit code 2 for arguments, 1 for everything else.

    shown: lines that are printed before it: the traceback of the user's own code, or an example of what to write."""

    def __init__(self, message: str, exit_code: int = 1, shown: str = ""):
        super().__init__(message)
        self.exit_code, self.shown = exit_code, shown


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM.  Not an Exception, so that no `except Exception` catches it."""

    def __init__(self, signum: int):
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum


# ---- Signals -------------------------------------------------------------------------------------------------------

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_received: list[int] = []  # signals; Python swallows exceptions raised in a finalizer, so they are recorded as well


def is_interruption(error: BaseException) -> bool:
    """Whether a signal ended the run, that of this rank or of another."""
    return isinstance(error, (UserError, Interrupted)) and error.exit_code in {128 + signum for signum in SIGNALS}


def _raise_interrupted(signum: int, frame) -> None:
    _received.append(signum)
    raise Interrupted(signum)


@contextlib.contextmanager
def signals_as_errors() -> Iterator[None]:
    """Signals that arrive in the block raise Interrupted."""
    handlers = {signum: signal.signal(signum, _raise_interrupted) for signum in SIGNALS}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        _received.clear()


def raise_if_signaled() -> None:
    """Raise Interrupted for a signal whose exception was swallowed."""
    if _received:
        raise Interrupted(_received[-1])


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Signals that arrive in the block are raised at its end."""
    before = len(_received)
    handlers = {s: signal.signal(s, lambda signum, frame: _received.append(signum)) for s in SIGNALS}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    if len(_received) > before:
        raise Interrupted(_received[-1])


@contextlib.contextmanager
def ending_despite_signals() -> Iterator[None]:
    """For what a failed run still writes: a signal in the block changes nothing.  torchrun sends SIGTERM to the ranks
    that are left as soon as one has died."""
    with contextlib.suppress(Interrupted), deferred_signals():
        yield


# ---- Errors as text ------------------------------------------------------------------------------------------------


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def innermost_cause(error: BaseException) -> str:
    """The line of a compiler error that names the cause: the compiler wraps it in other errors, and adds advice."""
    inner = getattr(error, "inner_exception", None) or error.__cause__
    return innermost_cause(inner) if inner else f"{type(error).__name__}: {first_line(error)}"


def imported_torch():
    """PyTorch, if this process uses it; reading a trace does not, and importing it takes seconds."""
    return sys.modules.get("torch")


def out_of_memory(error: BaseException) -> bool:
    """Whether a GPU or the host ran out of memory, also if a library or the compiler reports it in its own words."""
    cause = getattr(error, "inner_exception", None) or error.__cause__
    if cause is not None and out_of_memory(cause):
        return True
    if isinstance(error, UserError):
        return False
    signs = ("can't allocate memory", "out of memory", "STATUS_ALLOC_FAILED")
    kinds = (torch.OutOfMemoryError, MemoryError) if (torch := imported_torch()) else MemoryError
    return isinstance(error, kinds) or any(sign in first_line(error) for sign in signs)


def print_error(line: str) -> None:
    print(f"{Path(sys.argv[0]).name}: error: {' '.join(line.split())}", file=sys.stderr, flush=True)
