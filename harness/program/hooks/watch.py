"""Where a process of the program is: which steps it has done, which of them are timed, recorded,
and what follows."""

import contextlib
import io
import json
import os
import signal
import statistics
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from . import GRACE_S, LONG_S, SHORT_OF_MEMORY, UNSEEN_TOOL_S, our_modules
from .audit import StepAudit
from .memory import objects, what_holds_memory
from .memory_history import write_history
from .modules import EVALUATION, ModuleRanges, opened
from .observing.occasions import Occasions
from .observing.rank_sketches import EARLY_STEPS, RankSketches
from .observing.reentrant_checkpoints import ReentrantCheckpoints
from .observing.stack_sampler import StackSampler
from .observing.step_disturbance import StepDisturbance
from .observing.without_gradient import WithoutGradient
from .processes import kill_all_with
from .step_clock import StepClock

ENDED = "the program ended"
# Steps of another optimizer, after which one is done with: critics take so many at first
SELDOM = 100
# Without a step of an optimizer, so many backward passes in so long are told of.
MANY_PASSES = 20
TELL_S = 20.0
LOOK_S = 0.25  # between two looks whether the tool is still there


class Watch:
    """All of it is about one thread, that of the first step.

    While nothing is recorded, a step costs a few calls of enter() and leave(), and a clock.
    """

    def __init__(self, settings: dict):
        self.settings = settings
        self.off = False
        self.thread: int | None = None
        # None where it is not seen, as from within a container.
        self.tool = settings["tool"] if is_there(settings["tool"]) else None
        self.state = "waiting"  # counting, recording, recorded, failed
        self.depth: Counter = Counter()  # by phase: how often it is open
        self.seen: Counter = Counter()  # by phase: how often it was recorded
        self.open = 0  # phases
        self.passes = 0  # of the backward pass
        self.first_pass_s = 0.0  # when the first of them ended, by time.monotonic()
        self.has_told = False  # that no optimizer is seen
        # Optimizers by their first step, and their steps since all are known.
        self.order: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self.counts: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self.rarest: Callable[[], object] = lambda: None  # the optimizer that ends a step
        self.is_only = False  # it is the only one
        self.foreign: weakref.WeakSet = weakref.WeakSet()  # profilers of the program's own
        self.marks = 0  # ends of steps, of which `every` are one
        self.steps = 0
        self.left = 0  # steps to record
        self.due = False  # the step ends once no phase is open
        self.warm = False  # steps are timed
        self.again = False  # recorded once more, as an evaluation took place
        self.ending = False
        self.gave_way = False  # to another profiler
        self.last_s = 0.0  # end of our work after the last step, by the clock of steps
        self.began_s = 0.0  # the first step, by the same
        self.looked_s = 0.0  # for the tool, by time.monotonic()
        self.give_up_s = 0.0  # when to wait no longer for other ranks, by time.monotonic()
        self.evaluated: list[bool] = []  # each recorded step
        self.times_ms: list[float] = []  # of the timed steps
        self.clock = StepClock()  # of the timed steps, then of the recorded ones
        self.profiler: torch.profiler.profile | None = None
        self.modules = ModuleRanges(self)
        self.audit: StepAudit | None = None
        self.ranks = RankSketches(self)
        self.checkpoints = ReentrantCheckpoints(self)
        self.looks = self.early_steps() > 0  # at what ranks have in common, in this step
        self.sampler = StackSampler(self)  # of the timed steps, and of the recorded ones
        self.occasions = Occasions(self)
        self.disturbance = StepDisturbance(self.sampler)
        self.without_gradient = WithoutGradient(self)
        self.peak_bytes: int | None = None  # on a GPU, at the last step's end
        self.results: dict = {}

    def guarded(self, act: Callable[[], object]) -> None:
        """No error of ours reaches the program: it goes on without us, and the tool is told why."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 - whatever it is
            why = f"{type(error).__name__}: {error}"
            line = f"profile_program.py: {why}; the program goes on, not measured"
            with contextlib.suppress(Exception):
                print(line, file=sys.stderr)
            self.stop_watching()
            with contextlib.suppress(Exception):
                self.write("failed", error=why)

    # ---- Phases ----------------------------------------------------------------------------------

    def enter(self, phase: str):
        """A phase begins; returns its range, if it is recorded."""
        self.depth[phase] += 1
        self.open += 1
        if not self.profiler or self.depth[phase] > 1:
            return None
        self.seen[phase] += 1
        return opened(phase)

    def leave(self, phase: str, a_range, stepping: torch.optim.Optimizer | None) -> None:
        """It ends; and with it perhaps the step.  That waits for all phases to end: stopping the
        profiler in a backward pass, where optimizers may step, crashes."""
        if a_range is not None:
            a_range.__exit__(None, None, None)
        self.depth[phase] -= 1
        self.open -= 1
        if not self.off and not self.depth[phase]:
            self.has_ended(phase, stepping)

    def has_ended(self, phase: str, stepping: torch.optim.Optimizer | None) -> None:
        """An outermost phase."""
        ends_step = self.settings["steps"]
        if phase == "backward":
            self.passes += 1
            if ends_step == "backward":
                self.due = True
            elif not self.marks and ends_step == "optimizer":
                self.guarded(self.tell_of_no_optimizer)
        if stepping is not None and ends_step == "optimizer":
            self.stepped(stepping)
        if self.due and not self.open - self.around_passes():
            self.guarded(self.boundary)

    def around_passes(self) -> int:
        """Open phases in which a step may end: an optimizer that takes many passes, as LBFGS."""
        return self.depth["optimizer"] if self.settings["steps"] == "backward" else 0

    def audited(
        self, optimizer: torch.optim.Optimizer, step: Callable, args: tuple, kwargs: dict
    ) -> object:
        """An optimizer's step with a look before and after it.  Where it takes a closure, as in
        Lightning, the gradients that it steps with are there once that has been called."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self.guarded(lambda: self.before_step(optimizer))
        elif len(args) > 1:
            args = (args[0], self.looked_at(optimizer, closure), *args[2:])
        else:
            kwargs = {**kwargs, "closure": self.looked_at(optimizer, closure)}
        result = step(*args, **kwargs)
        if self.audit:
            self.guarded(lambda: self.audit.after(optimizer))
        return result

    def looked_at(self, optimizer: torch.optim.Optimizer, closure: Callable) -> Callable:
        """The closure, and a look at the optimizer once it is called for the first time."""
        is_first = True

        def call(*args, **kwargs):
            nonlocal is_first
            result = closure(*args, **kwargs)
            if is_first:
                is_first = False
                self.guarded(lambda: self.before_step(optimizer))
            return result

        return call

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.looks:
            self.ranks.look(optimizer, self.steps + 1)
        if self.audit:
            self.audit.before(optimizer)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """A step ends with the optimizer that steps least often; of several, with the last.  Until
        all are known, steps do not count; one that others leave behind is done with."""
        if self.is_only and self.rarest() is optimizer:  # then there is nothing to count
            self.due = True
            return
        count = self.counts.get(optimizer)
        if count is None:
            self.order[optimizer] = len(self.order)
            self.due = True
            self.count_anew()
            return
        self.counts[optimizer] = count + 1
        if count > SELDOM and not all(self.counts.values()):
            self.leave_behind()
        elif self.rarest() in (None, optimizer):  # no other can be the rarest now
            fewest = min(self.counts.values())
            latest_of_fewest = max(
                (other for other, steps in self.counts.items() if steps == fewest),
                key=self.order.get,
            )
            self.rarest = weakref.ref(latest_of_fewest)
            if optimizer is latest_of_fewest:
                self.due = True

    def leave_behind(self) -> None:
        """Optimizers that have not stepped since all are known are done with."""
        stepping = weakref.WeakKeyDictionary()
        for optimizer, place in self.order.items():
            if self.counts[optimizer]:
                stepping[optimizer] = place
        self.order = stepping
        self.count_anew()

    def count_anew(self) -> None:
        self.counts = weakref.WeakKeyDictionary(dict.fromkeys(self.order, 0))
        self.steps = 0
        self.warm = False
        self.rarest = weakref.ref(max(self.order, key=self.order.get))
        self.is_only = len(self.order) == 1

    def tell_of_no_optimizer(self) -> None:
        """Once: the program may run for days without a step that we know."""
        if self.passes == 1:
            self.first_pass_s = time.monotonic()
        seconds = time.monotonic() - self.first_pass_s
        if self.passes >= MANY_PASSES and seconds > TELL_S and not self.has_told:
            self.has_told = True
            print(
                f"profile_program.py: {self.passes:,} backward passes in {seconds:.0f} s, and no"
                " step of an optimizer of torch: nothing is measured. End it, and take each"
                " backward pass for a step: --steps backward, or every N of them: --every N",
                file=sys.stderr,
                flush=True,
            )

    # ---- Steps -----------------------------------------------------------------------------------

    def boundary(self) -> None:
        """Between two steps: time it, or go on with what it was part of."""
        now = time.perf_counter()
        self.thread, self.due = threading.get_ident(), False
        self.marks += 1
        if self.marks % self.settings["every"]:
            return
        self.end_without_tool()
        self.steps += 1
        if self.state == "recorded":
            # Other ranks need this one still, or the program caught the exception.
            self.end_with_ranks()
            return
        self.end_step(now)
        self.looks = self.audit is not None or self.steps < self.early_steps()
        self.last_s = time.perf_counter()
        self.clock.begin()

    def end_step(self, now: float) -> None:
        """now: when the step ended, in seconds of the clock of steps."""
        if torch.cuda.is_initialized():
            self.peak_bytes = torch.cuda.max_memory_allocated()
        if self.profiler and self.steps == 1:  # an optimizer that was not known has stepped
            self.results["postponed"] = "another optimizer stepped for the first time"
            self.begin_again()
        if self.profiler:
            self.record_step(now)
        else:
            self.time_step(now)

    def early_steps(self) -> int:
        """Steps from the first on that are looked at, and are not timed."""
        if "trial" in self.settings:
            return 0
        return min(EARLY_STEPS, max(1, self.settings["warmup"]))

    def record_step(self, now: float) -> None:
        """After a step under the profiler, which warms up in the first of them."""
        self.modules.close()
        if self.audit:  # the profiler has warmed up
            self.end_audit()
            self.ranks.end_counting()
            self.seen.clear()
        else:
            self.evaluated.append(self.seen[EVALUATION] > 0)
            self.disturbance.end()
        self.seen[EVALUATION] = 0
        self.clock.end(now)
        self.results["seen"] = dict(self.seen)
        self.left -= 1
        if self.left and self.evaluated and short_of_memory():
            self.record_no_more("memory ran short")
        else:
            if not self.left:
                self.sampler.stop()
                self.let_collectives_end()
            self.profiler.step()
        if self.left:
            if not self.sampler.is_on:  # the first recorded step begins
                self.sampler.start(keeps_times=True)
            self.disturbance.begin()
            return
        self.recorded()
        if self.state == "recorded" and not self.off:
            self.give_up_s = time.monotonic() + GRACE_S
            self.end_with_ranks()

    def end_audit(self) -> None:
        result = self.audit.result()
        if result:
            result["reentrant_checkpoints"] = self.checkpoints.as_json()
        self.results["audit"] = result
        self.audit = None
        self.checkpoints.end()

    def time_step(self, now: float) -> None:
        if self.state != "counting" or self.steps == 1:
            self.began_s = now
            self.write("counting", until=None)  # should the program be killed
            self.occasions.first_step()
        # A step is slower under a profiler of the program's own, and two profilers at once crash.
        is_profiled = self.gave_way and any(
            profile.kineto_results is None for profile in self.foreign
        )
        if not self.warm or is_profiled:
            self.sampler.stop()
            self.warm = not is_profiled and self.has_warmed_up(now)
            self.times_ms = []
            if self.warm:
                self.time_anew()
            return
        self.clock.end(now)
        self.disturbance.end()
        self.sampler.end_step(len(self.clock.steps) - 1)
        self.times_ms = self.clock.times_ms()
        enough = len(self.clock.steps) >= self.settings["timed"]
        if enough or sum(self.times_ms) > 1e3 * LONG_S:
            self.end_timing()
        else:
            self.begin_timed_step(now - self.last_s)

    def end_timing(self) -> None:
        """After the timed steps: record, or time anew where the clock did not see their work."""
        if self.clock.misses_work():
            self.time_anew()
            return
        self.times_ms = self.clock.times_ms()
        self.record()

    def has_warmed_up(self, now: float) -> bool:
        if now - self.began_s > LONG_S:
            return True
        return self.steps >= max(1, self.settings["warmup"])

    def time_anew(self) -> None:
        self.times_ms = []
        self.occasions.seen.clear()
        self.clock.restart()
        self.disturbance.restart()
        self.sampler.stop()
        self.sampler.forget()
        self.begin_timed_step(time.perf_counter() - self.last_s)

    def begin_timed_step(self, before_s: float) -> None:
        """The stack is sampled in every second step, which takes longer for it: its time is not one
        of those that are told, unless there is no other.  before_s: how long the step before
        took."""
        is_only = self.settings["timed"] == 1 or before_s > LONG_S
        if is_only or len(self.clock.steps) % 2:
            self.sampler.start()
        self.disturbance.begin()

    # ---- Recording -------------------------------------------------------------------------------

    def record(self) -> None:
        on_gpu = torch.cuda.is_initialized()
        fit_in_time = int(1e3 * LONG_S / statistics.median(self.times_ms))
        active = max(1, min(self.settings["profile"], fit_in_time))
        self.modules.name_all()
        self.results.update(
            first_timed=self.steps - len(self.times_ms) + 1,
            # The profiler warms up in the step before; its time is recorded_ms[0].
            first_recorded=self.steps + 2,
            recorded_steps=active,
            times_ms=self.times_ms,
            sampled=list(self.sampler.steps),  # of those, from 0
            recorded_ms=[],
            device="cuda" if on_gpu else "cpu",
            torch=torch.__version__,
            parameters=sum(p.numel() for p in self.modules.trained()),
        )
        self.left = 1 + active
        self.audit = StepAudit(self.modules.parameters())
        self.checkpoints.begin()
        self.seen = Counter()
        self.evaluated = []
        self.profiler = self.profiler_of(active, on_gpu)
        self.modules.attach()
        self.ranks.count([model for model, _ in self.modules.models])
        self.modules.watch_data(self.settings["data"])
        self.profiler.start()
        self.clock.restart()
        self.write("recording", until=self.steps + self.left)

    def profiler_of(self, active: int, on_gpu: bool) -> torch.profiler.profile:
        """One that warms up in the next step, and records so many after it."""
        first = self.steps + 1
        schedule = torch.profiler.schedule(wait=0, warmup=1, active=active, repeat=1)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if on_gpu:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profiler = torch.profiler.profile(
            activities=activities,
            schedule=lambda step: schedule(max(0, step - first)),
            on_trace_ready=self.export,
            record_shapes=True,
            profile_memory=True,
            with_stack=self.settings["stacks"],
        )
        profiler.step_num = first  # steps have their numbers in the trace
        return profiler

    def export(self, profiler: torch.profiler.profile) -> None:
        if any(self.evaluated) and not all(self.evaluated) and not self.again:
            return
        rank, size = rank_of_world()
        is_rank = size > 1 or "RANK" in os.environ
        whose = f"rank{rank}" if is_rank else f"process{os.getpid()}"  # there may be others
        first = self.results["first_recorded"] - 1
        last = first + self.results["recorded_steps"]
        path = Path(self.settings["out"], f"trace_step_{first}_{last}_{whose}.pt.trace.json")
        profiler.export_chrome_trace(str(path))
        if self.results.get("shortened") == ENDED:  # the step that has begun is none
            mark = f"ProfilerStep#{last + 1}"
            path.write_text(path.read_text().replace(mark, "unfinished step"))
        check_is_whole(path)
        self.results.update(
            trace=path.name,
            rank=rank,
            world_size=size,
            is_rank=is_rank,
            evaluations=sum(self.evaluated),
        )

    def write_observed(self) -> None:
        """What was seen beside the trace, for the tool."""
        observed = self.sampler.as_json(self.settings["folder"])
        first, n_recorded = self.results["first_recorded"], self.results["recorded_steps"]
        # The profiler warms up in the step between.
        timed = range(self.results["first_timed"], first - 1)
        steps = [*timed, *range(first, first + n_recorded)]
        observed["steps"] = len(steps)
        observed["occasions"] = self.occasions.as_json(self.settings["folder"], steps)
        recorded = range(first, first + n_recorded)
        step_ms = statistics.median(self.results["times_ms"])
        self.results["without_gradient"] = self.without_gradient.as_json(timed, recorded, step_ms)
        (self.folder / f"{os.getpid()}.observed").write_text(json.dumps(observed))

    def write_sketches(self) -> None:
        sketches = self.sketches()
        if sketches is not None:
            (self.folder / f"{os.getpid()}.sketches").write_text(json.dumps(sketches))

    def sketches(self) -> dict | None:
        """What the tool compares over the ranks; None without others."""
        models = [model for model, _ in self.modules.models]
        return self.ranks.as_json(list(self.order), self.modules.parameters(), models)

    def write_memory_history(self) -> None:
        """Who held the memory of the GPU, where the history of its allocator is on."""
        if self.settings.get("memory_snapshot"):
            rank, size = rank_of_world()
            write_history(self.settings["out"], rank, size > 1 or "RANK" in os.environ)

    def record_no_more(self, why: str) -> None:
        """Of the steps that were to be recorded, those that are over are kept."""
        self.left = 0
        self.again = True
        self.results.update(recorded_steps=len(self.evaluated), shortened=why)

    def recorded(self) -> None:
        self.stop_recording()
        self.clock.wait()
        self.results["recorded_ms"] = self.clock.times_ms()
        if "trace" not in self.results:
            # An evaluation took place: one window more, which may be free of it.
            self.again = True
            self.results["postponed"] = "an evaluation took place in the first ones"
            self.time_anew()
            self.write("counting", until=None)
            return
        self.results["data_not_called"] = [
            target for target in self.settings["data"] if target not in self.modules.called
        ]
        self.write_sketches()  # while the models have names
        self.results["memory"] = what_holds_memory(self)
        self.results.update(self.disturbance.results())
        self.write_observed()
        self.write_memory_history()
        if self.settings["then"] == "continue":
            self.stop_watching()
        self.write("recorded")

    def end_with_ranks(self) -> None:
        """Once those of this node have written, too: the end of one may end all.  A rank that
        records later steps than this one needs it in them: it goes on until then."""
        wanted = int(os.environ.get("LOCAL_WORLD_SIZE", self.results["world_size"]))
        while time.monotonic() < self.give_up_s:
            written, still_to_record = 0, []
            for file in self.folder.glob("*.json"):
                process = json.loads(file.read_text())
                if process["state"] in ("recorded", "failed"):
                    written += 1
                elif process["state"] in ("counting", "recording"):
                    still_to_record.append(process["until"])  # the number of its last step, or None
            if written >= wanted:
                break
            if written + len(still_to_record) < wanted:
                return
            if any(until is None or until > self.steps for until in still_to_record):
                return
            time.sleep(0.02)
        self.end()

    def end(self) -> None:
        was_caught, self.ending = self.ending, True
        on_another_thread = threading.current_thread() is not threading.main_thread()
        is_killed = self.settings["then"] == "kill"
        at_once = was_caught or on_another_thread or is_killed
        if at_once:
            for file in objects(io.IOBase):  # the program's own logs too, which may be buffered
                with contextlib.suppress(Exception):
                    file.flush()
        (self.folder / f"{os.getpid()}.ended").touch()
        with contextlib.suppress(OSError):
            os.kill(self.settings["tool"], signal.SIGURG)
        if not at_once:
            raise SystemExit(0)  # `finally` and atexit run, `except Exception` does not
        try:
            if not on_another_thread:
                # No handler of the program's, as of its loader, ends the waiting.
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if is_killed:
                self.wait_for_leave()
        finally:
            os._exit(0)

    def wait_for_leave(self) -> None:
        """Until the tool has ended what would go on, and overwrite files, once this process is
        gone: its parents."""
        give_up = time.monotonic() + UNSEEN_TOOL_S
        while not (self.folder / "go").exists():
            if self.tool is None and time.monotonic() > give_up:
                return
            self.end_without_tool()
            time.sleep(0.002)

    def end_without_tool(self) -> None:
        """If the tool was killed, the program does not live on, nor what started it."""
        now_s = time.monotonic()
        if not self.tool or now_s - self.looked_s < LOOK_S:
            return
        self.looked_s = now_s
        if not is_there(self.tool):
            kill_all_with(str(self.folder.parent))
            os._exit(1)

    def stop_recording(self) -> None:
        profiler = self.profiler
        self.profiler = self.audit = None
        self.sampler.stop()
        self.modules.detach()
        self.checkpoints.end()
        self.ranks.uncount()
        if profiler:
            self.let_collectives_end()
            profiler.stop()

    def let_collectives_end(self) -> None:
        """Before the profiler stops."""
        with our_modules():
            from harness.ranks.gloo import wait_for_gloo
        wait_for_gloo()

    def stop_watching(self) -> None:
        """What is left of us is one test of a flag in each phase."""
        self.off = True
        self.modules.forget()
        with contextlib.suppress(Exception):
            self.stop_recording()

    def another_profiler(self, profile: torch.autograd.profiler.profile) -> None:
        """One of the program's own begins: ours gives way, and begins again when that has ended."""
        if self.off or (self.profiler and profile is self.profiler.profiler):
            return
        self.gave_way = True
        self.results["postponed"] = "the program recorded a trace of its own"
        self.foreign.add(profile)
        if self.profiler:
            self.guarded(self.begin_again)

    def begin_again(self) -> None:
        """What is being recorded is not kept."""
        self.profiler.on_trace_ready = None
        self.warm = False
        self.times_ms = []
        self.stop_recording()
        self.modules.forget()
        self.write("counting", until=None)

    # ---- What the tool is told -------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        return Path(self.settings["processes"])

    def write(self, state: str, **more: object) -> None:
        self.state = state
        self.results.update(
            state=state,
            pid=os.getpid(),
            steps=self.steps,
            backward_passes=self.passes,
            optimizers=self.names_of_optimizers(),
            **more,
        )
        path = self.folder / f"{os.getpid()}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(self.results))
        partial.replace(path)

    def names_of_optimizers(self) -> list[str]:
        """In the order of their first steps."""
        return [type(optimizer).__name__ for optimizer in self.order]

    def ends_by_itself(self) -> None:
        with contextlib.suppress(Exception):
            if self.profiler and self.evaluated and threading.get_ident() == self.thread:
                self.record_no_more(ENDED)
                self.recorded()
            elif self.profiler:  # which would crash as Python ends
                times_ms = self.times_ms
                self.begin_again()
                self.times_ms = times_ms
            if self.state not in ("recorded", "failed"):
                self.write(
                    self.state,
                    times_ms=self.times_ms,
                    at_end=True,
                    profiles_itself=self.gave_way and not self.times_ms,
                )


def check_is_whole(path: Path) -> None:
    """Raises OSError if a trace has no end."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64))
        if not file.read().rstrip().endswith(b"}"):
            raise OSError(f"cannot write {path}: is the disk full?")


def is_there(pid: int) -> bool:
    """Whether a process of this id runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def short_of_memory() -> bool:
    """Whether the host has little left; False where the system does not tell."""
    memory = kilobytes("/proc/meminfo")
    if "MemAvailable" not in memory:
        return False
    return memory["MemAvailable"] < SHORT_OF_MEMORY * memory["MemTotal"]


def kilobytes(path: str) -> dict[str, int]:
    """The sizes in a file of proc(5), empty where there is none."""
    try:
        lines = [line.split() for line in Path(path).read_text().splitlines()]
    except OSError:
        return {}
    return {words[0][:-1]: int(words[1]) for words in lines if words[2:] == ["kB"]}


def rank_of_world() -> tuple[int, int]:
    """Of torch.distributed, else what the launcher says; 0 and 1 without one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
