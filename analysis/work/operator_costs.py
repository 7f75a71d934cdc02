"""FLOPs and bytes of an operator's call, by the shapes of its inputs.

Traces record inputs by their position alone.  operator_costs.ini names them, in the order in which
an operator takes them, by the kind of work that COST_OF_KIND has a formula for.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from analysis.vocabulary.annotations import BATCH
from analysis.vocabulary.kernel_classes import category
from analysis.vocabulary.operators import BYTES_OF, is_view_or_metadata_op
from harness.base.text import read_ini


@dataclass(frozen=True)
class Cost:
    """FLOPs and bytes of one call; None if the shapes do not determine them.

    Two conventions for attention: `flops` counts the full S x T scores, causal or not,
    `least_flops` only those that a mask leaves, which is what a kernel must do at least.  Elsewhere
    both are the same.
    """

    flops: int | None = None
    bytes: int | None = None  # inputs read and outputs written once
    # An upper limit, of what not all is recorded: lengths of packed sequences, strides.
    most_flops: int | None = None
    # Of each query at most, where that is not all of them: packed sequences, windows.
    keys: int | None = None
    unmasked_flops: int | None = None  # of attention
    # Of `flops`, what was computed before and is computed again, as fused attention does.
    recomputed_flops: int = 0
    at_least_flops: int | None = None  # a lower limit where `flops` is not known

    @property
    def model_flops(self) -> int | None:
        """What the model asks for, however a kernel comes by it."""
        return None if self.flops is None else self.flops - self.recomputed_flops

    @property
    def least_flops(self) -> int | None:
        """What any kernel must do: the least that bounds, roofs and predictions may assume; None:
        not known."""
        return self.flops if self.unmasked_flops is None else self.unmasked_flops


@dataclass(frozen=True)
class Inputs:
    """The recorded inputs of a call, by name."""

    shapes: dict[str, list]  # [] of what is no tensor
    sizes: dict[str, int | None]  # bytes of an element; None: not a tensor, or not known
    values: dict[str, str]  # the profiler's texts of inputs that are no tensors
    names: list[str]  # of all that the operator takes


def cost(
    name: str, shapes: list, types: list | None, values: list | None, batch: str | None = None
) -> Cost:
    """FLOPs (two per multiply-add, matmuls only) and bytes of a call, from the inputs that a trace
    records.

    Traces do not record outputs.  Their shapes follow from the inputs for matmuls, convolutions,
    element-wise operators, normalizations and copies; the cost of others is unknown.  batch: the
    range around the call that tells the lengths of sequences.
    """
    ours = name.startswith(("aten::", "kernels::"))
    base = None
    if name in _FORMULAS:
        base = name
    elif ours:
        base = name.rsplit("::", 1)[-1].strip("_")
    if base is None or is_view_or_metadata_op(name) or not all(map(is_shape, shapes)):
        return Cost()
    try:
        if base in _FORMULAS:
            formula = _FORMULAS[base]
            inputs = named_inputs(formula.names, shapes, types, values)
            sums = BATCH.match(batch or "")
            if sums and formula.cost in (attention_cost, untold_attention_cost):
                return batch_attention_cost(inputs, formula.cost, *map(int, sums.groups()))
            return formula.cost(inputs)
        if category(name) in ("element-wise", "normalization") or base in _SAME_SHAPE:
            return streaming_cost(base, shapes, types or [])
    except (LookupError, TypeError, ValueError):  # shapes that no operator of this name takes
        pass
    return Cost()


def tells_cost(name: str) -> bool:
    """Whether an operator calls one that does the work, so its inputs tell the cost of that."""
    return name.removeprefix("aten::") in _CALLERS and name.startswith("aten::")


def cost_of_called(name: str, shapes: list, types: list | None, values: list | None) -> Cost:
    """The cost of the one operator that an operator calls to do its work, by the inputs of the
    caller, of this name."""
    if not all(map(is_shape, shapes)):
        return Cost()
    formula = _CALLERS[name.removeprefix("aten::")]
    try:
        return formula.cost(named_inputs(formula.names, shapes, types, values))
    except (LookupError, TypeError, ValueError):  # shapes that no operator of this name takes
        return Cost()


def named_inputs(names: list[str], shapes: list, types: list | None, values: list | None) -> Inputs:
    """names: of all inputs that the operator takes; types: none in traces of PyTorch 1.8."""
    sizes = [BYTES_OF.get(kind) for kind in types or [None] * len(shapes)]
    return Inputs(
        shapes=dict(zip(names, shapes, strict=False)),
        sizes=dict(zip(names, sizes, strict=False)),
        values=dict(zip(names, values or [], strict=False)),
        names=names,
    )


def factor_type(shapes: list, types: list | None) -> str | None:
    """The type of what a matmul multiplies, its first input of two or more dimensions: scales and
    biases have fewer."""
    pairs = zip(shapes, types or [], strict=False)
    return next((kind for shape, kind in pairs if isinstance(shape, list) and len(shape) > 1), None)


def is_shape(value) -> bool:
    """A list of sizes, or of shapes."""
    return isinstance(value, list) and all(
        is_shape(one) or (isinstance(one, int) and one >= 0) for one in value
    )


# ---- Matmuls and convolutions --------------------------------------------------------------------

TYPE_SIZES = {"5": 2, "6": 4, "15": 2}  # bytes by PyTorch's number of a type: fp16, fp32, bf16


def matmul_cost(inputs: Inputs) -> Cost:
    """[..., M, K] @ [..., K, N] -> [..., M, N]"""
    a, b = inputs.shapes["a"], inputs.shapes["b"]
    out = math.prod(a[:-1]) * b[-1]
    added = math.prod(inputs.shapes["added"]) if "added" in inputs.names else 0
    elements, size = math.prod(a) + math.prod(b) + out + added, inputs.sizes["a"]
    return Cost(2 * out * a[-1], elements * size if size else None)


def scaled_matmul_cost(inputs: Inputs) -> Cost:
    """[M, K] @ [K, N] of 8-bit numbers -> [M, N] in the type that is asked for"""
    a, b, sizes = inputs.shapes["a"], inputs.shapes["b"], (inputs.sizes["a"], inputs.sizes["b"])
    written = TYPE_SIZES.get(inputs.values.get("out_type"))
    read = math.prod(a) * sizes[0] + math.prod(b) * sizes[1] if all(sizes) else None
    known = written is not None and read is not None
    return Cost(2 * a[0] * a[1] * b[1], read + a[0] * b[1] * written if known else None)


def convolution_cost(inputs: Inputs) -> Cost:
    """x [N, C, *size], weight [K, C / groups, *kernel] -> [N, K, *out size]"""
    x, weight, size = inputs.shapes["x"], inputs.shapes["weight"], inputs.sizes["x"]
    if inputs.values.get("transposed") == "True":
        return Cost()
    if not all(inputs.values.get(name) for name in ("padding", "stride")):
        return convolution_limits(x, weight, size)
    padding, stride = (parse_value(inputs.values[name]) for name in ("padding", "stride"))
    dilation = (
        parse_value(inputs.values["dilation"]) if "dilation" in inputs.names else [1] * len(stride)
    )
    spatial = [
        (length + 2 * pad - step * (kernel - 1) - 1) // jump + 1
        for length, kernel, jump, pad, step in zip(
            x[2:], weight[2:], stride, padding, dilation, strict=True
        )
    ]
    out = x[0] * weight[0] * math.prod(spatial)
    moved = (math.prod(x) + math.prod(weight) + out) * size if size else None
    return Cost(2 * out * math.prod(weight[1:]), moved)


def convolution_limits(x: list, weight: list, size: int | None) -> Cost:
    """Of a convolution whose stride and padding are not recorded: its output is as large as its
    input at most, and has a place for each patch of the kernel's size,
    or every second one, at least."""
    per_place = 2 * x[0] * weight[0] * math.prod(weight[1:])
    pairs = [*zip(x[2:], weight[2:], strict=True)]
    least = math.prod(max(1, (length - kernel) // max(kernel, 2) + 1) for length, kernel in pairs)
    most = math.prod(x[2:])
    elements = math.prod(x) + math.prod(weight) + x[0] * weight[0] * most
    moved = elements * size if size else None
    return Cost(None, moved, per_place * most, at_least_flops=per_place * least)


def linear_cost(inputs: Inputs) -> Cost:
    """x [..., K], weight [N, K] -> [..., N]"""
    x, weight, size = inputs.shapes["x"], inputs.shapes["weight"], inputs.sizes["x"]
    out = math.prod(x[:-1]) * weight[0]
    elements = math.prod(x) + math.prod(weight) + out
    return Cost(2 * out * x[-1], elements * size if size else None)


def transposed_convolution_cost(inputs: Inputs) -> Cost:
    """x [N, C, *size], weight [C, K / groups, *kernel] -> [N, K, *out size]: each element of x is
    multiplied with the kernels of its channel"""
    x, weight, size = inputs.shapes["x"], inputs.shapes["weight"], inputs.sizes["x"]
    names = ("stride", "padding", "dilation", "output_padding")
    stride, padding, dilation, further = (parse_value(inputs.values[name]) for name in names)
    spatial = [
        (length - 1) * jump - 2 * pad + step * (kernel - 1) + more + 1
        for length, kernel, jump, pad, step, more in zip(
            x[2:], weight[2:], stride, padding, dilation, further, strict=True
        )
    ]
    groups = parse_value(inputs.values["groups"]) if "groups" in inputs.names else 1
    out = x[0] * weight[1] * groups * math.prod(spatial)
    moved = (math.prod(x) + math.prod(weight) + out) * size if size else None
    return Cost(2 * math.prod(x) * math.prod(weight[1:]), moved)


def dispatched_convolution_cost(inputs: Inputs) -> Cost:
    """A transposed convolution on a CPU, which no further operator does; others do all else."""
    transposed = inputs.values["transposed"] == "True"
    return transposed_convolution_cost(inputs) if transposed else Cost()


def convolution_backward_cost(inputs: Inputs) -> Cost:
    """gradient [N, K, *out size], x, weight -> gradients of x and weight, each a matmul of the
    forward's size"""
    gradient, x, weight = (inputs.shapes[name] for name in ("gradient", "x", "weight"))
    # Which gradients are wanted: of x, of the weight, of the bias.
    wanted = re.findall("True|False", inputs.values["output_mask"]) or ["True", "True", ""]
    matmuls, written = 0, 0
    for is_wanted, shape in zip(wanted, (x, weight), strict=False):
        if is_wanted == "True":
            matmuls += 1
            written += math.prod(shape)
    moved, size = None, inputs.sizes["gradient"]
    if size:
        moved = (math.prod(gradient) + math.prod(x) + math.prod(weight) + written) * size
    transposed = inputs.values.get("transposed") == "True"
    each = 2 * math.prod(x if transposed else gradient) * math.prod(weight[1:])
    return Cost(matmuls * each, moved)


