"""Which lines of the program take the host's time?

The stack of the thread that trains is sampled in some of the timed steps, without a profiler: these
take longer for it, and a line's share of them is told of the steps that were not sampled.  While
steps are recorded it is sampled too, which tells the operators that run at a line, and how much of
its time the step waits for the host there: nothing but the host's own work goes on, or, without a
GPU, an operator so small that calling it takes longer than what it does.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.program.observed import observed
from analysis.trace.links import OPERATOR
from analysis.trace.timeline import Timeline
from analysis.vocabulary.bounds import OF_HOST
from analysis.vocabulary.operators import COPIES, READS_A_VALUE, is_of_pytorch, short_name
from harness.base.sections import Section
from harness.base.tables import added_up, column, grouped, text_columns
from harness.base.text import count_of, shortened, significant
from harness.documents.program import Observed, Site
from harness.schema import Document, Unknown, field, known_or

MAIN = "main"
SHOWN = 0.005  # of the host's time: rows of less are left out
SMALL_US = 50.0  # operators that take less: calling them takes most of it
NEAR_US = 200.0  # before a sample, an operator that may have run at its line
FEW_SAMPLES = 10  # of a line in the recorded steps: fewer tell nothing
FEW_TIMED = 5  # the same in the timed steps
MUCH = 0.05  # of the recorded steps' time: a few late samples tell as much as many
LATE_US = 3e3  # after the one before: what is told of a sample is that of the middle between
MOST_OF_FUNCTION = 0.6  # of the time of a function's lines: the one that has it is told alone
LINES_NAMED = 3  # of a function, in a sentence
OF_ONE_LINE = 0.9  # of an operator's samples: its calls are taken for the line's
TEXT = 60  # letters of a line in a sentence
# Functions of these packages that run beneath a line are what every program calls there.
FRAMEWORKS = (
    "torch",
    "torchvision",
    "transformers",
    "accelerate",
    "deepspeed",
    "lightning",
    "pytorch_lightning",
    "ignite",
    "peft",
    "trl",
    "timm",
)
# But these are called by the line for its own purpose.
CALLED_BY_A_LINE = (
    "torch._tensor",
    "torch.functional",
    "torch.serialization",
    "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
)
READS_VALUES = (".item()", ".tolist()", ".cpu()", ".numpy()", "float()", "int()", "bool()")

NO_STACKS = "operators were recorded without stacks: --profile-stacks"
NOT_OF_LINE = "several lines call this operator, and a trace does not tell which line a call is of"
FEW = "too few samples of the recorded steps"
NOT_SAMPLED = "the program's stack was not sampled: profile_program.py does that"


class LineRow(Document):
    """A line of the program on the stack of a thread, the innermost that is no library's."""

    where: str = field("train.py:77: file and line, as seen from where the command was started")
    text: str | None = field("of the line", null="its source is not there")
    function: str = field("of the program, that the line is in")
    share: float = field("of the host's time in the timed steps, of this thread")
    ms_per_step: float = field("in the timed steps, without a profiler")
    held_ms_per_step: float = field("of it, in calls that held the interpreter's lock")
    waited_for_ms_per_step: float | None = field(
        "of it, in which the step waits for the host at this line, or copies tensors; on a GPU: in"
        " which that has nothing to do",
        null=FEW,
    )
    calls_per_step: float | None = field("of the operator beneath, in this line", null=NO_STACKS)
    beneath: str | None = field(
        "the function or operator that ran most of this time", null="Python of the line itself"
    )
    thread: str = field("main (that of the steps), backward, or its name")
    samples: int = field("of the stack in the timed steps that this stands for, about")


class LineFinding(NamedTuple):
    """A line for which the step waits."""

    finding: str  # a sentence
    share: float  # of a step, that could vanish at most
    next: str
    where: str  # train.py:77


# ---- Rows ----------------------------------------------------------------------------------------


