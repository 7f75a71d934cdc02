"""What a command has to say, in sections: made once, shown on the screen, in markdown, on a page
and in TensorBoard.

Producers make sections from JSON documents, and know nothing of where they are shown.  The
renderers here are those of plain text; analysis/report has that of a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

from harness.base.tables import (
    Column,
    first_rows,
    labeled,
    markdown_table,
    narrow_table,
    with_room,
    wrapped,
)
from harness.base.text import printable

TOP = 15  # rows of a long table on the screen


@dataclass
class Section:
    """A title with what stands below it: facts, a figure, a table, notes, further sections; each
    may be missing."""

    title: str
    columns: Sequence[Column] = ()
    rows: list[dict] = field(default_factory=list)
    note: list[str] = field(
        default_factory=list
    )  # what the figures mean and where they come from, a sentence each
    facts: dict[str, object] = field(default_factory=dict)  # by label
    _: KW_ONLY
    code: str = ""  # lines to be copied, which are shown as they are
    lead: str = ""  # what it says in a line, where that is not its largest rows or its first fact
    figure: str = ""  # the name of the figure that a page draws of it
    warning: str = ""  # why it should not be relied on
    label: str = (
        ""  # of a long table: the key of its rows' names; a renderer shows the first, and "N more"
    )
    sums: Sequence[
        str
    ] = ()  # of a long table: the keys that add up, so that the last row completes the others
    parts: list[Section] = field(default_factory=list)

    def shown(self, top: int) -> list[dict]:
        """The rows; of a long table the first, and one for all others."""
        return (
            first_rows(self.label, self.rows, top, self.sums) if self.label and top else self.rows
        )

    def __bool__(self) -> bool:
        """Whether there is anything below the title."""
        return bool(
            self.rows or self.note or self.facts or self.code or self.warning or any(self.parts)
        )


def as_text(
    section: Section, top: int = TOP, *, fold: bool = False, notes: bool = True
) -> list[str]:
    """Lines for a terminal, in at most COLUMNS columns: optional columns are left out, the last
    first, until it fits.  Names come from any program: what no terminal should obey is shown as
    `?`.

    top: rows of a long table, 0 for all.  fold: what is the same in all rows is said once, above
    the table.
    """
    rows = section.shown(top)
    columns, told = folded(section.columns, rows) if fold else (list(section.columns), [])
    columns, left_out = with_room(columns, rows)
    told += [f"Left out here, in the .md file: {', '.join(left_out)}"] if left_out else []
    above = [
        section.title,
        *[f"UNRELIABLE: {section.warning}"] * bool(section.warning),
        *labeled(section.facts),
        *told,
    ]
    lines = ["", *wrapped(map(printable, above)), *(narrow_table(columns, rows) if rows else [])]
    lines += wrapped(map(printable, section.note)) if notes else []
    lines += section.code.splitlines()
    return lines + [
        line
        for part in section.parts
        if part
        for line in as_text(part, top, fold=fold, notes=notes)
    ]


def as_markdown(section: Section, top: int = 0, level: int = 2) -> list[str]:
    """Lines of markdown; top: rows of a long table, 0 for all."""
    warning = ["", f"**Unreliable: {section.warning}**"] if section.warning else []
    figure = ["", f"![{section.title}]({section.figure}.png)"] if section.figure else []
    facts = (
        ["", *(f"- {label}: {value}" for label, value in section.facts.items())]
        if section.facts
        else []
    )
    rows = section.shown(top)
    table = ["", *markdown_table(section.columns, rows)] if rows else []
    note = ["", *(f"{line}  " for line in section.note)] if section.note else []
    code = ["", "```python", section.code, "```"] if section.code else []
    parts = [line for part in section.parts if part for line in as_markdown(part, top, level + 1)]
    return [
        "",
        f"{'#' * level} {section.title}",
        *warning,
        *facts,
        *figure,
        *table,
        *note,
        *code,
        *parts,
    ]


def folded(columns: Sequence[Column], rows: list[dict]) -> tuple[list[Column], list[str]]:
    """The columns whose text differs between rows, and a line that names those of the others, if
    there are any."""
    kept, same = [], []
    for shown in columns:
        text, *different = {shown.text(row) for row in rows} or {"-"}
        if different or (text != "-" and len(rows) == 1):
            kept.append(shown)
        elif text not in ("-", ""):
            same.append(f"{shown.title} {text}")
    return kept, [f"In all rows: {', '.join(same)}"] if same else []
