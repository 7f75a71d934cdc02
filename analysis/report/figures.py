"""Figures of a profile, from its JSON documents alone."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis.diagnosis.opportunities import gain_text
from analysis.report.axes import SEAM, WIDTH, bare, bars_figure, beside, entitle, label_segments, new_axes, step_axis
from analysis.report.palette import GRAY, MEMORY_COLORS, PHASE_COLORS, color_of, hatch_of, hatches_of, in_order
from analysis.report.stacks import stack_of_gpu, stack_of_ranks
from harness.base.text import shortened

IDLE_GRAYS = ["#e6e6e6", "#cccccc", "#b3b3b3", "#999999", "#808080", "#666666", "#4d4d4d"]


def breakdown_figure(analysis: dict, about: str) -> Figure:
    """One bar per phase, its components stacked, in ms per step."""
    attribution, phases = analysis["attribution"], [row for row in analysis["phases"] if row["share"] >= 0.002]
    names = [row["phase"] for row in phases]
    shown = {row["component"]: row for row in analysis["components"][:20] if row["share"] >= 0.002}
    rest = [row for row in analysis["components"] if row["component"] not in shown]
    figure, axes = new_axes(
        f"Step time breakdown: {attribution['ms_per_step']:.2f} ms per step, by phase and component",
        max(1.6 + 0.55 * len(names), 0.9 + 0.165 * len(shown)),
        about,
    )
    left, segments = np.zeros(len(names)), []
    hatches = hatches_of_parts(analysis)
    stacks = [(part, color_of(part), hatches[part], [shown[part]]) for part in in_order(shown)]
    for part, color, hatch, rows in [*stacks, (f"{len(rest)} smaller", GRAY, "", rest)]:
        widths = np.array([sum(row["phases_ms"].get(phase, 0.0) for row in rows) for phase in names])
        if widths.any():
            label = f"{sum(row['share'] for row in rows):6.1%}  {shortened(part, 30)}"
            style = {"color": color, "hatch": hatch, "edgecolor": SEAM, "linewidth": 0.5}
            axes.barh(names, widths, left=left, label=label, **style)
            segments += [
                (start, width, y, part, color) for y, (start, width) in enumerate(zip(left, widths, strict=True))
            ]
            left = left + widths
    axes.set(xlabel=f"{attribution['clock']} time per step (ms)", xlim=(0, 1.01 * max(left.max(), 1e-9)))
    axes.invert_yaxis()
    beside(axes, [f"{end:.2f} ms, {phase['share']:.1%}" for phase, end in zip(phases, left, strict=True)])
    figure.legend(loc="outside right center", fontsize=7.5, frameon=False, handlelength=2)
    label_segments(axes, segments)
    return figure


def operators_figure(analysis: dict, about: str, top: int = 12) -> Figure | None:
    key, clock = ("self_device_us", "GPU") if analysis["kernels"] else ("self_cpu_us", "CPU")
    rows = [row for row in analysis["operators"][:top] if row["share"] > 0]
    if not rows:
        return None
    names, values = [row["name"] for row in rows], [row[key] / 1e3 for row in rows]
    texts = [f"{row['share']:.1%}, {row['calls']} calls" for row in rows]
    axis = f"self {clock} time, all profiled steps (ms)"
    return bars_figure("Operators with the most self time", about, names, values, texts, axis, color="#546e7a")


def kernels_figure(analysis: dict, about: str, top: int = 12) -> Figure | None:
    rows = analysis["kernels"][:top]
    if not rows:
        return None
    names, values = [row["name"] for row in rows], [row["total_us"] / 1e3 for row in rows]
    texts = [f"{row['share']:.1%}, {row['count_per_step']:.0f} per step, {row['mean_us']:.1f} us" for row in rows]
    parts, hatches = [row["component"] or "other" for row in rows], hatches_of_parts(analysis)
    style = {"color": [color_of(part) for part in parts], "hatch": [hatches[part] for part in parts]}
    title = "GPU kernels with the most time, in the color of the component that launched them most"
    axis = "GPU time, all profiled steps (ms)"
    figure = bars_figure(title, about, names, values, texts, axis, **style)
    component_legend(figure, parts, hatches)
    return figure


def hatches_of_parts(analysis: dict) -> dict[str, str]:
    """Of every part that a figure of the profile may show, so that each looks the same in all of them."""
    names = [row["component"] for row in (*analysis["components"], *analysis["kernels"]) if row["component"]]
    return hatches_of(["other", *names, *analysis["step_timeline"]["components"]])


def component_legend(figure: Figure, parts: Iterable[str], hatches: dict[str, str]) -> None:
    """Below the axes, in the order of the palette."""
    style = {"edgecolor": SEAM, "linewidth": 0}
    handles = [
        Patch(facecolor=color_of(part), hatch=hatches[part], label=shortened(part, 30), **style)
        for part in in_order({*parts})
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=5, fontsize=7.5, frameon=False)


def gpu_figure(analysis: dict, about: str) -> Figure | None:
    """The GPU's time from first to last event as one bar: computation, communication, copies, idle by cause."""
    timeline = analysis["gpu_timeline"]
    total = timeline["total_ms"]
    if total is None:
        return None
    busy = [(color_of("matmul"), ""), *((color_of(part), hatch_of(part)) for part in ("communication", "copy"))]
    looks = [*busy, *((gray, "") for gray in IDLE_GRAYS)]
    figure, axes = new_axes(f"GPU timeline, first to last event: {total:.2f} ms", 2.2, about)
    left, segments = 0.0, []
    for (name, ms), (color, hatch) in zip(stack_of_gpu(timeline).items(), looks, strict=False):
        label = f"{name} {ms / total:.1%}"
        axes.barh([0], [ms], left=left, color=color, hatch=hatch, edgecolor=SEAM, linewidth=0.5, label=label)
        segments.append((left, ms, 0, name, color))
        left += ms
    axes.set(yticks=[], xlabel="GPU time (ms)", xlim=(0, total))
    figure.legend(loc="outside lower left", ncols=4, fontsize=8, frameon=False)
    label_segments(axes, segments)
    return figure