def line_rows(timeline: Timeline) -> list[LineRow] | Unknown | None:
    """Most time first; None where the stack was not sampled."""
    seen = observed(timeline)
    if seen is not None and seen.error:
        return Unknown(f"the stack was sampled no more: {seen.error}")
    if seen is None or not seen.timed_steps:
        return None
    if not seen.timed:
        return Unknown("the timed steps were too short for a sample of the stack")
    times = pd.DataFrame([row.as_json() for row in seen.timed])
    times = times.groupby("site", as_index=False)[["ms", "held_ms"]].sum()
    times["thread"] = [seen.sites[site].thread for site in times["site"]]
    recorded = recorded_samples(timeline, seen)
    totals = times.groupby("thread")["ms"].sum()
    mean_ms = totals.sum() / max(1, seen.samples)
    per_step = 1 / seen.timed_steps
    if timeline.context.summary is not None:
        told_ms = timeline.context.summary["performance"]["avg_step_time_ms"]
        per_step = told_ms / totals.get(MAIN, totals.sum())
    rows = []
    sites_by_line = grouped(range(len(seen.sites)), lambda site: key_of(seen, site))
    for (thread, where), sites in sites_by_line.items():
        of_line = times[times["site"].isin(sites)]
        ms = float(of_line["ms"].sum())
        if not ms or ms < SHOWN * totals[thread]:
            continue
        longest = seen.sites[int(of_line.loc[of_line["ms"].idxmax(), "site"])]
        own = recorded[recorded["site"].isin(sites).to_numpy()]
        beneath = beneath_of(seen, of_line, own)
        waits = None
        if len(own) >= FEW_SAMPLES or own["us"].sum() > MUCH * recorded["us"].sum():
            waits = ms * per_step * float(own["us"][own["waits"]].sum() / own["us"].sum())
        rows.append(
            LineRow(
                where=where,
                text=known_or(longest.text, longest.reason_of("text")),
                function=longest.function or "",
                share=ms / float(totals[thread]),
                ms_per_step=ms * per_step,
                held_ms_per_step=float(of_line["held_ms"].sum()) * per_step,
                waited_for_ms_per_step=waits,
                calls_per_step=calls_of(timeline, seen, recorded, where, beneath),
                beneath=beneath,
                thread=thread,
                samples=max(1, round(ms / mean_ms)),
            )
        )
    return sorted(rows, key=lambda row: (row.thread != MAIN, row.thread, -row.ms_per_step))


def key_of(seen: Observed, number: int) -> tuple[str, str]:
    """Thread and place of a site."""
    return seen.sites[number].thread, place_of(seen.sites[number])


def place_of(site: Site) -> str:
    if site.file is None:
        return "no line of the program"
    return f"{site.file}:{site.line}"


def beneath_of(seen: Observed, of_line: pd.DataFrame, own: pd.DataFrame) -> str | None:
    """What ran beneath a line for most of its time: a function of a library, an operator, a call.

    own: its samples in the recorded steps."""
    times = added_up(
        (seen.sites[site].beneath or seen.sites[site].call, ms)
        for site, ms in zip(of_line["site"], of_line["ms"], strict=True)
    )
    function = max(times, key=times.get)
    if is_mostly_held(of_line["held_ms"].sum(), of_line["ms"].sum()):
        return function  # operators give the lock back
    is_direct_call = [seen.sites[site].beneath is None for site in own["site"]]
    direct = own[np.array(is_direct_call, bool)]
    operators = added_up(zip(direct["operator"], direct["us"], strict=True))
    operators.pop("", None)
    is_direct = function is None or not is_function(seen, of_line, function)
    if operators and is_direct:
        return max(operators, key=operators.get)
    return function


def is_function(seen: Observed, of_line: pd.DataFrame, name: str) -> bool:
    return any(seen.sites[site].beneath == name for site in of_line["site"])


# ---- Samples of the recorded steps ---------------------------------------------------------------


def recorded_samples(timeline: Timeline, seen: Observed) -> pd.DataFrame:
    """A row for each sample in the recorded steps: site, us since the one before, operator (its
    name, or ''), waits: whether the step waits for the host then."""
    at_us = np.array(seen.recorded_at_us, float) - timeline.trace.base_us
    us = np.diff(at_us, prepend=at_us[:1])
    at_us = np.where(us > LATE_US, at_us - us / 2, at_us)
    slices = timeline.slices
    starts, ends = slices["start"].to_numpy(), slices["end"].to_numpy()
    row = np.clip(np.searchsorted(starts, at_us, side="right") - 1, 0, max(0, len(slices) - 1))
    inside = np.zeros(len(at_us), bool)
    if len(slices):
        inside = (at_us >= starts[row]) & (at_us < ends[row])
        inside &= slices["of_steps"].to_numpy()[row]
    operators = operators_at(timeline, at_us)
    waits = slices["bound"].isin(OF_HOST).to_numpy()[row] if len(slices) else inside
    if not timeline.on_gpu:
        waits = waits | (operators["us"] < SMALL_US).to_numpy()
        waits = waits | operators["name"].isin(COPIES).to_numpy()
    samples = pd.DataFrame(
        {"site": seen.recorded_site, "us": us, "operator": operators["name"], "waits": waits}
    )
    return samples[inside].reset_index(drop=True)


