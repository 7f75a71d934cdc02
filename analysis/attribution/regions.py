"""Regions of a model, such as attention from its scores to its weighted sum, by patterns of
operators in any model.

The operators of a thread, in order, are written as a string with a letter for each, and a region is
what a regular expression matches in it.  A range or module call that contains nothing else belongs
to the region too, and so does the backward pass of what belongs to it.
"""

import math
import re
from collections.abc import Callable, Iterator
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

# Which of the operators that a pattern matches belong to the region, by letters and shapes.
BelongByShapes = Callable[[str, list[Shapes]], np.ndarray]


class Pattern(NamedTuple):
    """Operators in words, as vocabulary.letters has them, that make a region of this kind."""

    kind: str
    operators: str
    becomes: str = ""  # the word of what was found, for the patterns after it
    of_matmuls: bool = False  # its matmuls belong to it, else all but these
    belong: BelongByShapes | None = None  # None: all that it matches do


# In this order: a pattern reads what those before it found as one word.  Copies, products, norms
# and rotary embeddings may happen to queries and keys before they meet.
PATTERNS = (
    Pattern(FUSED[NORM], "norm"),
    # Layer norm, (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias
    Pattern(
        NORM,
        "(?<! copy) copy* mean [sub copy]* ([pow mul] copy* mean | var) copy* sub? add? copy*"
        " [rsqrt sqrt]? copy* sub? [mul div] copy* (mul copy*)? add?",
        becomes="norm",
    ),
    # RMS norm, x * rsqrt(mean(x^2) + eps) * weight
    Pattern(
        NORM,
        "(?<! copy) copy* [pow mul] copy* mean add? copy* (rsqrt | sqrt div?) copy* mul copy*"
        " (mul copy*)?",
        becomes="norm",
    ),
    # x * cos + cat(-x2, x1) * sin; in two halves; by complex numbers
    Pattern(
        ROPE,
        "(mul copy* neg copy* cat copy* mul | neg copy* cat copy* mul copy* mul) copy* add"
        " | mul mul sub mul mul add cat"
        " | complex [complex mul copy]* complex",
        becomes="rotary",
    ),
    Pattern(FUSED[ROPE], "roll copy* mul copy* addcmul", becomes="rotary"),
    Pattern(FUSED[ATTENTION], "attention"),
    Pattern(
        ATTENTION,
        "(?<! [copy mul div]) [copy mul div]*"
        " (bmm [^ bmm matmul softmax attention math_attention boundary]*){1,3}"
        " softmax [^ bmm matmul attention math_attention boundary]* bmm",
        becomes="attention",
        belong=weigh_their_scores,
    ),
    Pattern(ATTENTION, "math_attention", becomes="attention"),
    Pattern(
        QKV,
        "matmul [copy mul norm rotary]* matmul [copy mul norm rotary]*"
        " (matmul [copy mul norm rotary]*)? (?= [^ matmul boundary]* attention)",
        of_matmuls=True,
        belong=read_the_same,
    ),
    Pattern(
        FUSED[QKV],
        "[^ matmul copy mul norm rotary] [copy mul norm rotary]* matmul"
        " (?= [^ matmul boundary]* attention)",
        of_matmuls=True,
    ),
    Pattern(
        GATE_UP,
        "matmul copy* matmul (?= copy* silu) | matmul copy* silu copy* matmul copy* mul",
        of_matmuls=True,
        belong=read_the_same,
    ),
    Pattern(
        FUSED[GATE_UP], "[^ matmul copy] copy* matmul (?= copy* silu copy* mul)", of_matmuls=True
    ),
    Pattern(SWIGLU, "silu copy* (matmul copy*)? mul"),
    Pattern(FUSED[SWIGLU], "swiglu"),
    Pattern(
        LOSS,
        "(?<= [matmul attention norm rotary boundary])"
        " [^ matmul attention norm rotary loss boundary]*"
        " loss [^ matmul attention norm rotary boundary]*",
        belong=pass_over_tokens,
    ),
)


