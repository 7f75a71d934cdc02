"""The watch of a whole run: each step is timed by phase, and written to files of the process."""

import contextlib
import gc
import math
import os
import resource
import statistics
import threading
import time
import weakref
from collections import deque
from pathlib import Path

import torch

from .. import GRACE_S, LONG_S, memory
from ..observing.rank_sketches import has_other_ranks
from ..observing.source_lines import described_site, position_of
from ..observing.stack_sampler import TRAINS, CoreWaits, Site, Spent
from ..watch import LOOK_S, SELDOM, Watch, rank_of_world
from .growth import MemoryGrowth
from .memory_pressure import MemoryPressure
from .occasions import WholeRunOccasions
from .step_files import PHASES, StepFiles

RECENT = 101  # steps, whose median is the ordinary step
EVERY = 16  # steps, after which that is computed anew
FEW = 5  # steps, before it is known
LONGER = 0.25  # than the ordinary step, by this share of it: told of, as it may be slow
OF_A_STEP = 1  # samples of the stack, about, as they make steps longer
LONGEST_PERIOD_S = 0.25  # between two samples
SHORTEST_PERIOD_S = 20e-3
WITHOUT_CORE = 0.02  # of a step, in which its thread did not work: then it is asked why
LINES = 4  # of a long step, that are told
MEMORY_S = 0.01  # between two readings of memory, at first
READINGS = 512  # after which they are half as frequent
DEVICE_S = 0.5  # between two readings of the GPU's allocator, whose statistics take longer
LOOKS_AT = 2  # step after which numbers of its tensors are written where there are other ranks
TIMES = 4  # that step, and so on: the next ones
NO_TIME = dict.fromkeys(PHASES, 0.0)
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class WholeRunWatch(Watch):
    """Nothing is recorded by a profiler, and what is kept in memory does not grow with the run.

    A step lasts from the end of our work after the one before to its own end; the first one has no
    beginning that we know, and is not timed.
    """

    def __init__(self, settings: dict):
        super().__init__(settings)
        self.occasions = WholeRunOccasions(self)
        memory.looks_at_frozen = False
        self.at_boundary = False  # our own work between two steps
        self.phase_s = dict.fromkeys(PHASES, 0.0)  # of this step
        self.phase_began_s = dict.fromkeys(PHASES, 0.0)
        self.recent: deque[float] = deque(maxlen=RECENT)  # seconds of steps
        self.ordinary_s: float | None = None  # their median
        self.slow_s: float = 0.0  # a step that lasts longer is told of
        self.typical: dict[tuple, float] = {}  # seconds by line, over ordinary steps
        self.n_typical = 0  # ordinary steps
        self.lines: dict[tuple, tuple] = {}  # file and line by site
        self.described: dict[tuple, dict] = {}  # what is told of a line, and of what it calls
        self.files: StepFiles | None = None  # from the first step on
        self.waits: CoreWaits | None = None
        self.waited_ns = 0
        self.cpu_s = 0.0  # of this thread, so far
        # When to do next what is not done after each step, by the clock and by the number of steps:
        # the earliest of what follows.
        self.next_s, self.next_at = 0.0, 0
        self.ask_s = 0.0  # whether the tool is there
        self.find_ordinary_at = 0
        self.looks_at = LOOKS_AT  # what ranks have in common
        self.end_s, self.ends_at = math.inf, math.inf  # the watch, as was asked for
        self.faults = 0  # major ones, so far
        self.retries = 0  # of the GPU's allocator, so far
        self.pressure: MemoryPressure | None = None
        self.pressure_s = 0.0  # so far
        self.growth = MemoryGrowth(settings["folder"])
        self.memory_file: int | None = None
        self.memory_s = self.device_memory_s = 0.0  # when it was read
        self.memory_period_s = MEMORY_S
        self.n_readings = 0
        self.device_bytes = 0
        self.ours_s = 0.0  # our work after the step before
        # Steps of other optimizers since the last of the one that ends steps.  Not a
        # WeakKeyDictionary, which is cleared in Python, item by item: this is done in each step.
        self.without: dict[weakref.ref, int] = {}

    # ---- Phases ----------------------------------------------------------------------------------

    def enter(self, phase: str) -> None:
        """As without a watch, where nothing is recorded; in few calls, as all of them are in the
        program's steps."""
        self.open += 1
        depth = self.depth[phase] = self.depth[phase] + 1
        if depth == 1 and phase in self.phase_s:
            self.phase_began_s[phase] = time.perf_counter()

    def leave(self, phase: str, a_range: None, stepping: torch.optim.Optimizer | None) -> None:
        """The same."""
        self.open -= 1
        depth = self.depth[phase] = self.depth[phase] - 1
        if self.off or depth:
            return
        if phase in self.phase_s:
            self.phase_s[phase] += time.perf_counter() - self.phase_began_s[phase]
        if stepping is not None or phase == "backward" or self.due:  # else nothing ends with it
            self.has_ended(phase, stepping)

    # ---- Steps -----------------------------------------------------------------------------------

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """In the first steps as without a watch.  Later, what was timed is kept: the optimizer that
        ends steps goes on doing so until another one steps without it."""
        if not self.is_kept():
            super().stepped(optimizer)
            return
        ends_steps = self.rarest()
        if optimizer is ends_steps:
            self.without.clear()
            self.due = True
            return
        if optimizer not in self.order:
            self.order[optimizer] = len(self.order)
            self.files.about["optimizers"] = self.names_of_optimizers()
        other = weakref.ref(optimizer)
        steps = self.without.get(other, 0) + 1
        self.without[other] = steps
        # One that was known before may take many steps for one of the other.
        most = SELDOM if optimizer in self.counts else 1
        if ends_steps is None or steps > most:
            self.rarest = other
            self.counts = weakref.WeakKeyDictionary(dict.fromkeys(self.order, 0))
            self.without.clear()
            self.due = True

    def is_kept(self) -> bool:
        """Whether so much was timed that it is not begun anew for another optimizer."""
        if self.steps <= FEW:
            return False
        return self.steps > SELDOM or time.perf_counter() - self.began_s > LONG_S

    def boundary(self) -> None:
        self.at_boundary = True  # a collection in our own work is none of the step's
        try:
            if self.files is None or self.state != "counting" or self.looks:
                super().boundary()
            else:
                self.boundary_of_many()
        finally:
            self.at_boundary = False

    def boundary_of_many(self) -> None:
        """As of each step but few: the same in few calls."""
        now = time.perf_counter()
        self.due = False
        self.marks += 1
        if self.marks % self.settings["every"]:
            return
        self.steps += 1
        self.end_step(now)
        if self.clock.on_gpu:
            self.clock.begin()

    def end_step(self, now: float) -> None:
        """now: when the step ended."""
        if self.steps == 1:
            self.begin_run(now)
            self.last_s = time.perf_counter()
            return
        self.add_step(now)
        if now >= self.next_s or self.steps >= self.next_at:
            self.do_what_is_due(now)
        self.last_s = time.perf_counter()
        self.ours_s = self.last_s - now

    def do_what_is_due(self, now: float) -> None:
        """What is not done after each step, but after some time or so many of them."""
        if now >= self.memory_s + self.memory_period_s:
            self.read_memory(now)
        if self.steps >= self.find_ordinary_at:
            self.find_ordinary_at = self.steps + EVERY
            self.find_ordinary()
        if self.steps >= self.looks_at:
            self.look_at_ranks()
        if now >= self.ask_s:
            self.ask_s = now + LOOK_S
            self.end_without_tool()
        if now >= self.end_s or self.steps >= self.ends_at:
            self.end_run()
            return
        if now >= self.files.due_s:
            self.write_files(now)
        memory_s = self.memory_s + self.memory_period_s
        self.next_s = min(memory_s, self.ask_s, self.end_s, self.files.due_s)
        self.next_at = min(self.find_ordinary_at, self.looks_at, self.ends_at)

    def begin_run(self, now: float) -> None:
        """After the first step; again where an optimizer stepped that was not known."""
        if self.files is None:
            self.files = StepFiles(Path(self.settings["part"]))
            self.waits = CoreWaits()
            self.pressure = MemoryPressure()
            self.sampler.forget()
            self.sampler.start(switches_sooner=False)
            self.open_memory()
            self.modules.watch_data(self.settings["data"])
        else:
            self.files.forget()
        self.growth = MemoryGrowth(self.settings["folder"])  # it has the numbers of steps
        self.clock.restart()
        self.began_s = self.files.began_s = now
        self.recent.clear()
        self.ordinary_s, self.slow_s = None, 0.0
        self.next_s, self.next_at = 0.0, 0
        self.find_ordinary_at = self.steps + FEW
        if self.settings["watch_steps"] is not None:
            self.ends_at = self.settings["watch_steps"] + 1
        if self.settings["minutes"] is not None:
            self.end_s = now + 60 * self.settings["minutes"]
        self.waited_ns = self.waits.ns()
        self.cpu_s = time.thread_time()
        self.faults = major_faults()
        self.retries = self.allocator_retries()
        self.pressure_s = self.pressure.seconds()
        self.occasions.first_step()
        self.occasions.taken(self.settings["folder"])
        self.sampler.take()
        self.ours_s = 0.0
        self.phase_s = dict.fromkeys(PHASES, 0.0)
        self.write("counting", until=None)
        rank, size = rank_of_world()
        self.files.about = {
            "rank": rank,
            "world_size": size,
            "is_rank": size > 1 or "RANK" in os.environ,
            "pid": os.getpid(),
            "began_ns": time.time_ns(),
            "device": "cuda" if self.clock.on_gpu else "cpu",
            "torch": torch.__version__,
            "optimizers": self.names_of_optimizers(),
            "ended": False,  # by itself, or by us after the steps that were asked for
            "growth": None,
            "not_seen": [],
        }
        self.write_files(now)

    def early_steps(self) -> int:
        """The first is not timed."""
        return 1

    def look_at_ranks(self) -> None:
        """Between two steps, in few of them: what the tool compares over the ranks."""
        self.looks_at *= TIMES
        if not has_other_ranks():
            return
        ends_steps = self.rarest()
        for optimizer in list(self.order):
            self.ranks.look(optimizer, self.steps, has_gradients=optimizer is ends_steps)
        self.modules.name_all()
        self.files.write_sketches(self.sketches())
        self.modules.forget()  # what the program lets go is not kept

    def write_files(self, now: float) -> None:
        self.files.about["not_seen"] = self.not_seen()
        self.files.write(now)

    def not_seen(self) -> list[str]:
        """Of what slows steps, with the reasons."""
        reasons = []
        if gc.get_freeze_count():
            reasons.append("who holds memory, of what the program has set aside by gc.freeze()")
        if self.sampler.error is not None:
            reasons.append(f"lines, as the stack was sampled no more: {self.sampler.error}")
        if self.pressure.why_not is not None:
            reasons.append(self.pressure.why_not)
        return reasons

    def add_step(self, now: float) -> None:
        """A row of the files; of a long step, what happened in it."""
        seconds = now - self.last_s
        if self.clock.on_gpu:
            self.clock.end(now)
            self.add_device_times()
        waited_s = self.waited_for_core(seconds)
        self.files.steps.extend((seconds, *self.phase_s.values(), waited_s, self.ours_s))
        if seconds > self.slow_s:
            self.add_slow(seconds, waited_s, self.sampler.take())
            self.set_slow()
        else:
            self.occasions.seen.clear()
            if self.sampler.spent:
                self.add_typical(self.sampler.take())
            self.n_typical += 1
        self.phase_s.update(NO_TIME)
        self.recent.append(seconds)

    def waited_for_core(self, seconds: float) -> float:
        """Of a step, with our own work before it; 0 where this thread has used a core all the time,
        for which a clock is enough: to ask what it waited takes longer."""
        before_s, self.cpu_s = self.cpu_s, time.thread_time()
        not_working_s = seconds + self.ours_s - (self.cpu_s - before_s)
        if not_working_s < WITHOUT_CORE * seconds:
            return 0.0
        before_ns, self.waited_ns = self.waited_ns, self.waits.ns()
        # Since the last time that it was asked, perhaps some steps ago.
        return min(1e-9 * (self.waited_ns - before_ns), not_working_s)

    def find_ordinary(self) -> None:
        """How long an ordinary step lasts; and what is counted since, for the next slow one."""
        self.set_ordinary(statistics.median(self.recent))
        self.faults = major_faults()
        self.retries = self.allocator_retries()
        self.pressure_s = self.pressure.seconds()

    def set_slow(self) -> None:
        """From which time on a step is told of: each, until an ordinary one is known."""
        self.slow_s = 0.0
        if self.ordinary_s is not None:
            self.slow_s = self.files.longer(LONGER) * self.ordinary_s

    def add_device_times(self) -> None:
        """Of the steps that the GPU has ended; nothing waits for the others."""
        steps, ended = self.clock.steps, 0
        for begun, end in steps:
            if not end.query():
                break
            self.files.device.append(1e-3 * begun.elapsed_time(end))
            ended += 1
        del steps[:ended]

    def set_ordinary(self, seconds: float) -> None:
        """Samples are as frequent as ordinary steps ask for."""
        self.ordinary_s = seconds
        self.set_slow()
        period_s = min(LONGEST_PERIOD_S, max(SHORTEST_PERIOD_S, seconds / OF_A_STEP))
        if not 0.5 < period_s / self.sampler.period_s < 2.0:
            self.sampler.period_s = period_s
            self.sampler.start(switches_sooner=False)

    def add_typical(self, spent: dict[tuple, Spent]) -> None:
        for key, of_site in spent.items():
            line = self.line_of(key)
            self.typical[line] = self.typical.get(line, 0.0) + of_site.all_s

    def add_slow(self, seconds: float, waited_s: float, spent: dict[tuple, Spent]) -> None:
        faults, self.faults = self.faults, major_faults()
        retries, self.retries = self.retries, self.allocator_retries()
        pressure_s, self.pressure_s = self.pressure_s, self.pressure.seconds()
        self.files.add_slow(
            {
                "step": self.steps,
                "ended_ns": time.time_ns(),
                "seconds": seconds,
                "data": self.phase_s["data"],
                "waited": waited_s,
                # Since EVERY steps before, at most.
                "faults": self.faults - faults,
                "retries": self.retries - retries,
                "pressure": self.pressure_s - pressure_s,
                "occasions": self.occasions.taken(self.settings["folder"]),
                "lines": self.lines_of(spent),
            }
        )

    def lines_of(self, spent: dict[tuple, Spent]) -> list[dict]:
        """The lines of the thread that trains, most time first, with what they take in an ordinary
        step."""
        sites = self.sampler.sites
        by_line: dict[tuple, list[float]] = {}
        example: dict[tuple, tuple] = {}
        for key, of_site in spent.items():
            if sites[key].thread != TRAINS or sites[key].code is None:
                continue
            line = self.line_of(key)
            times = by_line.setdefault(line, [0.0, 0.0])
            times[0] += of_site.all_s
            times[1] += of_site.held_s
            example[line] = key
        longest = sorted(by_line, key=lambda line: -by_line[line][0])[:LINES]
        rows = []
        for line in longest:
            site = self.description_of(line, sites[example[line]])
            rows.append(
                {
                    "where": f"{site['file']}:{site['line']}",
                    "function": site["function"],
                    "text": site["text"],
                    "beneath": site["beneath"],
                    "seconds": by_line[line][0],
                    "held": by_line[line][1],
                    # In an ordinary step.
                    "ordinary": self.typical.get(line, 0.0) / max(1, self.n_typical),
                }
            )
        return rows

    def description_of(self, line: tuple, site: Site) -> dict:
        """What is told of it; looked up once for what is called at the line, as that takes long."""
        key = (line, site.beneath)
        if key not in self.described:
            self.described[key] = described_site(site, self.settings["folder"])
        return self.described[key]

    def line_of(self, key: tuple) -> tuple:
        """File and line of a site."""
        if key not in self.lines:
            site = self.sampler.sites[key]
            if site.code is None:
                self.lines[key] = ("", 0)
            else:
                line = position_of(site.code, site.instruction)[0] or site.code.co_firstlineno
                self.lines[key] = (site.code.co_filename, line)
        return self.lines[key]

    def allocator_retries(self) -> int:
        """How often the GPU's allocator gave its cache back, as the driver had no memory left."""
        if not self.clock.on_gpu:
            return 0
        return torch.cuda.memory_stats().get("num_alloc_retries", 0)

    # ---- Memory ----------------------------------------------------------------------------------

    def open_memory(self) -> None:
        try:
            self.memory_file = os.open("/proc/self/statm", os.O_RDONLY)
        except OSError:  # the system does not tell
            self.memory_file = None

    def read_memory(self, now: float) -> None:
        """On a clock: at first 100 times a second at most, and more seldom the longer the run."""
        self.memory_s = now
        if self.memory_file is None:
            return
        self.n_readings += 1
        if self.n_readings % READINGS == 0:
            self.memory_period_s *= 2
        process_bytes = PAGE_BYTES * int(os.pread(self.memory_file, 200, 0).split()[1])
        if self.clock.on_gpu and now - self.device_memory_s > DEVICE_S:
            self.device_memory_s = now
            self.device_bytes = torch.cuda.memory_allocated()
        self.files.memory.extend((self.steps, process_bytes, self.device_bytes))
        if self.growth.look(self.steps, process_bytes, self.device_bytes):
            self.files.about["growth"] = self.growth.told

    # ---- The end ---------------------------------------------------------------------------------

    def end_run(self) -> None:
        """After what was asked for, as --then says."""
        self.sampler.stop()
        self.files.about["ended"] = True
        self.wait_for_device()
        self.write_files(time.perf_counter())
        rank, size = rank_of_world()
        self.results.update(rank=rank, world_size=size)
        if self.settings["then"] == "continue":
            self.stop_watching()
        self.write("recorded")
        if not self.off:
            self.give_up_s = time.monotonic() + GRACE_S
            self.end_with_ranks()

    def wait_for_device(self) -> None:
        """Once, at the end: for the times of the steps that the GPU still works on."""
        with contextlib.suppress(RuntimeError):  # of a GPU on which the program has failed
            self.clock.wait()
            if self.clock.on_gpu:
                self.add_device_times()

    def ends_by_itself(self) -> None:
        """The time after the last step counts to it, as what is done in it: a last save."""
        is_watched = self.files is not None and not self.off and self.state == "counting"
        if is_watched and threading.get_ident() == self.thread:
            self.guarded(self.add_end)
        super().ends_by_itself()

    def add_end(self) -> None:
        self.at_boundary = True
        now = time.perf_counter()
        self.sampler.stop()
        self.files.about["after_the_last_step"] = now - self.last_s
        self.add_slow(now - self.last_s, 0.0, self.sampler.take())
        self.files.about["ended"] = True
        self.wait_for_device()
        self.write_files(now)


def major_faults() -> int:
    """Pages that this process has read from a disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
