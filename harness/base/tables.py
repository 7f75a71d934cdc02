"""Tables: the same columns as text for a terminal and as markdown."""

import textwrap
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from harness.base.text import printable, significant, told_apart
from harness.schema import ABSENT

COLUMNS = 120  # of the widest line that a command prints
TEXT_WIDTH = 40  # to which a text is shortened before a column is left out
LEAST_TEXT = 4  # characters of a text in a table at least
SPACE = 2  # characters between two columns
ANSWER_LINES = 14  # that a command ends with, at most
T = TypeVar("T")


@dataclass(frozen=True)
class Column:
    """One column of a table: its title and the value that it shows for a row;
    None is shown as `-`."""

    title: str
    value: Callable[[dict], object]
    form: str = ""  # format specification; "~2": four significant digits, two decimals at most
    left: bool = False  # aligned left, for text
    optional: bool = False  # left out on a screen that has no room for it

    def text(self, row: dict) -> str:
        """What the column shows for a row."""
        value = self.value(row)
        if value is None:
            return "-"
        if self.form.startswith("~"):
            return significant(value, most=int(self.form[1:]))
        return format(value, self.form)


def column(title: str, key: str, form: str = "", scale: float = 1.0, left: bool = False) -> Column:
    """A column of what the rows have under this key, a number divided by the scale if there is
    one."""
    if scale == 1.0:
        return Column(title, lambda row: value_of(row, key), form, left)

    def scaled(row: object) -> float | None:
        value = value_of(row, key)
        return None if value is None else value / scale

    return Column(title, scaled, form, left)


def value_of(row: object, key: str) -> object:
    """What a row, a dictionary or a record, has under this key; None if it has nothing."""
    if isinstance(row, dict):
        return row.get(key)
    value = getattr(row, key)
    return None if value is ABSENT else value


def sum_row(label: str, name: str, rows: Sequence[object], keys: Sequence[str]) -> dict:
    """One row for all of these, with its name under the key `label`: sums, None where a row does
    not know the value."""
    total = {label: name}
    for key in keys:
        values = [value_of(row, key) for row in rows]
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


def first_rows(label: str, rows: Sequence[object], top: int, keys: Sequence[str]) -> list[object]:
    """The first rows, and one for all others, '5 more', so that columns still add up;
    keys as in sum_row()."""
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
    cells = [[shown.title for shown in columns]]
    cells += [[printable(shown.text(row)) for shown in columns] for row in rows]
    align = ["left" if shown.left else "right" for shown in columns]
    text = tabulate(cells, tablefmt="plain", colalign=align, disable_numparse=True)
    return [line.rstrip() for line in text.splitlines()]


def narrow_table(columns: Sequence[Column], rows: Sequence[dict]) -> list[str]:
    """The table in at most COLUMNS columns: its longest texts and their titles are shortened until
    it fits."""
    text_widths, number_widths = [], []
    for width, shown in zip(column_widths(columns, rows), columns, strict=True):
        (text_widths if shown.left else number_widths).append(width)
    room = COLUMNS - SPACE * (len(columns) - 1) - sum(number_widths)
    length = max(text_widths, default=LEAST_TEXT)
    while length > LEAST_TEXT and sum(min(width, length) for width in text_widths) > room:
        length -= 1
    return text_table(clipped(columns, rows, max(length, LEAST_TEXT)), rows)


def with_room(columns: Sequence[Column], rows: Sequence[dict]) -> tuple[list[Column], list[str]]:
    """The columns for which a screen has room, and the titles of the others: of the optional ones,
    the last are left out first, until texts need not be shorter than TEXT_WIDTH."""
    kept, left_out = list(columns), []
    optional = [shown for shown in columns if shown.optional]
    while optional and least_width(kept, rows) > COLUMNS:
        last = optional.pop()
        kept.remove(last)
        left_out.insert(0, last.title)
    return kept, left_out


def least_width(columns: Sequence[Column], rows: Sequence[dict]) -> int:
    """Characters of the lines of a table whose texts are shortened to TEXT_WIDTH."""
    total = SPACE * (len(columns) - 1)
    for width, shown in zip(column_widths(columns, rows), columns, strict=True):
        total += min(width, TEXT_WIDTH) if shown.left else width
    return total


