"""Figures of a profile, from its JSON documents alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib
import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure  # not pyplot: no global state, no display
from matplotlib.patches import Patch
from matplotlib.ticker import NullFormatter

from analysis.wording import shortened

WIDTH = 10.5  # inches
PALETTE = (
    "#4e79a7 #f28e2b #59a14f #e15759 #b07aa1 #76b7b2 #edc948 #ff9da7 #9c755f #a0cbe8 #ffbe7d #8cd17d #d4a6c8 #86bcb6 "
    "#f1ce63 #fabfd2 #d7b5a6 #499894 #d37295 #79706e"
).split()
GREY = {"idle": "#e6e6e6", "framework overhead": "#9a9a9a", "unattributed": "#404040", "other": "#c8c8c8"}
IDLE_GREYS = ["#d9d9d9", "#bfbfbf", "#a6a6a6", "#8c8c8c", "#737373", "#595959", "#404040"]
PHASE_COLORS = {"data": "#edc948", "forward": "#4e79a7", "backward": "#f28e2b", "optimizer": "#59a14f"}


def colors_of(analysis: dict) -> dict[str, str]:
    """A color for each component, the same in every figure; the smallest get none if there are too many."""
    named = [row["component"] for row in analysis["components"] if row["component"] not in GREY]
    return GREY | dict(zip(named, PALETTE, strict=False))


def new_axes(title: str, height: float):
    """A figure with one pair of axes, without frame; height in inches."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots()
    bare(axes)
    axes.set_title(title, loc="left", fontsize=11)
    return figure, axes


def bare(axes) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def log_axes(axes) -> None:
    """Both axes logarithmic, labeled with plain numbers: under plain_text() powers would appear as source text."""
    axes.set(xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())


def breakdown_figure(analysis: dict) -> Figure:
    """One bar per phase, its components stacked, in ms per step."""
    about, phases = analysis["attribution"], [row for row in analysis["phases"] if row["share"] >= 0.002]
    names, colors = [row["phase"] for row in phases], colors_of(analysis)
    shown = [row for row in analysis["components"] if row["component"] in colors and row["share"] >= 0.002][:20]
    rest = [row for row in analysis["components"] if row not in shown]
    height = max(1.6 + 0.55 * len(names), 0.6 + 0.16 * len(shown))
    figure, axes = new_axes(f"Step time breakdown: {about['ms_per_step']:.2f} ms", height)
    left = np.zeros(len(names))
    stacks = [(shortened(row["component"], 30), colors[row["component"]], [row]) for row in shown]
    for label, color, rows in [*stacks, (f"{len(rest)} smaller", GREY["other"], rest)]:
        widths = np.array([sum(row["phases_ms"].get(phase, 0.0) for row in rows) for phase in names])
        if widths.any():
            label += f" {sum(row['share'] for row in rows):.1%}"
            axes.barh(names, widths, left=left, color=color, edgecolor="white", linewidth=0.5, label=label)
            left = left + widths
    for at, (phase, end) in enumerate(zip(phases, left, strict=True)):
        axes.text(end, at, f" {end:.2f} ms, {phase['share']:.1%}", va="center", fontsize=9)
    axes.set(xlabel=f"{about['clock']} time per step (ms)", xlim=(0, 1.22 * max(left.max(), 1e-9)))
    axes.invert_yaxis()
    figure.legend(loc="outside right center", fontsize=7.5, frameon=False, handlelength=1)
    return figure


def bars_figure(title: str, names: list[str], values: list[float], texts: list[str], axis: str, colors) -> Figure:
    """Horizontal bars with a text at the end of each."""
    figure, axes = new_axes(title, 1.0 + 0.32 * len(names))
    at = np.arange(len(names))
    axes.barh(at, values, color=colors, height=0.72)
    axes.set_yticks(at, [shortened(name, 60) for name in names], fontsize=8.5)
    for y, value, text in zip(at, values, texts, strict=True):
        axes.text(value, y, f" {text}", va="center", fontsize=8.5)
    axes.set(xlabel=axis, xlim=(0, 1.25 * max([*values, 1e-9])))
    axes.invert_yaxis()
    return figure


def operators_figure(analysis: dict, top: int = 12) -> Figure:
    key, clock = ("self_device_us", "GPU") if analysis["kernels"] else ("self_cpu_us", "CPU")
    rows = [row for row in analysis["operators"][:top] if row["share"] > 0]
    names, values = [row["name"] for row in rows], [row[key] / 1e3 for row in rows]
    texts = [f"{row['share']:.1%}, {row['calls']} calls" for row in rows]
    return bars_figure("Operators", names, values, texts, f"self {clock} time, all steps (ms)", PALETTE[0])


def kernels_figure(analysis: dict, top: int = 12) -> Figure | None:
    rows = analysis["kernels"][:top]
    if not rows:
        return None
    names, values = [row["name"] for row in rows], [row["total_us"] / 1e3 for row in rows]
    texts = [f"{row['share']:.1%}, {row['count_per_step']:.0f} per step, {row['mean_us']:.1f} us" for row in rows]
    by_component = colors_of(analysis)
    colors = [by_component.get(row["component"], GREY["other"]) for row in rows]
    return bars_figure("GPU kernels", names, values, texts, "time, all steps (ms)", colors)


