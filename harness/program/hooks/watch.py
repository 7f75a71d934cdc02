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
from .modules import EVALUATION, ModuleRanges, opened
from .processes import kill_all_with
from .step_clock import StepClock

ENDED = "the program ended"
SELDOM = (
    100  # steps of another optimizer, after which one is done with: critics take so many at first
)


class Watch:
    """All of it is about one thread, that of the first step.

    While nothing is recorded, a step costs a few calls of enter() and leave(), and a clock.
    """

    def __init__(self, settings: dict):
        self.settings, self.off, self.thread = settings, False, None
        self.tool = (
            settings["tool"] if is_there(settings["tool"]) else None
        )  # not seen from within a container
        self.state = "waiting"  # counting, recording, recorded
        self.depth, self.seen = (
            Counter(),
            Counter(),
        )  # by phase: how often it is open, how often it was recorded
        self.order: weakref.WeakKeyDictionary = (
            weakref.WeakKeyDictionary()
        )  # optimizers by their first step
        self.counts: weakref.WeakKeyDictionary = (
            weakref.WeakKeyDictionary()
        )  # their steps since all are known
        self.foreign: weakref.WeakSet = weakref.WeakSet()  # profilers of the program's own
        self.rarest = lambda: None  # the optimizer that ends a step
        self.marks = self.steps = self.left = self.passes = self.open = 0  # open: phases
        self.due = self.warm = self.again = self.ending = self.gave_way = False
        self.last = self.began = self.give_up = 0.0
        self.evaluated: list[bool] = []  # each recorded step
        self.times_ms: list[float] = []  # of the timed steps
        self.clock = StepClock()  # of the timed steps, then of the recorded ones
        self.profiler: torch.profiler.profile | None = None
        self.modules = ModuleRanges(self)
        self.audit: StepAudit | None = None
        self.disturbance = contextlib.ExitStack()  # ends the interval of the timed steps
        self.peak_bytes: int | None = None  # on a GPU, at the last step's end
        self.results: dict = {}

    def guarded(self, act: Callable[[], object]) -> None:
        """No error of ours reaches the program: it goes on without us, and the tool is told why."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 - whatever it is
            told = f"{type(error).__name__}: {error}"
            with contextlib.suppress(Exception):
                print(
                    f"profile_program.py: {told}; the program goes on, not measured",
                    file=sys.stderr,
                )
            self.stop_watching()
            with contextlib.suppress(Exception):
                self.write("failed", error=told)

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
        if self.off or self.depth[phase]:
            return
        self.passes += phase == "backward"
        if stepping is not None and self.settings["steps"] == "optimizer":
            self.stepped(stepping)
        elif phase == "backward" == self.settings["steps"]:
            self.due = True
        if self.due and not self.open:
            self.guarded(self.boundary)

    def audited(self, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> object:
        self.guarded(lambda: self.audit.before(optimizer))
        result = step()
        if self.audit:
            self.guarded(lambda: self.audit.after(optimizer))
        return result

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """A step ends with the optimizer that steps least often; of several, with the last.  Until
        all are known, steps do not count; one that others leave behind is done with."""
        count = self.counts.get(optimizer)
        if count is None:
            self.order[optimizer], self.due = len(self.order), True
            return self.count_anew()
        self.counts[optimizer] = count + 1
        if count > SELDOM and not all(self.counts.values()):
            self.order = weakref.WeakKeyDictionary(
                {one: i for one, i in self.order.items() if self.counts[one]}
            )
            self.count_anew()
        elif self.rarest() in (None, optimizer):  # no other can be the rarest now
            rarest = min(self.counts, key=lambda one: (self.counts[one], -self.order[one]))
            self.rarest, self.due = weakref.ref(rarest), self.due or optimizer is rarest

    def count_anew(self) -> None:
        self.counts = weakref.WeakKeyDictionary(dict.fromkeys(self.order, 0))
        self.steps, self.warm = 0, False
        self.rarest = weakref.ref(max(self.order, key=self.order.get))

    # ---- Steps -----------------------------------------------------------------------------------

    def boundary(self) -> None:
        """Between two steps: time it, or go on with what it was part of."""
        now, self.thread, self.due, self.marks = (
            time.perf_counter(),
            threading.get_ident(),
            False,
            self.marks + 1,
        )
        if self.marks % self.settings["every"]:
            return
        self.end_without_tool()
        self.steps += 1
        if torch.cuda.is_initialized():
            self.peak_bytes = torch.cuda.max_memory_allocated()
        if (
            self.state == "recorded"
        ):  # other ranks need it still, or the program caught the exception
            return self.end_with_ranks()
        if self.profiler and self.steps == 1:  # an optimizer that was not known has stepped
            self.begin_again()
        if self.profiler:
            self.modules.close()
            if self.audit:  # the step in which the profiler warms up
                self.results["audit"], self.audit = self.audit.result(), None
                self.seen.clear()
            else:
                self.evaluated.append(self.seen[EVALUATION] > 0)
            self.seen[EVALUATION] = 0
            self.clock.end(now)
            self.results["seen"] = dict(self.seen)
            self.left -= 1
            if self.left and self.evaluated and short_of_memory():
                self.record_no_more("memory ran short")
            else:
                self.profiler.step()
            if not self.left:
                self.recorded()
                if self.state == "recorded" and not self.off:
                    self.give_up = time.monotonic() + GRACE_S
                    self.end_with_ranks()
        else:
            self.time_step(now)
        self.last = time.perf_counter()
        self.clock.begin()

    def time_step(self, now: float) -> None:
        if self.state != "counting" or self.steps == 1:
            self.began = now
            self.write("counting", until=None)  # should the program be killed
        foreign = len(self.foreign) > 0 and any(
            one.kineto_results is None for one in self.foreign
        )  # slower, and two at once crash
        if not self.warm or foreign:
            enough = self.steps >= max(1, self.settings["warmup"]) or now - self.began > LONG_S
            self.warm, self.times_ms = enough and not foreign, []
            if self.warm:
                self.time_anew()
            return
        self.clock.end(now)
        self.times_ms = self.clock.times_ms()
        enough = len(self.clock.steps) >= self.settings["timed"]
        if not enough and sum(self.times_ms) <= 1e3 * LONG_S:
            return
        if self.clock.misses_work():
            self.time_anew()
            return
        self.times_ms = self.clock.times_ms()
        self.disturbance.close()
        self.record()

    def time_anew(self) -> None:
        self.times_ms = []
        self.clock.restart()
        self.measure_disturbance()

    def measure_disturbance(self) -> None:
        """Of the timed steps together, which are sampled before the first and after the last."""
        self.disturbance.close()
        try:
            device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
            with our_modules():
                from harness.machine.disturbance import DisturbanceMeter

                meter = DisturbanceMeter(device)
                interval = meter.interval()
                interval.__enter__()
        except Exception as error:  # noqa: BLE001 - what the program's environment may lack
            self.results["disturbance_reason"] = f"{type(error).__name__}: {error}"
            return

        @self.disturbance.callback
        def ends() -> None:
            with our_modules():
                interval.__exit__(None, None, None)
                self.results["disturbance"] = meter.document()

    # ---- Recording -------------------------------------------------------------------------------

    def record(self) -> None:
        activity, on_gpu = torch.profiler.ProfilerActivity, torch.cuda.is_initialized()
        active = max(
            1, min(self.settings["profile"], int(1e3 * LONG_S / statistics.median(self.times_ms)))
        )
        self.modules.name_all()
        # The profiler warms up in the step before the first that is recorded; its time is
        # recorded_ms[0].
        self.results |= {
            "first_timed": self.steps - len(self.times_ms) + 1,
            "first_recorded": self.steps + 2,
        }
        self.results |= {"recorded_steps": active, "times_ms": self.times_ms, "recorded_ms": []}
        self.results |= {"device": "cuda" if on_gpu else "cpu", "torch": torch.__version__}
        self.results["parameters"] = sum(p.numel() for p in self.modules.trained())
        self.left, self.audit, self.seen = (
            1 + active,
            StepAudit(self.modules.parameters()),
            Counter(),
        )
        self.evaluated = []
        first, schedule = (
            self.steps + 1,
            torch.profiler.schedule(wait=0, warmup=1, active=active, repeat=1),
        )
        self.profiler = torch.profiler.profile(
            activities=[activity.CPU, activity.CUDA] if on_gpu else [activity.CPU],
            schedule=lambda step: schedule(max(0, step - first)),
            on_trace_ready=self.export,
            record_shapes=True,
            profile_memory=True,
            with_stack=self.settings["stacks"],
        )
        self.profiler.step_num = first  # steps have their numbers in the trace
        self.modules.attach()
        self.modules.watch_data(self.settings["data"])
        self.profiler.start()
        self.clock.restart()
        self.write("recording", until=self.steps + self.left)

    def export(self, profiler: torch.profiler.profile) -> None:
        if any(self.evaluated) and not all(self.evaluated) and not self.again:
            return
        rank, size = rank_of_world()
        is_rank = size > 1 or "RANK" in os.environ
        first = self.results["first_recorded"] - 1
        whose = f"rank{rank}" if is_rank else f"process{os.getpid()}"  # there may be others
        steps = f"{first}_{first + self.results['recorded_steps']}"
        path = Path(self.settings["out"], f"trace_step_{steps}_{whose}.pt.trace.json")
        profiler.export_chrome_trace(str(path))
        if self.results.get("shortened") == ENDED:  # the step that has begun is none
            mark = f"ProfilerStep#{first + self.results['recorded_steps'] + 1}"
            path.write_text(path.read_text().replace(mark, "unfinished step"))
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 64))
            if not file.read().rstrip().endswith(b"}"):
                raise OSError(f"cannot write {path}: is the disk full?")
        self.results |= {"trace": path.name, "rank": rank, "world_size": size, "is_rank": is_rank}
        self.results["evaluations"] = sum(self.evaluated)

    def record_no_more(self, why: str) -> None:
        """Of the steps that were to be recorded, those that are over are kept."""
        self.left, self.again = 0, True
        self.results |= {"recorded_steps": len(self.evaluated), "shortened": why}

    def recorded(self) -> None:
        self.stop_recording()
        self.clock.wait()
        self.results["recorded_ms"] = self.clock.times_ms()
        if (
            "trace" not in self.results
        ):  # an evaluation took place: one window more, which may be free of it
            self.again = True
            self.time_anew()
            self.write("counting", until=None)
            return
        self.results["data_not_called"] = [
            one for one in self.settings["data"] if one not in self.modules.called
        ]
        self.results["memory"] = what_holds_memory(self)
        if self.settings["then"] == "continue":
            self.stop_watching()
        self.write("recorded")

    def end_with_ranks(self) -> None:
        """Once those of this node have written, too: the end of one may end all.  A rank that
        records later steps than this one needs it in them: it goes on until then."""
        wanted = int(os.environ.get("LOCAL_WORLD_SIZE", self.results["world_size"]))
        while time.monotonic() < self.give_up:
            told = [json.loads(file.read_text()) for file in self.folder.glob("*.json")]
            written = sum(one["state"] in ("recorded", "failed") for one in told)
            if written >= wanted:
                break
            others = [one["until"] for one in told if one["state"] in ("counting", "recording")]
            if written + len(others) < wanted or any(
                until is None or until > self.steps for until in others
            ):
                return
            time.sleep(0.02)
        self.end()

    def end(self) -> None:
        caught, self.ending = self.ending, True
        on_another = threading.current_thread() is not threading.main_thread()
        at_once = caught or on_another or self.settings["then"] == "kill"
        for one in (
            objects(io.IOBase) if at_once else ()
        ):  # the program's own logs too, which may be buffered
            with contextlib.suppress(Exception):
                one.flush()
        (self.folder / f"{os.getpid()}.ended").touch()
        with contextlib.suppress(OSError):
            os.kill(self.settings["tool"], signal.SIGURG)
        if not at_once:
            raise SystemExit(0)  # `finally` and atexit run, `except Exception` does not
        try:
            if not on_another:  # no handler of the program's, as of its loader, ends the waiting
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if self.settings["then"] == "kill":
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
        if self.tool and not is_there(self.tool):
            kill_all_with(str(self.folder.parent))
            os._exit(1)

    def stop_recording(self) -> None:
        profiler, self.profiler, self.audit = self.profiler, None, None
        self.modules.detach()
        if profiler:
            profiler.stop()

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
        self.foreign.add(profile)
        if self.profiler:
            self.guarded(self.begin_again)

    def begin_again(self) -> None:
        """What is being recorded is not kept."""
        self.profiler.on_trace_ready, self.warm, self.times_ms = None, False, []
        self.stop_recording()
        self.modules.forget()
        self.write("counting", until=None)

    # ---- What the tool is told -------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        return Path(self.settings["processes"])

    def write(self, state: str, **more: object) -> None:
        self.state = state
        self.results |= {
            "state": state,
            "pid": os.getpid(),
            "steps": self.steps,
            "backward_passes": self.passes,
        }
        self.results |= {"optimizers": [type(one).__name__ for one in self.order]} | more
        path = self.folder / f"{os.getpid()}.json"
        path.with_suffix(".partial").write_text(json.dumps(self.results))
        path.with_suffix(".partial").replace(path)

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
                throughout = self.gave_way and not self.times_ms
                self.write(
                    self.state, times_ms=self.times_ms, at_end=True, profiles_itself=throughout
                )


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def short_of_memory() -> bool:
    """Whether the host has little left; False where the system does not tell."""
    of = kilobytes("/proc/meminfo")
    return "MemAvailable" in of and of["MemAvailable"] < SHORT_OF_MEMORY * of["MemTotal"]


def kilobytes(path: str) -> dict[str, int]:
    """The sizes in a file of proc(5), empty where there is none."""
    try:
        lines = [line.split() for line in Path(path).read_text().splitlines()]
    except OSError:
        return {}
    return {words[0][:-1]: int(words[1]) for words in lines if words[2:] == ["kB"]}


def rank_of_world() -> tuple[int, int]:
    ranks = torch.distributed
    if ranks.is_available() and ranks.is_initialized():
        return ranks.get_rank(), ranks.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
