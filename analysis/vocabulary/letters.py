"""What is an operator in a pattern of operators?  A letter, by its name alone: patterns are regular expressions."""

from __future__ import annotations

import re

from analysis.vocabulary.operators import is_view_or_metadata_op

# Operators that are regions by themselves; the last is what PyTorch's fused attention calls where no fused one suits.
ATTENTION, NORM, SWIGLU, LOSS, MATH = "ANUlM"
OTHER, BOUNDARY = ".", "|"  # any other operator that works; what no region reaches across
LETTERS = {  # the first pattern that is found in the name of an operator tells its letter
    MATH: r"_scaled_dot_product_attention_math",
    ATTENTION: r"_scaled_dot_product_\w+attention|(flash|efficient|cudnn|unified|paged)_att(entio)?n|mha_(varlen_)?fwd",
    NORM: r"^(?!triton).*(layer|rms|group|batch|instance)_norm",
    SWIGLU: r"swiglu",
    LOSS: r"log_softmax|::(nll_loss|cross_entropy|logsumexp)",
    "s": r"softmax$", "b": r"::(bmm|baddbmm)$", "m": r"::(linear|addmm|mm|_scaled_mm)$",
    "c": r"::(copy_|clone|_to_copy|type_as|expand|repeat|repeat_interleave)$", "k": r"::(cat|stack)$",
    "p": r"::(pow|square)$", "r": r"::rsqrt_?$", "t": r"::sqrt_?$", "e": r"::mean$", "v": r"::(var|std)(_mean)?$",
    "x": r"::mul_?$", "q": r"::div_?$", "a": r"::add_?$", "d": r"::sub_?$", "f": r"::addcmul_?$", "n": r"::neg_?$",
    "o": r"::roll$", "z": r"::view_as_(complex|real)$", "u": r"::silu_?$", "w": r"dropout$",
}  # fmt: skip


def letter_of(name: str) -> str:
    """The letter of an operator; none, '', of one that makes a view, allocates, or only calls others."""
    found = next((letter for letter, pattern in LETTERS.items() if re.search(pattern, name)), None)
    return found or ("" if is_view_or_metadata_op(name) else OTHER)
