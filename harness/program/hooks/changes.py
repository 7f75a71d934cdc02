"""The switches of harness/model/changes.ini: what changes a program from outside.

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

from .reproduce import captured
from .signs import RECOMPUTED, RECOMPUTED_ALREADY, REPEATED, STORED

BLOCK_LISTS = ("ModuleList", "Sequential")
SWITCHES: dict[str, Callable] = {}  # by the name of the change: of a trial, on or off, its value


def switch(name: str) -> Callable:
    return lambda function: SWITCHES.setdefault(name, function)


def blocks_of(module) -> Iterator:
    """Repeated blocks: children of one class in one container."""
    for container in module.modules():
        if type(container).__name__ in BLOCK_LISTS:
            kinds = Counter(type(child) for child in container)
            yield from (
                child for child in container if kinds[type(child)] > 1 and [*child.children()]
            )


def widened(value):
    """As the loss outside of the model expects it."""
    return value.float() if torch.is_tensor(value) and value.dtype == torch.bfloat16 else value


@switch("bf16")
def bf16(trial, on: bool, value: str | None) -> None:
    for module, place in trial.models.items():
        device = next((p.device.type for p in module.parameters()), "cpu")
        trial.note(place, already=torch.is_autocast_enabled(device))

        def cast(forward: Callable, device: str = device) -> Callable:
            def call(*args, **kwargs):
                with torch.autocast(device, torch.bfloat16):
                    output = forward(*args, **kwargs)
                return torch.utils._pytree.tree_map(widened, output)

            return call

        trial.swap(module, "forward", cast, on)


def is_skipped(module) -> bool:
    """Whether module.compile() compiles nothing: the compiler skips frames of torch's own code, as
    the forward pass of nn.Sequential and of its subclasses.  torch.compile(module) does not."""
    return type(module).forward.__module__.partition(".")[0] == "torch"


def compiled(trial, on: bool, module, mode: str | None) -> None:
    how = (
        {"backend": captured(trial.results["graphs"])}
        if trial.trial.get("captures")
        else {"mode": mode}
    )

    def called_from_here(*args, **kwargs):  # a frame that is not torch's
        return module._call_impl(*args, **kwargs)

    if ("compiled", module) not in trial.kept:
        call = called_from_here if is_skipped(module) else module._call_impl
        trial.kept["compiled", module] = torch.compile(call, **how)
    module._compiled_call_impl = trial.kept["compiled", module] if on else None


def way_to_compile(module) -> str:
    return "whole" if is_skipped(module) else "line"


@switch("compile")
def compile_model(trial, on: bool, value: str | None) -> None:
    for module, place in trial.models.items():
        ours = ("compiled", module) in trial.kept
        theirs = type(module).__name__ == "OptimizedModule" or (
            module._compiled_call_impl and not ours
        )
        trial.note(place, already=theirs, way=way_to_compile(module))
        if not theirs:
            compiled(trial, on, module, value)


@switch("compile-blocks")
def compile_blocks(trial, on: bool, value: str | None) -> None:
    for module, place in trial.models.items():
        for block in blocks_of(module):
            trial.note(place, way=way_to_compile(block))
            compiled(trial, on, block, value)


@switch("sdpa")
def sdpa(trial, on: bool, value: str | None) -> None:
    for module, place in trial.models.items():
        for model in [one for one in module.modules() if hasattr(one, "set_attn_implementation")][
            :1
        ]:
            before = trial.kept.setdefault(("sdpa", model), model.config._attn_implementation)
            try:
                model.set_attn_implementation("sdpa" if on else before)
            except (
                ValueError
            ):  # as of a network of convolutions: the switch has nothing to choose from
                continue
            trial.note(place, already=before == "sdpa")


@switch("fused")
def fused(trial, on: bool, value: str | None) -> None:
    for optimizer, place in trial.made_at.items():
        if "fused" not in optimizer.defaults:
            continue
        names = [name for name in ("fused", "foreach") if name in optimizer.defaults]
        trial.note(place, already=optimizer.defaults["fused"], name=type(optimizer).__name__)
        for group in optimizer.param_groups:
            group.update(
                {name: name == "fused" if on else optimizer.defaults[name] for name in names}
            )
            for p in group["params"]:  # a fused optimizer keeps its count of steps on the device
                if "step" in (state := optimizer.state.get(p, {})):
                    on_device = group.get("fused") or group.get("capturable")
                    state["step"] = state["step"].to(p.device if on_device else "cpu")


@switch("channels-last")
def channels_last(trial, on: bool, value: str | None) -> None:
    def turned(one):
        images = torch.is_tensor(one) and one.ndim == 4
        return one.contiguous(memory_format=torch.channels_last) if images else one

    def taking_turned(forward: Callable) -> Callable:
        return lambda *args, **kwargs: forward(*map(turned, args), **kwargs)

    for module, place in trial.models.items():
        if any(p.ndim == 4 for p in module.parameters()):
            trial.note(place)
            module.to(memory_format=torch.channels_last if on else torch.contiguous_format)
            trial.swap(module, "forward", taking_turned, on)


@switch("threads")
def threads(trial, on: bool, value: str | None) -> None:
    before = trial.kept.setdefault("threads", torch.get_num_threads())
    trial.note("", already=before == int(value))
    torch.set_num_threads(int(value) if on else before)


@switch("checkpoint")
def checkpoint(trial, on: bool, value: str | None) -> None:
    for module, place in trial.models.items():
        for block in blocks_of(module):
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


def store_or_recompute(trial) -> None:
    """Before the program imports the function by its name."""
    recompute = torch.utils.checkpoint.checkpoint
    ours = (
        "use_reentrant",
        "preserve_rng_state",
        "context_fn",
        "determinism_check",
        "debug",
        "early_stop",
    )

    @functools.wraps(recompute)
    def either(function: Callable, *args, **kwargs):
        if not trial.stores:
            return recompute(function, *args, **kwargs)
        trial.note("", name="checkpoint", change="no-checkpoint")
        trial.signs.count(STORED)
        return function(*args, **{key: one for key, one in kwargs.items() if key not in ours})

    torch.utils.checkpoint.checkpoint = either


@switch("no-data")
def no_data(trial, on: bool, value: str | None) -> None:
    kept = trial.kept.setdefault("batches", {})

    def first_again(fetch: Callable) -> Callable:
        def call(loader):
            trial.note("", name="DataLoader", change="no-data")
            if loader in kept:
                trial.signs.count(REPEATED)
            else:
                kept[loader] = fetch(loader)
            return kept[loader]

        return call

    trial.swap(_BaseDataLoaderIter, "__next__", first_again, on)


def nudge(trial, on: bool, value: str) -> None:
    for module in trial.models:
        move(module, value)


def move(module: torch.nn.Module, nudge: str) -> None:
    """What rounding alone makes of training: parameters are moved by a share of themselves.
    nudge: share:seed."""
    share, _, seed = nudge.partition(":")
    generator = torch.Generator().manual_seed(int(seed))
    for p in module.parameters():
        noise = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
        p.data.mul_(1 + float(share) * noise)
