"""A run of the program with changes: an audit of its first steps, or steps with and without each
change in turn."""

import functools
import inspect
import os
import random
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from . import GRACE_S
from .audit import sketch
from .changes import SWITCHES, nudge, store_or_recompute
from .phases import not_compiled
from .signs import Signs, graphs_compiled
from .watch import Watch, kilobytes, rank_of_world

AUDIT_STEPS = 4  # of a run that is compared
UNTIMED, TURN, SETTLE = (
    4,
    6,
    2,
)  # steps: before all turns, of a turn, and at its begin, which are not counted
HOW_IT_COMPUTES = ("foreach", "fused", "capturable", "differentiable")
LOOKED_AT = 2  # steps in which models are found
DROPOUT = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
)
NOT_THE_PROGRAMS = (
    sysconfig.get_paths()["stdlib"],
    "site-packages",
    "<frozen",
    str(Path(__file__).parent),
)
TRAINERS = {
    "/transformers/trainer.py": "Trainer",
    "/pytorch_lightning/": "Lightning",
    "/lightning/": "Lightning",
}


def settings_of(group: dict) -> dict:
    """What of an optimizer's parameters decides how it trains."""
    told = {
        name: repr(one) for name, one in group.items() if name not in ("params", *HOW_IT_COMPUTES)
    }
    return {
        name: one for name, one in told.items() if " at 0x" not in one
    }  # an object, and not what it is


