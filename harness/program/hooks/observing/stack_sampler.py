"""Which lines of the program take the host's time?  A thread looks at the stack of the thread that
trains, each millisecond, in some of the timed steps and while steps are recorded."""

import _thread
import ctypes
import gc
import os
import sys
import threading
import time
from types import CodeType, FrameType
from typing import NamedTuple

from .source_lines import PROGRAM, WORKS_FOR_US, CodeKinds, described_site

# Between two samples, about: they make steps longer (benchmarks/program_hooks.py), those whose
# times are not told.
PERIOD_S = 1e-3
# The fractions of its multiples are spread evenly: samples have no rhythm that a step may have.
GOLDEN = 0.6180339887
# After which a thread that runs Python lets another one do so.  With the usual 5 ms, samples would
# show the first call that gives the interpreter's lock away, in place of the Python before it.
SWITCH_S = 5e-6
# By which the system may wake the thread that samples late: its usual 50,000 are ten switches.
SLACK_NS = 1
MOST_WAIT_S = 0.1  # for a thread to begin
SET_TIMER_SLACK = 29  # as linux/prctl.h numbers it
# Of a PyDLL, whose calls keep the interpreter's lock.  None: not on Linux.
PRCTL = getattr(ctypes.PyDLL(None), "prctl", None)
# A frame object is made when another thread asks for it.  Before Python 3.12 that may start a
# collection, during which the thread of the frame runs on: what is got then is no frame, and the
# process crashes.
COLLECTS_AS_IT_ALLOCATES = sys.version_info < (3, 12)
HELD_S = 5e-3  # beyond the period and the switch: a call held the lock, or the sampler had no core
OTHERS_EVERY = 8  # looks at the stack that trains, for one at those of other threads
MOST_SITES = 4096  # places in the program, of a window
MOST_RECORDED = 60_000  # samples with their time
MOST_THREADS = 16  # that are told apart
# Files of the standard library in which a thread waits for others.
WAITS_IN = ("threading.py", "queue.py", "selectors.py", "connection.py", "thread.py")
TRAINS = "main"  # the thread of the steps
BACKWARD = "backward"  # threads of autograd, which Python did not start
OTHER = "other"


class Site(NamedTuple):
    """Where a thread was: the innermost frame of the program, and what ran beneath it."""

    thread: str
    code: CodeType | None  # of the program; None: no frame of it
    instruction: int  # its offset in the code
    beneath: CodeType | None  # the innermost function, of a library; None: it is the program's own
    module: dict | None  # globals of the program's frame


class Spent(NamedTuple):
    """Time at a site, in seconds."""

    all_s: float
    held_s: float  # of it, during which the interpreter's lock was held


NOTHING_SPENT = Spent(0.0, 0.0)
SCHEDSTAT_BYTES = 100  # at most: three numbers


class CoreWaits:
    """How long a thread of this process has been ready to run without a core.  Its file stays
    open."""

    def __init__(self, native_id: int | None = None):
        """native_id: of the thread; None: the one that makes this."""
        thread = "thread-self" if native_id is None else f"self/task/{native_id}"
        try:
            self.file = os.open(f"/proc/{thread}/schedstat", os.O_RDONLY)
        except OSError:  # the system does not tell
            self.file = None

    def ns(self) -> int:
        """0 where the system does not tell."""
        if self.file is None:
            return 0
        return int(os.pread(self.file, SCHEDSTAT_BYTES, 0).split()[1])

    def close(self) -> None:
        if self.file is not None:
            os.close(self.file)


class WithoutCollections:
    """No garbage is collected in the block, where frames of other threads are looked at."""

    def __init__(self):
        self.ends_them = False

    def __enter__(self) -> None:
        self.ends_them = COLLECTS_AS_IT_ALLOCATES and gc.isenabled()
        if self.ends_them:
            gc.disable()

    def __exit__(self, *error: object) -> None:
        if self.ends_them:
            gc.enable()


class Trains(NamedTuple):
    """The thread of the steps."""

    ident: int  # as Python numbers it
    native_id: int  # as the system does
    goes_on: _thread.LockType  # is released when samples have begun
    ends: _thread.LockType  # when they are to end


def acquired_lock() -> _thread.LockType:
    lock = _thread.allocate_lock()
    lock.acquire()
    return lock


