import builtins
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tiny_llama_v1 as tiny_llama

PROJECT = Path(__file__).resolve().parent.parent
SMALL_MODEL = "--vocab-size 64 --hidden-dim 32 --n-layers 2 --n-heads 4 --seq-len 16 --batch-size 4".split()


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """What tests measure of this machine is not kept for its user."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA or ROCm GPU"))


@pytest.fixture
def train(tmp_path, monkeypatch, capfd):
    """Run the script in this process, in a scratch folder: train(flags) -> (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*flags: str, small: bool = True):
        capfd.readouterr()
        command = [*(SMALL_MODEL if small else []), "--num-steps", "3", *flags]
        return exit_code(lambda: tiny_llama.main(command)), *capfd.readouterr()

    return run


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """The working directory of commands that run in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    return tmp_path


def run_command(module, *flags: str) -> int:
    """Its exit code, in this process; for tests that use `scratch`."""
    sys.argv = [f"{module.__name__}.py", *flags]
    return exit_code(lambda: tiny_llama.exit_code_of(module.main))


@pytest.fixture
def command(scratch, capfd):
    """Run a command in this process, in a scratch folder: command(module, flags) -> (exit code, stdout, stderr)."""

    def run(module, *flags: str):
        capfd.readouterr()
        return run_command(module, *flags), *capfd.readouterr()

    return run


@pytest.fixture
def profiler(command):
    """run_pytorch_profiler.py in this process: profiler(flags) -> (exit code, output and errors)."""
    import run_pytorch_profiler

    def run(*flags: str):
        code, out, err = command(run_pytorch_profiler, *flags)
        return code, out + err

    return run


@pytest.fixture
def without_compiler():
    """No C++ compiler to be found, and nothing compiled before."""
    from torch._inductor import config

    torch.compiler.reset()
    with config.patch({"cpp.cxx": (None, "/nonexistent"), "fx_graph_cache": False}):
        yield


def exit_code(work) -> int:
    """Of a command in this process, whether it returns or exits."""
    try:
        return work()
    except SystemExit as stop:
        return stop.code


@pytest.fixture
def without(monkeypatch):
    """Make packages unimportable."""

    def hide(*names):
        find_spec, import_, import_module = importlib.util.find_spec, builtins.__import__, importlib.import_module

        def hidden(name, *rest):
            return name.split(".")[0] in names

        def guarded(original):
            def load(name, *rest, **options):
                if hidden(name):
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)
                return original(name, *rest, **options)

            return load

        monkeypatch.setattr(importlib.util, "find_spec", lambda n, *r: None if hidden(n) else find_spec(n, *r))
        monkeypatch.setattr(importlib, "import_module", guarded(import_module))
        monkeypatch.setattr(builtins, "__import__", guarded(import_))

    return hide


def start(*command: str, **options) -> subprocess.Popen:
    """A command of the project as a process of its own, output and errors together."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1"}
    environment |= options.pop("env", {})
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, **options
    )


def finish(process: subprocess.Popen, timeout: float = 120) -> tuple[int, str]:
    out, _ = process.communicate(timeout=timeout)
    return process.returncode, out
