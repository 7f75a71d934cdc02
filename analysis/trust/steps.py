"""Are the steps of a trace whole?  Their GPU events, their marks, and what the host did in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.attribution.intervals import slices_of
from analysis.trace.links import CLOCK_TICK_US, OPERATOR
from analysis.trace.reasons import TWO_CLOCKS
from analysis.trace.steps import MISSING_KERNELS, step_around, unflushed_launches
from analysis.trace.tables import has_role, take_or
from analysis.trace.timeline import Timeline, cached_on_timeline
from analysis.trust.clocks import early_kernels
from analysis.trust.findings import Findings
from analysis.vocabulary import roles
from analysis.vocabulary.annotations import NO_MARKS
from harness.base.text import count_of
from harness.instruments.phases import summary_stats
from harness.run.run_summary import ONE_STEP
from harness.schema import Document, field

NO_STEPS = f"the trace has {NO_MARKS}"
UNFLUSHED = "recording ended before they were written"


class ProfiledStep(Document):
    number: int = field("as marked, or from 0")
    duration_ms: float = field("on the host")
    gpu_events: int = field("that the step launched")
    kernels_during: int | None = field(
        "kernels that ran while the host was in the step", null=TWO_CLOCKS
    )
    kernels: int = field("kernels that the step launched")
    kernel_launches: int = field("launch calls of the step")
    kernels_of_launches: int = field("launch calls whose kernel is in the trace")
    incomplete: bool = field("events of the step are missing")


class ProfiledSteps(Document):
    mean_ms: float | None = field("on the host", null=NO_STEPS)
    median_ms: float | None = field("on the host", null=NO_STEPS)
    std_ms: float | None = field("sample standard deviation", null=ONE_STEP)
    p95_ms: float | None = field("95th percentile", null=NO_STEPS)
    min_ms: float | None = field("the shortest", null=NO_STEPS)
    max_ms: float | None = field("the longest", null=NO_STEPS)
    count: int = field("steps that are marked")
    overlap_ms: float = field("time that two steps share; the tables count it once")
    rows: list[ProfiledStep] = field("in order")

    @staticmethod
    def contradiction(value: dict) -> str | None:
        """Times are known of steps that are marked, and of no others."""
        for name in ("mean_ms", "median_ms", "min_ms", "max_ms"):
            if (value.get(name) is None) != (value["count"] == 0):
                return f"{name}: is {value.get(name)} of {value['count']} steps"
        return None


def overlap_us(steps: pd.DataFrame) -> float:
    """How much longer steps are together than the time in which any of them ran."""
    ran = slices_of(steps)
    return float((steps["end"] - steps["start"]).sum() - (ran.end - ran.start).sum())


def launches_without_kernel(rows: list[ProfiledStep]) -> int:
    return sum(row.kernel_launches - row.kernels_of_launches for row in rows)


# ---- The steps and their GPU events --------------------------------------------------------------


@cached_on_timeline
def step_rows(timeline: Timeline) -> list[ProfiledStep]:
    """Each step with its GPU events, and whether some of them are missing."""
    steps = timeline.steps
    counts = counts_of_steps(timeline)
    one_clock = not early_kernels(timeline).any()
    durations_ms = (steps["end"] - steps["start"]) / 1e3
    incomplete = incomplete_steps(timeline, counts, one_clock)
    rows = []
    for i in range(len(steps)):
        row = ProfiledStep(
            number=int(steps["number"].iloc[i]),
            duration_ms=float(durations_ms.iloc[i]),
            gpu_events=int(counts.gpu_events[i]),
            kernels_during=int(counts.kernels_during[i]) if one_clock else None,
            kernels=int(counts.kernels[i]),
            kernel_launches=int(counts.launches[i]),
            kernels_of_launches=int(counts.answered[i]),
            incomplete=bool(incomplete[i]),
        )
        rows.append(row)
    return rows


class StepCounts(NamedTuple):
    """What each step has; arrays of [steps]."""

    gpu_events: np.ndarray  # that it launched
    kernels: np.ndarray  # that it launched
    kernels_during: np.ndarray  # that ran during it
    launches: np.ndarray  # calls that launch a kernel
    answered: np.ndarray  # of these, those whose kernel is in the trace
    unflushed: np.ndarray  # of these, at the end of the recording, those whose kernel is not


def counts_of_steps(timeline: Timeline) -> StepCounts:
    gpu, calls, steps = timeline.gpu, timeline.calls, timeline.steps

    def per_step(step: np.ndarray) -> np.ndarray:
        """How many events each step has; step: that of each event, -1 for none."""
        return np.bincount(step[step >= 0], minlength=len(steps))

    is_kernel = (gpu["kind"] == "kernel").to_numpy()
    step_of_event, step_of_call = gpu["step"].to_numpy(), calls["step"].to_numpy()
    starts_kernel = calls["starts_kernel"].to_numpy(bool)
    has_kernel = calls["correlation"].isin(gpu.loc[is_kernel, "correlation"]).to_numpy()
    is_unflushed = unflushed_launches(calls, gpu)
    began, ended = (np.sort(gpu[name].to_numpy()[is_kernel]) for name in ("start", "end"))
    begun_before_end = np.searchsorted(began, steps["end"])
    ended_before_start = np.searchsorted(ended, steps["start"], side="right")
    # A step and a kernel without length could make it negative.
    during = np.maximum(begun_before_end - ended_before_start, 0)
    return StepCounts(
        gpu_events=per_step(step_of_event),
        kernels=per_step(step_of_event[is_kernel]),
        kernels_during=during,
        launches=per_step(step_of_call[starts_kernel]),
        answered=per_step(step_of_call[starts_kernel & has_kernel]),
        unflushed=per_step(step_of_call[is_unflushed]),
    )


def incomplete_steps(timeline: Timeline, counts: StepCounts, one_clock: bool) -> np.ndarray:
    """[steps], whether GPU events of the step are missing: of the kernels that it launched too
    many, or, of several steps, all that should have run meanwhile."""
    steps = timeline.steps
    lost = counts.launches - counts.answered - counts.unflushed
    is_incomplete = lost > MISSING_KERNELS * counts.launches
    if len(steps) < 2 or not (timeline.gpu["kind"] == "kernel").any():
        return is_incomplete
    is_incomplete[counts.kernels == 0] = True
    if one_clock:
        # A GPU that runs behind the host still runs kernels of earlier steps.
        was_queued = queued_until(timeline)
        for i in np.flatnonzero(counts.kernels_during == 0):
            if was_queued(steps["start"].iloc[i], steps["end"].iloc[i]):
                is_incomplete[i] = True
    return is_incomplete


def queued_until(timeline: Timeline) -> Callable[[float, float], bool]:
    """Whether the GPU, having run before, had work queued throughout a time: the kernel that
    follows was launched before it, or before the trace began."""
    kernels = timeline.gpu[(timeline.gpu["kind"] == "kernel").to_numpy()].sort_values("start")
    starts, launched = kernels["start"].to_numpy(), kernels["launched"].fillna(-np.inf).to_numpy()
    with_call = (kernels["call"] >= 0).to_numpy() | (kernels["correlation"] > 0).to_numpy()

    def queued(start: float, end: float) -> bool:
        after = int(np.searchsorted(starts, end))
        return 0 < after < len(starts) and bool(with_call[after]) and launched[after] < start

    return queued


def check_steps(found: Findings, timeline: Timeline) -> None:
    """Steps that lack GPU events, that stand apart, or whose marks overlap."""
    rows = step_rows(timeline)
    check_kernels_of_steps(found, timeline, rows)
    for step in timeline.apart:
        why = f"kernels of it are missing: {UNFLUSHED}"
        if step.is_first:
            length_ms = (step.end - step.start) / 1e3
            why = f"{length_ms:,.1f} ms on the host, far longer than the others"
        judged = count_of(len(timeline.steps), "step")
        found.notes.append(f"step {step.number} stands apart, {judged} judged: {why}")
    check_begin(found, timeline, rows)
    n_judged = len(timeline.steps) + len(timeline.apart) if timeline.steps_are_marked else 0
    for number in timeline.trace.steps["number"].iloc[n_judged:]:
        found.notes.append(
            f"step {number} was marked as recording ended, before any of its work: it is no step"
            " here"
        )
    shared_us = overlap_us(timeline.steps)
    if shared_us > CLOCK_TICK_US:
        found.problems.append(
            "the step marks overlap: two profilers were recording, or traces were merged into one"
            " whose events tell no rank, so the steps cannot be told apart; the"
            f" {shared_us / 1e3:.3f} ms that they share count once"
        )


def check_kernels_of_steps(found: Findings, timeline: Timeline, rows: list[ProfiledStep]) -> None:
    """Launches whose kernel is not in the trace, and steps that lack too many."""
    incomplete = [row for row in rows if row.incomplete]
    lost = launches_without_kernel(incomplete or rows)
    if incomplete:
        numbers = ", ".join(str(row.number) for row in incomplete)
        what = "they have none, or none ran while work was queued"
        if lost:
            what = f"{lost} launches have no kernel"
        found.problems.append(
            f"GPU events are missing from {len(incomplete)} of {len(rows)} steps ({numbers}):"
            f" {what}"
        )
    elif lost:
        note = f"{lost} kernel launches in the steps have no matching kernel in the trace"
        found.notes.append(f"{note}: {UNFLUSHED}" if timeline.unflushed else note)


def check_begin(found: Findings, timeline: Timeline, rows: list[ProfiledStep]) -> None:
    """Work from before the trace that the GPU still did in the first of several steps."""
    if len(rows) < 2 or not rows[0].kernels or rows[0].kernels_during:
        return
    kernels = timeline.gpu[(timeline.gpu["kind"] == "kernel").to_numpy()].sort_values("start")
    if kernels["call"].iloc[0] < 0:
        late_ms = (kernels["start"].iloc[0] - timeline.steps["start"].iloc[0]) / 1e3
        found.notes.append(
            f"GPU events begin {late_ms:.1f} ms after the first step, although work was queued:"
            " what ran until then, from before the trace, was not recorded"
        )


# ---- The host in the steps -----------------------------------------------------------------------


def check_host(found: Findings, timeline: Timeline) -> None:
    """Events of the host that go on after what they began in, and steps in which nothing began."""
    host, steps = timeline.host, timeline.steps
    goes_on = (host["end"] - host["until"] > CLOCK_TICK_US).to_numpy()
    if overlap_us(steps) > CLOCK_TICK_US:  # told already, and why events go on after a mark
        in_mark = take_or(has_role(host, roles.STEP), host["parent"].to_numpy(), False)
        goes_on = goes_on & ~in_mark
    if goes_on.any():
        found.notes.append(
            f"{count_of(int(goes_on.sum()), 'event')} of the host ends after its caller, as after a"
            " clock was set back; the time beyond is not counted"
        )
    if not (steps["end"] > steps["start"]).any():
        found.problems.append("the steps take no time")
    if not timeline.on_gpu:
        check_operators_of_host(found, timeline)


def check_operators_of_host(found: Findings, timeline: Timeline) -> None:
    """Of a CPU: operators beyond the end of their step, and steps without any."""
    host, steps = timeline.host, timeline.steps
    operators = host[(host["kind"] == OPERATOR).to_numpy()]
    step = step_around(operators["start"].to_numpy(), steps)
    is_beyond = operators["until"] > steps["end"].to_numpy()[step] + CLOCK_TICK_US
    n_beyond = int(((step >= 0) & is_beyond).sum())
    if n_beyond:
        found.notes.append(
            f"{count_of(n_beyond, 'operator')} counted only until the end of the step"
        )
    is_empty = np.bincount(step[step >= 0], minlength=len(steps)) == 0
    empty = steps["number"][is_empty]
    if timeline.steps_are_marked and len(empty):
        numbers = ", ".join(map(str, empty))
        found.notes.append(f"no operator began in {count_of(len(empty), 'step')}: {numbers}")


# ---- How long they are, and where they come from -------------------------------------------------


def profiled_steps(timeline: Timeline) -> ProfiledSteps:
    """Durations of the profiled steps on the host, and their spread."""
    rows = step_rows(timeline)
    durations_ms = [row.duration_ms for row in rows] if timeline.steps_are_marked else []
    spread = summary_stats(durations_ms)
    return ProfiledSteps(
        mean_ms=spread["mean"],
        median_ms=spread["median"],
        std_ms=spread["std"],
        p95_ms=spread["p95"],
        min_ms=min(durations_ms, default=None),
        max_ms=max(durations_ms, default=None),
        count=spread["count"],
        overlap_ms=overlap_us(timeline.steps) / 1e3,
        rows=rows,
    )


def how_found(timeline: Timeline) -> str | None:
    """Where the steps come from that no ProfilerStep marks."""
    if timeline.trace.steps_from and timeline.steps_are_marked:
        return f"steps from one {timeline.trace.steps_from} to the next (--steps-from)"
    if not timeline.steps_are_marked:
        return f"{NO_MARKS}, and no work that repeats: the entire trace counts as one step"
    if timeline.steps_found is None:
        return None
    first_ms, last_ms = timeline.steps["start"].iloc[0] / 1e3, timeline.steps["end"].iloc[-1] / 1e3
    return (
        f"{NO_MARKS}: {len(timeline.steps)} steps were found, {timeline.steps_found}, from"
        f" {first_ms:,.1f} to {last_ms:,.1f} ms; only they are judged, and --steps-from NAME"
        " chooses others"
    )
