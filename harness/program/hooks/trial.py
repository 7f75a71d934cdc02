"""A run of the program with changes: an audit of its first steps, or steps with and without each
change in turn."""

import inspect
import os
import random
import sys
import sysconfig
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from types import FrameType

import torch

from . import GRACE_S
from .audit import sketch
from .modules import outermost_modules
from .phases import not_compiled
from .signs import Signs
from .switches import SWITCHES, nudge, store_or_recompute, what_there_is
from .watch import Watch, kilobytes, rank_of_world

AUDIT_STEPS = 4  # of a run that is compared
UNTIMED = 4  # steps before all turns
TURN = 6  # steps of a turn
SETTLE = 2  # steps at the begin of a turn, which are not counted
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


def settings_of(group: dict) -> dict[str, str]:
    """What of an optimizer's parameters decides how it trains."""
    settings = {}
    for name, value in group.items():
        if name == "params" or name in HOW_IT_COMPUTES:
            continue
        text = repr(value)
        if " at 0x" not in text:  # else an object, and not what it is
            settings[name] = text
    return settings


def callers() -> Iterator[FrameType]:
    """The frames around, the innermost first."""
    frame = inspect.currentframe().f_back
    while frame.f_back:
        frame = frame.f_back
        yield frame


def variable_of(held: object, frame: FrameType) -> str:
    """The local variable that holds the object; empty if none does."""
    for name, value in list(frame.f_locals.items()):
        if value is held and name not in ("self", "module"):
            return name
    return ""


