"""FLOPs and bytes of an operator's call, by the shapes of its inputs.

Traces record inputs by their position alone.  The table at the end names them, in the order in which an operator takes
them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import partial

from analysis.vocabulary.operators import BYTES_OF, category, is_view_or_metadata_op


@dataclass(frozen=True)
class Cost:
    """FLOPs and bytes of one call; None if the shapes do not determine them."""

    flops: int | None = None
    bytes: int | None = None  # inputs read and outputs written once
    most_flops: int | None = None  # an upper limit of attention over packed sequences, whose lengths are not recorded
    keys: int | None = None  # of each query at most, where that is not all of them: packed sequences, windows


@dataclass(frozen=True)
class Inputs:
    """The recorded inputs of a call.  Raises IndexError for one that was not recorded."""

    shapes: list
    sizes: list[int | None]  # bytes of an element; None: not a tensor, or not known
    values: list[str]  # the profiler's texts of inputs that are no tensors
    names: list[str]

    def shape(self, name: str) -> list:
        return self.shapes[self.names.index(name)]

    def size(self, name: str) -> int | None:
        return self.sizes[self.names.index(name)]

    def value(self, name: str) -> str:
        return self.values[self.names.index(name)]

    def value_or_none(self, name: str) -> str | None:
        return self.values[i] if (i := self.names.index(name)) < len(self.values) else None


def cost(name: str, shapes: list, types: list | None, values: list | None) -> Cost:
    """FLOPs (two per multiply-add, matmuls only) and bytes of a call, from the inputs that a trace records.

    Traces do not record outputs.  Their shapes follow from the inputs for matmuls, convolutions, element-wise
    operators, normalizations and copies; the cost of others is unknown.
    """
    ours = name.startswith(("aten::", "kernels::"))
    base = name.rsplit("::", 1)[-1].strip("_") if ours else name if name in _FORMULAS else None
    if base is None or is_view_or_metadata_op(name) or not all(map(is_shape, shapes)):
        return Cost()
    try:
        sizes = [BYTES_OF.get(kind) for kind in types or [None] * len(shapes)]  # PyTorch 1.8 records no types
        if base in _FORMULAS:
            formula, names = _FORMULAS[base]
            return formula(Inputs(shapes, sizes, values or [], names.split()))
        if category(name) in ("element-wise", "normalization") or base in _SAME_SHAPE:
            return streaming_cost(base, shapes, sizes)
    except (IndexError, TypeError, ValueError):  # shapes that no operator of this name takes
        pass
    return Cost()


def factor_type(shapes: list, types: list | None) -> str | None:
    """The type of what a matmul multiplies, its first input of two or more dimensions: scales and biases have fewer."""
    pairs = zip(shapes, types or [], strict=False)
    return next((kind for shape, kind in pairs if isinstance(shape, list) and len(shape) > 1), None)


def is_shape(value) -> bool:
    """A list of sizes, or of shapes."""
    return isinstance(value, list) and all(
        is_shape(one) if isinstance(one, list) else isinstance(one, int) and one >= 0 for one in value
    )


# ---- Matmuls and convolutions --------------------------------------------------------------------------------------

TYPE_SIZES = {"5": 2, "6": 4, "15": 2}  # bytes by PyTorch's number of a type: fp16, fp32, bf16


def matmul_cost(inputs: Inputs) -> Cost:
    """[..., M, K] @ [..., K, N] -> [..., M, N]"""
    a, b = inputs.shape("a"), inputs.shape("b")
    out = math.prod(a[:-1]) * b[-1]
    added = math.prod(inputs.shape("added")) if "added" in inputs.names else 0
    elements, size = math.prod(a) + math.prod(b) + out + added, inputs.size("a")
    return Cost(2 * out * a[-1], elements * size if size else None)


def scaled_matmul_cost(inputs: Inputs) -> Cost:
    """[M, K] @ [K, N] of 8-bit numbers -> [M, N] in the type that is asked for"""
    a, b, sizes = inputs.shape("a"), inputs.shape("b"), (inputs.size("a"), inputs.size("b"))
    written = TYPE_SIZES.get(inputs.value_or_none("out_type"))
    read = math.prod(a) * sizes[0] + math.prod(b) * sizes[1] if all(sizes) else None
    known = written is not None and read is not None
    return Cost(2 * a[0] * a[1] * b[1], read + a[0] * b[1] * written if known else None)


def convolution_cost(inputs: Inputs) -> Cost:
    """x [N, C, *size], weight [K, C / groups, *kernel] -> [N, K, *out size]"""
    x, weight, size = inputs.shape("x"), inputs.shape("weight"), inputs.size("x")
    padding, stride, dilation = (parse_value(inputs.value(name)) for name in ("padding", "stride", "dilation"))
    spatial = [
        (length + 2 * pad - step * (kernel - 1) - 1) // jump + 1
        for length, kernel, jump, pad, step in zip(x[2:], weight[2:], stride, padding, dilation, strict=True)
    ]
    out = x[0] * weight[0] * math.prod(spatial)
    elements = math.prod(x) + math.prod(weight) + out
    return Cost(2 * out * math.prod(weight[1:]), elements * size if size else None)


def convolution_backward_cost(inputs: Inputs) -> Cost:
    """gradient [N, K, *out size], x, weight -> gradients of x and weight, each a matmul of the forward's size"""
    gradient, x, weight, size = *map(inputs.shape, ("gradient", "x", "weight")), inputs.size("gradient")
    mask = inputs.value("output_mask")  # which gradients are wanted: of x, of the weight, of the bias
    wanted = mask.count("True", 0, mask.rindex(",")) if mask.startswith("[") else 2
    elements = math.prod(gradient) + (1 + wanted) * (math.prod(x) + math.prod(weight)) // 2
    flops = wanted * 2 * math.prod(gradient) * math.prod(weight[1:])
    return Cost(flops, elements * size if size else None)


