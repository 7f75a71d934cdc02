"""--activation-checkpointing: which blocks keep only their input for the backward pass, and what
else they keep."""

from collections.abc import Callable
from functools import partial

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from harness.base.command_line import checked

# True: every block; N: every N-th; op: every block, which keeps what is dear to compute.
Choice = str | int | bool
ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)


every_nth = checked(
    int, lambda n: 2 <= n < 2**63, "known; use full, op, or N of every N-th block, at least 2"
)


def checkpointing_choice(text: str) -> Choice:
    """argparse type of the flag's value.  Raises ArgumentTypeError."""
    if text in ("full", "1"):
        return True
    return text if text == "op" else every_nth(text)


def checkpointed_layers(choice: Choice, n_layers: int) -> int:
    """How many of the blocks run again in the backward pass."""
    every = choice if isinstance(choice, int) and choice > 1 else 1
    return n_layers // every if choice else 0


def run_block(
    block: Callable, index: int, choice: Choice, *inputs, preserve_rng_state: bool = False, **named
):
    """The output of block number `index`, which runs again in the backward pass if it is
    checkpointed."""
    if checkpointed_layers(choice, index + 1) == checkpointed_layers(choice, index):
        return block(*inputs, **named)
    options = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
    if choice == "op":
        options["context_fn"] = kept_operators
    return checkpoint(block, *inputs, **options, **named)


def kept_operators() -> tuple:
    """Contexts of a block's two runs, as torchtitan has them: fused attention and every second
    matmul are kept."""
    return create_selective_checkpoint_contexts(partial(keep_every_second, {True: 0, False: 0}))


def keep_every_second(matmuls: dict[bool, int], context, operator, *_, **__) -> CheckpointPolicy:
    """matmuls: how many there were in the first run and in the second."""
    if operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        matmuls[context.is_recompute] += 1
        keep = matmuls[context.is_recompute] % 2 == 1
    else:
        keep = operator.overloadpacket.__name__ in ATTENTION
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
