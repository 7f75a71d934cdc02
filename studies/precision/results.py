"""What do the rows of the precision study say?  Time and memory of each precision, beside fp32."""

from analysis.comparison.noise import as_fast
from harness.base.sections import Section
from harness.base.tables import Column, column
from harness.base.units import megabytes
from studies.engine.columns import compared, optional, status_column
from studies.training.results import PEAKS, PRECISION, SHAPE, TFLOPS, TIME_COLUMNS, title_of


def label(row: dict) -> str:
    return f"{row['size']} {row['precision']}"


def result(row: dict) -> str:
    return f"{row['step_ms']:.2f} ms"


def finding(rows: list[dict]) -> list[str]:
    """Step time and predicted memory of each precision, relative to fp32."""
    fp32 = next((row for row in rows if row["precision"] == "fp32"), None)
    others = [row for row in rows if row is not fp32]
    if fp32 is None or not others:
        return [f"Nothing to compare: {', '.join(map(label, rows))} alone."]
    judgements = {row["precision"]: compared(row, fp32, "step") for row in others}
    times = "; ".join(
        f"{name} {as_fast(ratio, word=word)}" for name, (ratio, word) in judgements.items()
    )
    first = f"A step, relative to fp32 ({fp32['step_ms']:,.2f} ms): {times}."
    if any(row["predicted_peak_bytes"] is None for row in rows):
        return [first, f"Memory is not predicted: {fp32['predicted_peak_bytes_reason']}."]
    sizes = [
        f"{row['precision']} {row['predicted_peak_bytes'] / fp32['predicted_peak_bytes']:.2f}"
        for row in others
    ]
    peak = megabytes(fp32["predicted_peak_bytes"])
    return [first, f"Predicted peak memory relative to fp32 ({peak}): {', '.join(sizes)}."]


def table(rows: list[dict]) -> Section:
    """Times, memory and losses; step time and memory also relative to fp32."""
    fp32 = next((row for row in rows if row["precision"] == "fp32"), {})

    def relative(name: str, row: dict) -> float | None:
        return row[name] / fp32[name] if row[name] and fp32.get(name) else None

    columns = (
        *SHAPE,
        PRECISION,
        *optional(*TIME_COLUMNS[:-2]),
        *TIME_COLUMNS[-2:],
        Column(
            "as fast as fp32",
            lambda row: (ratio := relative("step_ms", row)) and as_fast(ratio, short=True),
        ),
        *optional(TFLOPS, PEAKS[0]),
        PEAKS[1],
        Column("/ fp32", lambda row: relative("predicted_peak_bytes", row), ".2f"),
        *optional(
            column("first loss", "first_loss", ".4f"), column("final loss", "final_loss", ".4f")
        ),
        status_column(),
    )
    return Section(title_of("A training step by precision", rows), columns, rows)
