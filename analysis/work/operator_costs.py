"""FLOPs and bytes of an operator's call, by the shapes of its inputs as a trace records them.

Traces record inputs by their position alone: here they are named, in the order in which an operator
takes them, beside the formula that reads them.  PyTorch has formulas of FLOPs too, which are taken
where a step is run on fake tensors (dispatched_costs); a trace is read without PyTorch, which takes
seconds to import.  The tests hold both against each other.
"""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from analysis.vocabulary.annotations import BATCH
from analysis.vocabulary.kernel_classes import CLASS_OF_NAME, Writes, category
from analysis.vocabulary.operators import BYTES_OF, is_view_or_metadata_op
from analysis.work.attention_costs import (
    ATTENTION_INPUTS,
    BatchSums,
    attention_cost,
    batch_attention_cost,
    untold_attention_cost,
)
from analysis.work.cost import Cost, Inputs, named_inputs, parse_value

# What formulas raise for inputs that no operator of this name takes, such as a stride of 0
NO_SUCH_INPUTS = (LookupError, TypeError, ValueError, ZeroDivisionError)


class Formula(NamedTuple):
    """How the cost of an operator is computed."""

    cost: Callable[[Inputs], Cost]
    inputs: list[str]  # their names, in the order in which the operator takes them


def cost(
    name: str, shapes: list, types: list | None, values: list | None, batch: str | None = None
) -> Cost:
    """FLOPs (two per multiply-add, matmuls only) and bytes of a call, from the inputs that a trace
    records.

    Traces do not record outputs.  Their shapes follow from the inputs for matmuls, convolutions,
    element-wise operators, normalizations and copies; the cost of others is unknown.  batch: the
    range around the call that tells the lengths of sequences.
    """
    base = base_name(name)
    if base is None or is_view_or_metadata_op(name) or not all(map(is_shape, shapes)):
        return Cost()
    try:
        if base in FORMULAS:
            return cost_by_formula(FORMULAS[base], shapes, types, values, batch)
        writes = Writes.AS_LARGEST
        if base not in SAME_SHAPE:
            writes = CLASS_OF_NAME[category(name)].writes
        if writes != Writes.NOT_TOLD:
            return streaming_cost(base, writes, shapes, types or [])
    except NO_SUCH_INPUTS:
        pass
    return Cost()


def base_name(name: str) -> str | None:
    """The name by which a formula is found: of operators of PyTorch and of ours without namespace
    and underscores, unless a formula has it whole; None for others that have no formula."""
    if name in FORMULAS:
        return name
    if name.startswith(("aten::", "kernels::")):
        return name.rsplit("::", 1)[-1].strip("_")
    return None


def cost_by_formula(
    formula: Formula, shapes: list, types: list | None, values: list | None, batch: str | None
) -> Cost:
    inputs = named_inputs(formula.inputs, shapes, types, values)
    of_batch = BATCH.match(batch or "")
    if of_batch and formula.cost in (attention_cost, untold_attention_cost):
        sums = [int(number) for number in of_batch.groups()]  # of prompts, of those that generate
        both = [prompts + others for prompts, others in zip(sums[:4], sums[4:], strict=True)]
        known = batch_attention_cost(inputs, BatchSums(*both))
        if known is not None:
            return known
    return formula.cost(inputs)


def tells_cost(name: str) -> bool:
    """Whether an operator calls one that does the work, so its inputs tell the cost of that."""
    return name.startswith("aten::") and name.removeprefix("aten::") in FORMULAS_OF_CALLERS


def cost_of_called(name: str, shapes: list, types: list | None, values: list | None) -> Cost:
    """The cost of the one operator that an operator calls to do its work, by the inputs of the
    caller, of this name."""
    if not all(map(is_shape, shapes)):
        return Cost()
    formula = FORMULAS_OF_CALLERS[name.removeprefix("aten::")]
    try:
        return cost_by_formula(formula, shapes, types, values, None)
    except NO_SUCH_INPUTS:
        return Cost()


