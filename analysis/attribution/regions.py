"""Regions of a model, such as attention from its scores to its weighted sum, by patterns of
operators in any model.

The operators of a thread, in order, are written as a string with a letter for each, and a region is
what a regular expression matches in it.  A range or module call that contains nothing else belongs
to the region too, and so does the backward pass of what belongs to it.
"""

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.attribution.components import OVERHEAD, forward_of_nodes
from analysis.trace.links import OPERATOR
from analysis.trace.nesting import nearest_marked_ancestor, nearest_marked_caller
from analysis.trace.steps import step_at
from analysis.trace.tables import by_name
from analysis.trace.timeline import Timeline, cached_on_timeline
from analysis.vocabulary.letters import BOUNDARY, LETTERS, OTHER, in_letters, letter_of
from harness.base.text import read_ini

# Regions of several operators, and what each is called where they are fused
KINDS = ("attention", "norm", "rotary embedding", "SwiGLU", "q, k and v", "gate and up", "loss")
ATTENTION, NORM, ROPE, SWIGLU, QKV, GATE_UP, LOSS = KINDS
FUSED = {kind: f"fused {kind}" for kind in KINDS}
NOTHING = -2  # an instance of nothing: of events that contain no operator that works
Shapes = list[list[int]]  # of the tensors that an operator reads; empty: not recorded


# ---- What shapes must be like, where they are recorded -------------------------------------------


def read_the_same(text: str, inputs: list[Shapes]) -> np.ndarray:
    """Which of these matmuls read a tensor of the same shape as the last one does; at least two, or
    none."""
    read = [first_matrix(shapes) for shapes in inputs]
    same = np.array([shape == read[-1] for shape in read])
    if same.sum() > 1:
        return same
    return np.full(len(text), False)


def first_matrix(shapes: Shapes) -> list[int] | None:
    """The first tensor of two or more dimensions: a bias may come before it."""
    for shape in shapes:
        if len(shape) > 1:
            return shape
    return None


def weigh_their_scores(text: str, inputs: list[Shapes]) -> np.ndarray:
    """All of these operators, if the product before the softmax, its input, and what weighs the sum
    are of one size."""
    soft = text.find(LETTERS["softmax"])
    before, after = text.rfind(LETTERS["bmm"], 0, soft), text.rfind(LETTERS["bmm"])
    # Of each product the two batches of matrices that it multiplies, [B, M, K] and [B, K, N].
    scores = [shape for shape in inputs[before] if len(shape) == 3][-2:]
    weighing = [shape for shape in inputs[after] if len(shape) == 3][-2:]
    if len(scores) < 2 or len(weighing) < 2 or not inputs[soft]:
        return np.full(len(text), True)
    product = math.prod(scores[0][:2]) * scores[1][2]
    sizes = {product, math.prod(inputs[soft][0]), math.prod(weighing[0])}
    return np.full(len(text), len(sizes) == 1)


def pass_over_tokens(text: str, inputs: list[Shapes]) -> np.ndarray:
    """Which of these operators read a number for each token, or the logits [.., V]; others are of
    the loss of all."""
    logits = inputs[text.find(LETTERS["loss"])]
    tokens = math.prod(logits[0][:-1]) if logits else 0
    return np.array([max(map(math.prod, shapes), default=1) >= tokens for shapes in inputs])


# ---- Patterns ------------------------------------------------------------------------------------

# Which of the operators that a pattern matches belong to the region, by letters and shapes; of
# other patterns all do.
BelongByShapes = Callable[[str, list[Shapes]], np.ndarray]
BY_SHAPES: dict[str, BelongByShapes] = {
    "attention": weigh_their_scores,
    "q, k and v": read_the_same,
    "gate and up": read_the_same,
    "loss": pass_over_tokens,
}


class Pattern(NamedTuple):
    kind: str
    operators: str  # in words
    becomes: str
    of_matmuls: bool  # its matmuls belong to it, else all but these
    belong: BelongByShapes | None


