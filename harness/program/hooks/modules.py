"""The parts of the program's models: ranges by module path, while steps are recorded."""

import functools
import inspect
import sys
import threading
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from .memory import objects
from .phases import wrapped

# Ends of names of classes.
WRAPPERS = ("DataParallel", "OptimizedModule", "CheckpointWrapper", "DeepSpeedEngine")
GENERATED = ("torch.fx", "torch._dynamo.output")  # modules that a compiler made
EVALUATION = "forward without gradients"
PHASES = ("data", "forward", "backward", "optimizer")


class Call(NamedTuple):
    """Of a module, that has begun and not ended."""

    module: nn.Module
    ranges: list[torch.profiler.record_function]  # that it opened
    phase: str | None  # that it began: forward, EVALUATION; None inside of one, or of a backward


class ModuleRanges:
    """Global hooks on all modules, in place while steps are recorded: those of single modules would
    travel with deepcopy and torch.save.  The outermost call of a module is the forward phase,
    or an evaluation."""

    def __init__(self, watch):
        self.watch = watch
        self.names: dict[nn.Module, str] = {}
        self.undo: list[Callable] = []  # what takes the hooks away
        self.models: list[tuple[nn.Module, str]] = []  # outermost ones and what they are called
        self.called: set[str] = set()  # of --data
        self.stacks: dict[int, list[Call]] = defaultdict(list)  # by thread

    # ---- Names -----------------------------------------------------------------------------------

    def name_all(self) -> None:
        """Found among all objects, so that nothing need watch the program before.  Wrappers such as
        DDP leave no name; several models are told apart by the names of the
        variables that hold them."""
        roots = outermost_modules()
        models = self.models_of(roots)
        variables = variables_that_hold_modules()
        self.names, self.models = {}, []
        others = []
        for root in roots:
            label = variables.get(id(root), type(root).__name__)
            if root not in models:
                others.append((root, label))
            elif len(models) == 1:
                self.models.append((root, ""))
            else:
                self.models.append((root, label))
        for root, label in self.models + others:
            self.name(root, label)

    def models_of(self, roots: list[nn.Module]) -> list[nn.Module]:
        """Those that are trained; if there are none, those that could be."""
        trained = [root for root in roots if self.trains(root)]
        if trained:
            return trained
        return [root for root in roots if any(p.requires_grad for p in root.parameters())]

    def name(self, root: nn.Module, label: str) -> None:
        """Name the module and all within it, in the order of their depth."""
        to_name = deque([(root, "", label)])
        while to_name:
            module, path, prefix = to_name.popleft()
            if module in self.names:
                continue
            kind = type(module).__name__.removeprefix("FSDP")  # that of fully_shard()
            if prefix.endswith((*WRAPPERS, "self")):
                prefix = kind  # that of what is wrapped
            is_wrapper = kind.endswith(WRAPPERS)
            name = "" if is_wrapper else f"{prefix}.{path}".strip(".") or kind
            if name.replace(".", "").isdigit():  # of nn.Sequential, which has no names
                name = f"{kind} {name}"
            self.names[module] = f"module {name}" if name in PHASES else name
            for child_name, child in module._modules.items():
                if child is not None:
                    child_path = path if is_wrapper else f"{path}.{child_name}".strip(".")
                    to_name.append((child, child_path, prefix))

    def of_optimizers(self) -> Iterator[nn.Parameter]:
        for optimizer in self.watch.order:
            for group in optimizer.param_groups:
                yield from group["params"]

    def trains(self, module: nn.Module) -> bool:
        """Whether an optimizer owns any of its parameters."""
        owned = {id(p) for p in self.of_optimizers()}
        return any(id(p) in owned for p in module.parameters())

    def parameters(self) -> list[tuple[str, nn.Parameter, bool]]:
        """Name, parameter and whether an optimizer owns it, of all parameters of the models that
        are trained."""
        owned = {id(p) for p in self.of_optimizers()}
        seen, rows = set(), []
        for model, label in self.models:
            for name, p in model.named_parameters():
                if id(p) not in seen:
                    seen.add(id(p))
                    is_owned = id(p) in owned or not self.watch.order
                    rows.append((f"{label}.{name}".strip("."), p, is_owned))
        for i, p in enumerate(self.of_optimizers()):
            if id(p) not in seen:
                rows.append((f"parameter {i}", p, True))
        return rows

    def trained(self) -> list[nn.Parameter]:
        return [p for _, p, owned in self.parameters() if owned and p.requires_grad]

    # ---- Hooks -----------------------------------------------------------------------------------

    def attach(self) -> None:
        if self.undo:
            return
        warnings.filterwarnings("ignore", message=".*global hooks on modules")
        hooks = torch.nn.modules.module
        # Also after an exception: recomputing a checkpointed block ends with one.
        left = hooks.register_module_forward_hook(self.leave, always_call=True)
        self.undo = [hooks.register_module_forward_pre_hook(self.enter).remove, left.remove]

    def watch_data(self, targets: list[str]) -> None:
        """Functions or methods, as [MODULE:]NAME, that load data are phases, too."""
        for target in targets:
            module, _, path = target.rpartition(":")
            *holders, last = path.split(".")
            try:
                holder = functools.reduce(getattr, holders, sys.modules[module or "__main__"])
                function = inspect.getattr_static(holder, last)
            except (KeyError, AttributeError) as error:
                raise LookupError(f"--data {target}: the program has no such function") from error
            loads = getattr(holder, last)
            called = functools.wraps(loads)(functools.partial(self.data, target, loads))
            phase = wrapped(self.watch, called, "data")
            for place, name in [(holder, last), *names_in_modules(function, holder)]:
                self.undo.append(functools.partial(setattr, place, name, function))
                setattr(place, name, phase)

    def data(self, target: str, function: Callable, *args: object, **kwargs: object) -> object:
        self.called.add(target)
        return function(*args, **kwargs)

    def forget(self) -> None:
        """Else the models would live as long as Python does, and files that the program left open
        lose their end."""
        self.names, self.models = {}, []

    def detach(self) -> None:
        self.close()
        for undo in self.undo:
            undo()
        self.undo = []
        if self.watch.settings["steps"] == "forward" and not self.watch.off:
            self.attach()

    def enter(self, module: nn.Module, args: tuple) -> None:
        if torch.compiler.is_compiling():  # first, as a compiler reads this too
            return
        watch, thread = self.watch, threading.get_ident()
        stack = self.stacks[thread]
        in_evaluation = stack and stack[0].phase == EVALUATION
        if watch.depth["data"] or in_evaluation:
            return  # transforms of data are modules too
        if watch.profiler and thread != watch.thread and not watch.depth["backward"]:
            return  # not profiled
        phase = None
        if not stack and not watch.depth["backward"]:  # else recomputed
            phase = self.phase_of(module)
            watch.seen[phase] += 1
        ranges = self.ranges_of(module, phase) if watch.profiler else []
        stack.append(Call(module, ranges, phase))

    def phase_of(self, module: nn.Module) -> str:
        """What an outermost call is: the forward phase, also that of a teacher, or an
        evaluation."""
        if torch.is_grad_enabled() or module.training or self.watch.settings["steps"] == "forward":
            return "forward"
        return EVALUATION if self.trains(module) else "forward"

    def ranges_of(
        self, module: nn.Module, phase: str | None
    ) -> list[torch.profiler.record_function]:
        """Opened: that of the phase, and that of the module."""
        names = [phase] if phase else []
        is_generated = type(module).__module__.startswith(GENERATED)
        if phase != EVALUATION and not is_generated:
            names.append(self.names.get(module, type(module).__name__))
        return [opened(name) for name in names if name]

    def leave(self, module: nn.Module, args: tuple, output: object) -> None:
        if torch.compiler.is_compiling():
            return
        stack = self.stacks[threading.get_ident()]
        if all(call.module is not module for call in stack):
            return
        while True:  # also those that an exception left open
            call = stack.pop()
            for a_range in reversed(call.ranges):
                a_range.__exit__(None, None, None)
            if call.module is module:
                break
        watch = self.watch
        ends_step = watch.settings["steps"] == "forward" and not watch.off
        if not stack and ends_step and not watch.open:
            watch.guarded(watch.boundary)

    def close(self) -> None:
        """The ranges that are open on this thread, as that of a module that the step ends in."""
        stack = self.stacks[threading.get_ident()]
        if stack:
            self.leave(stack[0].module, (), None)


