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
from analysis.diagnosis.timelines import memory_section
from analysis.diagnosis.verdict import rule_section
from analysis.limits.shape_rates import rate_section
from analysis.trust.missing_from_trace import recording_section
from analysis.trust.times import overhead_text, profile_disturbance_text
from harness.base.sections import TOP, Section, as_text
from harness.base.tables import Column, column
from harness.base.text import significant


def trace_sections(analysis: dict, others: Named = (), sort: str | None = None) -> list[Section]:
    """Of operator_analysis.json; those that have anything to show.

    others: names and documents of the traces that were read with it.  sort: the column by which
    operators are sorted.
    """
    answers = OperatorAnalysis.from_json(analysis)
    marked_steps, unreliable = answers.steps.count, answers.integrity.unreliable
    step = breakdown_section(answers.breakdown, marked_steps, unreliable.get("components", ""))
    operators = operator_section(
        answers.operator_tables,
        bool(answers.kernels),
        answers.attribution.steps,
        unreliable.get("operators", ""),
        sort,
    )
    kernels = kernel_section(answers.kernels)
    step.parts += [once_section(answers.once), path_section(analysis)]
    operators.parts.append(rate_section(analysis))
    kernels.parts.append(duration_section(answers.gpu_timeline))
    sections = [
        verdict_section(analysis),
        step,
        opportunity_section(analysis),
        gpu_section(answers.gpu_timeline, unreliable.get("idle_by_cause", "")),
        operators,
        kernels,
        communication_section(analysis),
        rank_section(analysis),
        traces_section(analysis, others),
        memory_section(answers.memory),
        trust_section(analysis),
    ]
    return [section for section in sections if section]


def profile_lines(
    analysis: dict, top: int = TOP, sort: str | None = None, others: Named = ()
) -> list[str]:
    """The same for a terminal, `top` rows of each long table."""
    lines = []
    for section in trace_sections(analysis, others, sort):
        lines += as_text(section, top)
    return lines[1:]  # the first is empty


def verdict_section(analysis: dict) -> Section:
    trust, place = analysis["integrity"], headline_place(analysis)
    facts = {"Finding": analysis["headline"]["finding"], "Next": analysis["headline"]["next"]}
    if place:
        facts["In Perfetto"] = place
    facts["Verdict"] = analysis["verdict"]["line"]
    facts["Trust"] = trust_text(analysis)
    facts["Disturbance"] = profile_disturbance_text(trust["disturbance"])
    facts["Profiler overhead"] = overhead_text(trust["profiler_overhead"])
    facts["Trace"] = f"{analysis['trace']}: {trust['events']:,} events"
    if analysis["steps"]["count"]:
        facts["Steps on the host"] = steps_text(analysis["steps"])
    return Section("Verdict", facts=facts, parts=[rule_section(analysis)])


def steps_text(steps: dict) -> str:
    """'5, mean 3.2, median 3.1, std 0.1, range 3 to 3.4 ms'."""
    mean, median = significant(steps["mean_ms"]), significant(steps["median_ms"])
    least, most = significant(steps["min_ms"]), significant(steps["max_ms"])
    std = ""
    if steps["std_ms"] is not None:
        std = f", std {significant(steps['std_ms'], most=3)}"
    return f"{steps['count']}, mean {mean}, median {median}{std}, range {least} to {most} ms"


def traces_section(analysis: dict, others: Named) -> Section:
    """Step, GPU and verdict of each trace, where there are several that are no ranks of one run."""
    if not others or "ranks" in analysis:
        return Section("Traces")
    rows = []
    for name, document in ((analysis["trace"], analysis), *others):
        rows.append({"name": name, "document": document})
    return Section("Traces", TRACE_COLUMNS, rows, ["Times are ms per step"])


def busy_of_step(row: dict) -> float | None:
    document = row["document"]
    busy_ms = document["gpu_timeline"]["of_steps"]["busy_ms"]
    return busy_ms and busy_ms / document["attribution"]["steps"]


TRACE_COLUMNS = [
    column("trace", "name", left=True),
    Column("rank", lambda row: row["document"]["integrity"]["rank"]),
    Column("host step ms", lambda row: row["document"]["steps"]["mean_ms"], "~3"),
    Column("GPU busy ms", busy_of_step, "~3"),
    Column("verdict", lambda row: row["document"]["verdict"]["line"], left=True),
]


def trust_section(analysis: dict) -> Section:
    """What the trace contains and lacks."""
    trust = analysis["integrity"]
    steps = f"{trust['steps']} marked"
    if trust["steps_without_gpu_events"] is not None:
        steps += f"; {trust['steps_without_gpu_events']} without GPU events"
    linked = "no GPU events"
    if trust["kernels_linked_to_an_operator"] is not None:
        linked = f"{trust['kernels_linked_to_an_operator']:.1%} of those launched in the trace"
    rank = "not in the trace"
    if trust["world_size"] is not None:
        rank = f"{trust['rank']} of {trust['world_size']}"
    recorded = []
    for name in ("shapes", "stacks", "modules"):
        recorded.append(f"{name}: {'yes' if trust[f'{name}_recorded'] else 'no'}")
    facts = {
        "Events": (
            f"{trust['events']:,}, of these {trust['operators']:,} operators and"
            f" {trust['gpu_events']:,} on the GPU; {trust['malformed_events']:,} skipped"
        ),
        "Steps": steps,
        "Kernel launches": (
            f"{trust['kernel_launches']:,}; {trust['launches_without_kernel']:,} in the steps"
            " without a kernel in the trace"
        ),
        "GPU events linked": linked,
        "Graph launches": (
            f"{trust['graph_launches']:,}; {trust['graph_events_attributed']:,} of their "
            f"{trust['graph_events']:,} GPU events attributed to operators"
        ),
        "Rank": rank,
        "Recorded": ", ".join(recorded),
    }
    for number, note in enumerate(trust["notes"], 1):
        facts[f"Note {number}"] = note
    return Section(
        "Trust", facts=facts, warning="; ".join(trust["problems"]), parts=[recording_section(trust)]
    )
