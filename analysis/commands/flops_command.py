"""How far is a step from what its device could do?  Bytes moved and the roofline, from a flops_profile.json."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from analysis.commands.analyze_traces import report_in
from analysis.diagnosis.opportunities import best_three
from analysis.diagnosis.roofline import by_time, roofline, roofline_lines
from analysis.diagnosis.text import verdict_text
from analysis.report.roofline_figure import draw_roofline
from analysis.work.bytes_moved import computational_intensity, intensity_lines
from analysis.work.flop_counts import agreement_text, counters_in, flop_detail_lines
from analysis.work.flop_rates import mfu_text
from harness.base.console import say
from harness.base.documents import read_document
from harness.base.files import prepare_folder, write_figure, write_json
from harness.base.layer_names import folded_names
from harness.base.tables import answer, wrapped
from harness.base.text import count_of, read_on
from harness.machine.disturbance import disturbance_text
from harness.model.workload import Workload


def limits(workload: Workload, profile: dict, source: Path, *, intensity: bool, roof: bool) -> dict[str, dict]:
    """computational_intensity.json and roofline_data.json, by file name, as far as they were asked for.

    Operators' times are those of the trace that was analyzed in the source folder, if there is one.
    """
    if not (intensity or roof):
        return {}
    moved = computational_intensity(profile, workload)
    documents = {"computational_intensity.json": moved}
    if roof:
        trace = read_document(source / "operator_analysis.json")
        documents["roofline_data.json"] = roofline(profile, moved, trace)
    return documents


def limits_lines(documents: dict[str, dict]) -> list[str]:
    lines = []
    if intensity := documents.get("computational_intensity.json"):
        lines += ["", *intensity_lines(intensity)]
    if data := documents.get("roofline_data.json"):
        lines += ["", *roofline_lines(data)]
    return wrapped(lines)


def write_limits(documents: dict[str, dict], target: Path, about: str) -> list[Path]:
    """The documents and the figure of the roofline; the files written."""
    for name, document in documents.items():
        write_json(target / name, document)
    files = [target / name for name in documents]
    if data := documents.get("roofline_data.json"):
        files.append(target / "roofline.png")
        write_figure(files[-1], draw_roofline(data, about))
    return files


def explain_limits(
    workload: Workload,
    profile: dict,
    source: Path,
    target: Path,
    report: Callable[[], list[Path]] = list,
    *,
    intensity: bool,
    roof: bool,
    detailed: bool,
    verbose: bool,
) -> None:
    """Print the tables if asked for, write what was asked for to the target, and print the answer."""
    documents = limits(workload, profile, source, intensity=intensity, roof=roof)
    files, lines = [], ["", *flop_detail_lines(profile["flops_analysis"])] * (detailed or verbose)
    say(*lines, *(limits_lines(documents) if verbose else []))
    try:
        if documents:
            if target.resolve() != source.resolve():
                prepare_folder(target)
            title = workload.title_on(profile["environment"]["device"]["name"])
            files += write_limits(documents, target, title)
        files += report()
        if files:
            say("", "Written:", *(f"  {file}" for file in files))
    finally:  # a full disk must not lose the answer
        say("", *flops_answer(profile, documents, source, report_in(files)))


# ---- For a reader --------------------------------------------------------------------------------------------------


def flops_answer(profile: dict, documents: dict[str, dict], source: Path, report: Path | None) -> list[str]:
    """What a command that counts FLOPs ends with: MFU, what bounds it, where the time goes, what to try."""
    trace, summary = (read_document(source / name) for name in ("operator_analysis.json", "performance_summary.json"))
    rates = profile["performance_metrics"]
    spread = f", std {rates['std_step_time_ms']:.2f}" if rates["std_step_time_ms"] is not None else ""
    rows = {
        "Model FLOPS Utilization": mfu_text(profile),
        "Bound by": verdict_text(trace["verdict"])
        if trace
        else "not known here: no trace; --generate-roofline records one",
    }
    if intensity := documents.get("computational_intensity.json"):
        rows["Intensity"] = intensity_text(intensity)
    counts = profile["flops_analysis"]["reconciliation"]
    rows["Trust"] = agreement_text(counts, ", ".join(counters_in(counts["rows"])))
    rows["Trust"] += (
        f"; step {rates['avg_step_time_ms']:.2f} ms, mean of {count_of(rates['steps_averaged'], 'step')}{spread}"
    )
    if summary and summary["disturbance"]["disturbed"]:
        rows["Trust"] = f"times NOT trustworthy: the steps were disturbed; {rows['Trust']}"
    rows["Disturbance"] = disturbance_text(summary["disturbance"]) if summary else "not measured"
    rows["Largest parts"] = largest_parts_text(profile, documents.get("roofline_data.json"))
    rows["Try first"] = best_three(trace) if trace else least_times(profile, intensity)
    return answer(rows | {"Read on": read_on(report, "docs/flops_and_limits.md")})


def intensity_text(document: dict) -> str:
    text = f"{document['arithmetic_intensity_flops_per_byte']:.1f} FLOPs/byte"
    if ridge := document["ridge_point_flops_per_byte"]:
        text += f", on the {document['side_of_ridge_point']} side of the ridge point at {ridge:.1f}"
    if used := document["memory_bandwidth_utilization_percent"]:
        text += f"; {used:.1f}% of the bandwidth used"
    return text


def largest_parts_text(profile: dict, roof: dict | None) -> str:
    """Three classes by time and share of their roofs if a trace has their times, else three components by FLOPs."""
    if roof and roof["profiled_step_ms"]:
        rows = by_time(roof["points"])[:3]
        words = itertools.chain([(" of the step", " of its roof")], itertools.repeat(("", "")))
        texts = [
            f"{row['name']} {row['share_of_time']:.1%}{step}"
            + (f" ({row['share_of_roof']:.0%}{roof})" if row["share_of_roof"] else "")
            for row, (step, roof) in zip(rows, words, strict=False)
        ]
        return ", ".join(texts)
    parts = profile["flops_analysis"]["by_component"] or by_module(profile["flops_analysis"]["reconciliation"])
    shares = ", ".join(f"{row['component']} {row['share']:.1%}" for row in parts[:3])
    return f"{shares} of the FLOPs" if parts else "not known here: no module was counted"


def by_module(reconciliation: dict) -> list[dict]:
    """Forward FLOPs of each module without those of the modules in it, alike ones of repeated blocks together, largest
    first."""
    counts = reconciliation["forward_flops_by_module"]
    [counted] = (row for row in reconciliation["rows"] if row["counter"] == "FlopCounterMode")
    own = Counter(counts | {"": counted["forward_flops"]})  # "": the model
    for name, flops in counts.items():
        around = name.rpartition(".")[0]
        while around not in own:  # a list of modules is not called itself
            around = around.rpartition(".")[0]
        own[around] -= flops
    sums: Counter[str] = Counter()
    for name, label in folded_names(counts).items():
        sums[label] += own[name]
    sums["the model itself"] = own[""]
    total = counted["forward_flops"]
    return [{"component": name, "share": flops / total} for name, flops in sums.most_common() if flops]


def least_times(profile: dict, intensity: dict | None) -> list[str]:
    """How much faster the step could be by the roofs of the device alone, without a trace."""
    seconds, counts = profile["performance_metrics"]["avg_step_time_ms"] / 1e3, profile["flops_analysis"]
    efficiency, texts = profile["efficiency_metrics"], []
    if peak := efficiency["device_peak_flops"]:
        bound = seconds * peak / (counts["step_flops"] + counts["recomputed_flops"])
        texts.append(f"matmuls at the peak, all else hidden behind them: at most {bound:.2f}x")
    if intensity and efficiency["bandwidth_peaks"]:
        bound = seconds * efficiency["bandwidth_peaks"][0]["rate"] / intensity["minimum_step_bytes"]
        texts.append(f"everything fused, at the peak bandwidth: at most {bound:.2f}x")
    return texts or ["not known here: no peak of this device is known; --peak sets one"]
