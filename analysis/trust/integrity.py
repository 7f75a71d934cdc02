"""How far can a trace be trusted?  What is missing, and which figures that makes unreliable."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.attribution.components import NAMED_RANGES
from analysis.attribution.intervals import slices_of
from analysis.attribution.ledger import idle_by_cause, left_out, of_steps
from analysis.trace.links import CLOCK_TICK_US, OPERATOR, launched_before_trace
from analysis.trace.steps import MISSING_KERNELS, step_around, unflushed_launches
from analysis.trace.tables import Trace, has_role, take_or
from analysis.trace.timeline import Timeline, cached_on_timeline
from analysis.trust.missing_from_trace import missing_lines, not_recorded
from analysis.vocabulary import roles
from analysis.vocabulary.annotations import NO_MARKS
from harness.base.documents import documents_beside
from harness.base.text import count_of, shortened
from harness.documents.flops import FlopsProfile
from harness.documents.trace import NO_SUMMARY
from harness.run.run_summary import PerformanceSummary
from harness.schema import unknown

# A healthy trace has the kernel of every launch and the launch of every kernel that began in the
# window.
UNLINKED_KERNELS = 0.05  # of the GPU events whose launch is in the trace
UNEXPLAINED = 0.05  # of the steps: idle time without a recorded cause, from which on it is told
LITTLE = 0.01  # of the time of the trace: what shorter steps show says nothing of the program
SLOWED = (
    1.5  # times as long as without the profiler: from here on the trace shows mostly its overhead
)
CLOCK_ERROR_US = 5.0  # by which a kernel may seem to begin before its launch call does
BOTH_CLOCKS = (
    "idle_by_cause",
    "launch_delay_us",
    "queue_depth",
    "step_timeline",
)  # compare times of GPU and host

# Sections that distorted times make unreliable.
SECTIONS_OF_TIMES = ("verdict", "components", "operators", "opportunities")
UNDISTURBED = "none seen"
UNFLUSHED = "recording ended before they were written"
MEASURABLE = 0.05  # by which profiled steps may be faster than others without anything wrong
# Of the documents beside a trace, the fields that its analysis reads.
OF_SUMMARY = (
    "environment",
    "config",
    "steps",
    "disturbance?.disturbed",
    "disturbance?.reasons",
    "no_sync",
    "ranks?",
)
OF_SUMMARY += ("performance.achieved_tflops",)
OF_FLOPS = ("environment", "efficiency_metrics.peaks", "efficiency_metrics.bandwidth_peaks")


@dataclass
class Findings:
    """What is wrong with a trace, and what follows from it."""

    problems: list[str] = field(default_factory=list)  # make the trace untrustworthy
    notes: list[str] = field(default_factory=list)  # questions that the trace cannot answer
    unreliable: dict[str, str] = field(default_factory=dict)  # sections of the analysis, and why


def integrity(timeline: Timeline) -> dict:
    """What a trace contains and lacks."""
    trace, gpu, calls = timeline.trace, timeline.gpu, timeline.calls
    rows, overhead = step_rows(timeline), profiler_overhead(timeline)
    early = launched_before_trace(gpu, calls)
    # Copies without any number were requested by the device itself.
    of_host = (
        (gpu["kind"] == "kernel") | (gpu["correlation"] > 0) | (gpu["external_id"] > 0)
    ).to_numpy() & ~early
    linked = float((gpu["operator"] >= 0)[of_host].mean()) if of_host.any() else None
    outside = of_host & ((gpu["operator"] < 0) & (gpu["call"] >= 0) & ~gpu["of_graph"]).to_numpy()
    outside &= timeline.first_replayed > 0
    has_shapes = bool((trace.operators["signature"] >= 0).any())

    found = Findings()
    check_file(found, trace)
    check_steps(found, timeline, rows)
    check_host(found, timeline)
    check_operators(found, timeline, linked, outside, int(early.sum()))
    check_clocks(found, timeline)
    check_gpu(found, timeline)
    unused = unused_gpu(timeline)
    if unused:
        what = (
            f"nothing in the trace used the GPU of this machine ({unused}), so it is judged as a"
            " run on the CPU"
        )
        found.notes.append(
            f"{what}; of a run that did use it, record its events too: activities=[CPU, CUDA]"
        )
    if note := how_found(timeline):
        found.notes.append(note)
    if trace.n_malformed:
        skipped = f"{trace.n_malformed} of {trace.n_events} events were skipped"
        found.notes.append(f"{skipped}: no name, no time, or an impossible duration")
    found.notes += [f"not read: {line}" for line in left_out_beside(trace.path)]
    unexplained, missing = check_idle(found, timeline), not_recorded(timeline)
    found.notes += missing_lines(
        [row for row in missing if row["part"] != "steps"]
    )  # how_found() tells more
    disturbance = profile_disturbance(timeline)
    check_times(found, disturbance, overhead["ratio"], timeline.idle_left < 1)

    of_graph, attributed = (
        gpu["of_graph"].to_numpy(),
        (gpu["of_graph"] & ~timeline.only_of_graph).to_numpy(),
    )
    out = {"trustworthy": not found.problems, **vars(found), "recorded_by": trace.file.tool}
    out |= {
        "events": trace.n_events,
        "cut_off": trace.file.cut_off,
        "malformed_events": trace.n_malformed,
    }
    out |= {"operators": timeline.first_replayed, "gpu_events": len(gpu)}
    out |= {"steps": len(rows) if timeline.steps_are_marked else 0}
    out |= {
        "steps_without_gpu_events": (
            sum(row["gpu_events"] == 0 for row in rows) if timeline.on_gpu else None
        )
    }
    out |= {"kernel_launches": int(calls["starts_kernel"].sum())}
    out |= {
        "launches_without_kernel": launches_without_kernel(rows),
        "kernels_linked_to_an_operator": linked,
    }
    out |= {
        "kernels_launched_outside_operators": (
            float(outside[of_host].mean()) if of_host.any() else None
        )
    }
    out |= {"gpu_events_launched_before_the_trace": int(early.sum()), **unexplained}
    out |= {"graph_launches": int(calls["starts_graph"].sum()), "graph_events": int(of_graph.sum())}
    out |= {"graph_events_attributed": int(attributed.sum())}
    out |= {"graphs_attributed_through": timeline.replayed.where if timeline.replayed else []}
    out |= {"unused_gpu": unused} if unused else {}
    out |= {
        "rank": trace.rank,
        "ranks_in_file": trace.ranks_in_file,
        "world_size": trace.world_size,
    }
    out |= {"shapes_recorded": has_shapes, "stacks_recorded": trace.file.n_frames > 0}
    out |= {"modules_recorded": len(trace.modules) > 0, "not_recorded": missing}
    return out | {
        "profiler_overhead": overhead | {"idle_left": timeline.idle_left},
        "disturbance": disturbance,
    }


def how_found(timeline: Timeline) -> str | None:
    """Where the steps come from that no ProfilerStep marks."""
    if timeline.trace.steps_from and timeline.steps_are_marked:
        return f"steps from one {timeline.trace.steps_from} to the next (--steps-from)"
    if not timeline.steps_are_marked:
        return f"{NO_MARKS}, and no work that repeats: the entire trace counts as one step"
    if timeline.steps_found is None:
        return None
    first, last = timeline.steps["start"].iloc[0] / 1e3, timeline.steps["end"].iloc[-1] / 1e3
    found = (
        f"{NO_MARKS}: {len(timeline.steps)} steps were found, {timeline.steps_found}, from"
        f" {first:,.1f} to {last:,.1f} ms"
    )
    return f"{found}; only they are judged, and --steps-from NAME chooses others"


def check_file(found: Findings, trace: Trace) -> None:
    """Whether the file is whole, and all of it was read."""
    if trace.file.cut_off:
        after = f"{trace.n_events:,} events: what follows is missing"
        found.problems.append(f"the file is cut off or damaged after {after}")
    if trace.file.has_nan:
        what = "NaN or Infinity, which is no JSON and viewers may refuse: they count as unknown"
        found.notes.append(f"the file contains {what}")
    if trace.ranks_in_file:
        ranks = ", ".join(map(str, trace.ranks_in_file))
        what = (
            "has several processes, taken for"
            if trace.file.command
            else "was merged from the traces of"
        )
        found.notes.append(f"the file {what} ranks {ranks}; this is rank {trace.rank}")
    if trace.steps_in_file is not None and trace.steps_in_file > len(trace.steps):
        found.notes.append(
            f"only the last {len(trace.steps)} of {trace.steps_in_file} marked steps were read"
        )


def check_idle(found: Findings, timeline: Timeline) -> dict:
    """The share of the steps' time in which the GPU was idle for no reason
    that the trace contains."""
    slices = of_steps(timeline)
    total = slices["us"].sum()
    if timeline.on_gpu:
        check_left_out(found, timeline, total)
    if why := found.unreliable.get("idle_by_cause"):
        return unknown(why, "unexplained_share")
    share = idle_by_cause(slices)["unknown"] / total if timeline.on_gpu and total else 0.0
    if share >= UNEXPLAINED:
        why = "the GPU was idle, and no event in the trace says why"
        found.notes.append(f"{share:.1%} of the steps' time is unexplained: {why}")
    return {"unexplained_share": share}


def check_left_out(found: Findings, timeline: Timeline, total: float) -> None:
    """What is no part of the steps, and whether enough is left.  total: us of the steps."""
    out, gpu = left_out(timeline), timeline.gpu
    at_edge = ((out["end"] <= gpu["start"].min()) | (out["start"] >= gpu["end"].max())) & (
        not timeline.steps_are_marked
    )
    why = (
        "began so long after its launch, so the GPU had still to do what was launched before the"
        " recording"
    )
    ends = "the GPU had no work yet, or no more, as wherever a recording begins and ends"
    if total < LITTLE * (total + out["us"].sum()) or len(gpu) == 1:
        ends += (
            f"; what is left is {total / 1e3:,.3f} ms with {count_of(len(gpu), 'GPU event')}:"
            " record more"
        )
    for which, reason in ((~at_edge, f"the first event of a stream {why}"), (at_edge, ends)):
        if which.any():
            found.notes.append(
                f"{out['us'][which].sum() / 1e3:,.3f} ms are left out of the steps: {reason}"
            )


def check_times(
    found: Findings, disturbance: dict, overhead: float | None, corrected: bool
) -> None:
    """What made the steps slower while they were profiled.  overhead: times as long as without the
    profiler; corrected: idle time is as without it, so that only the host's times in the table of
    operators are longer."""
    slower, disturbed = [], []
    if overhead is not None and overhead > SLOWED:
        slower = [
            f"the profiler made these steps {overhead:.1f} times as long, some operators more than"
            " others"
        ]
    if disturbance["text"] not in (None, UNDISTURBED):
        disturbed = [f"disturbed: {profile_disturbance_text(disturbance)}"]
    for section in SECTIONS_OF_TIMES:
        if why := disturbed if corrected and section != "operators" else slower + disturbed:
            found.unreliable[section] = "; ".join(
                [*filter(None, [found.unreliable.get(section)]), *why]
            )


def check_steps(found: Findings, timeline: Timeline, rows: list[dict]) -> None:
    """Steps that lack GPU events, and step marks that overlap."""
    incomplete = [row for row in rows if row["incomplete"]]
    lost = launches_without_kernel(incomplete or rows)
    if incomplete:
        n, numbers = len(incomplete), ", ".join(str(row["number"]) for row in incomplete)
        what = (
            f"{lost} launches have no kernel"
            if lost
            else "they have none, or none ran while work was queued"
        )
        found.problems.append(
            f"GPU events are missing from {n} of {len(rows)} steps ({numbers}): {what}"
        )
    elif timeline.unflushed and lost:
        found.notes.append(
            f"{lost} kernel launches in the steps have no matching kernel in the trace: {UNFLUSHED}"
        )
    elif lost:
        found.notes.append(
            f"{lost} kernel launches in the steps have no matching kernel in the trace"
        )
    for one in timeline.apart:
        why = f"kernels of it are missing: {UNFLUSHED}"
        if one.is_first:
            why = f"{(one.end - one.start) / 1e3:,.1f} ms on the host, far longer than the others"
        found.notes.append(
            f"step {one.number} stands apart, {count_of(len(timeline.steps), 'step')} judged: {why}"
        )
    kernels = timeline.gpu[(timeline.gpu["kind"] == "kernel").to_numpy()].sort_values("start")
    if (
        len(rows) > 1
        and rows[0]["kernels"]
        and not rows[0]["kernels_during"]
        and kernels["call"].iloc[0] < 0
    ):
        late = (kernels["start"].iloc[0] - timeline.steps["start"].iloc[0]) / 1e3
        what = f"GPU events begin {late:.1f} ms after the first step, although work was queued"
        found.notes.append(f"{what}: what ran until then, from before the trace, was not recorded")
    n_judged = len(timeline.steps) + len(timeline.apart) if timeline.steps_are_marked else 0
    for number in timeline.trace.steps["number"].iloc[n_judged:]:
        found.notes.append(
            f"step {number} was marked as recording ended, before any of its work: it is no step"
            " here"
        )
    if (shared_us := overlap_us(timeline.steps)) > CLOCK_TICK_US:
        why = (
            "two profilers were recording, or traces were merged into one whose events tell no rank"
        )
        so = (
            f"the steps cannot be told apart; the {shared_us / 1e3:.3f} ms that they share count"
            " once"
        )
        found.problems.append(f"the step marks overlap: {why}, so {so}")


def overlap_us(steps: pd.DataFrame) -> float:
    """How much longer steps are together than the time in which any of them ran."""
    ran = slices_of(steps)
    return float((steps["end"] - steps["start"]).sum() - (ran.end - ran.start).sum())


def check_host(found: Findings, timeline: Timeline) -> None:
    """Events of the host that go on after what they began in, and steps in which nothing began."""
    host, steps = timeline.host, timeline.steps
    marks_overlap = (
        overlap_us(steps) > CLOCK_TICK_US
    )  # told already, and why events go on after a mark
    in_mark = marks_overlap & take_or(has_role(host, roles.STEP), host["parent"].to_numpy(), False)
    if beyond := int(((host["end"] - host["until"] > CLOCK_TICK_US) & ~in_mark).sum()):
        what = (
            f"{count_of(beyond, 'event')} of the host ends after its caller, as after a clock was"
            " set back"
        )
        found.notes.append(f"{what}; the time beyond is not counted")
    if not (steps["end"] > steps["start"]).any():
        found.problems.append("the steps take no time")
    if timeline.on_gpu:
        return
    operators = host[(host["kind"] == OPERATOR).to_numpy()]
    step = step_around(operators["start"].to_numpy(), steps)
    if beyond := int(
        ((step >= 0) & (operators["until"] > steps["end"].to_numpy()[step] + CLOCK_TICK_US)).sum()
    ):
        found.notes.append(f"{count_of(beyond, 'operator')} counted only until the end of the step")
    empty = steps["number"][np.bincount(step[step >= 0], minlength=len(steps)) == 0]
    if timeline.steps_are_marked and len(empty):
        found.notes.append(
            f"no operator began in {count_of(len(empty), 'step')}: {', '.join(map(str, empty))}"
        )


def check_operators(
    found: Findings, timeline: Timeline, linked: float | None, outside: np.ndarray, early: int
) -> None:
    """Which GPU events belong to an operator.  outside: those that were launched outside of any, as
    extensions do.  early: how many were launched before the trace began.

    What no operator launched has run all the same: it counts in the verdict,
    by the names of kernels."""
    gpu, n_operators = timeline.gpu, timeline.first_replayed
    launches, graphs = (
        int(timeline.calls["starts_kernel"].sum()),
        int(timeline.calls["starts_graph"].sum()),
    )
    if n_operators and linked is not None and linked < 1 - UNLINKED_KERNELS:
        why = f"{1 - linked:.0%} of the GPU events of the steps are linked to no operator"
        found.unreliable |= {"components": why, "operators": why}
        if graphs == 0:
            found.notes.append(unlinked_text(gpu, outside, why))
    if timeline.on_gpu and not n_operators:
        what = (
            "only GPU events, no operators: what launched the kernels, and why the GPU was idle, is"
            " unknown"
        )
        of_ranges = "no operators: kernels belong to the program's ranges around calls"
        found.notes.append(what if timeline.calls.empty else of_ranges)
        if timeline.source != NAMED_RANGES:
            found.unreliable["components"] = (
                "no operators in the trace: components are kinds of kernels"
            )
    if early:
        what = f"{early} of {len(gpu)} GPU events were launched before the trace began"
        found.notes.append(
            f"{what}, as the GPU runs behind the host: they count in gpu_timeline, but not in the"
            " steps"
        )
    if graphs:
        check_graphs(found, timeline, graphs)
    if launches and not timeline.on_gpu:
        found.problems.append(
            f"kernels were launched ({launches}), but the trace has no GPU events"
        )


def unlinked_text(gpu: pd.DataFrame, outside: np.ndarray, why: str) -> str:
    """How much of the GPU's time belongs to no operator, and which kernels take most of it."""
    us = (gpu["end"] - gpu["start"]).to_numpy()
    unlinked = (gpu["operator"] < 0).to_numpy()
    longest = (
        pd.Series(us[unlinked])
        .groupby(gpu["name"].to_numpy(object)[unlinked])
        .sum()
        .nlargest(3)
        .index
    )
    names = ", ".join(map(shortened, longest))
    share = us[unlinked].sum() / us.sum() if us.sum() else 0.0
    how = "an extension or the program itself launched them"
    if outside.sum() < unlinked.sum() / 2:
        how = "their launches are not in the trace"
    return f"{why}, {share:.1%} of the GPU events' time: {how}: {names}"


