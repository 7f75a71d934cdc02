"""Errors for the user, signals, and the one place where both become a printed line and an exit code."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from harness.base.units import MB
from harness.machine.host_memory import host_memory_bytes
from harness.ranks.rendezvous import Failure, conclude, failure_elsewhere


class UserError(Exception):
    """Something that the user can fix, printed as one line.  Exit code 2 for arguments, 1 for everything else.

    shown: lines that are printed before it: the traceback of the user's own code, or an example of what to write."""

    def __init__(self, message: str, exit_code: int = 1, shown: str = ""):
        super().__init__(message)
        self.exit_code, self.shown = exit_code, shown


class RankFailure(UserError):
    """The failure of another rank, or of all of them together."""

    def __init__(self, failure: Failure):
        super().__init__(failure.text, failure.exit_code)
        self.failure = failure


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM.  Not an Exception, so that no `except Exception` catches it."""

    def __init__(self, signum: int):
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum


def is_interruption(error: BaseException) -> bool:
    """Whether a signal ended the run, that of this rank or of another."""
    signals = {128 + signal.SIGINT, 128 + signal.SIGTERM}
    return isinstance(error, Interrupted) or (isinstance(error, RankFailure) and error.exit_code in signals)


# ---- Signals -------------------------------------------------------------------------------------------------------

_received: list[int] = []  # signals; Python swallows exceptions raised in a finalizer, so they are recorded as well


def _raise_interrupted(signum: int, frame) -> None:
    _received.append(signum)
    raise Interrupted(signum)


def raise_if_interrupted() -> None:
    """Raise Interrupted for a signal whose exception was swallowed, or RankFailure if another rank has failed.  Called
    once a step."""
    if _received:
        raise Interrupted(_received[-1])
    if failure := failure_elsewhere():
        raise RankFailure(failure)


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Signals that arrive in the block are raised at its end."""
    before = len(_received)
    signums = (signal.SIGINT, signal.SIGTERM)
    handlers = {s: signal.signal(s, lambda signum, frame: _received.append(signum)) for s in signums}
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


OF_WORKLOAD = "(of --workload, in its file)"  # where it has what flags set for the model of this project


def explain_error(error: BaseException) -> tuple[str, int]:
    """The line and the exit code for any error."""
    text = first_line(error)
    if isinstance(error, (UserError, Interrupted)):
        return text, error.exit_code
    if isinstance(error, FloatingPointError):
        return f"{text}; lower --learning-rate {OF_WORKLOAD}, or use another --precision", 1
    if out_of_memory(error):
        asked = text.split("allocate memory: ")[-1]
        lower = f"lower --batch-size, --seq-len or --size {OF_WORKLOAD}"
        return f"out of memory: {asked}{memory_at_hand(error)}; {lower}", 1
    if isinstance(error, BrokenPipeError):
        return "standard output was closed before the run ended", 1
    if isinstance(error, OSError):
        return f"cannot use {error.filename or 'standard output'}: {error.strerror or text}", 1
    return f"{type(error).__name__}: {text} (TINY_LLAMA_DEBUG=1 shows the traceback)", 1


def memory_at_hand(error: BaseException) -> str:
    """What the device has that ran out of memory, unless its error says so: a GPU's libraries do not."""
    text = str(error)
    if "GPU" in text:
        return ""
    torch = imported_torch()
    if isinstance(error, MemoryError) or "can't allocate memory" in text or not (torch and torch.cuda.is_available()):
        return f"; the machine has {host_memory_bytes() / MB:,.0f} MB"
    free, total = torch.cuda.mem_get_info()
    return f"; the GPU has {total / MB:,.0f} MB, {free / MB:,.0f} MB of them free"


def exit_code_of(work: Callable[[], object]) -> int:
    """Call work() and return the exit code of the command; an error is printed as one line, by one of the ranks."""
    handlers = {signum: signal.signal(signum, _raise_interrupted) for signum in (signal.SIGINT, signal.SIGTERM)}
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # folder names may not be encodable
    failure, shown = None, ""
    try:
        work()
    except (Exception, Interrupted) as error:  # noqa: BLE001
        shown = getattr(error, "shown", "")
        failure = error.failure if isinstance(error, RankFailure) else Failure(*explain_error(error))
        if os.environ.get("TINY_LLAMA_DEBUG") == "1":
            traceback.print_exc()
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        _received.clear()
    line, exit_code = conclude(failure)
    if line is not None:
        if shown:
            print(shown, file=sys.stderr)
        print_error(line)
    return exit_code


def print_error(line: str) -> None:
    print(f"{Path(sys.argv[0]).name}: error: {' '.join(line.split())}", file=sys.stderr, flush=True)
