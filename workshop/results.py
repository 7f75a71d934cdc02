"""What the commands of an exercise have left in a folder, and an answer with its evidence."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.documents import read_document
from harness.errors import UserError
from workshop.texts import Exercise, exercises

TOLERANCE = 0.02  # of a number that was read from a screen


@dataclass(frozen=True)
class Answer:
    """What belongs in a field, and where it was read or how it was computed.  None where this machine cannot tell."""

    value: float | int | str | bool | None
    evidence: str
    tolerance: float = TOLERANCE  # relative; what is computed from rounded readings can be further off


class Source:
    """A JSON document of a results folder."""

    def __init__(self, name: str, document: dict):
        self.name, self.document = name, document

    def __getitem__(self, path: str):
        """The value at a dotted path.  Raises UserError, naming file and path, if there is none."""
        value = self.document
        try:
            for part in path.split("."):
                value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, TypeError):
            raise UserError(f"{self.name}: has no {path}; was it written by another version?") from None
        return value

    def answer(self, path: str, scale: float = 1.0) -> Answer:
        """The value at a dotted path, divided by the scale; its reason as evidence where it is null."""
        value = self[path]
        if value is None:
            return Answer(None, self.reason(path))
        scaled = value / scale if scale != 1.0 else value
        return Answer(scaled, f"{self.name}: {path}")

    def reason(self, path: str) -> str:
        parent, _, name = path.rpartition(".")
        return (self[parent] if parent else self.document).get(f"{name}_reason", "not recorded")

    def says(self, value, text: str) -> Answer:
        """An answer that was worked out from this document."""
        return Answer(value, f"{self.name}: {text}")

    def from_rows(self, rows: list[dict], label: Callable[[dict], str], work: Callable[..., tuple]) -> Answer:
        """From work(*rows) of a sweep, a value and its evidence; the reason where one of them was not measured."""
        for row in rows:
            if row["status"] != "ok":
                return self.says(None, f"rows, {label(row)}: {row['status']}, {row['reason']}")
        value, text = work(*rows)
        return self.says(value, f"rows, {text}")


def holds(answer: Answer, rule: Callable) -> Answer:
    """The rule on an answer, with the evidence of it."""
    return Answer(None if answer.value is None else rule(answer.value), answer.evidence)


def share(part: float, whole: float) -> float:
    """Percent."""
    return 100.0 * part / whole


class Results:
    """The result folders of one exercise, below a folder."""

    def __init__(self, folder: Path, exercise: Exercise):
        self.folder, self.exercise = folder, exercise
        self.environment: dict | None = None  # of the first document that was read and has one

    def read(self, pattern: str, file: str, **expected) -> Source:
        """The newest folder of the pattern with such a file, which must be of the settings that are expected.

        Raises UserError that says which command writes what is missing, or what was found instead.
        """
        found = [path for path in self.folder.glob(f"{pattern}/{file}") if path.is_file()]
        if not found:
            raise UserError(f"{self.folder / pattern / file} is missing: {self.writer_of(pattern)}")
        path = max(found, key=lambda path: path.stat().st_mtime)
        document = read_document(path)
        if document is None:
            raise UserError(f"{path}: is no document of the workshop; {self.writer_of(pattern)}")
        self.environment = self.environment or document.get("environment")
        source = Source(str(path.relative_to(self.folder)), document)
        settings = settings_of(document)
        for name, value in expected.items():
            if settings.get(name) != value:
                raise UserError(
                    f"{path}: is of {name} {settings.get(name)}, and exercise {self.exercise.number} of {value}; "
                    f"{self.writer_of(pattern)}"
                )
        return source

    def completed(self, name: str) -> bool:
        """Whether there is such a run and it came to its end; for runs that not every machine can do."""
        document = read_document(self.folder / name / "performance_summary.json")
        return document is not None and document["status"] == "completed"

    def run(self, pattern: str, **expected) -> Source:
        source = self.read(pattern, "performance_summary.json", **expected)
        if source["status"] != "completed":
            raise UserError(f"{self.folder / source.name}: the run {source['status']}; {self.writer_of(pattern)}")
        return source

    def writer_of(self, pattern: str) -> str:
        """Which command writes it, or whose results stand there instead."""
        word = pattern.rstrip("*").rstrip("_")
        line = self.exercise.line_of(word) or self.exercise.line_of(f"run_{word}") or self.launcher_line(word)
        present = [number for number in exercises() if any(self.folder.glob(f"exercise{number}_*/"))]
        foreign = [] if self.exercise.number in present else present
        hint = f"; {self.folder} holds results of exercise {foreign[0]}" if foreign else ""
        where = f"{self.exercise.name}:{line}" if line else self.exercise.name
        return f"the command in {where} writes it{hint}"

    def launcher_line(self, word: str) -> int | None:
        for prefix, command in LAUNCHERS.items():
            if word.startswith(prefix):
                return self.exercise.line_of(command)
        return None


# Result folders that a launcher names, and the launcher.
LAUNCHERS = {
    "baseline_results": "run_baseline.sh",
    "profiler_results": "run_pytorch_profiler.sh",
    "flops_results": "run_deepspeed_flops.sh",
    "performance_results": "launch_performance_study.sh",
}


def settings_of(document: dict) -> dict:
    """The flags and the model that a document is of."""
    config = document.get("config", document)
    if "size" in document:  # of a benchmark
        return {name: document.get(name) for name in ("size", "batch_size")}
    memory = {"device_memory_mb": document["device_memory_mb"]} if "device_memory_mb" in document else {}
    return memory | config.get("arguments", config.get("training", {})) | config.get("model", {})


def significant(value: float, digits: int = 4) -> str:
    """A number for a person: thousands apart, four significant digits, whole numbers whole."""
    if isinstance(value, int) or value == 0:
        return f"{value:,}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}" if decimals <= 8 else f"{value:.{digits - 1}e}"


def shown(answer: Answer) -> str:
    """What stands in the field."""
    if answer.value is None:
        return "not given here"
    if isinstance(answer.value, bool):
        return "x" if answer.value else " "
    return significant(answer.value) if isinstance(answer.value, int | float) else answer.value
