"""Numbers and names as learners write them on a worksheet, and how close is right."""

import re

import pytest

from workshop.exercise.values import choice, number_in, plain


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
        ("3 GB", "MB", 3072),
        ("0.76 s", "ms", 760),
        ("760 ms", "s", 0.76),
        ("310 us", "ms", 0.31),
        ("2,048 KiB", "MB", 2),
        ("0.05 TFLOPS", "TFLOP/s", 0.05),
        ("50 GFLOP/s", "TFLOP/s", 0.05),
        ("17.7 GFLOPs", "FLOPs", 17.7e9),
        ("900 MB/s", "GB/s", 0.9),
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
        ("32,35", "MB", "',35' is no unit of MB"),
        ("-", "MB", "is no number: '-'"),
        ("about 3", "MB", "is no number: 'about 3'"),
        ("", "MB", "is no number: ''"),
        ("12 MB", "ms", "MB is an amount of memory, and the field is in ms, a time"),
        ("3 m", "ms", "'m' is no unit of ms"),
        (
            "76 samples/s",
            "tokens/s",
            "samples/s is samples per second, and the field is in tokens/s, tokens per second",
        ),
        (
            "5 GFLOPs",
            "TFLOP/s",
            "GFLOPs is a number of operations, and the field is in TFLOP/s, a rate of computation",
        ),
        ("1.4 x", "%", "x is a ratio, and the field is in %, a percentage"),
        ("12 ms", "calls", "ms is a time, and the field is in calls"),
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


def test_rounding_is_converted_with_the_number():
    assert number_in("0.76 s", "ms").agrees_with(764.0, 0)
    assert not number_in("0.76 s", "ms").agrees_with(766.0, 0)


def test_names_are_compared_without_their_dress():
    assert plain("`aten::MM`") == plain("mm")
    assert plain("compute-bound") == plain("Compute bound")
