"""Fill in a worksheet with what the results say, or compare one that somebody filled in with them."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from pathlib import Path

from harness.errors import UserError
from workshop.results import TOLERANCE, Answer, Results
from workshop.template import template_answers
from workshop.texts import GUIDE, ROW, TICK, TICK_BOX, Exercise, Field, exercises, fields, worksheet

TEMPLATE_HEADING = "## Results template"


def answers(results: Results) -> dict[str, Answer]:
    """Every field of the exercise's worksheet; of the template too, where the exercise has a run that fills it in."""
    module = importlib.import_module(f"workshop.answers.exercise_{results.exercise.number}")
    template = template_answers(results, **module.TEMPLATE) if hasattr(module, "TEMPLATE") else {}
    return template | module.answers(results)


def fields_of(exercise: Exercise) -> dict[str, Field]:
    """The fields of an exercise's worksheet and of the template, by id."""
    both = [*fields(worksheet(GUIDE.read_text(), TEMPLATE_HEADING)), *fields(worksheet(exercise.text))]
    return {field.id: field for field in both}


# ---- Filling in ---------------------------------------------------------------------------------------------------


def filled(exercise: Exercise, found: dict[str, Answer], about: list[str]) -> str:
    """worksheet.md: title, what it was measured on, the template if it was filled in, the worksheet."""
    lines = [f"# {exercise.title}: worksheet", "", *about, ""]
    if any(name.startswith("R.") for name in found):
        lines += ["## Results", "", *fill(worksheet(GUIDE.read_text(), TEMPLATE_HEADING), found), ""]
    lines += ["## Worksheet", "", *fill(worksheet(exercise.text), found)]
    return "\n".join(lines) + "\n"


def fill(text: str, found: dict[str, Answer]) -> Iterable[str]:
    """Each line with its answer and its evidence."""
    for line in text.splitlines():
        row, tick = ROW.match(line), TICK.match(line)
        if row:
            answer = found[row["id"]]
            evidence = answer.evidence.replace("|", "\\|")
            yield f"{line[: row.start('value')]} {answer.shown} | {evidence} |"
        elif tick:
            answer = found[tick["id"]]
            known = answer.value is not None
            yield f"{line[: tick.start('value')]}{answer.shown if known else ' '}{line[tick.end('value') :]}"
            yield f"  - {'' if known else f'{answer.shown}: '}{answer.evidence}"
        elif re.match(r"^\| # \|", line):
            yield f"{line} source |"
        elif re.match(r"^\|[ :|-]+\|$", line):
            yield f"{line} --- |"
        elif not line.startswith("<!--"):
            yield line


# ---- Checking -----------------------------------------------------------------------------------------------------


def read_filled(path: Path) -> tuple[Exercise, list[Field]]:
    """A worksheet that somebody filled in, and its exercise.  Raises UserError if it is not one."""
    try:
        found = fields(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    numbers = sorted({int(field.id.split(".")[0]) for field in found if not field.id.startswith("R.")})
    if not numbers:
        raise UserError(f"{path}: has no field of a worksheet; rows such as `| 1.1 | ... | unit | ... |` were expected")
    if len(numbers) > 1:
        raise UserError(f"{path}: has fields of exercises {' and '.join(map(str, numbers))}; check one at a time")
    return exercise_of(numbers[0], str(path)), found


def exercise_of(number: int, name: str) -> Exercise:
    """The exercise of this number, or a UserError that begins with the name."""
    known = exercises()
    if number not in known:
        raise UserError(f"{name}: there is no exercise {number}; there are {min(known)} to {max(known)}", 2)
    return known[number]


def check(
    found: list[Field], known: dict[str, Field], right: dict[str, Answer], name: str
) -> tuple[list[dict], list[str]]:
    """A row for each field that can be judged or is missing, and a line for each that cannot be compared."""
    rows, problems = [], []
    for field in found:
        place = f"{name}:{field.line}: {field.id}"
        if field.id not in known:
            rows.append({"id": field.id, "yours": field.value, "verdict": "not a field"})
            problems.append(f"{place} is not a field of the exercise")
        elif field.id in right:
            answer = right[field.id]
            verdict, problem = judge(field, known[field.id], answer)
            figures = {"yours": field.value or "-", "results": answer.shown}
            if field.unit == TICK_BOX:
                figures = {"yours": _yes_or_no(_ticked(field)), "results": _yes_or_no(answer.value)}
            rows.append({"id": field.id, "what": known[field.id].what, **figures, "verdict": verdict})
            if problem:
                problems.append(f"{place} {known[field.id].what}: {problem}")
    here = {field.id for field in found}
    for field in known.values():
        if field.id in right and field.id not in here and not field.id.startswith("R."):
            rows.append({"id": field.id, "what": field.what, "verdict": "missing"})
            problems.append(f"{name}: {field.id} {field.what}: is missing; expected {field.expected}")
    return rows, problems


def judge(field: Field, known: Field, answer: Answer) -> tuple[str, str | None]:
    """The verdict, and the problem if the value is blank or of another kind than was asked for."""
    if answer.value is None:
        return f"not checked: {answer.evidence}", None
    if known.unit == TICK_BOX:
        agrees = _ticked(field) == answer.value
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


def _ticked(field: Field) -> bool:
    return field.value.lower() == "x"


def _yes_or_no(value: bool | None) -> str:
    return {True: "yes", False: "no", None: "-"}[value]


NUMBER = re.compile(
    r"^[~≈]?\s*(?P<number>[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:(?<=\d)[eE][-+]?\d+)?)\s*(?P<unit>.*)$"
)


def number_in(text: str, unit: str) -> float | None:
    """The number of a field, its unit behind it or not; None for anything else."""
    match = NUMBER.match(text.strip())
    if not match or not re.search(r"\d", match["number"]):
        return None
    if match["unit"].strip().casefold() not in ("", unit.casefold()):
        return None
    return float(match["number"].replace(",", ""))


def close(number: float, written: str, right: float, tolerance: float = TOLERANCE) -> bool:
    """Equal within what reading from a screen allows: 2%, or half of the last of two or more digits."""
    match = re.search(r"[\d,]*(?:\.(\d+))?", written.lstrip("~≈ +-"))
    significant = match[0].replace(",", "").replace(".", "").strip("0") if match else ""
    last = 0.5 * 10.0 ** -len(match[1] or "") if len(significant) > 1 and "e" not in written.lower() else 0.0
    return abs(number - right) <= max(tolerance * abs(right), last * 1.0001)


def choice(text: str) -> str:
    """`compute-bound` is `compute`."""
    return plain(text).removesuffix("bound")


def plain(text: str) -> str:
    """Names are the same whatever their case, marks and prefix."""
    return re.sub(r"[\s`*_-]+", "", text.casefold()).removeprefix("aten::")
