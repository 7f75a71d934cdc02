"""The process that has imported PyTorch, and of which warm processes are forks; see __init__.py."""

import array
import atexit
import compileall
import contextlib
import ctypes
import gc
import importlib.util
import io
import json
import multiprocessing.process
import multiprocessing.spawn
import multiprocessing.util
import os
import resource
import runpy
import select
import signal
import socket
import sys
import threading
import types
import warnings
from typing import NoReturn

from tests.warm_python import PIXEL, measure_briefly
from tests.warm_python.client import is_watched, read_at_import

# What commands and the programs of others import, some of it late.  Not DeepSpeed: it looks for a
# GPU at once.
LIBRARIES = (
    "torch torch._dynamo torch.distributed torch.utils.tensorboard torch.profiler pandas tabulate"
    " msgspec matplotlib.pyplot matplotlib.backends.backend_agg torch.distributed.launcher.api"
    " torch.distributed.elastic.multiprocessing multiprocessing.forkserver"
).split()
# Of the project, which its commands import.
MODULES = (
    "tiny_llama_v1 run_pytorch_profiler run_deepspeed_flops run_study launch_performance_study"
    " compare_runs studies.memory studies.timing"
    " studies.precision studies.attention studies.training"
    " studies.optimization analysis.diagnosis.document"
    " analysis.report.html analysis.prediction.document analysis.commands.run_explanations"
    " analysis.commands.analyze_traces analysis.commands.flops_command"
    " analysis.report.figures.comparison harness.model.decoder.memory analysis.hardware.rate_limits"
    " analysis.hardware.measuring"
).split()
FOLDERS = "analysis benchmarks harness kernels studies tools workshop".split()  # with its modules
MOST_FILES = 250  # that one message may carry
PROJECT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
HIDDEN = (__file__, "<string>")  # from tracebacks


def receive(connection: socket.socket) -> tuple[dict, list[int]]:
    """The request and the open files of a client."""
    size = array.array("i").itemsize
    header, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(MOST_FILES * size))
    files = array.array("i")
    for _, _, data in ancillary:
        files.frombytes(data)
    text, length = b"", int.from_bytes(header, "little")
    while len(text) < length:
        text += connection.recv(length - len(text))
    return json.loads(text), list(files)


class Server:
    """Answers clients: forks, and tells the exit codes."""

    def __init__(self, listener: socket.socket, session: int):
        """session: a file at whose end the tests have ended."""
        self.listener, self.session = listener, session
        self.started: dict[socket.socket, int] = {}  # connection to a client: its fork
        self.environment = read_at_import(os.environ)
        self.woken, wakes = os.pipe()
        for fd in (self.woken, wakes):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wakes)

    def next_request(self) -> dict:
        """Serves until it is in a fork; returns what that is to run."""
        while True:
            waited = [self.listener, self.session, self.woken, *self.started]
            ready, _, _ = select.select(waited, [], [])
            if self.session in ready:
                os._exit(0)
            for one in ready:
                if one is self.listener:
                    asked = self.accept()
                    if asked is not None:
                        return asked
                elif one == self.woken:
                    os.read(self.woken, 4096)
                    self.reap()
                else:
                    self.client_is_gone(one)

    def accept(self) -> dict | None:
        """The request, in the fork."""
        connection, _ = self.listener.accept()
        asked, files = receive(connection)
        if asked["read_at_import"] != self.environment:
            connection.sendall(b"refused\n")
            connection.close()
            for fd in files:
                os.close(fd)
            return None
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            # Its number may become that of a file of the client, which it would close in the end.
            connection.detach()
            *files, users, mounts = files
            if asked["mounts"] != os.readlink("/proc/self/ns/mnt"):
                join(users, mounts)
            take_over_files(asked["files"], files)
            return asked
        for fd in files:
            os.close(fd)
        self.started[connection] = pid
        connection.sendall(f"{pid}\n".encode())
        return None

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for connection, other in list(self.started.items()):
                if other == pid:
                    del self.started[connection]
                    with contextlib.suppress(OSError):
                        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
                    connection.close()

    def client_is_gone(self, connection: socket.socket) -> None:
        """Killed: so is what it stood for."""
        pid = self.started.get(connection)
        if pid is None:  # reaped meanwhile
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        del self.started[connection]  # nobody asks for the exit code
        connection.close()