def factor_type(shapes: list, types: list | None) -> str | None:
    """The type of what a matmul multiplies, its first input of two or more dimensions: scales and
    biases have fewer."""
    for shape, kind in zip(shapes, types or [], strict=False):
        if isinstance(shape, list) and len(shape) > 1:
            return kind
    return None


def is_shape(value: object) -> bool:
    """Whether it is a list of sizes, or of shapes."""
    if not isinstance(value, list):
        return False
    return all(is_size(entry) or is_shape(entry) for entry in value)


def is_size(value: object) -> bool:
    return isinstance(value, int) and value >= 0


# ---- Matmuls -------------------------------------------------------------------------------------

TYPE_SIZES = {"5": 2, "6": 4, "15": 2}  # bytes by PyTorch's number of a type: fp16, fp32, bf16


def matmul_cost(inputs: Inputs) -> Cost:
    """[..., M, K] @ [..., K, N] -> [..., M, N]"""
    a, b, size = inputs.shapes["a"], inputs.shapes["b"], inputs.sizes["a"]
    out = math.prod(a[:-1]) * b[-1]
    added = math.prod(inputs.shapes["added"]) if "added" in inputs.names else 0
    elements = math.prod(a) + math.prod(b) + out + added
    return Cost(2 * out * a[-1], elements * size if size else None)


def scaled_matmul_cost(inputs: Inputs) -> Cost:
    """[M, K] @ [K, N] of 8-bit numbers -> [M, N] in the type that is asked for"""
    a, b = inputs.shapes["a"], inputs.shapes["b"]
    size_a, size_b = inputs.sizes["a"], inputs.sizes["b"]
    size_out = TYPE_SIZES.get(inputs.values.get("out_type"))
    moved = None
    if size_a and size_b:
        read = math.prod(a) * size_a + math.prod(b) * size_b
        moved = read + a[0] * b[1] * size_out if size_out else None
    return Cost(2 * a[0] * a[1] * b[1], moved)


def any_layout_matmul_cost(inputs: Inputs) -> Cost:
    """a [M, K], b [K, N] or [N, K] -> [M, N]; bytes only where the output is among the inputs"""
    a, b, out = inputs.shapes["a"], inputs.shapes["b"], inputs.shapes.get("out", [])
    columns = b[1] if b[0] == a[-1] else b[0]
    if a[-1] not in b[-2:]:
        return Cost()  # packed, or of other shapes
    moved, names = None, ("a", "b", "out")
    if out and all(inputs.sizes[name] for name in names):
        moved = sum(math.prod(inputs.shapes[name]) * inputs.sizes[name] for name in names)
    return Cost(2 * math.prod(a) * columns, moved)


def grouped_matmul_cost(inputs: Inputs) -> Cost:
    """[M, K] @ [G, K, N] -> [M, N], [G, M, K] @ [K, N] -> [M, N], [M, K] @ [K, N] -> [G, M, N]:
    each row of M, column of N, or part of K belongs to one group"""
    a, b = inputs.shapes["a"], inputs.shapes["b"]
    groups_of_columns = outputs = 1
    if (len(a), len(b)) == (3, 2):
        groups_of_columns = a[0]
    elif len(a) == 3:
        outputs = a[0]
    elif len(a) == len(b) == 2:
        outputs = inputs.shapes["ends"][0]
    flops = 2 * math.prod(a) * b[-1] // groups_of_columns
    out = outputs * a[-2] * b[-1]
    moved, size_a, size_b = None, inputs.sizes["a"], inputs.sizes["b"]
    if size_a:
        size_out = max(size_a, 2)  # of 8-bit numbers: bf16
        moved = math.prod(a) * size_a + math.prod(b) * size_b + out * size_out
    return Cost(flops, moved)