def gradient_of_input_cost(inputs: Inputs) -> Cost:
    """gradient [N, K, *out size], weight [K, C / groups, *kernel]
    -> [N, C, *size], in PyTorch 1.8"""
    return Cost(2 * math.prod(inputs.shapes["gradient"]) * math.prod(inputs.shapes["weight"][1:]))


def any_layout_matmul_cost(inputs: Inputs) -> Cost:
    """a [M, K], b [K, N] or [N, K] -> [M, N]; bytes only where the output is among the inputs"""
    a, b, out = inputs.shapes["a"], inputs.shapes["b"], inputs.shapes.get("out", [])
    columns = b[1] if b[0] == a[-1] else b[0]
    if a[-1] not in b[-2:]:
        return Cost()  # packed, or of other shapes
    sizes = [inputs.sizes[name] for name in ("a", "b", "out")] if out else [None]
    moved = (
        sum(math.prod(one) * size for one, size in zip((a, b, out), sizes, strict=True))
        if all(sizes)
        else None
    )
    return Cost(2 * math.prod(a) * columns, moved)


def grouped_matmul_cost(inputs: Inputs) -> Cost:
    """[M, K] @ [G, K, N] -> [M, N], [G, M, K] @ [K, N] -> [M, N], [M, K] @ [K, N] -> [G, M, N]:
    each row of M, column of N, or part of K belongs to one group"""
    a, b, size = inputs.shapes["a"], inputs.shapes["b"], inputs.sizes["a"]
    per_group = a[0] if (len(a), len(b)) == (3, 2) else 1
    flops = 2 * math.prod(a) * b[-1] // per_group
    groups = (
        inputs.shapes["ends"][0]
        if len(a) == len(b) == 2
        else a[0] // per_group
        if len(a) == 3
        else 1
    )
    written = groups * a[-2] * b[-1] * max(size or 0, 2)  # of 8-bit numbers: bf16
    return Cost(
        flops, math.prod(a) * size + math.prod(b) * inputs.sizes["b"] + written if size else None
    )


