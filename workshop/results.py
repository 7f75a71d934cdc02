"""What the commands of an exercise have left in a folder, and answers with their evidence."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from harness.documents import read_document
from harness.errors import UserError
from harness.units import MB
from workshop.texts import Exercise, exercises

TOLERANCE = 0.02  # of a number that was read from a screen
PERCENT = 0.01  # as a scale: of a share
UNITS = {MB: " in MB", 2**10: " in KB"}  # by scale


@dataclass(frozen=True)
class Answer:
    """What belongs in a field, and where it was read or how it was computed.  None where this machine cannot tell."""

    value: float | int | str | bool | None
    text: str  # name of the figure, or the computation; the reason where there is no value
    file: str = ""  # below the results folder
    place: str = ""  # in the file, such as the row of a sweep
    is_read: bool = False  # as it is in the file
    tolerance: float = TOLERANCE  # relative; what is computed from rounded readings can be further off

    @property
    def evidence(self) -> str:
        return ": ".join(part for part in (self.file, self.place, self.text) if part)

    @property
    def shown(self) -> str:
        """As it stands in the field."""
        if self.value is None:
            return "not given here"
        if isinstance(self.value, bool):
            return "x" if self.value else " "
        return significant(self.value) if isinstance(self.value, int | float) else self.value


def significant(value: float, digits: int = 4) -> str:
    """A number for a person: thousands separated, four significant digits, integers in full."""
    if isinstance(value, int) or value == 0:
        return f"{value:,}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}" if decimals <= 8 and abs(value) < 1e9 else f"{value:.{digits - 1}e}"


# ---- Answers from answers -----------------------------------------------------------------------------------------


def derived(work: Callable, *parts: Answer, sign: str = "; ") -> Answer:
    """work(*values) of other answers, with their evidence; the first unknown one where one is unknown."""
    for part in parts:
        if part.value is None:
            return part
    # What they have in common is said once.
    file, place = parts[0].file, parts[0].place
    if any(part.file != file for part in parts):
        file = place = ""
    elif any(part.place != place for part in parts):
        place = ""
    texts = []
    for part in parts:
        named = replace(part, file="" if file else part.file, place="" if place else part.place).evidence
        texts.append(f"{named}{' ' if part.is_read else ' = '}{part.shown}")
    return Answer(work(*(part.value for part in parts)), sign.join(texts), file, place)


def numbered(ids: str, found: Iterable[Answer]) -> dict[str, Answer]:
    """Answers that are made alike, in the order of these ids."""
    return dict(zip(ids.split(), found, strict=True))


def check_rule(rule: Callable[..., bool], *parts: Answer) -> Answer:
    """Whether the rule is met by the values of other answers."""
    return derived(rule, *parts)


def ratio(over: Answer, under: Answer) -> Answer:
    return derived(operator.truediv, over, under, sign=" / ")


def percent(part: Answer, whole: Answer) -> Answer:
    return derived(lambda a, b: 100.0 * a / b, part, whole, sign=" / ")


# ---- Documents ----------------------------------------------------------------------------------------------------


class Source:
    """A JSON document of a results folder, or a row of it."""

    def __init__(self, name: str, document: dict, place: str = ""):
        self.name, self.document, self.place = name, document, place

    def __getitem__(self, path: str):
        """The value at a dotted path.  Raises UserError, naming file and path, if there is none."""
        value = self.document
        try:
            for part in path.split("."):
                value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, TypeError):
            place = f"{self.name}: {self.place}".removesuffix(": ")
            raise UserError(f"{place}: has no {path}; was it written by another version?") from None
        return value

    def computed(self, value, text: str) -> Answer:
        """An answer that was computed from this document."""
        return Answer(value, text, self.name, self.place)

    def answer(self, path: str, scale: float = 1.0) -> Answer:
        """The value at a dotted path, divided by the scale; the reason where it is null."""
        value = self[path]
        if value is None:
            parent, _, name = path.rpartition(".")
            reasons = self[parent] if parent else self.document
            return self.computed(None, f"{path}: {reasons.get(f'{name}_reason', 'not recorded')}")
        if scale != 1.0:
            value = value / scale
        return replace(self.computed(value, path + UNITS.get(scale, "")), is_read=True)

    def row(self, where: str = "rows", **key) -> Source:
        """The row of a list that has these values.  Raises UserError, naming file and row, if there is none."""
        words = [value if isinstance(value, str) else f"{name} {value}" for name, value in key.items()]
        for row in self[where]:
            if all(row.get(name) == value for name, value in key.items()):
                return Source(self.name, row, ", ".join([where, *words]))
        raise UserError(f"{self.name}: {where} has no {', '.join(words)}; was it written by another version?")


class Results:
    """The result folders of one exercise, below a folder."""

    def __init__(self, folder: Path, exercise: Exercise):
        self.folder, self.exercise = folder, exercise
        self.environment: dict | None = None  # of the first document that has one

    def read(self, pattern: str, file: str, **expected) -> Source:
        """The newest folder of the pattern with such a file, which must have the settings that are expected.

        Raises UserError that says which command writes what is missing, or what was found instead.
        """
        found = [path for path in self.folder.glob(f"{pattern}/{file}") if path.is_file()]
        if not found:
            raise UserError(f"{self.folder / pattern / file} is missing: {self.writer_of(pattern)}")
        path = max(found, key=lambda path: path.stat().st_mtime)
        document = read_document(path)
        if document is None:
            raise UserError(f"{path}: was not written by this workshop; {self.writer_of(pattern)}")
        self.environment = self.environment or document.get("environment")
        settings = settings_of(document)
        for name, value in expected.items():
            if settings.get(name) != value:
                raise UserError(
                    f"{path}: has {name} {settings.get(name)}, and exercise {self.exercise.number} needs {value}; "
                    f"{self.writer_of(pattern)}"
                )
        return Source(str(path.relative_to(self.folder)), document)

    def run(self, pattern: str, **expected) -> Source:
        """The summary of a run, which must have been completed."""
        source = self.read(pattern, "performance_summary.json", **expected)
        if source["status"] != "completed":
            raise UserError(f"{self.folder / source.name}: the run was {source['status']}; {self.writer_of(pattern)}")
        return source

    def has(self, folder: str, file: str = "performance_summary.json") -> bool:
        """Whether there is such a file, of a run that was completed; for what not every machine can run."""
        document = read_document(self.folder / folder / file)
        return document is not None and document.get("status", "completed") == "completed"

    def writer_of(self, pattern: str) -> str:
        """Which command writes it, and whose results are in the folder instead."""
        launcher = next((command for prefix, command in LAUNCHERS.items() if pattern.startswith(prefix)), pattern)
        line = self.exercise.line_of(launcher)
        present = [number for number in exercises() if any(self.folder.glob(f"exercise{number}_*/"))]
        foreign = [] if self.exercise.number in present else present
        hint = f"; {self.folder} has results of exercise {foreign[0]}" if foreign else ""
        where = f"{self.exercise.name}:{line}" if line else self.exercise.name
        return f"the command in {where} writes it{hint}"


def machine(environment: dict) -> str:
    """What a figure was measured on, and when."""
    threads = environment["cpu"]["torch_threads"]
    parts = [
        environment["device"]["name"],
        f"{threads} thread{'s' * (threads > 1)}",
        f"torch {environment['packages']['torch']}",
        f"Python {environment['python']}",
        environment["timestamp"][:10],
    ]
    return ", ".join(parts)


LAUNCHERS = {"performance_results": "launch_performance_study.sh"}  # by the result folders that they name themselves


def settings_of(document: dict) -> dict:
    """The settings that a document was measured or predicted with: of a run, of a sweep or of a benchmark."""
    sections = document.get("config", document)
    settings = {name: document[name] for name in ("size", "batch_size", "device_memory_mb") if name in document}
    for name in ("settings", "training", "profiling", "model"):
        settings |= sections.get(name, {})
    return settings
