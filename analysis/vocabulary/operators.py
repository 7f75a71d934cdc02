"""What is an operator or a kernel, by its name?"""

import re
from functools import cache

from analysis.vocabulary import roles
from analysis.vocabulary.collectives import UNKNOWN, collective_kind
from analysis.vocabulary.kernel_classes import category
from analysis.vocabulary.roles import Meaning, first_found, table

COMPILED = "Torch-Compiled|CompiledFunction|triton_"  # in names that only a compiled program has

_MAKES = re.compile("aten::(empty|zeros|ones|full|new_|rand|scalar_tensor|arange)")
_ARITHMETIC = re.compile(
    "linalg|fft|cholesky|_svd|_qr|(?<!re)solve|inverse|_det|lu_|lstm|gru|rnn|cdist|ctc_loss|cross$"
)

OPERATORS = table("operators")  # role by pattern
# Bytes of an element, by type: as inputs of operators have it, and as PyTorch notes it of a
# collective.
BYTES_OF = {name: int(size) for name, size in table("bytes of an element").items()}
BYTES_OF_COLLECTIVE = {
    name: int(size) for name, size in table("bytes of an element of a collective").items()
}
# In the name of an operator that makes a tensor, and of a call of the driver that makes memory for
# some.
asks_for_memory = re.compile("Malloc|^aten::empty").search
# Types of inputs that are tensors, or lists of them
TENSORS = {*BYTES_OF, "TensorList", "GenericList"}
# Copy the elements of a tensor.
COPIES = {"aten::copy_", "aten::clone", "aten::contiguous", "aten::to", "aten::_to_copy"}
READS_A_VALUE = {"aten::item", "aten::is_nonzero"}  # of a tensor, as a Python number
PRECISION_OF = {
    "float": "fp32",  # or tf32
    "c10::BFloat16": "bf16",
    "c10::Half": "fp16",
    **{name: "fp8" for name in BYTES_OF if "Float8" in name},
}


def operator_class(phase: str | None, kind: str) -> str:
    """The class of an operator in a step: the phase for data loading and the optimizer, else its
    category.

    Communication is its own class wherever it happens."""
    return phase if phase in ("data", "optimizer") and kind != "communication" else kind


@cache
def operator_role(name: str) -> str | None:
    role = first_found(OPERATORS, name)
    if role == roles.COLLECTIVE and collective_kind(name) == UNKNOWN:
        return None
    return role


def is_of_pytorch(name: str) -> bool:
    """Whether a compiler of PyTorch knows the operator: those of engines and extensions are what
    they are."""
    return name.startswith("aten::")


def short_name(name: str) -> str:
    """Without aten::, which all of PyTorch's have."""
    return name.removeprefix("aten::")


def may_compute(name: str) -> bool:
    """Whether an operator of no known category may be one that arithmetic limits.  Those of PyTorch
    do what the patterns know, or move data, but for linear algebra,
    transforms and recurrent networks."""
    return not is_of_pytorch(name) or _ARITHMETIC.search(name) is not None


def is_view_or_metadata_op(name: str) -> bool:
    """Whether it moves no elements of a tensor."""
    return operator_role(name) in roles.MOVES_NO_ELEMENT


def operator_meaning(name: str) -> Meaning:
    return _meaning(operator_role(name), name)


def gpu_meaning(name: str) -> Meaning:
    """Of a kernel, a copy or a memory set."""
    copy = re.search("^Memcpy (HtoD|DtoH)(.*Pinned)?", name)
    if not copy:
        return _meaning(None, name)
    return _meaning(roles.PINNED_COPY if copy[2] else roles.HOST_COPY, name)


def _meaning(role: str | None, name: str) -> Meaning:
    kind = category(name)
    collective = collective_kind(name) if kind == "communication" else None
    return Meaning(role, named_category=kind, collective=collective)


def makes_a_tensor(name: str) -> bool:
    """Whether an operator makes a tensor of none, so that autograd gives it no number."""
    return _MAKES.match(name) is not None
