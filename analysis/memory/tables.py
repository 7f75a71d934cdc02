"""What fills the memory of a training step, tensor by tensor?  Tables and summary of
memory_timeline.json, and of what a profiled program holds."""

from collections.abc import Sequence

from harness.base.layer_names import starred
from harness.base.sections import Section
from harness.base.tables import Column, added_up, column, grouped, sum_row, text_columns
from harness.base.units import MB, megabytes
from harness.instruments.phases import PHASES

TENSOR_COLUMNS = [
    Column("largest tensors at the peak", lambda row: tensor_name(row), left=True),
    *text_columns("dtype", "category"),
    column("MB", "bytes", ",.1f", MB),
]
# Of what the forward pass keeps for the backward pass.
KEPT_SIZES = ("bytes", "formula_bytes", "quadratic_bytes")


def memory_section(memory: dict) -> Section:
    """Where the step needs most, what was predicted, and what fills the memory; without rows what
    is not known."""
    categories = [
        column("category", "name", left=True),
        column("measured MB", "measured", ",.1f", MB),
        column("predicted MB", "predicted", ",.1f", MB),
    ]
    kept = [
        column("component, all layers", "component", left=True),
        column("measured MB", "bytes", ",.2f", MB),
        column("formula MB", "formula_bytes", ",.2f", MB),
        column("quadratic in sequence length, MB", "quadratic_bytes", ",.2f", MB),
    ]
    rows = []
    if memory["predicted"]:
        rows = [*memory["predicted"]["kept_for_backward"]]
    if rows:
        rows.append(sum_row("component", "sum", rows, KEPT_SIZES))
    allocator = [column("what", "what", left=True), column("MB", "bytes", ",.1f", MB)]
    peak = f"{megabytes(memory['peak_bytes'])} in {place_of_peak(memory)}: {memory['source']}"
    made_of = parts_of_peak(memory["peak"]["bytes_by_category"])
    facts = {"Peak of the step": peak, "Made of": made_of, "Prediction": prediction_text(memory)}
    parts = [
        Section("At the peak", categories, category_rows(memory)),
        Section("Tensors", TENSOR_COLUMNS, folded_layers(memory["peak"]["largest_tensors"])),
        Section("Kept for the backward pass", kept, rows),
        Section("GPU memory in use", allocator, memory["allocator"] or []),
    ]
    return Section("Memory", facts=facts, figure="memory_timeline", parts=parts)


def memory_lines(memory: dict, summary: dict) -> list[str]:
    """The summary that a run with --profile-memory prints,
    from memory_timeline.json and performance_summary.json."""
    reached = dict.fromkeys(PHASES, "not reached in this run")
    for phase, rows in grouped(memory["phases"], lambda row: row["name"]).items():
        reached[phase] = megabytes(max(row["peak_bytes"] for row in rows))
    largest = memory["largest_tensor"]
    named = "the step allocated none"
    if largest:
        named = f"{megabytes(largest['bytes'])} ({tensor_name(largest)})"
    return [
        "Memory Analysis Summary:",
        f"Peak Memory Usage: {summary['memory']['peak_mb']:.1f} MB",
        f"Average Memory Usage: {summary['memory']['average_mb']:.1f} MB",
        f"Memory at Forward Pass: {reached['forward']}",
        f"Memory at Backward Pass: {reached['backward']}",
        f"Memory at Optimizer Step: {reached['optimizer']}",
        f"Number of Allocations: {memory['allocations']}",
        f"Largest Tensor: {named}",
    ]


def parts_of_peak(sizes: dict[str, float], unit: float = MB, name: str = "MB") -> str:
    """The categories at a peak, the three largest by name, in this unit of the sizes."""
    in_order = sorted(sizes.items(), key=lambda item: -item[1])
    named = ", ".join(f"{part} {size / unit:,.1f}" for part, size in in_order[:3])
    others = sum(size for _, size in in_order[3:])
    return f"{named}, others {others / unit:,.1f} {name}"