def outermost_operators(timeline: Timeline) -> pd.DataFrame:
    """Rows of host, in order: operators of the thread of the steps that no other one called."""
    host = timeline.host
    is_operator = (host["kind"] == OPERATOR).to_numpy()
    is_of_steps = (host["thread"] == timeline.thread).to_numpy()
    operators = host[is_operator & is_of_steps].sort_values("start")
    latest = np.maximum.accumulate(operators["until"].to_numpy())
    starts = operators["start"].to_numpy()
    return operators[np.append(True, starts[1:] >= latest[:-1])[: len(operators)]]


def operators_at(timeline: Timeline, at_us: np.ndarray) -> pd.DataFrame:
    """Name and us of the outermost operator that runs at each time, or that has just run; '' and
    infinite where none has."""
    operators = outermost_operators(timeline)
    if not len(operators):
        return pd.DataFrame({"name": [""] * len(at_us), "us": np.full(len(at_us), np.inf)})
    starts, untils = operators["start"].to_numpy(), operators["until"].to_numpy()
    row = np.searchsorted(starts, at_us, side="right") - 1
    near = (row >= 0) & (at_us < untils[np.maximum(row, 0)] + NEAR_US)
    row = np.maximum(row, 0)
    names = operators["name"].to_numpy(object)[row]
    us = (untils - starts)[row]
    return pd.DataFrame({"name": np.where(near, names, ""), "us": np.where(near, us, np.inf)})


def calls_of(
    timeline: Timeline, seen: Observed, recorded: pd.DataFrame, where: str, operator: str | None
) -> float | Unknown | None:
    """How often a step calls the operator in this line: all its calls, where the samples of it are
    in this line."""
    if not timeline.trace.file.n_frames:
        return None
    same = recorded[(recorded["operator"] == operator).to_numpy()]
    here = [place_of(seen.sites[site]) == where for site in same["site"]]
    if not any(here):
        return Unknown("no operator is known to have run beneath the line")
    if sum(here) < OF_ONE_LINE * len(here):
        return Unknown(NOT_OF_LINE)
    operators = outermost_operators(timeline)
    starts, steps = operators["start"], timeline.steps
    in_steps = (starts >= steps["start"].min()) & (starts < steps["end"].max())
    calls = in_steps & (operators["name"] == operator)
    return float(calls.sum() / len(steps))


# ---- What pays -----------------------------------------------------------------------------------


def line_findings(rows: list[LineRow] | Unknown | None, on_gpu: bool) -> list[LineFinding]:
    """Of the thread of the steps, each function with a line for which the step waits in enough
    samples; none where no lines are known."""
    candidates = []
    for row in rows if isinstance(rows, list) else []:
        is_told = row.thread == MAIN and row.function and row.waited_for_ms_per_step
        if is_told and is_of_program(row.beneath) and row.beneath != ".backward()":
            candidates.append(row)
    findings = []
    for of_function in grouped(candidates, function_of).values():
        for told_together in together(of_function):
            is_enough = sum(row.samples for row in told_together) >= FEW_TIMED
            if is_enough:
                findings.append(finding_of(told_together, on_gpu))
    return findings


def together(of_function: list[LineRow]) -> list[list[LineRow]]:
    """The lines of a function: each alone that has most of what is left, then all others."""
    left = sorted(of_function, key=lambda row: -row.waited_for_ms_per_step)
    groups = []
    while left:
        left_ms = sum(row.waited_for_ms_per_step for row in left)
        is_most = left[0].waited_for_ms_per_step >= MOST_OF_FUNCTION * left_ms
        groups.append(left[:1] if is_most else left)
        left = left[len(groups[-1]) :]
    return groups


def function_of(row: LineRow) -> tuple[str, str]:
    """File and function that a line is in."""
    return row.where.rpartition(":")[0], row.function


def is_of_program(beneath: str | None) -> bool:
    """Whether what runs beneath a line is called by it for its own purpose."""
    if beneath is None or beneath.startswith(CALLED_BY_A_LINE):
        return True
    return beneath.partition(".")[0] not in FRAMEWORKS