def gpu_figure(analysis: dict) -> Figure | None:
    """The GPU's time from first to last event as one bar: computation, communication, copies, idle by cause."""
    timeline = analysis["gpu_timeline"]
    total = timeline["total_ms"]
    if total is None:
        return None
    parts = [
        ("computation", timeline["computation_ms"], PALETTE[2]),
        ("exposed communication", timeline["exposed_comm_ms"], PALETTE[3]),
        ("exposed copies", timeline["exposed_memcpy_ms"], PALETTE[6]),
    ]
    causes = [row for row in timeline["idle_by_cause"] if row["ms"] > 0]
    parts += [(f"idle: {row['cause']}", row["ms"], grey) for row, grey in zip(causes, IDLE_GREYS, strict=False)]
    figure, axes = new_axes(f"GPU timeline, first to last event: {total:.2f} ms", 2.0)
    left = 0.0
    for name, ms, color in parts:
        axes.barh([0], [ms], left=left, color=color, label=f"{name} {ms / total:.1%}")
        left += ms
    axes.set(yticks=[], xlabel="ms", xlim=(0, total))
    figure.legend(loc="outside lower left", ncols=4, fontsize=8, frameon=False)
    return figure


def timeline_figure(analysis: dict) -> Figure | None:
    """One step as lanes, one per host thread and GPU stream: which component ran when."""
    timeline = analysis["step_timeline"]
    lanes = timeline["lanes"]
    if not lanes:
        return None
    colors = colors_of(analysis)
    figure, axes = new_axes(f"Step {timeline['step']} (of median length)", 2.1 + 0.5 * len(lanes))
    seen: dict[str, float] = {}
    for at, lane in enumerate(lanes):
        corners, faces = [], []
        for start, end, key in lane["pieces"]:
            name = timeline["components"][key]
            faces.append(colors.get(name, GREY["other"]))
            corners.append([(start, at - 0.4), (end, at - 0.4), (end, at + 0.4), (start, at + 0.4)])
            if name in colors:
                seen[name] = seen.get(name, 0.0) + end - start
        # Outlines keep pieces visible that are narrower than a pixel.
        axes.add_collection(PolyCollection(corners, facecolors=faces, edgecolors=faces, linewidths=0.3))
    axes.set(xlim=(0, timeline["length_ms"]), ylim=(len(lanes) - 0.5, -0.5), xlabel="ms")
    axes.set_yticks(range(len(lanes)), [lane["name"] for lane in lanes])
    largest = sorted(seen, key=lambda name: -seen[name])[:16]
    handles = [Patch(color=colors[name], label=shortened(name, 30)) for name in largest]
    figure.legend(handles=handles, loc="outside lower left", ncols=4, fontsize=7.5, frameon=False)
    return figure


def opportunities_figure(analysis: dict) -> Figure | None:
    rows = [row for row in analysis["opportunities"] if (row["speedup_bound"] or 0) > 1]
    if not rows:
        return None
    names, values = [row["name"] for row in rows], [row["speedup_bound"] - 1 for row in rows]
    texts = [f"at most {row['speedup_bound']:.2f}x, affects {row['share']:.1%} of the step" for row in rows]
    return bars_figure("Upper bounds of speedups", names, values, texts, "speedup bound minus 1", PALETTE[2])


def memory_figure(analysis: dict) -> Figure | None:
    memory = analysis["memory"]
    if memory["peak_mb"] is None:
        return None
    figure, axes = new_axes(f"Memory of {memory['of']}: peak {memory['peak_mb']:.1f} MB", 2.6)
    axes.fill_between(memory["time_ms"], memory["allocated_mb"], step="post", color=PALETTE[0], alpha=0.7, linewidth=0)
    axes.set(xlabel="ms since the first event", ylabel="MB", ylim=(0, None), xlim=(0, None))
    return figure


def steps_figure(summary: dict) -> Figure | None:
    """Every step of the run, in colors by the reason why it is excluded from averages."""
    steps, mean = summary["steps"], summary["performance"]["avg_step_time_ms"]
    if not steps["step"]:
        return None
    figure, axes = new_axes("Time of every step", 2.6)
    axes.spines["left"].set_visible(True)
    kinds = np.array([reason or "averaged" for reason in steps["exclusion_reason"]])
    colors = {"averaged": PALETTE[0]} | dict(zip(sorted({*kinds} - {"averaged"}), PALETTE[1:], strict=False))
    numbers, times = np.array(steps["step"]), np.array(steps["time_ms"])
    for kind, color in colors.items():
        if (kinds == kind).any():
            axes.bar(numbers[kinds == kind], times[kinds == kind], color=color, label=kind)
    if mean:
        axes.axhline(mean, color="black", linewidth=0.8, linestyle=":", label=f"average, {mean:.2f} ms")
    axes.set(xlabel="step", ylabel="ms")
    figure.legend(loc="outside right center", fontsize=8, frameon=False)
    return figure


FIGURES = {
    "step_breakdown": breakdown_figure,
    "step_timeline": timeline_figure,
    "gpu_timeline": gpu_figure,
    "operators": operators_figure,
    "kernels": kernels_figure,
    "memory": memory_figure,
    "opportunities": opportunities_figure,
}


def profile_figures(analysis: dict) -> dict[str, Figure]:
    """The figures for which the profile has data."""
    drawn = {name: draw(analysis) for name, draw in FIGURES.items()}
    return {name: figure for name, figure in drawn.items() if figure is not None}


@contextmanager
def plain_text() -> Iterator[None]:
    """Draws without matplotlib's formulas: a kernel's name may contain dollar signs."""
    with matplotlib.rc_context({"text.parse_math": False}):
        yield
