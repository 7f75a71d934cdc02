"""Fill in a worksheet from results, or check a completed one against them."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from harness.base.errors import UserError
from workshop.exercise import page
from workshop.exercise.page import Exercise, Field
from workshop.exercise.results import Answer, Results
from workshop.exercise.values import choice, number_in

TEMPLATE_HEADING = "## Results template"
TEMPLATE = re.compile(r"<!-- template: (.+) -->\n*")
WIDER = {  # lines of a table of what is measured, and with a column for the value
    "| # | measured for you | unit | where |": "| # | measured for you | unit | value | where |",
    "| --- | --- | --- | --- |": "| --- | --- | --- | --- | --- |",
}


def template_of(exercise: Exercise) -> str:
    """The results template of the reference page, with the folders of the exercise; empty if it
    does not fill it in."""
    found, text = TEMPLATE.search(exercise.text), page.REFERENCE.read_text()
    if not found:
        return ""
    folders = found[1].split()
    for name, folder in zip(folders[::2], folders[1::2], strict=True):
        text = text.replace(f"`{name}/", f"`{folder}/")
    return page.section(text, TEMPLATE_HEADING)


def fields_of(exercise: Exercise) -> dict[str, Field]:
    """The fields of an exercise's page and of the template, by id."""
    return {
        field.id: field
        for field in [*page.fields(template_of(exercise)), *page.fields(exercise.text)]
    }


def answers(results: Results) -> dict[str, Answer]:
    """The answer to every field of the exercise's page, and to the template's if the exercise fills
    it in."""
    template = [
        field
        for field in page.fields(template_of(results.exercise))
        if not field.file.startswith("FLOPS")
    ]
    found = results.answers(page.REFERENCE.name, template) | results.answers(
        results.exercise.name, page.fields(results.exercise.text)
    )
    return ({"R.13": Answer(None, "not measured in this exercise")} if template else {}) | found


# ---- Filling in ----------------------------------------------------------------------------------


def sheet(
    exercise: Exercise,
    about: list[str],
    found: Mapping[str, Answer],
    predicted: Mapping[int, str],
    complete: bool,
) -> str:
    """A worksheet: title, about, the results template, predictions, the fields, questions.

    found: answers, as far as there are any.  predicted: by line of the page.  complete: with what a
    learner fills in, and the hints."""
    template, text = template_of(exercise), page.section(exercise.text)
    lines = [f"# {exercise.title}: worksheet", "", *about, ""]
    if template:
        lines += ["## Results", "", *fill(template, found, complete), ""]
    if asked := page.predictions(exercise.text):
        lines += ["## Predictions", ""]
        lines += [
            f"- {one.question}\n  - {predicted.get(one.line) or page.BLANK}" for one in asked
        ] + [""]
    shown = text if complete else page.HINTS.sub("", text)
    lines += ["## Worksheet", "", *fill(TEMPLATE.sub("", shown), found, complete)]
    if not complete:
        questions = page.section(page.HINTS.sub("", exercise.text), "## Questions")
        lines += [
            "",
            "## Questions",
            "",
            re.sub(r"\n\[The answers\]\(.*", "", questions, flags=re.S).rstrip(),
        ]
    return (
        re.sub(r"\[([^]]+)\]\([^)\s]+\)", r"\1", "\n".join(lines)) + "\n"
    )  # links are of use on the page only


def fill(text: str, found: Mapping[str, Answer], complete: bool) -> list[str]:
    """Each line with its answer and, if complete, its evidence instead of where to look."""
    lines = []
    for line in text.rstrip().splitlines():
        row, checkbox = page.ROW.match(line), page.CHECKBOX.match(line)
        if row:
            answer, where = found.get(row["id"]), page.HIDDEN.sub("", row["where"]).strip()
            shown = answer.shown if answer and (complete or row["value"] is None) else page.BLANK
            where = answer.evidence.replace("|", "\\|") if complete else where
            lines.append(
                f"| {' | '.join([row[name].strip() for name in ('id', 'label', 'unit')])} | {shown}"
                f" | {where} |"
            )
        elif checkbox and complete:
            answer = found[checkbox["id"]]
            mark, known = (
                ("x" if answer.value is True else " "),
                "" if answer.value is not None else "unknown: ",
            )
            start = line[: checkbox.start("value")] + mark + line[checkbox.end("value") :]
            lines += [page.HIDDEN.sub("", start), f"  - {known}{answer.evidence}"]
        else:
            lines.append(page.HIDDEN.sub("", WIDER.get(line, line)))
    return lines


# ---- Checking ------------------------------------------------------------------------------------


class NoWorksheet(UserError):
    """A file without any field of a worksheet."""


def read_completed(path: Path) -> tuple[Exercise, list[Field]]:
    """A completed worksheet: its exercise and its fields.  Raises UserError if it is not one,
    NoWorksheet if it has no fields at all."""
    try:
        found = page.fields(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    numbers = sorted(
        {int(field.id.split(".")[0]) for field in found if not field.id.startswith("R.")}
    )
    if not numbers:
        raise NoWorksheet(
            f"{path}: has no worksheet fields; they are rows such as `| 1.3 | ... | unit | ... |"
            " ... |`"
        )
    if len(numbers) > 1:
        raise UserError(
            f"{path}: has fields of exercises {' and '.join(map(str, numbers))}; check one at a"
            " time"
        )
    return exercise_of(numbers[0], str(path)), found


def exercise_of(number: int, name: str) -> Exercise:
    """The exercise of this number.  Raises UserError, which begins with the name."""
    known = page.exercises()
    if number not in known:
        raise UserError(
            f"{name}: there is no exercise {number}; there are {min(known)} to {max(known)}", 2
        )
    return known[number]


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
            problem = f"{place} is not a field of the exercise"
            rows.append(
                {"id": field.id, "yours": field.shown, "verdict": "not a field", "problem": problem}
            )
        elif known[field.id].value is not None:
            answer, label = answers[field.id], known[field.id].label
            verdict, problem = judge(field, known[field.id], answer)
            place = f"{place} {label.rstrip('.')}"
            row = {"id": field.id, "label": label, "yours": field.shown, "verdict": verdict}
            if verdict in ("right", "wrong", "not checked"):  # not to one who has not tried
                row["results"] = answer.shown
            see = f"; see {answer.evidence}" if verdict == "wrong" else ""
            rows.append(row | {"problem": problem and f"{place}: {problem}{see}"})
    present = {field.id for field in found}
    for field in known.values():
        if field.value is not None and field.id not in present:
            problem = f"{name}: {field.id} {field.label}: is missing; expected {field.expected}"
            rows.append(
                {"id": field.id, "label": field.label, "verdict": "missing", "problem": problem}
            )
    return rows


def judge(field: Field, known: Field, answer: Answer) -> tuple[str, str | None]:
    """The verdict, and what is wrong with the value: blank, of the wrong kind, or different."""
    right = answer.shown
    if answer.value is None:
        return "not checked", None
    if known.unit == page.YES_NO:
        agrees = field.is_checked == answer.value
    elif field.is_blank:
        return "blank", f"is blank; expected {known.expected}"
    elif known.is_number:
        right += f" {known.unit}"
        try:
            agrees = number_in(field.value, known.unit).agrees_with(float(answer.value))
        except ValueError as error:
            return "not read", f"expected {known.expected}; {error}"
    elif known.choices and choice(field.value) not in map(choice, known.choices):
        return "not read", f"expected {known.expected}; given {field.value!r}"
    else:
        agrees = choice(field.value) == choice(answer.shown)
    return ("right", None) if agrees else ("wrong", f"expected {right}, given {field.shown}")
