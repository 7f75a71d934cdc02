"""What ends a command or a run: every error becomes one line and an exit code, printed by one of
the ranks."""

import io
import os
import sys
import traceback
from collections.abc import Callable

from harness.base import errors
from harness.base.errors import Interrupted, UserError, first_line, out_of_memory
from harness.base.units import MB
from harness.machine.host_limits import host_memory_bytes
from harness.ranks.failure_watch import Failure
from harness.ranks.rendezvous import conclude, failure_elsewhere


class RankFailure(UserError):
    """The failure of another rank, or of all of them together."""

    def __init__(self, failure: Failure):
        super().__init__(failure.text, failure.exit_code)
        self.failure = failure


def raise_if_interrupted() -> None:
    """Raise Interrupted for a signal whose exception was swallowed, or RankFailure if another rank
    has failed.  Called once a step."""
    errors.raise_if_signaled()
    failure = failure_elsewhere()
    if failure:
        raise RankFailure(failure)


# Where --workload has what flags set for the model of this project.
OF_WORKLOAD = "(of --workload, in its file)"


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
    if "busy or unavailable" in text:
        line = (
            f"the GPU is in exclusive mode and in use ({text}); wait for the process that uses it,"
            " or choose another GPU with CUDA_VISIBLE_DEVICES"
        )
        return line, 1
    if isinstance(error, BrokenPipeError):
        return "standard output was closed before the run ended", 1
    if isinstance(error, OSError):
        return f"cannot use {error.filename or 'standard output'}: {error.strerror or text}", 1
    return f"{type(error).__name__}: {text} (TINY_LLAMA_DEBUG=1 shows the traceback)", 1


def memory_at_hand(error: BaseException) -> str:
    """What the device has that ran out of memory, unless its error says so: a GPU's libraries do
    not."""
    text = str(error)
    if "GPU" in text:
        return ""
    torch = errors.imported_torch()
    of_host = isinstance(error, MemoryError) or "can't allocate memory" in text
    if of_host or torch is None or not torch.cuda.is_available():
        return f"; the machine has {host_memory_bytes() / MB:,.0f} MB"
    free, total = torch.cuda.mem_get_info()
    return f"; the GPU has {total / MB:,.0f} MB, {free / MB:,.0f} MB of them free"


def exit_code_of(work: Callable[[], object]) -> int:
    """Call work() and return the exit code of the command; an error is printed as one line, by one
    of the ranks."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # folder names may not be encodable
    failure, shown = None, ""
    with errors.signals_as_errors():
        try:
            work()
        except (Exception, Interrupted) as error:  # noqa: BLE001
            shown = getattr(error, "shown", "")
            if isinstance(error, RankFailure):
                failure = error.failure
            else:
                failure = Failure(*explain_error(error))
            if os.environ.get("TINY_LLAMA_DEBUG") == "1":
                traceback.print_exc()
    line, exit_code = conclude(failure)
    if line is not None:
        if shown:
            print(shown, file=sys.stderr)
        errors.print_error(line)
    return exit_code
