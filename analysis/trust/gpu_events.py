"""Does each GPU event belong to an operator, and is it told why the GPU was idle?"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.attribution.components import NAMED_RANGES
from analysis.attribution.ledger.of_steps import idle_by_cause, left_out, of_steps
from analysis.attribution.operators import KernelRow
from analysis.trace.links import launched_before_trace
from analysis.trace.tables import has_role
from analysis.trace.timeline import Timeline
from analysis.trust.findings import Findings
from analysis.trust.steps import counts_of_steps
from analysis.vocabulary import roles
from harness.base.text import count_of, shortened
from harness.machine.rocm import KERNELS_IN_TRACE, UNTRIED, Recorded, untried_text

# A healthy trace has the kernel of every launch and the launch of every kernel that began in the
# window.
UNLINKED_KERNELS = 0.05  # of the GPU events whose launch is in the trace
UNEXPLAINED = 0.05  # of the steps: idle time without a recorded cause, from which on it is told
LITTLE = 0.01  # of the time of the trace: what shorter steps show says nothing of the program
NAMED = 3  # kernels in a note


class Launched(NamedTuple):
    """Where GPU events were launched; arrays of [GPU events]."""

    early: np.ndarray  # before the trace began
    by_host: np.ndarray  # by the host, in the trace
    outside: np.ndarray  # of these: outside of any operator, as extensions do
    by_operator: np.ndarray  # of these: by an operator

    @property
    def linked_share(self) -> float | None:
        """Of the events that the host launched, those of operators; None: there are none."""
        return float(self.by_operator[self.by_host].mean()) if self.by_host.any() else None

    @property
    def outside_share(self) -> float | None:
        return float(self.outside[self.by_host].mean()) if self.by_host.any() else None


def where_launched(timeline: Timeline) -> Launched:
    gpu = timeline.gpu
    early = launched_before_trace(gpu, timeline.calls)
    # Copies without any number were requested by the device itself.
    is_known = (gpu["kind"] == "kernel") | (gpu["correlation"] > 0) | (gpu["external_id"] > 0)
    by_host = is_known.to_numpy() & ~early
    has_operator = (gpu["operator"] >= 0).to_numpy()
    in_call = ((gpu["call"] >= 0) & ~gpu["of_graph"]).to_numpy()
    outside = np.zeros(len(gpu), bool)
    if timeline.first_replayed > 0:  # there are operators
        outside = by_host & ~has_operator & in_call
    return Launched(early, by_host, outside, by_host & has_operator)


# ---- To which operators they belong --------------------------------------------------------------


def check_operators(found: Findings, timeline: Timeline, launched: Launched) -> None:
    """Which GPU events belong to an operator.

    What no operator launched has run all the same: it counts in the verdict, by the names of
    kernels."""
    gpu, calls = timeline.gpu, timeline.calls
    n_graph_launches = int(calls["starts_graph"].sum())
    check_links(found, timeline, launched, n_graph_launches)
    if timeline.on_gpu and not timeline.first_replayed:
        check_without_operators(found, timeline)
    n_early = int(launched.early.sum())
    if n_early:
        found.notes.append(
            f"{n_early} of {len(gpu)} GPU events were launched before the trace began, as the GPU"
            " runs behind the host: they count in gpu_timeline, but not in the steps"
        )
    if n_graph_launches:
        check_graphs(found, timeline, n_graph_launches)
    n_launches = int(calls["starts_kernel"].sum())
    if n_launches and not timeline.on_gpu:
        found.problems.append(
            f"kernels were launched ({n_launches}), but the trace has no GPU events"
        )


def check_links(
    found: Findings, timeline: Timeline, launched: Launched, n_graph_launches: int
) -> None:
    """Of a trace with operators, too many GPU events that belong to none."""
    share = launched.linked_share
    if not timeline.first_replayed or share is None or share >= 1 - UNLINKED_KERNELS:
        return
    why = f"{1 - share:.0%} of the GPU events of the steps are linked to no operator"
    found.doubt(why, "components", "operators")
    if n_graph_launches == 0:
        found.notes.append(unlinked_text(timeline.gpu, launched, why))


def unlinked_text(gpu: pd.DataFrame, launched: Launched, why: str) -> str:
    """How much of the GPU's time belongs to no operator, and which kernels take most of it."""
    us = (gpu["end"] - gpu["start"]).to_numpy()
    is_unlinked = (gpu["operator"] < 0).to_numpy()
    unlinked_names = gpu["name"].to_numpy(object)[is_unlinked]
    us_by_name = pd.Series(us[is_unlinked]).groupby(unlinked_names).sum()
    names = ", ".join(map(shortened, us_by_name.nlargest(NAMED).index))
    share = us[is_unlinked].sum() / us.sum() if us.sum() else 0.0
    how = "an extension or the program itself launched them"
    if launched.outside.sum() < is_unlinked.sum() / 2:
        how = "their launches are not in the trace"
    return f"{why}, {share:.1%} of the GPU events' time: {how}: {names}"


def check_without_operators(found: Findings, timeline: Timeline) -> None:
    """Of a trace that has GPU events, but no operator."""
    if timeline.calls.empty:
        found.notes.append(
            "only GPU events, no operators: what launched the kernels, and why the GPU was idle, is"
            " unknown"
        )
    else:
        found.notes.append("no operators: kernels belong to the program's ranges around calls")
    if timeline.source != NAMED_RANGES:
        found.doubt("no operators in the trace: components are kinds of kernels", "components")


