"""Which documents of the run lie beside a trace?  In its folder, or in the one above."""

from pathlib import Path

from harness.base.documents import documents_beside
from harness.documents.flops import FlopsProfile
from harness.run.run_summary import PerformanceSummary

# The fields that the analysis of a trace reads.
OF_SUMMARY = (
    "environment",
    "config",
    "steps",
    "disturbance?.disturbed",
    "disturbance?.reasons",
    "no_sync",
    "ranks?",
    "performance.achieved_tflops",
)
OF_FLOPS = ("environment", "efficiency_metrics.peaks", "efficiency_metrics.bandwidth_peaks")


def summary_beside(path: Path, left_out: list[str] | None = None) -> dict | None:
    """performance_summary.json of the run that wrote a trace.  left_out takes why one that is there
    cannot be read."""
    lines = [] if left_out is None else left_out
    summaries = documents_beside(
        path, "performance_summary.json", PerformanceSummary, lines, OF_SUMMARY
    )
    return next(summaries, None)


def flops_profiles_beside(path: Path, left_out: list[str] | None = None) -> list[dict]:
    """Each flops_profile.json beside a trace."""
    lines = [] if left_out is None else left_out
    return list(documents_beside(path, "flops_profile.json", FlopsProfile, lines, OF_FLOPS))


def left_out_beside(path: Path) -> list[str]:
    """A line for each document beside a trace that cannot be read: analysis goes on without."""
    left_out: list[str] = []
    summary_beside(path, left_out)
    flops_profiles_beside(path, left_out)
    return left_out
