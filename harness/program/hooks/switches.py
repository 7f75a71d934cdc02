"""The switches of harness/model/changes.py: what changes a program from outside.

A switch is turned on and off between steps, also while others are on.  It notes what it applies to,
or finds already so; what it does not know how to change it leaves alone.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator

import torch
import torch.utils.checkpoint
from torch.utils.data.dataloader import _BaseDataLoaderIter

from .memory import local
from .signs import RECOMPUTED, RECOMPUTED_ALREADY, REPEATED, STORED

BLOCK_LISTS = ("ModuleList", "Sequential")
SWITCHES: dict[str, Callable] = {}  # by the name of the change: of a trial, on or off, its value


def switch(name: str) -> Callable:
    """Enter a function in SWITCHES."""

    def enter(function: Callable) -> Callable:
        SWITCHES[name] = function
        return function

    return enter


def blocks_of(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Repeated blocks: children of one class in one container."""
    for container in model.modules():
        if type(container).__name__ not in BLOCK_LISTS:
            continue
        kinds = Counter(type(child) for child in container)
        for child in container:
            has_parts = next(child.children(), None) is not None
            if kinds[type(child)] > 1 and has_parts:
                yield child


def is_convolution(module: torch.nn.Module) -> bool:
    """Of images or volumes; its weight may be a module of its own, as with spectral_norm()."""
    of_torch = isinstance(module, torch.nn.modules.conv._ConvNd)
    return of_torch and len(module.kernel_size) > 1


def chooses_attention(module: torch.nn.Module) -> bool:
    """Whether it is a model of transformers, whose implementation of attention can be switched."""
    return hasattr(module, "set_attn_implementation")


def what_there_is(trial) -> dict[str, int]:
    """What of the program changes could be made of: counts by name."""
    count: Counter = Counter()
    for model in trial.models:
        count["repeated blocks"] += sum(1 for _ in blocks_of(model))
        count["convolutions"] += sum(map(is_convolution, model.modules()))
        count["choices of attention"] += any(map(chooses_attention, model.modules()))
    for optimizer in trial.made_at:
        count["optimizers with a fused kernel"] += "fused" in optimizer.defaults
    return dict(count)


def widened(value: object) -> object:
    """As the loss outside of the model expects it."""
    if torch.is_tensor(value) and value.dtype == torch.bfloat16:
        return value.float()
    return value


@switch("bf16")
def bf16(trial, on: bool, value: str | None) -> None:
    for model, place in trial.models.items():
        device = next((p.device.type for p in model.parameters()), "cpu")
        trial.note(place, already=torch.is_autocast_enabled(device))

        def cast(forward: Callable, device: str = device) -> Callable:
            def call(*args, **kwargs):
                with torch.autocast(device, torch.bfloat16):
                    output = forward(*args, **kwargs)
                return torch.utils._pytree.tree_map(widened, output)

            return call

        trial.swap(model, "forward", cast, on)


def is_skipped(module: torch.nn.Module) -> bool:
    """Whether module.compile() compiles nothing: the compiler skips frames of torch's own code, as
    the forward pass of nn.Sequential and of its subclasses.  torch.compile(module) does not."""
    return type(module).forward.__module__.partition(".")[0] == "torch"


def compiled(trial, on: bool, module: torch.nn.Module, mode: str | None) -> None:
    """As module.compile(mode=mode) does, and back."""

    def called_from_here(*args, **kwargs):  # a frame that is not torch's
        return module._call_impl(*args, **kwargs)

    if ("compiled", module) not in trial.kept:
        call = called_from_here if is_skipped(module) else module._call_impl
        trial.kept["compiled", module] = torch.compile(call, mode=mode)
    module._compiled_call_impl = trial.kept["compiled", module] if on else None


def way_to_compile(module: torch.nn.Module) -> str:
    return "whole" if is_skipped(module) else "line"


@switch("compile")
def compile_model(trial, on: bool, value: str | None) -> None:
    for model, place in trial.models.items():
        is_ours = ("compiled", model) in trial.kept
        is_theirs = type(model).__name__ == "OptimizedModule"
        if model._compiled_call_impl and not is_ours:
            is_theirs = True
        trial.note(place, already=is_theirs, way=way_to_compile(model))
        if not is_theirs:
            compiled(trial, on, model, value)


@switch("compile-blocks")
def compile_blocks(trial, on: bool, value: str | None) -> None:
    for model, place in trial.models.items():
        for block in blocks_of(model):
            trial.note(place, way=way_to_compile(block))
            compiled(trial, on, block, value)


@switch("sdpa")
def sdpa(trial, on: bool, value: str | None) -> None:
    for model, place in trial.models.items():
        outermost = next(filter(chooses_attention, model.modules()), None)
        if outermost is None:
            continue
        key = ("sdpa", outermost)
        before = trial.kept.setdefault(key, outermost.config._attn_implementation)
        try:
            outermost.set_attn_implementation("sdpa" if on else before)
        except ValueError:  # as of a network of convolutions: there is nothing to choose from
            continue
        trial.note(place, already=before == "sdpa")


