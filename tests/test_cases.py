"""docs/cases.md: its commands are those whose answers are stored, and a fault is answered."""

import shlex
import sys

import pytest
from helpers import PROJECT, finish, start

from tools.texts.cases import CASES, as_typed, log_name
from workshop.exercise.results import stored_file


@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_the_commands(name):
    case = CASES[name]
    lines = stored_file(log_name(name)).read_text().splitlines()
    typed = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    assert typed == [as_typed(command, case) for command in case.commands]
    assert len(lines) > len(typed) + 1  # what they printed, and where


@pytest.mark.slow
@pytest.mark.parametrize(("number", "answer"), enumerate(("FAILED: 24 of 26", "ok\n")))
def test_a_fault_is_answered_and_its_cure_too(tmp_path, number, answer):
    command = CASES["checkpoint_without_gradients"].commands[number]
    typed = command.format(python=sys.executable, out=tmp_path / "out")
    code, out = finish(start(*shlex.split(typed), cwd=PROJECT))
    assert code == 0
    assert f"Audit:       {answer}" in out
