"""What limits a matmul, attention or convolution on a GPU: by the shapes of its inputs and, where
these do not tell, by what an expert reads off its kernel's name, its time, and the kernels beside
it.

Each rule says only what follows from FLOPs and bytes; what none decides stays unknown.  The lowest
and highest ridge points that the device can have are asked for the type that is multiplied.
"""

import re
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.attribution.operators import costs_of_operators, inputs_of_operators
from analysis.hardware.datasheets import DATASHEETS
from analysis.hardware.nearer_roof import is_beyond_ridge
from analysis.hardware.roofs import Ridge, Roofs, ridge_of_row
from analysis.trace.tables import by_name, different_pairs, take_or
from analysis.trace.timeline import Timeline
from analysis.vocabulary import kernels
from analysis.vocabulary.kernel_classes import (
    ATTENTION,
    KERNEL_CLASSES,
    MATMUL,
    MATMUL_CLASSES,
    VECTOR_CLASSES,
    Work,
    category,
    names_of_work,
)
from analysis.vocabulary.operators import BYTES_OF
from analysis.work.cost import Cost
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


def ridge_of(roofs: Roofs, kind: str | None) -> Ridge:
    """The ridge point for what is multiplied; where nothing is known, of any device.  Narrower
    types are twice as fast each."""
    times_as_fast = 1
    if kind == "fp4":
        times_as_fast = 4
    elif BYTES_OF.get(kind) == 1:
        times_as_fast = 2
    if times_as_fast > 1:
        kind = "c10::Half"
    ridge = roofs.ridge(kind)
    if ridge is None:
        points = ridge_points_of_all({"tf32": "tf32", "float": "fp32"}.get(kind, "fp16"))
        ridge = Ridge(min(points), max(points))
    return Ridge(times_as_fast * ridge.lowest, times_as_fast * ridge.highest)


def ridge_points_of_all(precision: str) -> list[float]:
    """Those of every device whose datasheet has this precision, in FLOPs/byte."""
    points = [ridge_of_row(row, precision) for row in DATASHEETS]
    return [point for point in points if point is not None]


# ---- By shapes -----------------------------------------------------------------------------------


def by_shapes(timeline: Timeline) -> np.ndarray:
    """[operators]: what limits each, by its inputs; UNKNOWN for what has no FLOPs, or none that
    shapes determine."""
    operators, (costs, which) = timeline.trace.operators, costs_of_operators(timeline)
    codes, signatures = operators["name"].cat.codes.to_numpy(), inputs_of_operators(timeline)[0]
    pairs, _ = different_pairs(codes, signatures)
    limits = np.zeros(len(costs), np.int8)
    for i, ((_, signature), cost) in enumerate(zip(pairs, costs[:-1], strict=True)):
        if cost.bytes and (cost.flops or cost.most_flops):
            multiplied = factor_type(*timeline.trace.signatures[signature][:2])
            limits[i] = limit_of_cost(cost, ridge_of(timeline.context.roofs, multiplied))
    return limits[which]


def limit_of_cost(cost: Cost, ridge: Ridge) -> int:
    least_flops, most_flops = cost.at_least_flops, cost.most_flops
    if cost.flops:
        least_flops = most_flops = cost.least_flops
    if most_flops and not is_beyond_ridge(most_flops / cost.bytes, ridge.lowest):
        return MEMORY
    if least_flops and is_beyond_ridge(least_flops / cost.bytes, ridge.highest):
        return COMPUTE
    return UNKNOWN


# ---- By all that is known of a kernel ------------------------------------------------------------


class KernelBounds(NamedTuple):
    """What limits GPU events; arrays with an entry for each."""

    limit: np.ndarray  # UNKNOWN, MEMORY or COMPUTE
    basis: np.ndarray  # row of BASES that tells; -1: none


def kernel_bounds(timeline: Timeline) -> KernelBounds:
    """What limits each GPU event if it is a matmul, attention or convolution.

    The operator of one may launch copies and transposes too: they are limited by memory."""
    gpu = timeline.gpu
    us = (gpu["end"] - gpu["start"]).to_numpy()
    moves = gpu["named_category"].isin(BESIDE_MATMULS).to_numpy()
    helps = by_name(gpu["name"], kernels.use) == kernels.HELPER
    of_operator = take_or(by_shapes(timeline), gpu["operator"].to_numpy(), UNKNOWN)
    shaped = np.where(moves | helps | timeline.only_of_graph, UNKNOWN, of_operator)
    named = by_name(gpu["name"], lambda name: named_bound(name, timeline.context.roofs), np.int8)
    neighbors = by_neighbors(timeline, us)
    is_large = by_name(gpu["name"], may_be_large, bool)
    is_long = np.isnan(neighbors.pass_us) & (us >= LONG_US) & is_large
    limits = {
        "shapes": shaped,
        "same kernel": same_kernel(gpu, us, shaped),
        "kernel name": np.where(moves, MEMORY, named),
        "neighbors": beside_neighbors(gpu, us, named, neighbors),
        "length": np.where(is_long, COMPUTE, UNKNOWN),
    }
    limit, basis = np.full(len(gpu), UNKNOWN), np.full(len(gpu), -1)
    for number, name in enumerate(BASES):
        told_first = (limits[name] != UNKNOWN) & (basis < 0)
        limit[told_first] = limits[name][told_first]
        basis[told_first] = number
    return KernelBounds(limit, basis)


