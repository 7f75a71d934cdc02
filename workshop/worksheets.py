"""Fill a worksheet with what the results say, or compare one that somebody filled with them."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from pathlib import Path

from harness.errors import UserError
from workshop.results import TOLERANCE, Answer, Results, shown
from workshop.template import template_answers
from workshop.texts import README, ROW, TICK, TICK_BOX, Exercise, Field, exercises, fields, worksheet

TEMPLATE_HEADING = "## Results template"


def answers(results: Results) -> dict[str, Answer]:
    """Every field of the exercise's worksheet; of the template too, where the exercise has a run that fills it."""
    module = importlib.import_module(f"workshop.answers.exercise_{results.exercise.number}")
    found = module.answers(results)
    template = template_answers(results, **module.TEMPLATE) if hasattr(module, "TEMPLATE") else {}
    return template | found


def fields_of(exercise: Exercise) -> dict[str, Field]:
    """The fields of an exercise's worksheet and of the template, by id."""
    both = [*fields(worksheet(README.read_text(), TEMPLATE_HEADING)), *fields(worksheet(exercise.text))]
    return {field.id: field for field in both}


# ---- Filling ----------------------------------------------------------------------------------------------------


def filled(exercise: Exercise, found: dict[str, Answer], about: list[str]) -> str:
    """worksheet.md: title, what it was measured on, the template if it was filled, the worksheet."""
    title = exercise.text.splitlines()[0].removeprefix("# ")
    lines = [f"# {title}: worksheet", "", *about, ""]
    if any(name.startswith("R.") for name in found):
        lines += ["## Results", "", *fill(worksheet(README.read_text(), TEMPLATE_HEADING), found), ""]
    lines += ["## Worksheet", "", *fill(worksheet(exercise.text), found)]
    return "\n".join(lines) + "\n"


def fill(text: str, found: dict[str, Answer]) -> Iterable[str]:
    """Each line with its answer and its evidence."""
    for line in text.splitlines():
        row, tick = ROW.match(line), TICK.match(line)
        if row:
            answer = found[row["id"]]
            yield f"{line[: row.start('value')]} {shown(answer)} | {cell(answer.evidence)} |"
        elif tick:
            answer = found[tick["id"]]
            mark = shown(answer) if answer.value is not None else " "
            yield f"{line[: tick.start('value')]}{mark}{line[tick.end('value') :]}"
            yield f"  - {answer.evidence}" if answer.value is not None else f"  - not given here: {answer.evidence}"
        elif re.match(r"^\|[^|]*nr\.", line):
            yield f"{line} from |"
        elif re.match(r"^\|[ :|-]+\|$", line):
            yield f"{line} --- |"
        elif not line.startswith("<!--"):
            yield line


def cell(text: str) -> str:
    return text.replace("|", "\\|")


# ---- Checking ---------------------------------------------------------------------------------------------------


def read_filled(path: Path) -> tuple[Exercise, list[Field]]:
    """A worksheet that somebody filled, and the exercise that it is of.  Raises UserError if it is none."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        found = fields(text)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    numbers = sorted({int(field.id.split(".")[0]) for field in found if not field.id.startswith("R.")})
    if not numbers:
        raise UserError(f"{path}: holds no field of a worksheet; rows as `| 1.1 | ... | unit | ... |` were expected")
    if len(numbers) > 1:
        raise UserError(f"{path}: holds fields of exercises {' and '.join(map(str, numbers))}; check one at a time")
    return exercise_of(numbers[0], str(path)), found


def exercise_of(number: int, what: str) -> Exercise:
    known = exercises()
    if number not in known:
        raise UserError(f"{what}: there is no exercise {number}; there are {min(known)} to {max(known)}", 2)
    return known[number]


def check(
    found: list[Field], known: dict[str, Field], right: dict[str, Answer], name: str
) -> tuple[list[dict], list[str]]:
    """Rows of what stands there and what belongs there, and a line for each field that cannot be compared."""
    rows, problems = [], []
    here = {field.id for field in found}
    for field in found:
        if field.id not in known:
            problems.append(f"{name}:{field.line}: {field.id} is no field of the exercise")
        elif field.id in right:
            row, problem = compare(field, known[field.id], right[field.id])
            rows.append(row)
            if problem:
                problems.append(f"{name}:{field.line}: {field.id} {known[field.id].what}: {problem}")
    missing = [id_ for id_ in known if id_ in right and id_ not in here and not id_.startswith("R.")]
    problems += [f"{name}: {id_} {known[id_].what}: is missing; expected {known[id_].expected}" for id_ in missing]
    return rows, problems


def compare(field: Field, known: Field, answer: Answer) -> tuple[dict, str | None]:
    """One row, and the problem if the value is blank or of another kind than was asked for."""
    row = {
        "id": field.id,
        "what": known.what,
        "yours": field.value or "-",
        "results": shown(answer),
        "verdict": "right",
    }
    if known.unit == TICK_BOX:
        yours = field.value.lower() == "x"
        row |= {"yours": "yes" if yours else "no", "results": {True: "yes", False: "no"}.get(answer.value, "-")}
        if answer.value is None:
            row["verdict"] = f"not checked: {answer.evidence}"
        elif yours != answer.value:
            row["verdict"] = f"wrong: {answer.evidence}"
        return row, None
    if answer.value is None:
        row["verdict"] = f"not checked: {answer.evidence}"
        return row, None
    if not field.value.strip("_ "):
        row["verdict"] = "blank"
        return row, f"is blank; expected {known.expected}"
    if known.is_number:
        number = number_in(field.value, known.unit)
        if number is None:
            row["verdict"] = "no number"
            return row, f"expected {known.expected}, found {field.value!r}"
        agrees = close(number, field.value, float(answer.value), answer.tolerance)
    else:
        if known.choices and choice(field.value) not in map(choice, known.choices):
            row["verdict"] = "none of the choices"
            return row, f"expected {known.expected}, found {field.value!r}"
        agrees = choice(field.value) == choice(str(answer.value))
    if not agrees:
        row["verdict"] = f"wrong: {answer.evidence}"
    return row, None


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