def opened(name: str) -> torch.profiler.record_function:
    a_range = torch.profiler.record_function(name)
    a_range.__enter__()
    return a_range


def outermost_modules() -> list[nn.Module]:
    """Of all that are there, those that no other has, without what a compiler made."""
    modules, inner = [], set()
    for module in objects(nn.Module):
        if not type(module).__module__.startswith(GENERATED):
            modules.append(module)
            inner.update(map(id, module._modules.values()))
    return [module for module in modules if id(module) not in inner]


def names_in_modules(function: object, holder: object) -> list[tuple[object, str]]:
    """Where modules other than the holder have the function under a name of their own."""
    places = []
    for module in list(sys.modules.values()):
        if module is holder:
            continue
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is function:
                places.append((module, name))
    return places


def variables_that_hold_modules() -> dict[int, str]:
    """By id of the module: the name of the variable that holds it, in the innermost of the running
    functions that has one."""
    variables: dict[int, str] = {}
    frame = inspect.currentframe()
    while frame.f_back:
        frame = frame.f_back
        held = dict(getattr(frame.f_locals.get("self"), "__dict__", {}))
        held.update(frame.f_locals)
        of_frame = {id(v): name for name, v in held.items() if issubclass(type(v), nn.Module)}
        for key, name in of_frame.items():
            variables.setdefault(key, name)
    return variables