def queue_figure(analysis: dict, about: str) -> Figure | None:
    """How far the host is ahead of the GPU over a step: kernels in the queue, and ms until the latest one starts."""
    queue = analysis["gpu_timeline"]["queue_over_step"]
    if queue is None:
        return None
    figure = Figure(figsize=(WIDTH, 2.6), layout="constrained")
    entitle(figure, f"Launch queue over step {queue['step']}", about)
    lines = {"kernels in the queue": ("queued", "forward"), "launch ahead (ms)": ("ahead_ms", "optimizer")}
    for axes, (label, (field, phase)) in zip(figure.subplots(1, 2), lines.items(), strict=True):
        bare(axes)
        axes.fill_between(
            queue["time_ms"], queue[field], step="post", color=PHASE_COLORS[phase], alpha=0.8, linewidth=0
        )
        axes.set(xlabel="time since the step began (ms)", ylabel=label, ylim=(0, None), xlim=(0, None))
    return figure


def ranks_figure(analysis: dict, about: str) -> Figure | None:
    """A bar per rank, its step: what communication exposed, as transfer and waiting, and the rest."""
    rows = analysis.get("ranks", {"rows": []})["rows"]
    if not any(row.get("exposed_comm_ms") for row in rows):
        return None
    names = [f"rank {row['rank']}" for row in rows]
    looks = [(color_of("matmul"), ""), (color_of("communication"), hatch_of("communication")), (IDLE_GRAYS[1], "")]
    figure, axes = new_axes("Step of each rank: exposed communication", 1.5 + 0.3 * len(rows), about)
    left = np.zeros(len(rows))
    for (name, widths), (color, hatch) in zip(stack_of_ranks(rows).items(), looks, strict=False):
        axes.barh(names, widths, left=left, color=color, hatch=hatch, edgecolor=SEAM, linewidth=0.5, label=name)
        left = left + widths
    axes.set(xlabel=f"{analysis['attribution']['clock']} time per step (ms)", xlim=(0, 1.01 * max(left.max(), 1e-9)))
    axes.invert_yaxis()
    beside(axes, [f"{row['exposed_comm_ms'] or 0.0:.2f} of {row['ms_per_step']:.2f} ms exposed" for row in rows])
    figure.legend(loc="outside lower left", ncols=3, fontsize=8, frameon=False)
    return figure


