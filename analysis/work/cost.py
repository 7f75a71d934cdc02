"""How much work is a call of an operator?  Its FLOPs and bytes, and the inputs that tell them."""

import re
from dataclasses import dataclass

from analysis.vocabulary.operators import BYTES_OF


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


def named_inputs(names: list[str], shapes: list, types: list | None, values: list | None) -> Inputs:
    """names: of all inputs that the operator takes; types: none in traces of PyTorch 1.8."""
    sizes = [BYTES_OF.get(kind) for kind in types or [None] * len(shapes)]
    return Inputs(
        shapes=dict(zip(names, shapes, strict=False)),
        sizes=dict(zip(names, sizes, strict=False)),
        values=dict(zip(names, values or [], strict=False)),
        names=names,
    )


def parse_value(text: str) -> bool | int | list[int]:
    """'[1, 1]' -> [1, 1], 'True' -> True: the profiler's text of a concrete input."""
    if text in ("True", "False"):
        return text == "True"
    numbers = [int(number) for number in re.findall(r"-?\d+", text)]
    return numbers if text.startswith("[") else numbers[0]
