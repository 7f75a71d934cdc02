"""The results template of the guide, filled from the runs of an exercise."""

from __future__ import annotations

from workshop.answers.shared import ANALYSIS, components, opportunities
from workshop.exercise.results import Answer, Results, numbered


def template_answers(results: Results, run: str, trace: str, flops: str | None = None) -> dict[str, Answer]:
    """R.1 to R.19.  run, trace, flops: the exercise's folders with the run, the analysis of its trace, its FLOPs."""
    summary, analysis = results.run(run), results.read(trace, ANALYSIS)
    mfu = Answer(None, "not measured in this exercise")
    if flops:
        mfu = results.read(flops, "flops_profile.json").answer("efficiency_metrics.mfu_percent")
    return {
        "R.1": summary.answer("environment.device.name"),
        "R.2": summary.answer("environment.packages.torch"),
        "R.3": summary.answer("config.model.parameters"),
        "R.4": summary.answer("training.batch_size"),
        "R.5": summary.answer("training.sequence_length"),
        "R.6": summary.answer("config.training.precision"),
        "R.7": summary.answer("performance.samples_per_sec"),
        "R.8": summary.answer("performance.tokens_per_sec"),
        "R.9": summary.answer("performance.median_step_time_ms"),
        "R.10": summary.answer("performance.std_step_time_ms"),
        "R.11": summary.answer("memory.peak_mb"),
        "R.12": summary.answer("performance.achieved_tflops"),
        "R.13": mfu,
        **numbered("R.14 R.15 R.16", components(analysis)),
        **numbered("R.17 R.18 R.19", opportunities(analysis)),
    }
