"""Fill in a worksheet from results, or check a completed one against them."""

import importlib
import re
from collections.abc import Iterable
from pathlib import Path

from harness.base.errors import UserError
from workshop.exercise.page import BLANK, CHECKBOX, GUIDE, ROW, YES_NO, Exercise, Field, exercises, fields, worksheet
from workshop.exercise.results import Answer, Results
from workshop.exercise.values import choice, number_in
from workshop.worksheets.template import template_answers

TEMPLATE_HEADING = "## Results template"


def answers(results: Results) -> dict[str, Answer]:
    """The answer to every field of the exercise's worksheet, and to the template's if the exercise fills it in."""
    module = importlib.import_module(f"workshop.answers.exercise_{results.exercise.number}")
    template = template_answers(results, **module.TEMPLATE) if hasattr(module, "TEMPLATE") else {}
    return template | module.answers(results)


def fields_of(exercise: Exercise) -> dict[str, Field]:
    """The fields of an exercise's worksheet and of the template, by id."""
    both = [*fields(worksheet(GUIDE.read_text(), TEMPLATE_HEADING)), *fields(worksheet(exercise.text))]
    return {field.id: field for field in both}


def blank(exercise: Exercise) -> str:
    """worksheet_N.md, a handout: the results template if the exercise fills it in, the worksheet, the questions."""
    lines = [f"# {exercise.title}: worksheet", "", f"Name: {BLANK}", "", f"Machine: {BLANK}", ""]
    check = "`python3 run_exercise.py --check FILE --results FOLDER` checks this file, FILE, against the results of the"
    lines += [check, "commands, in FOLDER.", ""]
    template = worksheet(GUIDE.read_text(), TEMPLATE_HEADING)
    if hasattr(importlib.import_module(f"workshop.answers.exercise_{exercise.number}"), "TEMPLATE"):
        lines += ["## Results", "", template]
    else:  # only how to read the column `where`
        lines += [next(part for part in template.split("\n\n") if "`where`" in part), ""]
    questions = re.sub(r"\n\[The answers\]\(.*", "", worksheet(exercise.text, "## Questions"), flags=re.S)
    text = "\n".join([*lines, "## Worksheet", "", worksheet(exercise.text), "## Questions", "", questions])
    return re.sub(r"\[([^]]+)\]\([^)\s]+\)", r"\1", text)  # links are of use beside the exercise only


# ---- Filling in ---------------------------------------------------------------------------------------------------


def filled(exercise: Exercise, found: dict[str, Answer], about: list[str]) -> str:
    """answers_N.md: title, device and commands, the results template if it has answers, the worksheet."""
    lines = [f"# {exercise.title}: worksheet", "", *about, ""]
    if any(name.startswith("R.") for name in found):
        lines += ["## Results", "", *fill(worksheet(GUIDE.read_text(), TEMPLATE_HEADING), found), ""]
    lines += ["## Worksheet", "", *fill(worksheet(exercise.text), found)]
    return "\n".join(lines) + "\n"


def fill(text: str, found: dict[str, Answer]) -> Iterable[str]:
    """Each line with its answer and its evidence."""
    for line in text.splitlines():
        row, checkbox = ROW.match(line), CHECKBOX.match(line)
        if row:
            answer = found[row["id"]]
            evidence = answer.evidence.replace("|", "\\|")
            yield f"{line[: row.start('value')]} {answer.shown} | {evidence} |"
        elif checkbox:
            answer = found[checkbox["id"]]
            mark, prefix = (" ", f"{answer.shown}: ") if answer.value is None else (answer.shown, "")
            yield f"{line[: checkbox.start('value')]}{mark}{line[checkbox.end('value') :]}"
            yield f"  - {prefix}{answer.evidence}"
        elif re.match(r"^\| # \|", line):
            yield f"{first_cells(line)} source |"
        elif re.match(r"^\|[ :|-]+\|$", line):
            yield f"{first_cells(line)} --- |"
        elif not line.startswith("<!--"):
            yield line


def first_cells(line: str) -> str:
    """The cells of a field; the one that says where to look gives way to the source."""
    return "|".join(line.split("|")[:5]) + "|"


# ---- Checking -----------------------------------------------------------------------------------------------------


class NoWorksheet(UserError):
    """A file without any field of a worksheet."""


def read_completed(path: Path) -> tuple[Exercise, list[Field]]:
    """A completed worksheet: its exercise and its fields.  Raises UserError if it is not one, NoWorksheet if it has
    no fields at all."""
    try:
        found = fields(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    numbers = sorted({int(field.id.split(".")[0]) for field in found if not field.id.startswith("R.")})
    if not numbers:
        raise NoWorksheet(f"{path}: has no worksheet fields; they are rows such as `| 1.1 | ... | unit | ... |`")
    if len(numbers) > 1:
        raise UserError(f"{path}: has fields of exercises {' and '.join(map(str, numbers))}; check one at a time")
    return exercise_of(numbers[0], str(path)), found


def exercise_of(number: int, name: str) -> Exercise:
    """The exercise of this number.  Raises UserError, which begins with the name."""
    known = exercises()
    if number not in known:
        raise UserError(f"{name}: there is no exercise {number}; there are {min(known)} to {max(known)}", 2)
    return known[number]


def check(found: list[Field], known: dict[str, Field], answers: dict[str, Answer], name: str) -> list[dict]:
    """A row for each field found in the file `name`, and for each that is missing.

    `problem` says what is wrong: expected, given, and where to look; None for a field that is right or unknown here.
    """
    rows = []
    for field in found:
        place = f"{name}:{field.line}: {field.id}"
        if field.id not in known:
            problem = f"{place} is not a field of the exercise"
            rows.append({"id": field.id, "yours": field.value, "verdict": "not a field", "problem": problem})
        elif field.id in answers:
            answer, label = answers[field.id], known[field.id].label
            verdict, problem = judge(field, known[field.id], answer)
            place = f"{place} {label.rstrip('.')}"
            row = {"id": field.id, "label": label, "yours": field.shown, "results": shown(answer), "verdict": verdict}
            rows.append(row | {"problem": problem and f"{place}: {problem}; see {answer.evidence}"})
    present = {field.id for field in found}
    for field in known.values():
        if field.id in answers and field.id not in present and not field.id.startswith("R."):
            problem = f"{name}: {field.id} {field.label}: is missing; expected {field.expected}"
            rows.append({"id": field.id, "label": field.label, "verdict": "missing", "problem": problem})
    return rows


def shown(answer: Answer) -> str:
    """The answer as a person would write it."""
    return {True: "yes", False: "no"}[answer.value] if isinstance(answer.value, bool) else answer.shown


def judge(field: Field, known: Field, answer: Answer) -> tuple[str, str | None]:
    """The verdict, and what is wrong with the value: blank, of the wrong kind, or different."""
    right = shown(answer)
    if answer.value is None:
        return "not checked", None
    if known.unit == YES_NO:
        agrees = field.is_checked == answer.value
    elif field.is_blank:
        return "blank", f"is blank; expected {known.expected}"
    elif known.is_number:
        right += f" {known.unit}"
        try:
            agrees = number_in(field.value, known.unit).agrees_with(float(answer.value), answer.tolerance)
        except ValueError as error:
            return "not read", f"expected {known.expected}; {error}"
    elif known.choices and choice(field.value) not in map(choice, known.choices):
        return "not read", f"expected {known.expected}; given {field.value!r}"
    else:
        agrees = choice(field.value) == choice(str(answer.value))
    return ("right", None) if agrees else ("wrong", f"expected {right}, given {field.shown}")
