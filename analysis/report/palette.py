"""Colors: one for each part of a model, fixed by its name alone, so that it is the same in every
figure and report.

A family of parts shares a hue.  Its parts have shades by what such parts are usually called, ours
among them, else by chance.
"""

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from analysis.vocabulary.kernel_classes import CLASS_OF_NAME
from harness.base.text import read_ini


class Shade(NamedTuple):
    """A color, and a pattern in the names of the parts that have it."""

    pattern: str
    color: str


class Family(NamedTuple):
    """Parts that share a hue: a pattern in their names, and their shades."""

    pattern: str
    shades: list[Shade]


def _family(pattern: str, text: str) -> Family:
    """A row of the table of families: shades are pairs of a pattern and a color."""
    words = text.split()
    pairs = zip(words[::2], words[1::2], strict=True)
    return Family(pattern, [Shade(*pair) for pair in pairs])


_TABLES = read_ini(Path(__file__).with_suffix(".ini"))
FAMILIES = [_family(*row) for row in _TABLES["families"].items()]
PHASE_COLORS = dict(_TABLES["phases"])
MEMORY_COLORS = dict(_TABLES["memory"])
HATCHES = dict(_TABLES["hatches"])
GRAY = "#c8c8c8"
# What is compared and is no part of a model, such as batch sizes: color, marker and dashes.
_COLORS = "#0072b2 #d55e00 #009e73 #cc79a7 #e69f00 #56b4e9 #222222 #8c6d31".split()
_DASHES = (
    "-",
    (0, (5, 2)),
    (0, (1, 1)),
    (0, (5, 1, 1, 1)),
    (0, (8, 3)),
    (0, (3, 1, 1, 1, 1, 1)),
    "-.",
    "--",
)
SERIES = tuple(zip(_COLORS, "os^DvPX<", _DASHES, strict=True))


@cache
def color_of(part: str) -> str:
    """That of its class of kernels, else of its family and, if its name tells one, of its shade."""
    if part in CLASS_OF_NAME:
        return CLASS_OF_NAME[part].color
    family = FAMILIES[_first_of(FAMILIES, part)]  # the last one has every name
    shade = _first_of(family.shades, part)
    if shade is None:
        shade = crc32(part.encode(errors="replace")) % len(family.shades)
    return family.shades[shade].color


def _first_of(rows: list[Family] | list[Shade], part: str) -> int | None:
    """The first row whose pattern is in the name of a part."""
    for number, row in enumerate(rows):
        if re.search(row.pattern, part, re.IGNORECASE):
            return number
    return None


def series(n: int) -> tuple:
    """Color, marker and dashes of the n-th series."""
    return SERIES[n % len(SERIES)]


def text_color(background: str) -> str:
    """Black or white, whichever is easier to read on it."""
    red, green, blue = (int(background[i : i + 2], 16) for i in (1, 3, 5))
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 140 else "black"
