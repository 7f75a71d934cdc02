"""Do all ranks train the same model?  Each writes a few numbers of its tensors, and none waits for
another: the tool compares them."""

from __future__ import annotations

import functools
import inspect
import sys
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from types import FrameType
from typing import NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data.distributed import DistributedSampler

from ..audit import norm_of, sketch
from ..memory import local, objects
from ..phases import not_compiled
from .source_lines import PROGRAM, CodeKinds, name_of_line

EARLY_STEPS = 2  # that are looked at, as far as they are not timed
NUMBERS = 8  # that are kept of a tensor's sketch
DDP, REPLICA, SHARD, HOOK = "DDP", "replica", "shard", "communication hook"


def numbers_of(tensor: torch.Tensor) -> list[float]:
    """NUMBERS at most, of all elements of this rank's part: equal tensors have equal ones."""
    folded = sketch(tensor)
    if len(folded) <= NUMBERS:
        return folded.tolist()
    generator = torch.Generator().manual_seed(1)
    signs = 1 - 2 * torch.randint(2, (len(folded),), generator=generator)
    padded = nn.functional.pad(folded * signs, (0, -len(folded) % NUMBERS))
    return padded.reshape(NUMBERS, -1).sum(1).tolist()


def tensors_in(inputs: object) -> list[torch.Tensor]:
    """Those in whatever holds them that have elements to compare."""
    leaves = tree_leaves(inputs)
    return [leaf for leaf in leaves if torch.is_tensor(leaf) and has_numbers(leaf)]


class Inputs:
    """What a model is trained on in a step, as a few numbers of each tensor."""

    def __init__(self):
        self.numbers: list[list[list[float]]] = []  # by micro-step: of each tensor
        self.last: list[tuple[weakref.ref, int]] = []  # tensors, and their versions
        self.is_repeated: bool | None = None  # the same tensors come again; None: not seen
        self.is_uniform = True  # all elements of each tensor are the same number

    def note(self, tensors: list[torch.Tensor]) -> None:
        self.note_repeated(tensors)
        self.numbers.append([numbers_of(tensor) for tensor in tensors])
        for tensor in tensors:
            self.is_uniform &= bool((tensor == tensor.reshape(-1)[:1]).all())
        self.last = [(weakref.ref(tensor), tensor._version) for tensor in tensors]

    def note_repeated(self, tensors: list[torch.Tensor]) -> None:
        """Whether the last micro-step had these same tensors, and nothing wrote to them since."""
        if not self.last or self.is_repeated is False:
            return
        self.is_repeated = len(tensors) == len(self.last)
        for tensor, (last, version) in zip(tensors, self.last, strict=False):
            self.is_repeated &= last() is tensor and tensor._version == version

    def as_json(self, ranks: list[int]) -> dict:
        """ranks: those that are to have other inputs each."""
        is_constant = self.is_uniform or bool(self.is_repeated)
        return {"ranks": ranks, "inputs": self.numbers, "is_constant": is_constant}


class Reductions:
    """How often DDP reduces the gradients of one model between two steps of its optimizer."""

    def __init__(self, model: nn.parallel.DistributedDataParallel):
        trained = [p for p in model.parameters() if p.requires_grad]
        self.parameters = {id(p) for p in trained}
        self.bytes = sum(p.numel() * p.element_size() for p in trained)
        self.model = weakref.ref(model)
        self.reduces = False  # the backward pass of the last forward pass
        self.has_gradients = False  # of it
        self.forgets_forward = False  # no_sync() around the backward pass, not the forward pass
        self.times = 0
        self.where = ""  # the program's line that calls the model
        self.inputs = Inputs()
        self.ends_reduced = False  # the last backward pass reduced
        self.seconds_of_buffers: list[float] = []  # of the host: each broadcast of all of them
        self.buffer_bytes = 0
        self.buffers: list[list[float]] = []  # numbers of each, before the first broadcast

    def begins_forward(self, reduces: bool) -> None:
        self.reduces, self.has_gradients = reduces, False

    def has_gradient(self, gradient: torch.Tensor) -> None:
        """Called for each parameter in a backward pass; what counts is the first of them: a pass of
        another model may begin before, or not reach this one."""
        if self.has_gradients or not self.parameters:
            return
        self.has_gradients, self.ends_reduced = True, self.reduces
        if self.reduces:
            self.times += 1
            self.forgets_forward |= not self.model().require_backward_grad_sync

    @torch.no_grad()
    def note_buffers(self, buffers: list[torch.Tensor]) -> None:
        """Before they are broadcast."""
        if self.seconds_of_buffers:
            return
        self.buffer_bytes = sum(buffer.numel() * buffer.element_size() for buffer in buffers)
        self.buffers = [numbers_of(buffer) for buffer in buffers if has_numbers(buffer)]


