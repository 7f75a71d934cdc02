"""Tables: the same columns as text for a terminal and as markdown."""

import textwrap
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from harness.base.text import printable, significant, told_apart

COLUMNS = 120  # of the widest line that a command prints
TEXT_WIDTH = 40  # to which a text is shortened before a column is left out
ANSWER_LINES = 14  # that a command ends with, at most
T = TypeVar("T")


@dataclass(frozen=True)
class Column:
    """One column of a table: its title and the value that it shows for a row; None is shown as
    `-`."""

    title: str
    value: Callable[[dict], object]
    form: str = ""  # format specification; "~2": four significant digits, two decimals at most
    left: bool = False  # aligned left, for text
    optional: bool = False  # left out on a screen that has no room for it

    def text(self, row: dict) -> str:
        value = self.value(row)
        if value is None:
            return "-"
        if self.form.startswith("~"):
            return significant(value, most=int(self.form[1:]))
        return format(value, self.form)


def column(title: str, key: str, form: str = "", scale: float = 1.0, left: bool = False) -> Column:
    """A column of row[key], a number divided by the scale if there is one."""

    def value(row: dict) -> object:
        number = row.get(key)
        return number if number is None or scale == 1.0 else number / scale

    return Column(title, value, form, left)


def sum_row(label: str, name: str, rows: Sequence[dict], keys: Sequence[str]) -> dict:
    """One row for all of these, with its name under the key `label`: sums, None where a row does
    not know the value."""
    total: dict[str, object] = {label: name}
    for key in keys:
        values = [row.get(key) for row in rows]
        total[key] = None if None in values else sum(values)
    return total


def added_up(pairs: Iterable[tuple[Hashable, float]]) -> Counter:
    """The sum of the numbers of each key; keys in the order in which they come."""
    sums: Counter = Counter()
    for key, number in pairs:
        sums[key] += number
    return sums


