"""Did a change take effect?  What it leaves behind in a step where it did, counted with and without
it.

Nothing of a step is changed for that: the graph of the loss is read before the backward pass, and
the functions below are wrapped, to count their calls.  Where a version of PyTorch has none of them,
the sign stays 0: the change then counts as without effect, which errs in the safe direction.

- torch._fused_adamw_ and others: the optimizer calls them as attributes of torch, so whoever
imported torch is counted;
- torch.nn.functional.conv2d and others: modules call them as attributes
of that module.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.utils.checkpoint

LOW_PRECISION = (torch.bfloat16, torch.float16)
CASTS = ("ToCopyBackward0", "AccumulateGrad")
MATMULS_BY_NAME = ("mmBackward", "MmBackward", "LinearBackward", "ConvolutionBackward")
FUSED_ATTENTION = ("ScaledDotProduct", "FlashAttention", "EfficientAttention", "FlexAttention")
FUSED_OPTIMIZERS = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
CONVOLUTIONS = ("conv2d", "conv3d", "conv_transpose2d", "conv_transpose3d")
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by dimensions of a tensor

GRAPHS = "compiled graphs"
LOW = "operators in low precision"
MATMULS = "matmuls"
LOW_MATMULS = "matmuls in low precision"
ATTENTION = "fused attention"
OPTIMIZER = "fused optimizer"
FORMAT = "convolutions in channels-last"
RECOMPUTED = "recomputed blocks"
CHECKPOINTED = "checkpointed calls"
RECOMPUTED_ALREADY = "recomputed blocks, by the program"
STORED = "stored calls"
REPEATED = "repeated batches"
THREADS = "threads"


class Signs:
    """Counts of one step, from begin() to end()."""

    def __init__(self):
        self.counts: Counter = Counter()
        self.reading = False

    def begin(self) -> None:
        self.counts.clear()
        self.reading = True

    def end(self) -> dict[str, int]:
        self.reading = False
        return {**self.counts, THREADS: torch.get_num_threads()}

    def count(self, sign: str, number: int = 1) -> None:
        if self.reading:
            self.counts[sign] += number

    def read_graph(self, losses: Iterable[torch.Tensor]) -> None:
        """Count the operators of the graph that leads to these tensors."""
        if not self.reading:
            return
        for node in nodes_of(losses):
            name = node.name()
            if name == "CompiledFunctionBackward":
                self.counts[GRAPHS] += 1
            if any(part in name for part in FUSED_ATTENTION):
                self.counts[ATTENTION] += 1
            if name.startswith("CheckpointFunction"):
                self.counts[CHECKPOINTED] += 1
            # Of the operator's outputs, which are the inputs of its backward node.
            outputs = getattr(node, "_input_metadata", ())
            is_low = any(output.dtype in LOW_PRECISION for output in outputs)
            if is_low and not name.endswith(CASTS):
                self.counts[LOW] += 1
            if any(part in name for part in MATMULS_BY_NAME):
                self.counts[MATMULS] += 1
                if is_low:
                    self.counts[LOW_MATMULS] += 1

    def watch_calls(self) -> None:
        """Wrap the functions whose calls are signs."""
        for name in FUSED_OPTIMIZERS:
            self._wrap(torch, name, lambda output: OPTIMIZER)
        for name in CONVOLUTIONS:
            self._wrap(
                torch.nn.functional, name, lambda output: FORMAT if is_channels_last(output) else ""
            )

        # Of a call without reentrance, beneath the function that the compiler knows by itself.
        self._wrap(
            torch.utils.checkpoint,
            "_checkpoint_without_reentrant_generator",
            lambda output: CHECKPOINTED,
        )

    def _wrap(self, owner: object, name: str, sign_of: Callable[[object], str]) -> None:
        function = getattr(owner, name, None)
        if function is None:  # of another version
            return

        @functools.wraps(function)
        def call(*args, **kwargs):
            output = function(*args, **kwargs)
            if torch.compiler.is_compiling() or not self.reading:
                return output
            sign = sign_of(output)
            if sign:
                self.counts[sign] += 1
            return output

        setattr(owner, name, call)


def nodes_of(tensors: Iterable[torch.Tensor]) -> Iterator:
    """Each node of the graphs that lead to these tensors, once."""
    todo = [tensor.grad_fn for tensor in tensors if torch.is_tensor(tensor)]
    seen = set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo.extend(following for following, _ in node.next_functions)


def is_channels_last(tensor: object) -> bool:
    """Whether its channels are the innermost in memory, and not both formats are the same, as of a
    single pixel."""
    if not torch.is_tensor(tensor) or tensor.ndim not in CHANNELS_LAST:
        return False
    return (
        tensor.is_contiguous(memory_format=CHANNELS_LAST[tensor.ndim])
        and not tensor.is_contiguous()
    )


def graphs_compiled() -> int:
    """How many graphs torch.compile has compiled in this process."""
    utils = sys.modules.get("torch._dynamo.utils")  # else importing it would take seconds
    return utils.counters["stats"]["unique_graphs"] if utils else 0
