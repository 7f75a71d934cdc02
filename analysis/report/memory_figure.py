"""The figure of a step's memory, from memory_timeline.json."""

import numpy as np
from matplotlib.figure import Figure

from analysis.memory.tables import place_of_peak, stack_of_memory
from analysis.report.axes import SEAM, label_segments, new_axes
from analysis.report.palette import HATCHES, MEMORY_COLORS
from harness.base.units import MB


def draw_memory_timeline(memory: dict, about: str) -> Figure:
    """The figure of memory_timeline.png: live bytes by category over the step,
    phases and the peak marked."""
    timeline, top = memory["timeline"], memory["peak_bytes"] / MB
    title = f"Memory of a training step: peak (triangle) {top:.1f} MB in {place_of_peak(memory)}"
    figure, axes = new_axes(title, 5, about)
    axes.spines["left"].set_visible(True)
    events = range(
        len(timeline["time_us"])
    )  # tracking distorts time, so the axis counts allocations and frees
    stack = stack_of_memory(timeline, [*MEMORY_COLORS])
    style = {
        "edgecolor": SEAM,
        "linewidth": 0,
        "step": "post",
        "colors": [MEMORY_COLORS[name] for name in stack],
    }
    areas = axes.stackplot(events, [*stack.values()], labels=stack, **style)
    for area, category in zip(areas, stack, strict=True):
        area.set_hatch(HATCHES.get(category))
    mark_layers(axes, timeline["layer"])
    times, segments = np.asarray(timeline["time_us"]), []
    for row in memory["phases"]:
        first, last = np.searchsorted(times, (row["start_us"], row["end_us"]))
        axes.axvline(first, color="black", linewidth=0.6, linestyle=":")
        segments.append((first, last - first, 1.165 * top, row["name"], "#ffffff"))
    axes.plot(int(np.argmax(timeline["total_bytes"])), 1.015 * top, "kv", markersize=5)
    axes.set(xlim=(0, len(times) - 1), ylim=(0, 1.27 * top), ylabel="live tensors (MB)")
    axes.set_xlabel(f"allocations and frees of step {memory['step']}, in order")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), reverse=True, frameon=False)
    label_segments(axes, segments)
    return figure


def mark_layers(axes, layers: list[int | None]) -> None:
    """A stripe along the top: the layer that was running, with its number where it fits."""
    place, top = axes.get_xaxis_transform(), {"ymin": 0.955, "ymax": 1.0, "linewidth": 0}
    changes = [i for i in range(1, len(layers)) if layers[i] != layers[i - 1]]
    for first, last in zip([0, *changes], [*changes, len(layers)], strict=True):
        layer = layers[first]
        if layer is not None:
            axes.axvspan(first, last, color="#6b7480" if layer % 2 else "#aab2bc", **top)
            if last - first > len(layers) / 60:
                middle = ((first + last) / 2, 0.975)
                axes.text(
                    *middle,
                    f"{layer}",
                    transform=place,
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="white",
                )
    axes.text(1.008, 0.975, "layer", transform=axes.transAxes, ha="left", va="center", fontsize=7)
