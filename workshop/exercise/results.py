"""The result folders of an exercise, and answers with the evidence for them."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from harness import PROJECT
from harness.base.documents import read_document
from harness.base.errors import UserError
from harness.base.text import count_of, significant
from harness.base.units import MB
from workshop.exercise.page import Exercise, exercises, fields, worksheet

MACHINE = "cpu-intel-xeon-2-threads"  # the one that the documentation quotes
RESULTS = PROJECT / "benchmarks" / "results" / MACHINE
TOLERANCE = 0.02  # relative, of a number that was read from a screen
PERCENT = 0.01  # the scale of a share
UNITS = {MB: " in MB", 2**10: " in KB"}  # by scale
WHERE = re.compile(r"`(?:([^`:]+): )?([\w.]+)`( / 2\^20| / 2\^10| / 10\^12| x 100)?$")  # place, path, scale
SCALES = {"": 1.0, " / 2^20": MB, " / 2^10": 2**10, " / 10^12": 1e12, " x 100": PERCENT}


@dataclass(frozen=True)
class Answer:
    """What belongs in a field, and where it was read or how it was computed.  None: unknown on this machine."""

    value: float | int | str | bool | None
    text: str  # the path in the document, or the computation; the reason if there is no value
    file: str = ""  # relative to the results folder
    place: str = ""  # in the file, such as the row of a sweep
    is_read: bool = False  # taken from the file, not computed
    tolerance: float = TOLERANCE  # relative; larger for what is computed from rounded readings

    @property
    def evidence(self) -> str:
        return ": ".join(part for part in (self.file, self.place, self.text) if part)

    @property
    def shown(self) -> str:
        """As written into the field."""
        if self.value is None:
            return "unknown"
        if isinstance(self.value, bool):
            return "x" if self.value else " "
        return significant(self.value) if isinstance(self.value, int | float) else self.value


# ---- Answers from answers -----------------------------------------------------------------------------------------


def derived(compute: Callable, *parts: Answer, sign: str = "; ") -> Answer:
    """compute(*values) of other answers, with their evidence.  If one of them is unknown, so is the result."""
    for part in parts:
        if part.value is None:
            return part
    # A file or place that all of them share is named once.
    file = parts[0].file if len({part.file for part in parts}) == 1 else ""
    place = parts[0].place if file and len({part.place for part in parts}) == 1 else ""
    texts = []
    for part in parts:
        named = replace(part, file="" if file else part.file, place="" if place else part.place).evidence
        texts.append(f"{named}{' ' if part.is_read else ' = '}{part.shown}")
    return Answer(compute(*(part.value for part in parts)), sign.join(texts), file, place)


def numbered(ids: str, answers: Iterable[Answer]) -> dict[str, Answer]:
    """Answers by id, in order."""
    return dict(zip(ids.split(), answers, strict=True))


def ratio(over: Answer, under: Answer) -> Answer:
    return derived(operator.truediv, over, under, sign=" / ")


def percent(part: Answer, whole: Answer) -> Answer:
    return derived(lambda a, b: 100.0 * a / b, part, whole, sign=" / ")


# ---- Stored results -------------------------------------------------------------------------------------------------


def stored_answers(number: int) -> dict:
    """answers_N.json of the machine whose results the documentation quotes."""
    return read_document(stored_path(number)) or {}


def stored_path(number: int) -> Path:
    """On the machine that the documentation quotes, else on another one."""
    paths = [RESULTS / f"exercise_{number}.json", *sorted(RESULTS.parent.glob(f"*/exercise_{number}.json"))]
    return next(filter(Path.is_file, paths), paths[0])


def stored_commands(number: int) -> list[dict]:
    """The shell blocks of the exercise that ran there, each an ExerciseCommand; empty if that was not recorded."""
    return [row for row in stored_answers(number).get("commands") or [] if row["seconds"] is not None]


# ---- Documents ----------------------------------------------------------------------------------------------------


class Source:
    """A JSON document of a results folder, or a row of it."""

    def __init__(self, name: str, document: dict, place: str = "", where: Mapping[str, str] = MappingProxyType({})):
        """where: what the page says of each field, by id."""
        self.name, self.document, self.place, self.where = name, document, place, where

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
        """The value at a dotted path, divided by the scale; if it is null, the reason."""
        value = self[path]
        if value is None:
            parent, _, name = path.rpartition(".")
            reasons = self[parent] if parent else self.document
            return self.computed(None, f"{path}: {reasons.get(f'{name}_reason', 'not recorded')}")
        value = value if scale == 1.0 else value / scale
        return replace(self.computed(value, path + UNITS.get(scale, "")), is_read=True)

    def row(self, where: str = "rows", *words: str, **key) -> Source:
        """The row of a list that has these values.  Raises UserError, naming file and row, if there is none.

        words: values as pages name them, as in 'rows, small, seq_len 128': text alone, others with their names."""
        named = [*words, *(value if isinstance(value, str) else f"{name} {value}" for name, value in key.items())]
        for row in self[where]:
            told = {value for value in row.values() if isinstance(value, str)} | {f"{k} {v}" for k, v in row.items()}
            if told.issuperset(words) and all(row.get(name) == value for name, value in key.items()):
                return Source(self.name, row, ", ".join([where, *named]), self.where)
        raise UserError(f"{self.name}: {where} has no {', '.join(named)}; was it written by another version?")

    def told(self, ids: str) -> dict[str, Answer]:
        """The answers to fields of which the page tells where in this document they are."""
        return {name: self.read_at(self.where[name].partition(" in `")[0]) for name in ids.split()}

    def read_at(self, where: str) -> Answer:
        place, path, scale = WHERE.search(where).groups("")
        return (self.row(*place.split(", ")) if place else self).answer(path, SCALES[scale])


class Results:
    """The result folders of an exercise, all in one folder."""

    def __init__(self, folder: Path, exercise: Exercise):
        self.folder, self.exercise = folder, exercise
        self.where = {field.id: field.where for field in fields(worksheet(exercise.text))}
        self.environment: dict | None = None  # of the first document that has one

    def read(self, pattern: str, file: str, **expected) -> Source:
        """The newest file of this name in a folder that matches the pattern; it must have the expected settings.

        Raises UserError, which names the command that writes a missing file, or the settings found instead.
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
                line = f"{path}: has {name} {settings.get(name)}, and exercise {self.exercise.number} needs {value}"
                raise UserError(f"{line}; {self.writer_of(pattern)}")
        return Source(str(path.relative_to(self.folder)), document, where=self.where)

    def run(self, pattern: str, **expected) -> Source:
        """The summary of a run, which must have been completed."""
        source = self.read(pattern, "performance_summary.json", **expected)
        if source["status"] != "completed":
            raise UserError(f"{self.folder / source.name}: the run was {source['status']}; {self.writer_of(pattern)}")
        return source

    def has(self, folder: str, file: str = "performance_summary.json") -> bool:
        """Whether there is such a file, of a completed run; for commands that not every machine can run."""
        document = read_document(self.folder / folder / file)
        return document is not None and document.get("status", "completed") == "completed"

    def writer_of(self, pattern: str) -> str:
        """Which command writes such folders, and which exercise the folder has results of instead."""
        chosen_by_launcher = pattern.startswith("performance_results")
        line = self.exercise.line_of("launch_performance_study.sh" if chosen_by_launcher else pattern)
        present = [number for number in exercises() if any(self.folder.glob(f"exercise{number}_*/"))]
        foreign = [] if self.exercise.number in present else present
        hint = f"; {self.folder} has results of exercise {foreign[0]}" if foreign else ""
        where = f"{self.exercise.name}:{line}" if line else self.exercise.name
        return f"the command in {where} writes it{hint}"


def machine(environment: dict) -> str:
    """The device, the versions and the date of a measurement."""
    threads = count_of(environment["cpu"]["torch_threads"], "thread")
    versions = f"torch {environment['packages']['torch']}, Python {environment['python']}"
    return f"{environment['device']['name']}, {threads}, {versions}, {environment['timestamp'][:10]}"


def settings_of(document: dict) -> dict:
    """The settings of a run, a prediction, a sweep or a benchmark."""
    sections = document.get("config", document)
    settings = {name: document[name] for name in ("size", "batch_size", "device_memory_mb") if name in document}
    for name in ("settings", "training", "profiling", "model"):
        settings |= sections.get(name, {})
    return settings