def read_patterns() -> list[Pattern]:
    """Those of regions.ini, a section each.  Raises ValueError where BY_SHAPES names none of
    them."""
    tables = read_ini(Path(__file__).with_suffix(".ini"))
    left_over = BY_SHAPES.keys() - tables.sections()
    if left_over:
        raise ValueError(f"regions.ini has no pattern {sorted(left_over)}")
    patterns = []
    for name in tables.sections():
        pattern = Pattern(
            kind=name.partition(":")[0],
            operators=" ".join(tables[name]["operators"].split()),
            becomes=tables[name].get("becomes", ""),
            of_matmuls=tables[name].getboolean("of_matmuls", False),
            belong=BY_SHAPES.get(name),
        )
        patterns.append(pattern)
    return patterns


PATTERNS = read_patterns()


@cached_on_timeline
def regions(timeline: Timeline) -> pd.DataFrame:
    """The region of each row of host: kind, None where there is none, and instance, the same
    number in a forward pass and in its backward pass, or -1 where that is not known."""
    host = timeline.host
    node = host["node"].to_numpy()
    is_node = node == np.arange(len(host))
    backward = in_backward_pass(host, is_node)
    rows, text = operators_in_order(timeline, backward)
    of_operator, kinds = np.full(len(rows), -1), []  # of each instance
    for kind, places in instances(timeline, rows, text):
        of_operator[places] = len(kinds)
        kinds.append(kind)
    kinds = np.array([*kinds, None, None], dtype=object)  # and of those below 0
    instance = with_callers_and_views(
        host, rows[rows >= 0], of_operator[rows >= 0], kinds, ~backward
    )
    of_forward = forward_of_nodes(host, ~backward, is_node)
    of_node = np.where(of_forward >= 0, instance[of_forward], -1)
    instance = np.where(backward & (node >= 0), of_node[node], instance)
    # Where no number timeline a backward operator to its forward one, the name alone may tell.
    by_letter = {in_letters(pattern.operators): pattern.kind for pattern in PATTERNS}
    by_letter[LETTERS["loss"]] = LOSS
    of_name = by_name(host["name"], lambda name: by_letter.get(letter_of(name)))
    kind = np.where(backward & (instance < 0), of_name, kinds[instance])
    return pd.DataFrame({"kind": kind, "instance": instance})


def in_backward_pass(host: pd.DataFrame, is_node: np.ndarray) -> np.ndarray:
    """Which host events are the work of autograd nodes: not the forward pass that a node may run
    again, whose operators have sequence numbers of their own."""
    parent = host["parent"].to_numpy()
    of_node = is_node | ((parent >= 0) & is_node[parent])
    of_range = (host["kind"] != OPERATOR) & (host["component"] != OVERHEAD)
    again = ~of_node & (of_range | (host["sequence"] >= 0)).to_numpy()
    nearest = nearest_marked_ancestor(parent, again | is_node)
    return (nearest >= 0) & is_node[nearest]


def operators_in_order(timeline: Timeline, backward: np.ndarray) -> tuple[np.ndarray, str]:
    """The operators that work, thread by thread, and their letters.  Of nested ones the outermost
    with a letter, else the innermost; views have none.  Row -1 is a boundary: of a thread, a step,
    or a phase without a model."""
    host = timeline.host
    parent, is_operator = host["parent"].to_numpy(), (host["kind"] == OPERATOR).to_numpy()
    letter = np.where(is_operator, by_name(host["name"], letter_of), "")
    roots = np.flatnonzero(letter == LETTERS["rsqrt"])
    written_out = over_contained(parent, roots, roots, np.maximum) != NOTHING
    letter[(letter == LETTERS["norm"]) & written_out] = ""  # a norm that calls others
    works, named = letter != "", ~np.isin(letter, ("", OTHER))
    above = parent[works & (parent >= 0)]
    calls = over_contained(parent, above, above, np.maximum) != NOTHING
    rows = np.flatnonzero((nearest_marked_caller(parent, named) < 0) & (named | (works & ~calls)))
    start, thread = host["start"].to_numpy()[rows], host["thread"].to_numpy()[rows]
    order = np.lexsort((rows, start, thread))
    rows, thread, step = rows[order], thread[order], step_at(start[order], timeline.steps)
    elsewhere = backward | host["phase"].isin(("data", "optimizer")).to_numpy()
    letter = np.where(elsewhere[rows], BOUNDARY, letter[rows])
    first = np.flatnonzero((np.diff(thread, prepend=-1) != 0) | (np.diff(step, prepend=-2) != 0))
    return np.insert(rows, first, -1), "".join(np.insert(letter, first, BOUNDARY))


