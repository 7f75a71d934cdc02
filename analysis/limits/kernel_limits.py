"""What limits a matmul, attention or convolution on a GPU: by the shapes of its inputs and, where
these do not tell, by what an expert reads off its kernel's name, its time, and the kernels beside
it.

Each rule says only what follows from FLOPs and bytes; what none decides stays unknown.  The lowest
and highest ridge points that the device can have are asked for the type that is multiplied.
"""

import re

import numpy as np
import pandas as pd

from analysis.attribution.operators import costs_of_operators, inputs_of_operators
from analysis.hardware.datasheets import DATASHEETS
from analysis.hardware.roofs import Roofs
from analysis.trace.tables import by_name, different_pairs, take_or
from analysis.trace.timeline import Timeline
from analysis.vocabulary import kernels
from analysis.vocabulary.kernel_classes import (
    KERNEL_CLASSES,
    MATMUL_CLASSES,
    VECTOR_CLASSES,
    Work,
    category,
    names_of_work,
)
from analysis.vocabulary.operators import BYTES_OF
from analysis.work.operator_costs import factor_type

UNKNOWN, MEMORY, COMPUTE = range(3)  # what limits a kernel
# How that was told, in order.  A kernel that moves elements for a matmul is told by its name too.
BASES = {
    "shapes": "FLOPs per byte of the operator's inputs, against the ridge point",
    "same kernel": "the same kernel, where it multiplies recorded shapes",
    "kernel name": "what its kernel is for, and the tile of its output",
    "neighbors": "its time beside that of the kernels around it that stream the same activations",
    "length": (
        "where no kernels are beside it, its length: a long one without a short tile seldom waits"
        " for memory"
    ),
}
SKINNY_TILE = 64  # a tile with a shorter side is chosen for an output that is short in it
LARGE_TILE = 128  # of a kernel that may well be limited by arithmetic however short it is
# From here on 83 to 97% of the time of such kernels was limited by arithmetic, in five traces that
# have shapes of them.
LONG_US = 50.0
SHORT_US = 10.0  # launching a kernel takes as long: a shorter one does not tell how much it moves
NEAR = 9  # kernels, one and four on either side, tell the time of a pass over its activations
# Of the time of all kernels of a name, the share that must be classified, and of that the share
# classified alike.
ENOUGH, AGREED = 0.2, 0.9
PASSES = {record.name: record.passes for record in KERNEL_CLASSES}
# What the operator of a matmul launches beside it.
BESIDE_MATMULS = names_of_work(Work.MOVES, Work.CALCULATES)
# A pass takes at least so long to tell of grouped matmuls: each expert has a part of the tokens
GROUPED_US = 40.0


def ridge_range(roofs: Roofs, kind: str | None) -> tuple[float, float]:
    """The lowest and highest ridge point in FLOPs/byte for what is multiplied; where nothing is
    known, of any device.  Narrower types are twice as fast each."""
    faster = {"fp4": 4, 1: 2}.get(kind if kind == "fp4" else BYTES_OF.get(kind), 1)
    kind = "c10::Half" if faster > 1 else kind
    if found := roofs.ridge(kind):
        return faster * found[0], faster * found[1]
    column = {"tf32": "tf32", "float": "fp32"}.get(kind, "fp16")
    known = [1e3 * peak / row.bandwidth for row in DATASHEETS if (peak := getattr(row, column))]
    return faster * min(known), faster * max(known)


def by_shapes(timeline: Timeline) -> np.ndarray:
    """What limits each operator, by its inputs; UNKNOWN for what has no FLOPs,
    or none that shapes determine."""
    operators, (costs, which) = timeline.trace.operators, costs_of_operators(timeline)
    pairs, _ = different_pairs(
        operators["name"].cat.codes.to_numpy(), inputs_of_operators(timeline)[0]
    )
    found = np.zeros(len(costs), np.int8)
    for i, ((_, signature), one) in enumerate(zip(pairs, costs[:-1], strict=True)):
        least = one.least_flops if one.flops else one.at_least_flops
        most = one.least_flops if one.flops else one.most_flops
        if one.bytes and most:
            low, high = ridge_range(
                timeline.context.roofs, factor_type(*timeline.trace.signatures[signature][:2])
            )
            if most / one.bytes < low:
                found[i] = MEMORY
            elif least and least / one.bytes >= high:
                found[i] = COMPUTE
    return found[which] if len(found) else np.zeros(0, np.int8)