def join(*namespaces: int) -> None:
    """Takes this process, which has one thread, into the namespaces of the client: an overlay that
    was mounted there.  Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    for namespace in namespaces:
        if libc.setns(namespace, 0):
            raise OSError(ctypes.get_errno(), "setns")


def take_over_files(numbers: list[int], files: list[int]) -> None:
    """The files of the client, under the numbers that they have there; nothing else stays open."""
    above = max(*numbers, *files, 2) + 1
    moved = [os.dup2(fd, above + i) for i, fd in enumerate(files)]
    os.closerange(0, above)
    for number, fd in zip(numbers, moved, strict=True):
        os.dup2(fd, number, inheritable=True)
    os.closerange(above, 2**16)


def become(asked: dict) -> None:
    """Makes this fork what the client was: folder, environment, limits, signals, output."""
    os.setsid()
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.environ["WARM_PYTHON"] = "project" if asked["of_project"] else "program"
    os.umask(asked["umask"])
    os.sched_setaffinity(0, asked["cores"])
    if asked["nice"] > os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, asked["nice"])
    for name, limit in asked["limits"].items():
        resource.setrlimit(getattr(resource, name), limit)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if int(number) in asked["ignored"]:
            signal.signal(number, signal.SIG_IGN)
        elif number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        else:
            signal.signal(number, signal.SIG_DFL)
    unbuffered = asked["unbuffered"]
    for fd, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        binary = open(fd, "wb", buffering=0 if unbuffered else -1, closefd=False)  # noqa: SIM115 open to the end
        text = io.TextIOWrapper(
            binary,
            encoding="utf-8",
            errors=errors,
            write_through=unbuffered,
            line_buffering=name == "stderr" or os.isatty(fd),
        )
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115


def prepare_pages() -> None:
    """What takes a second of the first page of a process, once for all: plotly's script is packed,
    and matplotlib looks for fonts."""
    from matplotlib.figure import Figure

    from analysis.report.html import packed_plotly
    from harness.base.files import png

    packed_plotly()
    figure = Figure(layout="constrained")
    figure.subplots().set_title("0.5")
    png(figure)


def prepare_predictions() -> None:
    """What takes most of a second of the first step on fake tensors in a process: PyTorch finds out
    how its operators treat them.  Of a model that no test has."""
    import torch

    import tiny_llama_v1
    from analysis.prediction.operators import watch_step

    sizes = "--vocab-size 41 --hidden-dim 24 --n-layers 1 --n-heads 3 --seq-len 13 --batch-size 2"
    parsed = tiny_llama_v1.build_parser().parse_args([*sizes.split(), "--dry-run"])
    workload = tiny_llama_v1.resolve(parsed)[0]
    random_state = torch.random.get_rng_state()
    watch_step(workload, on_gpu=False)
    torch.random.set_rng_state(random_state)


def leave_figures_unpainted() -> None:
    """They are made, from whatever the command has found, but to turn each into pixels would take
    most of a second; tests of figures do that, and those that set PAINT_FIGURES."""
    from analysis.report.figures import pictures

    pictures.png = lambda figure: PIXEL


def pretend_a_card() -> None:
    """What tests/pretend_gpu/sitecustomize.py does once torch is imported.  By its path: that of a
    watched program may come first."""
    file = os.path.join(PROJECT, "tests", "pretend_gpu", "sitecustomize.py")
    spec = importlib.util.spec_from_file_location("pretended_sitecustomize", file)
    sitecustomize = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sitecustomize)
    sitecustomize._install(None)
    if "analysis.hardware.measuring" in sys.modules:
        sitecustomize._measure_briefly(sys.modules["analysis.hardware.measuring"])


def compile_modules() -> None:
    """Else each process would compile for itself, for half a second, what it imports of the
    project, where PYTHONDONTWRITEBYTECODE is set."""
    compileall.compile_dir(PROJECT, maxlevels=0, quiet=2)
    for folder in FOLDERS:
        compileall.compile_dir(os.path.join(PROJECT, folder), quiet=2)


def start_workers_without_b() -> None:
    """Where PYTHONDONTWRITEBYTECODE is set, multiprocessing gives -B to the processes that it
    starts, and a start with such a flag is one from nothing.  The variable tells them the same."""
    flags = multiprocessing.util._args_from_interpreter_flags
    multiprocessing.util._args_from_interpreter_flags = lambda: [f for f in flags() if f != "-B"]


def hide_what_is_frozen() -> None:
    """The collector knows all that a program from nothing has.  To hooks that look at all of it,
    also at what the program has frozen, what the server had frozen would be the same: a few hundred
    thousand objects that each fork would copy, three times a run, and that no program has made."""
    freeze, count = gc.freeze, gc.get_freeze_count

    def freeze_and_tell() -> None:
        gc.get_freeze_count = count
        freeze()

    gc.get_freeze_count = lambda: 0
    gc.freeze = freeze_and_tell


def load_hooks(folder: str) -> None:
    """What the sitecustomize.py of profile_program.py does as a process starts, and once that has
    imported torch."""
    file = os.path.join(folder, "sitecustomize.py")
    with open(file) as source:
        code = compile(source.read(), file, "exec")
    before = list(sys.meta_path)
    exec(code, {"__file__": file, "__name__": "sitecustomize"})
    loaded = types.SimpleNamespace(exec_module=lambda module: None)
    of_torch = types.SimpleNamespace(loader=loaded)
    torch_is_here = types.SimpleNamespace(find_spec=lambda *_: of_torch)
    # For torch to be imported.  A further sitecustomize.py may have put its own before it.
    waiting = [finder for finder in sys.meta_path if finder not in before][-1]
    sys.meta_path.insert(sys.meta_path.index(waiting) + 1, torch_is_here)
    spec = waiting.find_spec("torch")
    sys.meta_path.remove(torch_is_here)
    spec.loader.exec_module(sys.modules["torch"])


def show_traceback(kind, error, frames) -> None:
    """Of an error that ends the program, without the frames of this module."""
    while (
        frames is not None
        and frames.tb_next is not None
        and frames.tb_frame.f_code.co_filename in HIDDEN
    ):
        frames = frames.tb_next
    sys.__excepthook__(kind, error.with_traceback(frames), frames)


def run(asked: dict) -> None:
    """Runs what the client was to run, in the module __main__, and returns or raises as it does."""
    kind, what = asked["kind"], asked["what"]
    sys.argv = ["-c" if kind == "code" else what, *asked["arguments"]]
    sys.orig_argv = [sys.executable, *asked["original"]]
    sys.excepthook = show_traceback
    multiprocessing.process.ORIGINAL_DIR = asked["folder"]
    first = os.path.dirname(os.path.realpath(what)) if kind == "script" else asked["folder"]
    sys.path[:] = [first, *asked["folders"], *sys.path[1:]]
    importlib.invalidate_caches()
    if asked["environment"].get("PRETEND_GPU"):
        pretend_a_card()
    if asked["of_project"] and not asked["environment"].get("PAINT_FIGURES"):
        leave_figures_unpainted()
    hide_what_is_frozen()
    if is_watched(asked["environment"]):
        load_hooks(asked["folders"][0])
    if kind == "module":
        runpy._run_module_as_main(what)
        return
    main_module = sys.modules["__main__"]
    main_module.__dict__.pop("server", None)
    if kind == "script":
        with open(what, "rb") as file:
            code = compile(file.read(), what, "exec")
        main_module.__dict__.update({"__file__": what, "__cached__": None})
    else:
        code = compile(what, "<string>", "exec")
    exec(code, main_module.__dict__)


def end(asked: dict) -> NoReturn:
    """Runs it and ends as an interpreter does, but for taking apart all that is imported, which
    takes a second."""
    code, interrupted = 0, False
    try:
        run(asked)
    except SystemExit as stop:
        code = exit_code(stop.code)
    except KeyboardInterrupt as error:
        interrupted = True
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException as error:  # noqa: BLE001 of whatever kind the program has
        code = 1
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.modules["__main__"].__dict__.clear()  # closes files that the program left open
    try:
        sys.stdout.flush()
    except OSError as error:
        print(
            f"Exception ignored in: {sys.stdout!r}\n{type(error).__name__}: {error}",
            file=sys.stderr,
        )
        code = 120
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def exit_code(told: object) -> int:
    """Of sys.exit(told)."""
    if told is None:
        return 0
    if isinstance(told, int):
        return told & 0xFF
    print(told, file=sys.stderr)
    return 1


def main() -> None:
    """Returns once the tests have ended; forks end as their programs do."""
    sys.executable, *numbers = sys.argv[1:]
    multiprocessing.set_executable(sys.executable)
    start_workers_without_b()
    of_project, of_programs = (socket.socket(fileno=int(number)) for number in numbers[:2])
    session = int(numbers[2])
    compile_modules()
    ready, _, _ = select.select(
        [of_project, of_programs, session], [], []
    )  # for a start, which may not come
    if session in ready:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in LIBRARIES:
            importlib.import_module(name)
        project = (
            os.fork() == 0
        )  # in a server of its own: the programs of others know no module of the project
        # Where one of the two ends, who asks it for a process is refused instead of left waiting.
        (of_programs if project else of_project).close()
        if project:
            for name in MODULES:
                importlib.import_module(name)
            measure_briefly(sys.modules["analysis.hardware.measuring"])
            prepare_pages()
            prepare_predictions()
    server = Server(of_project if project else of_programs, session)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy all that it looks at
    asked = server.next_request()
    become(asked)
    end(asked)