def finding_of(rows: list[LineRow], on_gpu: bool) -> LineFinding:
    """rows: lines of one function, those of most time first."""
    first = rows[0]
    waits_ms = sum(row.waited_for_ms_per_step for row in rows)
    where = ", ".join(row.where for row in rows[:LINES_NAMED])
    if len(rows) > LINES_NAMED:
        more = count_of(len(rows) - LINES_NAMED, "more line")
        where = f"{where} and {more} of {first.function}()"
    step_ms = first.ms_per_step / first.share
    time = f"about {significant(waits_ms, 2)} of {significant(step_ms, 3)} ms a step"
    text = f": {shortened(first.text, TEXT)}" if first.text else ""
    return LineFinding(
        finding=finding_text(rows, where, time, on_gpu),
        share=waits_ms / step_ms,
        next=f"{cure_of(first)}, at {first.where}{text}",
        where=first.where,
    )


def finding_text(rows: list[LineRow], where: str, time: str, on_gpu: bool) -> str:
    """rows: the lines, first that of most time.  where, time: of all of them, in words."""
    first = rows[0]
    takes = "takes" if len(rows) == 1 else "take"
    if reads_values(first):
        waiter = "The host waits for the GPU in" if on_gpu else "Values are read one by one by"
        return f"{waiter} {called(first)}, {where}, {time}"
    if holds_the_lock(first):
        return f"{where} {takes} {time}, in a call that holds the interpreter's lock"
    beneath = first.beneath or "Python"
    if not is_of_pytorch(beneath):
        return f"{where} {takes} {time}: code of the program, {beneath}"
    operator = short_name(beneath)
    if first.calls_per_step:
        return f"{first.calls_per_step:,.0f} calls of {operator} a step come from {where}, {time}"
    if beneath in COPIES:
        return f"Copies come from {where}, {time}: {operator}"
    return f"Small operators, most of them {operator}, come from {where}, {time}"


def cure_of(row: LineRow) -> str:
    if reads_values(row):
        return "read values seldom, and many at once by .tolist()"
    if holds_the_lock(row):
        return "do it before the loop, or in another process"
    if row.beneath in COPIES:
        return "copy whole tensors at once, or not at all"
    if is_of_pytorch(row.beneath or ""):
        return "one operator on whole tensors in place of many"
    return "do less there, once before the loop, or in another process"


def holds_the_lock(row: LineRow) -> bool:
    return is_mostly_held(row.held_ms_per_step, row.ms_per_step)


def is_mostly_held(held_ms: float, ms: float) -> bool:
    """Whether calls at a line held the interpreter's lock for most of its time."""
    return held_ms > ms / 2


def reads_values(row: LineRow) -> bool:
    return row.beneath in READS_VALUES or row.beneath in READS_A_VALUE


def called(row: LineRow) -> str:
    return row.beneath if row.beneath in READS_VALUES else ".item()"


# ---- For a reader --------------------------------------------------------------------------------

LINE_COLUMNS = [
    *text_columns("where"),
    column("ms per step", "ms_per_step", "~3"),
    column("share", "share", ".1%"),
    column("step waits", "waited_for_ms_per_step", "~3"),
    column("calls", "calls_per_step", ",.0f"),
    *text_columns("text", "beneath", "thread"),
]
ON_A_GPU = "They tell where the host is, not what the GPU does meanwhile."


def lines_section(rows: list[LineRow] | Unknown | None, on_gpu: bool) -> Section:
    """rows: None or why not, where no lines are known."""
    if not isinstance(rows, list):
        return Section("Lines of the program")
    note = [
        "From samples of the stack in some of the timed steps, without a profiler: the innermost"
        " line that is no library's, with what ran beneath it. The times told are those of the"
        " others"
    ]
    if on_gpu:
        note.append(ON_A_GPU)
    if any(row.text is None for row in rows):
        reasons = {row.reason_of("text") for row in rows if row.text is None}
        note.append(f"Lines without text: {'; '.join(sorted(reasons))}")
    held_ms = sum(row.held_ms_per_step for row in rows)
    if held_ms > SHOWN * sum(row.ms_per_step for row in rows):
        note.append(
            f"Held the lock: {significant(held_ms, 2)} ms a step, in calls that let no other thread"
            " run; their time counts at the line after which the lock was free"
        )
    return Section("Lines of the program", LINE_COLUMNS, rows, note, label="where")
