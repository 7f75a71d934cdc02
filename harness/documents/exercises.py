"""The answers to an exercise: answers_N.json."""

from __future__ import annotations

from typing import Any

from harness.schema import Document, field


class ExerciseCommand(Document):
    command: str = field("the first command of a shell block")
    seconds: float | None = field("of the block", null="skipped here")


class ExerciseAnswer(Document):
    value: Any | None = field("of the field", null="this machine cannot determine it")
    evidence: str = field("file and field that it comes from, or why there is none")


class ExerciseAnswers(Document):
    exercise: int = field("its number")
    text: str = field("file name of the exercise")
    environment: dict[str, Any] = field("that of the results, without the command line")
    answers: dict[str, ExerciseAnswer] = field("by field")
    commands: list[ExerciseCommand] | None = field(
        "how long each took", null="the commands were run by hand"
    )
