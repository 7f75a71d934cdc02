"""Where does the memory of a training step go?  Counted tensor by tensor, on a CPU as on a GPU."""

from __future__ import annotations

import numpy as np

from harness.timing import PHASES
from harness.units import MB

CATEGORY_COLORS = {
    "parameters": "#4e79a7",
    "optimizer": "#a0cbe8",
    "buffers": "#bab0ac",
    "gradients": "#f28e2b",
    "activations": "#59a14f",
    "temporaries": "#e15759",
}


def memory_lines(memory: dict, summary: dict) -> list[str]:
    """The summary that a run with --profile-memory prints, from memory_timeline.json and performance_summary.json."""
    phase_peak: dict[str, int] = {}
    for row in memory["phases"]:
        phase_peak[row["name"]] = max(row["peak_bytes"], phase_peak.get(row["name"], 0))
    reached = {p: f"{phase_peak[p] / MB:.1f} MB" if p in phase_peak else "not reached in this run" for p in PHASES}
    largest, peak = memory["largest_tensor"], memory["peak"]
    named = f"{largest['bytes'] / MB:.1f} MB ({tensor_name(largest)})" if largest else "none was made"
    return [
        "Memory Analysis Summary:",
        f"Peak Memory Usage: {summary['memory']['peak_mb']:.1f} MB",
        f"Average Memory Usage: {summary['memory']['average_mb']:.1f} MB",
        f"Memory at Forward Pass: {reached['forward']}",
        f"Memory at Backward Pass: {reached['backward']}",
        f"Memory at Optimizer Step: {reached['optimizer']}",
        f"Number of Allocations: {memory['allocations']}",
        f"Largest Tensor: {named}",
        f"A phase is given by its peak of {memory['source']}",
        f"The peak of the step, {memory['peak_bytes'] / MB:.1f} MB, is in {place_of_peak(memory)}:",
        *category_lines(memory),
        "",
        f"{'largest tensors at the peak':<58}{'dtype':>10}{'category':>14}{'MB':>10}",
        *(
            f"{tensor_name(row)[:57]:<58}{row['dtype']:>10}{row['category']:>14}{row['bytes'] / MB:>10.1f}"
            for row in peak["largest_tensors"]
        ),
        *kept_lines(memory),
        *(f"{row['what']:<70}{row['bytes'] / MB:>10.1f} MB" for row in memory["allocator"] or []),
    ]


def place_of_peak(memory: dict) -> str:
    """'backward of layers.3.attention.softmax'"""
    phase, where = memory["peak"]["phase"], memory["peak"]["where"]
    return f"{phase} of {where}" if phase and where != phase else where


def category_lines(memory: dict) -> list[str]:
    """Bytes at the peak by category, as measured and as predicted."""
    predicted = memory["predicted"]
    if predicted is None:
        lines = [f"  {name:<12}{size / MB:>10.1f} MB" for name, size in memory["peak"]["bytes_by_category"].items()]
        return [*lines, f"No prediction: {memory['predicted_reason']}"]
    lines = [f"  {'':<12}{'measured':>10}{'predicted':>14}"]
    for category, size in memory["peak"]["bytes_by_category"].items():
        lines.append(f"  {category:<12}{size / MB:>10.1f} MB{predicted['bytes_by_category'][category] / MB:>11.1f} MB")
    lines.append(f"  {'sum':<12}{memory['peak_bytes'] / MB:>10.1f} MB{predicted['peak_bytes'] / MB:>11.1f} MB")
    return [*lines, f"The prediction is off by {predicted['error_percent']:+.2f}%"]


def kept_lines(memory: dict) -> list[str]:
    """What a forward pass keeps for the backward one, by component, as measured and by formula."""
    if memory["predicted"] is None:
        return []
    titles = f"{'measured MB':>14}{'formula MB':>14}{'of it quadratic':>18}"
    lines = ["", f"{'kept for the backward pass, all layers':<40}{titles}"]
    rows = memory["predicted"]["kept_for_backward"]
    for row in rows:
        numbers = (row[name] / MB for name in ("bytes", "formula_bytes", "quadratic_bytes"))
        lines.append(f"{row['component']:<40}{next(numbers):>14.2f}{next(numbers):>14.2f}{next(numbers):>18.2f}")
    sums = [sum(row[name] for row in rows) / MB for name in ("bytes", "formula_bytes", "quadratic_bytes")]
    return [*lines, f"{'sum':<40}{sums[0]:>14.2f}{sums[1]:>14.2f}{sums[2]:>18.2f}"]


def tensor_name(row: dict) -> str:
    """'layers.0.attention scores [8, 8, 128, 128]' of a tensor made in the range layers.0.attention.scores."""
    backward = "backward of " if row["phase"] == "backward" else ""
    return f"{backward}{' '.join(row['where'].rsplit('.', 1))} {row['shape']}"


def draw_memory_timeline(memory: dict):
    """The figure of memory_timeline.png: live bytes by category over the step, phases and the peak marked."""
    from matplotlib.figure import Figure  # not pyplot: no global state, no display

    timeline = memory["timeline"]
    events = range(len(timeline["time_us"]))  # the ledger distorts time, so the axis counts what came and went
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    layers = [np.asarray(timeline[f"{category}_bytes"]) / MB for category in CATEGORY_COLORS]
    axes.stackplot(events, layers, labels=CATEGORY_COLORS, colors=CATEGORY_COLORS.values(), step="post")
    mark_layers(axes, timeline["layer"])
    times = np.asarray(timeline["time_us"])
    top = memory["peak_bytes"] / MB
    for row in memory["phases"]:
        first, last = np.searchsorted(times, (row["start_us"], row["end_us"]))
        axes.axvline(first, color="black", linewidth=0.6, linestyle=":")
        if last - first > len(times) / 40:
            axes.text((first + last) / 2, 1.165 * top, row["name"], ha="center", va="center")
    peak_event = int(np.argmax(timeline["total_bytes"]))
    text = f"peak {top:.1f} MB in {place_of_peak(memory)}"
    axes.annotate(text, (peak_event, top), (0, 12), textcoords="offset points", ha="center")
    axes.plot(peak_event, top, "kv", markersize=5)
    axes.set(xlim=(0, len(times) - 1), ylim=(0, 1.27 * top), ylabel="live tensors (MB)")
    axes.set_xlabel(f"allocations and frees of step {memory['step']}, in order")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), reverse=True, frameon=False)
    axes.set_title("Memory of one training step")
    return figure


def mark_layers(axes, layers: list[int | None]) -> None:
    """A stripe along the top: which layer was at work, its number where there is room."""
    place, top = axes.get_xaxis_transform(), {"ymin": 0.955, "ymax": 1.0, "linewidth": 0}
    changes = [i for i in range(1, len(layers)) if layers[i] != layers[i - 1]]
    for first, last in zip([0, *changes], [*changes, len(layers)], strict=True):
        layer = layers[first]
        if layer is not None:
            axes.axvspan(first, last, color="#6b7480" if layer % 2 else "#aab2bc", **top)
            if last - first > len(layers) / 60:
                middle = ((first + last) / 2, 0.975)
                axes.text(*middle, f"{layer}", transform=place, ha="center", va="center", fontsize=7, color="white")
    axes.text(-0.008, 0.975, "layer", transform=axes.transAxes, ha="right", va="center", fontsize=7)
