"""What does the name of a kernel that multiplies tell beside that: types, tiles, what it is for?"""

import re
from functools import cache

from analysis.vocabulary.roles import table

# A tile of the output, M and N; in names of CUTLASS the shape of the instruction comes before it.
_TILE = re.compile(r"(?:_t?|_MT|_bt|tilesize|tile)(\d+)x(\d+)(?!\d*gemm)", re.IGNORECASE)
MISALIGNED = (
    r"_align[12](_|\b)"  # loads two or four bytes at a time, as the dimensions allow no more
)
HELPER, SKINNY, SHORT_QUERIES, GROUPED = "helper", "skinny", "short queries", "grouped"  # uses
_TYPES, _USES = table("types that kernels multiply"), table("uses of kernels")


@cache
def multiplied_type(name: str) -> str | None:
    """The type that a kernel of this name multiplies; None: the name does not tell."""
    return next(
        (kind for kind, pattern in _TYPES.items() if re.search(pattern, name, re.IGNORECASE)), None
    )


@cache
def tile(name: str) -> tuple[int, int] | None:
    """The tile of the output that a block of this kernel computes."""
    found = _TILE.search(name)
    return (int(found[1]), int(found[2])) if found else None


@cache
def use(name: str) -> str | None:
    """HELPER, SKINNY, SHORT_QUERIES or GROUPED, if the name tells one."""
    return next(
        (one for one, pattern in _USES.items() if re.search(pattern, name, re.IGNORECASE)), None
    )
