"""Values as people write them into a worksheet: numbers, names, choices; and when two are equal."""

import re
from dataclasses import dataclass

from workshop.exercise.results import TOLERANCE

NUMBER = re.compile(
    r"^[~≈]?\s*"
    r"(?P<number>[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:(?<=\d)[eE][-+]?\d+)?)"
    r"\s*(?P<unit>.*)$"
)


@dataclass(frozen=True)
class Number:
    """A number as written, and how far it may be from what was rounded to it."""

    value: float
    rounding: float

    def agrees_with(self, right: float, tolerance: float = TOLERANCE) -> bool:
        """Equal within the tolerance (relative), or within the rounding."""
        return abs(self.value - right) <= max(tolerance * abs(right), self.rounding)


def number_in(text: str, unit: str) -> Number:
    """The number in a field, which is in the field's unit, whether that is written or not.

    Raises ValueError, which says what is wrong.
    """
    match = NUMBER.match(text.strip())
    if not match or not re.search(r"\d", match["number"]):
        raise ValueError(f"is no number: {text!r}")
    given = match["unit"].strip()
    if given and not is_unit(given, unit):
        raise ValueError(f"the field is in {unit}, and not in {given!r}")
    digits = re.sub(r"[-+,]|[eE].*", "", match["number"])
    # A single digit, or an exponent, does not tell how it was rounded.
    has_exponent = "e" in match["number"].lower()
    is_rounded = len(digits.replace(".", "").strip("0")) > 1 and not has_exponent
    decimals = len(digits.partition(".")[2])
    rounding = 0.50005 * 10.0**-decimals if is_rounded else 0.0
    return Number(float(match["number"].replace(",", "")), rounding)


def is_unit(given: str, unit: str) -> bool:
    """Whether it is the unit; a word may be singular: `1 call` in a field of calls."""
    if given == unit:
        return True
    is_word = unit.isalpha() and unit.islower() and len(unit) > 2
    return is_word and given == unit.removesuffix("s")


def choice(text: str) -> str:
    """A choice in a form that can be compared: `Compute-bound` is `compute`."""
    return plain(text).removesuffix("bound")


def chosen(text: str, choices: list[str]) -> str | None:
    """The choice that is meant: as it stands there, or by a part of it that no other choice has.
    None if it is none of them, or could be several."""
    written = choice(text)
    by_name = {choice(one): one for one in choices}
    if written in by_name:
        return by_name[written]
    matching = []
    for name, one in by_name.items():
        if written and written in name:
            matching.append(one)
    return matching[0] if len(matching) == 1 else None


def plain(text: str) -> str:
    """A name without case, punctuation and the prefix aten::."""
    return re.sub(r"[\s`*_-]+", "", text.casefold()).removeprefix("aten::")
