"""What does the name of a kernel that multiplies tell beside that: types, tiles, what it is for?"""

import re
from functools import cache

from analysis.vocabulary.roles import table

# A tile of the output, M and N; in names of CUTLASS the shape of the instruction comes before it.
_TILE = re.compile(r"(?:_t?|_MT|_bt|tilesize|tile)(\d+)x(\d+)(?!\d*gemm)", re.IGNORECASE)
# Loads two or four bytes at a time, as the dimensions allow no more
MISALIGNED = r"_align[12](_|\b)"
HELPER, SKINNY, SHORT_QUERIES, GROUPED = "helper", "skinny", "short queries", "grouped"  # uses
_TYPES = table("types that kernels multiply")  # patterns, by type
_USES = table("uses of kernels")  # patterns, by use


@cache
def multiplied_type(name: str) -> str | None:
    """The type that a kernel of this name multiplies; None: the name does not tell."""
    return _first_named(_TYPES, name)


@cache
def tile(name: str) -> tuple[int, int] | None:
    """The tile of the output that a block of this kernel computes."""
    sides = _TILE.search(name)
    return (int(sides[1]), int(sides[2])) if sides else None


@cache
def use(name: str) -> str | None:
    """HELPER, SKINNY, SHORT_QUERIES or GROUPED, if the name tells one."""
    return _first_named(_USES, name)


def _first_named(patterns: dict[str, str], name: str) -> str | None:
    """The first key whose pattern is found in the name, upper or lower case."""
    for key, pattern in patterns.items():
        if re.search(pattern, name, re.IGNORECASE):
            return key
    return None