def same_kernel(gpu: pd.DataFrame, us: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """[GPU events]: what limits each by what limits enough of its name, if that is the same.

    us: how long each takes.  limit: what limits it, as far as that is known."""
    codes, n = gpu["name"].cat.codes.to_numpy(), len(gpu["name"].cat.categories)
    by_memory = np.bincount(codes, np.where(limit == MEMORY, us, 0.0), n)
    by_compute = np.bincount(codes, np.where(limit == COMPUTE, us, 0.0), n)
    known = by_memory + by_compute
    most = np.maximum(by_memory, by_compute)
    is_enough = (known > 0) & (known >= ENOUGH * np.bincount(codes, us, n))
    is_enough &= most >= AGREED * known
    of_name = np.where(by_compute > by_memory, COMPUTE, MEMORY)
    return np.where(is_enough, of_name, UNKNOWN)[codes]


# ---- By the name of a kernel ---------------------------------------------------------------------


def named_bound(name: str, roofs: Roofs) -> int:
    """By its use; by its tile: an output with a short side has few FLOPs per byte, and a block that
    loads only its own rows and columns has so many at least."""
    if kernels.use(name) in (kernels.HELPER, kernels.SKINNY, kernels.SHORT_QUERIES):
        return MEMORY
    tile = kernels.tile(name)
    if not tile or re.search(kernels.MISALIGNED, name):
        return UNKNOWN
    multiplied = kernels.multiplied_type(name)
    highest_ridge = ridge_of(roofs, multiplied).highest
    size = {"fp4": 0.5, "tf32": 4}.get(multiplied) or BYTES_OF.get(multiplied, 2)
    # Tiles of attention and convolutions are not those of a matmul.
    is_skinny = min(tile) < SKINNY_TILE and category(name) == MATMUL
    if is_skinny and not is_beyond_ridge(2 * min(tile) / size, highest_ridge):
        return MEMORY
    if is_beyond_ridge(2 * tile[0] * tile[1] / sum(tile) / size, highest_ridge):
        return COMPUTE
    return UNKNOWN


def may_be_large(name: str) -> bool:
    """Whether nothing in its name tells of a short side, a few queries, or experts that read a
    weight each."""
    if kernels.use(name) is not None:
        return False
    tile = kernels.tile(name)
    return tile is None or min(tile) >= SKINNY_TILE


def has_large_tile(name: str) -> bool:
    tile = kernels.tile(name)
    return tile is not None and min(tile) >= LARGE_TILE


# ---- By the kernels beside it --------------------------------------------------------------------


class Neighbors(NamedTuple):
    """What the kernels around GPU events tell of them; arrays with an entry for each."""

    limit: np.ndarray  # UNKNOWN, MEMORY or COMPUTE
    pass_us: np.ndarray  # of a pass over the activations; NaN: no kernel tells


def by_neighbors(timeline: Timeline, us: np.ndarray) -> Neighbors:
    """By the time of a pass over the activations, which the element-wise kernels, reductions and
    norms around tell.

    Where a pass is long there are enough rows of activations for arithmetic to limit a large tile,
    and a kernel that takes no longer than a pass moves no less for what it multiplies."""
    gpu = timeline.gpu
    kinds = gpu["named_category"]
    order = np.argsort(gpu["start"].to_numpy(), kind="stable")
    is_pass = kinds.isin(VECTOR_CLASSES).to_numpy() & (gpu["phase"] != "optimizer").to_numpy()
    passes = pd.Series(us, gpu.index)[order][is_pass[order]]
    passes = passes.rolling(NEAR, center=True, min_periods=3).quantile(0.75)
    pass_us = passes.reindex(order).ffill().bfill().reindex(gpu.index).to_numpy()
    is_grouped = by_name(gpu["name"], kernels.use) == kernels.GROUPED
    is_told = pass_us >= np.where(is_grouped, GROUPED_US, SHORT_US)
    is_large = by_name(gpu["name"], has_large_tile, bool)
    n_passes = kinds.map(PASSES).to_numpy(float)
    # The backward pass of attention reads and writes twice as much as its forward pass.
    twice = ((kinds == ATTENTION) & (gpu["phase"] == "backward")).to_numpy()
    n_passes = np.where(twice, 2 * n_passes, n_passes)
    limit = np.full(len(gpu), UNKNOWN)
    limit[is_told & (us >= n_passes * pass_us)] = COMPUTE
    limit[is_told & (us <= pass_us) & ~is_large] = MEMORY
    return Neighbors(limit, pass_us)


def beside_neighbors(
    gpu: pd.DataFrame, us: np.ndarray, named: np.ndarray, neighbors: Neighbors
) -> np.ndarray:
    """[GPU events]: the same; where it does not tell, by what it tells of other kernels of the name
    and, of a server that decodes, of short passes.  named: what limits each by its name."""
    limit = neighbors.limit
    # How long attention takes depends on the number of keys, which its name does not tell.
    same = (limit == UNKNOWN) & (gpu["named_category"] != ATTENTION).to_numpy()
    limit = np.where(same, same_kernel(gpu, us, limit), limit)
    if few_rows(gpu, us, named):
        is_short = (neighbors.pass_us < SHORT_US) & (gpu["named_category"] == MATMUL).to_numpy()
        limit = np.where((limit == UNKNOWN) & is_short, MEMORY, limit)
    return limit


def few_rows(gpu: pd.DataFrame, us: np.ndarray, named: np.ndarray) -> bool:
    """Whether the names of most kernels that multiply, by time, tell of few rows of activations, as
    a server decodes: then the others read a weight for a few rows too, if the passes around them
    are short."""
    is_told = gpu["named_category"].isin(MATMUL_CLASSES).to_numpy() & (named != UNKNOWN)
    us = np.where(is_told, us, 0.0)
    return bool(us[named == MEMORY].sum() > 0.5 * us.sum() > 0)