def check_graphs(found: Findings, timeline: Timeline, launches: int) -> None:
    """How many of the GPU events of replayed graphs could be attributed to operators."""
    n, unknown = int(timeline.gpu["of_graph"].sum()), int(timeline.only_of_graph.sum())
    graphs = f"{launches} graph launches"
    if timeline.replayed:
        through = " and ".join(timeline.replayed.where)
        found.notes.append(
            f"{graphs}: {n - unknown:,} of their {n:,} GPU events are attributed through {through}"
        )
    else:
        why = "their kernels belong to no operator and need no launch of their own"
        found.notes.append(
            f"{graphs}: {why}; a trace of the capture beside this one would tell their operators"
        )
    if unknown > UNLINKED_KERNELS * n or not n:
        found.unreliable["operators"] = f"{graphs} stand for many operators"


def early_kernels(timeline: Timeline) -> np.ndarray:
    """Which of the kernels whose launch call is in the trace begin before it."""
    early = timeline.gpu["start"] - timeline.gpu["launched"] < -CLOCK_ERROR_US
    return early[timeline.gpu["call"] >= 0].to_numpy()


def check_clocks(found: Findings, timeline: Timeline) -> None:
    early = early_kernels(timeline)
    if early.any():
        why = (
            f"{early.sum()} of {len(early)} kernels begin before their launch call: the clocks of"
            " GPU and host differ"
        )
        found.unreliable |= dict.fromkeys(BOTH_CLOCKS, why)
        if early.mean() > 0.05:
            found.problems.append(why)
        else:
            found.unreliable |= dict.fromkeys(("verdict", "opportunities"), why)


