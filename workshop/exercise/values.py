"""Values as people write them into a worksheet: numbers with units, names, choices; and when two
are equal."""

import re
from dataclasses import dataclass
from pathlib import Path

from harness.base.text import read_ini
from workshop.exercise.results import TOLERANCE

_TABLES = read_ini(Path(__file__).with_name("units.ini"))
UNITS = {
    name: {unit: int(scale) for unit, scale in _TABLES[name].items()} for name in _TABLES.sections()
}
NUMBER = re.compile(
    r"^[~≈]?\s*(?P<number>[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:(?<=\d)[eE][-+]?\d+)?)\s*(?P<unit>.*)$"
)


@dataclass(frozen=True)
class Number:
    """A number as written, in the unit that was asked for, and how far it may be from what was
    rounded to it."""

    value: float
    rounding: float

    def agrees_with(self, right: float, tolerance: float = TOLERANCE) -> bool:
        """Equal within the tolerance (relative), or within the rounding."""
        return abs(self.value - right) <= max(tolerance * abs(right), self.rounding)


def number_in(text: str, unit: str) -> Number:
    """The number in a field, converted to the field's unit; without a unit it is in that of the
    field.

    Raises ValueError, which says what is wrong.
    """
    match = NUMBER.match(text.strip())
    if not match or not re.search(r"\d", match["number"]):
        raise ValueError(f"is no number: {text!r}")
    scale = factor(match["unit"].strip(), unit)
    digits = re.sub(r"[-+,]|[eE].*", "", match["number"])
    # A single digit, or an exponent, does not tell how it was rounded.
    rounded = len(digits.replace(".", "").strip("0")) > 1 and "e" not in match["number"].lower()
    last = 10.0 ** -len(digits.partition(".")[2]) if rounded else 0.0
    return Number(float(match["number"].replace(",", "")) * scale, 0.50005 * last * scale)


def factor(given: str, wanted: str) -> float:
    """From one unit to another.  Raises ValueError if it is unknown, or measures something else."""
    found, asked = quantity_of(given), quantity_of(wanted)
    same = (
        given.rstrip("s") == wanted.rstrip("s")
        if found is asked is None
        else given.casefold() == wanted.casefold()
    )
    if same or not given:  # `1 call` in a field of calls
        return 1.0
    if found is None:
        raise ValueError(f"{given!r} is no unit of {wanted}")
    if found != asked:
        raise ValueError(
            f"{given} is {found}, and the field is in {wanted}{f', {asked}' if asked else ''}"
        )
    return scale_of(given, found) / scale_of(wanted, found)


def quantity_of(unit: str) -> str | None:
    """What a unit measures.  FLOPS is a rate and FLOPs are a number,
    so that case is looked at first."""
    exact = (name for name, units in UNITS.items() if unit in units)
    folded = (name for name, units in UNITS.items() if unit.casefold() in map(str.casefold, units))
    return next(exact, None) or next(folded, None)


def scale_of(unit: str, quantity: str) -> float:
    units = UNITS[quantity]
    return units.get(unit) or next(
        scale for name, scale in units.items() if name.casefold() == unit.casefold()
    )


def choice(text: str) -> str:
    """A choice in a form that can be compared: `Compute-bound` is `compute`."""
    return plain(text).removesuffix("bound")


def plain(text: str) -> str:
    """A name without case, punctuation and the prefix aten::."""
    return re.sub(r"[\s`*_-]+", "", text.casefold()).removeprefix("aten::")
