"""Figures of a profile, from its JSON documents alone, and what all figures share: titles, axes, labels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal

import matplotlib
import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure  # not pyplot: no global state, no display
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, Locator, MaxNLocator, NullLocator

from analysis.diagnosis.opportunities import gain_text
from analysis.report.palette import GRAY, MEMORY, PHASES, color_of, hatch_of, hatches_of, in_order, text_color
from harness.base.text import shortened, told_apart

WIDTH = 10.5  # inches
SEAM = (1, 1, 1, 0.6)  # between segments, and of their hatching
IDLE_GRAYS = ["#e6e6e6", "#cccccc", "#b3b3b3", "#999999", "#808080", "#666666", "#4d4d4d"]

# ---- Titles, axes and labels ---------------------------------------------------------------------------------------


def entitle(figure: Figure, title: str, about: str) -> None:
    """A title of what is shown, and below it what was run."""
    figure.suptitle(f"{title}\n{shortened(about, 150)}" if about else title, x=0.01, ha="left", fontsize=10)


def new_axes(title: str, height: float, about: str):
    """A figure with one pair of axes, without frame; height in inches."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots()
    bare(axes)
    entitle(figure, title, about)
    return figure, axes


def bare(axes) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


class PlainLogLocator(Locator):
    """Three to eight ticks of a logarithmic axis at round numbers, the first at the lowest point or below it."""

    MANTISSAS = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7))

    def __call__(self):
        return self.tick_values(*self.axis.get_view_interval())

    def view_limits(self, vmin, vmax):
        low, high = sorted((vmin, vmax))
        return min(low, self.round_numbers(low, high)[0]), high

    def tick_values(self, vmin, vmax):
        low, high = sorted((vmin, vmax))
        return [tick for tick in self.round_numbers(low, high) if low <= tick <= high]

    def round_numbers(self, low: float, high: float) -> list[float]:
        """Of the series that have three to eight numbers up to `high`, the one that starts closest to the data."""
        lowest = self.axis.get_data_interval()[0]
        lowest = lowest if low <= lowest <= high else low
        decades = range(math.floor(math.log10(lowest)), math.ceil(math.log10(high)) + 1)
        series = [[m * 10.0**k for k in decades for m in mantissas] for mantissas in self.MANTISSAS]
        series.append(list(MaxNLocator(5, min_n_ticks=3).tick_values(low, high)))
        found = []
        for n, numbers in enumerate(series):
            start = max((one for one in numbers if 0 < one <= lowest), default=math.inf)
            numbers = [one for one in numbers if start <= one <= high]
            if n == 0 and len(numbers) > 8:  # of decades, every second or third
                numbers = numbers[:: math.ceil(len(numbers) / 8)]
            if 3 <= len(numbers) <= 8:
                found.append(numbers)
        return max(found, key=lambda numbers: numbers[0], default=series[-1])


def log_axis(axis, ticks: Sequence[float] = ()) -> None:
    """A logarithmic axis, labeled with plain numbers; ticks: where they are, by default at round numbers."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(FixedLocator(ticks) if len(ticks) else PlainLogLocator())
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda x, _: plain_number(x))
    axis.axes.autoscale_view()  # with this locator, where data are drawn already


def plain_number(x: float) -> str:
    """'1,000,000', '2.5', '0.000001': six digits, and no power of ten."""
    return f"{x:,.0f}" if x >= 1e6 else f"{Decimal(f'{x:.6g}'):,f}"


def step_axis(axes, first: int, last: int) -> None:
    """The steps from first to last, and half a step at both ends for the width of a bar."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="step", xlim=(first - 0.5, last + 0.5))


def beside(axes, texts: list[str]) -> None:
    """A text at the right of each bar: outside of the axes, where no bar or error bar runs into it."""
    right = axes.secondary_yaxis("right")
    right.set_yticks(range(len(texts)), texts, fontsize=8.5)
    right.tick_params(length=0)
    right.spines["right"].set_visible(False)


def label_segments(axes, segments: Iterable[tuple[float, float, float, str, str]]) -> None:
    """Names in those segments that have room for them: start, length and height in data units, name, color.

    Without room for 'attention.rope' there may be some for 'rope'.  For when all else is drawn: what fits depends on
    the layout.
    """
    axes.figure.draw_without_rendering()
    for start, length, y, name, color in segments:
        room = abs(np.diff(axes.transData.transform([(start, y), (start + length, y)])[:, 0])[0]) - 6  # pixels
        for text in dict.fromkeys((name, name.rsplit(".", 1)[-1])):
            background = {"facecolor": color, "linewidth": 0, "pad": 0.8}  # over the hatching
            style = {"ha": "center", "va": "center", "fontsize": 7.5, "color": text_color(color), "bbox": background}
            label = axes.text(start + length / 2, y, text, **style)
            label.set_in_layout(False)
            if label.get_window_extent().width <= room:
                break
            label.remove()


