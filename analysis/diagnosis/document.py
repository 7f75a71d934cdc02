"""What does a trace show?  operator_analysis.json, without the comparison of ranks."""

from __future__ import annotations

from analysis.attribution.breakdown import class_times, step_breakdown
from analysis.attribution.collectives import collective_rows, collectives_of, communication_of_steps, predicted_beside
from analysis.attribution.components import attribute
from analysis.attribution.critical_path import critical_path
from analysis.attribution.gpu_time import KEYS, gpu_timelines
from analysis.attribution.ledger import exposed_communication, hidden_communication_us
from analysis.attribution.operators import kernel_table, operator_tables
from analysis.diagnosis.opportunities import opportunities
from analysis.diagnosis.shape_rates import kernel_durations, queue_over_step, shape_rates
from analysis.diagnosis.timelines import memory_series, step_timeline
from analysis.diagnosis.verdict import verdict
from analysis.trace.links import Links
from analysis.trust.integrity import integrity, overlap_us, step_rows
from analysis.vocabulary.annotations import NO_MARKS
from harness.base.files import explain_nulls, explain_nulls_recursively
from harness.base.text import shortened
from harness.instruments.phases import summary_stats

NO_GPU, NO_LAUNCH = "the trace has no GPU events", "the trace has no launch call of any kernel"
NO_COLLECTIVES = "no collectives in the steps of the trace"
REASONS = {  # why a value may be null, by its name
    **dict.fromkeys((*KEYS, "idle_by_cause", "idle_of_step_ms", "self_device_us", "device_us"), NO_GPU),
    "steps_without_gpu_events": NO_GPU,
    "kernels_linked_to_an_operator": NO_GPU,
    **dict.fromkeys(("launch_delay_us", "queue_depth"), NO_LAUNCH),
    **dict.fromkeys(("flops", "bytes"), "the recorded inputs do not determine it"),
    **dict.fromkeys(("rank", "world_size"), "not in the trace"),
    **dict.fromkeys(("std_ms", "unprofiled_std_ms"), "needs at least two steps"),
    **dict.fromkeys(("mean_ms", "median_ms", "p95_ms", "min_ms", "max_ms"), f"the trace has {NO_MARKS}"),
    "kernels_during": "the clocks of GPU and host differ",
    "launched_by": "it is linked to no operator",
    "category": "neither its name nor its operator tells it",
    "tb_per_sec": "the recorded inputs do not determine it",
    **dict.fromkeys(("roof", "share_of_roof"), "no peak of this device is known for it, or not its FLOPs"),
    "up_to_us": "the longest kernels",
    "queue_over_step": NO_LAUNCH,
    "part_speedup": "the affected part could vanish",
    "speedup_bound": "the whole step is affected",
    "speedup_estimate": "no rate is known to estimate it from",
    "flag": "no flag of the workshop enables it",
    "peak_mb": "no memory events in the trace (profile_memory)",
    "communication": NO_COLLECTIVES,
}


def operator_analysis(links: Links, summary: dict | None) -> dict:
    """operator_analysis.json of one trace, without the comparison of ranks."""
    links = attribute(links)
    trust, exposed = integrity(links, summary), exposed_communication(links)
    rows, unreliable = collective_rows(collectives_of(links).events, exposed), trust["unreliable"]
    n = len(links.steps)
    times = (float(us / 1e3 / n) for us in (exposed["us"].sum(), hidden_communication_us(links)))
    communication = communication_of_steps(rows, n, *times)
    gpu_timeline = gpu_timelines(links, unreliable.get("idle_by_cause"))
    gpu_timeline |= {"kernel_durations": kernel_durations(links), "queue_over_step": queue_over_step(links)}
    path = {"critical_path": None if "step_timeline" in unreliable else critical_path(links)}
    document = {
        "trace": links.trace.path.name,
        "integrity": trust,
        "verdict": verdict(links, trust, summary),
        "steps": steps_document(links),
        **step_breakdown(links),
        "classes": class_times(links),
        **(opportunities(links, summary) if trust["trustworthy"] else {"opportunities": [], "not_here": []}),
        "gpu_timeline": gpu_timeline,
        "collectives": rows,
        "communication": communication_beside(communication, summary),
        **operator_tables(links),
        "kernels": kernel_table(links),
        "shape_rates": shape_rates(links, summary),
        **explain_nulls(path, unreliable.get("step_timeline", "the step has no GPU events")),
        "step_timeline": step_timeline(links),
        "memory": memory_series(links),
    }
    note_unclassified(document)
    if not trust["trustworthy"]:
        document["opportunities_reason"] = "the trace is not trustworthy, see integrity"
    return explain_nulls_recursively(document, REASONS)


def note_unclassified(document: dict) -> None:
    """The kernels of which neither their own name nor their operator tells what they do."""
    trust, kernels = document["integrity"], document["kernels"]
    unknown = [row for row in kernels if row["category"] == "other"]
    trust["unclassified_kernels"] = len(unknown)
    trust["unclassified_share"] = sum(row["share"] for row in unknown)
    if unknown:
        names = ", ".join(shortened(row["name"]) for row in unknown[:3]) + ", …" * (len(unknown) > 3)
        trust["notes"].append(
            f"unclassified kernels: {len(unknown)}, {trust['unclassified_share']:.1%} of the GPU events' time: {names}"
        )


def steps_document(links: Links) -> dict:
    """Durations of the profiled steps on the host, and their spread."""
    rows = step_rows(links)
    durations = [row["duration_ms"] for row in rows] if links.steps_are_marked else []
    spread = {f"{name}_ms" if name != "count" else name: value for name, value in summary_stats(durations).items()}
    edges = {"min_ms": min(durations, default=None), "max_ms": max(durations, default=None)}
    return spread | edges | {"overlap_ms": overlap_us(links.steps) / 1e3, "rows": rows}


def communication_beside(communication: dict | None, summary: dict | None) -> dict | None:
    """With what else the run tells of it: communication by difference, and the prediction, which the caller may add."""
    if communication is None:
        return None
    beside = {"by_difference": (summary or {}).get("no_sync"), "predicted": None}
    reasons = {"by_difference": "--no-sync-steps was not given, or there is no summary"}
    return communication | explain_nulls(beside, "not a run of several ranks of this workshop", **reasons)


def add_prediction(document: dict, predicted: list[dict]) -> None:
    """Put the collectives that a dry run predicts beside those that the trace has."""
    if about := document["communication"]:
        about.pop("predicted_reason", None)
        about["predicted"] = predicted_beside(predicted, document["collectives"], about["steps"])
