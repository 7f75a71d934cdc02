"""FLOPs and bytes of an operator's call with its tensors at hand, as PyTorch dispatches it: of a
step on fake tensors, or of any other.

FLOPs are those of PyTorch's own formulas, and ours for what these leave out.  Bytes are what an
operator's schema and the storages of its tensors tell; nothing of PyTorch counts them.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, shape_wrapper

from analysis.vocabulary.kernel_classes import category
from analysis.work.attention_costs import Window, heads_first_attention_cost, unmasked_pairs
from analysis.work.cost import Cost, named_inputs

Accesses = list[tuple[torch.Tensor, int]]  # tensors, and how many of their bytes


class DispatchedCall(NamedTuple):
    """What a call of an operator does that works on elements of tensors."""

    operator: str  # aten::mm
    cost: Cost  # FLOPs of matmuls alone
    read: Accesses
    written: Accesses
    factors: list[torch.Tensor]  # matrices that it multiplies; none of other operators

    @property
    def kind(self) -> str:
        """Its class, of vocabulary.kernel_classes."""
        return category(self.operator)


def dispatched_call(func, args: tuple, kwargs: dict, out: object) -> DispatchedCall | None:
    """None if it made a view or only allocated.  func: of torch.ops, as a TorchDispatchMode gets
    it."""
    given = {**dict(zip(argument_names(func), args, strict=False)), **kwargs}
    read, written = accesses(func, given, out)
    if not written:
        return None
    formula = flop_formula(func)
    flops = int(formula(*args, **kwargs, out_val=out)) if formula else 0
    factors = []
    if flops:
        factors = [x for x in tensors_in((args, kwargs)) if x.dim() > 1]
    moved = sum(size for _, size in read + written)
    cost = Cost(flops, moved, unmasked_flops=flops - masked_flops(given, flops))
    return DispatchedCall(f"aten::{func.overloadpacket.__name__}", cost, read, written, factors)


# PyTorch makes the list of a schema's arguments anew each time that it is asked, and a step on fake
# tensors asks ten thousand times.


@functools.cache
def argument_names(func) -> list[str]:
    return [argument.name for argument in func._schema.arguments]


@functools.cache
def mutated_arguments(func) -> list:
    """Those of its schema that an operator writes."""
    mutated = []
    for argument in func._schema.arguments:
        if argument.alias_info and argument.alias_info.is_write:
            mutated.append(argument)
    return mutated


def tensors_in(value: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


# ---- FLOPs ---------------------------------------------------------------------------------------


def _attention_flops(query, key, value, *rest, **options) -> int:
    inputs = named_inputs(["query", "key", "value"], [query, key, value], None, None)
    return heads_first_attention_cost(inputs).flops


def _attention_backward_flops(gradient, query, key, value, *rest, **options) -> int:
    names = ["gradient", "query", "key", "value"]
    inputs = named_inputs(names, [gradient, query, key, value], None, None)
    return heads_first_attention_cost(inputs).flops


# From shapes, as FlopCounterMode takes them.  PyTorch counts fused attention on GPUs alone, and
# refuses heads of keys and values that query heads share before 2.12.
FORMULAS_BESIDE_TORCH = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}


def flop_formula(func) -> Callable | None:
    """What counts the FLOPs of an operator's call from its arguments; None: it multiplies
    nothing."""
    ours = FORMULAS_BESIDE_TORCH.get(func.overloadpacket)
    return shape_wrapper(ours) if ours else flop_registry.get(func.overloadpacket)


def masked_flops(given: dict, flops: int) -> int:
    """Those of scores that a kernel may skip, because the operator is told that attention is
    causal.  given: its arguments by name."""
    if not (flops and given.get("is_causal")):
        return 0
    queries, keys = given["query"].shape[-2], given["key"].shape[-2]
    causal = Window(left=math.inf, right=0, top_left=True)
    return flops - flops * unmasked_pairs(queries, keys, causal) // (queries * keys)


# ---- Bytes ---------------------------------------------------------------------------------------

# Operators that write an argument without reading it, and those that allocate without writing.
_OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_"}
_ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# Operators that read only some elements of an argument: which argument, and how many elements that
# are.
_READS_SOME = {
    "embedding": ("weight", lambda given, out: out.numel()),
    "nll_loss_forward": ("self", lambda given, out: given["target"].numel()),
    "nll_loss_backward": ("self", lambda given, out: 0),
}


def accesses(func, given: dict, out: object) -> tuple[Accesses, Accesses]:
    """What an operator read and wrote; ([], []) if it made a view or only allocated.  given: its
    arguments by name."""
    name = func.overloadpacket.__name__
    inputs = {key: tensors_in(value) for key, value in given.items()}
    made = tensors_made(out, inputs)
    mutated = mutated_arguments(func)
    if name in _ALLOCATES or not (made or mutated):
        return [], []
    written = accessed(made)
    for argument in mutated:
        written += accessed(inputs[argument.name])
    some, elements = _READS_SOME.get(name, (None, None))
    not_read = only_written(name, mutated)
    read = []
    for key, tensors in inputs.items():
        if key == some:
            read += [(x, elements(given, made[0]) * x.element_size()) for x in tensors]
        elif key not in not_read:
            read += accessed(tensors)
    return read, written


def only_written(name: str, mutated: list) -> set[str]:
    """Of the arguments that an operator changes, those that it does not read: out=, which is
    keyword-only in the schema, and what some overwrite."""
    if name in _OVERWRITES:
        return {argument.name for argument in mutated}
    return {argument.name for argument in mutated if argument.kwarg_only}


def accessed(tensors: list[torch.Tensor]) -> Accesses:
    return [(x, accessed_bytes(x)) for x in tensors]


def tensors_made(out: object, inputs: dict[str, list[torch.Tensor]]) -> list[torch.Tensor]:
    """The outputs that are no views of inputs, nor inputs themselves."""
    storages = {x.untyped_storage()._cdata for x in itertools.chain(*inputs.values())}
    return [x for x in tensors_in(out) if x.untyped_storage()._cdata not in storages]


def accessed_bytes(x: torch.Tensor) -> int:
    """Bytes of a tensor's elements in memory: those that an expanded
    dimension repeats count once."""
    dimensions = zip(x.shape, x.stride(), strict=True)
    elements = math.prod(length for length, stride in dimensions if stride)
    return elements * x.element_size()
