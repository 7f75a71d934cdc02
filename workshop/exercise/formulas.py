"""Formulas of a page: paths into JSON documents, arithmetic with them, and with other fields of the
page.

`timings_ms.forward.median` leads into objects.  `rows['small', 'seq_len 128'].step_ms` is a field
of the row with these values: text alone, others with their names; `*` stands for anything, and a
set of values for any of them.  Of several rows it is a list, without those that are unknown.
`#3.4` is the field of that number.
"""

import math
import operator
import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase

from harness.base.units import KB, MB


class Unknown(Exception):
    """A value that this machine does not have; its text is the reason."""


class NoSuchPath(Exception):
    """A path that leads nowhere."""


class Record:
    """A JSON object, whose fields are attributes."""

    def __init__(self, fields: dict, place: str = ""):
        self._fields, self._place = fields, place  # where in the document

    def __contains__(self, name: str) -> bool:
        """Whether the field is known."""
        return self._fields.get(name) is not None

    def __getattr__(self, name: str):
        if name not in self._fields:
            raise NoSuchPath(
                f"{self._place} has no {name}; was it written by another version?".strip()
            )
        value = self._fields[name]
        if value is None:
            raise Unknown(f"{name}: {self._fields.get(f'{name}_reason', 'not recorded')}")
        return viewed(value, f"{self._place}, {name}".removeprefix(", "))

    def __getitem__(self, name: str):  # for names with blanks
        return getattr(self, name)

    def has(self, wanted: str | set[str]) -> bool:
        """Whether a value of it is this one, or one of these."""
        patterns = {wanted} if isinstance(wanted, str) else wanted
        for value in values_told(self._fields):
            if any(fnmatchcase(value, pattern) for pattern in patterns):
                return True
        return False


def values_told(fields: dict, prefix: str = "") -> Iterator[str]:
    """Values as pages name them: text, and `name value`; of an object in a row, `outer.inner
    value`."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from values_told(value, f"{prefix}{name}.")
            continue
        if isinstance(value, str):
            yield value
        yield f"{prefix}{name} {value}"


class Rows:
    """A JSON list."""

    def __init__(self, values: list, place: str):
        self._values, self._place = values, place

    def __iter__(self) -> Iterator:
        return (viewed(value, self._place) for value in self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __eq__(self, other) -> bool:
        return self._values == (other._values if isinstance(other, Rows) else other)

    def __getattr__(self, name: str):
        """The field of each row that knows it; of one row, its value."""
        if len(self) == 1:
            return getattr(viewed(self._values[0], self._place), name)
        known = [getattr(row, name) for row in self if name in row]
        if not known:
            why = f"no row has a {name}" if len(self) else "there are none"
            raise Unknown(f"{self._place}: {why}")
        return known

    def __getitem__(self, key):
        if isinstance(key, int | slice):
            try:
                return viewed(self._values[key], self._place)
            except IndexError:
                raise Unknown(f"{self._place}: there are {len(self)}") from None
        words = key if isinstance(key, tuple) else (key,)
        rows = []
        for row in self._values:
            record = Record(row, self._place)
            if all(record.has(word) for word in words):
                rows.append(row)
        shown = ", ".join(map(str, words))
        if not rows:
            raise NoSuchPath(f"{self._place}: no row has {shown}")
        return Rows(rows, f"{self._place}, {shown}")


def viewed(value, place: str):
    """A value of a document, as a formula reads it."""
    if isinstance(value, dict):
        return Record(value, place)
    if isinstance(value, list):
        return Rows(value, place)
    return value


def listed(value) -> list:
    return [value] if isinstance(value, bool | int | float | str) else list(value)


def of_list(function: Callable) -> Callable:
    """The function, of a list or of a single value."""
    return lambda values: function(listed(values))


def unknown(reason: str):
    raise Unknown(reason)


FUNCTIONS: dict[str, Callable | int] = {
    "sum": of_list(sum),
    "min": of_list(min),
    "max": of_list(max),
    "all": of_list(all),
    "any": of_list(any),
    "len": of_list(len),
    "first": of_list(operator.itemgetter(0)),
    "least": lambda named: min(named, key=named.get),  # the name of the smallest
    "abs": abs,
    "ceil": math.ceil,
    "log2": math.log2,
    "sqrt": math.sqrt,
    "unknown": unknown,
    "MB": MB,
    "KB": KB,
}


class Names(dict):
    """What a formula may name: the functions, and the fields of a document, which is read when one
    of them is named."""

    def __init__(self, read: Callable[[str], object], field: Callable[[str], object]):
        super().__init__(FUNCTIONS, __builtins__={}, field=field)
        self.read = read

    def __missing__(self, name: str):
        return self.read(name)


def evaluate(formula: str, read: Callable[[str], object], field: Callable[[str], object]):
    """The value of a formula, which is code, and so of the project's own pages alone.

    read: the field of the document with this name; field: the value of another field.

    Raises Unknown; NoSuchPath; and what Python raises if the formula is none,
    or does not fit the values."""
    value = eval(re.sub(r"#((?:\d+|R)\.\d+)", r"field('\1')", formula), Names(read, field))
    if not isinstance(value, bool | int | float | str):
        raise TypeError("is not a single value")
    return value
