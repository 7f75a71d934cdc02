"""What happens once, or in a few of the steps: compilation, start-up, a save, other long code of
the program.

It stands apart: the shares of the step, and what a change could gain, are of the steps without it.
In a trace of a single step nothing tells whether it happens in every one, so there only compilation
and start-up are known to.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.attribution.collectives import collectives_of
from analysis.attribution.intervals import Slices, slices_of
from analysis.program.occasions import Seldom, seldom_seen
from analysis.trace.links import ANNOTATION, OPERATOR
from analysis.trace.nesting import nearest_marked_caller
from analysis.trace.steps import step_at
from analysis.trace.tables import by_name, has_role
from analysis.trace.timeline import Timeline
from analysis.vocabulary import roles
from analysis.vocabulary.annotations import compiles, seldom_kind
from harness.base.sections import Section
from harness.base.tables import Column, column, text_columns
from harness.base.text import count_of, shortened, significant
from harness.schema import Document, field

COMPILATION, START_UP = "compilation", "start-up"
CODE, FIRST_STEP = "code of the program", "first step"
FEW = 0.25  # of the steps at most: what happens in more of them is part of a step
ENOUGH_STEPS = 4  # to tell what only some of them do
LONG = 0.1  # of the median step: what is shorter makes no step an exception
FAR_LONGER = 3.0  # times the longest wait for code of the program that most steps have
WORTH_TELLING = 0.005  # of the step
NAME = 60  # letters of a name


class OnceRow(Document):
    what: str = field(
        "first step, start-up, compilation, save, evaluation, logging, code of the program"
    )
    where: str = field("the step, the call, the range, or what follows")
    steps: int = field("in which it happens")
    of_steps: int = field("that were recorded")
    ms: float = field("of one; of a first step, beyond the median of the others")
    ms_per_step: float = field("over all steps that were recorded")


class Span(NamedTuple):
    """A time that is not part of what every step does."""

    what: str
    where: str  # a range, or what follows
    step: int  # row of timeline.steps, or -1
    start: float  # us
    end: float


def occasional(timeline: Timeline, code: Slices) -> pd.DataFrame:
    """A row for each Span in the steps, with its fields as columns.  Start-up is told by the
    ledger: what waits in a call may wait for the GPU.

    code: when the host ran code of the program."""
    seen = of_program(timeline)
    spans = [*of_compilation(timeline), *seen]
    if len(timeline.steps) >= ENOUGH_STEPS:
        ranges = of_ranges(timeline)
        spans += ranges
        spans += of_code(timeline, code, [*seen, *ranges])
    table = pd.DataFrame(spans, columns=Span._fields)
    table = table.astype({"start": float, "end": float, "step": np.int64})
    table = table[(table["step"] >= 0).to_numpy()]
    in_steps = table.groupby("what")["step"].transform("nunique")
    return table[(in_steps <= few_of(len(timeline.steps))).to_numpy(bool)]


def of_program(timeline: Timeline) -> list[Span]:
    """What the program was seen to do in few of its steps, as far as it is in the trace."""
    spans = []
    for kind in seldom_seen(timeline, FEW):
        for row in kind.rows:
            start = row.began_us - timeline.trace.base_us
            step = int(step_at(np.array([start]), timeline.steps)[0])
            spans.append(Span(kind.what, in_program(kind), step, start, start + 1e3 * row.ms))
    return spans


def in_program(kind: Seldom) -> str:
    call = kind.rows[0].call
    return call if kind.where == call else f"{call}, {kind.where}"


def few_of(n_steps: int) -> float:
    """In how many of the steps at most something happens that is no part of a step."""
    return max(1.0, FEW * n_steps)


def of_compilation(timeline: Timeline) -> list[Span]:
    host = timeline.host
    compiling = by_name(host["name"], compiles, bool)
    if not compiling.any():
        return []
    outermost = compiling & (nearest_marked_caller(host["parent"].to_numpy(), compiling) < 0)
    events = host[outermost]
    steps = step_at(events["start"].to_numpy(), timeline.steps)
    spans = []
    for name, step, start, end in zip(
        events["name"], steps, events["start"], events["until"], strict=True
    ):
        spans.append(Span(COMPILATION, shortened(name, NAME), step, start, end))
    return spans


def median_us(timeline: Timeline) -> float:
    return float((timeline.steps["end"] - timeline.steps["start"]).median())


def of_ranges(timeline: Timeline) -> list[Span]:
    """Ranges of the program that few steps have, and that are long there;
    of nested ones the outermost."""
    host = timeline.host
    is_range = (host["kind"] == ANNOTATION).to_numpy() & host["role"].isna().to_numpy()
    is_range &= (host["thread"] == timeline.thread).to_numpy()
    ranges = host[is_range].assign(row=np.flatnonzero(is_range))
    ranges["step"] = step_at(ranges["start"].to_numpy(), timeline.steps)
    ranges["kind_of_name"] = by_name(ranges["name"], without_numbers)
    ranges = ranges[(ranges["step"] >= 0).to_numpy()]
    us = ranges["until"] - ranges["start"]
    n_steps = ranges.groupby("kind_of_name")["step"].transform("nunique")
    us_of_kind = us.groupby(ranges["kind_of_name"]).transform("sum")
    is_rare = n_steps <= FEW * len(timeline.steps)
    is_long = us_of_kind >= LONG * median_us(timeline) * n_steps
    seldom = (is_rare & is_long).to_numpy(bool)
    marked = np.zeros(len(host), bool)
    marked[ranges["row"][seldom]] = True
    caller = nearest_marked_caller(host["parent"].to_numpy(), marked)[ranges["row"]]
    outermost = ranges[seldom & (caller < 0)]
    spans = []
    for name, step, start, end in zip(
        outermost["name"], outermost["step"], outermost["start"], outermost["until"], strict=True
    ):
        what = seldom_kind(name) or CODE
        spans.append(Span(what, f"in {shortened(name, NAME)}", step, start, end))
    return spans


def without_numbers(name: str) -> str:
    return re.sub(r"\d+", "", name)


def of_code(timeline: Timeline, code: Slices, ranges: list[Span]) -> list[Span]:
    """Code of the program outside of operators that takes far longer than in most steps.  ranges:
    already found."""
    n_steps = len(timeline.steps)
    # What the program waits for in a collective is communication.
    pending = slices_of(collectives_of(timeline).events)
    pending_us = pending.covered_until(code.end) - pending.covered_until(code.start)
    us = code.end - code.start - pending_us
    step = step_at(code.start, timeline.steps)
    inside = step >= 0
    longest_us = np.zeros(n_steps)
    np.maximum.at(longest_us, step[inside], us[inside])
    usual_us = float(np.median(longest_us))
    known = Slices(
        np.array([span.start for span in ranges], float),
        np.array([span.end for span in ranges], float),
    )
    is_known = known.at((code.start + code.end) / 2) >= 0
    is_long = us > max(LONG * median_us(timeline), FAR_LONGER * usual_us)
    far_longer = inside & is_long & ~is_known
    if len(np.unique(step[far_longer])) > FEW * n_steps:
        return []
    spans = []
    for i in np.flatnonzero(far_longer):
        what, where = place_of_code(timeline, code.start[i], code.end[i])
        spans.append(Span(what, where, step[i], code.start[i], code.end[i]))
    return spans


def place_of_code(timeline: Timeline, start: float, end: float) -> tuple[str, str]:
    """What code of the program is at this time, and where: in the innermost range or module around
    it, else before the operator that follows."""
    host = timeline.host
    begin, until = host["start"].to_numpy(), host["until"].to_numpy()
    other = (host["kind"] != OPERATOR).to_numpy() & ~has_role(host, roles.STEP, roles.PHASE)
    around = np.flatnonzero(other & (begin <= start + 1) & (until >= end - 1))
    if len(around):
        name = host["name"].iloc[around[np.argmin((until - begin)[around])]]
        return seldom_kind(name) or CODE, f"in {shortened(name, NAME)}"
    after = np.flatnonzero((host["kind"] == OPERATOR).to_numpy() & (begin >= end - 1))
    if not len(after):
        return CODE, "at the end of the steps"
    return CODE, f"before {shortened(host['name'].iloc[after[np.argmin(begin[after])]], NAME)}"


def once_rows(
    timeline: Timeline, spans: pd.DataFrame, start_up: pd.DataFrame, step_ms: float
) -> list[OnceRow] | None:
    """Most time first; None of a single step, if nothing is known to happen once.

    spans: as occasional() gives them.  start_up: slices of the ledger that are, with the call in
    `where`.  step_ms: of an ordinary step."""
    of_steps = len(timeline.steps) + len(timeline.apart)
    rows = []
    for step in timeline.apart:
        if step.is_first:
            ms = (step.end - step.start - median_us(timeline)) / 1e3
            rows.append(once_row(FIRST_STEP, f"step {step.number}", 1, of_steps, ms))
    in_all_steps = {}
    for kind in seldom_seen(timeline, FEW):
        in_all_steps[kind.what, in_program(kind)] = kind
        row = once_row(kind.what, in_program(kind), kind.steps, kind.of_steps, kind.ms)
        rows.append(row)
    for (what, where), same in spans.groupby(["what", "where"], sort=False):
        if (what, where) in in_all_steps:
            continue
        steps = same["step"].nunique()
        ms = float((same["end"] - same["start"]).sum()) / 1e3 / steps
        rows.append(once_row(what, where, steps, of_steps, ms))
    for where, same in start_up.groupby("where", sort=False, observed=True):
        steps = same["step"].nunique()
        ms = float(same["us"].sum()) / 1e3 / steps
        rows.append(once_row(START_UP, where, steps, of_steps, ms))
    rows = [row for row in rows if row.ms_per_step >= WORTH_TELLING * step_ms]
    if of_steps == 1 and not rows:
        return None
    return sorted(rows, key=lambda row: -row.ms_per_step)


def once_row(what: str, where: str, steps: int, of_steps: int, ms: float) -> OnceRow:
    return OnceRow(
        what=what,
        where=where,
        steps=steps,
        of_steps=of_steps,
        ms=ms,
        ms_per_step=steps * ms / of_steps,
    )


# ---- For a reader --------------------------------------------------------------------------------

ONCE_COLUMNS = [
    *text_columns("what", "where"),
    Column("steps", lambda row: f"{row.steps} of {row.of_steps}"),
    column("ms", "ms", "~3"),
    column("ms per step", "ms_per_step", "~3"),
]


def once_section(rows: list[OnceRow] | None) -> Section:
    """rows: None where nothing tells what happens once."""
    section = Section("Once, or in a few steps", ONCE_COLUMNS, rows or [])
    if rows:
        section.note = [
            "The times of the step are without these, but where the trace has a single one; a first"
            " step: beyond the others"
        ]
    return section


def once_text(row: OnceRow) -> str:
    """'save (in save_checkpoint) in 1 of 8 steps, 11.0 ms a step'; of a trace of one step without
    these counts."""
    what = f"{row.what} ({row.where})"
    if row.of_steps == 1:
        return f"{what}, {significant(row.ms, 3)} ms"
    steps = count_of(row.of_steps, "step")
    return f"{what} in {row.steps} of {steps}, {significant(row.ms_per_step, 3)} ms a step"
