"""How far is a step from what its device could do?  Bytes moved and the roofline,
from a flops_profile.json."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from analysis.advice.text import best_three
from analysis.commands.analyze_traces import report_in
from analysis.diagnosis.document import OperatorAnalysis
from analysis.limits.roofline import roofline
from analysis.report.figures.pictures import draw_roofline, picture
from analysis.report.run_sections import run_sections
from analysis.work.bytes_moved import computational_intensity
from analysis.work.sections import (
    RIDGE,
    agreement_text,
    by_time,
    counters_in,
    intensity_facts,
    mfu_text,
)
from harness.base.console import file_lines, say
from harness.base.documents import read_or_leave_out
from harness.base.files import prepare_folder, write_bytes, write_json
from harness.base.layer_names import folded_names
from harness.base.sections import as_text
from harness.base.tables import added_up, answer
from harness.base.text import count_of, read_on
from harness.machine.disturbance import disturbance_text
from harness.model.workload import Workload
from harness.run.run_summary import PerformanceSummary

LIMITS = {"intensity": "computational_intensity.json", "roofline": "roofline_data.json"}


def explain_limits(
    workload: Workload,
    profile: dict,
    source: Path,
    target: Path,
    asked: dict[str, bool],
    report: Callable = list,
) -> None:
    """Print the tables if asked for, write what was asked for to the target, and print the answer.

    asked: intensity, roof, detailed, verbose; told: whether a run has already printed the tables of
    the profile.  report: writes one, and returns its files.
    """
    # Documents of intensity and roofline, by the names of run_sections().
    documents, verbose = {}, asked["verbose"]
    left_out: list[str] = []
    trace, _ = documents_of_run(source, left_out)
    if asked["intensity"] or asked["roof"]:
        documents["intensity"] = computational_intensity(profile, workload)
    if asked["roof"]:
        # Operators' times are those of the trace that was analyzed in the source folder, if any.
        documents["roofline"] = roofline(profile, documents["intensity"], trace).as_json()
    flops, *others = run_sections({"flops": profile} | documents)
    shown = flops.parts[1:] if asked["detailed"] else []
    shown = [*([] if asked["told"] else [flops]), *others] if verbose else shown
    say(*(line for section in shown if section for line in as_text(section)))
    files = []
    try:
        if documents:
            if target.resolve() != source.resolve():
                prepare_folder(target)
            for name, document in documents.items():
                files.append(target / LIMITS[name])
                write_json(files[-1], document)
            if data := documents.get("roofline"):
                files.append(target / "roofline.png")
                title = workload.title_on(profile["environment"]["device"]["name"])
                write_bytes(files[-1], picture(draw_roofline, data, title))
        files += report()
        if files and (
            verbose or target.resolve() != source.resolve()
        ):  # else a run has told its folder
            say("", *file_lines(files, verbose))
    finally:  # a full disk must not lose the answer
        say(*(["", "Not read:", *(f"  {line}" for line in left_out)] if left_out else []))
        say("", *flops_answer(profile, documents, source, report_in(files)))


def documents_of_run(folder: Path, left_out: list[str]) -> tuple[dict | None, dict | None]:
    """operator_analysis.json and performance_summary.json of a folder; left_out takes why one of
    them cannot be read."""
    trace = read_or_leave_out(folder / "operator_analysis.json", OperatorAnalysis, left_out)
    summary = read_or_leave_out(
        folder / "performance_summary.json", PerformanceSummary, left_out, ("disturbance",)
    )
    return trace, summary


# ---- For a reader --------------------------------------------------------------------------------


def flops_answer(
    profile: dict, documents: dict[str, dict], source: Path, report: Path | None
) -> list[str]:
    """What a command that counts FLOPs ends with: MFU, what bounds it,
    where the time goes, what to try."""
    trace, summary = documents_of_run(source, [])
    rates = profile["performance_metrics"]
    spread = (
        f", std {rates['std_step_time_ms']:.2f}" if rates["std_step_time_ms"] is not None else ""
    )
    bound = (
        trace["verdict"]["line"]
        if trace
        else "not known here: no trace; --generate-roofline records one"
    )
    rows = {"Model FLOPS Utilization": mfu_text(profile), "Bound by": bound}
    if intensity := documents.get("intensity"):
        facts = intensity_facts(intensity)
        rows["Intensity"] = "; ".join(
            facts[name] for name in ("Arithmetic intensity", RIDGE, "Bandwidth used")
        )
    counts = profile["flops_analysis"]["reconciliation"]
    rows["Trust"] = agreement_text(counts, ", ".join(counters_in(counts["rows"])))
    steps = f"mean of {count_of(rates['steps_averaged'], 'step')}"
    rows["Trust"] += f"; step {rates['avg_step_time_ms']:.2f} ms, {steps}{spread}"
    if summary and summary["disturbance"]["disturbed"]:
        rows["Trust"] = f"times NOT trustworthy: the steps were disturbed; {rows['Trust']}"
    rows["Disturbance"] = disturbance_text(summary["disturbance"]) if summary else "not measured"
    rows["Largest parts"] = largest_parts_text(profile, documents.get("roofline"))
    rows["Try first"] = best_three(trace) if trace else least_times(profile, intensity)
    return answer(
        rows | {"Read on": read_on(report, "docs/flops_and_limits.md")},
        whole=("Disturbance", "Try first"),
    )


def largest_parts_text(profile: dict, roof: dict | None) -> str:
    """Three classes by time and share of their roofs if a trace has their times, else three
    components by FLOPs."""
    if roof and roof["profiled_step_ms"]:
        rows = by_time(roof["points"])[:3]
        of_roof = (f" ({row['share_of_roof']:.0%})" if row["share_of_roof"] else "" for row in rows)
        shares = (
            f"{row['name']} {row['share_of_time']:.1%}{text}"
            for row, text in zip(rows, of_roof, strict=True)
        )
        return f"{', '.join(shares)} of the step (of the roof)"
    parts = profile["flops_analysis"]["by_component"] or by_module(
        profile["flops_analysis"]["reconciliation"]
    )
    shares = ", ".join(f"{row['component']} {row['share']:.1%}" for row in parts[:3])
    return f"{shares} of the FLOPs" if parts else "not known here: no module was counted"


def by_module(reconciliation: dict) -> list[dict]:
    """Forward FLOPs of each module without those of the modules in it, alike ones of repeated
    blocks together, largest first."""
    counts = reconciliation["forward_flops_by_module"]
    [counted] = (row for row in reconciliation["rows"] if row["counter"] == "FlopCounterMode")
    own = Counter(counts | {"": counted["forward_flops"]})  # "": the model
    for name, flops in counts.items():
        around = name.rpartition(".")[0]
        while around not in own:  # a list of modules is not called itself
            around = around.rpartition(".")[0]
        own[around] -= flops
    sums = added_up((label, own[name]) for name, label in folded_names(counts).items())
    sums["the model itself"] = own[""]
    total = counted["forward_flops"]
    return [
        {"component": name, "share": flops / total} for name, flops in sums.most_common() if flops
    ]


def least_times(profile: dict, intensity: dict | None) -> list[str]:
    """How much faster the step could be by the roofs of the device alone, without a trace."""
    seconds, counts = (
        profile["performance_metrics"]["avg_step_time_ms"] / 1e3,
        profile["flops_analysis"],
    )
    efficiency, texts = profile["efficiency_metrics"], []
    if peak := efficiency["device_peak_flops"]:
        bound = seconds * peak / (counts["step_flops"] + counts["recomputed_flops"])
        texts.append(
            f"matmuls at the peak, all else hidden behind them: at most {bound:.2f}x as fast"
        )
    if intensity and efficiency["bandwidth_peaks"]:
        bound = seconds * efficiency["bandwidth_peaks"][0]["rate"] / intensity["minimum_step_bytes"]
        texts.append(f"everything fused, at the peak bandwidth: at most {bound:.2f}x as fast")
    return texts or ["not known here: no peak of this device is known; --peak sets one"]
