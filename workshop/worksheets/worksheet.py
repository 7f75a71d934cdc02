"""Fill in a worksheet from results, or check a completed one against them."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from harness.base.errors import UserError
from workshop.exercise import page
from workshop.exercise.page import Exercise, Field, Part
from workshop.exercise.results import Answer, Results
from workshop.exercise.values import choice, chosen, number_in

TEMPLATE_HEADING = "## Results template"
DISTURBED = "the run was disturbed"
TEMPLATE = re.compile(r"<!-- template: (.+) -->\n*")
WIDER = {  # lines of a table of what is measured, and with a column for the value
    "| # | measured for you | unit | where |": "| # | measured for you | unit | value | where |",
    "| --- | --- | --- | --- |": "| --- | --- | --- | --- | --- |",
}


def template_of(part: Part) -> str:
    """The results template of the reference page, with the folders of the exercise; empty if this
    part of it does not fill it in."""
    match = TEMPLATE.search(part.text)
    if not match:
        return ""
    text = page.REFERENCE.read_text()
    words = match[1].split()  # names and the folders that stand for them, in turn
    for name, folder in zip(words[::2], words[1::2], strict=True):
        text = text.replace(f"`{name}/", f"`{folder}/")
    return page.section(text, TEMPLATE_HEADING)


def fields_of(parts: list[Part]) -> dict[str, Field]:
    """The fields of parts of an exercise's page and of the template, by id."""
    by_id = {}
    for part in parts:
        for field in [*page.fields(template_of(part)), *page.fields(part.text)]:
            by_id[field.id] = field
    return by_id


def answers(results: Results, parts: list[Part]) -> dict[str, Answer]:
    """The answer to every field of these parts, and to the template's if one fills it in."""
    known = {}
    on_page = page.fields(results.exercise.text)
    for part in parts:
        template = page.fields(template_of(part))
        if template:
            known["R.13"] = Answer(None, "not measured in this exercise")
            asked = [field for field in template if not field.file.startswith("FLOPS")]
            known.update(results.answers(page.REFERENCE.name, asked, template))
        asked = page.fields(part.text)
        known.update(results.answers(results.exercise.name, asked, on_page))
    return known


# ---- Filling in ----------------------------------------------------------------------------------


def sheet(
    exercise: Exercise,
    parts: list[Part],
    about: list[str],
    found: Mapping[str, Answer],
    predicted: Mapping[int, str],
    complete: bool,
) -> str:
    """A worksheet: title, about, and of each part the results template, predictions, the fields,
    questions.

    found: answers, as far as there are any.  predicted: by line of the page.  complete: with what a
    learner fills in, and the hints."""
    lines = [f"# {exercise.title}: worksheet", "", *about, ""]
    for part in parts:
        of_part = sheet_of(part, found, predicted, complete)
        if part.name == "extra":
            of_part = ["", "# Extra", "", *of_part]
        lines += of_part
    return without_links("\n".join(lines)) + "\n"


def without_links(text: str) -> str:
    """The text of a page, whose links are of use there only."""
    return re.sub(r"\[([^]]+)\]\([^)\s]+\)", r"\1", text)


def predictions_on(written: str, part: Part) -> dict[int, str]:
    """What a learner has predicted on a worksheet, by the line of the page that asks for it."""
    predicted = {}
    for prediction in page.predictions(part.text):
        question = re.escape(without_links(prediction.question))
        line = re.search(rf"^- {question}\n  - (.+)$", written, re.M)
        if line and line[1] != page.BLANK:
            predicted[prediction.line] = line[1]
    return predicted


def sheet_of(
    part: Part, found: Mapping[str, Answer], predicted: Mapping[int, str], complete: bool
) -> list[str]:
    """The lines of a worksheet that are about one part of an exercise."""
    template, text = template_of(part), page.section(part.text, part.worksheet)
    lines = []
    if template:
        lines += ["## Results", "", *fill(template, found, complete), ""]
    asked = page.predictions(part.text)
    if asked:
        lines += ["## Predictions", ""]
        for prediction in asked:
            written = predicted.get(prediction.line) or page.BLANK
            lines += [f"- {prediction.question}", f"  - {written}"]
        lines.append("")
    shown = text if complete else page.HINTS.sub("", text)
    lines += ["## Worksheet", "", *fill(TEMPLATE.sub("", shown), found, complete)]
    if not complete:
        questions = page.section(page.HINTS.sub("", part.text), part.questions)
        questions = re.sub(r"\n\[The answers\]\(.*", "", questions, flags=re.S).rstrip()
        lines += ["", "## Questions", "", questions]
    return lines


def fill(text: str, found: Mapping[str, Answer], complete: bool) -> list[str]:
    """Each line with its answer and, if complete, its evidence instead of where to look."""
    lines = []
    for line in text.rstrip().splitlines():
        row, checkbox = page.ROW.match(line), page.CHECKBOX.match(line)
        if row:
            lines.append(filled_row(row, found.get(row["id"]), complete))
        elif checkbox and complete:
            lines += filled_checkbox(line, checkbox, found[checkbox["id"]])
        else:
            lines.append(page.HIDDEN.sub("", WIDER.get(line, line)))
    return lines