def gradient_of_input_cost(inputs: Inputs) -> Cost:
    """gradient [N, K, *out size], weight [K, C / groups, *kernel] -> [N, C, *size], in PyTorch 1.8"""
    return Cost(2 * math.prod(inputs.shape("gradient")) * math.prod(inputs.shape("weight")[1:]))


# ---- Attention -----------------------------------------------------------------------------------------------------


def attention_cost(inputs: Inputs, heads_first: bool) -> Cost:
    """query [B, S, H, E] or, with heads first, [B, H, S, E], keys of length T -> the query's shape; the full S x T,
    causal or not, but of a window its width.

    Two matmuls forward; five backward, one of which recomputes the scores.  Of sequences packed into one
    ([tokens, H, E]) traces record the number and the longest, not the lengths: FLOPs are known where no query can have
    more keys than a sequence has on average, and else limited.
    """
    query, key, value = map(inputs.shape, ("query", "key", "value"))
    backward, size = "gradient" in inputs.names, inputs.size("query")
    elements = 2 * math.prod(query) + math.prod(key) + math.prod(value)
    moved = elements * (2 if backward else 1) * size if size else None
    packed, length = len(query) == 3, key[-2 if heads_first else -3]
    may_be_packed = "key_edges" in inputs.names
    if packed and not may_be_packed:
        return Cost()
    keys = length
    if may_be_packed:
        keys = parse_value(inputs.value("longest_keys")) if packed else length
        keys = min(keys, window_width(*map(inputs.value_or_none, ("causal", "left", "right"))))
    per_key = 3 * query[-1] + 2 * value[-1] if backward else query[-1] + value[-1]
    flops = 2 * math.prod(query[:-1]) * keys * per_key
    if packed and keys > length / (inputs.shape("key_edges")[0] - 1):
        return Cost(None, moved, flops, keys)
    return Cost(flops, moved, None, keys if keys < length else None)


def window_width(causal: str | None, left: str | None, right: str | None) -> float:
    """How many keys a query sees at most, by the texts of these inputs; a negative number, or none, is no limit."""
    left, right = (int(text) if re.fullmatch(r"-?\d+", text or "") else -1 for text in (left, right))
    right = 0 if causal == "True" else right
    return left + right + 1 if left >= 0 and right >= 0 else math.inf


# ---- All else ------------------------------------------------------------------------------------------------------

