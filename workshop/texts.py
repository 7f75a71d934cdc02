"""What README.md and exercises/ hold: shell blocks with their marks, worksheet fields, links, headings."""

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

    def line_of(self, word: str) -> int | None:
        """The line of the first shell block that names it."""
        for block in shell_blocks(self.text):
            for offset, line in enumerate(block.commands.splitlines()):
                if word in line:
                    return block.line + offset
        return None


def exercises() -> dict[int, Exercise]:
    """All exercises by number."""
    found = {}
    for path in (PROJECT / "exercises").glob("exercise_*_*.md"):
        number = int(path.name.split("_")[1])
        found[number] = Exercise(number, path)
    return dict(sorted(found.items()))


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
    value: str  # as it stands there
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
    """Every field of a worksheet, in order.  Raises UserError where one stands twice."""
    found: dict[str, Field] = {}
    fenced = generated = False
    for number, line in enumerate(text.splitlines(), 1):
        fenced ^= line.lstrip().startswith("```")
        generated = (generated or "[[[cog" in line) and "[[[end]]]" not in line  # what another machine gave
        match = None if fenced or generated else ROW.match(line) or TICK.match(line)
        if match:
            parts = {name: value.strip() for name, value in match.groupdict().items()}
            field = Field(parts["id"], parts["what"], parts.get("unit", TICK_BOX), parts["value"], number)
            if field.id in found:
                raise UserError(f"line {number}: {field.id} stands on line {found[field.id].line} already")
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


# ---- Links ------------------------------------------------------------------------------------------------------


def headings(text: str) -> set[str]:
    """The anchors of a text's headings, as GitHub makes them."""
    found: set[str] = set()
    for title in re.findall(r"^#{1,6} (.+)$", outside_of_blocks(text), re.M):
        plain = re.sub(r"[^\w\- ]", "", re.sub(r"`|\*\*", "", title).strip().lower()).replace(" ", "-")
        names = (plain, *(f"{plain}-{n}" for n in range(1, 99)))
        found.add(next(name for name in names if name not in found))
    return found


def links(text: str) -> list[str]:
    """Targets of every link and picture."""
    return re.findall(r"\]\(([^)\s]+)\)", outside_of_blocks(text))


def outside_of_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)