@switch("fused")
def fused(trial, on: bool, value: str | None) -> None:
    for optimizer, place in trial.made_at.items():
        steps_with = stepping_within(optimizer)
        defaults = steps_with.defaults
        if "fused" not in defaults:
            continue
        trial.note(place, already=defaults["fused"], name=type(steps_with).__name__)
        for group in optimizer.param_groups:
            for name in ("fused", "foreach"):
                if name in defaults:
                    group[name] = name == "fused" if on else defaults[name]
            move_counts_of_steps(optimizer, group)


def stepping_within(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """That of this rank's part, by which ZeroRedundancyOptimizer steps, and which gets the settings
    of the groups around it in each step; any other optimizer itself."""
    within = getattr(optimizer, "optim", None)
    return within if isinstance(within, torch.optim.Optimizer) else optimizer


def move_counts_of_steps(optimizer: torch.optim.Optimizer, group: dict) -> None:
    """A fused optimizer keeps its count of steps on the device."""
    on_device = group.get("fused") or group.get("capturable")
    for p in group["params"]:
        state = optimizer.state.get(p, {})
        if "step" in state:
            state["step"] = state["step"].to(p.device if on_device else "cpu")


@switch("channels-last")
def channels_last(trial, on: bool, value: str | None) -> None:
    def turned(argument: object) -> object:
        if torch.is_tensor(argument) and argument.ndim == 4:  # images: [B, C, H, W]
            return argument.contiguous(memory_format=torch.channels_last)
        return argument

    def taking_turned(forward: Callable) -> Callable:
        return lambda *args, **kwargs: forward(*map(turned, args), **kwargs)

    for model, place in trial.models.items():
        if any(p.ndim == 4 for p in model.parameters()):
            trial.note(place)
            model.to(memory_format=torch.channels_last if on else torch.contiguous_format)
            trial.swap(model, "forward", taking_turned, on)


@switch("threads")
def threads(trial, on: bool, value: str | None) -> None:
    before = trial.kept.setdefault("threads", torch.get_num_threads())
    trial.note("", already=before == int(value))
    torch.set_num_threads(int(value) if on else before)


@switch("checkpoint")
def checkpoint(trial, on: bool, value: str | None) -> None:
    for model, place in trial.models.items():
        for block in blocks_of(model):
            trial.note(place)
            trial.swap(block, "forward", functools.partial(recomputing, trial), on)


def recomputing(trial, forward: Callable) -> Callable:
    """The forward pass of a block, which runs once more in the backward pass."""

    def counted(*args, **kwargs):
        if trial.depth["backward"]:
            trial.signs.count(RECOMPUTED)
        return forward(*args, **kwargs)

    def call(*args, **kwargs):
        if trial.depth["backward"]:
            trial.signs.count(RECOMPUTED_ALREADY)
        return torch.utils.checkpoint.checkpoint(counted, *args, use_reentrant=False, **kwargs)

    return call


@switch("no-checkpoint")
def no_checkpoint(trial, on: bool, value: str | None) -> None:
    trial.stores = on


FLAGS_OF_CHECKPOINT = (
    "use_reentrant",
    "preserve_rng_state",
    "context_fn",
    "determinism_check",
    "debug",
    "early_stop",
)


def store_or_recompute(trial) -> None:
    """Wraps torch.utils.checkpoint.checkpoint, before the program imports it by its name."""
    recompute = torch.utils.checkpoint.checkpoint

    @functools.wraps(recompute)
    def either(function: Callable, *args, **kwargs):
        if not trial.stores:
            return recompute(function, *args, **kwargs)
        trial.note("", name="checkpoint", change="no-checkpoint")
        trial.signs.count(STORED)
        for flag in FLAGS_OF_CHECKPOINT:
            kwargs.pop(flag, None)
        return function(*args, **kwargs)

    torch.utils.checkpoint.checkpoint = either


@switch("no-data")
def no_data(trial, on: bool, value: str | None) -> None:
    batches = trial.kept.setdefault("batches", {})  # by loader, its first

    def first_again(fetch: Callable) -> Callable:
        def call(loader):
            trial.note("", name="DataLoader", change="no-data")
            if loader in batches:
                trial.signs.count(REPEATED)
            else:
                batches[loader] = fetch(loader)
            return batches[loader]

        return call

    trial.swap(_BaseDataLoaderIter, "__next__", first_again, on)


def nudge(trial, on: bool, value: str) -> None:
    for model in trial.models:
        move(model, value)


def move(model: torch.nn.Module, nudge: str) -> None:
    """What rounding alone makes of training: parameters are moved by a share of themselves, or by
    what their type rounds to where that is more.  nudge: share:seed."""
    share, _, seed = nudge.partition(":")
    generator = torch.Generator().manual_seed(int(seed))
    for p in model.parameters():
        values = local(p.data)
        noise = torch.randn(values.shape, generator=generator).to(values.device, values.dtype)
        rounds_to = torch.finfo(values.dtype).eps / 2
        values.mul_(1 + max(float(share), rounds_to) * noise)