def experts_cost(inputs: Inputs) -> Cost:
    """x [M, K], up [G, N or 2 N, K], down [G, K, N], chosen [M, experts of a token] -> [M, K]

    All chosen experts are counted as different as far as there are so many: bytes are those at
    most.  Of numbers packed in pairs the last dimension has half of them."""
    x, up, down = inputs.shapes["x"], inputs.shapes["up"], inputs.shapes["down"]
    rows = math.prod(inputs.shapes["chosen"])
    of_expert = up[1] * x[-1] + x[-1] * down[2] * (x[-1] // up[2])
    moved, sizes = None, inputs.sizes
    if sizes["x"] and sizes["up"] and sizes["down"]:
        weights = up[1] * up[2] * sizes["up"] + down[1] * down[2] * sizes["down"]
        moved = 2 * math.prod(x) * sizes["x"] + weights * min(up[0], rows)
    return Cost(2 * rows * of_expert, moved)


def linear_cost(inputs: Inputs) -> Cost:
    """x [..., K], weight [N, K] -> [..., N]"""
    x, weight, size = inputs.shapes["x"], inputs.shapes["weight"], inputs.sizes["x"]
    out = math.prod(x[:-1]) * weight[0]
    elements = math.prod(x) + math.prod(weight) + out
    return Cost(2 * out * x[-1], elements * size if size else None)


# ---- Convolutions --------------------------------------------------------------------------------


def convolution_cost(inputs: Inputs) -> Cost:
    """x [N, C, *size], weight [K, C / groups, *kernel] -> [N, K, *out size]"""
    x, weight, size = inputs.shapes["x"], inputs.shapes["weight"], inputs.sizes["x"]
    if inputs.values.get("transposed") == "True":
        return Cost()
    if not inputs.values.get("padding") or not inputs.values.get("stride"):
        return convolution_limits(x, weight, size)
    padding, stride = parse_value(inputs.values["padding"]), parse_value(inputs.values["stride"])
    dilation = [1] * len(stride)
    if "dilation" in inputs.names:
        dilation = parse_value(inputs.values["dilation"])
    out = x[0] * weight[0]
    places = zip(x[2:], weight[2:], stride, padding, dilation, strict=True)
    for length, kernel, jump, pad, step in places:
        reach = step * (kernel - 1) + 1  # of the kernel, from its first element to its last
        out *= (length + 2 * pad - reach) // jump + 1
    moved = (math.prod(x) + math.prod(weight) + out) * size if size else None
    return Cost(2 * out * math.prod(weight[1:]), moved)


def convolution_limits(x: list, weight: list, size: int | None) -> Cost:
    """Of a convolution whose stride and padding are not recorded: its output is as large as its
    input at most, and has a place for each patch of the kernel's size,
    or every second one, at least."""
    per_place = 2 * x[0] * weight[0] * math.prod(weight[1:])
    most, least = math.prod(x[2:]), 1
    for length, kernel in zip(x[2:], weight[2:], strict=True):
        least *= max(1, (length - kernel) // max(kernel, 2) + 1)
    elements = math.prod(x) + math.prod(weight) + x[0] * weight[0] * most
    moved = elements * size if size else None
    return Cost(None, moved, per_place * most, at_least_flops=per_place * least)


def transposed_convolution_cost(inputs: Inputs) -> Cost:
    """x [N, C, *size], weight [C, K / groups, *kernel] -> [N, K, *out size]: each element of x is
    multiplied with the kernels of its channel"""
    x, weight, size = inputs.shapes["x"], inputs.shapes["weight"], inputs.sizes["x"]
    stride, padding = parse_value(inputs.values["stride"]), parse_value(inputs.values["padding"])
    dilation = parse_value(inputs.values["dilation"])
    further = parse_value(inputs.values["output_padding"])
    groups = parse_value(inputs.values["groups"]) if "groups" in inputs.names else 1
    out = x[0] * weight[1] * groups
    places = zip(x[2:], weight[2:], stride, padding, dilation, further, strict=True)
    for length, kernel, jump, pad, step, more in places:
        reach = step * (kernel - 1) + 1
        out *= (length - 1) * jump - 2 * pad + reach + more
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


# ---- All else ------------------------------------------------------------------------------------

OUTPUTS = {"swiglu_backward": 2}  # of the same size each; all others have one
SAME_SHAPE = {
    "softmax",
    "log_softmax",
    "softmax_backward_data",
    "log_softmax_backward_data",
    "copy",
    "fill",
    "zero",
}
OF_ONE_BYTE = re.compile(r"(eq|ne|lt|le|gt|ge|isnan|isfinite|logical_\w+)$")  # their outputs


class NumberKind(NamedTuple):
    """A kind of types of numbers."""

    pattern: str  # found in the names of its types
    default_bytes: int  # of an element of its default type


# Each widens those before it.
NUMBER_KINDS = (
    NumberKind("bool", 1),
    NumberKind("int|long|short|char", 8),
    NumberKind("float|double|Half|BFloat|Float8", 4),
    NumberKind("complex", 8),
)


class Tensor(NamedTuple):
    shape: list[int]  # [] of a number
    kind: str  # of its elements

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * BYTES_OF[self.kind]


def streaming_cost(base: str, writes: Writes, shapes: list, types: list) -> Cost:
    """Inputs read once, each output written once.

    An output of the shape to which the inputs are broadcast has the type to which PyTorch promotes
    them, all others that of the largest.  The first input of a copy is its target: it is written,
    not read.
    """
    tensors = []
    for shape, kind in zip(shapes, types, strict=False):
        if kind in BYTES_OF:  # a number has the shape [] and is no tensor, or one of type double
            tensors.append(Tensor(shape, kind))
    if not tensors or any(shape and isinstance(shape[0], list) for shape in shapes):
        return Cost()
    read = tensors
    if base in ("fill", "zero"):
        read = []
    elif base == "copy":
        read = tensors[1:]
    written = OUTPUTS.get(base, 1) * output_bytes(base, writes, tensors)
    return Cost(bytes=sum(tensor.bytes for tensor in read) + written)


def output_bytes(base: str, writes: Writes, tensors: list[Tensor]) -> int:
    if writes == Writes.BROADCAST:
        shape = np.broadcast_shapes(*(tensor.shape for tensor in tensors))
        size = 1 if OF_ONE_BYTE.match(base) else promoted_size(tensors)
        return math.prod(shape) * size
    largest = max(tensors, key=lambda tensor: math.prod(tensor.shape))
    like = tensors[0] if base == "copy" else largest
    return math.prod(largest.shape) * BYTES_OF[like.kind]


def promoted_size(tensors: list[Tensor]) -> int:
    """Bytes of an element of the result: a tensor without dimensions, such as a number, widens
    others only if it is of a higher kind, and then to the default type of that kind."""
    with_dimensions = [tensor for tensor in tensors if tensor.shape] or tensors
    highest, size = max((kind_of_number(one.kind), BYTES_OF[one.kind]) for one in with_dimensions)
    highest_of_all = max(kind_of_number(tensor.kind) for tensor in tensors)
    return NUMBER_KINDS[highest_of_all].default_bytes if highest_of_all > highest else size


def kind_of_number(kind: str) -> int:
    """The last of NUMBER_KINDS that a type is of: a complex<float> is a complex number."""
    matching = [i for i, of in enumerate(NUMBER_KINDS) if re.search(of.pattern, kind)]
    return matching[-1]


def norm_cost(inputs: Inputs) -> Cost:
    """x -> one number, or one for each place in the dimensions that stay"""
    x, size, text = inputs.shapes["x"], inputs.sizes["x"], inputs.values.get("dimensions") or ""
    if not size:
        return Cost()
    dims = range(len(x))
    if text.startswith("[") and text != "[]":
        dims = parse_value(text)
    summed = math.prod(x[dim] for dim in dims)
    return Cost(bytes=(math.prod(x) + math.prod(x) // summed) * size)


# ---- Which formula, and the names of an operator's inputs, in its order --------------------------

CONVOLUTION = "x weight bias stride padding dilation"
EXPERTS = "x up down weights chosen"
# Operators that do their work themselves, not those that call them (linear, conv2d).  Those of
# PyTorch and of our kernels are named without their namespace and the underscores around them.
INPUTS: dict[Callable[[Inputs], Cost], dict[str, str]] = {
    matmul_cost: {"mm": "a b", "bmm": "a b", "addmm": "added a b", "baddbmm": "added a b"},
    scaled_matmul_cost: {"scaled_mm": "a b scale_a scale_b bias scale_result out_type"},
    grouped_matmul_cost: {
        "grouped_mm": "a b ends",
        "scaled_grouped_mm": "a b scale_a scale_b ends",
    },
    any_layout_matmul_cost: {
        "_C::cutlass_scaled_mm": "out a b",
        "_C::cutlass_scaled_mm_azp": "out a b",
        "sgl_kernel::fp8_scaled_mm": "a b",
        "sgl_kernel::int8_scaled_mm": "a b",
        "trtllm::cublas_scaled_mm": "a b",
        "vllm::rocm_unquantized_gemm": "a b",
        "aiter::gemm_a8w8": "a b",
        "aiter::gemm_a8w8_CK": "a b",
        "aiter::gemm_a8w8_blockscale": "a b",
        "aiter::hipb_mm": "a b",
        "_rocm_C::wvSplitK": "b a",
        "_rocm_C::LLMM1": "b a",
    },
    experts_cost: {
        "vllm::inplace_fused_experts": EXPERTS,
        "vllm::outplace_fused_experts": EXPERTS,
        "sglang::inplace_fused_experts": EXPERTS,
        "aiter::fused_moe_": EXPERTS,
        "sglang::outplace_fused_experts": EXPERTS,
        "vllm::rocm_aiter_fused_moe": EXPERTS,
    },
    norm_cost: {
        "norm": "x order dimensions",
        "linalg_norm": "x order dimensions",
        "linalg_vector_norm": "x order dimensions",
    },
    convolution_cost: {
        "miopen_convolution": "x weight bias padding stride dilation",
        "mkldnn_convolution": "x weight bias padding stride dilation",
        "cudnn_convolution": "x weight padding stride dilation",
        # Where no library is used
        "slow_conv2d_forward": "x weight kernel_size bias stride padding",
        "slow_conv3d_forward": "x weight kernel_size bias stride padding",
        "slow_conv_dilated2d": "x weight kernel_size bias stride padding dilation",
        "slow_conv_dilated3d": "x weight kernel_size bias stride padding dilation",
        "conv_depthwise2d": "x weight kernel_size bias stride padding dilation",
        "conv_depthwise3d": "x weight kernel_size bias stride padding dilation",
    },
    transposed_convolution_cost: {
        "miopen_convolution_transpose": (
            "x weight bias padding output_padding stride dilation groups"
        ),
        "cudnn_convolution_transpose": "x weight padding output_padding stride dilation groups",
        "slow_conv_transpose2d": "x weight kernel bias stride padding output_padding dilation",
        "slow_conv_transpose3d": "x weight kernel bias stride padding output_padding dilation",
    },
    dispatched_convolution_cost: {
        "aten::_convolution": f"{CONVOLUTION} transposed output_padding groups"
    },
    convolution_backward_cost: {
        "convolution_backward": (
            "gradient x weight bias_sizes stride padding dilation transposed output_padding groups"
            " output_mask"
        )
    },
    gradient_of_input_cost: {"cudnn_convolution_backward_input": "size gradient weight"},
    **ATTENTION_INPUTS,
}
# Operators that call one that does the work, and tell its inputs where that has none of its own.
INPUTS_OF_CALLERS: dict[Callable[[Inputs], Cost], dict[str, str]] = {
    convolution_cost: {
        "conv1d": CONVOLUTION,
        "conv2d": CONVOLUTION,
        "conv3d": CONVOLUTION,
        "convolution": f"{CONVOLUTION} transposed",
        "_convolution": f"{CONVOLUTION} transposed",
        "thnn_conv2d": "x weight kernel_size bias stride padding",
        "slow_conv3d": "x weight kernel_size bias stride padding",
    },
    linear_cost: {"linear": "x weight bias"},
    matmul_cost: {"matmul": "a b"},
}


def by_operator(tables: dict[Callable[[Inputs], Cost], dict[str, str]]) -> dict[str, Formula]:
    formulas = {}
    for formula, inputs_of in tables.items():
        for operator, names in inputs_of.items():
            formulas[operator] = Formula(formula, names.split())
    return formulas


FORMULAS = by_operator(INPUTS)
FORMULAS_OF_CALLERS = by_operator(INPUTS_OF_CALLERS)