class StackSampler:
    """Takes samples from start() to stop(); end_step() ends a timed step of them.

    Each sample stands for the time since the one before.  A sample that is late by far tells of a
    call that held the interpreter's lock: its time counts where the thread is after it.
    """

    def __init__(self, watch):
        self.watch = watch
        self.kinds = CodeKinds()
        self.looks = 0  # at the stack that trains, in all
        self.native_id: int | None = None  # of that thread
        self.is_on = False
        self.ends = acquired_lock()  # is released to end the thread that samples
        self.interval_s: float | None = None  # of the interpreter, while it is ours
        self.error: str | None = None  # that ended the sampling
        self.sites: dict[tuple, Site] = {}
        self.forget()

    def forget(self) -> None:
        """The samples so far."""
        self.period_s = PERIOD_S
        self.n_samples = 0
        self.spent: dict[tuple, Spent] = {}  # of this step
        # By place among the timed steps: of those that were sampled.
        self.steps: dict[int, dict[tuple, Spent]] = {}
        self.recorded: list[tuple[int, tuple]] = []  # unix time in ns, and the site
        self.keeps_times = False

    # ---- On the thread that trains ---------------------------------------------------------------

    def start(self, keeps_times: bool = False, switches_sooner: bool = True) -> None:
        """keeps_times: of each sample, to find the operators that ran.  switches_sooner: threads
        give each other the interpreter's lock sooner, for so few steps that it does not matter."""
        self.stop()
        self.keeps_times = keeps_times
        if (
            switches_sooner and threading.active_count() == 1
        ):  # no thread of the program is affected
            self.interval_s = sys.getswitchinterval()
            sys.setswitchinterval(min(SWITCH_S, self.interval_s))
        self.is_on = True
        self.spent = {}
        # Not threading.Thread: the program may count or join its threads.
        goes_on, self.ends = acquired_lock(), acquired_lock()
        trains = Trains(_thread.get_ident(), threading.get_native_id(), goes_on, self.ends)
        _thread.start_new_thread(self.sample, (trains,))
        # A call that holds the interpreter's lock would else be over before the first sample.
        goes_on.acquire(timeout=MOST_WAIT_S)

    def stop(self) -> None:
        if self.is_on:
            self.is_on = False
            # At once: a thread that ends later would get the interpreter's lock in place of the
            # next one, which then sees the program too late.
            self.ends.release()
        if self.interval_s is not None:
            sys.setswitchinterval(self.interval_s)
            self.interval_s = None

    def end_step(self, place: int) -> None:
        """A timed step has ended.  place: among all of them, from 0."""
        if self.is_on:
            self.stop()
            self.steps[place] = self.take()

    def take(self) -> dict[tuple, Spent]:
        """Time by site since a step began; the next one begins."""
        spent, self.spent = self.spent, {}
        return spent

    # ---- On the thread that samples --------------------------------------------------------------

    def sample(self, trains: Trains) -> None:
        """trains: the thread whose stack is looked at."""
        self.native_id = threading.get_native_id()
        if PRCTL is not None:
            PRCTL(SET_TIMER_SLACK, SLACK_NS, 0, 0, 0)
        # A sample is late where this thread has no core, or where that which holds the
        # interpreter's lock has none.
        waits = CoreWaits(), CoreWaits(trains.native_id)
        try:
            self.sample_until_stopped(trains, waits)
        except Exception as error:  # noqa: BLE001 - the program goes on
            self.error = f"{type(error).__name__}: {error}"
        finally:
            for of_thread in waits:
                of_thread.close()

    def sample_until_stopped(self, trains: Trains, waits: tuple[CoreWaits, CoreWaits]) -> None:
        clock, ends, frames_of_all = time.perf_counter, trains.ends.acquire, sys._current_frames
        late_s, main = sys.getswitchinterval() + HELD_S, trains.ident
        own, of_main = waits
        without_collections = WithoutCollections()
        own_ns, main_ns = own.ns(), of_main.ns()
        before_s = others_before_s = clock()
        trains.goes_on.release()
        while True:
            period_s = self.period_s * (0.5 + self.looks * GOLDEN % 1)
            if ends(timeout=period_s):
                return
            with without_collections:
                frames = frames_of_all()
                # Before all that may give the interpreter's lock back: then the program runs on.
                site = self.site_of(TRAINS, frames[main]) if main in frames else None
                now_s = clock()
                self.looks += 1
                looks_at_others = self.looks % OTHERS_EVERY == 0
                if looks_at_others:
                    self.count_others(frames, main, now_s - others_before_s)
                    others_before_s = now_s
            # They keep the program's frames alive, with their tensors, while this thread sleeps.
            frames = None
            beyond_s = now_s - before_s - period_s
            held_s = 0.0
            if beyond_s > late_s:
                own_before_ns, own_ns = own_ns, own.ns()
                main_before_ns, main_ns = main_ns, of_main.ns()
                without_core_ns = max(own_ns - own_before_ns, main_ns - main_before_ns)
                held_s = max(0.0, beyond_s - 1e-9 * without_core_ns)
            elif looks_at_others:  # reading files with each sample would double what it takes
                own_ns, main_ns = own.ns(), of_main.ns()
            self.count(TRAINS, site, now_s - before_s, held_s)
            before_s = now_s

    def count_others(self, frames: dict[int, FrameType], trains: int, seconds: float) -> None:
        """Threads of the program that do not wait, but for the one that trains."""
        if len(frames) <= 2:
            return
        own = _thread.get_ident()
        for ident, frame in frames.items():
            if ident not in (own, trains) and not self.waits(frame):
                thread = self.name_of(ident)
                self.count(thread, self.site_of(thread, frame), seconds, 0.0)

    def count(self, thread: str, site: tuple | None, all_s: float, held_s: float) -> None:
        """site: its key in `sites`."""
        if site is None:
            return
        if not self.keeps_times:  # the times by site are those of the timed steps
            self.n_samples += 1
        spent = self.spent
        before = spent.get(site, NOTHING_SPENT)
        spent[site] = Spent(before.all_s + all_s, before.held_s + held_s)
        if self.keeps_times and thread == TRAINS and len(self.recorded) < MOST_RECORDED:
            self.recorded.append((time.time_ns(), site))

    def site_of(self, thread: str, frame: FrameType) -> tuple | None:
        """The key of the site in `sites`; None where the thread works for us."""
        known_kinds, beneath, innermost = self.kinds.by_id, None, frame.f_code
        while frame is not None:
            # Before its kind is looked up in files, the first time: the frame may run on then.
            code, instruction = frame.f_code, frame.f_lasti
            known = known_kinds.get(id(code))
            kind = known[0] if known else self.kinds.kind_of(code, frame)
            if kind == PROGRAM:
                break
            if kind == WORKS_FOR_US:
                return None
            beneath = innermost
            frame = frame.f_back
        if frame is None:
            if thread != TRAINS:
                return None  # what libraries do on threads of their own
            key = (thread, 0, 0, id(beneath))
            site = Site(thread, None, 0, beneath, None)
        else:
            key = (thread, id(code), instruction, id(beneath))
            site = Site(thread, code, instruction, beneath, frame.f_globals)
        if key not in self.sites:
            if len(self.sites) >= MOST_SITES:
                key = (thread, 0, 0, 0)
                site = Site(thread, None, 0, None, None)
            self.sites[key] = site
        return key

    def waits(self, frame: FrameType) -> bool:
        """Whether a thread waits for others."""
        return os.path.basename(frame.f_code.co_filename) in WAITS_IN

    def name_of(self, ident: int) -> str:
        thread = threading._active.get(ident)
        if thread is None:
            return BACKWARD if self.watch.depth["backward"] else OTHER
        names = {site.thread for site in self.sites.values()}
        return thread.name if thread.name in names or len(names) < MOST_THREADS else OTHER

    # ---- What is told ----------------------------------------------------------------------------

    def as_json(self, folder: str) -> dict:
        """All that was sampled, for StackSamples.  folder: in which the command was started."""
        numbers = {key: number for number, key in enumerate(self.sites)}
        sites = [described_site(site, folder) for site in self.sites.values()]
        timed = []
        for step, spent in self.steps.items():
            for key, (all_s, held_s) in spent.items():
                timed.append(
                    {"step": step, "site": numbers[key], "ms": 1e3 * all_s, "held_ms": 1e3 * held_s}
                )
        seen = {
            "timed_steps": len(self.steps),
            "samples": self.n_samples,
            "sites": sites,
            "timed": timed,
            "recorded_at_us": [at_ns / 1e3 for at_ns, _ in self.recorded],
            "recorded_site": [numbers[key] for _, key in self.recorded],
        }
        if self.error is not None:
            seen["error"] = self.error
        return seen
