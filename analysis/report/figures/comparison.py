"""The figure of a comparison of runs."""

import textwrap

import numpy as np
from matplotlib.figure import Figure

from analysis.compare.document import ComparedRow, Comparison
from analysis.compare.noise import NOISE, as_fast
from analysis.compare.parts import OTHER_PROFILER, ChangeRow, ClassChange
from analysis.compare.same_training import NOT_THE_SAME
from analysis.compare.text import profilers_text
from analysis.report.figures.axes import WIDTH, bare, beside, entitle, legend, stacked_bars
from analysis.report.palette import GRAY, PHASE_COLORS, color_of
from harness.base.text import shortened, told_apart
from harness.instruments.phases import PHASES

NAME = 48  # letters of a run or a part beside its bar
NO_PHASES = "step, phases not known"
CHANGES = 10  # of parts, at most


def draw_comparison(comparison: Comparison) -> Figure:
    """Step time by phase with its spread, and what changed."""
    rows, changes = comparison.runs, changes_of(comparison)
    heights = [1.1 + 0.3 * len(rows)]
    if changes:
        heights.append(1.1 + 0.3 * max(4, len(changes)))
    figure = Figure(figsize=(WIDTH, 0.5 + sum(heights)), layout="constrained")
    profilers = profilers_text(rows)
    title = f"{len(rows) - 1} of {len(rows)} runs against {shortened(rows[0].name, 60)}"
    entitle(figure, title, f"profiler overhead: {profilers}" if profilers else "")
    every = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes in every:
        bare(axes)
    draw_step_times(every[0], rows)
    if changes:
        draw_changes(every[1], changes, comparison.baseline)
    return figure


def draw_step_times(axes, rows: list[ComparedRow]) -> None:
    """A bar for each run: its phases, or the step where they are not known, with its spread."""
    names = told_apart([row.name for row in rows], NAME)
    spread_ms = np.array([row.std_ms or 0.0 for row in rows])
    lengths_ms = stacked_bars(axes, names, phases_ms_of(rows), {**PHASE_COLORS, NO_PHASES: GRAY})
    axes.errorbar(
        lengths_ms, range(len(rows)), xerr=spread_ms, fmt="none", ecolor="black", capsize=3
    )
    beside(axes, [speed_text(row) for row in rows])
    axes.set(xlabel="time per step, mean (ms); error bars: standard deviation")
    axes.set_xlim(0, 1.02 * max((lengths_ms + spread_ms).max(), 1e-9))
    legend(axes, "Step time by phase")


def phases_ms_of(rows: list[ComparedRow]) -> dict[str, list[float]]:
    """The time of each run by phase; that of a trace alone, whose phases are not known, as one."""
    phases_ms = {}
    for phase in PHASES:
        phases_ms[phase] = [getattr(row.phases_ms, phase) or 0.0 for row in rows]
    phases_ms[NO_PHASES] = [undivided_ms(row) for row in rows]
    drawn = {phase: times_ms for phase, times_ms in phases_ms.items() if any(times_ms)}
    return drawn or {NO_PHASES: phases_ms[NO_PHASES]}


def undivided_ms(row: ComparedRow) -> float:
    """The step of a run whose phases are not known; 0 of another."""
    if any(getattr(row.phases_ms, phase) for phase in PHASES):
        return 0.0
    return row.mean_ms or 0.0


def speed_text(row: ComparedRow) -> str:
    """How fast a run is, and whether that is told.  Why it is not the same training is in the
    tables: here the reason would leave no room for the bars."""
    if not row.ratio:
        return "no steps"
    difference = row.difference
    if difference.startswith(NOT_THE_SAME):
        difference = NOT_THE_SAME
    return f"{as_fast(row.ratio)}, {difference}"


def changes_of(comparison: Comparison) -> list[ChangeRow]:
    """The largest changes of the first run that has any: by component, else by class."""
    changes = comparison.components or comparison.classes
    return [row for row in changes if row.run == changes[0].run][:CHANGES]


def draw_changes(axes, rows: list[ChangeRow], baseline: str) -> None:
    """A bar for the change of each part; gray where it is not told from noise."""
    what = "Components"
    if isinstance(rows[0], ClassChange):
        what = "Classes of operators"
    colors, texts = [], []
    for row in rows:
        text, color = f"{row.change_ms:+,.2f} ms", color_of(row.part)
        if row.difference in (NOISE, OTHER_PROFILER):
            text, color = f"{text}, {row.difference}", GRAY
        colors.append(color)
        texts.append(text)
    axes.barh(range(len(rows)), [row.change_ms for row in rows], color=colors)
    axes.set_yticks(range(len(rows)), told_apart([row.part for row in rows], NAME), fontsize=8.5)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.invert_yaxis()
    beside(axes, texts)
    axes.set_xlabel(f"change of time per profiled step (ms); gray: {NOISE} or {OTHER_PROFILER}")
    title = f"{what}: {shortened(rows[0].run, 60)} against {shortened(baseline, 60)}"
    axes.set_title(textwrap.fill(title, 80), loc="left", fontsize=10)