def kernel_bounds(timeline: Timeline) -> tuple[np.ndarray, np.ndarray]:
    """What limits each GPU event if it is a matmul, attention or convolution, and the row of BASES
    that tells, or -1.

    The operator of one may launch copies and transposes too: they are limited by memory."""
    gpu, us = timeline.gpu, (timeline.gpu["end"] - timeline.gpu["start"]).to_numpy()
    helps = gpu["named_category"].isin(BESIDE_MATMULS).to_numpy()
    shaped = take_or(by_shapes(timeline), gpu["operator"].to_numpy(), UNKNOWN)
    beside = helps | timeline.only_of_graph | (by_name(gpu["name"], kernels.use) == kernels.HELPER)
    shaped = np.where(beside, UNKNOWN, shaped)
    named = by_name(gpu["name"], lambda name: named_bound(name, timeline.context.roofs), np.int8)
    (near, one), attention = (
        by_neighbors(timeline, us),
        (gpu["named_category"] == "attention").to_numpy(),
    )
    near = np.where((near == UNKNOWN) & ~attention, same_kernel(gpu, us, near), near)
    long = np.isnan(one) & (us >= LONG_US) & by_name(gpu["name"], may_be_large, bool)
    decoding = (
        few_rows(gpu, us, named) & (one < SHORT_US) & (gpu["named_category"] == "matmul").to_numpy()
    )
    near = np.where((near == UNKNOWN) & decoding, MEMORY, near)
    told = [
        shaped,
        same_kernel(gpu, us, shaped),
        np.where(helps, MEMORY, named),
        near,
        COMPUTE * long,
    ]
    rules = [rule != UNKNOWN for rule in told]
    return np.select(rules, told, UNKNOWN), np.select(rules, [*range(len(BASES))], -1)


def same_kernel(gpu: pd.DataFrame, us: np.ndarray, found: np.ndarray) -> np.ndarray:
    """What limits each kernel by what limits enough of its name, if that is the same."""
    codes, n = gpu["name"].cat.codes.to_numpy(), len(gpu["name"].cat.categories)
    sums = np.stack([np.bincount(codes, us * (found == one), n) for one in (MEMORY, COMPUTE)])
    most, told = sums.argmax(axis=0) + MEMORY, sums.sum(axis=0)
    enough = (
        (told > 0)
        & (told >= ENOUGH * np.bincount(codes, us, n))
        & (sums.max(axis=0) >= AGREED * told)
    )
    return np.where(enough, most, UNKNOWN)[codes]


def named_bound(name: str, roofs: Roofs) -> int:
    """By its use; by its tile: an output with a short side has few FLOPs per byte, and a block that
    loads only its own rows and columns has so many at least."""
    use, kind, tile = kernels.use(name), kernels.multiplied_type(name), kernels.tile(name)
    if use in (kernels.HELPER, kernels.SKINNY, kernels.SHORT_QUERIES):
        return MEMORY
    if not tile or re.search(kernels.MISALIGNED, name):
        return UNKNOWN
    high, size = (
        ridge_range(roofs, kind)[1],
        {"fp4": 0.5, "tf32": 4}.get(kind) or BYTES_OF.get(kind, 2),
    )
    # Tiles of attention and convolutions are not those of a matmul.
    if min(tile) < SKINNY_TILE and category(name) == "matmul" and 2 * min(tile) / size < high:
        return MEMORY
    return COMPUTE if 2 * tile[0] * tile[1] / sum(tile) / size >= high else UNKNOWN


def few_rows(gpu: pd.DataFrame, us: np.ndarray, named: np.ndarray) -> bool:
    """Whether the names of most kernels that multiply, by time, tell of few rows of activations, as
    a server decodes: then the others read a weight for a few rows too, if the passes around them
    are short."""
    told = us * (gpu["named_category"].isin(MATMUL_CLASSES).to_numpy() & (named != UNKNOWN))
    return bool(told[named == MEMORY].sum() > 0.5 * told.sum() > 0)


def may_be_large(name: str) -> bool:
    """Whether nothing in its name tells of a short side, a few queries, or experts that read a
    weight each."""
    return kernels.use(name) is None and min(kernels.tile(name) or (SKINNY_TILE,)) >= SKINNY_TILE


def by_neighbors(timeline: Timeline, us: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """By the time of a pass over the activations, which the element-wise kernels, reductions and
    norms around tell.

    Where a pass is long there are enough rows of activations for arithmetic to limit a large tile,
    and a kernel that takes no longer than a pass moves no less for what it multiplies.  Returns
    that and the time, NaN without any."""
    gpu, order = timeline.gpu, np.argsort(timeline.gpu["start"].to_numpy(), kind="stable")
    streams = (
        gpu["named_category"].isin(VECTOR_CLASSES).to_numpy()
        & (gpu["phase"] != "optimizer").to_numpy()
    )
    passes = pd.Series(us, gpu.index)[order][streams[order]]
    passes = passes.rolling(NEAR, center=True, min_periods=3).quantile(0.75)
    one = passes.reindex(order).ffill().bfill().reindex(gpu.index).to_numpy()
    long = one >= np.where(
        by_name(gpu["name"], kernels.use) == kernels.GROUPED, GROUPED_US, SHORT_US
    )
    large = by_name(gpu["name"], lambda name: min(kernels.tile(name) or (0,)) >= LARGE_TILE, bool)
    kinds = gpu["named_category"]
    times = kinds.map(PASSES).to_numpy(float) * (
        1 + ((kinds == "attention") & (gpu["phase"] == "backward")).to_numpy()
    )
    return (
        np.select(
            [long & (us <= one) & ~large, long & (us >= times * one)], [MEMORY, COMPUTE], UNKNOWN
        ),
        one,
    )
