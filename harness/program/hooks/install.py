"""Which functions of PyTorch tell where a step ends and what it does: they are wrapped once, as
torch is imported."""

import atexit
import functools
import inspect
import os
import sys
from collections.abc import Callable

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from .audit import StepAudit
from .memory import ran_out, what_holds_memory
from .memory_history import record_history
from .modules import ModuleRanges
from .observing.occasions import Occasions
from .observing.rank_sketches import RankSketches
from .observing.reentrant_checkpoints import ReentrantCheckpoints
from .observing.without_gradient import WithoutGradient
from .phases import not_compiled, wrapped
from .step_clock import StepClock
from .trial import TrialWatch
from .watch import Watch
from .whole_run.occasions import WholeRunOccasions
from .whole_run.watch import WholeRunWatch


def kind_of_watch(settings: dict) -> type[Watch]:
    if "trial" in settings:
        return TrialWatch
    return WholeRunWatch if settings.get("watch") else Watch


def install(settings: dict) -> Watch:
    """Let a Watch know of every phase.  A process that is forked begins anew."""
    is_trial = "trial" in settings
    watch = kind_of_watch(settings)(settings)

    def begin_anew() -> None:
        watch.sampler.stop()  # gives back the interval of switches, which a fork inherits
        watch.__init__(settings)

    os.register_at_fork(after_in_child=begin_anew)
    leave_ours_uncompiled()
    if is_trial:
        watch.prepare()
    around = functools.partial(wrapped, watch)
    # Called for each class of optimizers, also those that are not torch's.
    hook_step = torch.optim.Optimizer.profile_hook_step

    def step_as_phase(step: Callable) -> Callable:
        return around(hook_step(step), "optimizer", 0)

    torch.optim.Optimizer.profile_hook_step = staticmethod(step_as_phase)
    # It ends a step also where it skips that of the optimizer.
    torch.amp.GradScaler.step = around(torch.amp.GradScaler.step, "optimizer", 1, audited=False)
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        clip = getattr(torch.nn.utils, name)
        setattr(torch.nn.utils, name, around(clip, "optimizer"))
    for name in ("backward", "grad"):
        backward = getattr(torch.autograd, name)
        setattr(torch.autograd, name, around(backward, "backward"))
    _BaseDataLoaderIter.__next__ = around(_BaseDataLoaderIter.__next__, "data")
    if not is_trial:
        watch.occasions.install()
        watch.ranks.install()
        if not settings.get("watch"):
            watch.without_gradient.install()
    share_the_profiler(watch)
    if settings["steps"] == "forward":
        watch.modules.attach()
    if settings.get("memory_snapshot"):  # a trial of a change has no such setting
        record_history()
    atexit.register(watch.ends_by_itself)
    tell_of_memory(watch)
    watch.guarded(lambda: watch.write("waiting"))
    return watch


def leave_ours_uncompiled() -> None:
    """The compiler leaves the code of these classes and modules alone."""
    classes = (
        Watch,
        TrialWatch,
        WholeRunWatch,
        ModuleRanges,
        StepAudit,
        StepClock,
        Occasions,
        WholeRunOccasions,
        RankSketches,
        ReentrantCheckpoints,
        WithoutGradient,
    )
    modules = [sys.modules[owner.__module__] for owner in classes[:4]]
    for holder in (*classes, *modules):
        for function in filter(inspect.isfunction, vars(holder).values()):
            not_compiled(function.__code__)


def share_the_profiler(watch: Watch) -> None:
    """Two profilers at once crash, so ours gives way to one of the program's own; whose marks are
    no steps of ours."""
    profile = torch.autograd.profiler.profile
    prepare = profile._prepare_trace
    step = torch.profiler.profile.step

    def prepare_alone(self) -> None:
        watch.another_profiler(self)
        prepare(self)

    def step_of_its_own(self) -> None:
        if watch.profiler in (None, self):
            step(self)

    profile._prepare_trace = prepare_alone
    torch.profiler.profile.step = step_of_its_own


def tell_of_memory(watch: Watch) -> None:
    """Where an error ends the program because memory ran out, note what held it: the frames still
    hold it then."""
    shown = sys.excepthook

    def note(error: BaseException) -> None:
        watch.results["out_of_memory"] = what_holds_memory(watch, str(error))
        watch.write_memory_history()

    def excepthook(kind, error, trace) -> None:
        if not watch.off and ran_out(error):
            watch.guarded(lambda: note(error))
        shown(kind, error, trace)

    sys.excepthook = excepthook
