"""Sections of the report about a run or a trace: their tables, facts and texts, from the JSON documents alone.

report.html and the tab in TensorBoard are made of them: the tab has charts where the report has images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jinja2

from analysis.attribution.breakdown import CLASS_COLUMNS, breakdown_rows, component_columns
from analysis.attribution.collectives import BESIDE_COLUMNS, collective_columns, communication_text, difference_text
from analysis.attribution.critical_path import PATH_COLUMNS, path_title
from analysis.attribution.gpu_time import IDLE_COLUMNS, STREAM_COLUMNS, stream_rows
from analysis.attribution.operators import KERNEL_COLUMNS, operator_columns
from analysis.diagnosis.opportunities import NOT_HERE_COLUMNS, OPPORTUNITY_COLUMNS, best_three
from analysis.diagnosis.roofline import POINT_COLUMNS, roofline_rows
from analysis.diagnosis.shape_rates import DURATION_COLUMNS, RATE_COLUMNS
from analysis.diagnosis.stragglers import rank_columns, rank_units, straggler_text
from analysis.diagnosis.text import gpu_facts, steps_text, trust_text, verdict_text
from analysis.report.palette import color_of
from analysis.trust.integrity import overhead_text, profile_disturbance_text
from analysis.work.memory_tables import memory_tables, place_of_peak, prediction_text
from harness.base.documents import read_document
from harness.base.tables import Column, Table, column
from harness.base.text import count_of, run_title, told_apart
from harness.base.units import megabytes
from harness.instruments.audit import audit_text
from harness.machine import disturbance

DOCUMENT_FILES = {
    "summary": "performance_summary.json",
    "memory": "memory_timeline.json",
    "flops": "flops_profile.json",
    "intensity": "computational_intensity.json",
    "roofline": "roofline_data.json",
}


def documents_in(folder: Path) -> dict[str, dict | None]:
    """The documents of a run besides its operator_analysis.json; None for those that it does not have."""
    return {name: read_document(folder / file) for name, file in DOCUMENT_FILES.items()}


def page_title(analysis: dict | None, documents: dict) -> str:
    return run_title(documents["summary"]) if documents["summary"] else trace_title(analysis)


def fill_template(template: str, **context: object) -> str:
    """A template of this folder, filled in."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,  # names come from traces of any program
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(swatch=swatch, first_texts=first_texts, **context)


@dataclass
class TracePart:
    """What a page says of a trace, beside its tables."""

    analysis: dict  # operator_analysis.json
    steps: str | None  # None: the trace does not mark them
    critical_path: str | None
    trust: str
    trust_facts: dict[str, str]
    gpu: dict[str, str]
    communication: dict[str, str]
    straggler: str | None  # None: one rank
    rank_units: str | None


@dataclass
class RunPart:
    """What a page says of a run, beside its tables; what was not measured is empty."""

    facts: dict[str, str]
    limits: dict[str, str]  # FLOPs, utilization, bytes moved
    conventions: dict[str, str]  # of the limits
    memory: dict[str, str]


@dataclass
class Page:
    """What a template shows: sections for which there is no data are left out."""

    title: str
    tables: dict[str, Table]
    top: int = 0  # rows of the long tables
    images: dict[str, str] = field(default_factory=dict)  # data URLs by figure
    charts: Sequence[str] = ()  # figures that a script draws instead
    trace: TracePart | None = None
    run: RunPart | None = None


def page(
    template: str,
    analyses: list[tuple[str, dict]],
    documents: dict,
    *,
    images: dict[str, str] | None = None,
    charts: Sequence[str] = (),
    top: int,
) -> str:
    """HTML of the sections for which there is data, in report_page.html or on their own.

    analyses: (name, operator_analysis.json) of traces, all of it shown of the first.  images, charts and top: see Page.
    """
    analysis = analyses[0][1] if analyses else None
    tables = (trace_tables(analysis, analyses) if analysis else {}) | run_tables(documents)
    shown = Page(page_title(analysis, documents), tables, top, images or {}, charts)
    shown.trace, shown.run = trace_part(analysis) if analysis else None, run_part(documents)
    return fill_template(template, page=shown)


