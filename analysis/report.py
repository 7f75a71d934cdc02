"""report.html: everything about a run or its traces in one file that needs no network; the same for TensorBoard."""

from __future__ import annotations

import io
from base64 import b64encode
from dataclasses import replace
from pathlib import Path

import jinja2
import numpy as np
from matplotlib.image import imread

from analysis.collectives import BESIDE_COLUMNS, collective_columns, communication_text, difference_text
from analysis.components import breakdown_rows, component_columns
from analysis.figures import plain_text, profile_figures, steps_figure
from analysis.flop_counts import counter_columns, detail_tables
from analysis.flops import PEAK_COLUMNS, flops_facts
from analysis.integrity import disturbance_text, overhead_text
from analysis.memory import draw_memory_timeline, memory_tables, place_of_peak, prediction_text
from analysis.operators import KERNEL_COLUMNS, operator_columns
from analysis.opportunities import NOT_HERE_COLUMNS, OPPORTUNITY_COLUMNS
from analysis.palette import color_of
from analysis.profile import gpu_facts, steps_text
from analysis.ranks import rank_columns, straggler_text
from analysis.roofline import POINT_COLUMNS, draw_roofline, roofline_rows
from analysis.timeline import IDLE_COLUMNS, STREAM_COLUMNS, stream_rows
from analysis.traffic import intensity_facts, intensity_tables
from analysis.wording import Table, count_of, run_title
from harness import disturbance
from harness.documents import read_document
from harness.errors import UserError
from harness.files import png, write_bytes
from harness.tables import Column, column, markdown_table
from harness.units import megabytes

TOP = 25  # rows of the long tables
FILES = {
    "summary": "performance_summary.json",
    "memory": "memory_timeline.json",
    "flops": "flops_profile.json",
    "intensity": "computational_intensity.json",
    "roofline": "roofline_data.json",
}


def write_report(folder: Path, analyses: list[tuple[str, dict]] | None = None, run: Path | None = None) -> list[Path]:
    """Write report.html, and the same figures and tables as TensorBoard's images and text; returns the files.

    analyses: (name, operator_analysis.json) of traces; default: that in the folder.  run: the folder whose other files
    are included; default: this one.
    """
    documents = {name: read_document((run or folder) / file) for name, file in FILES.items()}
    if analyses is None:
        own = read_document(folder / "operator_analysis.json")
        analyses = [(own["trace"], own)] if own else []
    if not analyses and not documents["summary"]:
        raise UserError(f"{folder}: nothing to report: it has neither an operator_analysis.json nor a run")
    analysis = analyses[0][1] if analyses else None
    about = run_title(documents["summary"]) if documents["summary"] else trace_title(analysis)
    with plain_text():
        figures = profile_figures(analysis, about) if analysis else {}
        if documents["summary"] and (figure := steps_figure(documents["summary"], about)):
            figures["steps"] = figure
        if documents["memory"]:
            figures["memory_timeline"] = draw_memory_timeline(documents["memory"], about)
        if documents["roofline"]:
            figures["roofline"] = draw_roofline(documents["roofline"], about)
        drawn = {name: png(figure) for name, figure in figures.items()}
    images = {name: f"data:image/png;base64,{b64encode(data).decode()}" for name, data in drawn.items()}
    page = render(about, analysis, analyses, documents, images)
    target = folder / "report.html"
    write_bytes(target, page.encode(errors="backslashreplace"))
    return [target, *to_tensorboard(folder, analysis, drawn)]


