"""What is an operator in a pattern of operators?  A letter, by its name alone: patterns are regular
expressions.

A pattern is written in words, such as `matmul copy* softmax`, each of which stands for a letter.
"""

import re
from typing import NamedTuple

from analysis.vocabulary.operators import is_view_or_metadata_op
from analysis.vocabulary.roles import table


class Letter(NamedTuple):
    letter: str
    pattern: str  # found in the name of such an operator


OPERATORS = {word: Letter(*text.split(" ", 1)) for word, text in table("letters").items()}
OTHER, BOUNDARY = ".", "|"  # any other operator that works; what no region reaches across
LETTERS = {word: operator.letter for word, operator in OPERATORS.items()}
LETTERS["rotary"] = "R"  # what such operators become
LETTERS["boundary"] = BOUNDARY


def letter_of(name: str) -> str:
    """The letter of an operator; none, '', of one that makes a view,
    allocates, or only calls others."""
    for operator in OPERATORS.values():
        if re.search(operator.pattern, name):
            return operator.letter
    return "" if is_view_or_metadata_op(name) else OTHER


def in_letters(pattern: str) -> str:
    """A pattern in words as a regular expression of letters,
    such as 'mc*s' of 'matmul copy* softmax'."""
    return re.sub("[a-z_]+", lambda word: LETTERS[word[0]], pattern).replace(" ", "")
