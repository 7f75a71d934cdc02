"""Pages of the documentation: shell blocks with their marks, fields of worksheets."""

import re
from dataclasses import dataclass
from pathlib import Path

from harness import PROJECT
from harness.base.errors import UserError

README = PROJECT / "README.md"
REFERENCE = PROJECT / "exercises" / "reference.md"  # has the results template

BLOCK = re.compile(r"^```bash\n(?P<commands>.*?)^```$", re.M | re.S)
# The first line of a block may be a comment that begins with one of these.
MARK = re.compile(
    r"#\s*(needs an? (?:AMD |NVIDIA )?GPU|takes minutes(?: without a GPU)?|stays open)"
)
BLANK = "____"
EXTRA = re.compile(r"^## Extra\n.*?(?=^## |\Z)", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A shell block of a page: the line of its first command,
    the commands, and the mark if it has one."""

    line: int
    commands: str
    mark: str | None

    @property
    def title(self) -> str:
        """Its first command, on one line."""
        joined = self.commands.replace("\\\n", " ")
        lines = [
            line.strip()
            for line in joined.splitlines()
            if line.strip() and not line.strip().startswith("#")
        ]
        return " ".join(lines[0].split()) + (" ..." if len(lines) > 1 else "")


def shell_blocks(text: str) -> list[Block]:
    """Every ```bash block, in order."""
    blocks = []
    for match in BLOCK.finditer(text):
        mark = MARK.match(match["commands"])
        line = 1 + text.count("\n", 0, match.start("commands"))
        blocks.append(Block(line, match["commands"], mark[1] if mark else None))
    return blocks


@dataclass(frozen=True)
class Part:
    """The core of an exercise, or its extra: what is run, filled in and asked together.

    text: of the page, with blank lines in place of the other part's, so that each line keeps its
    number."""

    name: str  # core or extra
    text: str
    worksheet: str  # headings of its sections
    questions: str


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

    @property
    def question(self) -> str:
        """Raises UserError if the page has none."""
        match = re.search(r"^\*\*Question\.\*\* (.+?)\n\n", self.text, re.M | re.S)
        if not match:
            raise UserError(f"{self.name}: no line begins with '**Question.**'")
        return match[1]

    @property
    def core(self) -> Part:
        """What everybody does: the page without the section `## Extra`."""
        text = EXTRA.sub(lambda match: "\n" * match[0].count("\n"), self.text)
        return Part("core", text, "## Worksheet", "## Questions")

    @property
    def extra(self) -> Part | None:
        """What is there for who wants more: the section `## Extra`; None if the page has none."""
        match = EXTRA.search(self.text)
        if not match:
            return None
        text = "\n" * self.text.count("\n", 0, match.start()) + match[0]
        return Part("extra", text, "### Extra worksheet", "### Extra questions")

    def parts(self, with_extra: bool) -> list[Part]:
        """The core, and the extra if it is wanted and there is one."""
        extra = self.extra if with_extra else None
        return [self.core, extra] if extra else [self.core]

    def writer_of(self, folder: str) -> tuple[int, Block] | None:
        """The first line of a shell block that names the folder, or what follows `exerciseN_` in
        its name."""
        for word in (folder, folder.partition("_")[2]):
            for block in shell_blocks(self.text):
                for number, line in enumerate(block.commands.splitlines(), block.line):
                    if word in line:
                        return number, block
        return None


def exercises() -> dict[int, Exercise]:
    """All exercises by number."""
    paths = {
        int(path.name.split("_")[1]): path for path in REFERENCE.parent.glob("exercise_*_*.md")
    }
    return {number: Exercise(number, paths[number]) for number in sorted(paths)}


# ---- Worksheets ----------------------------------------------------------------------------------

ID = r"(?P<id>(?:\d+|R)\.\d+)"
ROW = re.compile(
    rf"^\|\s*{ID}\s*\|(?P<label>[^|]*)\|(?P<unit>[^|]*)\|"
    r"(?:(?P<value>[^|]*)\|)?(?P<where>[^|]*)\|\s*$"
)
CHECKBOX = re.compile(rf"^\s*- \[(?P<value>[ xX])\] \*\*{ID}\*\* (?P<label>.*)$")
HIDDEN = re.compile(r"\s*<!-- (.+?) -->")  # a formula that would tell a learner what to do
FORMULA = re.compile(r"(?:(?P<file>[^\s:]+\.json\*?): )?(?P<formula>.+)")
HINTS = re.compile(r"^<details>.*?^</details>\n*", re.M | re.S)
YES_NO = "checkbox"  # the unit of a field that is one


@dataclass(frozen=True)
class Field:
    """A row of a worksheet.  One without a column for the value is measured for the learner; the
    others, and the checkboxes, are to be filled in."""

    id: str
    label: str
    unit: str  # of a number; `name`; `one of: a, b`; `yes or no`; or YES_NO
    value: str | None  # what is filled in; None: measured
    line: int
    where: str = ""  # what says where to look
    file: str = ""  # relative to the results folder; of the row above, if the row names none
    formula: str = ""  # of the answer: formulas.py

    @property
    def choices(self) -> list[str] | None:
        if not self.unit.startswith("one of:"):
            return None
        return [choice.strip() for choice in self.unit.removeprefix("one of:").split(",")]

    @property
    def is_number(self) -> bool:
        return not self.choices and self.unit not in ("name", "yes or no", YES_NO)

    @property
    def is_checked(self) -> bool:
        return self.value.lower() == "x"

    @property
    def is_blank(self) -> bool:
        return self.unit != YES_NO and not (self.value or "").strip("_ ")

    @property
    def shown(self) -> str:
        """What is filled in, in words."""
        if self.unit == YES_NO:
            return "yes" if self.is_checked else "no"
        return "-" if self.is_blank else self.value

    @property
    def expected(self) -> str:
        """What belongs there, in words."""
        if self.unit == YES_NO:
            return "x or a blank between the brackets"
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        return f"a number ({self.unit})" if self.is_number else "a name"


def fields(text: str) -> list[Field]:
    """Every field of a worksheet, in order.  Raises UserError if one appears twice."""
    by_id: dict[str, Field] = {}
    in_fence, file = False, ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_fence = not in_fence
        field = None if in_fence else field_in(line, number, file)
        if field is None:
            continue
        if field.id in by_id:
            raise UserError(f"line {number}: {field.id} is already on line {by_id[field.id].line}")
        by_id[field.id] = field
        file = field.file
    return list(by_id.values())


def field_in(line: str, number: int, file: str) -> Field | None:
    """The field that a line of a worksheet is; None if it is none.  file: of the field before."""
    row, checkbox = ROW.match(line), CHECKBOX.match(line)
    if row:
        cells = {name: cell and cell.strip() for name, cell in row.groupdict().items()}
    elif checkbox:
        cells = {name: cell.strip() for name, cell in checkbox.groupdict().items()}
        cells.update(unit=YES_NO, where="")
    else:
        return None
    hidden, visible = HIDDEN.search(line), re.fullmatch("`([^`]+)`", cells["where"])
    source = hidden or visible
    parts = FORMULA.fullmatch(source[1] if source else "-")
    for name in ("label", "where"):
        cells[name] = HIDDEN.sub("", cells[name])
    return Field(**cells, line=number, file=parts["file"] or file, formula=parts["formula"])


def section(text: str, heading: str = "## Worksheet") -> str:
    """A section of a page, without its heading, up to the next heading of its level or a higher
    one.  Raises UserError if there is none."""
    level = len(heading.partition(" ")[0])
    after = rf"(?=^#{{2,{level}}} |\Z)"
    match = re.search(rf"^{re.escape(heading)}\n(.*?){after}", text, re.M | re.S)
    if not match:
        raise UserError(f"no section {heading!r}")
    return match[1].strip() + "\n"


@dataclass(frozen=True)
class Prediction:
    """What a page asks for before it measures, with the line where it does."""

    line: int
    question: str


def predictions(text: str) -> list[Prediction]:
    """Every paragraph that begins with **Predict.**, in order."""
    asked = []
    for match in re.finditer(r"^\*\*Predict\.\*\* (.+?)\n\n", text, re.M | re.S):
        line = 1 + text.count("\n", 0, match.start())
        asked.append(Prediction(line, " ".join(match[1].split())))
    return asked
