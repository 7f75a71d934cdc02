"""What made the profiled steps slower than others?  Other programs of the machine, and the profiler
itself, by the run's own measurement."""

from __future__ import annotations

import re
from typing import NamedTuple

import pandas as pd
from typing_extensions import NotRequired

from analysis.trace.timeline import Timeline
from analysis.trust.findings import Findings
from harness.run.run_summary import ONE_STEP
from harness.schema import Document, Unknown, field

# Times as long as without the profiler: from here on the trace shows mostly its overhead.
SLOWED = 1.5
MEASURABLE = 0.05  # by which profiled steps may be faster than others without anything wrong
SECTIONS_OF_TIMES = ("verdict", "components", "operators", "opportunities")
UNDISTURBED = "none seen"

NO_SUMMARY = "no performance_summary.json next to the trace"


class ProfileDisturbance(Document):
    text: str | None = field("what disturbed the profiled steps, or none seen", null=NO_SUMMARY)
    lost_share: float | None = field(
        "of the disturbed steps, that is due to waiting at most", null=NO_SUMMARY
    )

    @property
    def is_seen(self) -> bool:
        return self.text not in (None, UNDISTURBED)


class ProfilerOverhead(Document):
    ratio: float | None = field("of medians, profiled to unprofiled", null=NO_SUMMARY)
    idle_left: float = field(
        "of the GPU's recorded idle time, what counts, as steps without the profiler have no more"
    )
    profiled_median_ms: NotRequired[float] = field(
        "of the steps in the trace; these are absent without a ratio"
    )
    profiled_steps: NotRequired[int] = field("in the trace")
    unprofiled_median_ms: NotRequired[float] = field("of the averaged steps")
    unprofiled_std_ms: NotRequired[float | None] = field("sample standard deviation", null=ONE_STEP)
    unprofiled_steps: NotRequired[int] = field("averaged")


class RunSteps(NamedTuple):
    """The steps of the run that a trace is of."""

    table: pd.DataFrame  # of its summary
    in_trace: pd.Series  # [steps], whether the trace has them


def steps_of_run(timeline: Timeline) -> RunSteps | None:
    """By the numbers in the name of the trace's file; None without the run's summary."""
    trace, summary = timeline.trace, timeline.context.summary
    window = re.search(r"trace_step_(\d+)_(\d+)|^system_profile", trace.path.name)
    if summary is None or window is None:
        return None
    table = pd.DataFrame(summary["steps"])
    if not window[1]:  # a system profiler's file has no numbers in its name
        return RunSteps(table, table["exclusion_reason"] == "profiled")
    first, last = map(int, window.groups())
    # Of a part of a trace, its steps alone; those of --steps-from have no numbers of the run.
    numbers = table["step"]
    if trace.steps_from is None and len(trace.steps):
        numbers = trace.steps["number"]
    return RunSteps(table, table["step"].between(first + 1, last) & table["step"].isin(numbers))


def profile_disturbance(timeline: Timeline) -> ProfileDisturbance:
    """How far the profiled steps were disturbed."""
    of_run = steps_of_run(timeline)
    if of_run is None:
        return ProfileDisturbance(text=None, lost_share=None)
    disturbance = timeline.context.summary.get("disturbance")
    if "disturbed" not in of_run.table or not disturbance:
        why = Unknown("the run did not measure it")
        return ProfileDisturbance(text=why, lost_share=why)
    steps = of_run.table[of_run.in_trace]
    waited = steps[steps["disturbed"].eq(True)].dropna(subset="waited_share")
    if len(waited):
        text = (
            f"{waited['waited_share'].mean():.0%} of thread time waited for a core in"
            f" {len(waited)} of {len(steps)} steps"
        )
        lost_share = float(waited["lost_share"].sum() / len(steps))
        return ProfileDisturbance(text=text, lost_share=lost_share)
    if disturbance["disturbed"] is None:
        why = Unknown(disturbance["disturbed_reason"])
        return ProfileDisturbance(text=why, lost_share=why)
    # Waiting in other steps does not concern the trace.  Of another rank it is not known here in
    # which steps it waited.
    others = []
    for reason in disturbance["reasons"]:
        if "waited for a core" not in reason or re.match("rank [1-9]", reason):
            others.append(reason)
    return ProfileDisturbance(text="; ".join(others) or UNDISTURBED, lost_share=0.0)


