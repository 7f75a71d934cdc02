"""The first command that somebody types, with an interpreter that lacks the packages."""

import os
import shutil

import pytest
from helpers import PROJECT, REAL_PYTHON, finish, start

from workshop.exercise.page import shell_blocks

COMMANDS = sorted(path.name for path in PROJECT.glob("*.py"))
LACKING = {name: "torch" for name in COMMANDS} | {
    "analyze_trace.py": "numpy"
}  # which reads traces without PyTorch
FIRST = {"run_study.py": ["memory"]}  # arguments without which it looks for no package
BARE = (REAL_PYTHON, "-S")  # without site-packages


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """A copy of the project, without .venv."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("harness", "kernels", "analysis", "studies", "workshop"):
        shutil.copytree(PROJECT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in COMMANDS:
        shutil.copy(PROJECT / name, folder)
    return folder


@pytest.fixture
def project(copied):
    """The copy, from which goes what a test has made in it."""
    before = {*copied.iterdir()}
    yield copied
    for folder in {*copied.iterdir()} - before:
        shutil.rmtree(folder)


def make_venv(project, script: str, name: str = ".venv"):
    python = project / name / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return python


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", COMMANDS)
def test_without_venv_one_line_says_what_to_do(project, name):
    typed = [*BARE, name, *FIRST.get(name, [])]
    code, out = finish(start(*typed, cwd=project))
    assert (code, out.count("\n")) == (1, 1), out
    advice = "run ./run_baseline.sh once, which installs it in ./.venv; then type this again"
    assert out == f"{name}: error: {REAL_PYTHON}: no {LACKING[name]}; {advice}\n"
    code, out = finish(start(*typed, "--help", cwd=project))
    assert code == 0 and name.removesuffix(".py") in out, out
    assert out.splitlines()[-1].startswith(
        f"no {LACKING[name]}: all flags are shown after set-up; run ./run_baseline.sh"
    )


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", COMMANDS)
def test_the_venv_beside_the_script_takes_over(project, name):
    """With the same arguments, from any folder; one line says so."""
    python = make_venv(project, 'echo "$@"; exit 3')
    (project / "elsewhere").mkdir()
    typed = [f"../{name}", *FIRST.get(name, []), "--seed", "a b"]
    code, out = finish(start(*BARE, *typed, cwd=project / "elsewhere"))
    said, given = out.splitlines()
    assert (code, given) == (3, " ".join(["-S", *typed]))
    assert said == f"{name}: {REAL_PYTHON}: no {LACKING[name]}; continuing with {python}"


def test_help_answers_from_the_venv(project):
    make_venv(project, f'shift; exec {REAL_PYTHON} "$@"')
    code, out = finish(start(*BARE, "run_exercise.py", "--help", cwd=project))
    assert code == 0, out
    assert "usage: run_exercise.py" in out


def test_a_venv_that_lacks_them_too_does_not_start_a_loop(project):
    make_venv(project, f'exec {REAL_PYTHON} "$@"')
    code, out = finish(start(*BARE, "compare_runs.py", cwd=project))
    assert (code, out.count("\n")) == (1, 2), out
    assert "error" in out.splitlines()[1]


def test_a_module_is_handed_over_as_a_module(project):
    make_venv(project, 'echo "$@"')
    code, out = finish(
        start(*BARE, "-m", "compare_runs", "a", cwd=project, env={"PYTHONPATH": os.fspath(project)})
    )
    assert (code, out.splitlines()[1]) == (0, "-S -m compare_runs a")


@pytest.mark.slow
def test_the_check_of_the_environment(project):
    """As typed, with an interpreter that has no PyTorch."""
    text = (PROJECT / "exercises" / "README.md").read_text()
    (block,) = (
        one.commands for one in shell_blocks(text) if "get_device_properties" in one.commands
    )
    typed = ("bash", "-c", block.replace("python3", " ".join(BARE)))
    code, out = finish(start(*typed, cwd=project))
    assert (code, out.count("\n")) == (1, 1), out
    make_venv(project, f'shift; exec {REAL_PYTHON} "$@"')
    code, out = finish(start(*typed, cwd=project))
    assert code == 0, out
    assert "continuing with" in out.splitlines()[0]
    assert out.splitlines()[1].startswith("PyTorch 2")


def test_the_venv_that_is_named_takes_over(project):
    """As the launchers take VENV: from the current folder."""
    python = make_venv(project, 'echo "$@"; exit 3', "of-this-node")
    for place in ("of-this-node", str(project / "of-this-node")):
        code, out = finish(start(*BARE, "compare_runs.py", "a", cwd=project, env={"VENV": place}))
        said, given = out.splitlines()
        assert (code, given) == (3, "-S compare_runs.py a")
        assert said.endswith(f"; continuing with {python}")
    code, out = finish(start(*BARE, "compare_runs.py", "a", cwd=project, env={"VENV": "elsewhere"}))
    assert code == 1 and "which installs it in elsewhere; then type this again" in out