class Collective(NamedTuple):
    """A call of all_reduce that stands in the program."""

    bytes: int
    seconds: float  # of the host


class Order(NamedTuple):
    """That a sampler gave to data of several ranks."""

    place: str  # the program's line that asked for it
    times: Counter  # by number of the epoch: how often it was given


class RankSketches:
    """Told before an optimizer's step.  Keeps numbers of parameters, of gradients and of the
    optimizer's state, in the order of its parameters, by step."""

    def __init__(self, watch):
        self.watch = watch
        self.looks: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by optimizer
        self.models: list[Reductions] = []
        self.hooks: list[Callable[[], None]] = []  # what takes them away
        self.gradient_hooks: list[Callable[[], None]] = []  # the same
        self.sees_forward = False  # passes of DDP
        self.is_counting = False  # reductions and inputs, in the step before the recorded ones
        self.kinds = CodeKinds()
        self.folder = watch.settings.get("folder", "")  # in which the command was started
        self.collectives: dict[str, list[Collective]] = {}  # by line, in the step that is counted
        self.random: dict[int, int] = {}  # by step: what the next random numbers depend on
        self.orders: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by sampler

    def install(self) -> None:
        """Once, as torch is imported."""
        begin, watch = DistributedSampler.__iter__, self.watch

        @functools.wraps(begin)
        def call(sampler):
            if not watch.off and sampler.shuffle and watch.ranks.is_of_training(sampler):
                watch.guarded(lambda: watch.ranks.note_order(sampler))
            return begin(sampler)

        DistributedSampler.__iter__ = call

    # ---- While the program runs ------------------------------------------------------------------

    def note_order(self, sampler: DistributedSampler) -> None:
        """It shuffles by the number of the epoch, which the program sets."""
        if sampler not in self.orders:
            self.orders[sampler] = Order(self.line_of_program(), Counter())
        self.orders[sampler].times[sampler.epoch] += 1

    def is_of_training(self, sampler: DistributedSampler) -> bool:
        """Data that a model is evaluated on may come in the same order each time."""
        is_hashable = type(sampler).__hash__ is not None
        is_evaluating = bool(self.watch.occasions.evaluating)
        return is_hashable and torch.is_grad_enabled() and not is_evaluating

    @torch.no_grad()
    def look(self, optimizer: torch.optim.Optimizer, step: int, has_gradients: bool = True) -> None:
        """has_gradients: those that it steps with; between steps of several optimizers, others have
        added to them."""
        if not has_other_ranks() or getattr(optimizer, "found_inf", False):
            return
        rows = []
        for group in optimizer.param_groups:
            for p in group["params"]:
                rows.append(row_of(p, optimizer.state.get(p, {}), has_gradients))
        self.looks.setdefault(optimizer, {})[step] = rows
        self.random[step] = state_of_random_numbers()
        if self.is_counting:
            self.close_counts(optimizer)

    def close_counts(self, optimizer: torch.optim.Optimizer) -> None:
        stepping = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for model in self.models:
            if model.parameters & stepping:
                model.parameters = set()  # counted

    def count(self, models: list[nn.Module]) -> None:
        """Hooks of DDP's modules, until the recorded steps are over."""
        self.uncount()
        if not has_other_ranks():
            return
        self.models, self.is_counting = [], True
        self.collectives = {}
        if not has_compiled():
            self.wrap_all_reduce()
        for model in models:
            for module in model.modules():
                if isinstance(module, nn.parallel.DistributedDataParallel):
                    self.count_model(module)
        self.sees_forward = bool(self.models) and not is_compiled_whole()
        if self.sees_forward:
            self.wrap_forward()
            self.wrap_buffers()

    def count_model(self, module: nn.parallel.DistributedDataParallel) -> None:
        counted = Reductions(module)
        self.models.append(counted)

        def has_gradient(gradient: torch.Tensor) -> None:
            self.watch.guarded(lambda: counted.has_gradient(gradient))

        not_compiled(has_gradient.__code__)
        for p in module.parameters():
            if p.requires_grad:
                self.gradient_hooks.append(p.register_hook(has_gradient).remove)

    def wrap_forward(self) -> None:
        """Of the class: torch.save() of a module with a hook of ours would fail."""
        ddp = nn.parallel.DistributedDataParallel
        forward = ddp.forward

        @functools.wraps(forward)
        def call(module, *args, **kwargs):
            self.called(module, (args, kwargs))
            return forward(module, *args, **kwargs)

        not_compiled(call.__code__)
        ddp.forward = call
        self.hooks.append(lambda: setattr(ddp, "forward", forward))

    def wrap_buffers(self) -> None:
        """Of the class, too: what DDP broadcasts before a forward pass."""
        ddp = nn.parallel.DistributedDataParallel
        sync = ddp._sync_buffers

        @functools.wraps(sync)
        def call(module):
            counted = self.counted(module)
            if counted is None:
                return sync(module)
            self.watch.guarded(lambda: counted.note_buffers(module.modules_buffers))
            began_s = time.perf_counter()
            try:
                return sync(module)
            finally:
                counted.seconds_of_buffers.append(time.perf_counter() - began_s)

        not_compiled(call.__code__)
        ddp._sync_buffers = call
        self.gradient_hooks.append(functools.partial(setattr, ddp, "_sync_buffers", sync))

    def counted(self, module: nn.Module) -> Reductions | None:
        return next((known for known in self.models if known.model() is module), None)

    def wrap_all_reduce(self) -> None:
        all_reduce = torch.distributed.all_reduce

        @functools.wraps(all_reduce)
        def call(tensor, *args, **kwargs):
            began_s = time.perf_counter()
            try:
                return all_reduce(tensor, *args, **kwargs)
            finally:
                seconds = time.perf_counter() - began_s
                caller = sys._getframe(1)
                self.watch.guarded(lambda: self.note_collective(tensor, seconds, caller))

        not_compiled(call.__code__)
        torch.distributed.all_reduce = call
        # Recorded steps are without it.
        undo = functools.partial(setattr, torch.distributed, "all_reduce", all_reduce)
        self.gradient_hooks.append(undo)

    def note_collective(self, tensor: torch.Tensor, seconds: float, caller: FrameType) -> None:
        if self.is_counting and self.kinds.kind_of(caller.f_code, caller) == PROGRAM:
            place = name_of_line(caller.f_code, caller.f_lineno, self.folder)
            n_bytes = tensor.numel() * tensor.element_size()
            self.collectives.setdefault(place, []).append(Collective(n_bytes, seconds))

    def end_counting(self) -> None:
        """Of recorded steps nothing is noted but whether inputs are those of before."""
        self.is_counting = False
        for remove in self.gradient_hooks:
            remove()
        self.gradient_hooks = []

    def called(self, module: nn.parallel.DistributedDataParallel, inputs: tuple) -> None:
        """Before a forward pass of any of them."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        counted = self.counted(module)
        if counted is not None:
            self.watch.guarded(lambda: self.note_call(counted, module, inputs))

    @torch.no_grad()
    def note_call(self, counted: Reductions, module: nn.Module, inputs: tuple) -> None:
        tensors = tensors_in(inputs)
        if not self.is_counting:
            counted.inputs.note_repeated(tensors)
        elif counted.parameters:
            counted.begins_forward(module.require_backward_grad_sync)
            counted.where = counted.where or self.line_of_program()
            counted.inputs.note(tensors)

    def line_of_program(self) -> str:
        return self.kinds.innermost_line(self.folder)

    def uncount(self) -> None:
        self.end_counting()
        for remove in self.hooks:
            remove()
        self.hooks = []

    # ---- For the tool ----------------------------------------------------------------------------

    def as_json(self, optimizers: list, named: list[tuple], models: list[nn.Module]) -> dict | None:
        """None without other ranks.  optimizers: in the order of their first steps; named: name and
        parameter of each, as ModuleRanges has them."""
        if not has_other_ranks():
            return None
        names = {id(p): name for name, p, _ in named}
        wrapped = wrappers_of(models)
        parameters, steps = [], {}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    why, ranks = wrapped.get(id(p)) or of_mesh(p)
                    name = names.get(id(p), "a parameter of no module")
                    parameters.append({"name": name, "why": why, "ranks": ranks})
            for step, rows in self.looks.get(optimizer, {}).items():
                steps.setdefault(step, []).extend(rows)
        # A step in which not all optimizers stepped says nothing of which row is whose.
        whole = {step: rows for step, rows in steps.items() if len(rows) == len(parameters)}
        reductions, data = [], []
        for counted in self.models:
            model = counted.model()
            if model is not None and not counted.parameters:
                reductions.append(reductions_of(counted, self.sees_forward))
                ranks = torch.distributed.get_process_group_ranks(model.process_group)
                data.append(counted.inputs.as_json(ranks))
        return {
            "parameters": parameters,
            "steps": whole,
            "models": reductions,
            "data": data,
            "collectives": told_collectives(self.collectives),
            "random": self.random,
            "repeated_orders": repeated_orders(self.orders.values()),
        }


def reductions_of(counted: Reductions, sees_forward: bool) -> dict:
    return {
        "times": counted.times,
        "bytes": counted.bytes,
        "micro_steps": len(counted.inputs.numbers) if sees_forward else None,
        "forgets_forward": counted.forgets_forward,
        "ends_reduced": counted.ends_reduced,
        "where": counted.where,
        "buffers": {
            "numbers": counted.buffers,
            "bytes": counted.buffer_bytes,
            "ms": [1e3 * seconds for seconds in counted.seconds_of_buffers],
            "flag": flag_of_buffers(),
        },
    }


def flag_of_buffers() -> str:
    """Of DDP, by which no forward pass broadcasts them; PyTorch 2.13 renamed it."""
    known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
    return "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"


def told_collectives(by_place: dict[str, list[Collective]]) -> list[dict]:
    rows = []
    for place, calls in by_place.items():
        rows.append(
            {
                "where": place,
                "calls": len(calls),
                "bytes": sum(of_call.bytes for of_call in calls),
                "ms": 1e3 * sum(of_call.seconds for of_call in calls),
                "shortest_ms": 1e3 * min(of_call.seconds for of_call in calls),
            }
        )
    return rows


def repeated_orders(orders: Iterable[Order]) -> list[dict]:
    rows = []
    for order in orders:
        epoch, times = order.times.most_common(1)[0]
        if times > 1:
            rows.append({"where": order.place, "epoch": epoch, "times": times})
    return rows


def state_of_random_numbers() -> int:
    """Of the generator that dropout draws from: equal ones draw equal numbers."""
    state = torch.get_rng_state()
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        state = torch.cuda.get_rng_state()
    return zlib.crc32(state.numpy())


def has_other_ranks() -> bool:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    return distributed.get_world_size() > 1


def has_numbers(tensor: torch.Tensor) -> bool:
    """Whether it has elements to compare, and tells when it is written to."""
    is_plain = tensor.layout is torch.strided and not tensor.is_inference()
    return is_plain and tensor.numel() > 0


def row_of(p: torch.Tensor, state: dict, has_gradients: bool) -> dict:
    """Of a parameter, before the optimizer's step."""
    row = {"parameter": None, "gradient": None, "norm": None, "state": {}}
    if not p.requires_grad:
        return row
    row["parameter"] = numbers_of(p)
    is_dense = p.grad is not None and p.grad.layout is torch.strided
    if has_gradients and is_dense and are_placed_alike(p, p.grad):
        row["gradient"] = numbers_of(p.grad)
        row["norm"] = norm_of(local(p.grad))
    for name, value in state.items():
        if torch.is_tensor(value) and value.is_floating_point() and value.shape == p.shape:
            row["state"][name] = numbers_of(value)
    return row


