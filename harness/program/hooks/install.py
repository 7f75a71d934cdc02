"""Which functions of PyTorch tell where a step ends and what it does: they are wrapped once, as
torch is imported."""

import atexit
import functools
import inspect
import os
import sys

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from .audit import StepAudit
from .memory import ran_out, what_holds_memory
from .modules import ModuleRanges
from .phases import not_compiled, wrapped
from .step_clock import StepClock
from .trial import Trial
from .watch import Watch


def install(settings: dict) -> Watch:
    """Let a Watch know of every phase.  A process that is forked begins anew."""
    watch = Trial(settings) if "trial" in settings else Watch(settings)
    os.register_at_fork(after_in_child=lambda: watch.__init__(settings))
    for holder in (
        Watch,
        Trial,
        ModuleRanges,
        StepAudit,
        StepClock,
        *map(sys.modules.get, {Watch.__module__, ModuleRanges.__module__}),
    ):
        for function in filter(inspect.isfunction, vars(holder).values()):
            not_compiled(function.__code__)
    if "trial" in settings:
        watch.prepare()
    around, autograd, utils = functools.partial(wrapped, watch), torch.autograd, torch.nn.utils
    # Called for each class of optimizers, also those that are not torch's.
    of_class = torch.optim.Optimizer.profile_hook_step
    torch.optim.Optimizer.profile_hook_step = staticmethod(
        lambda step: around(of_class(step), "optimizer", 0)
    )
    # It ends a step also where it skips that of the optimizer.
    torch.amp.GradScaler.step = around(torch.amp.GradScaler.step, "optimizer", 1, audited=False)
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        setattr(utils, name, around(getattr(utils, name), "optimizer"))
    for name in ("backward", "grad"):
        setattr(autograd, name, around(getattr(autograd, name), "backward"))
    _BaseDataLoaderIter.__next__ = around(_BaseDataLoaderIter.__next__, "data")
    share_the_profiler(watch)
    if settings["steps"] == "forward":
        watch.modules.attach()
    atexit.register(watch.ends_by_itself)
    tell_of_memory(watch)
    watch.guarded(lambda: watch.write("waiting"))
    return watch


def share_the_profiler(watch: Watch) -> None:
    """Two profilers at once crash, so ours gives way to one of the program's own; whose marks are
    no steps of ours."""
    profile = torch.autograd.profiler.profile
    prepare, step = profile._prepare_trace, torch.profiler.profile.step

    def prepare_alone(self) -> None:
        watch.another_profiler(self)
        prepare(self)

    profile._prepare_trace = prepare_alone
    torch.profiler.profile.step = lambda self: (
        step(self) if watch.profiler in (None, self) else None
    )


def tell_of_memory(watch: Watch) -> None:
    """Where an error ends the program because memory ran out, note what held it: the frames still
    hold it then."""
    shown = sys.excepthook

    def excepthook(kind, error, trace) -> None:
        if not watch.off and ran_out(error):
            watch.guarded(
                lambda: watch.results.update(out_of_memory=what_holds_memory(watch, str(error)))
            )
        shown(kind, error, trace)

    sys.excepthook = excepthook