def grouped(rows: Iterable[T], key: Callable[[T], object]) -> dict[object, list[T]]:
    """The rows by their key, in order."""
    groups: dict[object, list[T]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def first_rows(label: str, rows: Sequence[dict], top: int, keys: Sequence[str]) -> list[dict]:
    """The first rows, and one for all others, '5 more', so that columns still add up; keys as in
    sum_row()."""
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
    cells = [[column.title for column in columns]]
    for row in rows:
        cells.append([printable(column.text(row)) for column in columns])
    align = ["left" if column.left else "right" for column in columns]
    text = tabulate(cells, tablefmt="plain", colalign=align, disable_numparse=True)
    return [line.rstrip() for line in text.splitlines()]


def narrow_table(columns: Sequence[Column], rows: Sequence[dict]) -> list[str]:
    """The table in at most COLUMNS columns: its longest texts and their titles are shortened until
    it fits."""
    widths = text_widths(columns, rows)
    texts = [width for width, column in zip(widths, columns, strict=True) if column.left]
    room = COLUMNS - 2 * (len(columns) - 1) - sum(widths) + sum(texts)
    length = max(4, max(texts, default=0))
    while length > 4 and sum(min(width, length) for width in texts) > room:
        length -= 1
    return text_table(clipped(columns, rows, length), rows)


def with_room(columns: Sequence[Column], rows: Sequence[dict]) -> tuple[list[Column], list[str]]:
    """The columns for which a screen has room, and the titles of the others: of the optional ones,
    the last are left out first, until texts need not be shorter than TEXT_WIDTH."""
    kept, left_out = list(columns), []
    for column in [column for column in reversed(columns) if column.optional]:
        if least_width(kept, rows) <= COLUMNS:
            break
        kept.remove(column)
        left_out.insert(0, column.title)
    return kept, left_out


def least_width(columns: Sequence[Column], rows: Sequence[dict]) -> int:
    """Characters of a row of the table if its texts are shortened to TEXT_WIDTH."""
    total = 2 * (len(columns) - 1)
    for width, column in zip(text_widths(columns, rows), columns, strict=True):
        total += min(width, TEXT_WIDTH) if column.left else width
    return total


def text_widths(columns: Sequence[Column], rows: Sequence[dict]) -> list[int]:
    """Characters of the longest text of each column, its title among them."""
    widths = []
    for column in columns:
        texts = [column.title, *(column.text(row) for row in rows)]
        widths.append(max(map(len, texts)))
    return widths


def clipped(columns: Sequence[Column], rows: Sequence[dict], length: int) -> list[Column]:
    """The columns with texts of at most this length, which differ where those of the rows do."""
    titles = iter(told_apart([column.title for column in columns if column.left], length))

    def clip(column: Column) -> Column:
        texts = list(dict.fromkeys(map(column.text, rows)))
        short = dict(zip(texts, told_apart(texts, length), strict=True))
        return replace(
            column, title=next(titles), value=lambda row: short[column.text(row)], form=""
        )

    return [clip(column) if column.left else column for column in columns]


def markdown_table(columns: Sequence[Column], rows: Iterable[dict]) -> list[str]:
    """The table in markdown; not padded, so that a change of one row is a change of one
    line."""
    lines = [
        [column.title for column in columns],
        ["---" if column.left else "---:" for column in columns],
    ]
    for row in rows:
        lines.append([column.text(row).replace("|", "\\|") for column in columns])
    return ["| " + " | ".join(line) + " |" for line in lines]


def labeled(rows: dict[str, object]) -> list[str]:
    """One line 'label: value' per entry, the values aligned."""
    width = max(map(len, rows), default=0) + 2
    return [f"{label + ':':<{width}}{value}" for label, value in rows.items()]


def wrapped(lines: Iterable[str]) -> list[str]:
    """The lines, broken at spaces where they are wider than COLUMNS."""
    parts = []
    for line in lines:
        if len(line) <= COLUMNS:
            parts.append(line)
            continue
        parts += textwrap.wrap(
            line,
            width=COLUMNS,
            break_on_hyphens=False,
            break_long_words=False,
            subsequent_indent="    ",
        )
    return parts


@dataclass
class AnswerText:
    """A text of an answer, wrapped."""

    label: str
    is_first: bool  # of its label: it shows the label
    lines: list[str]

    def cut(self, count: int, width: int) -> None:
        """Leave so many lines; the last one ends with an ellipsis.  width: of a line."""
        if len(self.lines) > count:
            self.lines = self.lines[:count]
            self.lines[-1] = f"{self.lines[-1][: width - 1]}…"


def answer(
    rows: dict[str, str | list[str]],
    limit: int = ANSWER_LINES,
    whole: Sequence[str] = (),
    optional: Sequence[str] = (),
) -> list[str]:
    """The lines that a command ends with: labeled, a list with a line for each text, wrapped at
    COLUMNS.

    Of the lines up to the limit, each text gets one; those with labels in `whole`, the first one
    first, and the last, which says where to read on, those that they need: for them, rows in
    `optional` are left out, the first one first.  What is left goes to the others from the top.  A
    text that still has no room is cut, and ends with an ellipsis.
    """
    label_width = max(map(len, rows)) + 2
    width = COLUMNS - label_width
    before = list(dict.fromkeys((*whole, list(rows)[-1])))  # labels of texts that get lines first
    texts = wrapped_texts(rows, width)
    for label in optional:
        if least_lines(texts, before) > limit:
            texts = [text for text in texts if text.label != label]
    texts = texts[:limit]
    spare = limit - len(texts)
    for text in sorted(texts, key=lambda text: place_among(before, text.label)):
        text.cut(spare + 1, width)
        spare -= len(text.lines) - 1
    lines = []
    for text in texts:
        for number, line in enumerate(text.lines):
            label = f"{text.label}:" if text.is_first and number == 0 else ""
            lines.append(f"{label:<{label_width}}{line}")
    return lines


def wrapped_texts(rows: dict[str, str | list[str]], width: int) -> list[AnswerText]:
    """The texts of an answer, in lines of at most this width."""
    texts = []
    for label, of_label in rows.items():
        for number, text in enumerate([of_label] if isinstance(of_label, str) else of_label):
            lines = textwrap.wrap(text, width=width, break_on_hyphens=False)
            texts.append(AnswerText(label, number == 0, lines or [""]))
    return texts


def least_lines(texts: Iterable[AnswerText], before: Sequence[str]) -> int:
    """How many lines there are if texts with labels in `before` get all that they need, and each
    other one gets one."""
    return sum(len(text.lines) if text.label in before else 1 for text in texts)


def place_among(labels: Sequence[str], label: str) -> int:
    """The index of a label; of one that is not among them, that behind the last."""
    return labels.index(label) if label in labels else len(labels)
