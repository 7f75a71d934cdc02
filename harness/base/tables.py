"""Tables: the same columns as text for a terminal and as markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

COLUMNS = 120  # of the widest line that a command prints
ANSWER_LINES = 12  # that a command ends with, at most


@dataclass(frozen=True)
class Column:
    """One column of a table: its title and the value that it shows for a row; None is shown as `-`."""

    title: str
    value: Callable[[dict], object]
    form: str = ""  # format specification
    left: bool = False  # aligned left, for text
    optional: bool = False  # left out on a screen that has no room for it

    def text(self, row: dict) -> str:
        value = self.value(row)
        return "-" if value is None else format(value, self.form)


def column(title: str, key: str, form: str = "", scale: float = 1.0, left: bool = False) -> Column:
    """A column of row[key], a number divided by the scale if there is one."""
    if scale == 1.0:
        return Column(title, lambda row: row.get(key), form, left)
    return Column(title, lambda row: None if row.get(key) is None else row[key] / scale, form, left)


def sum_row(label: str, name: str, rows: Sequence[dict], keys: Sequence[str]) -> dict:
    """One row for all of these, with its name under the key `label`: sums, None where a row does not know the value."""
    values = {key: [row.get(key) for row in rows] for key in keys}
    return {label: name} | {key: None if None in known else sum(known) for key, known in values.items()}


def first_rows(label: str, rows: Sequence[dict], top: int, keys: Sequence[str]) -> list[dict]:
    """The first rows, and one for all others, '5 more', so that columns still add up; keys as in sum_row()."""
    if len(rows) <= top + 1:
        return [*rows]
    return [*rows[:top], sum_row(label, f"{len(rows) - top:,} more", rows[top:], keys)]


def text_columns(*keys: str) -> list[Column]:
    """A column of text for each key, which is its title too."""
    return [column(key, key, left=True) for key in keys]


def text_table(columns: Sequence[Column], rows: Iterable[dict]) -> list[str]:
    """Lines for a terminal: titles, then one line per row."""
    from tabulate import tabulate

    # The titles are a row, because tabulate makes columns with headers two characters wider.
    cells = [[one.title for one in columns], *([one.text(row) for one in columns] for row in rows)]
    align = ["left" if one.left else "right" for one in columns]
    text = tabulate(cells, tablefmt="plain", colalign=align, disable_numparse=True)
    return [line.rstrip() for line in text.splitlines()]


def markdown_table(columns: Sequence[Column], rows: Iterable[dict]) -> list[str]:
    """The same table in markdown; not padded, so that a change of one row is a change of one line."""
    lines = [[one.title for one in columns], ["---" if one.left else "---:" for one in columns]]
    lines += [[one.text(row).replace("|", "\\|") for one in columns] for row in rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def labeled(rows: dict[str, object], indent: str = "") -> list[str]:
    """One line 'label: value' per entry, the values aligned."""
    width = max(map(len, rows), default=0) + 2
    return [f"{indent}{label + ':':<{width}}{value}" for label, value in rows.items()]


def wrapped(lines: Iterable[str]) -> list[str]:
    """The lines, broken at spaces where they are wider than COLUMNS."""
    whole_words = {"break_on_hyphens": False, "break_long_words": False}
    return [
        part
        for line in lines
        for part in (
            textwrap.wrap(line, COLUMNS, subsequent_indent="    ", **whole_words) if len(line) > COLUMNS else [line]
        )
    ]


def answer(rows: dict[str, str | list[str]], limit: int = ANSWER_LINES) -> list[str]:
    """The lines that a command ends with: labeled, a list with a line for each text, wrapped at COLUMNS.

    Of the lines up to the limit, each text gets one, and the last, which says where to read on, those that it needs;
    what is left goes to the others from the top.  A text that still has no room is cut, and ends with an ellipsis.
    """
    pairs = [
        ("" if i else f"{label}:", text)
        for label, texts in rows.items()
        for i, text in enumerate([texts] if isinstance(texts, str) else texts)
    ]
    pairs = pairs[:limit]
    width = max(len(label) for label, _ in pairs) + 1
    texts = [textwrap.wrap(text, COLUMNS - width, break_on_hyphens=False) or [""] for _, text in pairs]
    spare = limit - len(pairs)
    for lines in texts[-1:] + texts[:-1]:
        if len(lines) > spare + 1:
            lines[spare] = f"{lines[spare][: COLUMNS - width - 1]}…"
            del lines[spare + 1 :]
        spare -= len(lines) - 1
    return [
        f"{'' if i else label:<{width}}{line}"
        for (label, _), lines in zip(pairs, texts, strict=True)
        for i, line in enumerate(lines)
    ]


@dataclass
class Section:
    """A part of a report: a title, a table or lines of text, or both."""

    title: str
    columns: Sequence[Column] = ()
    rows: list[dict] = field(default_factory=list)
    text: list[str] = field(default_factory=list)

    def as_text(self) -> list[str]:
        return ["", self.title, *(text_table(self.columns, self.rows) if self.rows else []), *self.text]

    def as_markdown(self) -> list[str]:
        table = ["", *markdown_table(self.columns, self.rows)] if self.rows else []
        return ["", f"## {self.title}", *table, *([""] if self.text else []), *(f"{line}  " for line in self.text)]
