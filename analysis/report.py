"""report.html: all that is known of a run or of some traces, for a person, in one file that needs no network."""

from __future__ import annotations

import io
from base64 import b64encode
from pathlib import Path

import jinja2
import numpy as np
from matplotlib.image import imread

from analysis.figures import plain_text, profile_figures, steps_figure
from analysis.memory import draw_memory_timeline, place_of_peak, tensor_name
from analysis.operators import quantity
from analysis.roofline import draw_roofline
from harness.documents import read_document
from harness.errors import UserError
from harness.files import png, write_bytes
from harness.units import MB

TOP = 25  # rows of the long tables
FILES = {
    "config": "config.json",
    "summary": "performance_summary.json",
    "memory": "memory_timeline.json",
    "flops": "flops_profile.json",
    "intensity": "computational_intensity.json",
    "roofline": "roofline_data.json",
}


def write_report(folder: Path, analyses: list[tuple[str, dict]] | None = None, run: Path | None = None) -> list[Path]:
    """report.html in the folder, and the same figures and tables as TensorBoard's images and text; the files written.

    analyses are (name, operator_analysis.json) of traces, the folder's own without them; run is the folder whose
    other files are reported too, this one without it.
    """
    documents = read_documents(run or folder)
    if analyses is None:
        own = read_document(folder / "operator_analysis.json")
        analyses = [(own["trace"], own)] if own else []
    if not analyses and not documents["summary"]:
        raise UserError(f"{folder}: nothing to report, it holds no operator_analysis.json and no run")
    analysis = analyses[0][1] if analyses else None
    with plain_text():
        figures = profile_figures(analysis) if analysis else {}
        if documents["summary"] and (figure := steps_figure(documents["summary"])):
            figures["steps"] = figure
        if documents["memory"]:
            figures["memory_of_a_step"] = draw_memory_timeline(documents["memory"])
        if documents["roofline"]:
            figures["roofline"] = draw_roofline(documents["roofline"])
        drawn = {name: png(figure) for name, figure in figures.items()}
    images = {name: f"data:image/png;base64,{b64encode(data).decode()}" for name, data in drawn.items()}
    page = render(analysis, analyses, documents, images)
    target = folder / "report.html"
    write_bytes(target, page.encode(errors="backslashreplace"))
    return [target, *to_tensorboard(folder, analysis, drawn)]


def read_documents(folder: Path) -> dict[str, dict | None]:
    return {name: read_document(folder / file) for name, file in FILES.items()}


def render(analysis: dict, analyses: list, documents: dict, images: dict[str, str]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,  # names come from files that others wrote
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "ms": lambda value, digits=3: "-" if value is None else f"{value:,.{digits}f}",
        "percent": lambda value: f"{value:.1%}",
        "quantity": quantity,
        "tensor_name": tensor_name,
        "count": lambda value: "-" if value is None else f"{value:,}",
    }
    template = environment.get_template("report_template.html")
    return template.render(
        title=analysis["trace"] if analysis else run_title(documents["summary"]),
        analysis=analysis,
        analyses=analyses,
        images=images,
        facts=run_facts(documents),
        flops=flops_facts(documents),
        intensity=documents["intensity"],
        roofline=documents["roofline"],
        memory=memory_facts(documents["memory"]),
        ledger=documents["memory"],
        top=TOP,
        on_gpu=bool(analysis and analysis["kernels"]),
        phases=[row["phase"] for row in analysis["phases"]] if analysis else [],
    )


def run_title(summary: dict) -> str:
    training, device = summary["config"]["training"], summary["environment"]["device"]["name"]
    parameters = summary["config"]["model"]["parameters"]
    shape = f"{training['batch_size']} x {training['seq_len']} tokens in {training['precision']}"
    return f"{parameters:,} parameters, {shape}, on {device}"


def run_facts(documents: dict) -> list[tuple[str, str]]:
    """What ran, on what, how fast."""
    summary = documents["summary"]
    if summary is None:
        return []
    arguments, model, environment = (
        summary["config"]["training"],
        summary["config"]["model"],
        summary["environment"],
    )
    performance, memory, training = summary["performance"], summary["memory"], summary["training"]
    packages = environment["packages"]
    rows = {
        "Status": summary["status"] + (f": {summary['error']}" if summary["error"] else ""),
        "When, where": f"{environment['timestamp']}, {environment['host']}",
        "Command": environment["command_line"],
        "Device": f"{environment['device']['name']} ({environment['device']['type']})",
        "Versions": f"torch {packages['torch']}, Python {environment['python']}",
        "Commit": (environment["commit"] or "unknown")[:12] + " and changes" * bool(environment["uncommitted_changes"]),
        "Model": f"{model['parameters']:,} parameters: hidden {model['hidden_dim']}, {model['n_layers']} layers, "
        f"{model['n_heads']} heads ({model['n_kv_heads']} key/value), intermediate {model['intermediate_dim']}, "
        f"vocabulary {model['vocab_size']}",
        "Training": f"batch {arguments['batch_size']} x {arguments['seq_len']} tokens, {arguments['precision']}, "
        f"{training['completed_steps']} of {training['num_steps']} steps, {training['world_size']} "
        f"rank{'s' * (training['world_size'] > 1)}",
    }
    if performance["avg_step_time_ms"]:
        n, note = performance["steps_averaged"], performance["steps_averaged_note"]
        rows["Step time"] = (
            f"{performance['avg_step_time_ms']:.2f} ms mean, {performance['median_step_time_ms']:.2f} ms median of {n} "
            f"steps ({note})"
        )
        rows["Throughput"] = (
            f"{performance['samples_per_sec']:.1f} samples/s, {performance['tokens_per_sec']:,.0f} tokens/s"
        )
        rows["Achieved"] = f"{performance['achieved_tflops']:.4g} TFLOP/s in matrix products"
    if memory["peak_mb"]:
        rows["Peak memory"] = f"{memory['peak_mb']:,.1f} MB: {memory['source']}"
    return list(rows.items())


