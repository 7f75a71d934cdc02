"""In which words does an answer say what to do?

Three people read one: who runs our model, who runs a program of their own, and who has only the
file that somebody sent.  The first has our flags, the second can change lines of code and record
the program again, the third can look at what the file has, and ask.
"""

from enum import Enum
from typing import NamedTuple


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
