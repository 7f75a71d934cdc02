"""The figure of a step's memory, from memory_timeline.json."""

import numpy as np
from matplotlib.figure import Figure

from analysis.memory.tables import place_of_peak, stack_of_memory
from analysis.report.figures.axes import SEAM, Segment, label_segments, new_axes
from analysis.report.palette import HATCHES, MEMORY_COLORS
from harness.base.units import MB


def draw_memory_timeline(memory: dict, about: str) -> Figure:
    """The figure of memory_timeline.png: live bytes by category over the step,
    phases and the peak marked."""
    timeline, peak_mb = memory["timeline"], memory["peak_bytes"] / MB
    place = place_of_peak(memory)
    title = f"Memory of a training step: peak (triangle) {peak_mb:.1f} MB in {place}"
    figure, axes = new_axes(title, 5, about)
    axes.spines["left"].set_visible(True)
    draw_categories(axes, timeline)
    mark_layers(axes, timeline["layer"])
    times_us, segments = np.asarray(timeline["time_us"]), []
    for row in memory["phases"]:
        first, last = np.searchsorted(times_us, (row["start_us"], row["end_us"]))
        axes.axvline(first, color="black", linewidth=0.6, linestyle=":")
        segments.append(Segment(first, last - first, 1.165 * peak_mb, row["name"], "#ffffff"))
    axes.plot(int(np.argmax(timeline["total_bytes"])), 1.015 * peak_mb, "kv", markersize=5)
    axes.set(xlim=(0, len(times_us) - 1), ylim=(0, 1.27 * peak_mb), ylabel="live tensors (MB)")
    axes.set_xlabel(f"allocations and frees of step {memory['step']}, in order")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), reverse=True, frameon=False)
    label_segments(axes, segments)
    return figure


def draw_categories(axes, timeline: dict) -> None:
    """Live bytes, one category above the other.  Tracking distorts time, so that the axis counts
    allocations and frees."""
    stack = stack_of_memory(timeline, [*MEMORY_COLORS])
    areas = axes.stackplot(
        range(len(timeline["time_us"])),
        list(stack.values()),
        labels=stack,
        colors=[MEMORY_COLORS[category] for category in stack],
        edgecolor=SEAM,
        linewidth=0,
        step="post",
    )
    for area, category in zip(areas, stack, strict=True):
        area.set_hatch(HATCHES.get(category))


def mark_layers(axes, layers: list[int | None]) -> None:
    """A stripe along the top: the layer that was running, with its number where it fits."""
    place = axes.get_xaxis_transform()
    centered = {"ha": "center", "va": "center", "fontsize": 7, "color": "white"}
    changes = [i for i in range(1, len(layers)) if layers[i] != layers[i - 1]]
    for first, last in zip([0, *changes], [*changes, len(layers)], strict=True):
        layer = layers[first]
        if layer is None:
            continue
        color = "#6b7480" if layer % 2 else "#aab2bc"
        axes.axvspan(first, last, ymin=0.955, ymax=1.0, linewidth=0, color=color)
        if last - first > len(layers) / 60:
            axes.text((first + last) / 2, 0.975, f"{layer}", transform=place, **centered)
    axes.text(1.008, 0.975, "layer", transform=axes.transAxes, ha="left", va="center", fontsize=7)
