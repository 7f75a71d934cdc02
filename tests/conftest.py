"""Fixtures: scratch folders, commands run in this process, packages that are not there."""

import builtins
import contextlib
import functools
import importlib
import importlib.util
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from harness.run.startup import default_variables

os.environ |= default_variables()  # as every command does, before it imports torch

import pytest
import tabulate
import torch
from agreement import contradictions
from conforming import conforming
from helpers import SMALL_MODEL, exit_code, run_command
from hypothesis import HealthCheck, settings
from torch import nn
from warm_python import measure_briefly, start_server

import tiny_llama_v1 as tiny_llama
from analysis import answers
from harness.base import files

os.environ["TINY_LLAMA_STRICT"] = (
    "1"  # a null without a reason is an error, here and in processes that tests start
)

# Each process that compiles would try by compiling for them which vector instructions there are:
# a second of a core, and seven in an empty cache.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = (
        "1"  # kernels run on the CPU; Triton reads it when it is imported
    )
    os.environ["TORCH_WARM_POOL"] = (
        "0"  # where Triton is, Inductor starts processes to compile for GPUs
    )


def checked(analyze_all):
    """What a test's documents count twice, they count alike."""

    @functools.wraps(analyze_all)
    def analyze_and_check(*arguments, **options):
        analyses, refused = analyze_all(*arguments, **options)
        for path, own in analyses:
            assert contradictions(own.as_json()) == [], path
        return analyses, refused

    return analyze_and_check


answers.analyze_all = checked(answers.analyze_all)  # before others import it by its name
files.explained = conforming(files.explained)

# On a machine with much else to do any example may take long.  The examples are the same in each
# run: what others would find is not of the change that is tested (--hypothesis-profile explore).
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("tests", settings.get_profile("explore"), derandomize=True)
settings.load_profile("tests")


@pytest.fixture(scope="session", autouse=True)
def measured_peaks(tmp_path_factory):
    """What tests measure of this machine is measured briefly, once for all of them, and not kept
    for its user."""
    from analysis.hardware import measuring

    measure_briefly(measuring)
    folder = tmp_path_factory.getbasetemp()
    shared = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    os.environ["XDG_CACHE_HOME"] = str(shared / "cache")


@pytest.fixture(autouse=True)
def environment_is_left():
    """Libraries set environment variables as they are imported, such as DeepSpeed; what later tests
    start would then differ from the interpreter that starts warm, and each start be one from
    nothing."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="session")
def known_peaks(measured_peaks):
    """The rates of this machine, in the cache of all tests.  Commands that are processes of their
    own would measure them for seconds, and, disturbed by other tests, again in each command."""
    from analysis.hardware.ceilings import bandwidth_ceilings, compute_ceilings
    from harness.machine.environment import describe_device

    device = describe_device(torch.device("cpu")).as_json()
    compute_ceilings(device, "fp32")
    bandwidth_ceilings(device)


LONG_TESTS = (
    "test_an_exercise_runs_and_fills_its_worksheet",
    "test_blocks_of_the_other_texts_run",
    "test_numbers_are_those_of_the_code",
    "test_compiled_it_trains_alike",
    "test_a_fault_of_a_compiled_network_is_found",
    "test_compiling",
    "test_the_study_and_its_resumption",
    "test_a_rehearsal_on_a_pretended_card",
    "test_no_published_step_is_faster_than_its_bound",
    "test_a_file_of_ones_own_has_what_needs_no_change_of_its_code",
    "test_views_of_a_run",
)


WARM_PYTHON = pytest.StashKey[tuple[str, Callable[[], None]]]()


def pytest_addoption(parser):
    parser.addoption(
        "--alone",
        choices=("without", "only"),
        help="the tests that need the machine for themselves: all but these, or only these",
    )


def pytest_configure(config):
    """A runner in the background ignores SIGINT, and what it starts would inherit that.

    Python processes that tests start are forks of one that has imported PyTorch, the same for all
    workers.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if torch.cuda.is_available():
        # Whether imports leave CUDA alone, so that forks can use it, is not for tests to rely on
        return
    if hasattr(config, "workerinput"):
        warm = config.workerinput["warm_python"]
    else:
        folder = Path(tempfile.mkdtemp(prefix="warm"))  # the name of a socket has to be short
        warm, end = start_server(folder / "python", sys.executable)
        config.stash[WARM_PYTHON] = (warm, end)
        config.add_cleanup(lambda: shutil.rmtree(folder))
        config.add_cleanup(end)
        if config.getoption("numprocesses", None):
            return  # its workers are processes from nothing
    sys.executable = warm
    multiprocessing.set_executable(warm)
    os.environ["PATH"] = f"{Path(warm).parent}{os.pathsep}{os.environ['PATH']}"


def mark_slow_cases(items: list[pytest.Item]) -> None:
    """Of tests that are marked so, all cases but the first are slow."""
    begun = set()
    for item in items:
        if item.get_closest_marker("slow_cases"):
            function = item.nodeid.partition("[")[0]
            if function in begun:
                item.add_marker(pytest.mark.slow)
            begun.add(function)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Tells a worker of xdist where the warm interpreter is."""
    if WARM_PYTHON in node.config.stash:
        node.workerinput["warm_python"] = node.config.stash[WARM_PYTHON][0]


def pytest_ignore_collect(collection_path: Path, config) -> bool | None:
    """Of the tests that need the machine, only the files that have some are imported.  None: as
    pytest decides."""
    if config.getoption("alone") != "only" or collection_path.suffix != ".py":
        return None
    return None if "mark.alone" in collection_path.read_text() else True


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Half of collecting is to compile the files of tests and rewrite what they assert: it is kept
    even where PYTHONDONTWRITEBYTECODE is set, and of several workers each begins with other files.
    """
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    try:
        if hasattr(session.config, "workerinput") and not session.config.option.file_or_dir:
            import_share(**session.config.workerinput)
        return (yield)
    finally:
        sys.dont_write_bytecode = before


