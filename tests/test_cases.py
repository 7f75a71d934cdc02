"""docs/cases.md: its commands are those whose answers are stored, and a fault is answered."""

import shlex
import sys

import pytest
from helpers import PROJECT, finish, start

from tools.texts.cases import CASES, as_typed, log_name
from workshop.exercise.page import exercises
from workshop.exercise.results import stored_file


@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_the_commands(name):
    case = CASES[name]
    lines = stored_file(log_name(name)).read_text().splitlines()
    typed = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    assert typed == [as_typed(command, case) for command in case.commands]
    assert len(lines) > len(typed) + 1  # what they printed, and where


@pytest.mark.usefixtures("warm_programs")
@pytest.mark.slow
@pytest.mark.parametrize(("number", "answer"), enumerate(("FAILED: 24 of 26", "ok\n")))
def test_a_fault_is_answered_and_its_cure_too(tmp_path, number, answer):
    command = CASES["checkpoint_without_gradients"].commands[number]
    typed = command.format(python=sys.executable, out=tmp_path / "out")
    code, out = finish(start(*shlex.split(typed), cwd=PROJECT))
    assert code == 0
    assert f"Audit:       {answer}" in out


@pytest.mark.usefixtures("warm_programs")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "answer"), [(1, "FAILED: ranks train different models: "), (3, "ok\n")]
)
def test_ranks_that_train_different_models_are_told(tmp_path, number, answer):
    command = CASES["two_ranks"].commands[number]
    code, out = finish(
        start(*shlex.split(command.format(python=sys.executable, out=tmp_path)), cwd=PROJECT)
    )
    assert code == 0
    assert f"Audit:       {answer}" in out


def test_the_case_of_two_ranks_has_the_commands_of_exercise_12():
    joined = exercises()[12].extra.text.replace("\\\n   ", "")
    for command in CASES["two_ranks"].commands:
        program = command.rpartition(" -- ")[2].removeprefix("{python} ")
        assert f"{program}\n" in joined
