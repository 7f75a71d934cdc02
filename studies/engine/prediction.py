"""What is predicted of rows, and said of a sweep that measured nothing?"""

from __future__ import annotations

from collections.abc import Callable

from analysis.prediction.memory import peak_bytes
from analysis.work.fake_step import FakeRunError
from harness.base.files import explain_nulls
from harness.base.units import megabytes
from harness.model.workload import Workload


def predicted_peak(workload: Workload, on_gpu: bool, name: str = "predicted_peak_bytes") -> dict:
    """The peak of a step by a fake-tensor run, as a column; null with the reason if it cannot run on fake tensors."""
    try:
        return {name: peak_bytes(workload, on_gpu)}
    except FakeRunError as error:
        return explain_nulls({name: None}, str(error))


def predicted_finding(rows: list[dict], key: str, label: Callable[[dict], str], available_bytes: int) -> list[str]:
    """The finding of a sweep that measured nothing: the range of predicted peaks, and which of them fit."""

    def peak_of(row: dict) -> str:
        return f"{megabytes(row[key])} ({label(row)})"

    known = sorted((row for row in rows if row[key] is not None), key=lambda row: row[key])
    if not known:
        return ["Nothing was measured, and nothing could be predicted; the column status says why."]
    least, most = known[0], known[-1]
    too_large = [row for row in known if row[key] > available_bytes]
    available = f"the {megabytes(available_bytes)} available"
    if len(known) == 1:
        return [f"Predicted peak: {peak_of(most)}; it {'does not fit' if too_large else 'fits'} in {available}."]
    first = f"Predicted peaks: from {peak_of(least)} to {peak_of(most)}."
    if not too_large:
        return [first, f"All of them fit in {available}."]
    count = f"{len(too_large)} of {len(known)}" if len(too_large) < len(known) else "All of them"
    verb = "does not" if len(too_large) == 1 else "do not"
    return [first, f"{count} {verb} fit in {available}, the smallest: {peak_of(too_large[0])}."]
