"""The results template of the guide, filled from the runs of an exercise."""

from workshop.answers.shared import ANALYSIS, components, opportunities
from workshop.exercise.results import Answer, Results, numbered

OF_SUMMARY = (
    "environment.device.name environment.packages.torch config.model.parameters training.batch_size "
    "training.sequence_length config.training.precision performance.samples_per_sec performance.tokens_per_sec "
    "performance.median_step_time_ms performance.std_step_time_ms memory.peak_mb performance.achieved_tflops"
).split()


def template_answers(results: Results, run: str, trace: str, flops: str | None = None) -> dict[str, Answer]:
    """R.1 to R.19.  run, trace, flops: the exercise's folders with the run, the analysis of its trace, its FLOPs."""
    summary, analysis = results.run(run), results.read(trace, ANALYSIS)
    mfu = Answer(None, "not measured in this exercise")
    if flops:
        mfu = results.read(flops, "flops_profile.json").answer("efficiency_metrics.mfu_percent")
    return {
        **numbered("R.1 R.2 R.3 R.4 R.5 R.6 R.7 R.8 R.9 R.10 R.11 R.12", map(summary.answer, OF_SUMMARY)),
        "R.13": mfu,
        **numbered("R.14 R.15 R.16", components(analysis)),
        **numbered("R.17 R.18 R.19", opportunities(analysis)),
    }
