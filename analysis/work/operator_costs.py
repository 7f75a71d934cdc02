"""Category of an operator or kernel by its name, and FLOPs and bytes of a call by the shapes of its inputs."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

# The first pattern that matches names the category of an operator or kernel: `aten::addmm`, `Cijk_Ailk_...`.
_PATTERNS = {
    "communication": r"nccl|rccl|gloo|c10d::|all_?reduce|reduce_scatter|all_?gather|record_param_comms",
    "optimizer": r"optimizer\.|_foreach_|_fused_(adam|sgd|ada)|multi_tensor_apply|fusedadam|lamb_",
    "attention": r"scaled_dot_product|(flash|efficient|paged|unified|sage)_?(attn|attention)|flash_?(fwd|bwd)|fmha|mha_"
    r"|attn_(fwd|bwd)|attention_(fwd|bwd)|sage_(fwd|bwd)",
    "convolution": r"conv(?!ert)|igemm|winograd|wgrad|dgrad|implicit_gemm|im2col|col2im",
    "matmul": r"^bmm_|(^|::)(addm[mv]|mm|bmm|baddbmm|matmul|linear|mv|dot|einsum|_scaled_mm)_?$|gemm|cijk_|cutlass"
    r"|nvjet|fused_moe|mmbackward|mm_backward|linear_backward|wgmma|cublas|hipblas|rocblas|gemv|splitk",
    "normalization": r"norm(?!al(_|$))|subtensoropwith",  # MIOpen's batch norm statistics are updated by the latter
    "reduction": r"softmax|nll_loss|cross_entropy|mse_loss|reduce(?!r)|_pool|pool\dd|topk|sort"
    r"|::(sum|nansum|mean|prod|cumsum|cumprod|argmax|argmin|amax|amin|all|any|max|min|var|std|logsumexp)$",
    "copy": r"memcpy|memset|copy|clone|contiguous|::cat$|catarray|stack|(?<!pre)fill|zero_|zeros|ones|index|gather"
    r"|(?<!rotary_)embedding|kv_?cache|scatter|transpose_|batched_transpose|cnhw|nchw|repeat|(?<!un)roll|flip"
    r"|where|masked|nonzero|local_scalar|item|arange|select_backward|slice_backward|tril|triu|pad|_to_cpu",
    "element-wise": r"elementwise|rotary|act_and_mul|swiglu|quant|::_?(add|sub|rsub|mul|div|neg|pow|sqrt|rsqrt|exp|log"
    r"|log2|abs|sign|sin|cos|tanh|sigmoid|silu|gelu|relu|clamp|clamp_min|clamp_max|threshold|dropout|native_dropout|erf"
    r"|reciprocal|addcmul|addcdiv|lerp|eq|ne|lt|le|gt|ge|maximum|minimum|bitwise_\w+|logical_\w+|leaky_relu|hardtanh"
    r"|mish|softplus|mul_out|isnan|nan_to_num|isfinite|floor|round|remainder|square|bernoulli|normal|uniform|random"
    r"|lift_fresh|_amp_\w+)_?(_backward\w*)?_?$",
}
CATEGORIES = (*_PATTERNS, "other")
_CATEGORY = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in _PATTERNS.items()}
# Kernels from torch.compile are named after all operators in them; their kind comes first.
_GENERATED = re.compile(r"(?:graph_\d+_)?(?:triton_)?(cpp|poi|red|per|tem)_fused")
_GENERATED_KIND = {"red": "reduction", "per": "reduction", "tem": "matmul"}
MATMUL_CLASSES = ("matmul", "attention", "convolution")  # matmuls: may be compute-bound
VECTOR_CLASSES = ("optimizer", "normalization", "reduction", "element-wise")  # other arithmetic

# Operators that make views, allocate, or only call others.
_MOVES_NO_ELEMENT = re.compile(
    r"::(view|_unsafe_view|reshape|_reshape_alias|as_strided|transpose|t|permute|expand|expand_as|unsqueeze|squeeze|slice"
    r"|select|narrow|chunk|split|unbind|detach|detach_|alias|empty|empty_like|empty_strided|resize_|result_type|to|item"
    r"|is_nonzero|set_|unflatten|flatten|view_as|movedim|swapaxes|T|mT|numpy_T|lift_fresh|real|imag)$|^detach"
    r"|^autograd::engine|Backward\d*$|AccumulateGrad$"
)

BYTES_OF = {
    "double": 8, "float": 4, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "long": 8, "int": 4, "short": 2,
    "signed char": 1, "unsigned char": 1, "bool": 1, "c10::complex<float>": 8, "c10::complex<double>": 16,
    "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1, "c10::Float8_e4m3fnuz": 1, "c10::Float8_e5m2fnuz": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """FLOPs and bytes of one call; None if the shapes do not determine them."""

    flops: int | None = None
    bytes: int | None = None  # inputs read and outputs written once
    most_flops: int | None = None  # an upper limit of attention over packed sequences, whose lengths are not recorded
    keys: int | None = None  # of each query at most, where that is not all of them: packed sequences, windows


def category(name: str) -> str:
    if generated := _GENERATED.match(name):
        return _GENERATED_KIND.get(generated[1], "element-wise")
    return next((kind for kind, pattern in _CATEGORY.items() if pattern.search(name)), "other")


def operator_class(phase: str | None, kind: str) -> str:
    """The class of an operator in a step: the phase for data loading and the optimizer, else its category.

    Communication is its own class wherever it happens."""
    return phase if phase in ("data", "optimizer") and kind != "communication" else kind


def is_view_or_metadata_op(name: str) -> bool:
    """Whether it moves no elements of a tensor."""
    return bool(_MOVES_NO_ELEMENT.search(name))


def cost(name: str, shapes: list, types: list | None, values: list | None) -> Cost:
    """FLOPs (two per multiply-add, matmuls only) and bytes of a call, from the inputs that a trace records.

    Traces do not record outputs.  Their shapes follow from the inputs for matmuls, convolutions, element-wise
    operators, normalizations and copies; the cost of others is unknown.
    """
    ours = name.startswith(("aten::", "kernels::"))
    base = name.rsplit("::", 1)[-1].strip("_") if ours else name if name in _ATTENTIONS else None
    if base is None or is_view_or_metadata_op(name) or not all(map(is_shape, shapes)):
        return Cost()
    try:
        sizes = [BYTES_OF.get(kind) for kind in types or [None] * len(shapes)]  # PyTorch 1.8 records no types
        if base in _MATMULS:
            return matmul_cost(base, shapes, sizes)
        if base == "scaled_mm":
            return scaled_matmul_cost(shapes, sizes, values or [])
        if base in _CONVOLUTIONS:
            return convolution_cost(shapes, sizes, (values or [])[_CONVOLUTIONS[base] :])
        if base == "convolution_backward":
            return convolution_backward_cost(shapes, sizes, values or [])
        if base in _ATTENTIONS:
            return attention_cost(shapes, sizes, values or [], base)
        if base == "cudnn_convolution_backward_input":  # PyTorch 1.8: size of the input, gradient, weight
            return Cost(2 * math.prod(shapes[1]) * math.prod(shapes[2][1:]))
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


# Only operators that do the work themselves are in these tables, not those that call them (linear, conv2d).
_MATMULS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}  # position of the first factor
_CONVOLUTIONS = {"miopen_convolution": 3, "cudnn_convolution": 2, "mkldnn_convolution": 3}  # position of the padding
_ATTENTIONS = {  # order of sequence and head dimensions, and position of the query: in backward, after the gradient
    "flash_attention_forward": ("SH", 0),
    "efficient_attention_forward": ("SH", 0),
    "scaled_dot_product_cudnn_attention": ("HS", 0),
    "scaled_dot_product_flash_attention_for_cpu": ("HS", 0),
    "flash_attn_3::fwd": ("SH", 0),
    "flash_attn_3::bwd": ("SH", 1),
    "flash_attention_backward": ("SH", 1),
    "efficient_attention_backward": ("SH", 1),
    "scaled_dot_product_cudnn_attention_backward": ("HS", 1),
    "scaled_dot_product_flash_attention_for_cpu_backward": ("HS", 1),
}
# Among their inputs: the edges of packed keys, the most keys of a sequence, whether causal, window to the left, right.
_PACKING = {
    "flash_attention_forward": (4, 6, 8, 11, 12),
    "flash_attention_backward": (7, 9, 11, 15, 16),
    "flash_attn_3::fwd": (8, 13, 24, 25, 26),
    "flash_attn_3::bwd": (10, 14, 16, 17, 18),
}
_OUTPUTS = {"swiglu_backward": 2}  # of the same size each; all others have one
_SAME_SHAPE = {"softmax", "log_softmax", "softmax_backward_data", "log_softmax_backward_data", "copy", "fill", "zero"}


def matmul_cost(base: str, shapes: list, sizes: list) -> Cost:
    """[..., M, K] @ [..., K, N] -> [..., M, N]"""
    first = _MATMULS[base]
    a, b = shapes[first], shapes[first + 1]
    out = math.prod(a[:-1]) * b[-1]
    flops = 2 * out * a[-1]
    elements = math.prod(a) + math.prod(b) + out + (math.prod(shapes[0]) if first else 0)
    return Cost(flops, elements * sizes[first] if sizes[first] else None)


def scaled_matmul_cost(shapes: list, sizes: list, values: list) -> Cost:
    """[M, K] @ [K, N] of 8-bit numbers -> [M, N] in the type that the seventh input names by its number in PyTorch"""
    a, b = shapes[:2]
    written = {"5": 2, "6": 4, "15": 2}.get(values[6]) if len(values) > 6 else None  # fp16, fp32, bf16
    read = math.prod(a) * sizes[0] + math.prod(b) * sizes[1] if sizes[0] and sizes[1] else None
    known = written is not None and read is not None
    return Cost(2 * a[0] * a[1] * b[1], read + a[0] * b[1] * written if known else None)


def convolution_cost(shapes: list, sizes: list, values: list) -> Cost:
    """input [N, C, *size], weight [K, C / groups, *kernel] -> [N, K, *out size]"""
    x, weight = shapes[:2]
    padding, stride, dilation = (parse_value(text) for text in values[:3])
    spatial = [
        (size + 2 * pad - step * (kernel - 1) - 1) // jump + 1
        for size, kernel, jump, pad, step in zip(x[2:], weight[2:], stride, padding, dilation, strict=True)
    ]
    out = x[0] * weight[0] * math.prod(spatial)
    elements = math.prod(x) + math.prod(weight) + out
    return Cost(2 * out * math.prod(weight[1:]), elements * sizes[0] if sizes[0] else None)


def convolution_backward_cost(shapes: list, sizes: list, values: list) -> Cost:
    """grad [N, K, *out size], input, weight -> gradients of input and weight, each a matmul of the forward's size"""
    grad, x, weight = shapes[:3]
    wanted = values[-1].count("True", 0, values[-1].rindex(",")) if values[-1].startswith("[") else 2
    elements = math.prod(grad) + (1 + wanted) * (math.prod(x) + math.prod(weight)) // 2
    return Cost(wanted * 2 * math.prod(grad) * math.prod(weight[1:]), elements * sizes[0] if sizes[0] else None)