_OUTPUTS = {"swiglu_backward": 2}  # of the same size each; all others have one
_SAME_SHAPE = {"softmax", "log_softmax", "softmax_backward_data", "log_softmax_backward_data", "copy", "fill", "zero"}


def streaming_cost(base: str, shapes: list, sizes: list) -> Cost:
    """Inputs read once, each output, of their broadcast shape and widest type, written once.

    The first input of a copy is its target: it is written, not read.
    """
    # A number among the inputs has the shape [] and no size; a tensor of one element has a size.
    tensors = [(math.prod(shape), size) for shape, size in zip(shapes, sizes, strict=False) if size]
    if not tensors or any(shape and isinstance(shape[0], list) for shape in shapes):
        return Cost()
    elements = max(n for n, _ in tensors)
    read = 0 if base in ("fill", "zero") else sum(n * size for n, size in tensors[base == "copy" :])
    written = elements * (tensors[0][1] if base == "copy" else max(size for _, size in tensors))
    return Cost(None, read + _OUTPUTS.get(base, 1) * written)


def parse_value(text: str):
    """'[1, 1]' -> [1, 1], 'True' -> True: the profiler's text of a concrete input."""
    if text in ("True", "False"):
        return text == "True"
    numbers = [int(number) for number in re.findall(r"-?\d+", text)]
    return numbers if text.startswith("[") else numbers[0]


# ---- Which formula, and the names of an operator's inputs, in its order ---------------------------------------------

_ATTENTION = partial(attention_cost, heads_first=False)
_ATTENTION_BY_HEADS = partial(attention_cost, heads_first=True)
# Only operators that do the work themselves are in this table, not those that call them (linear, conv2d).
_FORMULAS = {
    "mm": (matmul_cost, "a b"),
    "bmm": (matmul_cost, "a b"),
    "addmm": (matmul_cost, "added a b"),
    "baddbmm": (matmul_cost, "added a b"),
    "scaled_mm": (scaled_matmul_cost, "a b scale_a scale_b bias scale_result out_type"),
    "miopen_convolution": (convolution_cost, "x weight bias padding stride dilation"),
    "mkldnn_convolution": (convolution_cost, "x weight bias padding stride dilation"),
    "cudnn_convolution": (convolution_cost, "x weight padding stride dilation"),
    "convolution_backward": (
        convolution_backward_cost,
        "gradient x weight bias_sizes stride padding dilation transposed output_padding groups output_mask",
    ),
    "cudnn_convolution_backward_input": (gradient_of_input_cost, "size gradient weight"),
    "flash_attention_forward": (
        _ATTENTION,
        "query key value query_edges key_edges longest_queries longest_keys dropout causal debug scale left right",
    ),
    "flash_attention_backward": (
        _ATTENTION,
        "gradient query key value out logsumexp query_edges key_edges longest_queries longest_keys dropout causal "
        "rng_state unused scale left right",
    ),
    "flash_attn_3::fwd": (
        _ATTENTION,
        "query key value new_key new_value query_value out query_edges key_edges new_key_edges used_queries used_keys "
        "longest_queries longest_keys page_table batch_of_cache left_padding rotary_cos rotary_sin rotary_lengths "
        "query_scale key_scale value_scale scale causal left right",
    ),
    "flash_attn_3::bwd": (
        _ATTENTION,
        "gradient query key value out logsumexp query_gradient key_gradient value_gradient query_edges key_edges "
        "used_queries used_keys longest_queries longest_keys scale causal left right",
    ),
    "efficient_attention_forward": (_ATTENTION, "query key value"),
    "efficient_attention_backward": (_ATTENTION, "gradient query key value"),
    "scaled_dot_product_cudnn_attention": (_ATTENTION_BY_HEADS, "query key value"),
    "scaled_dot_product_cudnn_attention_backward": (_ATTENTION_BY_HEADS, "gradient query key value"),
    "scaled_dot_product_flash_attention_for_cpu": (_ATTENTION_BY_HEADS, "query key value"),
    "scaled_dot_product_flash_attention_for_cpu_backward": (_ATTENTION_BY_HEADS, "gradient query key value"),
}