def check_gpu(found: Findings, timeline: Timeline) -> None:
    """No GPU events although the run used a GPU, by its summary or by what its operators and memory
    tell.  That the machine has one, which the trace names, does not say that the run used it."""
    for kind, n in timeline.trace.file.unread.items():
        what = (
            f"{n} events of an accelerator are in a category that is not known here, {kind}, and"
            " are missing below"
        )
        (found.notes if n <= UNLINKED_KERNELS * len(timeline.gpu) else found.problems).append(what)
    if (
        timeline.on_gpu or timeline.calls["starts_kernel"].any()
    ):  # kernels that were launched: check_operators() tells
        return
    name = timeline.trace.device["name"]  # also in the trace of a CPU run on a machine with a GPU
    summary = timeline.context.summary
    device = summary["environment"]["device"] if summary else {"type": "cpu", "name": name}
    if summary is None and used_gpu(timeline):
        device |= {"type": "cuda", "name": name or "its operators are those of one"}
    if device["type"] == "cuda":
        found.problems.append(
            f"the run used a GPU ({device['name']}), but the trace has no GPU events"
        )


def used_gpu(timeline: Timeline) -> bool:
    """Whether a trace without GPU events has operators or collectives of a GPU's libraries, its
    memory, or calls that start work on it.  A wait tells nothing: the profiler itself waits for the
    GPU as it ends."""
    trace = timeline.trace
    in_libraries = has_role(trace.operators, roles.OF_GPU_LIBRARY).any()
    communicates = has_role(trace.annotations, roles.ENQUEUED_COLLECTIVE).any()
    starts_work = has_role(trace.launches, *roles.STARTS_WORK).any()
    return bool(in_libraries or communicates or starts_work or trace.memory["on_gpu"].any())


