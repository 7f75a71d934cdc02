"""All that a trace shows, as sections in the order in which a reader needs them; the same on a
screen and a page."""

from analysis.advice.text import opportunity_section
from analysis.attribution.breakdown import breakdown_section
from analysis.attribution.collectives import communication_section
from analysis.attribution.critical_path import path_section
from analysis.attribution.gpu_time import duration_section, gpu_section
from analysis.attribution.once import once_section
from analysis.attribution.operators import kernel_section, operator_section
from analysis.diagnosis.document import OperatorAnalysis
from analysis.diagnosis.headline import headline_place
from analysis.diagnosis.stragglers import rank_section
from analysis.diagnosis.text import Named, trust_text
from analysis.diagnosis.timelines import memory_section, timeline_text
from analysis.diagnosis.verdict import rule_section
from analysis.limits.shape_rates import rate_section
from analysis.program.lines import lines_section
from analysis.trust.integrity import Integrity
from analysis.trust.missing_from_trace import recording_section
from analysis.trust.steps import ProfiledSteps
from analysis.trust.times import overhead_text, profile_disturbance_text
from harness.base.sections import TOP, Section, as_text
from harness.base.tables import Column, column
from harness.base.text import significant


def trace_sections(
    own: OperatorAnalysis, others: Named = (), sort: str | None = None
) -> list[Section]:
    """Those that have anything to show.

    others: names and answers of the traces that were read with it.  sort: the column by which
    operators are sorted.
    """
    unreliable = own.integrity.unreliable
    step = breakdown_section(own.breakdown, own.steps.count, unreliable.get("components", ""))
    step.parts += [once_section(own.once), step_section(own)]
    operators = operator_section(
        own.operator_tables,
        bool(own.kernels),
        own.attribution.steps,
        unreliable.get("operators", ""),
        sort,
    )
    operators.parts.append(rate_section(own.shape_rates))
    kernels = kernel_section(own.kernels)
    kernels.parts.append(duration_section(own.gpu_timeline))
    to_try = opportunity_section(
        own.opportunities,
        own.not_here,
        own.opportunities_reason or "Nothing that this trace could support",
        disturbed=own.integrity.disturbance.is_seen,
        unreliable=unreliable.get("opportunities", ""),
    )
    sections = [
        verdict_section(own),
        step,
        lines_section(own.lines, bool(own.kernels)),
        to_try,
        gpu_section(own.gpu_timeline, unreliable.get("idle_by_cause", "")),
        operators,
        kernels,
        communication_section(own.communication, own.collectives),
        rank_section(own.ranks),
        traces_section(own, others),
        memory_section(own.memory),
        trust_section(own.integrity),
    ]
    return [section for section in sections if section]


def profile_lines(
    own: OperatorAnalysis, top: int = TOP, sort: str | None = None, others: Named = ()
) -> list[str]:
    """The same for a terminal, `top` rows of each long table."""
    lines = []
    for section in trace_sections(own, others, sort):
        lines += as_text(section, top)
    return lines[1:]  # the first is empty


def verdict_section(own: OperatorAnalysis) -> Section:
    trust, place = own.integrity, headline_place(own)
    facts = {"Finding": own.headline.finding, "Next": own.headline.next}
    if place:
        facts["In Perfetto"] = place
    facts["Verdict"] = own.verdict.line
    facts["Trust"] = trust_text(own)
    facts["Disturbance"] = profile_disturbance_text(trust.disturbance)
    facts["Profiler overhead"] = overhead_text(trust.profiler_overhead)
    facts["Trace"] = f"{own.trace}: {trust.events:,} events"
    if own.steps.count:
        facts["Steps on the host"] = steps_text(own.steps)
    return Section("Verdict", facts=facts, parts=[rule_section(own.verdict)])


def step_section(own: OperatorAnalysis) -> Section:
    """One step: its timeline, and what its end had to wait for."""
    note, lanes = [], own.step_timeline.lanes_left_out
    if lanes:
        note.append(f"The figure leaves out {lanes} more lanes")
    return path_section(
        own.critical_path,
        own.reason_of("critical_path"),
        timeline_text(own.step_timeline, own.steps),
        note,
        own.integrity.unreliable.get("step_timeline", ""),
    )


def steps_text(steps: ProfiledSteps) -> str:
    """'5, mean 3.2, median 3.1, std 0.1, range 3 to 3.4 ms'."""
    mean, median = significant(steps.mean_ms), significant(steps.median_ms)
    least, most = significant(steps.min_ms), significant(steps.max_ms)
    std = ""
    if steps.std_ms is not None:
        std = f", std {significant(steps.std_ms, most=3)}"
    return f"{steps.count}, mean {mean}, median {median}{std}, range {least} to {most} ms"


def traces_section(own: OperatorAnalysis, others: Named) -> Section:
    """Step, GPU and verdict of each trace, where there are several that are no ranks of one run."""
    if not others or own.ranks:
        return Section("Traces")
    rows = [{"name": name, "own": of_trace} for name, of_trace in ((own.trace, own), *others)]
    return Section("Traces", TRACE_COLUMNS, rows, ["Times are ms per step"])


def busy_of_step(own: OperatorAnalysis) -> float | None:
    busy_ms = own.gpu_timeline.of_steps.busy_ms
    return busy_ms and busy_ms / own.attribution.steps


TRACE_COLUMNS = [
    column("trace", "name", left=True),
    Column("rank", lambda row: row["own"].integrity.rank),
    Column("host step ms", lambda row: row["own"].steps.mean_ms, "~3"),
    Column("GPU busy ms", lambda row: busy_of_step(row["own"]), "~3"),
    Column("verdict", lambda row: row["own"].verdict.line, left=True),
]


def trust_section(trust: Integrity) -> Section:
    """What the trace contains and lacks."""
    steps = f"{trust.steps} marked"
    if trust.steps_without_gpu_events is not None:
        steps += f"; {trust.steps_without_gpu_events} without GPU events"
    linked = "no GPU events"
    if trust.kernels_linked_to_an_operator is not None:
        linked = f"{trust.kernels_linked_to_an_operator:.1%} of those launched in the trace"
    rank = "not in the trace"
    if trust.world_size is not None:
        rank = f"{trust.rank} of {trust.world_size}"
    parts = {
        "shapes": trust.shapes_recorded,
        "stacks": trust.stacks_recorded,
        "modules": trust.modules_recorded,
    }
    recorded = [f"{part}: {'yes' if is_recorded else 'no'}" for part, is_recorded in parts.items()]
    facts = {
        "Events": (
            f"{trust.events:,}, of these {trust.operators:,} operators and"
            f" {trust.gpu_events:,} on the GPU; {trust.malformed_events:,} skipped"
        ),
        "Steps": steps,
        "Kernel launches": (
            f"{trust.kernel_launches:,}; {trust.launches_without_kernel:,} in the steps"
            " without a kernel in the trace"
        ),
        "GPU events linked": linked,
        "Graph launches": (
            f"{trust.graph_launches:,}; {trust.graph_events_attributed:,} of their "
            f"{trust.graph_events:,} GPU events attributed to operators"
        ),
        "Rank": rank,
        "Recorded": ", ".join(recorded),
    }
    for number, note in enumerate(trust.notes, 1):
        facts[f"Note {number}"] = note
    to_record = recording_section(trust.not_recorded, trust.recorded_by)
    return Section("Trust", facts=facts, warning="; ".join(trust.problems), parts=[to_record])
