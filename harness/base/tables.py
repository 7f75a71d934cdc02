"""Tables: the same columns as text for a terminal and as markdown."""

import textwrap
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from harness.base.text import printable, significant, told_apart

COLUMNS = 120  # of the widest line that a command prints
TEXT_WIDTH = 40  # to which a text is shortened before a column is left out
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
        value = self.value(row)
        if value is None or not self.form.startswith("~"):
            return "-" if value is None else format(value, self.form)
        return significant(value, most=int(self.form[1:]))


def column(title: str, key: str, form: str = "", scale: float = 1.0, left: bool = False) -> Column:
    """A column of row[key], a number divided by the scale if there is one."""
    if scale == 1.0:
        return Column(title, lambda row: row.get(key), form, left)
    return Column(title, lambda row: None if row.get(key) is None else row[key] / scale, form, left)


def sum_row(label: str, name: str, rows: Sequence[dict], keys: Sequence[str]) -> dict:
    """One row for all of these, with its name under the key `label`: sums, None where a row does
    not know the value."""
    values = {key: [row.get(key) for row in rows] for key in keys}
    return {label: name} | {
        key: None if None in known else sum(known) for key, known in values.items()
    }


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
    cells = [
        [one.title for one in columns],
        *([printable(one.text(row)) for one in columns] for row in rows),
    ]
    align = ["left" if one.left else "right" for one in columns]
    text = tabulate(cells, tablefmt="plain", colalign=align, disable_numparse=True)
    return [line.rstrip() for line in text.splitlines()]


def narrow_table(columns: Sequence[Column], rows: Sequence[dict]) -> list[str]:
    """The table in at most COLUMNS columns: its longest texts and their titles are shortened until
    it fits."""
    widths = text_widths(columns, rows)
    texts = [width for width, one in zip(widths, columns, strict=True) if one.left]
    room = COLUMNS - 2 * (len(columns) - 1) - sum(widths) + sum(texts)
    fitting = (
        n
        for n in range(max(texts, default=0), 4, -1)
        if sum(min(width, n) for width in texts) <= room
    )
    return text_table(clipped(columns, rows, next(fitting, 4)), rows)


def with_room(columns: Sequence[Column], rows: Sequence[dict]) -> tuple[list[Column], list[str]]:
    """The columns for which a screen has room, and the titles of the others: of the optional ones,
    the last are left out first, until texts need not be shorter than TEXT_WIDTH."""
    kept, left_out = list(columns), []
    while least_width(kept, rows) > COLUMNS and any(one.optional for one in kept):
        left_out.insert(0, kept.pop(max(i for i, one in enumerate(kept) if one.optional)).title)
    return kept, left_out


def least_width(columns: Sequence[Column], rows: Sequence[dict]) -> int:
    """Of a table whose texts are shortened to TEXT_WIDTH."""
    widths = text_widths(columns, rows)
    least = [
        min(width, TEXT_WIDTH) if one.left else width
        for width, one in zip(widths, columns, strict=True)
    ]
    return sum(least) + 2 * (len(columns) - 1)


def text_widths(columns: Sequence[Column], rows: Sequence[dict]) -> list[int]:
    return [max(len(text) for text in (one.title, *map(one.text, rows))) for one in columns]


def clipped(columns: Sequence[Column], rows: Sequence[dict], length: int) -> list[Column]:
    """The columns with texts of at most this length, which differ where those of the rows do."""
    titles = iter(told_apart([one.title for one in columns if one.left], length))

    def clip(one: Column) -> Column:
        texts = list(dict.fromkeys(map(one.text, rows)))
        short = dict(zip(texts, told_apart(texts, length), strict=True))
        return replace(one, title=next(titles), value=lambda row: short[one.text(row)], form="")

    return [clip(one) if one.left else one for one in columns]


def markdown_table(columns: Sequence[Column], rows: Iterable[dict]) -> list[str]:
    """The same table in markdown; not padded, so that a change of one row is a
    change of one line."""
    lines = [[one.title for one in columns], ["---" if one.left else "---:" for one in columns]]
    lines += [[one.text(row).replace("|", "\\|") for one in columns] for row in rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def labeled(rows: dict[str, object]) -> list[str]:
    """One line 'label: value' per entry, the values aligned."""
    width = max(map(len, rows), default=0) + 2
    return [f"{label + ':':<{width}}{value}" for label, value in rows.items()]


def wrapped(lines: Iterable[str]) -> list[str]:
    """The lines, broken at spaces where they are wider than COLUMNS."""
    whole_words = {
        "break_on_hyphens": False,
        "break_long_words": False,
        "subsequent_indent": "    ",
    }
    wrap = partial(textwrap.wrap, width=COLUMNS, **whole_words)
    return [part for line in lines for part in (wrap(line) if len(line) > COLUMNS else [line])]


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
    width, before = max(map(len, rows)) + 2, [*dict.fromkeys((*whole, [*rows][-1]))]
    wrap = partial(textwrap.wrap, width=COLUMNS - width, break_on_hyphens=False)
    listed = {label: [texts] if isinstance(texts, str) else texts for label, texts in rows.items()}
    lines_of = {label: [wrap(one) or [""] for one in texts] for label, texts in listed.items()}
    for label in optional:
        if (
            sum(
                len(one) if row in before else 1 for row, texts in lines_of.items() for one in texts
            )
            > limit
        ):
            lines_of.pop(label, None)
    texts = [
        (label, i, lines) for label, several in lines_of.items() for i, lines in enumerate(several)
    ][:limit]
    spare = limit - len(texts)
    for _, _, lines in sorted(
        texts, key=lambda text: before.index(text[0]) if text[0] in before else len(before)
    ):
        if len(lines) > spare + 1:
            lines[spare] = f"{lines[spare][: COLUMNS - width - 1]}…"
            del lines[spare + 1 :]
        spare -= len(lines) - 1
    return [
        f"{f'{label}:' if i == j == 0 else '':<{width}}{line}"
        for label, i, lines in texts
        for j, line in enumerate(lines)
    ]