def unused_gpu(timeline: Timeline) -> str:
    """The GPU that a trace of a run on the CPU names; "" if it names none, or the run used it."""
    used = (
        timeline.on_gpu
        or timeline.context.summary is not None
        or timeline.calls["starts_kernel"].any()
        or used_gpu(timeline)
    )
    return "" if used else timeline.trace.device["name"]


def launches_without_kernel(rows: list[dict]) -> int:
    return sum(row["kernel_launches"] - row["kernels_of_launches"] for row in rows)


@cached_on_timeline
def step_rows(timeline: Timeline) -> list[dict]:
    """Duration of each step on the host, and its GPU events;
    `incomplete` if some of them are missing."""
    gpu, calls, steps, n = timeline.gpu, timeline.calls, timeline.steps, len(timeline.steps)
    kernels = (gpu["kind"] == "kernel").to_numpy()
    step = gpu["step"].to_numpy()
    events = np.bincount(step[step >= 0], minlength=n)
    of_kernels = np.bincount(step[(step >= 0) & kernels], minlength=n)
    starts = calls["starts_kernel"].to_numpy(bool) & (calls["step"] >= 0).to_numpy()
    launched = np.bincount(calls.loc[starts, "step"], minlength=n)
    answered = starts & calls["correlation"].isin(gpu.loc[kernels, "correlation"]).to_numpy()
    answered = np.bincount(calls.loc[answered, "step"], minlength=n)
    one_clock = not early_kernels(timeline).any()
    queued = queued_until(timeline)
    began, ended = (np.sort(gpu[name].to_numpy()[kernels]) for name in ("start", "end"))
    during = np.searchsorted(began, steps["end"]) - np.searchsorted(
        ended, steps["start"], side="right"
    )
    during = np.maximum(during, 0)  # a step and a kernel without length could make it negative
    # A GPU that runs behind the host still runs kernels of earlier steps.
    times = zip(during, steps["start"], steps["end"], strict=True)
    stood = [one_clock and ran == 0 and queued(*at) for ran, *at in times]
    idle = (kernels.any() and n > 1) & ((of_kernels == 0) | np.array(stood, bool))
    rows = {
        "number": steps["number"].astype(int),
        "duration_ms": (steps["end"] - steps["start"]) / 1e3,
    }
    rows |= {"gpu_events": events, "kernels_during": during, "kernels": of_kernels}
    rows |= {"kernel_launches": launched, "kernels_of_launches": answered}
    few = starts & unflushed_launches(calls, gpu)
    at_ends = np.bincount(calls.loc[few, "step"], minlength=n)
    rows |= {"incomplete": idle | (launched - answered - at_ends > MISSING_KERNELS * launched)}
    found = pd.DataFrame(rows).to_dict("records")
    return found if one_clock else [row | {"kernels_during": None} for row in found]


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


