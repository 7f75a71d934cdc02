"""Colors: one for each part of a model, fixed by its name alone, so that it is the same in every figure and report.

A family of parts shares a hue.  Its parts have shades by what such parts are usually called, ours among them, else by
chance.
"""

import re
from functools import cache
from zlib import crc32

# Parts that belong together: a pattern in their names, the first of which counts that is found, and their shades:
# each a further pattern in the name, and a color.
FAMILIES = tuple(
    (pattern, tuple(zip(shades.split()[::2], shades.split()[1::2], strict=True)))
    for pattern, shades in (
        ("^data$|copy|memcpy|memset|dataloader", "data #f2c200 copy|mem #f9e27d"),
        ("communication|all_?(reduce|gather)|DataParallel", "comm #d81b7f"),
        ("optimizer|adam|sgd|gradient acc", "gradient #e57368 optimizer #b3261e"),
        ("embed|lm_?head|lossfunction|^loss|prediction|classifier", "emb #b39ddb head #6a3d9a loss #9575cd"),
        ("norm", "att|input #2e7d32 mlp|ffn|post #74b978 norm$ #aed9b0 normalization #4f9a54"),
        (
            "attention|attn|softmax|rope|rotary",
            r"qkv #27619f \bq_|query #1f4e8c \bk_|key #5b8ecb \bv_|value #9cc0e7 rope|rotary #2c6fb7"
            r" scores #0b3566 softmax #7fabdc weighted #3f7fc4 sdpa|flash #174a7e \bo_|out #b9d4ef residual #d5e5f5"
            r" ^attention$ #3a6ea5",
        ),
        (
            "mlp|ffn|feed_?forward|intermediate|[gs][ei]lu|relu|activation|expert",
            "gate_up #e88a35 gate #d9660a up #f7a95c act|lu #b04c00 down #ef8a2b residual #fcdcb8",
        ),
        (r"matmul|linear|conv|\bmm\b|gemm", "matmul|linear|mm #00796b conv #4db6ac"),
        ("element|reduc|pool", "element #8d6e63 reduc|pool #c8b3aa"),
        ("^(?!(framework overhead|unattributed|other|idle)$)", "^$ #00838f ^$ #4fb3bf ^$ #80cbc4 ^$ #006064"),
        ("^(?!idle$)", "overhead #9a9a9a unattributed #404040 other #c8c8c8"),
        ("", "idle #e6e6e6"),
    )
)
GRAY = "#c8c8c8"
# Phases and categories of memory; those that are a part of the model as well have its color.
PHASE_COLORS = {"data": "#f2c200", "forward": "#546e7a", "backward": "#a3b4bd", "optimizer": "#b3261e"}
MEMORY_COLORS = {"parameters": "#34495e", "gathered parameters": "#7f93a8", "optimizer": "#b3261e"}
MEMORY_COLORS |= {"buffers": "#bab0ac", "gradients": "#e57368", "buckets": "#f2c200"}
MEMORY_COLORS |= {"activations": "#00796b", "temporaries": "#80cbc4"}
# Shares of a verdict.
BOUND_COLORS = {"compute": "#00796b", "memory": "#8d6e63", "launch": "#e88a35", "host_code": "#6a3d9a"}
BOUND_COLORS |= {"data": "#f2c200", "communication": "#d81b7f", "allocation": "#b3261e"}
BOUND_COLORS |= {"start_up": "#4fb3bf", "unexplained": "#c8c8c8"}
HATCHES = {"backward": "//", "optimizer": "xx", "data": "--", "gradients": "..", "temporaries": "//", "buffers": "\\\\"}
# What is compared and is no part of a model, such as batch sizes: color, marker and dashes.
_COLORS = "#0072b2 #d55e00 #009e73 #cc79a7 #e69f00 #56b4e9 #222222 #8c6d31".split()
_DASHES = ("-", (0, (5, 2)), (0, (1, 1)), (0, (5, 1, 1, 1)), (0, (8, 3)), (0, (3, 1, 1, 1, 1, 1)), "-.", "--")
SERIES = tuple(zip(_COLORS, "os^DvPX<", _DASHES, strict=True))


@cache
def color_of(part: str) -> str:
    """That of its family and, if its name tells one, of its shade."""
    shades = next(shades for pattern, shades in FAMILIES if re.search(pattern, part, re.IGNORECASE))
    by_chance = shades[crc32(part.encode(errors="replace")) % len(shades)]
    return next((one for one in shades if re.search(one[0], part, re.IGNORECASE)), by_chance)[1]


def series(n: int) -> tuple:
    """Color, marker and dashes of the n-th series."""
    return SERIES[n % len(SERIES)]


def text_color(background: str) -> str:
    """Black or white, whichever is easier to read on it."""
    red, green, blue = (int(background[i : i + 2], 16) for i in (1, 3, 5))
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 140 else "black"
