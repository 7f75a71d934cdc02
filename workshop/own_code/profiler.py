"""Exercise 1: the lines around a training loop that record some of its steps with
torch.profiler."""

import gzip
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import torch
from torch.profiler import ProfilerAction, profile

from workshop.own_code.findings import Finding, differs, function_of

STEPS = 10
FIRST = 2  # steps at the beginning, which are not like the others
MOST = 5  # recorded steps; more take memory and tell no more
SIGNATURE = "(step, steps, folder)"
RECORDS = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)


def findings(load: Callable[[], ModuleType]) -> Iterator[Finding]:
    """load: imports the learner's file."""
    ran, started = [], []
    initialize = profile.__init__

    def noting(self, *arguments, **named):
        initialize(self, *arguments, **named)
        started.append(self)

    weight = torch.ones(64, 64)

    def step() -> None:
        ran.append(weight @ weight)

    profile.__init__ = noting
    try:
        profile_steps = function_of(load(), "profile_steps", SIGNATURE)
        with tempfile.TemporaryDirectory() as name:
            profile_steps(step, STEPS, name)
            traces = trace_texts(Path(name))
    finally:
        profile.__init__ = initialize
    yield Finding("runs each step once", wrong_count(len(ran)))
    yield Finding("starts one profiler", wrong_start(started))
    yield from schedule_findings(started[0])
    no_trace = "expected a file *.json or *.json.gz, found none; on_trace_ready= writes it"
    yield Finding("leaves a trace in the folder", None if traces else no_trace)
    in_trace = set()
    for text in traces:
        in_trace.update(re.findall(r"ProfilerStep#(\d+)", text))
    yield Finding("tells the profiler where a step ends", unnamed_steps(started[0], in_trace))


def trace_texts(folder: Path) -> list[str]:
    texts = []
    for path in sorted(folder.rglob("*.json*")):
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        texts.append(content.decode(errors="replace"))
    return texts


def wrong_count(ran: int) -> str | None:
    return None if ran == STEPS else differs("calls of step()", f"{STEPS}", ran)


def wrong_start(started: list[profile]) -> str | None:
    return None if len(started) == 1 else differs("torch.profiler.profile", "1", len(started))


def schedule_findings(profiler: profile) -> Iterator[Finding]:
    """Which steps it was asked to record."""
    no_schedule = "expected schedule=torch.profiler.schedule(...), found none: all is recorded"
    yield Finding("has a schedule", None if profiler.record_steps else no_schedule)
    actions = [profiler.schedule(number) for number in range(STEPS)]
    recorded = [number for number, action in enumerate(actions) if action in RECORDS]
    none_recorded = f"expected steps that are recorded among {STEPS}, found none"
    yield Finding("records some of the steps", None if recorded else none_recorded)
    first = recorded[0]
    unready = None
    if first == 0 or actions[first - 1] is not ProfilerAction.WARMUP:
        unready = "expected warmup=1 or more, found 0: the first recorded step pays for the start"
        unready += " of the profiler"
    yield Finding("lets the profiler warm up", unready)
    early = None
    if first < FIRST:
        early = f"expected wait + warmup of {FIRST} or more, found {first}: the first steps are"
        early += " not like the others"
    yield Finding("leaves out the first steps", early)
    number = len(recorded)
    several = None if 2 <= number <= MOST else differs("recorded", f"2 to {MOST} steps", number)
    yield Finding(f"records 2 to {MOST} steps", several)


def unnamed_steps(profiler: profile, in_trace: set[str]) -> str | None:
    """What is wrong with the names of steps in the trace."""
    if len(in_trace) >= 2:
        return None
    found = ", ".join(f"ProfilerStep#{name}" for name in sorted(in_trace)) or "none"
    return (
        f"expected a range ProfilerStep#N for each step, found {found}; call step() of the"
        " profiler after each step"
    )
