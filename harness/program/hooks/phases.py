"""A function of PyTorch, or of the program, as a phase of the step."""

import functools
import inspect
import threading
from collections.abc import Callable
from types import CodeType

import torch


def wrapped(
    watch, function: Callable, phase: str, optimizer: int | None = None, audited: bool = True
) -> Callable:
    """The function as a phase of the step.  optimizer: which argument is the one that it steps;
    audited: it does."""
    # Looked up once, as all of this is in the program's steps.
    enter, leave = watch.enter, watch.leave
    ident, is_compiling = threading.get_ident, torch.compiler.is_compiling

    @functools.wraps(function)
    def call(*args, **kwargs):
        # First, as a compiler reads this too: all else would be guards of its graph.
        if is_compiling() or watch.off:
            return function(*args, **kwargs)
        on_another_thread = watch.thread is not None and watch.thread != ident()
        if on_another_thread and not in_backward(watch, phase):
            return function(*args, **kwargs)
        stepping = None
        if optimizer is not None:
            stepping = args[optimizer] if len(args) > optimizer else kwargs.get("optimizer")
        a_range = enter(phase)
        try:
            if audited and stepping is not None and (watch.looks or watch.audit):
                return watch.audited(stepping, function, args, kwargs)
            return function(*args, **kwargs)
        finally:
            leave(phase, a_range, stepping)

    not_compiled(call.__code__)
    return call


def in_backward(watch, phase: str) -> bool:
    """Whether an optimizer steps inside the backward pass,
    which on a GPU is a thread of its own."""
    return phase == "optimizer" and watch.depth["backward"] > 0


def not_compiled(code: CodeType) -> None:
    """Dynamo leaves this code alone: hooks around a compiled module would be compiled
    with it, and lost."""
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        skipped = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
        frames.set_code_exec_strategy(code, skipped)
    else:  # of PyTorch 2.6
        frames.skip_code(code)
    for inner in filter(inspect.iscode, code.co_consts):
        not_compiled(inner)