def filled_row(row: re.Match, answer: Answer | None, complete: bool) -> str:
    """A row of a worksheet; what is measured has its answer, what is to be filled in only if it
    is to be complete."""
    is_measured = row["value"] is None
    shown = page.BLANK
    if answer and (complete or is_measured):
        shown = answer.shown
    where = page.HIDDEN.sub("", row["where"]).strip()
    if complete:
        where = answer.evidence.replace("|", "\\|")
    if answer and answer.is_disturbed and (complete or is_measured):
        where += f" ({DISTURBED})"
    cells = [row["id"].strip(), row["label"].strip(), row["unit"].strip(), shown, where]
    return f"| {' | '.join(cells)} |"


def filled_checkbox(line: str, checkbox: re.Match, answer: Answer) -> list[str]:
    """Its line with the mark, and the evidence."""
    mark = "x" if answer.value is True else " "
    marked = line[: checkbox.start("value")] + mark + line[checkbox.end("value") :]
    known = "unknown: " if answer.value is None else ""
    return [page.HIDDEN.sub("", marked), f"  - {known}{answer.evidence}"]


# ---- Checking ------------------------------------------------------------------------------------


class NoWorksheet(UserError):
    """A file without any field of a worksheet."""


def read_completed(path: Path) -> tuple[Exercise, list[Field]]:
    """A completed worksheet: its exercise and its fields.  Raises UserError if it is not one,
    NoWorksheet if it has no fields at all."""
    try:
        completed = page.fields(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: cannot be read: {why}") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    ids = [field.id for field in completed if not field.id.startswith("R.")]
    numbers = sorted({int(name.split(".")[0]) for name in ids})
    if not numbers:
        raise NoWorksheet(
            f"{path}: has no worksheet fields; they are rows such as `| 1.3 | ... | unit | ... |"
            " ... |`"
        )
    if len(numbers) > 1:
        shown = " and ".join(map(str, numbers))
        raise UserError(f"{path}: has fields of exercises {shown}; check one at a time")
    return exercise_of(numbers[0], str(path)), completed


def exercise_of(number: int, name: str) -> Exercise:
    """The exercise of this number.  Raises UserError, which begins with the name."""
    known = page.exercises()
    if number not in known:
        raise UserError(
            f"{name}: there is no exercise {number}; there are {min(known)} to {max(known)}", 2
        )
    return known[number]


def parts_in(exercise: Exercise, completed: list[Field]) -> list[Part]:
    """The parts of the exercise of which the worksheet has a field; the core if it has none."""
    present = {field.id for field in completed}
    parts = []
    for part in exercise.parts(with_extra=True):
        if any(field.id in present for field in page.fields(part.text)):
            parts.append(part)
    return parts or [exercise.core]


def check(
    found: list[Field], known: dict[str, Field], answers: dict[str, Answer], name: str
) -> list[dict]:
    """A row for each field to be filled in that is in the file `name`, and for each that is
    missing.

    `problem` says what is wrong: expected, given, and where to look; None for a field that is right
    or unknown here.
    """
    rows = []
    for field in found:
        if field.value is None:  # without the last column
            field = replace(field, value=field.where)
        place = f"{name}:{field.line}: {field.id}"
        if field.id not in known:
            rows.append(
                {
                    "id": field.id,
                    "yours": field.shown,
                    "verdict": "not a field",
                    "problem": f"{place} is not a field of the exercise",
                }
            )
        elif known[field.id].value is not None:
            rows.append(checked_row(field, known[field.id], answers[field.id], place))
    present = {field.id for field in found}
    for field in known.values():
        if field.value is not None and field.id not in present:
            problem = f"{name}: {field.id} {field.label}: is missing; expected {field.expected}"
            rows.append(
                {"id": field.id, "label": field.label, "verdict": "missing", "problem": problem}
            )
    return rows


def checked_row(field: Field, known: Field, answer: Answer, place: str) -> dict:
    """Of a field that is to be filled in.  known: as it stands on the page."""
    verdict, problem = judge(field, known, answer)
    row = {"id": field.id, "label": known.label, "yours": field.shown, "verdict": verdict}
    if verdict in ("right", "wrong", "not checked"):  # not to one who has not tried
        row["results"] = answer.shown
        row["is_disturbed"] = answer.is_disturbed
    if problem:
        problem = f"{place} {known.label.rstrip('.')}: {problem}"
    if verdict == "wrong":
        problem += f"; see {answer.evidence}"
    row["problem"] = problem
    return row


def judge(field: Field, known: Field, answer: Answer) -> tuple[str, str | None]:
    """The verdict, and what is wrong with the value: blank, of the wrong kind, or different.

    It may be worked out from the files, or from the rounded numbers on the sheet."""
    right = answer.shown
    if answer.value is None:
        return "not checked", None
    if known.unit == page.YES_NO:
        agrees = field.is_checked in (answer.value, answer.from_sheet)
    elif field.is_blank:
        return "blank", f"is blank; expected {known.expected}"
    elif known.is_number:
        right += f" {known.unit}"
        try:
            given = number_in(field.value, known.unit)
        except ValueError as error:
            return "not read", f"expected {known.expected}; {error}"
        agrees = given.agrees_with(float(answer.value))
        if not agrees and answer.from_sheet is not None:
            agrees = given.agrees_with(float(answer.from_sheet))
    elif known.choices:
        meant = chosen(field.value, known.choices)
        if meant is None:
            return "not read", f"expected {known.expected}; given {field.value!r}"
        agrees = choice(meant) in (choice(answer.shown), choice(str(answer.from_sheet)))
    else:
        agrees = choice(field.value) == choice(answer.shown)
    return ("right", None) if agrees else ("wrong", f"expected {right}, given {field.shown}")
