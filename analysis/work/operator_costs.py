"""FLOPs and bytes of an operator's call, by the shapes of its inputs.

Traces record inputs by their position alone.  operator_costs.ini names them, in the order in which
an operator takes them.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

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
    most_flops: int | None = (
        None  # an upper limit, of what not all is recorded: lengths of packed sequences, strides
    )
    keys: int | None = (
        None  # of each query at most, where that is not all of them: packed sequences, windows
    )
    unmasked_flops: int | None = None  # of attention
    recomputed_flops: int = (
        0  # of `flops`: what was computed before and is computed again, as fused attention does
    )
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
    base = name if name in _FORMULAS else name.rsplit("::", 1)[-1].strip("_") if ours else None
    if base is None or is_view_or_metadata_op(name) or not all(map(is_shape, shapes)):
        return Cost()
    try:
        sizes = [
            BYTES_OF.get(kind) for kind in types or [None] * len(shapes)
        ]  # PyTorch 1.8 records no types
        if base in _FORMULAS:
            formula, names = _FORMULAS[base]
            inputs = named_inputs(names, shapes, sizes, values)
            if formula in (attention_cost, untold_attention_cost) and (
                sums := BATCH.match(batch or "")
            ):
                return batch_attention_cost(inputs, formula, *map(int, sums.groups()))
            return formula(inputs)
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
    formula, names = _CALLERS[name.removeprefix("aten::")]
    sizes = [BYTES_OF.get(kind) for kind in types or [None] * len(shapes)]
    try:
        return formula(named_inputs(names, shapes, sizes, values))
    except (LookupError, TypeError, ValueError):  # shapes that no operator of this name takes
        return Cost()


def named_inputs(
    names: list[str], shapes: list, sizes: list[int | None], values: list | None
) -> Inputs:
    """sizes: bytes of an element of each input."""
    recorded = (dict(zip(names, of_all, strict=False)) for of_all in (shapes, sizes, values or []))
    return Inputs(*recorded, names)


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
    gradient, x, weight, size = (
        *map(inputs.shapes.__getitem__, ("gradient", "x", "weight")),
        inputs.sizes["gradient"],
    )
    mask = inputs.values[
        "output_mask"
    ]  # which gradients are wanted: of x, of the weight, of the bias
    of_x, of_weight = (re.findall("True|False", mask) or ["True", "True", ""])[:2]
    wanted = (of_x == "True") + (of_weight == "True")
    written = math.prod(x) * (of_x == "True") + math.prod(weight) * (of_weight == "True")
    elements = sum(map(math.prod, (gradient, x, weight))) + written
    transposed = inputs.values.get("transposed") == "True"
    each = math.prod(x if transposed else gradient) * math.prod(weight[1:])
    return Cost(wanted * 2 * each, elements * size if size else None)


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


def attention_cost(inputs: Inputs, heads_first: bool = False) -> Cost:
    """query [B, S, H, E] or, with heads first, [B, H, S, E], keys of length T -> the query's shape;
    the full S x T, causal or not, but of a window its width.

    Two matmuls forward; five backward, one of which recomputes the scores.  Of sequences packed
    into one ([tokens, H, E]) traces record the number and the longest, not the lengths: FLOPs are
    known where no query can have more keys than a sequence has on average, and else limited.  Of
    keys in pages of a cache only the longest is known.  What is needed at least is that of
    sequences of equal length, because it grows with their squares.
    """
    query, key, value = map(inputs.shapes.__getitem__, ("query", "key", "value"))
    if query[0] == 1 and inputs.shapes.get("key_edges", []) and not heads_first:
        query, key, value = (one[-3:] for one in (query, key, value))
    backward, size = "gradient" in inputs.names, inputs.sizes["query"]
    packed, pages = len(query) == 3, inputs.shapes.get("pages", [])
    if packed and "longest_keys" not in inputs.names:
        return Cost()
    position = -2 if heads_first and not packed else -3
    queries, length = query[position], key[position]
    mask, left, right = (inputs.values.get(name) or "" for name in ("causal", "left", "right"))
    left, right = (int(text) if re.fullmatch(r"\d+", text) else math.inf for text in (left, right))
    right = 0 if mask in CAUSAL else right
    longest = inputs.values.get("longest_keys") if packed or pages else str(length)
    in_pages = pages[1] * key[1] if pages else math.inf
    keys = min(
        in_pages, parse_value(longest) if longest or not pages else math.inf, left + right + 1
    )
    per_key = 3 * query[-1] + 2 * value[-1] if backward else query[-1] + value[-1]
    flops = 2 * math.prod(query[:-1]) * keys * per_key
    scores = flops * query[-1] // per_key if backward else 0  # of the forward pass, computed again
    if pages:
        return Cost(most_flops=flops, keys=keys)
    elements = 2 * math.prod(query) + math.prod(key) + math.prod(value)
    moved = elements * (2 if backward else 1) * size if size else None
    # The first query is beside the first key, or the last beside the last.
    pairs = partial(unmasked_pairs, left=left, right=right, top_left=heads_first or mask == "1")
    limited = keys if keys < length else None
    if not packed:
        least = 2 * math.prod(query[:-1]) // queries * pairs(queries, length) * per_key
        return Cost(flops, moved, None, limited, least, scores)
    sequences = inputs.shapes["key_edges"][0] - 1
    each, longer = divmod(queries, sequences)
    unmasked = (sequences - longer) * pairs(each, each) + longer * pairs(each + 1, each + 1)
    least = 2 * query[-2] * unmasked * per_key if queries == length else None
    known = keys <= length / sequences
    return Cost(
        flops if known else None,
        moved,
        None if known else flops,
        limited,
        least,
        scores if known else 0,
    )


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


def unmasked_pairs(queries: int, keys: int, left: float, right: float, top_left: bool) -> int:
    """How many scores are left, where a query sees so many keys before and after the one
    of its own position."""
    beside = np.arange(queries) + (0 if top_left else keys - queries)
    seen = np.minimum(beside + right, keys - 1) - np.maximum(beside - left, 0) + 1
    return int(np.maximum(seen, 0).sum())


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


_TABLES = read_ini(Path(__file__).with_suffix(".ini"))
_SHARED = _TABLES["shared"]
_OF_A_CALLER = " of a caller"  # ends the sections of operators that call what does the work
_FORMULAS, _CALLERS = {}, {}
for _section in _TABLES.sections():
    if _section != "shared":
        _formula, _rows = globals()[_section.removesuffix(_OF_A_CALLER)], _TABLES[_section].items()
        _known = _CALLERS if _section.endswith(_OF_A_CALLER) else _FORMULAS
        for _operator, _words in _rows:
            _known[_operator] = (
                _formula,
                [name for word in _words.split() for name in _SHARED.get(word, word).split()],
            )
