"""Numbers and names as learners write them on a worksheet, and how close is right."""

import re
from types import SimpleNamespace

import pytest

from workshop.exercise.values import choice, number_in, plain
from workshop.worksheets.worksheet import judge


def test_a_verdict_may_be_written_as_it_is_printed():
    assert choice("compute-bound") == choice("Compute bound") == choice("compute")
    assert choice("memory bound") != choice("compute bound")


@pytest.mark.parametrize(
    ("text", "unit", "number"),
    [
        ("24.1", "ms", 24.1),
        ("2,873,600", "parameters", 2873600),
        ("1.2e3", "ms", 1200),
        ("45%", "%", 45),
        ("~3 MB", "MB", 3),
        ("1 call", "calls", 1),
        ("1.7x", "x", 1.7),
        ("1,234.5", "MB", 1234.5),
        ("-4.69e-01 %", "%", -0.469),
        (".5", "MB", 0.5),
    ],
)
def test_numbers_as_people_write_them(text, unit, number):
    assert number_in(text, unit).value == pytest.approx(number, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "unit", "problem"),
    [
        ("32,35", "MB", "the field is in MB, and not in ',35'"),
        ("-", "MB", "is no number: '-'"),
        ("about 3", "MB", "is no number: 'about 3'"),
        ("", "MB", "is no number: ''"),
        ("12 MB", "ms", "the field is in ms, and not in 'MB'"),
        ("3 m", "ms", "the field is in ms, and not in 'm'"),
        ("3 GB", "MB", "the field is in MB, and not in 'GB'"),
        ("17 FLOPS", "FLOPs", "the field is in FLOPs, and not in 'FLOPS'"),
        ("12 ms", "calls", "the field is in calls, and not in 'ms'"),
    ],
)
def test_numbers_that_cannot_be_read_say_why(text, unit, problem):
    with pytest.raises(ValueError, match=re.escape(problem)):
        number_in(text, unit)


@pytest.mark.parametrize(
    ("written", "right", "agrees"),
    [
        ("24", 24.4, True),
        ("24.4", 24.44, True),
        ("0.23", 0.234, True),
        ("0.2", 0.23, False),
        ("25", 24.0, False),
        ("1.52", 1.6, False),
        ("24.4", 29.0, False),
        ("0", 1.0, False),
        ("0", 0.01438, False),
        ("0.0", 0.01438, False),
        ("1", 1.387, False),
        ("3", 2.76, False),
        ("5", 5, True),
        ("2,873,600", 2873600, True),
        ("1.2e3", 1210.0, True),
    ],
)
def test_how_close_is_right(written, right, agrees):
    assert number_in(written, "").agrees_with(right) == agrees


def test_names_are_compared_without_their_dress():
    assert plain("`aten::MM`") == plain("mm")
    assert plain("compute-bound") == plain("Compute bound")


def test_the_beginning_of_a_name_is_not_the_name():
    known = SimpleNamespace(unit="", is_number=False, choices=(), expected="a name")
    answer = SimpleNamespace(value="aten::addmm", shown="aten::addmm")
    verdicts = []
    for written in ("aten::addmm", "`aten::addmm`", "aten::add"):
        field = SimpleNamespace(value=written, shown=written, is_blank=False, is_checked=None)
        verdicts.append(judge(field, known, answer)[0])
    assert verdicts == ["right", "right", "wrong"]
