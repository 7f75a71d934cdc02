"""What does a trace show?  operator_analysis.json, without the comparison of ranks."""

from analysis.advice.efficiency import counters
from analysis.advice.opportunities import opportunities
from analysis.advice.who_reads import who_reads
from analysis.attribution.breakdown import class_times, step_breakdown
from analysis.attribution.collectives import (
    collective_rows,
    collectives_of,
    communication_of_steps,
    predicted_beside,
)
from analysis.attribution.critical_path import critical_path
from analysis.attribution.gpu_time import gpu_timelines
from analysis.attribution.ledger import (
    exposed_communication,
    hidden_communication_us,
    occasional_times,
    start_up_slices,
)
from analysis.attribution.model_flops import model_flops_per_step
from analysis.attribution.once import once_rows
from analysis.attribution.operators import kernel_table, operator_tables
from analysis.diagnosis.headline import headline
from analysis.diagnosis.timelines import memory_series, step_timeline
from analysis.diagnosis.verdict import told_why, verdict
from analysis.limits.shape_rates import kernel_durations, queue_over_step, shape_rates
from analysis.trace.timeline import Timeline
from analysis.trust.integrity import integrity, overlap_us, step_rows
from harness.base.text import shortened
from harness.documents.trace import OperatorAnalysis
from harness.instruments.phases import summary_stats
from harness.schema import because, explained


def operator_analysis(timeline: Timeline) -> dict:
    """operator_analysis.json of one trace, without the comparison of ranks."""
    summary = timeline.context.summary
    trust, exposed = integrity(timeline), exposed_communication(timeline)
    rows, unreliable = (
        collective_rows(collectives_of(timeline).events, exposed),
        trust["unreliable"],
    )
    n = len(timeline.steps)
    times = (float(us / 1e3 / n) for us in (exposed["us"].sum(), hidden_communication_us(timeline)))
    communication = communication_of_steps(rows, n, *times)
    beside = {
        "by_difference": (summary or {}).get("no_sync"),
        "predicted": None,
    }  # the caller may predict
    gpu_timeline = gpu_timelines(timeline, unreliable.get("idle_by_cause"))
    gpu_timeline |= {
        "kernel_durations": kernel_durations(timeline),
        "queue_over_step": queue_over_step(timeline),
    }
    path = {"critical_path": None if "step_timeline" in unreliable else critical_path(timeline)}
    rates = shape_rates(timeline)
    communication = communication and communication | beside
    judged = told_why(verdict(timeline, trust, path["critical_path"], rates), communication)
    document = {
        "trace": timeline.trace.path.name,
        "integrity": trust,
        "verdict": judged,
        "steps": steps_document(timeline),
    }
    document |= step_breakdown(timeline) | {"classes": class_times(timeline)}
    document |= {"reader": who_reads(summary).value, "opportunities": [], "not_here": []}
    step_ms = document["attribution"]["ms_per_step"]
    document["once"] = once_rows(
        timeline, occasional_times(timeline), start_up_slices(timeline), step_ms
    )
    if trust["trustworthy"]:
        document |= opportunities(timeline, path["critical_path"] is not None)
    document |= {"gpu_timeline": gpu_timeline, "collectives": rows, "communication": communication}
    document |= operator_tables(timeline) | {"kernels": kernel_table(timeline)} | counters(timeline)
    document |= {
        "shape_rates": rates,
        "model_flops_per_step": model_flops_per_step(timeline),
    } | path
    document |= because(unreliable["step_timeline"], *path) if "step_timeline" in unreliable else {}
    document |= {"step_timeline": step_timeline(timeline), "memory": memory_series(timeline)}
    note_unclassified(document)
    if not trust["trustworthy"]:
        document["opportunities_reason"] = "the trace is not trustworthy, see integrity"
    document["headline"] = headline(document)
    return explained(document, OperatorAnalysis)


def note_unclassified(document: dict) -> None:
    """The kernels of which neither their own name nor their operator tells what they do."""
    trust, kernels = document["integrity"], document["kernels"]
    unknown = [row for row in kernels if row["category"] == "other"]
    trust["unclassified_kernels"] = len(unknown)
    trust["unclassified_share"] = sum(row["share"] for row in unknown)
    if unknown:
        names = ", ".join(shortened(row["name"]) for row in unknown[:3]) + ", …" * (
            len(unknown) > 3
        )
        share = f"{trust['unclassified_share']:.1%} of the GPU events' time"
        trust["notes"].append(f"unclassified kernels: {len(unknown)}, {share}: {names}")


def steps_document(timeline: Timeline) -> dict:
    """Durations of the profiled steps on the host, and their spread."""
    rows = step_rows(timeline)
    durations = [row["duration_ms"] for row in rows] if timeline.steps_are_marked else []
    spread = {
        f"{name}_ms" if name != "count" else name: value
        for name, value in summary_stats(durations).items()
    }
    edges = {"min_ms": min(durations, default=None), "max_ms": max(durations, default=None)}
    return spread | edges | {"overlap_ms": overlap_us(timeline.steps) / 1e3, "rows": rows}


def add_prediction(document: dict, predicted: list[dict]) -> None:
    """Put the collectives that a dry run predicts beside those that the trace has."""
    if about := document["communication"]:
        about.pop("predicted_reason", None)
        about["predicted"] = predicted_beside(predicted, document["collectives"], about["steps"])
