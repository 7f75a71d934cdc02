"""What is an operator or a kernel, by its name?"""

import re
from functools import cache

from analysis.vocabulary import roles
from analysis.vocabulary.collectives import UNKNOWN, collective_kind
from analysis.vocabulary.roles import Meaning

# The first pattern that matches names the category of an operator or kernel: `aten::addmm`, `Cijk_Ailk_...`.
_PATTERNS = {
    "communication": r"nccl|rccl|gloo|c10d::|all_?reduce|reduce_scatter|all_?gather|record_param_comms"
    r"|cross_device_reduce",  # the all-reduce of vLLM and SGLang
    "optimizer": r"optimizer\.|_foreach_|_fused_(adam|sgd|ada)|multi_tensor_apply|fusedadam|lamb_",
    "attention": r"scaled_dot_product|sdpa|(flash|efficient|paged|unified|sage)_?(attn|attention)|flash_?(fwd|bwd)|fmha"
    r"|mha_|attn_(fwd|bwd)|attention_(fwd|bwd)|sage_(fwd|bwd)|(batch|single)(prefill|decode)with|kernel_mha|\bxqa"
    r"|attend_ker|^_fwd_(grouped_)?kernel|(^|::|\d)mla_|flash_?mla|mla_(fwd|decode|prefill)|_fa[23]_c::|sgl_kernel::fwd",
    "convolution": r"conv(?!ert)|igemm|winograd|wgrad|dgrad|fprop|scudnn|implicit_gemm|im2col|col2im",
    "matmul": r"^bmm_|(^|::)(addm[mv]|mm|bmm|baddbmm|linear|mv|dot|einsum)_?$|(scaled|grouped|hipb)_mm|matmul"
    r"|(?<!fb)gemm|cijk_|cutlass(?!::\w+_t\b)|nvjet|fused_moe|fused_experts|fmoe|mmbackward|mm_backward|linear_backward"
    r"|wgmma|cublas|hipblas|rocblas|gemv|splitk|marlin|machete|llmm1|triton_(b?mm|addmm)|^fc-",
    "normalization": r"norm(?!al(_|$))|\bbn_[fb]w|subtensoropwith",  # the latter updates MIOpen's batch statistics
    "reduction": r"softmax|nll_loss|cross_entropy|mse_loss|reduce(?!r)|_pool|pool\dd|topk|sort"
    r"|::(sum|nansum|mean|prod|cumsum|cumprod|argmax|argmin|amax|amin|all|any|max|min|var|std|logsumexp)$",
    "copy": r"memcpy|memset|copy|clone|contiguous|::cat$|catarray|stack|(?<!pre)fill|zero_|zeros|ones|index|gather"
    r"|(?<!rotary_)embedding|kv_?cache|_and_cache|scatter|transpose_|batched_transpose|cnhw|nchw|repeat|(?<!un)roll|flip"
    r"|where|masked|nonzero|local_scalar|item|arange|select_backward|slice_backward|tril|triu|pad|_to_cpu",
    "element-wise": r"elementwise|rotary|act_and_mul|swiglu|quant|::_?(add|sub|rsub|mul|div|neg|pow|sqrt|rsqrt|exp|log"
    r"|log2|abs|sign|sin|cos|tanh|sigmoid|silu|gelu|relu|clamp|clamp_min|clamp_max|threshold|dropout|native_dropout|erf"
    r"|reciprocal|addcmul|addcdiv|lerp|eq|ne|lt|le|gt|ge|maximum|minimum|bitwise_\w+|logical_\w+|leaky_relu|hardtanh"
    r"|mish|softplus|mul_out|isnan|nan_to_num|isfinite|floor|round|remainder|square|bernoulli|normal|uniform|random"
    r"|lift_fresh|_amp_\w+)_?(_backward\w*)?_?$",
}
CATEGORIES = (*_PATTERNS, "other")
CATEGORY_PATTERNS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in _PATTERNS.items()}
# Kernels from torch.compile are named after all operators in them; their kind comes first.
_GENERATED = re.compile(r"(?:graph_\d+_)?(?:triton_)?(cpp|poi|red|per|tem)_fused")
_GENERATED_KIND = {"red": "reduction", "per": "reduction", "tem": "matmul"}
COMPILED = "Torch-Compiled|CompiledFunction|triton_"  # in names that only a compiled program has
MATMUL_CLASSES = ("matmul", "attention", "convolution")  # matmuls: may be compute-bound
VECTOR_CLASSES = ("optimizer", "normalization", "reduction", "element-wise")  # other arithmetic