def profiler_overhead(timeline: Timeline) -> ProfilerOverhead:
    """Profiled steps compared with the unprofiled ones of the same run."""
    idle_left = timeline.idle_left
    of_run = steps_of_run(timeline)
    if of_run is None:
        return ProfilerOverhead(ratio=None, idle_left=idle_left)
    table = of_run.table
    profiled_ms = table[of_run.in_trace]["time_ms"]
    free_ms = table[table["exclusion_reason"].isna()]["time_ms"]
    if profiled_ms.empty or free_ms.empty:
        why = Unknown("every step of the run except the first had an instrument")
        return ProfilerOverhead(ratio=why, idle_left=idle_left)
    return ProfilerOverhead(
        ratio=float(profiled_ms.median() / free_ms.median()),
        idle_left=idle_left,
        profiled_median_ms=float(profiled_ms.median()),
        profiled_steps=len(profiled_ms),
        unprofiled_median_ms=float(free_ms.median()),
        unprofiled_std_ms=float(free_ms.std()) if len(free_ms) > 1 else None,
        unprofiled_steps=len(free_ms),
    )


def sure_overhead(timeline: Timeline) -> float | None:
    """How many times as long the fastest profiled step is as the slowest unprofiled one: what the
    spread of both does not explain; None: not known."""
    of_run = steps_of_run(timeline)
    if of_run is None:
        return None
    profiled_ms = of_run.table[of_run.in_trace]["time_ms"]
    free_ms = of_run.table[of_run.table["exclusion_reason"].isna()]["time_ms"]
    if profiled_ms.empty or free_ms.empty:
        return None
    return float(profiled_ms.min() / free_ms.max())


def check_times(
    found: Findings, disturbance: ProfileDisturbance, overhead: float | None, corrected: bool
) -> None:
    """What makes the times of these sections doubtful.

    overhead: times as long as without the profiler, at least.  corrected: idle time is as without
    it, so that only the host's times in the table of operators are longer."""
    if overhead is not None and overhead > SLOWED:
        slowed = ("operators",) if corrected else SECTIONS_OF_TIMES
        for section in slowed:
            found.doubt_too(
                f"the profiler made these steps at least {overhead:.1f} times as long, some"
                " operators more than others",
                section,
            )
    if disturbance.is_seen:
        text = disturbed_text(disturbance.text, disturbance.lost_share)
        for section in SECTIONS_OF_TIMES:
            found.doubt_too(f"disturbed: {text}", section)


# ---- For a reader --------------------------------------------------------------------------------


def disturbed_text(text: str, lost_share: float | None) -> str:
    return f"{text}, up to {lost_share:.0%} of their time" if lost_share else text


def profile_disturbance_text(disturbance: ProfileDisturbance) -> str:
    if disturbance.text is None:
        return f"unknown: {disturbance.reason_of('text')}"
    return disturbed_text(disturbance.text, disturbance.lost_share)


def overhead_text(overhead: ProfilerOverhead) -> str:
    if overhead.ratio is None:
        return f"unknown: {overhead.reason_of('ratio')}"
    if overhead.ratio < 1 - MEASURABLE:
        return (
            f"not measurable here: {overhead.ratio:.2f}x, so that steps without the profiler"
            " were disturbed more"
        )
    text = (
        f"{overhead.ratio:.2f}x: {overhead.profiled_median_ms:.2f} ms profiled,"
        f" {overhead.unprofiled_median_ms:.2f} ms unprofiled (medians of"
        f" {overhead.profiled_steps} and {overhead.unprofiled_steps} steps)"
    )
    if overhead.idle_left < 1:
        text += f"; {overhead.idle_left:.0%} of the GPU's idle time counts, as without it"
    return text
