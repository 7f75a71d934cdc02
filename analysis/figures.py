"""Figures of a profile, from its documents alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib
import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure  # not pyplot: no global state, no display
from matplotlib.patches import Patch

WIDTH = 10.5  # inches
PALETTE = (
    "#4e79a7 #f28e2b #59a14f #e15759 #b07aa1 #76b7b2 #edc948 #ff9da7 #9c755f #a0cbe8 #ffbe7d #8cd17d #d4a6c8 #86bcb6 "
    "#f1ce63 #fabfd2 #d7b5a6 #499894 #d37295 #79706e"
).split()
GREY = {"idle": "#e6e6e6", "framework overhead": "#9a9a9a", "unattributed": "#404040", "other": "#c8c8c8"}
PHASE_COLORS = {"data": "#edc948", "forward": "#4e79a7", "backward": "#f28e2b", "optimizer": "#59a14f"}


def colours_of(analysis: dict) -> dict[str, str]:
    """A colour for each component, the same in every figure: the largest first, as long as colours last."""
    named = [row["component"] for row in analysis["components"] if row["component"] not in GREY]
    return GREY | dict(zip(named, PALETTE, strict=False))


def shortened(name: str, length: int = 44) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"


def bare(axes) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def breakdown_figure(analysis: dict) -> Figure:
    """A bar a phase, its components stacked in ms of the step."""
    phases = [row["phase"] for row in analysis["phases"] if row["share"] >= 0.002]
    colours = colours_of(analysis)
    shown = [row for row in analysis["components"] if row["component"] in colours and row["share"] >= 0.002][:20]
    names = {row["component"] for row in shown}
    height = max(1.6 + 0.55 * len(phases), 0.6 + 0.16 * len(shown))
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots()
    left = np.zeros(len(phases))
    for row in shown:
        widths = np.array([row["phases_ms"].get(phase, 0.0) for phase in phases])
        axes.barh(
            phases,
            widths,
            left=left,
            color=colours[row["component"]],
            edgecolor="white",
            linewidth=0.5,
            label=f"{shortened(row['component'], 30)} {row['share']:.1%}",
        )
        left += widths
    rest = [row for row in analysis["components"] if row["component"] not in names]
    if rest:
        widths = np.array([sum(row["phases_ms"].get(phase, 0.0) for row in rest) for phase in phases])
        if widths.sum() > 0:
            share = sum(row["share"] for row in rest)
            axes.barh(phases, widths, left=left, color=GREY["other"], label=f"{len(rest)} smaller {share:.1%}")
            left += widths
    for at, (phase, end) in enumerate(zip(phases, left, strict=True)):
        share = next(row["share"] for row in analysis["phases"] if row["phase"] == phase)
        axes.text(end, at, f" {end:.2f} ms, {share:.1%}", va="center", fontsize=9)
    about = analysis["attribution"]
    axes.set(xlabel=f"ms of {about['clock']} time per step", xlim=(0, 1.22 * max(left.max(), 1e-9)))
    axes.invert_yaxis()
    bare(axes)
    figure.legend(loc="outside right center", fontsize=7.5, frameon=False, handlelength=1)
    axes.set_title(f"Where the step went: {about['ms_per_step']:.2f} ms", loc="left", fontsize=11)
    return figure


def bars_figure(title: str, names: list[str], values: list[float], texts: list[str], axis: str, colours) -> Figure:
    figure = Figure(figsize=(WIDTH, 1.0 + 0.32 * len(names)), layout="constrained")
    axes = figure.subplots()
    at = np.arange(len(names))
    axes.barh(at, values, color=colours, height=0.72)
    axes.set_yticks(at, [shortened(name, 60) for name in names], fontsize=8.5)
    for y, value, text in zip(at, values, texts, strict=True):
        axes.text(value, y, f" {text}", va="center", fontsize=8.5)
    axes.set(xlabel=axis, xlim=(0, 1.25 * max([*values, 1e-9])))
    axes.invert_yaxis()
    bare(axes)
    axes.set_title(title, loc="left", fontsize=11)
    return figure


def operators_figure(analysis: dict, top: int = 12) -> Figure:
    on_gpu = bool(analysis["kernels"])
    key, clock = ("self_device_us", "GPU") if on_gpu else ("self_cpu_us", "CPU")
    rows = [row for row in analysis["operators"][:top] if row["share"] > 0]
    values = [row[key] / 1e3 for row in rows]
    texts = [f"{row['share']:.1%}, {row['calls']} calls" for row in rows]
    names = [row["name"] for row in rows]
    return bars_figure("Operators", names, values, texts, f"ms of their own on the {clock}, all steps", PALETTE[0])


def kernels_figure(analysis: dict, top: int = 12) -> Figure | None:
    rows = analysis["kernels"][:top]
    if not rows:
        return None
    colours = colours_of(analysis)
    texts = [f"{row['share']:.1%}, {row['count_per_step']:.0f} a step, {row['mean_us']:.1f} us" for row in rows]
    return bars_figure(
        "GPU kernels",
        [row["name"] for row in rows],
        [row["total_us"] / 1e3 for row in rows],
        texts,
        "ms, all steps",
        [colours.get(row["component"], GREY["other"]) for row in rows],
    )


def gpu_figure(analysis: dict) -> Figure | None:
    """The GPU's time from first to last event as one bar: busy with what, idle for what."""
    timeline = analysis["gpu_timeline"]
    if timeline["total_ms"] is None:
        return None
    parts = [
        ("computation", timeline["computation_ms"], PALETTE[2]),
        ("exposed communication", timeline["exposed_comm_ms"], PALETTE[3]),
        ("exposed copies", timeline["exposed_memcpy_ms"], PALETTE[6]),
    ]
    greys = ["#d9d9d9", "#bfbfbf", "#a6a6a6", "#8c8c8c", "#737373", "#595959", "#404040"]
    causes = [row for row in timeline["idle_by_cause"] if row["ms"] > 0]
    parts += [(f"idle: {row['cause']}", row["ms"], grey) for row, grey in zip(causes, greys, strict=False)]
    figure = Figure(figsize=(WIDTH, 2.0), layout="constrained")
    axes = figure.subplots()
    left = 0.0
    for name, ms, colour in parts:
        axes.barh([0], [ms], left=left, color=colour, label=f"{name} {ms / timeline['total_ms']:.1%}")
        left += ms
    axes.set(yticks=[], xlabel="ms", xlim=(0, timeline["total_ms"]))
    bare(axes)
    figure.legend(loc="outside lower left", ncols=4, fontsize=8, frameon=False)
    axes.set_title(f"The GPU from first to last event: {timeline['total_ms']:.2f} ms", loc="left", fontsize=11)
    return figure