def render(title: str, analysis: dict | None, analyses: list, documents: dict, images: dict[str, str]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,  # names come from traces of any program
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    summary, memory, flops, intensity = (documents[name] for name in ("summary", "memory", "flops", "intensity"))
    memory_facts = {}
    if memory:
        peak = f"{megabytes(memory['peak_bytes'])} in {place_of_peak(memory)}: {memory['source']}"
        memory_facts = {"Peak": peak, "Prediction": prediction_text(memory)}
    return environment.get_template("report_template.html").render(
        title=title,
        swatch=swatch,
        analysis=analysis,
        steps=steps_text(analysis["steps"]) if analysis and analysis["steps"]["count"] else None,
        gpu=gpu_facts(analysis["gpu_timeline"]) if analysis else {},
        images=images,
        top=TOP,
        tables=(trace_tables(analysis, analyses) if analysis else {}) | run_tables(documents),
        run=run_facts(summary) if summary else {},
        trust=trust_facts(analysis["integrity"]) if analysis else {},
        flops=(flops_facts(flops) if flops else {}) | (intensity_facts(intensity) if intensity else {}),
        counted=conventions(documents),
        memory=memory_facts,
        communication=communication_facts(analysis) if analysis else {},
        straggler=straggler_text(analysis["ranks"]) if analysis and "ranks" in analysis else None,
    )


def trace_title(analysis: dict) -> str:
    """What a trace shows, where no document says what was run."""
    steps, device = analysis["steps"], "a GPU" if analysis["kernels"] else "a CPU"
    times = f"{count_of(steps['count'], 'step')} of {steps['mean_ms']:.2f} ms" if steps["count"] else "A program"
    return f"{times} on {device}, from {analysis['trace']}"


def swatch(row: dict) -> str | None:
    """The color of the part of the model that a row of a table is about."""
    part = row.get("component") or row.get("class")
    return color_of(part) if part and not part.startswith("sum") else None


def trace_tables(analysis: dict, analyses: list[tuple[str, dict]]) -> dict[str, Table]:
    """The tables of a trace, by name.  report.html and TensorBoard show those that have rows."""
    on_gpu = bool(analysis["kernels"])
    traces = [{"name": name} | one for name, one in analyses] if len(analyses) > 1 else []
    columns = [*OPPORTUNITY_COLUMNS, *(column(title, title, left=True) for title in ("basis", "how"))]
    tables = {
        "components": (component_columns(analysis["phases"]), breakdown_rows(analysis)),
        "opportunities": ([*columns, column("flag", "flag", left=True)], analysis["opportunities"]),
        "not worthwhile here": (NOT_HERE_COLUMNS, analysis["not_here"]),
        "streams": (STREAM_COLUMNS, stream_rows(analysis["gpu_timeline"])),
        "idle": (IDLE_COLUMNS, analysis["gpu_timeline"]["idle_by_cause"] or []),
        "operators": (operator_columns(on_gpu), analysis["operators"]),
        "operators by shape": (operator_columns(on_gpu, by_shape=True), analysis["operators_by_shape"]),
        "kernels": (KERNEL_COLUMNS, analysis["kernels"]),
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


def communication_facts(analysis: dict) -> dict[str, str]:
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
    Column("GPU busy ms", lambda row: row["gpu_timeline"]["busy_ms"], ",.3f"),
    Column("verdict", lambda row: row["verdict"]["line"], left=True),
]


def run_tables(documents: dict) -> dict[str, Table]:
    """The tables of a run, by name."""
    tables = memory_tables(documents["memory"]) if documents["memory"] else {}
    if flops := documents["flops"]:
        counts = flops["flops_analysis"]
        tables["peaks"] = (PEAK_COLUMNS, flops["efficiency_metrics"]["peaks"])
        tables["counters"] = (counter_columns(counts["reconciliation"]), counts["reconciliation"]["rows"])
        tables["flops by component"], tables["flops by module"] = detail_tables(counts)
    if intensity := documents["intensity"]:
        tables["classes"], tables["phases"] = intensity_tables(intensity)
    if roof := documents["roofline"]:
        tables["rates"] = (POINT_COLUMNS, roofline_rows(roof))
    return tables


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
        "Kernel launches": f"{trust['kernel_launches']:,}; {trust['launches_without_kernel']:,} of the steps' have no "
        "kernel in the trace",
        "GPU events linked": "no GPU events" if linked is None else f"{linked:.1%} of those launched in the trace",
        "Graph launches": f"{trust['graph_launches']:,}",
        "Ranks": "not in the trace" if trust["world_size"] is None else rank,
        "Recorded": ", ".join(recorded),
        "Disturbance": disturbance_text(trust["disturbance"]),
        "Profiler overhead": overhead_text(trust["profiler_overhead"]),
    }


def to_tensorboard(folder: Path, analysis: dict | None, drawn: dict[str, bytes]) -> list[Path]:
    """Write figures (PNG) and tables to a separate event file, which replaces that of an earlier report."""
    from torch.utils.tensorboard import SummaryWriter

    for earlier in folder.glob("events.out.tfevents.*.report"):
        earlier.unlink()
    try:
        with SummaryWriter(str(folder), filename_suffix=".report") as writer:
            for name, data in drawn.items():  # drawing them again would take as long as the rest of the report
                pixels = (255 * imread(io.BytesIO(data))).round().astype(np.uint8)  # [height, width, RGBA]
                writer.add_image(f"whole_run/{name}", pixels, dataformats="HWC")
            for name, text in (text_tables(analysis) if analysis else {}).items():
                writer.add_text(f"profile/{name}", text)
    except OSError as error:
        raise UserError(f"cannot write events in {folder}: {error.strerror}") from error
    return sorted(folder.glob("events.out.tfevents.*.report"))


def text_tables(analysis: dict) -> dict[str, str]:
    """The verdict and the tables of a trace as markdown."""
    trust = analysis["integrity"]
    notes = [f"- {escaped(note)}" for note in (*trust["problems"], *trust["notes"])]
    texts = {"verdict": "\n".join([f"**{escaped(analysis['verdict']['line'])}**", "", *notes])}
    for name, (columns, rows) in trace_tables(analysis, []).items():
        if rows:
            safe = [replace(one, value=lambda row, text=one.text: escaped(text(row)), form="") for one in columns]
            texts[name.replace(" ", "_")] = "\n".join(markdown_table(safe, rows[:TOP]))
    return texts


def escaped(text: str) -> str:
    """Markdown that shows the text as it is: names come from traces of any program."""
    return "".join(f"\\{letter}" if letter in r"\`*_{}[]<>()#+!~" else letter for letter in text)
