"""What is asked of a learner's code, and what was found instead."""

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple


class Finding(NamedTuple):
    """One thing that is asked.  problem: what was expected and what was found; None if it is as
    asked."""

    asked: str
    problem: str | None = None


class Unfit(Exception):
    """A file that cannot be checked, with the reason: it lacks a function."""


def function_of(module: ModuleType, name: str, signature: str) -> Callable:
    """Raises Unfit if the learner's file does not define it."""
    function = getattr(module, name, None)
    if not callable(function):
        raise Unfit(f"has no function {name}; expected `def {name}{signature}:`")
    return function


def differs(what: str, expected: str, found: object) -> str:
    return f"{what}: expected {expected}, found {found}"