def experts_cost(inputs: Inputs) -> Cost:
    """x [M, K], up [G, N or 2 N, K], down [G, K, N], chosen [M, experts of a token] -> [M, K]

    All chosen experts are counted as different as far as there are so many: bytes are those at
    most.  Of numbers packed in pairs the last dimension has half of them."""
    x, up, down, chosen = map(inputs.shapes.__getitem__, ("x", "up", "down", "chosen"))
    of_expert = up[1] * x[-1] + x[-1] * down[2] * (x[-1] // up[2])
    rows, sizes = math.prod(chosen), [inputs.sizes[name] for name in ("x", "up", "down")]
    if not all(sizes):
        return Cost(2 * rows * of_expert)
    weights = (up[1] * up[2] * sizes[1] + down[1] * down[2] * sizes[2]) * min(up[0], rows)
    return Cost(2 * rows * of_expert, 2 * math.prod(x) * sizes[0] + weights)


# ---- Attention -----------------------------------------------------------------------------------


class Window(NamedTuple):
    """Which keys a query sees, besides that of its own position."""

    left: float  # keys before it
    right: float  # keys after it
    top_left: bool  # the first query is beside the first key; else the last beside the last


def attention_cost(inputs: Inputs, heads_first: bool = False) -> Cost:
    """query [B, S, H, E] or, with heads first, [B, H, S, E], keys of length T -> the query's shape;
    the full S x T, causal or not, but of a window its width.

    Two matmuls forward; five backward, one of which recomputes the scores.  Of sequences packed
    into one ([tokens, H, E]) traces record the number and the longest, not the lengths: FLOPs are
    known where no query can have more keys than a sequence has on average, and else limited.  Of
    keys in pages of a cache only the longest is known.  What is needed at least is that of
    sequences of equal length, because it grows with their squares.
    """
    query, key, value = attention_shapes(inputs, heads_first)
    is_packed, pages = len(query) == 3, inputs.shapes.get("pages", [])
    if is_packed and "longest_keys" not in inputs.names:
        return Cost()
    position = -2 if heads_first and not is_packed else -3
    queries, length = query[position], key[position]
    window = window_of(inputs, heads_first)
    keys = min(longest_keys(inputs, length, is_packed), window.left + window.right + 1)
    is_backward = "gradient" in inputs.names
    per_key = query[-1] + value[-1]
    if is_backward:
        per_key = 3 * query[-1] + 2 * value[-1]
    flops = 2 * math.prod(query[:-1]) * keys * per_key
    if pages:
        return Cost(most_flops=flops, keys=keys)
    scores = 0  # of the forward pass, computed again
    if is_backward:
        scores = flops * query[-1] // per_key
    size, moved = inputs.sizes["query"], None
    if size:
        passes = 2 if is_backward else 1
        moved = (2 * math.prod(query) + math.prod(key) + math.prod(value)) * passes * size
    limited = keys if keys < length else None
    if not is_packed:
        per_query = 2 * math.prod(query[:-1]) // queries * per_key
        least = per_query * unmasked_pairs(queries, length, window)
        return Cost(flops, moved, None, limited, least, scores)
    sequences = inputs.shapes["key_edges"][0] - 1
    least = None
    if queries == length:
        least = 2 * query[-2] * unmasked_pairs_of_equal(queries, sequences, window) * per_key
    if keys <= length / sequences:
        return Cost(flops, moved, None, limited, least, scores)
    return Cost(None, moved, flops, limited, least)


def attention_shapes(inputs: Inputs, heads_first: bool) -> tuple[list, list, list]:
    """Of query, key and value; of packed sequences without the batch, which is 1."""
    query, key, value = (inputs.shapes[name] for name in ("query", "key", "value"))
    if query[0] == 1 and inputs.shapes.get("key_edges", []) and not heads_first:
        return query[-3:], key[-3:], value[-3:]
    return query, key, value


def window_of(inputs: Inputs, heads_first: bool) -> Window:
    mask = inputs.values.get("causal") or ""
    left, right = (width_of(inputs.values.get(name)) for name in ("left", "right"))
    if mask in CAUSAL:
        right = 0
    return Window(left, right, top_left=heads_first or mask == "1")


def width_of(text: str | None) -> float:
    """Of a side of a window; without a number it has no end."""
    return int(text) if re.fullmatch(r"\d+", text or "") else math.inf


def longest_keys(inputs: Inputs, length: int, is_packed: bool) -> float:
    """How many keys a query has at most, windows apart.  length: of the keys that were passed."""
    pages = inputs.shapes.get("pages", [])
    if not is_packed and not pages:
        return length
    longest = inputs.values.get("longest_keys")
    if not pages:
        return parse_value(longest)
    in_pages = pages[1] * inputs.shapes["key"][1]
    return min(in_pages, parse_value(longest)) if longest else in_pages


def heads_first_attention_cost(inputs: Inputs) -> Cost:
    return attention_cost(inputs, heads_first=True)


def untold_attention_cost(inputs: Inputs) -> Cost:
    """vLLM's own operator: what it takes from a cache is not among the inputs."""
    return Cost()


def batch_attention_cost(inputs: Inputs, otherwise: Callable, *sums: int) -> Cost:
    """Causal attention of a batch, by sums over the sequences of prompts and over those that
    generate: queries, keys, squares of queries, queries times keys.  query [tokens, H, E], key
    [..., H of keys, E]; the cache is read too."""
    query, key, value = map(inputs.shapes.__getitem__, ("query", "key", "value"))
    queries, keys, squares, products = map(sum, zip(sums[:4], sums[4:], strict=True))
    if math.prod(query[:-2]) != queries:  # a part of the batch, or attention to something else
        return otherwise(inputs)
    per_score = 2 * query[-2] * (query[-1] + value[-1])
    sizes = inputs.sizes["query"], inputs.sizes["key"]
    of_keys = keys * key[-2] * (key[-1] + value[-1])
    moved = queries * per_score // 2 * sizes[0] + of_keys * sizes[1] if all(sizes) else None
    return Cost(
        per_score * products, moved, None, None, per_score * (products - (squares - queries) // 2)
    )


CAUSAL = (
    "True",
    "1",
    "2",
)  # texts of the input; the numbers are kinds of masks, 1 from the upper left corner


def unmasked_pairs(queries: int, keys: int, window: Window) -> int:
    """How many scores are left, where a query sees the keys of its window."""
    beside = np.arange(queries) + (0 if window.top_left else keys - queries)
    last = np.minimum(beside + window.right, keys - 1)
    first = np.maximum(beside - window.left, 0)
    return int(np.maximum(last - first + 1, 0).sum())


def unmasked_pairs_of_equal(queries: int, sequences: int, window: Window) -> int:
    """The same of queries in so many sequences of equal length, as near as that can be."""
    each, longer = divmod(queries, sequences)
    of_shorter = (sequences - longer) * unmasked_pairs(each, each, window)
    return of_shorter + longer * unmasked_pairs(each + 1, each + 1, window)


def paged_attention_cost(inputs: Inputs) -> Cost:
    """query [sequences, H, E], keys and values in pages of a cache;
    no sequence is longer than the longest."""
    longest = parse_value(inputs.values["longest_keys"])
    return Cost(most_flops=4 * math.prod(inputs.shapes["query"]) * longest, keys=longest)


# ---- All else ------------------------------------------------------------------------------------

_OUTPUTS = {"swiglu_backward": 2}  # of the same size each; all others have one
_SAME_SHAPE = {
    "softmax",
    "log_softmax",
    "softmax_backward_data",
    "log_softmax_backward_data",
    "copy",
    "fill",
    "zero",
}
_OF_ONE_BYTE = re.compile(r"(eq|ne|lt|le|gt|ge|isnan|isfinite|logical_\w+)$")  # their outputs
_KINDS = (
    "bool",
    "int|long|short|char",
    "float|double|Half|BFloat|Float8",
    "complex",
)  # each widens those before it
_DEFAULT_SIZES = (1, 8, 4, 8)  # bytes of an element, of each kind


def streaming_cost(base: str, shapes: list, types: list) -> Cost:
    """Inputs read once, each output written once.

    The output of an element-wise operator has the shape to which the inputs are broadcast and the
    type to which PyTorch promotes them, all others those of the largest.  The first input of a copy
    is its target: it is written, not read.
    """
    # A number among the inputs has the shape [] and is no tensor, or one of type double.
    tensors = [
        (shape, kind) for shape, kind in zip(shapes, types, strict=False) if kind in BYTES_OF
    ]
    if not tensors or any(shape and isinstance(shape[0], list) for shape in shapes):
        return Cost()
    moved = [math.prod(one) * BYTES_OF[kind] for one, kind in tensors]
    read = 0 if base in ("fill", "zero") else sum(moved[base == "copy" :])
    largest = max((one for one, _ in tensors), key=math.prod)
    if category(f"aten::{base}") == "element-wise":
        largest = np.broadcast_shapes(*(one for one, _ in tensors))
        width = 1 if _OF_ONE_BYTE.match(base) else promoted_size(tensors)
    else:
        width = next(BYTES_OF[kind] for one, kind in tensors if one == largest or base == "copy")
    return Cost(None, read + _OUTPUTS.get(base, 1) * math.prod(largest) * width)


def promoted_size(tensors: list[tuple[list, str]]) -> int:
    """Bytes of an element of the result: a tensor without dimensions, such as a number, widens
    others only if it is of a higher kind, and then to the default type of that kind."""
    found = [(kind_of_number(kind), BYTES_OF[kind], bool(shape)) for shape, kind in tensors]
    with_dimensions = [one for one in found if one[2]] or found
    top, size, _ = max(with_dimensions)
    above = max(kind for kind, *_ in found)
    return _DEFAULT_SIZES[above] if above > top else size


def kind_of_number(kind: str) -> int:
    return max(i for i, pattern in enumerate(_KINDS) if re.search(pattern, kind))


def norm_cost(inputs: Inputs) -> Cost:
    """x -> one number, or one for each place in the dimensions that stay"""
    x, size, text = inputs.shapes["x"], inputs.sizes["x"], inputs.values.get("dimensions") or ""
    dims = parse_value(text) if text.startswith("[") and text != "[]" else range(len(x))
    return Cost(
        None,
        (math.prod(x) + math.prod(x) // math.prod(x[dim] for dim in dims)) * size if size else None,
    )


def parse_value(text: str):
    """'[1, 1]' -> [1, 1], 'True' -> True: the profiler's text of a concrete input."""
    if text in ("True", "False"):
        return text == "True"
    numbers = [int(number) for number in re.findall(r"-?\d+", text)]
    return numbers if text.startswith("[") else numbers[0]


# ---- Which formula, and the names of an operator's inputs, in its order --------------------------


class Formula(NamedTuple):
    """How the cost of an operator is computed."""

    cost: Callable[[Inputs], Cost]
    names: list[str]  # of its inputs


# By kind of work, as the tables of operator_costs.ini are called.
COST_OF_KIND = {
    "matmul": matmul_cost,
    "scaled matmul": scaled_matmul_cost,
    "grouped matmul": grouped_matmul_cost,
    "any layout matmul": any_layout_matmul_cost,
    "experts": experts_cost,
    "norm": norm_cost,
    "convolution": convolution_cost,
    "linear": linear_cost,
    "transposed convolution": transposed_convolution_cost,
    "dispatched convolution": dispatched_convolution_cost,
    "convolution backward": convolution_backward_cost,
    "gradient of input": gradient_of_input_cost,
    "attention": attention_cost,
    "heads first attention": heads_first_attention_cost,
    "untold attention": untold_attention_cost,
    "paged attention": paged_attention_cost,
}
_OF_A_CALLER = " of a caller"  # ends the names of tables of operators that call what does the work


def _read_formulas() -> tuple[dict[str, Formula], dict[str, Formula]]:
    """Of operators that do their work, and of those that call one which does."""
    tables = read_ini(Path(__file__).with_suffix(".ini"))
    shared = tables["shared"]
    formulas: dict[str, Formula] = {}
    formulas_of_callers: dict[str, Formula] = {}
    for table in tables.sections():
        if table == "shared":
            continue
        cost_of_kind = COST_OF_KIND[table.removesuffix(_OF_A_CALLER)]
        of_table = formulas_of_callers if table.endswith(_OF_A_CALLER) else formulas
        for operator, words in tables[table].items():
            names = []
            for word in words.split():
                names += shared.get(word, word).split()
            of_table[operator] = Formula(cost_of_kind, names)
    return formulas, formulas_of_callers


_FORMULAS, _CALLERS = _read_formulas()
