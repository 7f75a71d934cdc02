"""What is an operator in a pattern of operators?  A letter, by its name alone: patterns are regular expressions.

A pattern is written in words, such as `matmul copy* softmax`, each of which stands for a letter.
"""

import re

from analysis.vocabulary.operators import is_view_or_metadata_op

OPERATORS = {  # word: its letter, and what is found in the name of such an operator; the first one counts
    # Regions by themselves; the first is what PyTorch's fused attention calls where no fused one suits.
    "math_attention": ("M", r"_scaled_dot_product_attention_math"),
    "attention": (
        "A", r"_scaled_dot_product_\w+attention|(flash|efficient|cudnn|unified|paged)_att(entio)?n|mha_(varlen_)?fwd",
    ),
    "norm": ("N", r"^(?!triton).*(layer|rms|group|batch|instance)_norm"),
    "swiglu": ("U", r"swiglu"),
    "loss": ("l", r"log_softmax|::(nll_loss|cross_entropy|logsumexp)"),
    "matmul": ("m", r"::(linear|addmm|mm|_scaled_mm)$"), "bmm": ("b", r"::(bmm|baddbmm)$"),
    "softmax": ("s", r"softmax$"),
    "copy": ("c", r"::(copy_|clone|_to_copy|type_as|expand|repeat|repeat_interleave)$"),
    "cat": ("k", r"::(cat|stack)$"), "pow": ("p", r"::(pow|square)$"), "rsqrt": ("r", r"::rsqrt_?$"),
    "sqrt": ("t", r"::sqrt_?$"), "mean": ("e", r"::mean$"), "var": ("v", r"::(var|std)(_mean)?$"),
    "mul": ("x", r"::mul_?$"), "div": ("q", r"::div_?$"), "add": ("a", r"::add_?$"), "sub": ("d", r"::sub_?$"),
    "addcmul": ("f", r"::addcmul_?$"), "neg": ("n", r"::neg_?$"), "roll": ("o", r"::roll$"),
    "complex": ("z", r"::view_as_(complex|real)$"), "silu": ("u", r"::silu_?$"), "dropout": ("w", r"dropout_?$"),
}  # fmt: skip
OTHER, BOUNDARY = ".", "|"  # any other operator that works; what no region reaches across
LETTERS = {word: letter for word, (letter, _) in OPERATORS.items()} | {"rotary": "R", "boundary": BOUNDARY}


def letter_of(name: str) -> str:
    """The letter of an operator; none, '', of one that makes a view, allocates, or only calls others."""
    found = next((letter for letter, pattern in OPERATORS.values() if re.search(pattern, name)), None)
    return found or ("" if is_view_or_metadata_op(name) else OTHER)


def in_letters(pattern: str) -> str:
    """A pattern in words as a regular expression of letters, such as 'mc*s' of 'matmul copy* softmax'."""
    return re.sub("[a-z_]+", lambda word: LETTERS[word[0]], pattern).replace(" ", "")
