"""How far can a trace be trusted?  What it contains and lacks, and which figures that makes
unreliable."""

from __future__ import annotations

import itertools
from collections.abc import Collection

from typing_extensions import NotRequired

from analysis.attribution.operators import KernelRow
from analysis.trace.reasons import NO_GPU, NOT_IN_TRACE, TWO_CLOCKS
from analysis.trace.tables import Trace
from analysis.trace.timeline import Timeline
from analysis.trust.beside import left_out_beside
from analysis.trust.clocks import check_clocks
from analysis.trust.findings import Findings
from analysis.trust.gpu_events import (
    check_gpu,
    check_idle,
    check_operators,
    check_profiler,
    unclassified_text,
    untried_profiler,
    unused_gpu,
    where_launched,
)
from analysis.trust.missing_from_trace import OTHER_RANKS, MissingPart, missing_line, not_recorded
from analysis.trust.steps import (
    ProfiledStep,
    check_host,
    check_steps,
    how_found,
    launches_without_kernel,
    step_rows,
)
from analysis.trust.times import (
    ProfileDisturbance,
    ProfilerOverhead,
    check_times,
    profile_disturbance,
    profiler_overhead,
    sure_overhead,
)
from analysis.vocabulary.kernel_classes import UNKNOWN_CATEGORY
from harness.schema import ABSENT, Document, field, known_or

MISSING_RANKS_NAMED = 1000  # at most


class Integrity(Document):
    trustworthy: bool = field("whether there are no problems")
    problems: list[str] = field("why it is not trustworthy")
    notes: list[str] = field("what a reader should know of the trace")
    unreliable: dict[str, str] = field(
        "parts of the analysis that should not be relied on, and why"
    )
    recorded_by: str = field("torch.profiler, nsys, rocprofv3, rocmProfileData")
    events: int = field("in the file")
    cut_off: bool = field("the file ends before its document does, or is damaged from there on")
    malformed_events: int = field("that were skipped")
    operators: int = field("events of operators")
    gpu_events: int = field("kernels, copies, memory sets")
    steps: int = field("that are marked or were found")
    steps_without_gpu_events: int | None = field("of these", null=NO_GPU)
    kernel_launches: int = field("calls on the host")
    launches_without_kernel: int = field("of these, in the steps, whose kernel is not in the trace")
    kernels_linked_to_an_operator: float | None = field(
        "share of the GPU events that the host launched", null=NO_GPU
    )
    kernels_launched_outside_operators: float | None = field(
        "share of the same: by an extension, say", null=NO_GPU
    )
    gpu_events_launched_before_the_trace: int = field("whose launch is not in the trace")
    unexplained_share: float | None = field(
        "of the steps: the GPU was idle for no recorded reason", null=TWO_CLOCKS
    )
    graph_launches: int = field("of CUDA graphs")
    graph_events: int = field("GPU events that they started")
    graph_events_attributed: int = field(
        "of these, to the operators of which a capture or a warm-up tells"
    )
    graphs_attributed_through: list[str] = field("what tells of them, as 'the capture trace FILE'")
    unclassified_kernels: int = field("kernels whose name and operator do not tell what they do")
    unclassified_share: float = field("of the time of all GPU events")
    unused_gpu: NotRequired[str] = field(
        "the GPU of the machine, where nothing in the trace used it; absent: used, or none"
    )
    profiler_untried: NotRequired[str] = field(
        "of a program on ROCm: what its trace tells of kernels that the profiler lost, as no known"
        " ones were launched; absent: of no such program"
    )
    rank: int | None = field("of the process", null=NOT_IN_TRACE)
    ranks_in_file: list[int] = field("whose traces were merged into this file; empty: that of one")
    world_size: int | None = field("ranks", null=NOT_IN_TRACE)
    shapes_recorded: bool = field("of the operators' inputs")
    stacks_recorded: bool = field("of Python")
    modules_recorded: bool = field("names of modules")
    not_recorded: list[MissingPart] = field(
        "what the trace should contain and does not, the costliest first"
    )
    profiler_overhead: ProfilerOverhead = field("by the run's own timers")
    disturbance: ProfileDisturbance = field("by the run's own measurement")
    ranks_missing: list[int] = field("of the run, whose traces were not read")
    not_compared: NotRequired[str] = field(
        "why the traces read together are not those of the ranks of one run"
    )


# ---- Of one trace --------------------------------------------------------------------------------


