"""Colors: one for each part of a model, fixed by its name alone, so that it is the same in every figure and report.

A family of parts shares a hue and a hatching, which tells families apart without color.  Parts of other models may get
the same color: a figure tells them apart by more hatching.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from itertools import combinations
from typing import NamedTuple
from zlib import crc32


class Family(NamedTuple):
    """Parts that belong together: those of the workshop's model by name, those of other models by pattern."""

    pattern: str  # in a name of another model; the first family whose pattern matches gets it
    hatch: str
    members: dict[str, str]  # colors, in the order in which a step runs the parts


FAMILIES = (
    Family(r"^data$|copy|memcpy|memset|dataloader", "--", {"data": "#f2c200", "copy": "#f9e27d"}),
    Family(r"communication|all_?(reduce|gather)|DataParallel", "\\\\", {"communication": "#d81b7f"}),
    Family(r"optimizer|adam|sgd|gradient acc", "xx", {"gradient accumulation": "#e57368", "optimizer": "#b3261e"}),
    Family(
        r"embed|lm_?head|lossfunction|^loss|prediction|classifier",
        "++",
        {"embedding": "#b39ddb", "lm_head": "#6a3d9a", "loss": "#9575cd"},
    ),
    Family(
        r"norm",
        "..",
        {"attention_norm": "#2e7d32", "mlp_norm": "#74b978", "norm": "#aed9b0", "normalization": "#4f9a54"},
    ),
    Family(
        r"attention|attn|softmax|rope|rotary",
        "",
        {
            "attention.q_proj": "#1f4e8c", "attention.k_proj": "#5b8ecb", "attention.v_proj": "#9cc0e7",
            "attention.qkv_proj": "#27619f",
            "attention.rope": "#2c6fb7", "attention.scores": "#0b3566", "attention.softmax": "#7fabdc",
            "attention.weighted_sum": "#3f7fc4", "attention.sdpa": "#174a7e", "attention.o_proj": "#b9d4ef",
            "attention_residual": "#d5e5f5", "attention": "#3a6ea5",
        },
    ),
    Family(
        r"mlp|ffn|feed_?forward|intermediate|[gs][ei]lu|relu|activation|expert",
        "//",
        {
            "mlp.gate_proj": "#d9660a", "mlp.up_proj": "#f7a95c", "mlp.gate_up_proj": "#e88a35",
            "mlp.activation": "#b04c00", "mlp.down_proj": "#ef8a2b", "mlp_residual": "#fcdcb8",
        },
    ),
    Family(r"matmul|linear|conv|\bmm\b|gemm", "||", {"matmul": "#00796b", "convolution": "#4db6ac"}),
    Family(r"element|reduc|pool", "oo", {"element-wise": "#8d6e63", "reduction": "#c8b3aa"}),
    Family(r"", "**", dict(zip("abcd", ("#00838f", "#4fb3bf", "#80cbc4", "#006064"), strict=True))),  # any other part
    # No pattern: nothing else belongs to these.
    Family(r"(?!)", "", {"framework overhead": "#9a9a9a", "unattributed": "#404040", "other": "#c8c8c8"}),
    Family(r"(?!)", "", {"idle": "#e6e6e6"}),
)  # fmt: skip
MARKS = "-|/\\.ox+*"  # sparser than the hatching of a family, which is doubled
GRAY = "#c8c8c8"
# Phases and categories of memory; those that are a part of the model as well have its color.
PHASE_COLORS = {"data": "#f2c200", "forward": "#546e7a", "backward": "#a3b4bd", "optimizer": "#b3261e"}
MEMORY_COLORS = {
    "parameters": "#34495e",
    "gathered parameters": "#7f93a8",
    "optimizer": "#b3261e",
    "buffers": "#bab0ac",
    "gradients": "#e57368",
    "buckets": "#f2c200",
    "activations": "#00796b",
    "temporaries": "#80cbc4",
}
HATCHES = {"backward": "//", "optimizer": "xx", "data": "--", "gradients": "..", "temporaries": "//", "buffers": "\\\\"}
# What is compared and is no part of a model, such as batch sizes: color, marker and dashes.
SERIES = tuple(
    zip(
        ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#222222", "#8c6d31"),
        "os^DvPX<",
        ("-", (0, (5, 2)), (0, (1, 1)), (0, (5, 1, 1, 1)), (0, (8, 3)), (0, (3, 1, 1, 1, 1, 1)), "-.", "--"),
        strict=True,
    )
)


@cache
def place_of(part: str) -> tuple[int, int]:
    """The numbers of its family and of its shade: the order in which figures stack and list parts."""
    for number, family in enumerate(FAMILIES):
        if part in family.members:
            return number, list(family.members).index(part)
    number = next(i for i, family in enumerate(FAMILIES) if re.search(family.pattern, part, re.IGNORECASE))
    return number, crc32(part.encode(errors="replace")) % len(FAMILIES[number].members)


def color_of(part: str) -> str:
    family, shade = place_of(part)
    return list(FAMILIES[family].members.values())[shade]


def hatch_of(part: str) -> str:
    return FAMILIES[place_of(part)[0]].hatch


def hatches_of(parts: Iterable[str]) -> dict[str, str]:
    """Hatching of each part in a figure: that of its family, with more lines for a part that would look like another.

    The workshop's own parts keep theirs, so that they are the same in every figure.
    """
    out: dict[str, str] = {}
    taken = set()
    for part in sorted({*parts}, key=lambda part: (part not in FAMILIES[place_of(part)[0]].members, part)):
        hatch, color = hatch_of(part), color_of(part)
        marks = [mark for mark in MARKS if mark not in hatch]
        more = ("".join(some) for n in range(len(marks)) for some in combinations(marks, n))
        out[part] = next(hatch + one for one in more if (color, hatch + one) not in taken)
        taken.add((color, out[part]))
    return out


def in_order(parts: Iterable[str]) -> list[str]:
    return sorted(parts, key=lambda part: (*place_of(part), part))


def series(n: int) -> tuple:
    """Color, marker and dashes of the n-th series."""
    return SERIES[n % len(SERIES)]


def text_color(background: str) -> str:
    """Black or white, whichever is easier to read on it."""
    red, green, blue = (int(background[i : i + 2], 16) for i in (1, 3, 5))
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 140 else "black"