def timeline_figure(analysis: dict) -> Figure | None:
    """One step as lanes: which component ran when, on the host and on each GPU stream."""
    timeline = analysis["step_timeline"]
    lanes = timeline["lanes"]
    if not lanes:
        return None
    colours = colours_of(analysis)
    figure = Figure(figsize=(WIDTH, 2.1 + 0.5 * len(lanes)), layout="constrained")
    axes = figure.subplots()
    seen: dict[str, float] = {}
    for at, lane in enumerate(lanes):
        corners, faces = [], []
        for start, end, key in lane["pieces"]:
            name = timeline["components"][key]
            faces.append(colours.get(name, GREY["other"]))
            corners.append([(start, at - 0.4), (end, at - 0.4), (end, at + 0.4), (start, at + 0.4)])
            if name in colours:
                seen[name] = seen.get(name, 0.0) + end - start
        # An outline of its own colour keeps pieces visible that are narrower than a dot.
        axes.add_collection(PolyCollection(corners, facecolors=faces, edgecolors=faces, linewidths=0.3))
    axes.set(xlim=(0, timeline["length_ms"]), ylim=(len(lanes) - 0.5, -0.5), xlabel="ms")
    axes.set_yticks(range(len(lanes)), [lane["name"] for lane in lanes])
    bare(axes)
    largest = sorted(seen, key=lambda name: -seen[name])[:16]
    handles = [Patch(color=colours[name], label=shortened(name, 30)) for name in largest]
    figure.legend(handles=handles, loc="outside lower left", ncols=4, fontsize=7.5, frameon=False)
    axes.set_title(
        f"Step {timeline['step']}, of median length, and what ran until its work was done", loc="left", fontsize=11
    )
    return figure


def opportunities_figure(analysis: dict) -> Figure | None:
    rows = [row for row in analysis["opportunities"] if (row["speedup_bound"] or 0) > 1]
    if not rows:
        return None
    values = [row["speedup_bound"] - 1 for row in rows]
    texts = [f"at most {row['speedup_bound']:.2f}x, touches {row['share']:.1%} of the step" for row in rows]
    names = [row["name"] for row in rows]
    return bars_figure("What each could bring at most", names, values, texts, "speed-up bound less 1", PALETTE[2])


def memory_figure(analysis: dict) -> Figure | None:
    memory = analysis["memory"]
    if memory["peak_mb"] is None:
        return None
    figure = Figure(figsize=(WIDTH, 2.6), layout="constrained")
    axes = figure.subplots()
    axes.fill_between(memory["time_ms"], memory["allocated_mb"], step="post", color=PALETTE[0], alpha=0.7, linewidth=0)
    axes.set(xlabel="ms since the first event", ylabel="MB", ylim=(0, None), xlim=(0, None))
    bare(axes)
    axes.set_title(f"Memory of {memory['of']}: peak {memory['peak_mb']:.1f} MB", loc="left", fontsize=11)
    return figure


def steps_figure(summary: dict) -> Figure | None:
    """Every step of the run, those with an instrument marked."""
    steps = summary["steps"]
    if not steps["step"]:
        return None
    figure = Figure(figsize=(WIDTH, 2.6), layout="constrained")
    axes = figure.subplots()
    kinds = [reason or "counted" for reason in steps["exclusion_reason"]]
    colours = {"counted": PALETTE[0]} | dict(zip(sorted(set(kinds) - {"counted"}), PALETTE[1:], strict=False))
    for kind, colour in colours.items():
        chosen = [row[:2] for row in zip(steps["step"], steps["time_ms"], kinds, strict=True) if row[2] == kind]
        if chosen:
            axes.bar(*zip(*chosen, strict=True), color=colour, label=kind)
    mean = summary["performance"]["avg_step_time_ms"]
    if mean:
        axes.axhline(mean, color="black", linewidth=0.8, linestyle=":", label=f"mean of those counted, {mean:.2f} ms")
    axes.set(xlabel="step", ylabel="ms")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", fontsize=8, frameon=False)
    axes.set_title("Time of every step", loc="left", fontsize=11)
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
    """The figures that there is something to draw in."""
    drawn = {name: draw(analysis) for name, draw in FIGURES.items()}
    return {name: figure for name, figure in drawn.items() if figure is not None}


@contextmanager
def plain_text() -> Iterator[None]:
    """Names of kernels are not ours: a dollar sign in one is not a formula."""
    with matplotlib.rc_context({"text.parse_math": False}):
        yield