def integrity(timeline: Timeline, kernels: list[KernelRow]) -> Integrity:
    """What a trace contains and lacks; of other ranks, with_missing_ranks() tells.

    kernels: of operator_analysis.json."""
    trace, gpu, calls = timeline.trace, timeline.gpu, timeline.calls
    steps, launched = step_rows(timeline), where_launched(timeline)
    found = Findings()
    check_file(found, trace)
    check_steps(found, timeline)
    check_host(found, timeline)
    check_operators(found, timeline, launched)
    check_clocks(found, timeline)
    check_profiler(found, timeline)
    check_gpu(found, timeline)
    unused = unused_gpu(timeline)
    note_origin(found, timeline, unused)
    untried = untried_profiler(timeline)
    if untried:
        found.notes.append(untried)
    unexplained_share = check_idle(found, timeline)
    missing = not_recorded(timeline)
    note_missing(found, missing)
    disturbance = profile_disturbance(timeline)
    overhead = profiler_overhead(timeline)
    check_times(found, disturbance, sure_overhead(timeline), timeline.idle_left < 1)
    unclassified = [row for row in kernels if row.category == UNKNOWN_CATEGORY]
    if unclassified:
        found.notes.append(unclassified_text(unclassified))
    return Integrity(
        trustworthy=not found.problems,
        problems=found.problems,
        notes=found.notes,
        unreliable=found.unreliable,
        recorded_by=trace.file.tool,
        events=trace.n_events,
        cut_off=trace.file.cut_off,
        malformed_events=trace.n_malformed,
        operators=timeline.first_replayed,
        gpu_events=len(gpu),
        steps=len(steps) if timeline.steps_are_marked else 0,
        steps_without_gpu_events=without_gpu_events(timeline, steps),
        kernel_launches=int(calls["starts_kernel"].sum()),
        launches_without_kernel=launches_without_kernel(steps),
        kernels_linked_to_an_operator=launched.linked_share,
        kernels_launched_outside_operators=launched.outside_share,
        gpu_events_launched_before_the_trace=int(launched.early.sum()),
        unexplained_share=known_or(unexplained_share, found.unreliable.get("idle_by_cause", "")),
        graph_launches=int(calls["starts_graph"].sum()),
        graph_events=int(gpu["of_graph"].sum()),
        graph_events_attributed=int((gpu["of_graph"] & ~timeline.only_of_graph).sum()),
        graphs_attributed_through=timeline.replayed.where if timeline.replayed else [],
        unclassified_kernels=len(unclassified),
        unclassified_share=sum(row.share for row in unclassified),
        unused_gpu=unused or ABSENT,
        profiler_untried=untried or ABSENT,
        rank=trace.rank,
        ranks_in_file=trace.ranks_in_file,
        world_size=trace.world_size,
        shapes_recorded=bool((trace.operators["signature"] >= 0).any()),
        stacks_recorded=trace.file.n_frames > 0,
        modules_recorded=len(trace.modules) > 0,
        not_recorded=missing,
        profiler_overhead=overhead,
        disturbance=disturbance,
        ranks_missing=[],
    )


def without_gpu_events(timeline: Timeline, steps: list[ProfiledStep]) -> int | None:
    """How many steps launched none; None without a GPU."""
    return sum(step.gpu_events == 0 for step in steps) if timeline.on_gpu else None


def note_missing(found: Findings, missing: list[MissingPart]) -> None:
    """A note for each; of steps, how_found() tells more."""
    for row in missing:
        if row.part != "steps":
            found.notes.append(missing_line(row))


def check_file(found: Findings, trace: Trace) -> None:
    """Whether the file is whole, and all of it was read."""
    if trace.file.cut_off:
        found.problems.append(
            f"the file is cut off or damaged after {trace.n_events:,} events: what follows is"
            " missing"
        )
    if trace.file.has_nan:
        found.notes.append(
            "the file contains NaN or Infinity, which is no JSON and viewers may refuse: they count"
            " as unknown"
        )
    if trace.ranks_in_file:
        ranks = ", ".join(map(str, trace.ranks_in_file))
        what = "was merged from the traces of"
        if trace.file.command:
            what = "has several processes, taken for"
        found.notes.append(f"the file {what} ranks {ranks}; this is rank {trace.rank}")
    if trace.steps_in_file is not None and trace.steps_in_file > len(trace.steps):
        found.notes.append(
            f"only the last {len(trace.steps)} of {trace.steps_in_file} marked steps were read"
        )


def note_origin(found: Findings, timeline: Timeline, unused: str) -> None:
    """What was judged, and what was left out.  unused: the GPU of the machine, if nothing used
    it."""
    trace = timeline.trace
    if unused:
        found.notes.append(
            f"nothing in the trace used the GPU of this machine ({unused}), so it is judged as a"
            " run on the CPU; of a run that did use it, record its events too: activities=[CPU,"
            " CUDA]"
        )
    of_steps = how_found(timeline)
    if of_steps:
        found.notes.append(of_steps)
    if trace.n_malformed:
        found.notes.append(
            f"{trace.n_malformed} of {trace.n_events} events were skipped: no name, no time, or an"
            " impossible duration"
        )
    for line in left_out_beside(trace.path):
        found.notes.append(f"not read: {line}")


# ---- Of several ----------------------------------------------------------------------------------


def with_missing_ranks(own: Integrity, present: Collection[int]) -> Integrity:
    """Where the ranks of the run are not all among those whose traces were read, which lack."""
    world_size = own.world_size or 1
    n_missing = world_size - len(present)
    if n_missing <= 0:
        return own
    absent = (rank for rank in range(world_size) if rank not in present)
    note = (
        f"no traces of {n_missing} of {world_size} ranks: a straggler among them would not be"
        " noticed"
    )
    return own.replaced(
        ranks_missing=list(itertools.islice(absent, MISSING_RANKS_NAMED)),
        not_recorded=[*own.not_recorded, OTHER_RANKS.lacking()],
        notes=[*own.notes, note],
    )


def not_compared(own: Integrity, n_traces: int, why: str) -> Integrity:
    """Where the traces that were read together are not those of the ranks of one run."""
    note = f"the {n_traces} traces are not compared: {why}"
    return own.replaced(not_compared=why, notes=[*own.notes, note])