@cached_on_timeline
def regions(timeline: Timeline) -> pd.DataFrame:
    """The region of each row of host: kind, None where there is none, and instance, the same
    number in a forward pass and in its backward pass, or -1 where that is not known."""
    host = timeline.host
    node = host["node"].to_numpy()
    is_node = node == np.arange(len(host))
    backward = in_backward_pass(host, is_node)
    operators = operators_in_order(timeline, backward)
    of_operator, kinds = np.full(len(operators.rows), -1), []  # of each instance
    for kind, places in instances(timeline, operators):
        of_operator[places] = len(kinds)
        kinds.append(kind)
    kinds = np.array([*kinds, None, None], dtype=object)  # and of those below 0
    is_event = operators.rows >= 0
    rows, of_operator = operators.rows[is_event], of_operator[is_event]
    instance = with_callers_and_views(host, rows, of_operator, kinds, ~backward)
    of_forward = forward_of_nodes(host, ~backward, is_node)
    of_node = np.where(of_forward >= 0, instance[of_forward], -1)
    instance = np.where(backward & (node >= 0), of_node[node], instance)
    # Where no number links a backward operator to its forward one, the name alone may tell.
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


class InOrder(NamedTuple):
    """The operators that work, thread by thread, with boundaries between: of a thread, a step, or a
    phase without a model."""

    rows: np.ndarray  # of host [operators and boundaries]; -1: a boundary
    text: str  # their letters [operators and boundaries]


def operators_in_order(timeline: Timeline, backward: np.ndarray) -> InOrder:
    """backward: whether each host event is of the backward pass [host events]."""
    host = timeline.host
    letter = letters_of(host)
    rows = working_operators(host["parent"].to_numpy(), letter)
    start, thread = host["start"].to_numpy()[rows], host["thread"].to_numpy()[rows]
    order = np.lexsort((rows, start, thread))
    rows, thread, step = rows[order], thread[order], step_at(start[order], timeline.steps)
    elsewhere = backward | host["phase"].isin(("data", "optimizer")).to_numpy()
    letter = np.where(elsewhere[rows], BOUNDARY, letter[rows])
    begins_thread = np.diff(thread, prepend=-1) != 0
    begins_step = np.diff(step, prepend=-2) != 0
    first = np.flatnonzero(begins_thread | begins_step)
    text = "".join(np.insert(letter, first, BOUNDARY))
    return InOrder(np.insert(rows, first, -1), text)


def letters_of(host: pd.DataFrame) -> np.ndarray:
    """The letter of each host event; "": it is no operator, a view, or a norm that calls others."""
    is_operator = (host["kind"] == OPERATOR).to_numpy()
    letter = np.where(is_operator, by_name(host["name"], letter_of), "")
    roots = np.flatnonzero(letter == LETTERS["rsqrt"])
    written_out = over_contained(host["parent"].to_numpy(), roots, roots, np.maximum) != NOTHING
    letter[(letter == LETTERS["norm"]) & written_out] = ""
    return letter


def working_operators(parent: np.ndarray, letter: np.ndarray) -> np.ndarray:
    """Rows of the operators that work: of nested ones the outermost that a pattern names, else the
    innermost.  parent: row of each host event's caller, -1 without one."""
    works, named = letter != "", ~np.isin(letter, ("", OTHER))
    above = parent[works & (parent >= 0)]
    calls = over_contained(parent, above, above, np.maximum) != NOTHING
    is_outermost = nearest_marked_caller(parent, named) < 0
    return np.flatnonzero(is_outermost & (named | (works & ~calls)))


def instances(timeline: Timeline, operators: InOrder) -> Iterator[tuple[str, np.ndarray]]:
    """The kind of each region, and the places in the text of the operators that belong to it."""
    rows, text = operators
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
    lowest = over_contained(parent, rows, of_operator, np.minimum)
    highest = over_contained(parent, rows, of_operator, np.maximum)
    of_model = forward & (host["component"] != OVERHEAD).to_numpy()
    whole = of_model & (lowest >= 0) & (kinds[lowest] == kinds[highest])
    nearest = nearest_marked_ancestor(parent, whole)
    instance = np.where(nearest >= 0, highest[nearest], -1)
    contains_none = of_model & (highest == NOTHING) & (instance < 0)
    last, following = instances_around(host, rows, of_operator)
    return np.where(contains_none & (last == following), last, instance)


class Around(NamedTuple):
    """Between the operators of which instances each host event began; arrays with an entry for each
    event, -1: of none."""

    last: np.ndarray  # instance of the last operator that began up to here
    following: np.ndarray  # of the next one


def instances_around(host: pd.DataFrame, rows: np.ndarray, of_operator: np.ndarray) -> Around:
    """rows: of the operators; of_operator: the instance of each."""
    order = np.lexsort((np.arange(len(host)), host["start"], host["thread"]))
    is_operator = np.zeros(len(host), bool)
    is_operator[rows] = True
    before = np.empty(len(host), np.int64)  # how many operators began up to here
    before[order] = np.cumsum(is_operator[order])
    instance = np.concatenate([[-1], of_operator, [-1]])
    return Around(instance[before], instance[before + 1])
