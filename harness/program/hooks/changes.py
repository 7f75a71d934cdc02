"""The switches of harness/model/changes.ini: what changes a program from outside.

A switch is turned on and off between steps, also while others are on.  It notes what it applies to, or finds already
so; what it does not know how to change it leaves alone.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator

import torch
import torch.utils.checkpoint
from torch.utils.data.dataloader import _BaseDataLoaderIter

from .reproduce import captured

BLOCK_LISTS = ("ModuleList", "Sequential")
SWITCHES: dict[str, Callable] = {}  # by the name of the change: of a trial, on or off, its value


def switch(name: str) -> Callable:
    return lambda function: SWITCHES.setdefault(name, function)


def blocks_of(module) -> Iterator:
    """Repeated blocks: children of one class in one container."""
    for container in module.modules():
        if type(container).__name__ in BLOCK_LISTS:
            kinds = Counter(type(child) for child in container)
            yield from (child for child in container if kinds[type(child)] > 1 and [*child.children()])


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


def compiled(trial, on: bool, module, mode: str | None) -> None:
    how = {"backend": captured(trial.results["graphs"])} if trial.trial.get("captures") else {"mode": mode}
    made = trial.kept.setdefault(("compiled", module), torch.compile(module._call_impl, **how))
    module._compiled_call_impl = made if on else None


@switch("compile")
def compile_model(trial, on: bool, value: str | None) -> None:
    for module, place in trial.models.items():
        ours = ("compiled", module) in trial.kept
        theirs = type(module).__name__ == "OptimizedModule" or (module._compiled_call_impl and not ours)
        trial.note(place, already=theirs)
        if not theirs:
            compiled(trial, on, module, value)


@switch("compile-blocks")
def compile_blocks(trial, on: bool, value: str | None) -> None:
    for module, place in trial.models.items():
        for block in blocks_of(module):
            trial.note(place)
            compiled(trial, on, block, value)


@switch("sdpa")
def sdpa(trial, on: bool, value: str | None) -> None:
    for module, place in trial.models.items():
        for model in [one for one in module.modules() if hasattr(one, "set_attn_implementation")][:1]:
            before = trial.kept.setdefault(("sdpa", model), model.config._attn_implementation)
            trial.note(place, already=before == "sdpa")
            model.set_attn_implementation("sdpa" if on else before)


@switch("fused")
def fused(trial, on: bool, value: str | None) -> None:
    for optimizer, place in trial.made_at.items():
        if "fused" not in optimizer.defaults:
            continue
        names = [name for name in ("fused", "foreach") if name in optimizer.defaults]
        trial.note(place, already=optimizer.defaults["fused"], name=type(optimizer).__name__)
        for group in optimizer.param_groups:
            group.update({name: name == "fused" if on else optimizer.defaults[name] for name in names})
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
            recomputed = functools.partial(functools.partial, torch.utils.checkpoint.checkpoint, use_reentrant=False)
            trial.swap(block, "forward", recomputed, on)


@switch("no-checkpoint")
def no_checkpoint(trial, on: bool, value: str | None) -> None:
    trial.stores = on


def store_or_recompute(trial) -> None:
    """Before the program imports the function by its name."""
    recompute = torch.utils.checkpoint.checkpoint
    ours = ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")

    @functools.wraps(recompute)
    def either(function: Callable, *args, **kwargs):
        if not trial.stores:
            return recompute(function, *args, **kwargs)
        trial.note("", name="checkpoint", change="no-checkpoint")
        return function(*args, **{key: one for key, one in kwargs.items() if key not in ours})

    torch.utils.checkpoint.checkpoint = either


@switch("no-data")
def no_data(trial, on: bool, value: str | None) -> None:
    kept = trial.kept.setdefault("batches", {})

    def first_again(fetch: Callable) -> Callable:
        def call(loader):
            trial.note("", name="DataLoader", change="no-data")
            if loader not in kept:
                kept[loader] = fetch(loader)
            return kept[loader]

        return call

    trial.swap(_BaseDataLoaderIter, "__next__", first_again, on)


def nudge(trial, on: bool, value: str) -> None:
    for module in trial.models:
        move(module, value)


def move(module: torch.nn.Module, nudge: str) -> None:
    """What rounding alone makes of training: parameters are moved by a share of themselves.  nudge: share:seed."""
    share, _, seed = nudge.partition(":")
    generator = torch.Generator().manual_seed(int(seed))
    for p in module.parameters():
        noise = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
        p.data.mul_(1 + float(share) * noise)