def has_compiled() -> bool:
    """Whether the program has compiled code, in which a call that is replaced would be compiled
    anew, or end the graph."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["frames"])


def is_compiled_whole() -> bool:
    """Whether the forward pass of a DDP module is compiled with what is around it."""
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is None:
        return False
    ddp = nn.parallel.DistributedDataParallel
    return any(isinstance(m._orig_mod, ddp) for m in objects(eval_frame.OptimizedModule))


def are_placed_alike(p: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Else each rank has a part of the gradient's sum."""
    return getattr(p, "placements", None) == getattr(gradient, "placements", None)


def wrappers_of(models: list[nn.Module]) -> dict[int, tuple[str, list[int] | None]]:
    """By id of a parameter: what makes it equal on which ranks, where a module does."""
    wrapped: dict[int, tuple[str, list[int] | None]] = {}
    for model in models:
        for module in model.modules():
            if type(module).__name__ == "FullyShardedDataParallel":
                for p in module.parameters():
                    wrapped[id(p)] = (SHARD, None)
            elif isinstance(module, nn.parallel.DistributedDataParallel):
                ranks = torch.distributed.get_process_group_ranks(module.process_group)
                why = HOOK if getattr(module, "_comm_hooks", None) else DDP
                for name, p in module.module.named_parameters():
                    if name not in module.parameters_to_ignore:
                        wrapped[id(p)] = (why, ranks)
    return wrapped


def of_mesh(p: torch.Tensor) -> tuple[str | None, list[int] | None]:
    """Of a tensor in shards: the ranks with the same ones.  Of any other: None and None."""
    placements = getattr(p, "placements", None)
    if placements is None:
        return None, None
    mesh = p.device_mesh
    mine = mesh.get_coordinate()
    place = []
    for coordinate, placement in zip(mine, placements, strict=True):
        place.append(slice(None) if placement.is_replicate() else coordinate)
    ranks = mesh.mesh[tuple(place)].reshape(-1).tolist()
    return (REPLICA, ranks) if len(ranks) > 1 else (SHARD, None)
