"""What would lower the peak, and by how much at most?  By replaying the recording without what a
change takes away."""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

import numpy as np

from analysis.memory.snapshot.replay import ACTIVATIONS, GRADIENTS, STATE, TEMPORARIES, Replay
from analysis.memory.snapshot.stacks import LOSS, Phase

LEAST_SHARE = 0.01  # of the peak, below which a change is not worth a word
# Functions of the program or of torch, from the innermost, as Stack.functions has them.
SOFTMAX = re.compile(r"(?<!log_)softmax")
FUSED = "fused attention (F.scaled_dot_product_attention), which keeps no S x S tensor"
CHECKPOINTING = "activation checkpointing, which repeats parts of the forward pass"
CHUNKED = "the loss in chunks of the tokens, with the output layer"
IN_PLACE = "a fused optimizer (fused=True), or one that updates in place"
IN_BACKWARD = "optimizer steps within the backward pass, after which a gradient is freed"
SMALLER_STATE = "optimizer state in 8 bits (at most three quarters), or sharded over ranks"
EXPANDABLE = "of what is reserved: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


class Saving(NamedTuple):
    change: str
    at_most_bytes: int


def lowers(change: str) -> str:
    """What a change makes smaller."""
    return "what is reserved" if change == EXPANDABLE else "the peak"


def savings_of(replay: Replay, expandable_segments: bool) -> list[Saving]:
    """The largest first."""
    savings = []
    for change, chosen in removable(replay).items():
        savings.append(Saving(change, peak_reduction(replay, chosen)))
    if not expandable_segments and replay.peak_event is not None:
        savings.append(Saving(EXPANDABLE, replay.peak_reserved_bytes() - replay.peak_bytes))
    least = LEAST_SHARE * replay.peak_bytes
    worthwhile = [saving for saving in savings if saving.at_most_bytes > least]
    return sorted(worthwhile, key=lambda saving: -saving.at_most_bytes)


def removable(replay: Replay) -> dict[str, np.ndarray]:
    """Which allocations each change takes away at most [allocations, bool]."""
    category = replay.category
    return {
        FUSED: quadratic_in_attention(replay),
        CHECKPOINTING: category == ACTIVATIONS,
        CHUNKED: of_loss(replay),
        IN_PLACE: (replay.phase == Phase.OPTIMIZER) & (category == TEMPORARIES),
        IN_BACKWARD: category == GRADIENTS,
        SMALLER_STATE: category == STATE,
    }


def peak_reduction(replay: Replay, chosen: np.ndarray) -> int:
    """Bytes by which the peak would be lower without these allocations."""
    totals = replay.totals() - np.cumsum(replay.changes(chosen))
    if not len(totals):
        return 0
    return replay.peak_bytes - max(replay.before_bytes, int(totals.max()))


def with_function(replay: Replay, pattern: re.Pattern) -> np.ndarray:
    """Allocations with such a function in their stack [allocations, bool]."""
    matches = [bool(pattern.search(stack.functions)) for stack in replay.recording.stacks]
    return np.array([*matches, False])[replay.stack]


def of_loss(replay: Replay) -> np.ndarray:
    """Allocations of the loss, and those of the same size that the backward pass makes of them."""
    in_loss = with_function(replay, LOSS)
    in_backward = (replay.phase == Phase.BACKWARD) & (replay.category == TEMPORARIES)
    return in_loss | (in_backward & is_size_of(replay, in_loss))


def quadratic_in_attention(replay: Replay) -> np.ndarray:
    """Allocations of softmax and, of what calls it and of the backward pass, those of the same size
    or, in another dtype, half of it: softmax's inputs and outputs are the S x S tensors."""
    in_softmax = with_function(replay, SOFTMAX)
    callers = set()
    for stack in replay.recording.stacks:
        functions = stack.functions.split()
        for function, caller in itertools.pairwise(functions):
            if SOFTMAX.search(function) and caller != "forward":
                callers.add(caller)
    in_caller = np.zeros(len(replay.stack), dtype=bool)
    if callers:
        pattern = re.compile(rf"(^| )({'|'.join(map(re.escape, sorted(callers)))})( |$)")
        in_caller = with_function(replay, pattern)
    in_backward = (replay.phase == Phase.BACKWARD) & (replay.category == TEMPORARIES)
    same_size = is_size_of(replay, in_softmax)
    half_size = is_size_of(replay, in_softmax, divisor=2)
    return in_softmax | (in_caller & (same_size | half_size)) | (in_backward & same_size)


def is_size_of(replay: Replay, chosen: np.ndarray, divisor: int = 1) -> np.ndarray:
    """Whether an allocation has the largest size of these, divided [allocations, bool]."""
    if not chosen.any():
        return np.zeros(len(chosen), dtype=bool)
    return replay.size_bytes == replay.size_bytes[chosen].max() // divisor
