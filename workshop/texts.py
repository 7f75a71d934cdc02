"""What is in the texts: shell blocks with their marks, fields of worksheets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UserError

PROJECT = Path(__file__).resolve().parent.parent
README = PROJECT / "README.md"
GUIDE = PROJECT / "exercises" / "README.md"

# The first line of a block may be a comment that begins with one of these.
MARKS = (
    "needs a GPU",
    "needs an AMD GPU",
    "needs an NVIDIA GPU",
    "takes minutes without a GPU",
    "takes minutes",
    "stays open",
)
BLANK = "____"


@dataclass(frozen=True)
class Block:
    """A shell block of a text: the line of its first command, the commands, and the mark if it has one."""

    line: int
    commands: str
    mark: str | None

    @property
    def title(self) -> str:
        """Its first command, on one line."""
        joined = self.commands.replace("\\\n", " ")
        lines = [line.strip() for line in joined.splitlines() if line.strip() and not line.strip().startswith("#")]
        return " ".join(lines[0].split()) + (" ..." if len(lines) > 1 else "")


def shell_blocks(text: str) -> list[Block]:
    """Every ```bash block, in order."""
    blocks, lines, start = [], [], None
    for number, line in enumerate(text.splitlines(), 1):
        if start is None and line.strip() == "```bash":
            start, lines = number + 1, []
        elif start is not None and line.strip() == "```":
            comment = lines[0].strip().lstrip("# ") if lines and lines[0].strip().startswith("#") else ""
            mark = next((mark for mark in MARKS if comment.startswith(mark)), None)
            blocks.append(Block(start, "\n".join(lines) + "\n", mark))
            start = None
        elif start is not None:
            lines.append(line)
    return blocks


@dataclass(frozen=True)
class Exercise:
    number: int
    path: Path

    @property
    def text(self) -> str:
        return self.path.read_text()

    @property
    def name(self) -> str:
        return str(self.path.relative_to(PROJECT))

    @property
    def title(self) -> str:
        return self.text.splitlines()[0].removeprefix("# ")

    def line_of(self, word: str) -> int | None:
        """The line of the first shell block that names it."""
        for block in shell_blocks(self.text):
            for offset, line in enumerate(block.commands.splitlines()):
                if word in line:
                    return block.line + offset
        return None


def exercises() -> dict[int, Exercise]:
    """All exercises by number."""
    found = [Exercise(int(path.name.split("_")[1]), path) for path in GUIDE.parent.glob("exercise_*_*.md")]
    return {one.number: one for one in sorted(found, key=lambda one: one.number)}


# ---- Worksheets -------------------------------------------------------------------------------------------------

ROW = re.compile(r"^\|\s*(?P<id>(?:\d+|R)\.\d+)\s*\|(?P<what>[^|]*)\|(?P<unit>[^|]*)\|(?P<value>[^|]*)\|")
TICK = re.compile(r"^\s*- \[(?P<value>[ xX])\] \*\*(?P<id>(?:\d+|R)\.\d+)\*\* (?P<what>.*)$")
TICK_BOX = "tick box"


@dataclass(frozen=True)
class Field:
    """One thing to fill in: a row of a table with a blank, or a box to tick."""

    id: str
    what: str
    unit: str  # of a number; `name`; `one of: a, b`; or TICK_BOX
    value: str  # what is filled in
    line: int

    @property
    def choices(self) -> list[str] | None:
        return [one.strip() for one in self.unit[7:].split(",")] if self.unit.startswith("one of:") else None

    @property
    def is_number(self) -> bool:
        return not self.choices and self.unit not in ("name", TICK_BOX)

    @property
    def expected(self) -> str:
        """What belongs there, in words."""
        if self.unit == TICK_BOX:
            return "x or a blank between the brackets"
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        return f"a number ({self.unit})" if self.is_number else "a name"


def fields(text: str) -> list[Field]:
    """Every field of a worksheet, in order.  Raises UserError if one appears twice."""
    found: dict[str, Field] = {}
    fenced = generated = False
    for number, line in enumerate(text.splitlines(), 1):
        fenced ^= line.lstrip().startswith("```")
        generated = (generated or "[[[cog" in line) and "[[[end]]]" not in line  # the answers of another machine
        match = None if fenced or generated else ROW.match(line) or TICK.match(line)
        if match:
            parts = {name: value.strip() for name, value in match.groupdict().items()}
            field = Field(parts["id"], parts["what"], parts.get("unit", TICK_BOX), parts["value"], number)
            if field.id in found:
                raise UserError(f"line {number}: {field.id} is on line {found[field.id].line} already")
            found[field.id] = field
    return list(found.values())


def worksheet(text: str, heading: str = "## Worksheet") -> str:
    """A section of a text, without its heading.  Raises UserError if there is none."""
    lines = text.splitlines()
    if heading not in lines:
        raise UserError(f"no section {heading!r}")
    start = lines.index(heading) + 1
    end = next((i for i in range(start, len(lines)) if lines[i].startswith("## ")), len(lines))
    return "\n".join(lines[start:end]).strip() + "\n"