def profiled_steps(timeline: Timeline) -> tuple[pd.DataFrame, pd.Series] | None:
    """The columns of the run's steps, and which of them are in the trace;
    None without the run's summary."""
    trace, summary = timeline.trace, timeline.context.summary
    window = re.search(r"trace_step_(\d+)_(\d+)|^system_profile", trace.path.name)
    if summary is None or window is None:
        return None
    table = pd.DataFrame(summary["steps"])
    if not window[1]:
        return table, table["exclusion_reason"] == "profiled"
    first, last = map(int, window.groups())
    # Of a part of a trace, its steps alone; those of --steps-from have no numbers of the run.
    numbers = (
        trace.steps["number"] if trace.steps_from is None and len(trace.steps) else table["step"]
    )
    return table, table["step"].between(first + 1, last) & table["step"].isin(numbers)


def profile_disturbance(timeline: Timeline) -> dict:
    """How far the profiled steps were disturbed, by the run's own measurement."""
    found, summary = profiled_steps(timeline), timeline.context.summary
    if found is None or "disturbed" not in found[0] or not summary.get("disturbance"):
        return unknown(
            NO_SUMMARY if found is None else "the run did not measure it", "text", "lost_share"
        )
    run, steps = summary["disturbance"], found[0][found[1]]
    waited = steps[steps["disturbed"].eq(True)].dropna(subset="waited_share")
    if len(waited):
        what = f"{waited['waited_share'].mean():.0%} of thread time waited for a core"
        lost = float(waited["lost_share"].sum() / len(steps))
        return {"text": f"{what} in {len(waited)} of {len(steps)} steps", "lost_share": lost}
    if run["disturbed"] is None:
        return unknown(run["disturbed_reason"], "text", "lost_share")
    # Waiting in other steps does not concern the trace.  Of another rank it is not known here in
    # which steps it waited.
    others = [
        text
        for text in run["reasons"]
        if "waited for a core" not in text or re.match("rank [1-9]", text)
    ]
    return {"text": "; ".join(others) or UNDISTURBED, "lost_share": 0.0}


