"""Who reads an answer, and so in which words does it say what to do?

Three people read one: who runs our model, who runs a program of their own, and who has only the
file that somebody sent.  The first has our flags, the second can change lines of code and record
the program again, the third can look at what the file has, and ask.
"""

import shlex
from enum import Enum
from typing import NamedTuple

from harness import PROJECT
from harness.base.text import path_from_here


class Reader(str, Enum):
    OUR_MODEL = "runs our model"
    OWN_PROGRAM = "runs a program of their own"
    FILE_ONLY = "has only the file"


class Words(NamedTuple):
    """A text for each of the three, with {placeholders} for what the trace tells."""

    our_model: str
    own_program: str
    file_only: str

    def to(self, reader: str) -> str:
        texts = {Reader.OUR_MODEL: self.our_model, Reader.OWN_PROGRAM: self.own_program}
        return texts.get(reader, self.file_only)


def the_same(text: str) -> Words:
    """For all three."""
    return Words(text, text, text)


def who_reads(summary: dict | None) -> Reader:
    """By performance_summary.json of the run: without one, only the file is known."""
    if summary is None:
        return Reader.FILE_ONLY
    model = summary.get("config", {}).get("model", {})
    if "program" in model or "file" in model:  # of profile_program.py; of --workload
        return Reader.OWN_PROGRAM
    return Reader.OUR_MODEL


def command_of(summary: dict | None) -> str | None:
    """The command that ran what was recorded, as it can be typed again; None: nothing tells it."""
    command = summary and summary["environment"].get("command_line")
    if not command:
        return None
    return shlex.join(
        word for word in shlex.split(command) if word != "--system-profiler"
    )  # set by its launcher


def recording_again(summary: dict | None, flag: str) -> str | None:
    """The command that records the run again with this flag, which our scripts and
    profile_program.py both have; None: nothing tells it."""
    command = command_of(summary)
    if command is None:
        return None
    if "program" in summary["config"].get("model", {}):
        return f"python3 {path_from_here(PROJECT / 'profile_program.py')} {flag} -- {command}"
    return f"{command} {flag}"
