"""How far is a step from what its device could do?  Bytes moved and the roofline,
from a flops_profile.json."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from analysis.commands.analyze_traces import print_not_read, report_in
from analysis.diagnosis.document import OperatorAnalysis, read_answers
from analysis.diagnosis.text import best_three
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
from harness.base.sections import Section, as_text
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
    left_out: list[str] = []
    trace, _ = documents_of_run(source, left_out)
    documents = limit_documents(workload, profile, trace, asked)
    for section in sections_asked_for(profile, documents, asked):
        say(*as_text(section))
    is_elsewhere = target.resolve() != source.resolve()
    files = []
    try:
        if documents and is_elsewhere:
            prepare_folder(target)
        files += write_limits(target, workload, profile, documents)
        files += report()
        if files and (asked["verbose"] or is_elsewhere):  # else a run has told its folder
            say("", *file_lines(files, asked["verbose"]))
    finally:  # a full disk must not lose the answer
        print_not_read(left_out)
        say("", *flops_answer(profile, documents, source, report_in(files)))


def limit_documents(
    workload: Workload, profile: dict, trace: OperatorAnalysis | None, asked: dict[str, bool]
) -> dict[str, dict]:
    """Those of intensity and roofline that are asked for, by the names of run_sections().

    trace: in the source folder, if any: the operators' times are its own."""
    if not (asked["intensity"] or asked["roof"]):
        return {}
    documents = {"intensity": computational_intensity(profile, workload).as_json()}
    if asked["roof"]:
        classes, problems = [], []
        if trace:
            classes, problems = trace.classes, trace.integrity.problems
        roofs = roofline(profile, documents["intensity"], classes, problems)
        documents["roofline"] = roofs.as_json()
    return documents


def sections_asked_for(
    profile: dict, documents: dict[str, dict], asked: dict[str, bool]
) -> list[Section]:
    """Of the profile and of the limits; those that have anything to show."""
    flops, *others = run_sections({"flops": profile, **documents})
    sections = []
    if asked["verbose"]:
        sections = others
        if not asked["told"]:
            sections = [flops, *others]
    elif asked["detailed"]:
        sections = flops.parts[1:]
    return [section for section in sections if section]


def write_limits(
    target: Path, workload: Workload, profile: dict, documents: dict[str, dict]
) -> list[Path]:
    """The documents, and the figure of the roofline; returns the files."""
    files = []
    for name, document in documents.items():
        files.append(target / LIMITS[name])
        write_json(files[-1], document)
    if "roofline" in documents:
        files.append(target / "roofline.png")
        title = workload.title_on(profile["environment"]["device"]["name"])
        write_bytes(files[-1], picture(draw_roofline, documents["roofline"], title))
    return files


def documents_of_run(
    folder: Path, left_out: list[str]
) -> tuple[OperatorAnalysis | None, dict | None]:
    """The answers of the trace of a folder, and its performance_summary.json; left_out takes why
    one of them cannot be read."""
    trace = read_answers(folder / "operator_analysis.json", left_out)
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
    intensity = documents.get("intensity")
    bound = "not known here: no trace; --generate-roofline records one"
    if trace:
        bound = trace.verdict.line
    rows = {"Model FLOPS Utilization": mfu_text(profile), "Bound by": bound}
    if intensity:
        facts = intensity_facts(intensity)
        names = ("Arithmetic intensity", RIDGE, "Bandwidth used")
        rows["Intensity"] = "; ".join(facts[name] for name in names)
    rows["Trust"] = trust_text(profile, summary)
    rows["Disturbance"] = disturbance_text(summary["disturbance"]) if summary else "not measured"
    rows["Largest parts"] = largest_parts_text(profile, documents.get("roofline"))
    rows["Try first"] = best_three(trace) if trace else least_times(profile, intensity)
    rows["Read on"] = read_on(report, "docs/flops_and_limits.md")
    return answer(rows, whole=("Disturbance", "Try first"))


def trust_text(profile: dict, summary: dict | None) -> str:
    """How far the counters agree, and which steps the times are of."""
    counts, rates = profile["flops_analysis"]["reconciliation"], profile["performance_metrics"]
    text = agreement_text(counts, ", ".join(counters_in(counts["rows"])))
    steps = count_of(rates["steps_averaged"], "step")
    text += f"; step {rates['avg_step_time_ms']:.2f} ms, mean of {steps}"
    if rates["std_step_time_ms"] is not None:
        text += f", std {rates['std_step_time_ms']:.2f}"
    if summary and summary["disturbance"]["disturbed"]:
        return f"times NOT trustworthy: the steps were disturbed; {text}"
    return text


def largest_parts_text(profile: dict, roof: dict | None) -> str:
    """Three classes by time and share of their roofs if a trace has their times, else three
    components by FLOPs."""
    if roof and roof["profiled_step_ms"]:
        texts = [class_text(row) for row in by_time(roof["points"])[:3]]
        return f"{', '.join(texts)} of the step (of the roof)"
    counts = profile["flops_analysis"]
    parts = counts["by_component"] or by_module(counts["reconciliation"])
    if not parts:
        return "not known here: no module was counted"
    shares = ", ".join(f"{row['component']} {row['share']:.1%}" for row in parts[:3])
    return f"{shares} of the FLOPs"


def class_text(row: dict) -> str:
    """'matmul 60.0% (35%)'; row: a point of the roofline with a time."""
    text = f"{row['name']} {row['share_of_time']:.1%}"
    return f"{text} ({row['share_of_roof']:.0%})" if row["share_of_roof"] else text


def by_module(reconciliation: dict) -> list[dict]:
    """Forward FLOPs of each module without those of the modules in it, alike ones of repeated
    blocks together, largest first."""
    counts = reconciliation["forward_flops_by_module"]
    [counted] = (row for row in reconciliation["rows"] if row["counter"] == "FlopCounterMode")
    own = Counter(counts)
    own[""] = counted["forward_flops"]  # of the model
    for name, flops in counts.items():
        around = name.rpartition(".")[0]
        while around not in own:  # a list of modules is not called itself
            around = around.rpartition(".")[0]
        own[around] -= flops
    sums = added_up((label, own[name]) for name, label in folded_names(counts).items())
    sums["the model itself"] = own[""]
    total = counted["forward_flops"]
    rows = []
    for name, flops in sums.most_common():
        if flops:
            rows.append({"component": name, "share": flops / total})
    return rows


def least_times(profile: dict, intensity: dict | None) -> list[str]:
    """How much faster the step could be by the roofs of the device alone, without a trace."""
    seconds = profile["performance_metrics"]["avg_step_time_ms"] / 1e3
    counts, efficiency = profile["flops_analysis"], profile["efficiency_metrics"]
    peak, texts = efficiency["device_peak_flops"], []
    if peak:
        bound = seconds * peak / (counts["step_flops"] + counts["recomputed_flops"])
        texts.append(
            f"matmuls at the peak, all else hidden behind them: at most {bound:.2f}x as fast"
        )
    if intensity and efficiency["bandwidth_peaks"]:
        bound = seconds * efficiency["bandwidth_peaks"][0]["rate"] / intensity["minimum_step_bytes"]
        texts.append(f"everything fused, at the peak bandwidth: at most {bound:.2f}x as fast")
    return texts or ["not known here: no peak of this device is known; --peak sets one"]