def check_graphs(found: Findings, timeline: Timeline, launches: int) -> None:
    """How many of the GPU events of replayed graphs could be attributed to operators."""
    n, n_unknown = int(timeline.gpu["of_graph"].sum()), int(timeline.only_of_graph.sum())
    graphs = f"{launches} graph launches"
    if timeline.replayed:
        through = " and ".join(timeline.replayed.where)
        found.notes.append(
            f"{graphs}: {n - n_unknown:,} of their {n:,} GPU events are attributed through"
            f" {through}"
        )
    else:
        found.notes.append(
            f"{graphs}: their kernels belong to no operator and need no launch of their own; a"
            " trace of the capture beside this one would tell their operators"
        )
    if n_unknown > UNLINKED_KERNELS * n or not n:
        found.doubt(f"{graphs} stand for many operators", "operators")


def unclassified_text(unknown: list[KernelRow]) -> str:
    """The kernels of which neither their own name nor their operator tells what they do: rows of
    `kernels`."""
    names = ", ".join(shortened(row.name) for row in unknown[:NAMED])
    if len(unknown) > NAMED:
        names += ", …"
    share = f"{sum(row.share for row in unknown):.1%} of the GPU events' time"
    return f"unclassified kernels: {len(unknown)}, {share}: {names}"


# ---- Whether the GPU was used --------------------------------------------------------------------


def check_profiler(found: Findings, timeline: Timeline) -> None:
    """What a run on ROCm found when it tried its profiler: of known kernels, some were lost."""
    for warning in profiler_warnings(timeline):
        if warning != UNTRIED:
            found.problems.append(warning)


def profiler_warnings(timeline: Timeline) -> list[str]:
    """Those of the run's summary about kernels in a trace."""
    summary = timeline.context.summary
    warnings = summary["environment"].get("warnings", []) if summary else []
    return [warning for warning in warnings if warning.startswith(KERNELS_IN_TRACE)]


def untried_profiler(timeline: Timeline) -> str | None:
    """Of a program on ROCm for which no known kernels were launched, what its trace tells of the
    profiler; None of everything else.  Launches whose kernels the recording did not wait for are
    no loss of the profiler."""
    if UNTRIED not in profiler_warnings(timeline):
        return None
    counts = counts_of_steps(timeline)
    n_launches = int((counts.launches - counts.unflushed).sum())
    return untried_text(Recorded(n_launches, int(counts.answered.sum())))


def check_gpu(found: Findings, timeline: Timeline) -> None:
    """No GPU events although the run used a GPU, by its summary or by what its operators and memory
    tell.  That the machine has one, which the trace names, does not say that the run used it."""
    for kind, n in timeline.trace.file.unread.items():
        what = (
            f"{n} events of an accelerator are in a category that is not known here, {kind}, and"
            " are missing below"
        )
        lines = found.notes if n <= UNLINKED_KERNELS * len(timeline.gpu) else found.problems
        lines.append(what)
    if timeline.ran_on_gpu:  # of launches without events, check_operators() tells
        return
    name, summary = None, timeline.context.summary
    if summary is not None:
        device = summary["environment"]["device"]
        if device["type"] == "cuda":
            name = device["name"]
    elif used_gpu(timeline):
        name = timeline.trace.device["name"] or "its operators are those of one"
    if name is not None:
        found.problems.append(f"the run used a GPU ({name}), but the trace has no GPU events")


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
    used = timeline.ran_on_gpu or timeline.context.summary is not None or used_gpu(timeline)
    return "" if used else timeline.trace.device["name"]


# ---- Why it was idle -----------------------------------------------------------------------------


def check_idle(found: Findings, timeline: Timeline) -> float | None:
    """The share of the steps' time in which the GPU was idle for no reason that the trace contains;
    None: the clocks do not tell."""
    slices = of_steps(timeline)
    total_us = slices["us"].sum()
    if timeline.on_gpu:
        check_left_out(found, timeline, total_us)
    if "idle_by_cause" in found.unreliable:
        return None
    if not timeline.on_gpu or not total_us:
        return 0.0
    share = idle_by_cause(slices)["unknown"] / total_us
    if share >= UNEXPLAINED:
        found.notes.append(
            f"{share:.1%} of the steps' time is unexplained: the GPU was idle, and no event in the"
            " trace says why"
        )
    return share


def check_left_out(found: Findings, timeline: Timeline, total_us: float) -> None:
    """What is no part of the steps, and whether enough is left.  total_us: of the steps."""
    out, gpu = left_out(timeline), timeline.gpu
    at_edge = np.zeros(len(out), bool)
    if not timeline.steps_are_marked:
        is_before, is_after = out["end"] <= gpu["start"].min(), out["start"] >= gpu["end"].max()
        at_edge = (is_before | is_after).to_numpy()
    behind = (
        "the first event of a stream began so long after its launch, so the GPU had still to do"
        " what was launched before the recording"
    )
    ends = "the GPU had no work yet, or no more, as wherever a recording begins and ends"
    if total_us < LITTLE * (total_us + out["us"].sum()) or len(gpu) == 1:
        ends += (
            f"; what is left is {total_us / 1e3:,.3f} ms with {count_of(len(gpu), 'GPU event')}:"
            " record more"
        )
    for which, reason in ((~at_edge, behind), (at_edge, ends)):
        if which.any():
            left_out_ms = out["us"][which].sum() / 1e3
            found.notes.append(f"{left_out_ms:,.3f} ms are left out of the steps: {reason}")