def parts_of(module: torch.nn.Module, path: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules that it calls, by their paths: lists of modules are looked through."""
    for name, child in module.named_children():
        is_list = type(child).forward is torch.nn.Module.forward
        yield from parts_of(child, f"{path}.{name}") if is_list else [(f"{path}.{name}", child)]


class Trial(Watch):
    """settings["trial"]: {audit: whether it is one; changes: that are on throughout; plan: of each
    turn, those on; inside: paths of the modules that are changed in place of models, or None;
    captures: compiled graphs are noted}.

    Its rules of what a step is are those of Watch.
    """

    def __init__(self, settings: dict):
        super().__init__(settings)
        self.trial = settings["trial"]
        self.models: weakref.WeakKeyDictionary = (
            weakref.WeakKeyDictionary()
        )  # outermost ones that train, by place
        self.made_at: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # optimizers
        self.kept: dict = {}  # what switches keep to undo themselves
        self.active, self.turn = "", -1
        self.stores = False  # what the program would recompute
        self.names: dict[int, str] = {}  # of parameters
        self.losses: list[torch.Tensor] = []
        self.before: dict[
            str, torch.Tensor
        ] = {}  # sketches of parameters after the first step, by name
        self.signs = Signs()
        self.results |= {"signs": {}, "turn_signs": [], "graphs_compiled": 0}
        self.results |= {
            "gradients": {},
            "moves": {},
            "losses": [],
            "notes": [],
            "times_ms": [],
            "trainer": "",
        }
        self.results |= {
            "settings": [],
            "in_training": 0,
            "modules": {},
            "graphs": [],
            "python": sys.executable,
        }

    # ---- For the switches ------------------------------------------------------------------------

    def note(
        self,
        place: str,
        *,
        already: bool = False,
        name: str = "",
        change: str = "",
        way: str = "line",
    ) -> None:
        """What the change that is being made applies to; already: and has no need to; way: which
        line of its record makes it."""
        variable, _, line = place.partition("@")
        note = {
            "change": change or self.active,
            "name": name or variable,
            "where": line,
            "already": bool(already),
        }
        note["way"] = way
        if note not in self.results["notes"]:
            self.results["notes"].append(note)

    def swap(self, owner: object, name: str, make: Callable, on: bool) -> None:
        """An attribute for a changed one, and back, whatever other changes make of it."""
        _, plain, makers = self.kept.setdefault(
            (id(owner), name), (owner, getattr(owner, name), {})
        )
        makers.pop(self.active, None)
        makers |= {self.active: make} if on else {}
        setattr(
            owner, name, functools.reduce(lambda made, make: make(made), makers.values(), plain)
        )

    def switch(self, changes: list[str], on: bool) -> None:
        for one in changes:
            name, _, value = one.partition("=")
            self.active = one
            (nudge if name == "nudge" else SWITCHES[name])(self, on, value or None)

    def place(self, held: object = None) -> str:
        """NAME@FILE:LINE: the program's line that is running, and its variable for an object."""
        frame, name, line = inspect.currentframe(), "", ""
        while frame := frame.f_back:
            file = frame.f_code.co_filename
            trainer = next((trainer for part, trainer in TRAINERS.items() if part in file), "")
            self.results["trainer"] = self.results["trainer"] or trainer
            known = (
                (key, one)
                for key, one in [*frame.f_locals.items()]
                if key not in ("self", "module")
            )
            name = name or next(
                (key for key, one in known if held is not None and one is held and not line), ""
            )
            if not line and not any(part in file for part in NOT_THE_PROGRAMS):
                line = f"{os.path.relpath(file)}:{frame.f_lineno}"
        return f"{name or 'model'}@{line}"

    # ---- Hooks beside those of all ---------------------------------------------------------------

    def prepare(self) -> None:
        """Before the other hooks are in place.  Programs that set no seed get one."""
        random.seed(0)
        torch.manual_seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)
        made, call, backward = (
            torch.optim.Optimizer.__init__,
            torch.nn.Module.__call__,
            torch.autograd.backward,
        )

        def making(optimizer, *args, **kwargs) -> None:
            self.made_at[optimizer] = self.place()
            made(optimizer, *args, **kwargs)

        def outermost(module, *args, **kwargs):
            torch.nn.Module.__call__ = call  # of those inside
            try:
                self.guarded(lambda: self.found(module))
                return call(module, *args, **kwargs)
            finally:
                torch.nn.Module.__call__ = (
                    outermost if self.steps < LOOKED_AT and not self.off else call
                )

        def with_loss(tensors, *args, **kwargs):
            loss = tensors if torch.is_tensor(tensors) else tensors[0]
            if self.signs.reading and self.depth["backward"] == 1:
                self.guarded(lambda: self.signs.read_graph([loss]))
            if self.trial["audit"] and self.depth["backward"] == 1 and loss.numel() == 1:
                self.losses.append(loss.detach().clone())
            return backward(tensors, *args, **kwargs)

        for function in (making, outermost, with_loss):
            not_compiled(function.__code__)
        self.signs.watch_calls()
        torch.optim.Optimizer.__init__, torch.nn.Module.__call__ = making, outermost
        torch.autograd.backward = with_loss
        if self.trial["audit"]:
            without_dropout()
        if any("no-checkpoint" in turn for turn in (self.trial["changes"], *self.trial["plan"])):
            store_or_recompute(self)

    def found(self, module: torch.nn.Module) -> None:
        """A module is called by the program: if it trains and is new, changes of modules begin now,
        for it alone."""
        inside = self.depth["backward"] or self.depth["data"]
        if inside or module in self.models or not torch.is_grad_enabled():
            return
        if any(p.requires_grad for p in module.parameters()):
            self.models[module] = self.place(module)
            self.name_parameters(module)
            self.results["in_training"] += sum(one.training for one in module.modules())
            every, paths = self.models, self.note_modules(module, self.models[module])
            wanted = {
                path: one
                for path, one in paths.items()
                if path in (self.trial["inside"] or [*paths][:1])
            }
            self.models = weakref.WeakKeyDictionary(dict.fromkeys(wanted.values(), every[module]))
            self.switch(self.trial["changes"], True)
            self.models = every

    def name_parameters(self, module: torch.nn.Module) -> None:
        """By their paths in the model; those of another model that has equal ones
        by its variable, too."""
        taken = set(self.names.values())
        variable = self.models[module].partition("@")[0]
        for path, p in module.named_parameters():
            name = path if path not in taken else f"{variable}.{path}"
            if name in taken:
                name = f"{name}#{len(self.models)}"
            self.names.setdefault(id(p), name)

    def note_modules(self, module: torch.nn.Module, place: str) -> dict[str, torch.nn.Module]:
        """A model and all modules within it, by path: first itself, by the name of its variable."""
        noted, name = self.results["modules"], place.partition("@")[0]
        paths = {name if name not in noted else f"{name}#{len(noted)}": module}
        for path in (todo := [*paths]):
            of = dict(parts_of(paths[path], path))
            noted[path] = [type(paths[path]).__name__, *of]
            paths |= of
            todo += of
        return paths

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if self.trial["audit"] and optimizer not in self.order:  # of its first step
            for p in (
                p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
            ):
                name = self.names.setdefault(id(p), f"parameter {len(self.names)}")
                self.results["gradients"][name] = sketch(p.grad).float().tolist()
        super().stepped(optimizer)

    # ---- Steps -----------------------------------------------------------------------------------

    def boundary(self) -> None:
        now, self.thread, self.due = time.perf_counter(), threading.get_ident(), False
        self.end_without_tool()
        self.steps += 1
        if self.state == "recorded":  # other ranks need it still
            return self.end_with_ranks()
        if self.state == "waiting":
            self.write("counting", until=None)
        if self.trial["audit"]:
            self.results["times_ms"].append(1e3 * (now - self.last))
            self.compare_step()
        else:
            self.take_turns(now)
        self.last = time.perf_counter()

    def compare_step(self) -> None:
        """Steps count anew when an optimizer that was not known has stepped: the first is then that
        of all."""
        if self.steps == 1:
            self.before = self.sketches()
            groups = [group for optimizer in self.order for group in optimizer.param_groups]
            self.results["settings"] = [settings_of(group) for group in groups]
        if self.steps == AUDIT_STEPS - 1:
            self.signs.begin()
        if self.steps >= AUDIT_STEPS:
            self.results["signs"] = self.signs.end()
            self.results["graphs_compiled"] = graphs_compiled()
            for name, after in self.sketches().items():
                if name in self.before:
                    self.results["moves"][name] = (after - self.before[name]).float().tolist()
            self.finish()

    def sketches(self) -> dict[str, torch.Tensor]:
        """Of all parameters that the optimizers have, by name."""
        sketches = {}
        for p in self.modules.of_optimizers():
            name = self.names.setdefault(id(p), f"parameter {len(self.names)}")
            sketches[name] = sketch(p)
        return sketches

    def take_turns(self, now: float) -> None:
        plan, times = self.trial["plan"], self.results["times_ms"]
        if self.steps > UNTIMED:
            times.append(1e3 * (now - self.last))
        turn, step = divmod(self.steps - UNTIMED, TURN)
        if turn < 0:
            return
        if (
            step in (0, SETTLE) and torch.cuda.is_initialized()
        ):  # steps of a GPU overlap: their mean counts
            torch.cuda.synchronize()
            if step == 0 and times:
                mean = 1e3 * (time.perf_counter() - self.settled) / (TURN - SETTLE)
                times[SETTLE - TURN :] = [mean] * (TURN - SETTLE)
            self.settled = time.perf_counter()
        if step == SETTLE - 1:  # the last step that does not count
            self.signs.begin()
        elif step == SETTLE:
            self.results["turn_signs"].append(self.signs.end())
        if step == 0:
            if self.turn >= 0:
                self.switch(plan[self.turn], False)
            self.turn = turn
            if turn == len(plan):
                self.finish()
            else:
                self.switch(plan[turn], True)

    def finish(self) -> None:
        self.tell()
        self.write("recorded")
        self.give_up = time.monotonic() + GRACE_S
        self.end_with_ranks()

    def tell(self) -> None:
        on_gpu, (rank, world_size) = torch.cuda.is_initialized(), rank_of_world()
        host_peak = kilobytes("/proc/self/status").get("VmHWM")
        accelerated = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
        accelerated = accelerated and accelerated._shared_state and "accelerate"
        self.results |= {
            **{
                "rank": rank,
                "world_size": world_size,
                "losses": [float(one) for one in self.losses],
            },
            "peak_bytes": torch.cuda.max_memory_allocated()
            if on_gpu
            else host_peak and 1024 * host_peak,
            "trainer": self.results["trainer"] or accelerated or "",
        }

    def ends_by_itself(self) -> None:
        if self.state == "counting" and not self.off:
            self.tell()
            self.write("ended", at_end=True)


def without_dropout() -> None:
    """Its masks depend on the memory format and on what is compiled."""
    functional = torch.nn.functional
    attention = functional.scaled_dot_product_attention

    def attend(q, k, v, attn_mask=None, dropout_p=0.0, *args, **kwargs):
        return attention(q, k, v, attn_mask, 0.0, *args, **kwargs)

    for name in DROPOUT:
        setattr(functional, name, lambda input, p=0.5, training=True, inplace=False: input)
    functional.scaled_dot_product_attention = attend
