"""Many worksheets of one exercise side by side: field by field who differs from whom, and by how much."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import jinja2

from harness.base.errors import UserError
from harness.base.files import kind_of
from harness.base.tables import Column, column, markdown_table
from harness.base.text import shortened
from workshop.exercise.page import YES_NO, Exercise, Field, exercises
from workshop.exercise.results import TOLERANCE, significant
from workshop.exercise.values import choice, number_in
from workshop.worksheets.worksheet import NoWorksheet, fields_of, read_completed

NAME = re.compile(r"^Name: *([^_\s].*)$", re.M)
UNNAMED = ("worksheet", "answers")  # names of sheets that say nothing about a person
EXAMPLES = 3  # of what cannot be read, in the line about a sheet


@dataclass
class Sheet:
    """A completed worksheet: of whom, and the fields that are filled in, by id."""

    who: str
    exercise: int
    fields: dict[str, Field]


def find_sheets(places: Sequence[Path]) -> tuple[list[Sheet], list[str]]:
    """The sheets in files and folders, and a line for each that cannot be read.

    Passed over in a folder: tables that commands wrote, and answers_N.md beside a worksheet_N.md."""
    sheets, refused = [], []
    for place in places:
        paths = sorted(place.rglob("*.md")) if place.is_dir() else [place]
        for path in (path for path in paths if not path.name.startswith("class_")):
            if path.name.startswith("answers_") and path.with_name(f"worksheet_{path.name[8:]}") in paths:
                continue
            try:
                sheets.append(read_sheet(path, place))
            except NoWorksheet as error:
                refused += [] if path != place and kind_of(path.name) else [str(error)]
            except UserError as error:
                refused.append(str(error))
    for who, count in Counter((sheet.who, sheet.exercise) for sheet in sheets).items():
        if count > 1:
            namesakes = [sheet for sheet in sheets if (sheet.who, sheet.exercise) == who]
            for number, sheet in enumerate(namesakes, 1):
                sheet.who += f" ({number})"
    return sheets, refused


def read_sheet(path: Path, place: Path) -> Sheet:
    """Raises UserError if it is no worksheet.  Its person: the line `Name:`, else the file, else its folder."""
    exercise, found = read_completed(path)
    name = NAME.search(path.read_text())
    called = path.resolve().parent.name if path.stem.startswith(UNNAMED) and path != place else path.stem
    who = " ".join(name[1].split()) if name else called
    return Sheet(who, exercise.number, {field.id: field for field in found})


def chosen_exercise(sheets: list[Sheet], number: int | None) -> Exercise:
    """The exercise of this number, or the one of most sheets."""
    if not sheets:
        raise UserError("--class: no worksheet was found; they are markdown files such as worksheet_3.md")
    return exercises()[number or Counter(sheet.exercise for sheet in sheets).most_common(1)[0][0]]


def comparable(sheets: list[Sheet], exercise: Exercise) -> tuple[list[Sheet], list[str]]:
    """The sheets that can be summed up, and a line for each that cannot, or only in part."""
    known, kept, lines = fields_of(exercise), [], []
    for sheet in sheets:
        other = other_version(sheet, known)
        filled = {name: field for name, field in sheet.fields.items() if field.unit != YES_NO and not field.is_blank}
        asked = sum(field.unit != YES_NO for field in sheet.fields.values())
        if sheet.exercise != exercise.number:
            of = sheet.exercise
            lines.append(f"{sheet.who}: left out: exercise {of}; run_exercise.py {of} --class sums that one up")
        elif other:
            lines.append(f"{sheet.who}: left out: of another version of the worksheet: {other}")
        elif not filled:
            lines.append(f"{sheet.who}: left out: nothing is filled in")
        else:
            if 2 * len(filled) < asked:  # boxes that are not ticked may not have been looked at
                lines.append(f"{sheet.who}: {asked - len(filled)} of {asked} fields are blank; only the others count")
                sheet.fields = filled | {name: field for name, field in sheet.fields.items() if field.is_checked}
            unread = [f"{f.id} {f.value!r}" for f in filled.values() if read_value(f, known[f.id]) is None]
            if unread:
                more = " ..." if len(unread) > EXAMPLES else ""
                lines.append(f"{sheet.who}: not read: {', '.join(unread[:EXAMPLES])}{more}")
            kept.append(sheet)
    return kept, lines


def other_version(sheet: Sheet, known: dict[str, Field]) -> str:
    """How the fields of a sheet differ from those of the exercise; empty if they do not."""
    lacks = [name for name in known if not name.startswith("R.") and name not in sheet.fields]
    has = [name for name in sheet.fields if name not in known]
    units = [name for name, field in sheet.fields.items() if name in known and field.unit != known[name].unit]
    parts = (("lacks", lacks), ("has", has), ("other units in", units))
    return ", ".join(f"{word} {' '.join(names[:EXAMPLES])}" for word, names in parts if names)


def read_value(field: Field, known: Field) -> float | str | None:
    """What is filled in, in the unit of the exercise; None if it is blank, unknown, or cannot be read."""
    if field.is_blank or field.value == "unknown":
        return None if field.is_blank else "unknown"
    if not known.is_number:
        return field.shown
    try:
        return number_in(field.value, known.unit).value
    except ValueError:
        return None


# ---- Summing up -----------------------------------------------------------------------------------------------------


def field_rows(sheets: list[Sheet], exercise: Exercise) -> list[dict]:
    """A row for each field that somebody has filled in: everybody's value, and how far apart they are."""
    rows = []
    for field in fields_of(exercise).values():
        found = {sheet.who: read_value(sheet.fields[field.id], field) for sheet in sheets if field.id in sheet.fields}
        values = {who: value for who, value in found.items() if value not in (None, "unknown")}
        if values:
            sums = numbers_apart(values) if field.is_number else groups(values)
            row = {
                "id": field.id,
                "label": field.label,
                "unit": field.unit if field.is_number else "",
                "values": values,
            }
            rows.append(row | {"sheets": len(values)} | sums)
    return rows