class TrialWatch(Watch):
    """settings["trial"]: {audit: whether it is one; changes: that are on throughout; plan: of each
    turn, those on}.

    Its rules of what a step is are those of Watch.
    """

    def __init__(self, settings: dict):
        super().__init__(settings)
        self.trial = settings["trial"]
        # Outermost modules that train, each with the place where it was called first.
        self.models: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self.has_looked_for_models = False
        self.made_at: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # optimizers
        self.kept: dict = {}  # what switches keep to undo themselves
        self.active = ""  # the change that is being made
        self.turn = -1
        self.settled_s = 0.0  # when the device had nothing left to do, at the begin of a turn
        self.stores = False  # what the program would recompute
        self.names: dict[int, str] = {}  # of parameters, by id
        self.losses: list[torch.Tensor] = []
        self.before: dict[str, torch.Tensor] = {}  # sketches after the first step, by parameter
        self.signs = Signs()
        self.passes_of_step = 0  # inside the step of an optimizer
        self.first_pass: dict[str, list[float]] = {}  # gradients after the first of them
        self.began_phase_s: dict[str, float] = {}
        self.phase_s: Counter = Counter()  # of the step, by phase
        self.phases_of_steps: list[Counter] = []  # shares of each step after the first
        self.results.update(
            has={},
            shares={},
            signs={},
            turn_signs=[],
            gradients={},
            moves={},
            losses=[],
            notes=[],
            times_ms=[],
            trainer="",
            settings=[],
            in_training=0,
        )

    # ---- For the switches ------------------------------------------------------------------------

    def note(
        self,
        place: str,
        *,
        already: object = False,
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
            "way": way,
        }
        if note not in self.results["notes"]:
            self.results["notes"].append(note)

    def swap(self, owner: object, name: str, make: Callable, on: bool) -> None:
        """An attribute for a changed one, and back, whatever other changes make of it."""
        key = (id(owner), name)
        if key not in self.kept:
            self.kept[key] = (owner, getattr(owner, name), {})
        _, value, makers = self.kept[key]
        makers.pop(self.active, None)
        if on:
            makers[self.active] = make
        for of_change in makers.values():
            value = of_change(value)
        setattr(owner, name, value)

    def switch(self, changes: list[str], on: bool) -> None:
        for change in changes:
            name, _, value = change.partition("=")
            self.active = change
            make = nudge if name == "nudge" else SWITCHES[name]
            make(self, on, value or None)

    def place(self, held: object = None) -> str:
        """NAME@FILE:LINE: the program's line that is running, and its variable for an object."""
        name, line = "", ""
        for frame in callers():
            file = frame.f_code.co_filename
            self.note_trainer(file)
            if held is not None and not name and not line:
                name = variable_of(held, frame)
            if not line and not any(part in file for part in NOT_THE_PROGRAMS):
                line = f"{os.path.relpath(file)}:{frame.f_lineno}"
        return f"{name or 'model'}@{line}"

    def note_trainer(self, file: str) -> None:
        """Whose training loop it is, if this file is of one."""
        for part, trainer in TRAINERS.items():
            if part in file and not self.results["trainer"]:
                self.results["trainer"] = trainer

    # ---- Hooks beside those of all ---------------------------------------------------------------

    def prepare(self) -> None:
        """Before the other hooks are in place.  Programs that set no seed get one.

        What is wrapped below is called by every program: without one of the functions, as in
        another version of PyTorch, the program goes on, and the tool is told that the trial failed.
        """
        random.seed(0)
        torch.manual_seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)
        self.signs.watch_calls()
        self.hook_optimizers()
        self.hook_models()
        self.hook_losses()
        if self.trial["audit"]:
            without_dropout()
        if any("no-checkpoint" in turn for turn in (self.trial["changes"], *self.trial["plan"])):
            store_or_recompute(self)

    def hook_optimizers(self) -> None:
        """Wraps Optimizer.__init__, for the program's line that makes one."""
        make = torch.optim.Optimizer.__init__

        def making(optimizer, *args, **kwargs) -> None:
            self.made_at[optimizer] = self.place()
            make(optimizer, *args, **kwargs)

        not_compiled(making.__code__)
        torch.optim.Optimizer.__init__ = making

    def hook_models(self) -> None:
        """Wraps Module.__call__ in the first steps, for the models."""
        call = torch.nn.Module.__call__

        def outermost(module, *args, **kwargs):
            torch.nn.Module.__call__ = call  # of those inside
            try:
                self.guarded(lambda: self.called(module))
                return call(module, *args, **kwargs)
            finally:
                looks = self.steps < LOOKED_AT and not self.off
                torch.nn.Module.__call__ = outermost if looks else call

        not_compiled(outermost.__code__)
        torch.nn.Module.__call__ = outermost

    def hook_losses(self) -> None:
        """Wraps autograd.backward, for the losses and the operators that lead to them."""
        backward = torch.autograd.backward

        def with_loss(tensors, *args, **kwargs):
            loss = tensors if torch.is_tensor(tensors) else tensors[0]
            if self.depth["backward"] == 1:
                if not self.has_looked_for_models:
                    self.has_looked_for_models = True
                    self.guarded(self.find_models)
                if self.signs.reading:
                    self.guarded(lambda: self.signs.read_graph([loss]))
                if self.trial["audit"] and loss.numel() == 1:
                    self.losses.append(loss.detach().clone())
            result = backward(tensors, *args, **kwargs)
            if self.trial["audit"] and self.depth["optimizer"]:
                self.guarded(self.note_pass_of_step)
            return result

        not_compiled(with_loss.__code__)
        torch.autograd.backward = with_loss

    def called(self, module: torch.nn.Module) -> None:
        """A module is called by the program: if it trains and is new, changes of modules begin now,
        for it alone."""
        inside = self.depth["backward"] or self.depth["data"]
        if inside or module in self.models or not torch.is_grad_enabled():
            return
        if not any(p.requires_grad for p in module.parameters()):
            return
        self.begin_changes(module)

    def find_models(self) -> None:
        """Before the first backward pass: those that a compiled step calls, which nobody sees."""
        for module in self.modules.models_of(outermost_modules()):
            self.begin_changes(module)

    def begin_changes(self, module: torch.nn.Module) -> None:
        place = self.place(module)
        self.models[module] = place
        self.name_parameters(module)
        self.results["in_training"] += sum(part.training for part in module.modules())
        every_model = self.models
        self.models = weakref.WeakKeyDictionary({module: place})
        self.switch(self.trial["changes"], True)
        self.models = every_model

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

    def name_of(self, p: torch.Tensor) -> str:
        return self.names.setdefault(id(p), f"parameter {len(self.names)}")

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if self.trial["audit"] and optimizer not in self.order:  # of its first step
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        gradient = sketch(p.grad).float().tolist()
                        self.results["gradients"][self.name_of(p)] = gradient
            if self.passes_of_step > 1:
                self.results["gradients"].update(self.first_pass)
        self.passes_of_step = 0
        super().stepped(optimizer)

    def note_pass_of_step(self) -> None:
        """After a backward pass inside an optimizer's step: of several, as LBFGS takes, the first
        has the gradients that are compared; the others are elsewhere after any rounding."""
        self.passes_of_step += 1
        if self.passes_of_step > 1 or self.order:
            return
        self.first_pass = {}
        for model in self.models:
            for p in model.parameters():
                if p.grad is not None:
                    self.first_pass[self.name_of(p)] = sketch(p.grad).float().tolist()

    def enter(self, phase: str):
        if not self.depth[phase]:
            self.began_phase_s[phase] = time.perf_counter()
        return super().enter(phase)

    def leave(self, phase: str, a_range, stepping: torch.optim.Optimizer | None) -> None:
        if self.depth[phase] == 1:
            self.phase_s[phase] += time.perf_counter() - self.began_phase_s[phase]
        super().leave(phase, a_range, stepping)

    # ---- Steps -----------------------------------------------------------------------------------

    def boundary(self) -> None:
        now = time.perf_counter()
        self.thread, self.due = threading.get_ident(), False
        self.marks += 1
        self.end_without_tool()
        self.steps += 1
        if self.state == "recorded":  # other ranks need it still
            self.end_with_ranks()
            return
        if self.state == "waiting":
            self.write("counting", until=self.last_step())
        step_ms = 1e3 * (now - self.last_s)
        if self.trial["audit"]:
            self.results["times_ms"].append(step_ms)
            shares = {phase: 1e3 * s / step_ms for phase, s in self.phase_s.items()}
            self.phases_of_steps.append(Counter(shares))
            self.phase_s.clear()
            self.compare_step()
        else:
            self.take_turns(step_ms)
        self.last_s = time.perf_counter()

    def last_step(self) -> int:
        """The number of the step that the trial ends with.  A rank that is there first waits for
        the others to get there: in one step more it would wait for ranks that have ended."""
        if self.trial["audit"]:
            return AUDIT_STEPS
        return UNTIMED + TURN * len(self.trial["plan"])

    def compare_step(self) -> None:
        """Steps count anew when an optimizer that was not known has stepped: the first is then that
        of all."""
        if self.steps == 1:
            self.phases_of_steps.clear()
            self.before = self.sketches()
            groups = [group for optimizer in self.order for group in optimizer.param_groups]
            self.results["settings"] = [settings_of(group) for group in groups]
        if self.steps == AUDIT_STEPS - 1:
            self.signs.begin()
        if self.steps >= AUDIT_STEPS:
            self.results["signs"] = self.signs.end()
            for name, after in self.sketches().items():
                if name in self.before:
                    self.results["moves"][name] = (after - self.before[name]).float().tolist()
            self.results["has"] = what_there_is(self)
            self.results["shares"] = self.shares_of_phases()
            self.finish()

    def shares_of_phases(self) -> dict[str, float]:
        """Of the time of steps after the first, the median.  The host runs ahead of a GPU: of that
        only the wait for data is told."""
        shares = {}
        for phase in ("data",) if torch.cuda.is_initialized() else ("data", "optimizer"):
            shares[phase] = median(of_step[phase] for of_step in self.phases_of_steps)
        return shares

    def sketches(self) -> dict[str, torch.Tensor]:
        """Of all parameters that the optimizers have, by name."""
        return {self.name_of(p): sketch(p) for p in self.modules.of_optimizers()}

    def take_turns(self, step_ms: float) -> None:
        """After each step: what follows of the turn, or the next one."""
        if self.steps > UNTIMED:
            self.results["times_ms"].append(step_ms)
        turn, step = divmod(self.steps - UNTIMED, TURN)
        if turn < 0:
            return
        if step in (0, SETTLE) and torch.cuda.is_initialized():
            self.wait_for_device(turn_is_over=step == 0)
        if step == SETTLE - 1:  # the last step that does not count
            self.signs.begin()
        elif step == SETTLE:
            self.results["turn_signs"].append(self.signs.end())
        if step == 0:
            self.begin_turn(turn)

    def wait_for_device(self, turn_is_over: bool) -> None:
        """Steps of a GPU overlap, so the mean of those of a turn counts for each."""
        torch.cuda.synchronize()
        now = time.perf_counter()
        times_ms = self.results["times_ms"]
        if turn_is_over and times_ms:
            counted = TURN - SETTLE
            times_ms[-counted:] = [1e3 * (now - self.settled_s) / counted] * counted
        self.settled_s = now

    def begin_turn(self, turn: int) -> None:
        plan = self.trial["plan"]
        if self.turn >= 0:
            self.switch(plan[self.turn], False)
        self.turn = turn
        if turn == len(plan):
            self.finish()
            return
        self.tell()  # should the program be ended before all of them
        self.write("counting")
        self.switch(plan[turn], True)

    def finish(self) -> None:
        self.tell()
        self.write("recorded")
        self.give_up_s = time.monotonic() + GRACE_S
        self.end_with_ranks()

    def tell(self) -> None:
        rank, world_size = rank_of_world()
        if torch.cuda.is_initialized():
            peak_bytes = torch.cuda.max_memory_allocated()
        else:
            peak_kilobytes = kilobytes("/proc/self/status").get("VmHWM")
            peak_bytes = 1024 * peak_kilobytes if peak_kilobytes else None
        self.results.update(
            rank=rank,
            world_size=world_size,
            losses=[float(loss) for loss in self.losses],
            peak_bytes=peak_bytes,
        )
        state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
        if not self.results["trainer"] and state and state._shared_state:
            self.results["trainer"] = "accelerate"

    def ends_by_itself(self) -> None:
        if self.state == "counting" and not self.off:
            self.tell()
            self.write("ended", at_end=True)


def without_dropout() -> None:
    """Its masks depend on the memory format and on what is compiled: dropout of
    torch.nn.functional, which modules call as attributes of it, does nothing."""
    functional = torch.nn.functional
    attention = functional.scaled_dot_product_attention

    def attend(q, k, v, attn_mask=None, dropout_p=0.0, *args, **kwargs):
        return attention(q, k, v, attn_mask, 0.0, *args, **kwargs)

    for name in DROPOUT:
        setattr(functional, name, lambda input, p=0.5, training=True, inplace=False: input)
    functional.scaled_dot_product_attention = attend
