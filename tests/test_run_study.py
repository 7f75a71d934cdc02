"""run_study.py and its launcher: the study that the first argument names, and what else is told."""

import importlib
import sys

import pytest
from helpers import PROJECT, REAL_PYTHON, finish, start

import run_study
from harness.base.files import kind_of
from harness.study_files import description_of_study, document_of_study, study_names

FIRST = "the first argument is the name of a study"
PROBLEMS = {
    "": FIRST,
    "--batch-sizes 4 memory": f"--batch-sizes: {FIRST}",
    "memroy": "memroy: is no study; did you mean memory?",
    "memory_study --dry-run": "memory_study: is no study; did you mean memory?",
    "collective_benchmark": "collective_benchmark: is no study; did you mean collectives?",
    "all": "all: is no study; give one of these names",
}
LISTED = [f"  {name:14}{description_of_study(name)}" for name in study_names()]


@pytest.mark.parametrize("typed", PROBLEMS)
def test_what_is_no_study_is_answered_with_the_studies(monkeypatch, capsys, typed):
    monkeypatch.setattr(sys, "argv", ["run_study.py", *typed.split()])
    with pytest.raises(SystemExit) as stop:
        run_study.main()
    told = capsys.readouterr()
    assert (stop.value.code, told.out) == (2, "")
    error = f"run_study.py: error: {PROBLEMS[typed]}"
    assert told.err.splitlines() == ["studies:", *LISTED, error]


@pytest.mark.parametrize("command", [(REAL_PYTHON, "-S", "run_study.py"), ("./run_study.sh",)])
def test_the_studies_are_told_without_packages(tmp_path, command):
    *python, script = command
    for typed, expected, last in (
        ("--help", 0, LISTED[-1]),
        ("memroy", 2, f"run_study.py: error: {PROBLEMS['memroy']}"),
        ("", 2, f"run_study.py: error: {FIRST}"),
    ):
        words = [*python, str(PROJECT / script), *typed.split()]
        code, out = finish(start(*words, cwd=tmp_path, env={"VENV": str(tmp_path / "none")}))
        assert (code, out.splitlines()[-1]) == (expected, last)
        assert set(LISTED) <= set(out.splitlines())
        assert not list(tmp_path.iterdir())


def test_a_line_of_the_list_fits_a_terminal():
    assert max(len(line) for line in LISTED) <= 100


@pytest.mark.parametrize("name", study_names())
def test_the_documents_of_a_study_are_those_of_its_name(name):
    study = importlib.import_module(f"studies.{name}").Study
    assert study.name == document_of_study(name)
    assert kind_of(f"{study.name}.json").document is study.document_type
    assert kind_of(f"{study.name}.md").writer == f"run_study.py {name}"


def test_a_flag_of_another_study_leaves_nothing(tmp_path):
    words = [str(PROJECT / "run_study.sh"), "timing", "--d-heads", "8"]
    code, out = finish(start(*words, cwd=tmp_path))
    assert (code, "unknown argument --d-heads" in out) == (2, True), out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", study_names())
def test_the_flags_of_a_study_are_shown_as_its_own(command, name):
    code, out, err = command(run_study, name, "--help")
    assert code == 0, err
    assert out.startswith(f"usage: run_study.py {name} [-h] ")
    assert description_of_study(name).split(",")[0] in " ".join(out.split())