def place_of_peak(memory: dict) -> str:
    """'backward of layers.3.attention.softmax'"""
    phase, where = memory["peak"]["phase"], memory["peak"]["where"]
    return f"{phase} of {where}" if phase and where != phase else where


def prediction_text(memory: dict) -> str:
    predicted = memory["predicted"]
    if predicted is None:
        return f"no prediction: {memory['predicted_reason']}"
    return (
        f"predicted {megabytes(predicted['peak_bytes'])}, off by {predicted['error_percent']:+.2f}%"
    )


def category_rows(memory: dict) -> list[dict]:
    """Bytes at the peak by category and in total, measured and predicted."""
    predicted = memory["predicted"] or {"bytes_by_category": {}, "peak_bytes": None}
    rows = []
    for name, size in memory["peak"]["bytes_by_category"].items():
        of_prediction = predicted["bytes_by_category"].get(name)
        rows.append({"name": name, "measured": size, "predicted": of_prediction})
    measured, of_prediction = memory["peak_bytes"], predicted["peak_bytes"]
    rows.append({"name": "sum", "measured": measured, "predicted": of_prediction})
    return rows


def folded_layers(tensors: list[dict]) -> list[dict]:
    """Tensors that differ only in their layer as one row, `layers.*`, with their number and bytes
    in total."""

    def alike(row: dict) -> tuple:
        same = (row[name] for name in ("phase", "dtype", "category", "bytes"))
        return starred(row["where"]), str(row["shape"]), *same

    rows = []
    for (where, *_), same in grouped(tensors, alike).items():
        row, number = same[0], len(same)
        if number > 1:
            shape = f"{row['shape']} x {number}"
            row = {**row, "where": where, "shape": shape, "bytes": row["bytes"] * number}
        rows.append(row)
    return rows


def tensor_name(row: dict) -> str:
    """'layers.0.attention scores [8, 8, 128, 128]' for a tensor allocated
    in the range layers.0.attention.scores."""
    backward = "backward of " if row["phase"] == "backward" else ""
    return f"{backward}{' '.join(row['where'].rsplit('.', 1))} {row['shape']}"


def stack_of_memory(timeline: dict, categories: Sequence[str]) -> dict[str, list[float]]:
    """Live MB by category after each event of memory_timeline.json,
    of those categories that it has."""
    stack = {}
    for name in categories:
        if f"{name}_bytes" in timeline:
            stack[name] = [size / MB for size in timeline[f"{name}_bytes"]]
    return stack


# ---- program.json --------------------------------------------------------------------------------


HELD_COLUMNS = [*text_columns("category", "part"), column("MB", "bytes", ",.2f", MB)]


def program_section(program: dict) -> Section:
    """What the tensors of the first rank of a profiled program hold after its recorded steps."""
    first = min(row["rank"] for row in program["memory"])
    return held_memory_section([row for row in program["memory"] if row["rank"] == first])


def held_memory_section(rows: list[dict], ran_out: dict | None = None) -> Section:
    """rows: HeldMemory of program.json.  ran_out: the error that ended the program,
    and its largest tensors."""
    sizes = added_up((row["category"], row["bytes"]) for row in rows)
    facts = {name: f"{size / MB:,.1f} MB" for name, size in sizes.items() if size}
    title, note = "Memory by category and part", []
    if ran_out:
        title = f"Memory ran out: {ran_out['error']}"
        tensors = [
            f"{tensor['shape']} {tensor['dtype']}, {tensor['bytes'] / MB:,.1f} MB"
            for tensor in ran_out["largest"]
        ]
        note = [f"The largest tensors then: {'; '.join(tensors)}."]
        for name, size in (
            ("Allocated then", ran_out["allocated_bytes"]),
            ("Peak up to the step before", ran_out["peak_before_bytes"]),
        ):
            if size is not None:
                facts[name] = f"{size / MB:,.1f} MB"
    rows = sorted(rows, key=lambda row: -row["bytes"])
    return Section(title, HELD_COLUMNS, rows, note, facts, label="part", sums=("bytes",))
