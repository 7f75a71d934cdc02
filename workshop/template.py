"""The results template of README.md, filled from the runs of an exercise."""

from __future__ import annotations

from workshop.results import Answer, Results, Source

NOT_MEASURED = "not measured in this exercise"


def template_answers(
    results: Results, run: str, trace: str | None = None, flops: str | None = None
) -> dict[str, Answer]:
    """R.1 and on.  run, trace, flops: folders of the exercise that hold the run, its trace's analysis, its FLOPs."""
    summary = results.run(run)
    arguments, model = summary["config.arguments"], summary["config.model"]
    device = summary["environment.device.name"]
    versions = summary["environment.packages"]
    fp = f"{summary.name}: config"
    found = {
        "R.1": summary.says(device, "environment.device.name"),
        "R.2": summary.says(f"torch {versions['torch']}", "environment.packages"),
        "R.3": summary.says(model["parameters"], "config.model.parameters"),
        "R.4": Answer(summary["training.batch_size"], f"{summary.name}: training.batch_size"),
        "R.5": Answer(summary["training.sequence_length"], f"{summary.name}: training.sequence_length"),
        "R.6": Answer(arguments["precision"], f"{fp}.arguments.precision"),
        "R.7": summary.answer("performance.samples_per_sec"),
        "R.8": summary.answer("performance.tokens_per_sec"),
        "R.9": summary.answer("performance.median_step_time_ms"),
        "R.10": summary.answer("performance.std_step_time_ms"),
        "R.11": summary.answer("memory.peak_mb"),
        "R.12": summary.answer("performance.achieved_tflops"),
        "R.13": Answer(None, NOT_MEASURED),
    }
    if flops:
        found["R.13"] = results.read(flops, "flops_profile.json").answer("efficiency_metrics.mfu_percent")
    analysis = results.read(trace, "operator_analysis.json") if trace else None
    for i in range(3):
        found[f"R.{14 + i}"] = bottleneck(analysis, i)
        found[f"R.{17 + i}"] = target(analysis, i)
    return found


def bottleneck(analysis: Source | None, i: int) -> Answer:
    """The i-th component by time, with its share."""
    if analysis is None:
        return Answer(None, NOT_MEASURED)
    rows = sorted(analysis["components"], key=lambda row: -row["ms_per_step"])
    if i >= len(rows):
        return Answer(None, f"{analysis.name}: {len(rows)} components")
    return analysis.says(rows[i]["component"], f"{rows[i]['share']:.1%} of the step, {rows[i]['ms_per_step']:.1f} ms")


def target(analysis: Source | None, i: int) -> Answer:
    """The i-th opportunity by its bound."""
    if analysis is None:
        return Answer(None, NOT_MEASURED)
    rows = analysis["opportunities"]
    if i >= len(rows):
        return Answer(None, f"{analysis.name}: {len(rows)} opportunities")
    return analysis.says(rows[i]["name"], f"{bound_text(rows[i])}: {rows[i]['evidence']}")


def bound_text(opportunity: dict) -> str:
    """What it can bring, of which some have no figure."""
    bound = opportunity["speedup_bound"]
    return "no bound" if bound is None else f"at most {bound:.2f}x"
