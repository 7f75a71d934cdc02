"""How does a row leave the others alone?  It is measured in a process of its own, with an empty
compiler cache."""

import contextlib
import importlib
import io
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

import tiny_llama_v1
from harness.base.errors import UserError, innermost_cause, out_of_memory
from harness.instruments.schedule import ProfilerConfig
from harness.machine.disturbance import DisturbanceMeter
from harness.ranks.failures import exit_code_of, explain_error
from tiny_llama_v1 import TinyLlamaWorkload

# Slow to import.
PRELOADED = ("tiny_llama_v1", "torch._dynamo", "torch.utils.tensorboard", "matplotlib.figure")

Tell = Callable[[str], object]  # receives what a process tells while it works


class Outcome(NamedTuple):
    """How a process has ended."""

    status: str  # ok, oom or failed
    result: object  # or the reason
    disturbance: dict  # of DisturbanceMeter; {} without a device
    at_s: float  # wall clock; 0 where it died without a word, which others notice later


class Child:
    """A new process that calls work(*arguments), and answers once.

    It is forked from a server that has imported PyTorch but used no device, so that it starts fast
    and clean.
    """

    def __init__(self, work: Callable, *arguments, device: torch.device | None = None):
        """device: on which the disturbance is measured."""
        context = multiprocessing.get_context("forkserver")
        ours = [name for name in sys.modules if name.startswith("studies.")]
        context.set_forkserver_preload([*PRELOADED, *ours, work.__module__])
        self.receiver, sender = context.Pipe(duplex=False)
        self.process = context.Process(
            target=_answer, args=(sender, work, arguments, device), daemon=True
        )
        self.process.start()
        sender.close()

    def answer(self) -> Outcome | str:
        """Once the receiver is ready; a text is what its work has told meanwhile."""
        try:
            return self.receiver.recv()
        except EOFError:
            self.process.join()
            return Outcome(*cause_of_death(self.process.exitcode), {}, 0.0)

    def end(self) -> None:
        if self.process.is_alive():
            self.process.join(0.5)
        self.process.terminate()
        self.process.join()
        self.receiver.close()


def in_fresh_process(
    work: Callable, *arguments, while_waiting: Tell = str, device=None, disturbance=None
) -> tuple:
    """Call work(*arguments) in a new process.  Returns ("ok", result), or ("oom" or "failed",
    reason).

    while_waiting: called every second with '', and with what the work tells.
    disturbance: receives the document of DisturbanceMeter, how disturbed work on the device was.
    """
    child, answer = Child(work, *arguments, device=device), ""
    try:
        while isinstance(answer, str):
            answer = child.answer() if child.receiver.poll(1.0) else ""
            if isinstance(answer, str):
                while_waiting(answer)
    finally:
        child.end()
    if disturbance is not None:
        disturbance.update(answer.disturbance)
    return answer.status, answer.result


def run_in_subprocess_if_gpu(on_gpu: bool, work: Callable, *arguments):
    """Return work(*arguments), called in a process of its own if it may use a GPU.  Raises
    UserError if it fails there.

    A context in the sweep's own process would take memory from every row, and a GPU in exclusive
    mode allows only one.
    """
    if not on_gpu:
        return work(*arguments)
    status, answer = in_fresh_process(work, *arguments)
    if status != "ok":
        raise UserError(str(answer))
    return answer


def cause_of_death(code: int) -> tuple[str, str]:
    """Status and reason for a process that ended without a result."""
    if code == -signal.SIGKILL:
        return "oom", "killed by SIGKILL, as the operating system does when memory runs out"
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return "failed", f"the process ended with {how}"


def status_of(error: Exception) -> tuple[str, str]:
    """Status and reason for a row that an error ended."""
    if os.environ.get("TINY_LLAMA_DEBUG") == "1":
        traceback.print_exception(error)
    return "oom" if out_of_memory(error) else "failed", explain_error(error)[0]


# ---- In the new process --------------------------------------------------------------------------

_tell: Tell = str


def tell(text: str) -> None:
    """Let whoever waits for this process know what it is at; in a process of its own, nobody."""
    _tell(text)


def _answer(connection, work: Callable, arguments: tuple, device: torch.device | None) -> None:
    """Send the result, or the error as one line, the reason of the row."""
    global _tell
    _tell = connection.send
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the sweep terminates it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    warnings.simplefilter("ignore")
    meter = DisturbanceMeter(device) if device else None
    try:
        with meter.long_interval() if meter else contextlib.nullcontext():
            result = work(*arguments)
        answer = Outcome("ok", result, meter.document() if meter else {}, time.time())
    except Exception as error:  # noqa: BLE001 a row may fail in any way, and the others go on
        answer = Outcome(*status_of(error), {}, time.time())
    connection.send(answer)
    connection.close()


def run_script(workload: TinyLlamaWorkload, profiling: ProfilerConfig, folder: Path) -> None:
    """A run of the script into the folder, without its output.  Raises what ended it."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            tiny_llama_v1.run(workload.with_settings(output_dir=str(folder)), profiling)
        except Exception as error:
            errors.append(error)
            raise

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        exit_code_of(run)  # so that an interrupted run writes its summary
    if errors:
        raise errors[0]


@contextlib.contextmanager
def cold_compiler() -> Iterator[None]:
    """An empty compiler cache, so that each row times a first compilation.  Raises UserError
    without a compiler."""
    if not torch.cuda.is_available():
        # Which vector instructions the processor has is tried once, by compiling for them: seconds,
        # and only in the first row that compiles in a process.
        probe = importlib.import_module("torch._inductor.cpu_vec_isa").pick_vec_isa
        try:
            probe()
        except RuntimeError as error:  # no compiler, or none that works
            raise UserError(f"cannot be compiled here: {innermost_cause(error)}") from error
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        compiler_cache_in(folder),
    ):
        yield


@contextlib.contextmanager
def compiler_cache_in(folder: str) -> Iterator[None]:
    """The compiler keeps what it compiles there: it reads the variable whenever it compiles."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    os.environ[name] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
