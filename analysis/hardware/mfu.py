"""What share of its device's peak did a run reach?"""

from analysis.hardware.ceilings import Ceiling, compute_ceilings
from harness.base.text import arithmetic


def known_peak(summary: dict) -> Ceiling | None:
    """The peak that the MFU of a run refers to, if already known: nothing is measured for it."""
    tflops = summary["performance"]["achieved_tflops"]
    if tflops is None:
        return None
    device, choice = (
        summary["environment"]["device"],
        summary["config"]["profiling"].get("peak", "auto"),
    )
    precision = arithmetic(summary["config"]["training"])
    ceilings = compute_ceilings(device, precision, choice, 1e12 * tflops, measure="kept")
    return ceilings[0] if ceilings else None


def mfu_percent(summary: dict) -> float | None:
    """MFU of a run, from its performance_summary.json; None if no peak is known."""
    peak = known_peak(summary)
    return peak and 1e14 * summary["performance"]["achieved_tflops"] / peak.rate
