"""What happens in few steps: saves, starts of loaders, evaluation, garbage collection, compilation.
When, for how long, and called by which line."""

import functools
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Container
from types import CodeType, FrameType
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader

from ..modules import names_in_modules
from ..phases import not_compiled
from .source_lines import PROGRAM, CodeKinds, name_of_line

SAVE, EVALUATION = "save", "evaluation"
LOADER, COLLECTION, COMPILATION = "loader start", "garbage collection", "compilation"
MOST = 10_000  # that are kept
SHORT_S = 2e-4  # shorter ones are part of a step
# Functions that save, of modules that the program may have imported by its first step.
SAVERS = (
    ("torch.distributed.checkpoint", "save"),
    ("torch.distributed.checkpoint", "async_save"),
    ("safetensors.torch", "save_file"),
    ("safetensors.torch", "save_model"),
)


class Place(NamedTuple):
    """A line of the program; None: none is on the stack."""

    code: CodeType | None
    line: int | None


class Occasion(NamedTuple):
    """One of them, on the thread that trains."""

    what: str
    call: str  # torch.save, or of which generation
    place: Place  # that called it
    step: int  # number of the step that it is in
    began_ns: int  # unix time
    seconds: float


class Occasions:
    """Notes each, from the first step on."""

    def __init__(self, watch):
        self.watch = watch
        self.kinds = CodeKinds()
        self.seen: list[Occasion] = []
        self.depth = 0  # of calls that are being timed
        self.collecting_ns = 0  # when the collection began; 0: none runs
        self.compiling_ns = 0  # the same of a compilation
        # By module: when its evaluation began, and where.
        self.evaluating: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self.setting_modes = 0  # calls of train() that are open: a module calls it of its parts
        self.evaluated_ns = 0  # when the last evaluation ended
        self.has_looked = False  # for what the program has imported

    def install(self) -> None:
        """Once, as torch is imported."""
        torch.save = torch.serialization.save = self.around(SAVE, "torch.save", torch.save)
        DataLoader.__iter__ = self.around_start(DataLoader.__iter__)
        nn.Module.train = self.around_train(nn.Module.train)
        watch = self.watch
        gc.callbacks.append(lambda *told: watch.occasions.collects(*told))

    def first_step(self) -> None:
        """What the program has imported by now."""
        if self.has_looked:
            return
        self.has_looked = True
        for module_name, name in SAVERS:
            module = sys.modules.get(module_name)
            function = getattr(module, name, None)
            if function is None:
                continue
            timed = self.around(SAVE, f"{module_name}.{name}", function)
            for place, name_there in [(module, name), *names_in_modules(function, module)]:
                setattr(place, name_there, timed)
        callback = sys.modules.get("torch._dynamo.callback")
        if callback is not None:
            watch = self.watch
            callback.on_compile_start(lambda *_: watch.occasions.begins_to_compile())
            callback.on_compile_end(lambda *_: watch.occasions.has_compiled())

    # ---- What is called --------------------------------------------------------------------------

    def around(self, what: str, name: str, function: Callable) -> Callable:
        """The function, timed where it is the outermost of them."""
        watch = self.watch

        @functools.wraps(function)
        def call(*args, **kwargs):
            occasions = watch.occasions  # others after a fork
            if occasions.is_idle() or occasions.depth:
                return function(*args, **kwargs)
            occasions.depth += 1
            began_ns = time.time_ns()
            try:
                return function(*args, **kwargs)
            finally:
                occasions.depth -= 1
                occasions.note(what, name, began_ns)

        not_compiled(call.__code__)
        return call

    def around_start(self, function: Callable) -> Callable:
        """The start of a loader's workers."""
        timed = self.around(LOADER, "DataLoader", function)

        @functools.wraps(function)
        def call(loader):
            return timed(loader) if loader.num_workers else function(loader)

        not_compiled(call.__code__)
        return call

    def around_train(self, function: Callable) -> Callable:
        """nn.Module.train(), also called by eval(): an evaluation is from eval() to train() of the
        same module."""
        watch = self.watch

        @functools.wraps(function)
        def call(module, mode=True):
            occasions = watch.occasions
            if occasions.is_idle():
                return function(module, mode)
            occasions.sets_mode(module, mode, sys._getframe(1))
            occasions.setting_modes += 1
            try:
                return function(module, mode)
            finally:
                occasions.setting_modes -= 1

        not_compiled(call.__code__)
        return call

    def sets_mode(self, module: nn.Module, mode: bool, caller: FrameType) -> None:
        """Before train(mode) of a module, or of one that it is a part of.  Copies that are never
        trained, and parts that the whole model trains again, have no evaluation that ends."""
        if not mode and not self.setting_modes and module in self.evaluating:
            return  # it is set to what it is
        began = self.evaluating.pop(module, None)
        if self.setting_modes:
            return
        if not mode and module.training:
            self.evaluating[module] = (time.time_ns(), self.place_of(caller))
        # Of several modules that are evaluated together, one evaluation is told.
        if mode and began and began[0] >= self.evaluated_ns:
            self.note(EVALUATION, f"{type(module).__name__}.eval()", *began)
            self.evaluated_ns = time.time_ns()

    def collects(self, phase: str, about: dict) -> None:
        """Called by the collector of garbage."""
        if self.is_idle():
            return
        if phase == "start":
            self.collecting_ns = time.time_ns()
        elif self.collecting_ns:
            began_ns, self.collecting_ns = self.collecting_ns, 0
            self.note(COLLECTION, f"generation {about['generation']}", began_ns)

    def begins_to_compile(self) -> None:
        if not self.is_idle():
            self.compiling_ns = time.time_ns()

    def has_compiled(self) -> None:
        if self.compiling_ns and not self.is_idle():
            began_ns, self.compiling_ns = self.compiling_ns, 0
            self.note(COMPILATION, "torch.compile", began_ns)

    def is_idle(self) -> bool:
        """Whether nothing is to be noted: before the first step, after the last, elsewhere."""
        watch = self.watch
        return watch.off or not watch.steps or watch.thread != threading.get_ident()

    def note(self, what: str, name: str, began_ns: int, place: Place | None = None) -> None:
        """It ends now.  place: that called it; by default the one around."""
        seconds = 1e-9 * (time.time_ns() - began_ns)
        if seconds < SHORT_S or len(self.seen) >= MOST:
            return
        place = place or self.place_of(sys._getframe(1))
        step = self.watch.steps + 1
        self.seen.append(Occasion(what, name, place, step, began_ns, seconds))

    def place_of(self, frame: FrameType | None) -> Place:
        """The innermost line of the program around a frame."""
        while frame is not None and self.kinds.kind_of(frame.f_code, frame) != PROGRAM:
            frame = frame.f_back
        return Place(frame.f_code, frame.f_lineno) if frame else Place(None, None)

    # ---- What is told ----------------------------------------------------------------------------

    def as_json(self, folder: str, steps: Container[int]) -> list[dict]:
        """Those of these steps.  folder: in which the command was started."""
        rows = []
        for seen in self.seen:
            if seen.step not in steps:
                continue
            where = None
            # A collection begins wherever something is allocated.
            if seen.place.code is not None and seen.what != COLLECTION:
                where = name_of_line(*seen.place, folder)
            rows.append(
                {
                    "what": seen.what,
                    "call": seen.call,
                    "where": where,
                    "step": seen.step,
                    "began_us": seen.began_ns / 1e3,
                    "ms": 1e3 * seen.seconds,
                }
            )
        return rows