def timeline_figure(analysis: dict, about: str) -> Figure | None:
    """One step as lanes, one per host thread and GPU stream: which component ran when."""
    timeline = analysis["step_timeline"]
    lanes = timeline["lanes"]
    if not lanes:
        return None
    title = f"Timeline of step {timeline['step']}, the one of median duration"
    figure, axes = new_axes(title, 2.3 + 0.5 * len(lanes), about)
    seen: dict[str, float] = {}
    corners: dict[str, list] = {}
    segments, hatches = [], hatches_of_parts(analysis)
    for at, lane in enumerate(lanes):
        for start, end, key in lane["pieces"]:
            name = timeline["components"][key]
            box = [(start, at - 0.4), (end, at - 0.4), (end, at + 0.4), (start, at + 0.4)]
            corners.setdefault(name, []).append(box)
            segments.append((start, end - start, at, name, color_of(name)))
            seen[name] = seen.get(name, 0.0) + end - start
    for name, pieces in corners.items():
        # Outlines keep pieces visible that are narrower than a pixel; the hatching has the color of an outline.
        filled = {"facecolors": color_of(name), "edgecolors": color_of(name), "linewidths": 0.3}
        hatched = {"facecolors": "none", "edgecolors": SEAM, "linewidths": 0, "hatch": hatches[name]}
        for style in (filled, hatched):
            axes.add_collection(PolyCollection(pieces, **style))
    axes.set(xlim=(0, timeline["length_ms"]), ylim=(len(lanes) - 0.5, -0.5), xlabel="time since the step began (ms)")
    axes.set_yticks(range(len(lanes)), [lane["name"] for lane in lanes])
    component_legend(figure, sorted(seen, key=lambda name: -seen[name])[:20], hatches)
    label_segments(axes, (one for one in segments if one[1] > timeline["length_ms"] / 50))
    return figure


def opportunities_figure(analysis: dict, about: str) -> Figure | None:
    rows = [row for row in analysis["opportunities"] if (row["speedup_bound"] or 0) > 1]
    if not rows:
        return None
    names, values = [row["name"] for row in rows], [row["speedup_bound"] - 1 for row in rows]
    texts = [f"{gain_text(row)}, affects {row['share']:.1%} of the step" for row in rows]
    title, axis = "Upper bounds of speedups", "speedup of the step, at most (1: none)"
    return bars_figure(title, about, names, values, texts, axis, left=1, color="#546e7a")


def allocated_memory_figure(analysis: dict, about: str) -> Figure | None:
    memory = analysis["memory"]
    if memory["peak_mb"] is None:
        return None
    figure, axes = new_axes(f"{memory['of']}: peak {memory['peak_mb']:.1f} MB", 2.6, about)
    color = MEMORY_COLORS["activations"]
    axes.fill_between(memory["time_ms"], memory["allocated_mb"], step="post", color=color, alpha=0.8, linewidth=0)
    axes.set(xlabel="time since the first event (ms)", ylabel="allocated (MB)", ylim=(0, None), xlim=(0, None))
    return figure


def steps_figure(summary: dict, about: str) -> Figure | None:
    """Every step of the run, in colors by the reason why it is excluded from averages."""
    steps, mean = summary["steps"], summary["performance"]["avg_step_time_ms"]
    if not steps["step"]:
        return None
    figure, axes = new_axes("Time of every step", 2.6, about)
    axes.spines["left"].set_visible(True)
    kinds = np.array([reason or "averaged" for reason in steps["exclusion_reason"]])
    numbers, times = np.array(steps["step"]), np.array(steps["time_ms"])
    for kind in ["averaged", *sorted({*kinds} - {"averaged"})]:
        if (kinds == kind).any():
            color, hatch = EXCLUDED_STEPS.get(kind, (GRAY, ""))
            label = kind if kind == "averaged" else f"not averaged: {kind}"
            axes.bar(
                numbers[kinds == kind], times[kinds == kind], color=color, hatch=hatch, edgecolor=SEAM, label=label
            )
    if mean:
        axes.axhline(mean, color="black", linewidth=0.8, linestyle=":", label=f"average, {mean:.2f} ms")
    axes.set_ylabel("time (ms)")
    step_axis(axes, min(numbers), max(numbers))
    figure.legend(loc="outside right center", fontsize=8, frameon=False)
    return figure


EXCLUDED_STEPS = {
    "averaged": ("#0072b2", ""),
    "first": ("#222222", "//"),
    "profiled": ("#d55e00", "xx"),
    "profiler warm-up": ("#e69f00", "\\\\"),
    "memory recorded": ("#80cbc4", ".."),
    "FLOPs counted": ("#cc79a7", "++"),
}

FIGURES = {
    "step_breakdown": breakdown_figure,
    "step_timeline": timeline_figure,
    "gpu_timeline": gpu_figure,
    "queue": queue_figure,
    "ranks": ranks_figure,
    "operators": operators_figure,
    "kernels": kernels_figure,
    "memory": allocated_memory_figure,
    "opportunities": opportunities_figure,
}


def profile_figures(analysis: dict, about: str) -> dict[str, Figure]:
    """The figures for which the profile has data; about: what was run."""
    drawn = {name: draw(analysis, about) for name, draw in FIGURES.items()}
    return {name: figure for name, figure in drawn.items() if figure is not None}