def trace_part(analysis: dict) -> TracePart:
    ranks, path = analysis.get("ranks"), analysis["critical_path"]
    return TracePart(
        analysis=analysis,
        steps=steps_text(analysis["steps"]) if analysis["steps"]["count"] else None,
        critical_path=path_title(path) if path else None,
        trust=trust_text(analysis),
        trust_facts=trust_facts(analysis["integrity"]),
        gpu=gpu_facts(analysis["gpu_timeline"]),
        communication=facts_of_communication(analysis),
        straggler=straggler_text(ranks) if ranks else None,
        rank_units=rank_units(ranks) if ranks else None,
    )


def run_part(documents: dict) -> RunPart:
    summary, memory = documents["summary"], documents["memory"]
    return RunPart(
        facts=run_facts(summary) if summary else {},
        limits=limit_facts(documents),
        conventions=conventions(documents),
        memory=memory_facts(memory) if memory else {},
    )


def memory_facts(memory: dict) -> dict[str, str]:
    peak = f"{megabytes(memory['peak_bytes'])} in {place_of_peak(memory)}: {memory['source']}"
    return {"Peak": peak, "Prediction": prediction_text(memory)}


def comparison_page(runs: list[tuple[str, dict]], parts: dict[str, Table], why: str) -> str:
    """HTML of two profiles side by side: (name, operator_analysis.json) of each, and tables of what changed."""
    facts, names = [profile_facts(analysis) for _, analysis in runs], [name for name, _ in runs]
    columns = [column("", "fact", left=True), *(column(name, str(i), left=True) for i, name in enumerate(names))]
    rows = [{"fact": fact} | {str(i): one[fact] for i, one in enumerate(facts)} for fact in facts[0]]
    shown = Page(f"{names[1]} against {names[0]}", {"runs": (columns, rows), **parts}, charts=["comparison"])
    return fill_template("comparison_sections.html", page=shown, parts=[*parts], why=why)


def profile_facts(analysis: dict) -> dict[str, str]:
    about, trust = analysis["attribution"], analysis["integrity"]
    return {
        "Trace": analysis["trace"],
        "Step": f"{about['ms_per_step']:,.3f} ms of {about['clock']} time, mean of {count_of(about['steps'], 'step')}",
        "Verdict": verdict_text(analysis["verdict"]),
        "Trust": trust_text(analysis),
        "Disturbance": profile_disturbance_text(trust["disturbance"]),
        "Try first": "; ".join(best_three(analysis)),
    }


def trace_title(analysis: dict) -> str:
    """What a trace shows, where no document says what was run."""
    about, device = analysis["attribution"], "a GPU" if analysis["kernels"] else "a CPU"
    steps = f"{count_of(about['steps'], 'step')} of {about['ms_per_step']:.2f} ms"
    times = steps if analysis["steps"]["count"] else "A program"
    return f"{times} on {device}, from {analysis['trace']}"


def swatch(row: dict) -> str | None:
    """The color of the part of the model that a row of a table is about."""
    part = row.get("component") or row.get("class")
    return color_of(part) if part and not part.startswith("sum") else None


def first_texts(column: Column, rows: list[dict]) -> list[str]:
    """The texts of a table's first column: kernels may have names of a thousand letters."""
    return told_apart([column.text(row) for row in rows], 160)


