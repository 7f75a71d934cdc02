"""Fill in a worksheet from results, or check a completed one against them."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from pathlib import Path

from harness.errors import UserError
from workshop.pages import CHECKBOX, GUIDE, ROW, YES_NO, Exercise, Field, exercises, fields, worksheet
from workshop.results import TOLERANCE, Answer, Results
from workshop.template import template_answers

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


# ---- Filling in ---------------------------------------------------------------------------------------------------


def filled(exercise: Exercise, found: dict[str, Answer], about: list[str]) -> str:
    """worksheet.md: title, device and commands, the results template if it has answers, the worksheet."""
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
            yield f"{line} source |"
        elif re.match(r"^\|[ :|-]+\|$", line):
            yield f"{line} --- |"
        elif not line.startswith("<!--"):
            yield line


# ---- Checking -----------------------------------------------------------------------------------------------------


def read_completed(path: Path) -> tuple[Exercise, list[Field]]:
    """A completed worksheet: its exercise and its fields.  Raises UserError if it is not one."""
    try:
        found = fields(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    numbers = sorted({int(field.id.split(".")[0]) for field in found if not field.id.startswith("R.")})
    if not numbers:
        raise UserError(f"{path}: has no worksheet fields; they are rows such as `| 1.1 | ... | unit | ... |`")
    if len(numbers) > 1:
        raise UserError(f"{path}: has fields of exercises {' and '.join(map(str, numbers))}; check one at a time")
    return exercise_of(numbers[0], str(path)), found


def exercise_of(number: int, name: str) -> Exercise:
    """The exercise of this number.  Raises UserError, which begins with the name."""
    known = exercises()
    if number not in known:
        raise UserError(f"{name}: there is no exercise {number}; there are {min(known)} to {max(known)}", 2)
    return known[number]


def check(
    found: list[Field], known: dict[str, Field], answers: dict[str, Answer], name: str
) -> tuple[list[dict], list[str]]:
    """Compare the fields found in the file `name` with the answers.

    Returns a row for each field that is checked or missing, and a line for each that cannot be compared.
    """
    rows, problems = [], []
    for field in found:
        place = f"{name}:{field.line}: {field.id}"
        if field.id not in known:
            rows.append({"id": field.id, "yours": field.value, "verdict": "not a field"})
            problems.append(f"{place} is not a field of the exercise")
        elif field.id in answers:
            answer, label = answers[field.id], known[field.id].label
            yours, results = field.value or "-", answer.shown
            if field.unit == YES_NO:
                yours, results = ({True: "yes", False: "no", None: "-"}[v] for v in (field.is_checked, answer.value))
            verdict, problem = judge(field, known[field.id], answer)
            rows.append({"id": field.id, "label": label, "yours": yours, "results": results, "verdict": verdict})
            if problem:
                problems.append(f"{place} {label}: {problem}")
    present = {field.id for field in found}
    for field in known.values():
        if field.id in answers and field.id not in present and not field.id.startswith("R."):
            rows.append({"id": field.id, "label": field.label, "verdict": "missing"})
            problems.append(f"{name}: {field.id} {field.label}: is missing; expected {field.expected}")
    return rows, problems


def judge(field: Field, known: Field, answer: Answer) -> tuple[str, str | None]:
    """The verdict, and a message if the value is blank or not of the expected kind."""
    if answer.value is None:
        return f"not checked: {answer.evidence}", None
    if known.unit == YES_NO:
        agrees = field.is_checked == answer.value
    elif not field.value.strip("_ "):
        return "blank", f"is blank; expected {known.expected}"
    elif known.is_number:
        number = number_in(field.value, known.unit)
        if number is None:
            return "not a number", f"expected {known.expected}, found {field.value!r}"
        agrees = close(number, field.value, float(answer.value), answer.tolerance)
    else:
        if known.choices and choice(field.value) not in map(choice, known.choices):
            return "not one of the choices", f"expected {known.expected}, found {field.value!r}"
        agrees = choice(field.value) == choice(str(answer.value))
    return "right" if agrees else f"wrong: {answer.evidence}", None


NUMBER = re.compile(
    r"^[~≈]?\s*(?P<number>[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:(?<=\d)[eE][-+]?\d+)?)\s*(?P<unit>.*)$"
)


def number_in(text: str, unit: str) -> float | None:
    """The number in a field, which its unit may follow; None for anything else."""
    match = NUMBER.match(text.strip())
    if not match or not re.search(r"\d", match["number"]):
        return None
    if match["unit"].strip().casefold() not in ("", unit.casefold()):
        return None
    return float(match["number"].replace(",", ""))


def close(number: float, written: str, right: float, tolerance: float = TOLERANCE) -> bool:
    """Equal within the precision of a displayed number: 2%, or half a unit of the last digit if there are several."""
    match = re.search(r"[\d,]*(?:\.(\d+))?", written.lstrip("~≈ +-"))
    significant = match[0].replace(",", "").replace(".", "").strip("0") if match else ""
    last = 0.5 * 10.0 ** -len(match[1] or "") if len(significant) > 1 and "e" not in written.lower() else 0.0
    return abs(number - right) <= max(tolerance * abs(right), last * 1.0001)


def choice(text: str) -> str:
    """A choice in a form that can be compared: `Compute-bound` is `compute`."""
    return plain(text).removesuffix("bound")


def plain(text: str) -> str:
    """A name without case, punctuation and the prefix aten::."""
    return re.sub(r"[\s`*_-]+", "", text.casefold()).removeprefix("aten::")