_NODE = "^autograd::engine::evaluate_function: "
# The first pattern that is found in the name of an operator tells its role.
OPERATORS = {
    rf"{_NODE}torch::autograd::AccumulateGrad$": roles.ACCUMULATION,
    _NODE: roles.NODE,
    r"^\w+Backward\d*$|^torch::autograd::AccumulateGrad$": roles.NODE_FUNCTION,  # in PyTorch 1.8 the node itself
    r"::(view|_unsafe_view|reshape|_reshape_alias|as_strided|transpose|t|permute|expand|expand_as|unsqueeze|squeeze|slice"
    r"|select|narrow|chunk|split|unbind|detach|detach_|alias|empty|empty_like|empty_strided|resize_|result_type|to|item"
    r"|is_nonzero|set_|unflatten|flatten|view_as|movedim|swapaxes|T|mT|numpy_T|lift_fresh|real|imag)$|^detach"
    r"|^autograd::engine|Backward\d*$|AccumulateGrad$": roles.VIEW,
    r"^(_?c10d\w*|symm_mem|_C_custom_ar)::|^(vllm|sglang)::(in|out)?(place_)?(all_|reduce_scatter)": roles.COLLECTIVE,
    r"_local_scalar_dense$": roles.SCALAR_READ,
    r"_fused_(adam|sgd|ada)": roles.FUSED_UPDATE,
    r"_foreach_": roles.FOREACH,
}

BYTES_OF = {
    "double": 8, "float": 4, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "long": 8, "int": 4, "short": 2,
    "signed char": 1, "unsigned char": 1, "bool": 1, "c10::complex<float>": 8, "c10::complex<double>": 16,
    "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1, "c10::Float8_e4m3fnuz": 1, "c10::Float8_e5m2fnuz": 1,
}  # fmt: skip
# In the name of an operator that makes a tensor, and of a call of the driver that makes memory for some.
asks_for_memory = re.compile("Malloc|^aten::empty").search
# The same in what PyTorch notes of a collective.
BYTES_OF_COLLECTIVE = {
    "Double": 8, "Long": 8, "Float": 4, "Int": 4, "BFloat16": 2, "Half": 2, "Short": 2, "Byte": 1, "Char": 1, "Bool": 1,
    "Float8_e4m3fn": 1, "Float8_e5m2": 1, "Float8_e4m3fnuz": 1, "Float8_e5m2fnuz": 1,
}  # fmt: skip
TENSORS = {*BYTES_OF, "TensorList", "GenericList"}  # types of inputs that are tensors, or lists of them
PRECISION_OF = {"float": "fp32", "c10::BFloat16": "bf16", "c10::Half": "fp16"}  # float may be tf32 too
PRECISION_OF |= {name: "fp8" for name in BYTES_OF if "Float8" in name}


def category(name: str) -> str:
    """Of CATEGORIES, that of an operator or kernel."""
    if generated := _GENERATED.match(name):
        return _GENERATED_KIND.get(generated[1], "element-wise")
    return next((kind for kind, pattern in CATEGORY_PATTERNS.items() if pattern.search(name)), "other")


def operator_class(phase: str | None, kind: str) -> str:
    """The class of an operator in a step: the phase for data loading and the optimizer, else its category.

    Communication is its own class wherever it happens."""
    return phase if phase in ("data", "optimizer") and kind != "communication" else kind


@cache
def operator_role(name: str) -> str | None:
    role = next((role for pattern, role in OPERATORS.items() if re.search(pattern, name)), None)
    return None if role == roles.COLLECTIVE and collective_kind(name) == UNKNOWN else role


def is_of_pytorch(name: str) -> bool:
    """Whether a compiler of PyTorch knows the operator: those of engines and extensions are what they are."""
    return name.startswith("aten::")


def is_view_or_metadata_op(name: str) -> bool:
    """Whether it moves no elements of a tensor."""
    return operator_role(name) in roles.MOVES_NO_ELEMENT


def operator_meaning(name: str) -> Meaning:
    return Meaning(operator_role(name), *_work(name))


def gpu_meaning(name: str) -> Meaning:
    """Of a kernel, a copy or a memory set."""
    copy = re.search("^Memcpy (HtoD|DtoH)(.*Pinned)?", name)
    return Meaning(copy and (roles.PINNED_COPY if copy[2] else roles.HOST_COPY), *_work(name))


def _work(name: str) -> tuple[str, None, str | None]:
    kind = category(name)
    return kind, None, collective_kind(name) if kind == "communication" else None
