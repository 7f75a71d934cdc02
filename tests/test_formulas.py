"""Formulas of a page's fields: the paths and arithmetic that fill in what is measured."""

import re

import pytest
from helpers import write_results

from harness.base.errors import UserError
from workshop.exercise.page import Exercise, fields
from workshop.exercise.results import Answer, Results

DOCUMENT = {
    "steps": {"count": 4, "nothing": None, "nothing_reason": "no clock"},
    "rows": [
        {"name": "eager", "seq_len": 128, "ms": 4.0, "inner": {"batch": 2}},
        {"name": "eager", "seq_len": 256, "ms": 12.0, "inner": {"batch": 4}},
        {
            "name": "flash",
            "seq_len": 256,
            "ms": None,
            "ms_reason": "not built",
            "inner": {"batch": 4},
        },
    ],
    "empty": [],
}


def answer_to(tmp_path, formula: str) -> Answer:
    """Field 1.1 of a page with this formula, and with a field 1.2 that is 2/3, of the document
    above."""
    page = tmp_path / "page.md"
    write_results(tmp_path / "folder" / "a.json", DOCUMENT)
    page.write_text(
        f"| 1.1 | a | ms | `folder/a.json: {formula}` |\n| 1.2 | b | ms | ____ | on paper <!-- 2 /"
        " 3 --> |\n"
    )
    asked = fields(page.read_text())
    return Results(tmp_path, Exercise(1, page)).answers("page.md", asked, asked)["1.1"]


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("steps.count", 4),
        ("rows['eager', 'seq_len 256'].ms / steps.count", 3.0),
        ("sum(rows.ms)", 16.0),
        ("max(rows['ea*'].ms)", 12.0),
        ("rows['inner.batch 2'].ms", 4.0),
        ("rows[{'flash', 'eager'}, 'seq_len 128'].ms", 4.0),
        ("len([row for row in rows if 'ms' in row and row.ms > steps.count])", 1),
        ("#1.2 * 3", 2.0),
        ("least({row.seq_len: row.ms for row in rows['eager']})", 128),
        ("file_bytes / 1", 0),
    ],
)
def test_formulas(tmp_path, formula, value):
    if formula.startswith("file_bytes"):
        write_results(tmp_path / "folder" / "a.json", DOCUMENT)
        value = (tmp_path / "folder" / "a.json").stat().st_size
    assert answer_to(tmp_path, formula).value == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("formula", "reason"),
    [
        ("steps.nothing", "nothing: no clock"),
        ("rows['flash'].ms", "ms: not built"),
        ("sum(rows['flash', 'seq_len 256'].ms)", "ms: not built"),
        ("sum(empty.ms)", "empty: there are none"),
        ("rows[7].ms", "rows: there are 3"),
    ],
)
def test_what_a_machine_does_not_know_has_the_reason(tmp_path, formula, reason):
    assert answer_to(tmp_path, formula).value is None
    assert reason in answer_to(tmp_path, formula).evidence


@pytest.mark.parametrize(
    ("formula", "problem"),
    [
        ("steps.cuont", "folder/a.json: steps has no cuont"),
        ("stops.count", "folder/a.json: has no stops"),
        ("rows['eagre'].ms", "folder/a.json: rows: no row has eagre"),
        ("rows['eager'].ms", "is not a single value"),
        ("steps.count /", "invalid syntax"),
        ("steps.count / 0", "division by zero"),
        ("#1.9 + 1", "there is no field 1.9"),
        ("first([])", "list index out of range"),
        ("#1.1 + 1", "maximum recursion depth"),
    ],
)
def test_a_wrong_path_is_named_with_page_and_line(tmp_path, formula, problem):
    with pytest.raises(
        UserError, match=rf"^page\.md:1: 1\.1, `{re.escape(formula)}`: .*{re.escape(problem)}"
    ):
        answer_to(tmp_path, formula)