def import_share(workerid: str, workercount: int, **others: object) -> None:
    """The files of tests that this worker compiles for all.  workerid: as gw0."""
    files = sorted(Path(__file__).parent.glob("test_*.py"))
    for file in files[int(workerid.removeprefix("gw")) :: workercount]:
        # Why it cannot be imported, or is skipped, collecting tells.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(file.stem)


def choose_by_need_of_the_machine(config, items: list[pytest.Item]) -> None:
    """--alone: tests of times run after the others, which would take the cores from them."""
    chosen = config.getoption("alone")
    if chosen is None:
        return
    left_out = [item for item in items if ("alone" in item.keywords) != (chosen == "only")]
    items[:] = [item for item in items if ("alone" in item.keywords) == (chosen == "only")]
    config.hook.pytest_deselected(items=left_out)


def pytest_collection_modifyitems(config, items):
    mark_slow_cases(items)
    choose_by_need_of_the_machine(config, items)
    # What takes long begins first: else one worker would run the last of it while the others have
    # nothing left.
    items.sort(key=lambda item: item.name.split("[")[0] not in LONG_TESTS)
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA or ROCm GPU"))


def pytest_terminal_summary(terminalreporter):
    """The matrix of commands and pretended cards, where tests of it ran."""
    cells: dict[str, dict[str, list[str]]] = {}
    for outcome in ("passed", "failed", "xfailed", "xpassed"):
        for report in terminalreporter.stats.get(outcome, ()):
            if found := dict(report.user_properties).get("pretended"):
                command, card, precision = found
                mark = "" if outcome in ("passed", "xpassed") else f" {outcome.upper()}"
                cells.setdefault(command, {}).setdefault(card, []).append(precision + mark)
    if cells:
        names = list(dict.fromkeys(card for row in cells.values() for card in row))
        rows = [
            [command, *(" ".join(row.get(card, ["-"])) for card in names)]
            for command, row in cells.items()
        ]
        terminalreporter.section("commands on pretended cards")
        terminalreporter.write_line(tabulate.tabulate(rows, ["", *names]))


@pytest.fixture
def train(tmp_path, monkeypatch, capfd):
    """Run the script in this process, in a scratch folder: train(flags) -> (exit code, stdout,
    stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*flags: str, small: bool = True):
        capfd.readouterr()
        command = [*(SMALL_MODEL if small else []), "--num-steps", "3", *flags]
        monkeypatch.setattr(sys, "argv", ["tiny_llama_v1.py", *command])
        return exit_code(lambda: tiny_llama.main(command)), *capfd.readouterr()

    return run


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """The working directory of commands that run in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    return tmp_path


@pytest.fixture
def command(scratch, capfd):
    """Run a command in this process, in a scratch folder: command(module, flags) -> (exit code,
    stdout, stderr)."""

    def run(module, *flags: str):
        capfd.readouterr()
        return run_command(module, *flags), *capfd.readouterr()

    return run


@pytest.fixture
def profiler(command):
    """run_pytorch_profiler.py in this process: profiler(flags) -> (exit code, output and
    errors)."""
    import run_pytorch_profiler

    def run(*flags: str):
        code, out, err = command(run_pytorch_profiler, *flags)
        return code, out + err

    return run


@pytest.fixture(scope="session")
def warm_servers():
    """Those of the warm interpreter run before a program does.  Without workers of xdist they
    descend from this process: what ends a program with all that it started would end them, too."""
    start = [sys.executable, "-m", "torch.distributed.run", "--help"]
    subprocess.run(start, stdout=subprocess.DEVNULL, check=True)


@pytest.fixture
def warm_programs(warm_servers, monkeypatch):
    """Programs that profile_program.py runs start warm."""
    monkeypatch.setenv("WARM_PROGRAMS", "yes")


@pytest.fixture
def without_compiler():
    """No C++ compiler to be found, and nothing compiled before."""
    from torch._inductor import config

    torch.compiler.reset()
    nothing = {"cpp.cxx": (None, "/nonexistent"), "cpp.vec_isa_ok": None, "fx_graph_cache": False}
    with config.patch(nothing):
        yield


@pytest.fixture
def traced_graphs(monkeypatch):
    """Graphs are traced and run operator by operator, as generating code for them takes seconds:
    the list of them."""
    graphs, compile_module = [], nn.Module.compile

    def backend(graph: torch.fx.GraphModule, inputs: list):
        graphs.append(graph)
        return graph.forward

    def traced(module: nn.Module, *, options: object = None, **others) -> None:
        compile_module(module, backend=backend, **others)

    monkeypatch.setattr(nn.Module, "compile", traced)
    return graphs


@pytest.fixture
def without(monkeypatch):
    """Make packages unimportable."""

    def hide(*names):
        find_spec, import_, import_module = (
            importlib.util.find_spec,
            builtins.__import__,
            importlib.import_module,
        )

        def hidden(name, *rest):
            return name.split(".")[0] in names

        def guarded(original):
            def load(name, *rest, **options):
                if hidden(name):
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)
                return original(name, *rest, **options)

            return load

        monkeypatch.setattr(
            importlib.util, "find_spec", lambda n, *r: None if hidden(n) else find_spec(n, *r)
        )
        monkeypatch.setattr(importlib, "import_module", guarded(import_module))
        monkeypatch.setattr(builtins, "__import__", guarded(import_))

    return hide
