"""The figure of a comparison of runs."""

import textwrap

from matplotlib.figure import Figure

from analysis.compare.noise import NOISE, as_fast
from analysis.compare.parts import OTHER_PROFILER
from analysis.compare.same_training import NOT_THE_SAME
from analysis.compare.text import profilers_text
from analysis.report.axes import WIDTH, bare, beside, entitle, legend, stacked_bars
from analysis.report.palette import GRAY, PHASE_COLORS, color_of
from harness.base.text import shortened, told_apart
from harness.instruments.phases import PHASES


def draw_comparison(comparison: dict) -> Figure:
    """Step time by phase with its spread, and what changed."""
    rows = comparison["runs"]
    changes = changes_of(comparison)
    panels = [draw_step_times, draw_changes] if changes else [draw_step_times]
    heights = [1.1 + 0.3 * n for n in (len(rows), max(4, len(changes)))[: len(panels)]]
    figure = Figure(figsize=(WIDTH, 0.5 + sum(heights)), layout="constrained")
    about = (profilers := profilers_text(rows)) and f"profiler overhead: {profilers}"
    entitle(
        figure,
        f"{len(rows) - 1} of {len(rows)} runs against {shortened(rows[0]['name'], 60)}",
        about,
    )
    all_axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for draw, axes in zip(panels, all_axes, strict=True):
        bare(axes)
        draw(axes, comparison)
    return figure


def draw_step_times(axes, comparison: dict) -> None:
    rows, other = comparison["runs"], "step, phases not known"
    known = [any(row["phases_ms"][phase] for phase in PHASES) for row in rows]  # not so of a trace
    parts = {
        phase: [row["phases_ms"][phase] or 0.0 for row in rows] for phase in PHASES if any(known)
    }
    if not all(known):
        parts[other] = [
            0.0 if told else row["mean_ms"] or 0.0 for row, told in zip(rows, known, strict=True)
        ]
    names, spread = (
        told_apart([row["name"] for row in rows], 48),
        [row["std_ms"] or 0.0 for row in rows],
    )
    lengths = stacked_bars(axes, names, parts, PHASE_COLORS | {other: GRAY})
    axes.errorbar(lengths, range(len(rows)), xerr=spread, fmt="none", ecolor="black", capsize=3)
    # Why it is not the same is in the tables: here the reason would leave no room for the bars.
    found = [
        NOT_THE_SAME if row["difference"].startswith(NOT_THE_SAME) else row["difference"]
        for row in rows
    ]
    ratios = [row["ratio"] and as_fast(row["ratio"]) for row in rows]
    beside(
        axes,
        [
            f"{ratio}, {text}" if ratio else "no steps"
            for ratio, text in zip(ratios, found, strict=True)
        ],
    )
    axes.set(xlabel="time per step, mean (ms); error bars: standard deviation")
    axes.set_xlim(0, 1.02 * max((lengths + spread).max(), 1e-9))
    legend(axes, "Step time by phase")


def changes_of(comparison: dict) -> list[dict]:
    """The largest changes of the first run that has any: by component, else by class."""
    changes = comparison["components"] or comparison["classes"]
    return [row for row in changes if row["run"] == changes[0]["run"]][:10]


def draw_changes(axes, comparison: dict) -> None:
    rows = changes_of(comparison)
    kind = "component" if comparison["components"] else "class"
    parts, told = (
        [row[kind] for row in rows],
        [row["difference"] not in (NOISE, OTHER_PROFILER) for row in rows],
    )
    colors = [
        color_of(part) if is_told else GRAY for part, is_told in zip(parts, told, strict=True)
    ]
    axes.barh(range(len(rows)), [row["change_ms"] for row in rows], color=colors)
    axes.set_yticks(range(len(rows)), told_apart(parts, 48), fontsize=8.5)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.invert_yaxis()
    whys = (
        "" if is_told else f", {row['difference']}" for row, is_told in zip(rows, told, strict=True)
    )
    beside(axes, [f"{row['change_ms']:+,.2f} ms{why}" for row, why in zip(rows, whys, strict=True)])
    axes.set_xlabel(f"change of time per profiled step (ms); gray: {NOISE} or {OTHER_PROFILER}")
    what = "Components" if kind == "component" else "Classes of operators"
    title = (
        f"{what}: {shortened(rows[0]['run'], 60)} against {shortened(comparison['baseline'], 60)}"
    )
    axes.set_title(textwrap.fill(title, 80), loc="left", fontsize=10)