def attention_cost(shapes: list, sizes: list, values: list, base: str) -> Cost:
    """query [B, S, H, E] or [B, H, S, E], keys of length T -> the query's shape; the full S x T, causal or not, but of
    a window its width.

    Two matmuls forward; five backward, one of which recomputes the scores.  Of sequences packed into one
    ([tokens, H, E]) traces record the number and the longest, not the lengths: FLOPs are known where no query can have
    more keys than a sequence has on average, and else limited.
    """
    order, first = _ATTENTIONS[base]
    query, key, value = shapes[first : first + 3]
    elements = 2 * math.prod(query) + math.prod(key) + math.prod(value)
    moved = elements * (2 if first else 1) * sizes[first] if sizes[first] else None
    packed, length = len(query) == 3, key[-3 if order == "SH" else -2]
    if packed and base not in _PACKING:
        return Cost()
    keys = length
    if base in _PACKING:
        edges, longest, *mask = _PACKING[base]
        keys = parse_value(values[longest]) if packed else length
        keys = min(keys, window_of(*(values[i] if i < len(values) else "" for i in mask)))
    flops = 2 * math.prod(query[:-1]) * keys * (3 * query[-1] + 2 * value[-1] if first else query[-1] + value[-1])
    if packed and keys > length / (shapes[edges][0] - 1):
        return Cost(None, moved, flops, keys)
    return Cost(flops, moved, None, keys if keys < length else None)


def window_of(causal: str, left: str, right: str) -> float:
    """How many keys a query sees at most, by the texts of these inputs; a negative number, or none, is no limit."""
    left, right = (int(text) if re.fullmatch(r"-?\d+", text) else -1 for text in (left, right))
    right = 0 if causal == "True" else right
    return left + right + 1 if left >= 0 and right >= 0 else math.inf


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
