"""Which calls of checkpoint(use_reentrant=True) take gradients away?

It runs its function without autograd, and records it only if one of its inputs needs a gradient;
weights are no inputs.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable

import torch
import torch.utils.checkpoint

from ..phases import not_compiled
from .source_lines import CodeKinds


class ReentrantCheckpoints:
    """Calls none of whose inputs needs a gradient, though autograd is on, by the program's line; in
    the step that is audited."""

    def __init__(self, watch):
        self.watch = watch
        self.calls: Counter = Counter()  # by line
        self.kinds = CodeKinds()
        self.undo: Callable[[], object] | None = None

    def begin(self) -> None:
        self.end()
        self.calls.clear()
        function = torch.utils.checkpoint.CheckpointFunction
        apply = function.apply

        @functools.wraps(apply)
        def call(*args):
            if torch.is_grad_enabled() and not any(map(needs_gradient, args)):
                self.watch.guarded(self.note)
            return apply(*args)

        not_compiled(call.__code__)
        function.apply = staticmethod(call)
        self.undo = functools.partial(delattr, function, "apply")  # the inherited one

    def end(self) -> None:
        if self.undo:
            self.undo()
            self.undo = None

    def note(self) -> None:
        self.calls[self.kinds.innermost_line(self.watch.settings.get("folder", ""))] += 1

    def as_json(self) -> list[dict]:
        """Of each line, the most calls first."""
        return [{"where": where, "calls": calls} for where, calls in self.calls.most_common()]


def needs_gradient(argument: object) -> bool:
    return torch.is_tensor(argument) and argument.requires_grad
