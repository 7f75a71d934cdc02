"""The parts of the program's models: ranges by module path, while steps are recorded."""

import functools
import inspect
import sys
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch
from torch import nn

from .memory import objects
from .phases import wrapped

WRAPPERS = (
    "DataParallel",
    "OptimizedModule",
    "CheckpointWrapper",
    "DeepSpeedEngine",
)  # ends of names of classes
GENERATED = ("torch.fx", "torch._dynamo.output")  # modules that a compiler made
EVALUATION = "forward without gradients"
PHASES = ("data", "forward", "backward", "optimizer")


class ModuleRanges:
    """Global hooks on all modules, in place while steps are recorded: those of single modules would
    travel with deepcopy and torch.save.  The outermost call of a module is the forward phase,
    or an evaluation."""

    def __init__(self, watch):
        self.watch, self.names, self.undo = watch, {}, []
        self.models: list[tuple[nn.Module, str]] = []  # outermost ones and what they are called
        self.called: set[str] = set()  # of --data
        self.stacks: dict[int, list] = defaultdict(
            list
        )  # by thread: module, its ranges, the phase that it began

    # ---- Names -----------------------------------------------------------------------------------

    def name_all(self) -> None:
        """Found among all objects, so that nothing need watch the program before.  Wrappers such as
        DDP leave no name; several models are told apart by the names of the
        variables that hold them."""
        modules = [
            one for one in objects(nn.Module) if not type(one).__module__.startswith(GENERATED)
        ]
        inner = {id(child) for one in modules for child in one._modules.values()}
        roots = [one for one in modules if id(one) not in inner]
        ours = [one for one in roots if self.trains(one)]
        ours = ours or [one for one in roots if any(p.requires_grad for p in one.parameters())]
        labels, self.names = variables_that_hold_modules(), {}
        self.models = [
            (root, "" if ours == [root] else labels.get(id(root), type(root).__name__))
            for root in ours
        ]
        others = [
            (root, labels.get(id(root), type(root).__name__)) for root in roots if root not in ours
        ]
        for root, label in self.models + others:
            self.name(root, label)

    def name(self, root: nn.Module, label: str) -> None:
        found = [(root, "", label)]
        for module, path, prefix in found:  # which grows
            if module in self.names:
                continue
            kind = type(module).__name__.removeprefix("FSDP")  # that of fully_shard()
            prefix = (
                kind if prefix.endswith((*WRAPPERS, "self")) else prefix
            )  # that of what is wrapped
            wraps = kind.endswith(WRAPPERS)
            name = "" if wraps else f"{prefix}.{path}".strip(".") or kind
            self.names[module] = f"module {name}" if name in PHASES else name
            children = [
                (name, child) for name, child in module._modules.items() if child is not None
            ]
            found += [
                (child, path if wraps else f"{path}.{name}".strip("."), prefix)
                for name, child in children
            ]

    def of_optimizers(self) -> Iterator[nn.Parameter]:
        return (
            p for one in self.watch.order for group in one.param_groups for p in group["params"]
        )

    def trains(self, module: nn.Module) -> bool:
        """Whether an optimizer owns any of its parameters."""
        owned = {id(p) for p in self.of_optimizers()}
        return any(id(p) in owned for p in module.parameters())

    def parameters(self) -> list[tuple[str, nn.Parameter, bool]]:
        """Name, parameter and whether an optimizer owns it, of all parameters of the models that
        are trained."""
        owned, seen, found = {id(p) for p in self.of_optimizers()}, set(), []
        for module, label in self.models:
            for name, p in module.named_parameters():
                if id(p) not in seen:
                    seen.add(id(p))
                    found.append(
                        (f"{label}.{name}".strip("."), p, id(p) in owned or not self.watch.order)
                    )
        named = [
            (f"parameter {i}", p, True)
            for i, p in enumerate(self.of_optimizers())
            if id(p) not in seen
        ]
        return found + named

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
            called = functools.partial(self.data, target, getattr(holder, last))
            phase = wrapped(self.watch, functools.wraps(getattr(holder, last))(called), "data")
            places = [(holder, last)]  # and where modules have it under a name of their own
            for one in [*sys.modules.values()]:
                names = [
                    name
                    for name, value in [*getattr(one, "__dict__", {}).items()]
                    if value is function
                ]
                places += [(one, name) for name in names if one is not holder]
            for place, name in places:
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
        if watch.depth["data"] or (stack and stack[0][2] == EVALUATION):
            return  # transforms of data are modules too
        if watch.profiler and thread != watch.thread and not watch.depth["backward"]:
            return  # not profiled
        phase, names = None, []
        if not stack and not watch.depth["backward"]:  # else recomputed
            evaluated = not (
                torch.is_grad_enabled() or module.training or watch.settings["steps"] == "forward"
            )
            phase = (
                EVALUATION if evaluated and self.trains(module) else "forward"
            )  # that of a teacher
            watch.seen[phase] += 1
        if watch.profiler:
            generated = phase == EVALUATION or type(module).__module__.startswith(GENERATED)
            name = None if generated else self.names.get(module, type(module).__name__)
            names = [one for one in (phase, name) if one]
        stack.append((module, [opened(one) for one in names], phase))

    def leave(self, module: nn.Module, args: tuple, output: object) -> None:
        if torch.compiler.is_compiling():
            return
        stack, one = self.stacks[threading.get_ident()], None
        if all(other is not module for other, *_ in stack):
            return
        while one is not module:  # also those that an exception left open
            one, ranges, _ = stack.pop()
            for a_range in reversed(ranges):
                a_range.__exit__(None, None, None)
        watch = self.watch
        if not stack and watch.settings["steps"] == "forward" and not watch.off and not watch.open:
            watch.guarded(watch.boundary)

    def close(self) -> None:
        """The ranges that are open on this thread, as that of a module that the step ends in."""
        if stack := self.stacks[threading.get_ident()]:
            self.leave(stack[0][0], (), None)


def opened(name: str) -> torch.profiler.record_function:
    a_range = torch.profiler.record_function(name)
    a_range.__enter__()
    return a_range


def variables_that_hold_modules() -> dict[int, str]:
    """By id of the module: the name of the outermost variable of the running
    functions that holds it."""
    frame, labels = inspect.currentframe(), {}
    while frame := frame.f_back:
        held = {**getattr(frame.f_locals.get("self"), "__dict__", {}), **frame.f_locals}
        labels = {
            id(one): name for name, one in held.items() if issubclass(type(one), nn.Module)
        } | labels
    return labels