def column_widths(columns: Sequence[Column], rows: Sequence[dict]) -> list[int]:
    """Characters of the widest text of each column, its title included."""
    widths = []
    for shown in columns:
        texts = [shown.title, *map(shown.text, rows)]
        widths.append(max(map(len, texts)))
    return widths


def clipped(columns: Sequence[Column], rows: Sequence[dict], length: int) -> list[Column]:
    """The columns with texts of at most this length, which differ where those of the rows do."""
    titles = iter(told_apart([shown.title for shown in columns if shown.left], length))
    return [
        _clipped_column(shown, rows, length, next(titles)) if shown.left else shown
        for shown in columns
    ]


def _clipped_column(shown: Column, rows: Sequence[dict], length: int, title: str) -> Column:
    texts = list(dict.fromkeys(map(shown.text, rows)))
    short = dict(zip(texts, told_apart(texts, length), strict=True))
    return replace(shown, title=title, value=lambda row: short[shown.text(row)], form="")


def markdown_table(columns: Sequence[Column], rows: Iterable[dict]) -> list[str]:
    """The table in markdown; not padded, so that a change of one row is a
    change of one line."""
    lines = [[shown.title for shown in columns]]
    lines.append(["---" if shown.left else "---:" for shown in columns])
    for row in rows:
        lines.append([shown.text(row).replace("|", "\\|") for shown in columns])
    return [f"| {' | '.join(cells)} |" for cells in lines]


def labeled(rows: dict[str, object]) -> list[str]:
    """One line 'label: value' per entry, the values aligned."""
    width = max(map(len, rows), default=0) + 2
    return [f"{label + ':':<{width}}{value}" for label, value in rows.items()]


def wrapped(lines: Iterable[str]) -> list[str]:
    """The lines, broken at spaces where they are wider than COLUMNS."""
    wrap = textwrap.TextWrapper(
        width=COLUMNS, break_on_hyphens=False, break_long_words=False, subsequent_indent="    "
    ).wrap
    parts = []
    for line in lines:
        parts += wrap(line) if len(line) > COLUMNS else [line]
    return parts


# ---- The answer that a command ends with ---------------------------------------------------------


@dataclass
class AnswerText:
    """One text of an answer: its label, and its lines, of which it may get fewer."""

    label: str
    lines: list[str]
    is_first: bool  # of its label, which is printed before it

    def cut(self, lines: int, width: int) -> None:
        """Leave this many lines at most, the last one with an ellipsis if there were more."""
        if len(self.lines) > lines:
            self.lines[lines - 1] = f"{self.lines[lines - 1][: width - 1]}…"
            del self.lines[lines:]


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
    indent = max(map(len, rows)) + 2
    width = COLUMNS - indent
    texts = _answer_texts(rows, width)
    in_full = list(dict.fromkeys([*whole, list(rows)[-1]]))
    for label in optional:
        if _least_lines(texts, in_full) > limit:
            texts = [text for text in texts if text.label != label]
    texts = texts[:limit]
    spare = limit - len(texts)  # lines beyond the one that each text has
    for text in _by_precedence(texts, in_full):
        text.cut(spare + 1, width)
        spare -= len(text.lines) - 1
    lines = []
    for text in texts:
        label = f"{text.label}:" if text.is_first else ""
        for line in text.lines:
            lines.append(f"{label:<{indent}}{line}")
            label = ""
    return lines


def _answer_texts(rows: dict[str, str | list[str]], width: int) -> list[AnswerText]:
    """The texts in their order, wrapped; an empty one has one empty line."""
    texts = []
    for label, row in rows.items():
        row_texts = [row] if isinstance(row, str) else row
        for number, text in enumerate(row_texts):
            lines = textwrap.wrap(text, width=width, break_on_hyphens=False) or [""]
            texts.append(AnswerText(label, lines, is_first=number == 0))
    return texts


def _least_lines(texts: Sequence[AnswerText], in_full: Sequence[str]) -> int:
    """Lines of an answer in which the texts with these labels are whole."""
    return sum(len(text.lines) if text.label in in_full else 1 for text in texts)


def _by_precedence(texts: Sequence[AnswerText], in_full: Sequence[str]) -> list[AnswerText]:
    """Those with these labels first, label by label, then the others from the top."""
    first = []
    for label in in_full:
        first += [text for text in texts if text.label == label]
    return first + [text for text in texts if text.label not in in_full]
