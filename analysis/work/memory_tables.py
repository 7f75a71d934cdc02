"""What fills the memory of a training step, tensor by tensor?  Tables and summary of memory_timeline.json."""

from __future__ import annotations

from harness.base.layer_names import starred
from harness.base.tables import Column, Table, column, sum_row, text_of
from harness.base.units import MB, megabytes
from harness.instruments.phases import PHASES

TENSOR_COLUMNS = [
    Column("largest tensors at the peak", lambda row: tensor_name(row), left=True),
    column("dtype", "dtype", left=True),
    column("category", "category", left=True),
    column("MB", "bytes", ",.1f", MB),
]
KEPT_SIZES = ("bytes", "formula_bytes", "quadratic_bytes")  # of what the forward pass keeps for the backward pass


def memory_tables(memory: dict) -> dict[str, Table]:
    """The tables of memory_timeline.json, by name; without rows where nothing is known."""
    categories = [
        column("at the peak", "name", left=True),
        column("measured MB", "measured", ",.1f", MB),
        column("predicted MB", "predicted", ",.1f", MB),
    ]
    kept = [
        column("kept for the backward pass, all layers", "component", left=True),
        column("measured MB", "bytes", ",.2f", MB),
        column("formula MB", "formula_bytes", ",.2f", MB),
        column("quadratic in sequence length, MB", "quadratic_bytes", ",.2f", MB),
    ]
    rows = memory["predicted"]["kept_for_backward"] if memory["predicted"] else []
    allocator = [column("GPU memory in use", "what", left=True), column("MB", "bytes", ",.1f", MB)]
    return {
        "categories": (categories, category_rows(memory)),
        "tensors": (TENSOR_COLUMNS, memory["peak"]["largest_tensors"]),
        "kept": (kept, [*rows, sum_row("component", "sum", rows, KEPT_SIZES)] if rows else []),
        "allocator": (allocator, memory["allocator"] or []),
    }


def memory_lines(memory: dict, summary: dict) -> list[str]:
    """The summary that a run with --profile-memory prints, from memory_timeline.json and performance_summary.json."""
    phase_peak: dict[str, int] = {}
    for row in memory["phases"]:
        phase_peak[row["name"]] = max(row["peak_bytes"], phase_peak.get(row["name"], 0))
    reached = {p: megabytes(phase_peak[p]) if p in phase_peak else "not reached in this run" for p in PHASES}
    largest = memory["largest_tensor"]
    named = f"{megabytes(largest['bytes'])} ({tensor_name(largest)})" if largest else "the step allocated none"
    return [
        "Memory Analysis Summary:",
        f"Peak Memory Usage: {summary['memory']['peak_mb']:.1f} MB",
        f"Average Memory Usage: {summary['memory']['average_mb']:.1f} MB",
        f"Memory at Forward Pass: {reached['forward']}",
        f"Memory at Backward Pass: {reached['backward']}",
        f"Memory at Optimizer Step: {reached['optimizer']}",
        f"Number of Allocations: {memory['allocations']}",
        f"Largest Tensor: {named}",
        f"At the peak: {parts_of_peak(memory['peak']['bytes_by_category'])}",
    ]


def peak_line(memory: dict) -> str:
    """Where the step needs most, and what was predicted."""
    peak = megabytes(memory["peak_bytes"])
    return f"The step's peak, {peak}, is in {place_of_peak(memory)}; {prediction_text(memory)}"


def memory_table_lines(memory: dict) -> list[str]:
    """The tables of a run with --profile-memory --verbose."""
    tables = memory_tables(memory)
    columns, tensors = tables["tensors"]
    return text_of((tables | {"tensors": (columns, folded_layers(tensors))}).values())


def parts_of_peak(sizes: dict[str, float], unit: float = MB) -> str:
    """The categories at a peak, the three largest by name; `unit` of MB in the sizes."""
    found = sorted(sizes.items(), key=lambda item: -item[1])
    named = ", ".join(f"{name} {size / unit:,.1f}" for name, size in found[:3])
    return f"{named}, others {sum(size for _, size in found[3:]) / unit:,.1f} MB"


def place_of_peak(memory: dict) -> str:
    """'backward of layers.3.attention.softmax'"""
    phase, where = memory["peak"]["phase"], memory["peak"]["where"]
    return f"{phase} of {where}" if phase and where != phase else where


def prediction_text(memory: dict) -> str:
    predicted = memory["predicted"]
    if predicted is None:
        return f"no prediction: {memory['predicted_reason']}"
    return f"predicted {megabytes(predicted['peak_bytes'])}, off by {predicted['error_percent']:+.2f}%"


def category_rows(memory: dict) -> list[dict]:
    """Bytes at the peak by category and in total, measured and predicted."""
    measured, predicted = memory["peak"]["bytes_by_category"] | {"sum": memory["peak_bytes"]}, {}
    if found := memory["predicted"]:
        predicted = found["bytes_by_category"] | {"sum": found["peak_bytes"]}
    return [{"name": name, "measured": size, "predicted": predicted.get(name)} for name, size in measured.items()]


def folded_layers(tensors: list[dict]) -> list[dict]:
    """Tensors that differ only in their layer as one row, `layers.*`, with their number and bytes in total."""
    groups: dict[tuple, list[dict]] = {}
    for row in tensors:
        key = (starred(row["where"]), row["phase"], str(row["shape"]), row["dtype"], row["category"], row["bytes"])
        groups.setdefault(key, []).append(row)
    return [
        row | {"where": key[0], "shape": f"{row['shape']} x {1 + len(more)}", "bytes": row["bytes"] * (1 + len(more))}
        if more
        else row
        for key, (row, *more) in groups.items()
    ]


def tensor_name(row: dict) -> str:
    """'layers.0.attention scores [8, 8, 128, 128]' for a tensor allocated in the range layers.0.attention.scores."""
    backward = "backward of " if row["phase"] == "backward" else ""
    return f"{backward}{' '.join(row['where'].rsplit('.', 1))} {row['shape']}"