def instances(timeline: Timeline, rows: np.ndarray, text: str) -> Iterator[tuple[str, np.ndarray]]:
    """The kind of each region, and the places in the text of the operators that belong to it."""
    is_matmul = np.array([letter == LETTERS["matmul"] for letter in text])
    for pattern in PATTERNS:
        rewritten = list(text)
        for match in re.finditer(in_letters(pattern.operators), text):
            first, last = match.span()
            places = np.arange(first, last)
            places = places[is_matmul[first:last] == pattern.of_matmuls]
            if pattern.belong:
                inputs = [tensors_read(timeline, row) for row in rows[places]]
                letters = "".join(text[place] for place in places)
                places = places[pattern.belong(letters, inputs)]
            if len(places) == 0:
                continue
            yield pattern.kind, places
            if pattern.becomes:
                rewritten[first:last] = LETTERS[pattern.becomes] * (last - first)
        text = "".join(rewritten)


def tensors_read(timeline: Timeline, row: int) -> Shapes:
    inputs = timeline.trace.operators["signature"].iat[row]
    shapes = timeline.trace.signatures[inputs][0] if inputs >= 0 else []
    return [shape for shape in shapes if shape and isinstance(shape[0], int)]


def over_contained(
    parent: np.ndarray, rows: np.ndarray, values: np.ndarray, combine: np.ufunc
) -> np.ndarray:
    """For each host event, the values of the rows that it is or contains, combined; NOTHING where
    it contains none."""
    out = np.full(len(parent), NOTHING)
    out[rows] = values
    while len(rows):
        above = parent[rows]
        rows, values, above = rows[above >= 0], values[above >= 0], above[above >= 0]
        out[above] = np.where(out[above] == NOTHING, values, out[above])
        combine.at(out, above, values)
        rows = above
    return out


def with_callers_and_views(
    host: pd.DataFrame,
    rows: np.ndarray,
    of_operator: np.ndarray,
    kinds: np.ndarray,
    forward: np.ndarray,
) -> np.ndarray:
    """The instance of each event of the forward pass: of the operators in these rows, of callers
    that contain no other kind, of all that these call, and of views between two
    operators of an instance."""
    parent = host["parent"].to_numpy()
    # Instances are numbered kind after kind: where the lowest and the highest are of one kind, so
    # are all.
    lowest, highest = (
        over_contained(parent, rows, of_operator, combine) for combine in (np.minimum, np.maximum)
    )
    of_model = forward & (host["component"] != OVERHEAD).to_numpy()
    whole = of_model & (lowest >= 0) & (kinds[lowest] == kinds[highest])
    nearest = nearest_marked_ancestor(parent, whole)
    instance = np.where(nearest >= 0, highest[nearest], -1)
    order = np.lexsort((np.arange(len(host)), host["start"], host["thread"]))
    is_operator = np.zeros(len(host), bool)
    is_operator[rows] = True
    before = np.empty(len(host), np.int64)
    before[order] = np.cumsum(is_operator[order])
    # `before` operators began up to here: the last of them, and the next one.
    around = np.append(np.insert(of_operator, 0, -1), -1)
    between = (
        of_model & (highest == NOTHING) & (instance < 0) & (around[before] == around[before + 1])
    )
    return np.where(between, around[before], instance)