def profile_disturbance_text(disturbance: dict) -> str:
    if disturbance["text"] is None:
        return f"unknown: {disturbance['text_reason']}"
    lost = (
        f", up to {disturbance['lost_share']:.0%} of their time"
        if disturbance["lost_share"]
        else ""
    )
    return disturbance["text"] + lost


def profiler_overhead(timeline: Timeline) -> dict:
    """Profiled steps compared with the unprofiled ones of the same run, by the run's own timers."""
    found = profiled_steps(timeline)
    if found is None:
        return unknown(NO_SUMMARY, "ratio")
    table, in_trace = found
    profiled, free = table[in_trace]["time_ms"], table[table["exclusion_reason"].isna()]["time_ms"]
    if profiled.empty or free.empty:
        return unknown("every step of the run except the first had an instrument", "ratio")
    found = {"ratio": float(profiled.median() / free.median())}
    found |= {"profiled_median_ms": float(profiled.median()), "profiled_steps": len(profiled)}
    found |= {"unprofiled_median_ms": float(free.median()), "unprofiled_steps": len(free)}
    return found | {"unprofiled_std_ms": float(free.std()) if len(free) > 1 else None}


def summary_beside(path: Path, left_out: list[str] | None = None) -> dict | None:
    """performance_summary.json of the run that wrote a trace: in its folder, or in the one above.
    left_out takes why one that is there cannot be read."""
    lines = [] if left_out is None else left_out
    return next(
        documents_beside(path, "performance_summary.json", PerformanceSummary, lines, OF_SUMMARY),
        None,
    )