def trace_tables(analysis: dict, analyses: list[tuple[str, dict]]) -> dict[str, Table]:
    """The tables of a trace, by name.  report.html and TensorBoard show those that have rows."""
    on_gpu = bool(analysis["kernels"])
    traces = [{"name": name} | one for name, one in analyses] if len(analyses) > 1 else []
    columns = [*OPPORTUNITY_COLUMNS, *(column(title, title, left=True) for title in ("basis", "how"))]
    tables = {
        "components": (component_columns(analysis["phases"]), breakdown_rows(analysis)),
        "classes of operators": (CLASS_COLUMNS, analysis["classes"]),
        "critical path": (PATH_COLUMNS, path["rows"] if (path := analysis["critical_path"]) else []),
        "opportunities": ([*columns, column("flag", "flag", left=True)], analysis["opportunities"]),
        "not worthwhile here": (NOT_HERE_COLUMNS, analysis["not_here"]),
        "streams": (STREAM_COLUMNS, stream_rows(analysis["gpu_timeline"])),
        "idle": (IDLE_COLUMNS, analysis["gpu_timeline"]["idle_by_cause"] or []),
        "operators": (operator_columns(on_gpu), analysis["operators"]),
        "operators by shape": (operator_columns(on_gpu, by_shape=True), analysis["operators_by_shape"]),
        "rates by shape": (RATE_COLUMNS, analysis["shape_rates"]),
        "kernels": (KERNEL_COLUMNS, analysis["kernels"]),
        "kernel durations": (DURATION_COLUMNS, analysis["gpu_timeline"]["kernel_durations"]),
        "traces": (TRACE_COLUMNS, traces),
    }
    return tables | communication_tables(analysis)


def communication_tables(analysis: dict) -> dict[str, Table]:
    """Collectives, those that were predicted beside them, and all ranks."""
    about, rows = analysis["communication"], analysis["collectives"]
    tables = {"collectives": (collective_columns(rows), rows)}
    if about and about["predicted"]:
        tables["predicted collectives"] = (BESIDE_COLUMNS, about["predicted"])
    if "ranks" in analysis:
        columns = [*rank_columns(analysis["ranks"]), column("bound", "bound", left=True)]
        tables["ranks"] = (columns, analysis["ranks"]["rows"])
    return tables


def facts_of_communication(analysis: dict) -> dict[str, str]:
    """What communication costs a step, by the trace and by difference; {} without collectives."""
    about = analysis["communication"]
    if about is None:
        return {}
    facts = {"Communication": communication_text(about)}
    return facts | ({"By difference": difference_text(about)} if about["by_difference"] else {})


TRACE_COLUMNS = [
    column("trace", "name", left=True),
    Column("rank", lambda row: row["integrity"]["rank"]),
    Column("step ms", lambda row: row["steps"]["mean_ms"], ",.3f"),
    Column("GPU busy ms", lambda row: row["gpu_timeline"]["of_steps"]["busy_ms"], ",.3f"),
    Column("verdict", lambda row: row["verdict"]["line"], left=True),
]


def run_tables(documents: dict) -> dict[str, Table]:
    """The tables of a run, by name."""
    tables = memory_tables(documents["memory"]) if documents["memory"] else {}
    # These import torch, which a page without their tables does not wait for.
    if flops := documents["flops"]:
        from analysis.work.flop_counts import counter_columns, detail_tables
        from analysis.work.flop_rates import PEAK_COLUMNS

        counts = flops["flops_analysis"]
        tables["peaks"] = (PEAK_COLUMNS, flops["efficiency_metrics"]["peaks"])
        tables["counters"] = (counter_columns(counts["reconciliation"]), counts["reconciliation"]["rows"])
        tables["flops by component"], tables["flops by module"] = detail_tables(counts)
    if intensity := documents["intensity"]:
        from analysis.work.bytes_moved import intensity_tables

        tables["classes"], tables["phases"] = intensity_tables(intensity)
    if roof := documents["roofline"]:
        tables["rates"] = (POINT_COLUMNS, roofline_rows(roof))
    return tables


def limit_facts(documents: dict) -> dict[str, str]:
    """FLOPs, utilization and bytes moved, where they were counted."""
    facts = {}
    if documents["flops"]:
        from analysis.work.flop_rates import flops_facts

        facts |= flops_facts(documents["flops"])
    if documents["intensity"]:
        from analysis.work.bytes_moved import intensity_facts

        facts |= intensity_facts(documents["intensity"])
    return facts


