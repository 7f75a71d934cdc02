"""Straggler detection: the ranks of one run side by side, which of them holds up the others, and
why.

What counts is the waiting that a rank causes, not how often it is last: most collectives begin
within microseconds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from typing_extensions import NotRequired

from analysis.attribution.collectives import StepCommunication
from analysis.attribution.components import COMMUNICATION
from analysis.attribution.operators import KernelRow
from analysis.diagnosis.arrivals import Comparison, Lateness, RankTrace
from analysis.diagnosis.verdict import Verdict
from analysis.trace.reasons import NO_COLLECTIVES, NO_GPU, NO_MEMORY
from analysis.trust.steps import NO_STEPS
from analysis.vocabulary.bounds import LATE_BY_BOUND, LatePart
from harness.base.sections import Section
from harness.base.tables import Column, column
from harness.base.text import count_of
from harness.schema import ABSENT, Document, Unknown, field

WORTH_NAMING = 0.01  # of the time: less waiting than this makes no straggler
# Of what a straggler costs: by less than this no part of its step explains it.
WORTH_BLAMING = 0.25


class RankRow(Document):
    rank: int = field("its number")
    file: str = field("its trace")
    mean_step_ms: float | None = field("on the host", null=NO_STEPS)
    bound: NotRequired[str] = field("as in verdict")
    ms_per_step: NotRequired[float] = field("as in attribution")
    gpu_busy_ms: float | None = field("per step", null=NO_GPU)
    peak_memory_mb: NotRequired[float | None] = field(
        "MB, by the summary of the run or by the trace", null=NO_MEMORY
    )
    in_collectives_ms: float = field("per step")
    collectives: int = field("in the steps")
    exposed_comm_ms: NotRequired[float | None] = field("per step", null=NO_COLLECTIVES)
    waiting_ms: NotRequired[float | None] = field(
        "per step, of exposed_comm_ms", null=NO_COLLECTIVES
    )
    parts_ms: NotRequired[dict[str, float]] = field(
        "per step, communication apart: work, its verdict's shares, idle"
    )
    kernels_per_step: NotRequired[float | None] = field("communication apart", null=NO_GPU)
    clock_offset_us: NotRequired[float] = field(
        "of its clock against that of the first; here and below: if compared"
    )
    mean_lateness_us: NotRequired[float] = field(
        "after the first to arrive, over the collectives compared"
    )
    median_lateness_us: NotRequired[float] = field("the same")
    caused_waiting_ms: NotRequired[float] = field("per step, in which only this rank was missing")
    last_to_arrive: NotRequired[int] = field(
        "collectives in which ranks arrived apart, and this one last"
    )


class Ranks(Document):
    rows: list[RankRow] = field("one for each trace")
    one_clock: NotRequired[bool] = field(
        "of their host; false: clocks were aligned by the ends of collectives"
    )
    caution: NotRequired[str] = field(
        "what is not compared, or what else was waited for; absent: nothing"
    )
    collectives_compared: int = field("in the steps")
    steps_compared: NotRequired[int] = field("that all ranks recorded")
    collectives_with_spread: NotRequired[int] = field(
        "in which ranks arrived further apart than clocks may differ"
    )
    excess_waiting_ms: NotRequired[float] = field("per step, caused by all ranks together")
    straggler: int | None = field(
        "rank", null="no rank causes more than half of the excess waiting"
    )
    straggler_why: NotRequired[str] = field(
        "the part of its step that differs most; absent: no straggler"
    )
    straggler_saves_ms: NotRequired[float] = field(
        "per step, of what computation does not hide, if it was as fast"
    )
    straggler_next: NotRequired[str] = field("what to do about it")


# ---- Side by side --------------------------------------------------------------------------------


class OwnAnswers(NamedTuple):
    """What the trace of one rank tells alone, with what the others tell of its communication."""

    step_ms: float
    verdict: Verdict
    communication: StepCommunication | None
    kernels: list[KernelRow]
    peak_mb: float | None  # of memory


def compare_ranks(
    traces: list[RankTrace], comparison: Comparison, own: list[OwnAnswers], run: dict | None
) -> Ranks:
    """Step times, communication and lateness of each rank; the straggler, if one causes most of the
    waiting.

    All of it is of the steps: times are those of one, and collectives are counted over all of them.
    own: of each trace.  run: performance_summary.json of the run, which has the memory of every
    rank.
    """
    peaks_mb, lateness, rows = memory_of_ranks(run), comparison.lateness, []
    for i, (trace, answers) in enumerate(zip(traces, own, strict=True)):
        late = NOT_COMPARED if lateness is None else late_rank(lateness, i)
        peak_mb = peaks_mb.get(trace.rank)
        rows.append(rank_row(trace, answers, answers.peak_mb if peak_mb is None else peak_mb, late))
    if lateness is None:
        return Ranks(rows=rows, collectives_compared=0, straggler=Unknown(comparison.why))
    number, why = straggler_of(traces, rows, lateness)
    return Ranks(
        rows=rows,
        one_clock=lateness.one_clock,
        caution=lateness.caution or ABSENT,
        collectives_compared=lateness.late_us.shape[1],
        steps_compared=lateness.n_steps,
        collectives_with_spread=lateness.n_apart,
        excess_waiting_ms=float(lateness.caused_ms.sum()),
        straggler=number,
        straggler_why=why.why if why else ABSENT,
        straggler_saves_ms=why.saves_ms if why else ABSENT,
        straggler_next=why.cure if why else ABSENT,
    )


def memory_of_ranks(run: dict | None) -> dict[int, float]:
    """The peak of each rank in MB, as the run measured."""
    measured = run and run.get("ranks")
    return {row["rank"]: row["peak_memory_mb"] for row in measured or ()}


class LateRank(NamedTuple):
    """How late one rank is, as a row tells it."""

    clock_offset_us: float
    mean_us: float
    median_us: float
    caused_ms: float
    times_last: int


NOT_COMPARED = LateRank(ABSENT, ABSENT, ABSENT, ABSENT, ABSENT)


def late_rank(lateness: Lateness, i: int) -> LateRank:
    return LateRank(
        clock_offset_us=float(lateness.clock_offsets_us[i]),
        mean_us=float(lateness.late_us[i].mean()),
        median_us=float(np.median(lateness.late_us[i])),
        caused_ms=float(lateness.caused_ms[i]),
        times_last=int(lateness.times_last[i]),
    )


def rank_row(trace: RankTrace, own: OwnAnswers, peak_mb: float | None, late: LateRank) -> RankRow:
    """peak_mb: of its memory, as the run measured, else by its trace."""
    is_in_step = (trace.found.events["step"] >= 0).to_numpy()
    in_collectives_us = trace.durations()[is_in_step].sum()
    exposed_ms, waiting_ms = None, None
    if own.communication:
        exposed_ms, waiting_ms = own.communication.exposed_ms, own.communication.waiting_ms
        if waiting_ms is None:
            waiting_ms = Unknown(own.communication.reason_of("waiting_ms"))
    return RankRow(
        rank=trace.rank,
        file=trace.file,
        mean_step_ms=trace.mean_step_ms,
        bound=own.verdict.bound,
        ms_per_step=own.step_ms,
        gpu_busy_ms=trace.busy_ms,
        peak_memory_mb=peak_mb,
        in_collectives_ms=float(in_collectives_us / 1e3 / trace.n_steps),
        collectives=int(is_in_step.sum()),
        exposed_comm_ms=exposed_ms,
        waiting_ms=waiting_ms,
        parts_ms=parts_of_step(own.verdict, own.step_ms),
        kernels_per_step=kernels_per_step(own.kernels),
        clock_offset_us=late.clock_offset_us,
        mean_lateness_us=late.mean_us,
        median_lateness_us=late.median_us,
        caused_waiting_ms=late.caused_ms,
        last_to_arrive=late.times_last,
    )


def parts_of_step(verdict: Verdict, step_ms: float) -> dict[str, float]:
    """What a rank's own trace has beside the others', communication apart: ms of a step."""
    shares = verdict.shares
    work = shares["compute"] + shares["memory"] + verdict.unclassified_share
    parts_ms = {WORK: work * step_ms}
    for name, share in shares.items():
        if name in LATE_BY_BOUND:
            parts_ms[name] = share * step_ms
    parts_ms[IDLE] = verdict.unrecorded_idle_share * step_ms
    return parts_ms


def kernels_per_step(kernels: list[KernelRow]) -> float | None:
    """Communication apart; None without a GPU."""
    counts = [row.count_per_step for row in kernels if row.category != COMMUNICATION]
    return sum(counts) if counts else None


def straggler_of(
    traces: list[RankTrace], rows: list[RankRow], lateness: Lateness
) -> tuple[int | Unknown, Late | None]:
    """The rank that causes most of the excess waiting, and why it is late; or why none is named."""
    absent = (traces[0].world_size or len(traces)) - len(traces)
    if absent:
        return Unknown(f"{count_of(absent, 'rank')} of the run absent, which may be it"), None
    caused_ms = lateness.caused_ms
    worst, total_ms = int(caused_ms.argmax()), caused_ms.sum()
    if total_ms < WORTH_NAMING * lateness.compared_ms:
        return Unknown(f"ranks wait for one another for only {total_ms:.3f} ms per step"), None
    if caused_ms[worst] <= total_ms / 2 or lateness.times_last[worst] < 2:
        return Unknown("no rank causes more than half of the excess waiting"), None
    others = [row for i, row in enumerate(rows) if i != worst]
    return traces[worst].rank, why_late(rows[worst], others)


# ---- Why it is late ------------------------------------------------------------------------------


# Of which a late rank has more than the others, beside its bounds.
WORK, IDLE = "work", "idle"
LATE_PARTS = {
    WORK: LatePart(
        why="its {events} take longer",
        cure=(
            "compare clocks, temperature and other programs of its device (nvidia-smi -q or"
            " rocm-smi -a) and its shapes"
        ),
    ),
    **LATE_BY_BOUND,
    IDLE: LatePart(
        why="it is idle for no recorded reason",
        cure="record it with its calls: activities=[CPU, CUDA]",
    ),
}
NO_PART = LatePart(
    why="no part of its own step is longer",
    cure="measure its network and its steps alone: ./run_study.sh collectives",
)


class Late(NamedTuple):
    """Why a straggler is late."""

    why: str
    saves_ms: float  # of a step of each of the others
    cure: str


def why_late(own: RankRow, others: list[RankRow]) -> Late:
    """In which part of its step a straggler differs most from the median of the others."""
    # What a computation hides of the waiting costs nothing.
    saves_ms = own.caused_waiting_ms
    waits_ms = [row.waiting_ms for row in others if row.waiting_ms is not None]
    if waits_ms:
        saves_ms = min(saves_ms, float(np.median(waits_ms)))
    usual_ms, more_ms = {}, {}
    for name, ms in own.parts_ms.items():
        usual_ms[name] = float(np.median([row.parts_ms[name] for row in others]))
        more_ms[name] = ms - usual_ms[name]
    part = max(more_ms, key=more_ms.get)
    if more_ms[part] < WORTH_BLAMING * own.caused_waiting_ms:
        return Late(NO_PART.why, saves_ms, NO_PART.cure)
    figures = f"{own.parts_ms[part]:.2f} ms of a step, the others' median {usual_ms[part]:.2f}"
    events = "operators"
    if own.kernels_per_step:
        events = "kernels"
        if part == WORK:
            usual = float(np.median([row.kernels_per_step for row in others]))
            figures += f"; kernels {own.kernels_per_step:,.0f}, {usual:,.0f}"
    why = LATE_PARTS[part].why.format(events=events)
    return Late(f"{why} ({figures})", saves_ms, LATE_PARTS[part].cure)


# ---- For a reader --------------------------------------------------------------------------------


def rank_columns(ranks: Ranks) -> list[Column]:
    columns = [
        column("rank", "rank"),
        column("host ms", "mean_step_ms", "~3"),
        column("GPU busy ms", "gpu_busy_ms", "~3"),
        column("peak MB", "peak_memory_mb", "~1"),
        column("exposed ms", "exposed_comm_ms", "~3"),
        column("waits ms", "waiting_ms", "~3"),
    ]
    if ranks.collectives_compared:
        steps = count_of(ranks.steps_compared, "step")
        columns += [
            column("causes ms", "caused_waiting_ms", "~3"),
            column(f"last in {steps}", "last_to_arrive"),
            column("late us", "mean_lateness_us", "~1"),
            column("clock offset us", "clock_offset_us", "~1"),
        ]
    return [*columns, column("bound", "bound", left=True)]


def compared_text(ranks: Ranks) -> str:
    """'56 collectives in 4 steps'; '' where none could be compared."""
    if not ranks.collectives_compared:
        return ""
    collectives = count_of(ranks.collectives_compared, "collective")
    return f"{collectives} in {count_of(ranks.steps_compared, 'step')}"


def straggler_text(ranks: Ranks) -> str:
    caution = f"; {ranks.caution}" if ranks.caution else ""
    if ranks.straggler is None:
        return f"No straggler: {ranks.reason_of('straggler')}{caution}"
    row = next(row for row in ranks.rows if row.rank == ranks.straggler)
    return (
        f"Rank {row.rank} is a straggler: it causes {row.caused_waiting_ms:.2f} of"
        f" {ranks.excess_waiting_ms:.2f} ms per step in which one rank is missing, last in"
        f" {row.last_to_arrive} of {ranks.collectives_with_spread} that ranks reach"
        f" apart, of {compared_text(ranks)}; {ranks.straggler_why}{caution}"
    )


def rank_section(ranks: Ranks | None) -> Section:
    """The ranks side by side, and the straggler; empty for a single trace."""
    if not ranks:
        return Section("Ranks")
    note = "All ms are of one step"
    compared = compared_text(ranks)
    if compared:
        clocks = "clocks aligned by the ends of collectives"
        if ranks.one_clock:
            clocks = "the clock of their host"
        note += f"; last: how often to arrive, late: mean, of {compared}, on {clocks}"
    return Section(
        "Ranks",
        rank_columns(ranks),
        ranks.rows,
        [note],
        {"Straggler": straggler_text(ranks)},
        figure="ranks",
    )