def flops_profiles_beside(path: Path, left_out: list[str] | None = None) -> list[dict]:
    """Each flops_profile.json in the folder of a trace and in the one above."""
    lines = [] if left_out is None else left_out
    return list(documents_beside(path, "flops_profile.json", FlopsProfile, lines, OF_FLOPS))


def left_out_beside(path: Path) -> list[str]:
    """A line for each document beside a trace that cannot be read: analysis goes on without."""
    left_out: list[str] = []
    summary_beside(path, left_out)
    flops_profiles_beside(path, left_out)
    return left_out


def overhead_text(overhead: dict) -> str:
    if overhead["ratio"] is None:
        return f"unknown: {overhead['ratio_reason']}"
    if overhead["ratio"] < 1 - MEASURABLE:
        return (
            f"not measurable here: {overhead['ratio']:.2f}x, so that steps without the profiler"
            " were disturbed more"
        )
    left = overhead.get("idle_left", 1.0)  # which older documents lack
    text = f"{overhead['ratio']:.2f}x: {overhead['profiled_median_ms']:.2f} ms profiled, "
    text += (
        f"{overhead['unprofiled_median_ms']:.2f} ms unprofiled (medians of"
        f" {overhead['profiled_steps']} and "
    )
    text += f"{overhead['unprofiled_steps']} steps)"
    return text + f"; {left:.0%} of the GPU's idle time counts, as without it" * (left < 1)
