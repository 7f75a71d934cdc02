"""The answers to an exercise: answers_N.json."""

from __future__ import annotations

from typing import Any

from typing_extensions import TypedDict


class ExerciseCommand(TypedDict):
    command: str  # the first command of a shell block
    seconds: float | None  # of the block; null: skipped here


class ExerciseAnswers(TypedDict):
    exercise: int
    text: str  # file name of the exercise
    environment: dict[str, Any]  # as in config.json, without the command line
    answers: dict[str, dict[str, Any]]  # by field: value (null if this machine cannot determine it) and evidence
    commands: list[ExerciseCommand] | None  # how long each took; null: they were run by hand