def run_facts(summary: dict) -> dict[str, str]:
    """Status, environment, settings and results of a run."""
    environment, config, training = summary["environment"], summary["config"], summary["training"]
    performance, memory, packages = summary["performance"], summary["memory"], environment["packages"]
    facts = {
        "Status": summary["status"] + (f": {summary['error']}" if summary["error"] else ""),
        "Started": f"{environment['timestamp']} on {environment['host']}",
        "Command": environment["command_line"],
        "Device": f"{environment['device']['name']} ({environment['device']['type']})",
        "Versions": f"torch {packages['torch']}, Python {environment['python']}",
        "Commit": (environment["commit"] or "unknown")[:12] + ", modified" * bool(environment["uncommitted_changes"]),
        "Model": settings_text(config["model"]),
        "Training": settings_text(config["training"]),
        "Steps": f"{training['completed_steps']} of {training['num_steps']}",
        "Ranks": training["world_size"],
    }
    if performance["avg_step_time_ms"]:
        facts["Step time"] = (
            f"mean {performance['avg_step_time_ms']:.2f} ms, median {performance['median_step_time_ms']:.2f} ms of "
            f"{count_of(performance['steps_averaged'], 'step')} ({performance['steps_averaged_note']})"
        )
        facts["Throughput"] = (
            f"{performance['samples_per_sec']:.1f} samples/s, {performance['tokens_per_sec']:,.0f} tokens/s"
        )
    if performance["achieved_tflops"]:
        facts["Achieved"] = f"{performance['achieved_tflops']:.4g} TFLOP/s in matmuls"
    facts["Disturbance"] = disturbance.disturbance_text(summary["disturbance"])
    facts["Audit"] = audit_text(summary.get("audit"))
    if memory["peak_mb"]:
        facts["Peak memory"] = f"{memory['peak_mb']:,.1f} MB: {memory['source']}"
    return facts


def settings_text(settings: dict) -> str:
    """'hidden_dim 256, n_layers 4': settings that have a value, with thousands separators."""
    shown = {name: value for name, value in settings.items() if value is not None and not name.endswith("_reason")}
    return ", ".join(f"{name} {value:,}" if type(value) is int else f"{name} {value}" for name, value in shown.items())


def conventions(documents: dict) -> dict[str, str]:
    """What was counted, and how."""
    flops, intensity, roofline = (documents[name] for name in ("flops", "intensity", "roofline"))
    texts = {"FLOPs": flops["convention"]} if flops else {}
    if intensity:
        names = {"Bytes": "bytes", "Minimum bytes": "minimum", "Other operations": "elements"}
        texts |= {name: intensity["convention"][key] for name, key in names.items()}
    if roofline:
        texts["Times of classes"] = (
            f"{roofline['time_source']['classes']}; classes above their roofline read from caches"
        )
    return texts


def trust_facts(trust: dict) -> dict[str, str]:
    linked, without = trust["kernels_linked_to_an_operator"], trust["steps_without_gpu_events"]
    rank = f"rank {trust['rank']} of {trust['world_size']}, {len(trust['ranks_missing'])} missing"
    recorded = (f"{name}: {'yes' if trust[f'{name}_recorded'] else 'no'}" for name in ("shapes", "stacks", "modules"))
    return {
        "Events": f"{trust['events']:,}, of these {trust['operators']:,} operators and {trust['gpu_events']:,} on the "
        f"GPU; {trust['malformed_events']:,} skipped",
        "Steps": f"{trust['steps']} marked" + (f"; {without} without GPU events" if without is not None else ""),
        "Kernel launches": f"{trust['kernel_launches']:,}; {trust['launches_without_kernel']:,} in the steps without "
        "a kernel in the trace",
        "GPU events linked": "no GPU events" if linked is None else f"{linked:.1%} of those launched in the trace",
        "Graph launches": f"{trust['graph_launches']:,}; {trust['graph_events_attributed']:,} of their "
        f"{trust['graph_events']:,} GPU events attributed to operators",
        "Ranks": "not in the trace" if trust["world_size"] is None else rank,
        "Recorded": ", ".join(recorded),
        "Disturbance": profile_disturbance_text(trust["disturbance"]),
        "Profiler overhead": overhead_text(trust["profiler_overhead"]),
    }
