"""What can be changed in any training program, and its line of code: one record each, a section of
changes.ini.

A new one is a section there, a switch in harness/program/hooks/switches.py that makes it from
outside, and a test.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from harness.base.text import read_ini

EXACT, ROUNDING, PRECISION, OTHER_DATA = "bit-equal", "rounding", "lower precision", "other data"


class Change(NamedTuple):
    """As changes.ini says."""

    name: str
    of: str
    may: str
    sign: str  # what is counted where it took effect
    applied: str  # the same in words, with {n}
    without: str  # why there may be no sign
    lines: Mapping[
        str, str
    ]  # by who trains: "line" of a loop of one's own, else that of the trainer of this name
    effect: str = ""
    answers: tuple[str, ...] = ()
    value: str | None = None
    by_default: bool = True

    def line(
        self, name: str = "model", value: str | None = None, trainer: str = "", way: str = "line"
    ) -> str:
        """way: `line`, or `whole` where that of torch's own classes has to be another."""
        line = self.lines.get(trainer, self.lines[way])
        return line.format(name=name or "model", value=value or self.value)


def _record(name: str, of: Mapping[str, str]) -> Change:
    answers, by_default = (of["answers"],) if "answers" in of else (), "named" not in of
    signs = of["sign"], of["applied"], of["without"]
    return Change(
        name,
        of["of"],
        of["may"],
        *signs,
        dict(of),
        of.get("effect", ""),
        answers,
        of.get("value"),
        by_default,
    )


_TABLE = read_ini(Path(__file__).with_suffix(".ini"))
CHANGES = {name: _record(name, _TABLE[name]) for name in _TABLE.sections()}


def change_of(one: str) -> tuple[Change, str | None]:
    """The record and the value of NAME or NAME=VALUE."""
    name, _, value = one.partition("=")
    return CHANGES[name], value or CHANGES[name].value
