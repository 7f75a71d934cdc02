"""What is a class of operators and kernels?  One record: how its names look, what kind of work it
does, and what follows from that."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum


class Work(Enum):
    """What kernels of a class do, which tells what can limit them."""

    MULTIPLIES = "matmuls in it, so that arithmetic may limit it"
    CALCULATES = "other arithmetic on the elements that it reads, so that memory limits it"
    MOVES = "elements are moved, so that memory limits it"
    SENDS = "elements are sent to other ranks"
    UNKNOWN = "its name does not tell"


class Writes(Enum):
    """What an operator of a class writes, where no formula of its own tells."""

    BROADCAST = "the shape to which its inputs are broadcast"
    AS_LARGEST = "as much as its largest input"
    NOT_TOLD = "its inputs do not tell"


@dataclass(frozen=True, kw_only=True)
class KernelClass:
    """A class of operators and kernels.  passes, realistic_share and plural: of one that
    multiplies, and of no other."""

    name: str
    pattern: str  # found in the name of an operator or kernel, upper or lower case; "": none is
    work: Work
    can_be_fused: bool  # by a compiler, with operators of its kind beside it
    writes: Writes
    color: str
    # How often the time of a pass over its activations a kernel takes that arithmetic limits.
    # Limited by memory, a matmul reads and writes as much as a pass or two, attention and its
    # backward pass four to eight.
    passes: float | None = None
    # Of the datasheet's peak, what good kernels reach: large matmuls of libraries about 70%,
    # attention 50 to 73% (FlashAttention-2, arXiv 2307.08691, on an A100).
    realistic_share: float | None = None
    plural: str | None = None  # for sentences

    def __post_init__(self) -> None:
        """Raises ValueError for a record that lacks what its work needs."""
        needed = self.work is Work.MULTIPLIES
        for field in ("passes", "realistic_share", "plural"):
            if (getattr(self, field) is not None) != needed:
                raise ValueError(f"{self.name}: {field} is for what multiplies, and needed there")


# The first one counts whose pattern is found.
KERNEL_CLASSES = (
    KernelClass(
        name="communication",
        # cross_device_reduce: the all-reduce of vLLM and SGLang.  The last lines: expert
        # parallelism by DeepEP and others.
        pattern=(
            r"nccl|rccl|gloo|c10d::|all_?reduce|reduce_scatter|all_?gather|record_param_comms"
            r"|cross_device_reduce"
            r"|all_?to_?all|nvshmem|rocshmem|(dpsk|deep|uccl|mori|pplx)(::"
            r"|_)?ep(_\w+)?::(?!layout)|(inter|intra)node(_ll)?::(?!layout)"
            r"|(^|[^a-z])ep_?(dispatch|combine)|a2a_(dispatch|combine)"
        ),
        work=Work.SENDS,
        can_be_fused=False,
        writes=Writes.NOT_TOLD,
        color="#d81b7f",
    ),
    KernelClass(
        name="optimizer",
        pattern=(r"optimizer\.|_foreach_|_fused_(adam|sgd|ada)|multi_tensor_apply|fusedadam|lamb_"),
        work=Work.CALCULATES,
        can_be_fused=False,
        writes=Writes.NOT_TOLD,
        color="#b3261e",
    ),
    KernelClass(
        name="attention",
        pattern=(
            r"scaled_dot_product|sdpa|(flash|efficient|cudnn|paged|unified|sage)_?(attn"
            r"|attention)|flash_?(fwd|bwd)|fmha"
            r"|mha_|attn_(fwd|bwd)|attention_(fwd|bwd)|sage_(fwd|bwd)|(batch|single)(prefill"
            r"|decode)with|kernel_mha|\bxqa"
            r"|attend_ker|^_fwd_(grouped_)?kernel|(^|::|\d)mla_|flash_?mla|mla_(fwd|decode"
            r"|prefill)|_fa[23]_c::|sgl_kernel::fwd"
        ),
        work=Work.MULTIPLIES,
        can_be_fused=False,
        writes=Writes.NOT_TOLD,
        passes=4.0,
        realistic_share=0.5,
        plural="attention",
        color="#3a6ea5",
    ),
    KernelClass(
        name="convolution",
        pattern=(
            r"conv(?!ert)|igemm|winograd|wgrad|dgrad|fprop|scudnn|implicit_gemm|im2col|col2im"
        ),
        work=Work.MULTIPLIES,
        can_be_fused=False,
        writes=Writes.NOT_TOLD,
        passes=1.5,
        realistic_share=0.7,
        plural="convolutions",
        color="#4db6ac",
    ),
    KernelClass(
        name="matmul",
        pattern=(
            r"^bmm_|(^|::)(addm[mv]|mm|bmm|baddbmm|linear|mv|dot|einsum)_?$|(scaled|grouped"
            r"|hipb)_mm|matmul"
            r"|(?<!fb)gemm|cijk_|cutlass(?!::\w+_t\b)|nvjet|fused_moe|fused_experts|fmoe"
            r"|mmbackward|mm_backward|linear_backward"
            r"|wgmma|cublas|hipblas|rocblas|gemv|splitk|marlin|machete|llmm1|triton_(b?mm|addmm)"
            r"|^fc-"
        ),
        work=Work.MULTIPLIES,
        can_be_fused=False,
        writes=Writes.NOT_TOLD,
        passes=1.5,
        realistic_share=0.7,
        plural="matmuls",
        color="#00796b",
    ),
    KernelClass(
        name="normalization",
        # subtensoropwith: updates MIOpen's batch statistics
        pattern=(r"norm(?!al(_|$))|\bbn_[fb]w|subtensoropwith"),
        work=Work.CALCULATES,
        can_be_fused=True,
        writes=Writes.AS_LARGEST,
        color="#4f9a54",
    ),
    KernelClass(
        name="reduction",
        pattern=(
            r"softmax|nll_loss|cross_entropy|mse_loss|reduce(?!r)|_pool|pool\dd|topk|sort"
            r"|::(sum|nansum|mean|prod|cumsum|cumprod|argmax|argmin|amax|amin|all|any|max|min|var"
            r"|std|logsumexp)$"
        ),
        work=Work.CALCULATES,
        can_be_fused=True,
        writes=Writes.NOT_TOLD,
        color="#c8b3aa",
    ),
    KernelClass(
        name="copy",
        pattern=(
            r"memcpy|memset|copy|clone|contiguous|::cat$|catarray|stack|(?<!pre)fill|zero_|zeros"
            r"|ones|index|gather"
            r"|(?<!rotary_)embedding|kv_?cache|_and_cache|scatter|transpose_|batched_transpose"
            r"|cnhw|nchw|repeat|(?<!un)roll|flip"
            r"|where|masked|nonzero|local_scalar|item|arange|select_backward|slice_backward|tril"
            r"|triu|pad|_to_cpu"
        ),
        work=Work.MOVES,
        can_be_fused=True,
        writes=Writes.NOT_TOLD,
        color="#f9e27d",
    ),
    KernelClass(
        name="element-wise",
        pattern=(
            r"elementwise|rotary|act_and_mul|swiglu|quant|::_?(add|sub|rsub|mul|div|neg|pow|sqrt"
            r"|rsqrt|exp|log"
            r"|log2|abs|sign|sin|cos|tanh|sigmoid|silu|gelu|relu|clamp|clamp_min|clamp_max"
            r"|threshold|dropout|native_dropout|erf"
            r"|reciprocal|addcmul|addcdiv|lerp|eq|ne|lt|le|gt|ge|maximum|minimum|bitwise_\w+"
            r"|logical_\w+|leaky_relu|hardtanh"
            r"|mish|softplus|mul_out|isnan|nan_to_num|isfinite|floor|round|remainder|square"
            r"|bernoulli|normal|uniform|random"
            r"|lift_fresh|_amp_\w+)_?(_backward\w*)?_?$"
        ),
        work=Work.CALCULATES,
        can_be_fused=True,
        writes=Writes.BROADCAST,
        color="#8d6e63",
    ),
    KernelClass(
        name="other",
        pattern="",
        work=Work.UNKNOWN,
        can_be_fused=False,
        writes=Writes.NOT_TOLD,
        color="#c8c8c8",
    ),
)
CLASS_OF_NAME = {record.name: record for record in KERNEL_CLASSES}
CATEGORIES = tuple(CLASS_OF_NAME)
UNKNOWN_CATEGORY = CATEGORIES[-1]  # of what no pattern knows
# Those of which rules of their own are known
ATTENTION, CONVOLUTION, MATMUL = "attention", "convolution", "matmul"


def names_of_work(*works: Work) -> tuple[str, ...]:
    """The names of the classes that do one of these kinds of work."""
    return tuple(record.name for record in KERNEL_CLASSES if record.work in works)


MATMUL_CLASSES = names_of_work(Work.MULTIPLIES)
VECTOR_CLASSES = names_of_work(Work.CALCULATES)
FUSABLE_CLASSES = tuple(record.name for record in KERNEL_CLASSES if record.can_be_fused)

PATTERNS = {
    record.name: re.compile(record.pattern, re.IGNORECASE)
    for record in KERNEL_CLASSES
    if record.pattern
}
# Kernels from torch.compile are named after all operators in them; their kind comes first.
_GENERATED = re.compile(r"(?:graph_\d+_)?(?:triton_)?(cpp|poi|red|per|tem)_fused")
_CLASS_OF_GENERATED = {"red": "reduction", "per": "reduction", "tem": "matmul"}


def category(name: str) -> str:
    """The name of the class of an operator or kernel."""
    generated = _GENERATED.match(name)
    if generated:
        return _CLASS_OF_GENERATED.get(generated[1], "element-wise")
    for class_name, pattern in PATTERNS.items():
        if pattern.search(name):
            return class_name
    return UNKNOWN_CATEGORY