def legend(axes, title: str = "", **options) -> None:
    """Above the axes, with their title, so that it covers no data."""
    options = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 4, **options}
    axes.legend(title=title, title_fontsize=10, alignment="left", frameon=False, fontsize=8, **options)


# ---- The figures ---------------------------------------------------------------------------------------------------


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


def bars_figure(title: str, about: str, names: list[str], values: list[float], texts: list[str], axis: str, **style):
    """Horizontal bars with a text beside each."""
    figure, axes = new_axes(title, 1.2 + 0.3 * len(names), about)
    axes.barh(range(len(names)), values, height=0.72, edgecolor=SEAM, linewidth=0, **style)
    axes.set_yticks(range(len(names)), told_apart(names, 60), fontsize=8.5)
    axes.set_xlabel(axis)
    axes.invert_yaxis()
    beside(axes, texts)
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
    parts = [
        ("computation", timeline["computation_ms"], color_of("matmul"), ""),
        ("exposed communication", timeline["exposed_comm_ms"], color_of("communication"), hatch_of("communication")),
        ("exposed copies", timeline["exposed_memcpy_ms"], color_of("copy"), hatch_of("copy")),
    ]
    unknown = [{"cause": "cause unknown", "ms": timeline["idle_ms"]}]
    causes = [row for row in timeline["idle_by_cause"] or unknown if row["ms"] > 0]
    named = zip((row["cause"].replace("_", " ") for row in causes), causes, IDLE_GRAYS, strict=False)
    parts += [(f"idle: {cause}", row["ms"], gray, "") for cause, row, gray in named]
    figure, axes = new_axes(f"GPU timeline, first to last event: {total:.2f} ms", 2.2, about)
    left, segments = 0.0, []
    for name, ms, color, hatch in parts:
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
        axes.fill_between(queue["time_ms"], queue[field], step="post", color=PHASES[phase], alpha=0.8, linewidth=0)
        axes.set(xlabel="time since the step began (ms)", ylabel=label, ylim=(0, None), xlim=(0, None))
    return figure


def ranks_figure(analysis: dict, about: str) -> Figure | None:
    """A bar per rank, its step: what communication exposed, as transfer and waiting, and the rest."""
    rows = analysis.get("ranks", {"rows": []})["rows"]
    if not any(row.get("exposed_comm_ms") for row in rows):
        return None
    names = [f"rank {row['rank']}" for row in rows]
    step, exposed, waiting = (
        np.array([row[key] or 0.0 for row in rows]) for key in ("ms_per_step", "exposed_comm_ms", "waiting_ms")
    )
    told_apart = all(row["waiting_ms"] is not None for row in rows)
    parts = [("no exposed communication", step - exposed, color_of("matmul"), "")]
    parts.append(("transfer" if told_apart else "exposed communication", exposed - waiting, *of_communication()))
    parts += [("waiting for other ranks", waiting, IDLE_GRAYS[1], "")] if told_apart else []
    figure, axes = new_axes("Step of each rank: exposed communication", 1.5 + 0.3 * len(rows), about)
    left = np.zeros(len(rows))
    for name, widths, color, hatch in parts:
        axes.barh(names, widths, left=left, color=color, hatch=hatch, edgecolor=SEAM, linewidth=0.5, label=name)
        left = left + widths
    axes.set(xlabel=f"{analysis['attribution']['clock']} time per step (ms)", xlim=(0, 1.01 * max(left.max(), 1e-9)))
    axes.invert_yaxis()
    beside(axes, [f"{one:.2f} of {all_:.2f} ms exposed" for one, all_ in zip(exposed, step, strict=True)])
    figure.legend(loc="outside lower left", ncols=3, fontsize=8, frameon=False)
    return figure


def of_communication() -> tuple[str, str]:
    return color_of("communication"), hatch_of("communication")


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


def memory_figure(analysis: dict, about: str) -> Figure | None:
    memory = analysis["memory"]
    if memory["peak_mb"] is None:
        return None
    figure, axes = new_axes(f"{memory['of']}: peak {memory['peak_mb']:.1f} MB", 2.6, about)
    color = MEMORY["activations"]
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
            color, hatch = EXCLUDED.get(kind, (GRAY, ""))
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


EXCLUDED = {
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
    "memory": memory_figure,
    "opportunities": opportunities_figure,
}


def profile_figures(analysis: dict, about: str) -> dict[str, Figure]:
    """The figures for which the profile has data; about: what was run."""
    drawn = {name: draw(analysis, about) for name, draw in FIGURES.items()}
    return {name: figure for name, figure in drawn.items() if figure is not None}


@contextmanager
def plain_text() -> Iterator[None]:
    """Draws without matplotlib's formulas: a kernel's name may contain dollar signs."""
    with matplotlib.rc_context({"text.parse_math": False, "hatch.linewidth": 0.7}):
        yield
