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
    # What the figures mean and where they come from, a sentence each.
    note: list[str] = field(default_factory=list)
    facts: dict[str, object] = field(default_factory=dict)  # by label
    _: KW_ONLY
    code: str = ""  # lines to be copied, which are shown as they are
    lead: str = ""  # what it says in a line, where that is not its largest rows or its first fact
    figure: str = ""  # the name of the figure that a page draws of it
    unfolded: bool = False  # on a page, from the beginning
    warning: str = ""  # why it should not be relied on
    # Of a long table: the key of its rows' names; a renderer shows the first, and "N more".
    label: str = ""
    # Of a long table: the keys that add up, so that the last row completes the others.
    sums: Sequence[str] = ()
    parts: list[Section] = field(default_factory=list)

    def shown(self, top: int) -> list[dict]:
        """The rows; of a long table the first, and one for all others."""
        if self.label and top:
            return first_rows(self.label, self.rows, top, self.sums)
        return self.rows

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
    rows, columns, above = section.shown(top), list(section.columns), [section.title]
    if section.warning:
        above.append(f"UNRELIABLE: {section.warning}")
    above += labeled(section.facts)
    if fold:
        columns, same = folded(columns, rows)
        above += same
    columns, left_out = with_room(columns, rows)
    if left_out:
        above.append(f"Left out here, in the .md file: {', '.join(left_out)}")
    lines = ["", *wrapped(map(printable, above))]
    if rows:
        lines += narrow_table(columns, rows)
    if notes:
        lines += wrapped(map(printable, section.note))
    lines += section.code.splitlines()
    for part in section.parts:
        if part:
            lines += as_text(part, top, fold=fold, notes=notes)
    return lines


def as_markdown(section: Section, top: int = 0, level: int = 2) -> list[str]:
    """Lines of markdown; top: rows of a long table, 0 for all."""
    lines = ["", f"{'#' * level} {section.title}"]
    if section.warning:
        lines += ["", f"**Unreliable: {section.warning}**"]
    if section.facts:
        lines.append("")
        lines += [f"- {label}: {value}" for label, value in section.facts.items()]
    if section.figure:
        lines += ["", f"![{section.title}]({section.figure}.png)"]
    rows = section.shown(top)
    if rows:
        lines += ["", *markdown_table(section.columns, rows)]
    if section.note:
        lines += ["", *(f"{line}  " for line in section.note)]
    if section.code:
        lines += ["", "```python", section.code, "```"]
    for part in filter(None, section.parts):
        lines += as_markdown(part, top, level + 1)
    return lines


def folded(columns: Sequence[Column], rows: list[dict]) -> tuple[list[Column], list[str]]:
    """The columns whose text differs between rows, and a line that names those of the others, if
    there are any."""
    kept, same = [], []
    for shown in columns:
        texts = {shown.text(row) for row in rows}
        if len(texts) > 1:
            kept.append(shown)
            continue
        text = texts.pop() if texts else "-"
        if text != "-" and len(rows) == 1:
            kept.append(shown)
        elif text not in ("-", ""):
            same.append(f"{shown.title} {text}")
    return kept, [f"In all rows: {', '.join(same)}"] if same else []