def numbers_apart(values: dict[str, float]) -> dict:
    """Median, who is lowest and highest, and their ratio, or difference if one of them is not positive."""
    lowest, highest = min(values, key=values.get), max(values, key=values.get)
    low, high, median = values[lowest], values[highest], statistics.median(values.values())
    apart = f"{high / low:,.2f}x" if low > 0 else f"{high - low:,.4g}"
    cells = {who: (plainly(value), distance(value, median)) for who, value in values.items()}
    return {
        "most": plainly(median),
        "lowest": f"{plainly(low)} {lowest}" if low != high else None,
        "highest": f"{plainly(high)} {highest}" if low != high else None,
        "apart": apart if low != high else None,
        "by": high / low - 1 if low > 0 else 0.0,
        "cells": cells,
    }


def plainly(value: float) -> str:
    """Whole numbers in full, others with four digits."""
    return significant(int(value) if value == int(value) else value)


def distance(value: float, median: float) -> str:
    """How far a value is from the median; empty within the tolerance of a reading."""
    if abs(value - median) <= TOLERANCE * abs(median):
        return ""
    return f"{value / median:.2f}x" if value > 0 and median > 0 else f"{value - median:+.4g}"


def groups(values: dict[str, str]) -> dict:
    """The answer that most gave, and who gave another."""
    by_answer: dict[str, list[str]] = {}
    for who, value in values.items():
        by_answer.setdefault(choice(value), []).append(who)
    largest, *others = sorted(by_answer.values(), key=len, reverse=True)
    differ = [f"{values[group[0]]}: {', '.join(group)}" for group in others]
    cells = {who: (value, "" if who in largest else "differs") for who, value in values.items()}
    apart = f"{sum(map(len, others))} differ" if others else None
    return {"most": values[largest[0]], "lowest": "; ".join(differ) or None, "apart": apart, "by": 0.0, "cells": cells}


COLUMNS = (
    column("#", "id"),
    column("quantity", "label", left=True),
    column("unit", "unit", left=True),
    column("sheets", "sheets"),
    column("median, or most", "most"),
    column("lowest, or who differs", "lowest", left=True),
    column("highest", "highest", left=True),
    column("apart", "apart"),
)


def as_markdown(exercise: Exercise, sheets: list[Sheet], rows: list[dict], lines: list[str]) -> str:
    """class_N.md"""
    notes = ["", *(f"- {line}" for line in lines)] if lines else []
    title = [f"# {exercise.title}: {len(sheets)} worksheets", "", f"Summed up on {date.today()}.", *notes, ""]
    return "\n".join([*title, *markdown_table(COLUMNS, rows)]) + "\n"


def as_page(exercise: Exercise, sheets: list[Sheet], rows: list[dict], lines: list[str]) -> str:
    """class_N.html: everybody's value, and how far it is from the median."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,  # names come from the sheets
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    people = [sheet.who for sheet in sheets]
    page = environment.get_template("class_template.html")
    return page.render(title=exercise.title, people=people, rows=rows, lines=lines, tolerance=f"{TOLERANCE:.0%}")


def screen_columns() -> list[Column]:
    """The same columns, narrow enough for a terminal."""
    widths = {"quantity": 30, "unit": 10, "median, or most": 14, "lowest, or who differs": 24, "highest": 24}
    titles = {"median, or most": "median", "lowest, or who differs": "lowest / differs"}

    def narrow(one: Column) -> Column:
        width = widths[one.title]
        return Column(titles.get(one.title, one.title), lambda row: shortened(one.text(row), width), left=one.left)

    return [narrow(one) if one.title in widths else one for one in COLUMNS]