def flops_facts(documents: dict) -> list[tuple[str, str]]:
    flops, intensity = documents["flops"], documents["intensity"]
    rows: list[tuple[str, str]] = []
    if flops:
        counts, efficiency = flops["flops_analysis"], flops["efficiency_metrics"]
        agree = "by three counts that agree" if counts["deepspeed"] else "by two counts that agree, without DeepSpeed"
        agree = agree if counts["reconciliation"]["agree"] else "by counts that DIFFER"
        rows.append(("FLOPs per step", f"{counts['step_flops']:,} {agree} ({flops['convention']})"))
        rows += [
            (
                "MFU" if not at else "also",
                f"{one['mfu_percent']:.1f}% in {efficiency['precision']} of {one['rate'] / 1e12:.4g} TFLOP/s, "
                f"{one['kind']}: {one['source']}",
            )
            for at, one in enumerate(efficiency["peaks"])
        ]
        if efficiency["hfu_percent"] is not None:
            again = f"{counts['recomputed_flops']:,} FLOPs that the backward pass does again"
            rows.append(("HFU", f"{efficiency['hfu_percent']:.1f}%, with {again}"))
    if intensity:
        ridge, used = intensity["ridge_point_flops_per_byte"], intensity["memory_bandwidth_utilization_percent"]
        value = f"{intensity['arithmetic_intensity_flops_per_byte']:.2f} FLOPs/byte"
        value += f", {intensity['memory_bound_vs_compute_bound']} by the thresholds 10 and 100"
        if ridge is not None:
            value += f"; {intensity['side_of_ridge_point']} side of this device's ridge at {ridge:.1f}"
        rows.append(("Arithmetic intensity", value))
        value = f"{intensity['memory_bandwidth_used_gb_per_sec']:.2f} GB/s"
        if used is not None:
            value += f", {used:.1f}% of {intensity['memory_bandwidth_peak_gb_per_sec']:,.1f} GB/s"
            value += f" ({intensity['memory_bandwidth_peak_source']})"
        rows.append(("Bandwidth used", value))
        moved, least = (f"{intensity[name] / MB:,.1f} MB" for name in ("step_bytes", "minimum_step_bytes"))
        bytes_, minimum = (intensity["convention"][name] for name in ("bytes", "minimum"))
        rows.append(("Bytes of a step", f"{moved} ({bytes_}); at least {least} ({minimum})"))
    return rows


def memory_facts(memory: dict | None) -> list[tuple[str, str]]:
    if memory is None:
        return []
    rows = [("Peak", f"{memory['peak_bytes'] / MB:.1f} MB in {place_of_peak(memory)}: {memory['source']}")]
    if predicted := memory["predicted"]:
        error = f"{predicted['error_percent']:+.2f}%"
        rows.append(("Predicted", f"{predicted['peak_bytes'] / MB:.1f} MB before the run, off by {error}"))
    else:
        rows.append(("Predicted", f"no: {memory['predicted_reason']}"))
    rows += [(name, f"{size / MB:.1f} MB at the peak") for name, size in memory["peak"]["bytes_by_category"].items()]
    return rows + [(row["what"], f"{row['bytes'] / MB:.1f} MB") for row in memory["allocator"] or []]


def to_tensorboard(folder: Path, analysis: dict | None, drawn: dict[str, bytes]) -> list[Path]:
    """Figures (PNG) into Images, tables into Text: an event file of its own, in the place of an earlier report's."""
    from torch.utils.tensorboard import SummaryWriter

    for earlier in folder.glob("events.out.tfevents.*.report"):
        earlier.unlink()
    try:
        with SummaryWriter(str(folder), filename_suffix=".report") as writer:
            for name, data in drawn.items():  # drawing one again would take as long as the rest of the report
                pixels = (255 * imread(io.BytesIO(data))).round().astype(np.uint8)  # [height, width, RGBA]
                writer.add_image(f"profile/{name}", pixels, dataformats="HWC")
            for name, text in (text_tables(analysis) if analysis else {}).items():
                writer.add_text(f"profile/{name}", text)
    except OSError as error:
        raise UserError(f"cannot write events in {folder}: {error.strerror}") from error
    return sorted(folder.glob("events.out.tfevents.*.report"))


def text_tables(analysis: dict) -> dict[str, str]:
    """Markdown for TensorBoard."""

    def cell(value) -> str:
        text = f"{value:.3f}" if isinstance(value, float) else "-" if value is None else str(value)
        return "".join(f"\\{letter}" if letter in r"\`*_{}[]<>()#+!|~" else letter for letter in text)

    def table(rows: list[dict], columns: list[str]) -> str:
        lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
        return "\n".join([*lines, *(f"| {' | '.join(cell(row.get(column)) for column in columns)} |" for row in rows)])

    trust = analysis["integrity"]
    notes = [f"- {cell(note)}" for note in (*trust["problems"], *trust["notes"])]
    tables = {
        "verdict": "\n".join([f"**{cell(analysis['verdict']['line'])}**", "", *notes]),
        "components": table(analysis["components"], ["component", "ms_per_step", "share"]),
        "operators": table(analysis["operators"][:TOP], ["name", "calls", "self_cpu_us", "self_device_us", "share"]),
        "opportunities": table(analysis["opportunities"], ["name", "speedup_bound", "share", "evidence", "flag"]),
    }
    if analysis["kernels"]:
        columns = ["name", "count_per_step", "mean_us", "p95_us", "share", "launched_by", "component"]
        tables["kernels"] = table(analysis["kernels"][:TOP], columns)
    return tables
