"""What do the rows of the precision study say?  Time and memory of each precision, relative to fp32."""

from __future__ import annotations

from harness.base.tables import Column, Section, column
from harness.base.units import megabytes
from studies.engine.columns import optional, status_column
from studies.engine.report import predicted_finding
from studies.training.results import PEAKS, PRECISION, SHAPE, TFLOPS, TIME_COLUMNS, title_of


def label(row: dict) -> str:
    return f"{row['size']} {row['precision']}"


def finding(rows: list[dict], available_bytes: int) -> list[str]:
    """Step time and predicted memory of each precision, relative to fp32."""
    measured = {row["precision"]: row for row in rows if row["status"] == "ok"}
    fp32 = measured.get("fp32")
    if fp32 is None or len(measured) < 2:
        return predicted_finding(rows, "predicted_peak_bytes", label, available_bytes)
    others = [row for row in measured.values() if row is not fp32]
    times = ", ".join(f"{row['precision']} {row['step_ms'] / fp32['step_ms']:.2f}" for row in others)
    first = f"Step time relative to fp32 ({fp32['step_ms']:,.2f} ms): {times}."
    if any(row["predicted_peak_bytes"] is None for row in measured.values()):
        return [first, f"Memory is not predicted: {fp32['predicted_peak_bytes_reason']}."]
    sizes = [f"{row['precision']} {row['predicted_peak_bytes'] / fp32['predicted_peak_bytes']:.2f}" for row in others]
    peak = megabytes(fp32["predicted_peak_bytes"])
    return [first, f"Predicted peak memory relative to fp32 ({peak}): {', '.join(sizes)}."]


def table(rows: list[dict]) -> Section:
    """Times, memory and losses; step time and memory also relative to fp32."""
    fp32 = next((row for row in rows if row["precision"] == "fp32"), {})

    def relative_to_fp32(name: str) -> Column:
        def text(row: dict) -> str | None:
            known = row[name] is not None and fp32.get(name) is not None
            return f"{row[name] / fp32[name]:.2f}" if known else None

        return Column("/ fp32", text)

    columns = (
        *SHAPE,
        PRECISION,
        *optional(*TIME_COLUMNS[:-2]),
        *TIME_COLUMNS[-2:],
        relative_to_fp32("step_ms"),
        *optional(TFLOPS, PEAKS[0]),
        PEAKS[1],
        relative_to_fp32("predicted_peak_bytes"),
        *optional(column("first loss", "first_loss", ".4f"), column("final loss", "final_loss", ".4f")),
        status_column(),
    )
    return Section(title_of("A training step by precision", rows), columns, rows)
