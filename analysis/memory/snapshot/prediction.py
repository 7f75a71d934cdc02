"""What was predicted of the peak, beside what was held."""

from __future__ import annotations

from collections.abc import Mapping

from analysis.memory.snapshot.document import HeldBytes, PredictedBytes
from harness.base.units import MB

AS_PREDICTED = 0.02  # relative difference of which nothing is said
# What a dry run and a snapshot call the same.  A snapshot sees but the time at which something was
# made: what was there before its recording is all that a training step keeps.
ALIKE = {
    "parameters, buffers and optimizer state": (
        ("parameters", "gathered parameters", "buffers", "optimizer"),
        ("before_the_recording", "optimizer_state"),
        "what was there before has library workspaces, and gradients of an earlier step, too",
        "the peak is before the optimizer made its state, or on another number of ranks",
    ),
    "gradients": (
        ("gradients", "buckets"),
        ("gradients",),
        "several backward passes, or gradients in another dtype",
        "gradients of an earlier step are in what was there before, or the peak comes before them",
    ),
    "activations": (
        ("activations",),
        ("activations", "kept"),
        "the program keeps more for the backward pass than the step that was predicted",
        "the peak comes before all of them are there, or after some are freed",
    ),
    "temporaries": (
        ("temporaries",),
        ("temporaries",),
        "buffers of kernels and of the optimizer that the prediction does not count",
        "kernels that make no intermediate tensor, or a peak at another operator",
    ),
}


def predicted_rows(
    predicted_bytes: Mapping[str, float], held: HeldBytes, peak_bytes: int
) -> list[PredictedBytes]:
    """A row for each of ALIKE, then one for the peak.  predicted_bytes: by category of a dry run,
    at its peak."""
    rows = []
    for category, (names, held_names, why_more, why_less) in ALIKE.items():
        predicted = sum(predicted_bytes.get(name, 0.0) for name in names)
        size = sum(getattr(held, name) for name in held_names)
        rows.append(predicted_row(category, predicted, size, why_more, why_less))
    total = sum(predicted_bytes.values())
    furthest = max(rows, key=lambda row: abs(row.held_bytes - row.predicted_bytes))
    why = f"most of it in {furthest.category}: {furthest.difference}"
    rows.append(predicted_row("peak", total, peak_bytes, why, why))
    return rows


def predicted_row(
    category: str, predicted: float, held: int, why_more: str, why_less: str
) -> PredictedBytes:
    difference = held - predicted
    text = why_more if difference > 0 else why_less
    if abs(difference) <= AS_PREDICTED * max(predicted, 1.0 * MB):
        text = "as predicted"
    return PredictedBytes(
        category=category, predicted_bytes=predicted, held_bytes=held, difference=text
    )
