"""Figures of steps: by part and phase, how far the host is ahead, by rank, one after another."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from analysis.attribution.breakdown import mean_of
from analysis.attribution.components import IDLE
from analysis.attribution.gpu_time import Queue
from analysis.diagnosis.document import OperatorAnalysis
from analysis.report.figures.axes import beside, legend, new_axes, stacked_bars
from analysis.report.palette import GRAY, PHASE_COLORS, color_of
from harness.base.text import significant, told_apart

NAME = 44  # letters of a name beside its bar
BARS = 24  # of a figure at most, as many as can be told apart
CONTRAST = "#d55e00"  # steps that averages leave out; waiting for other ranks


def draw_breakdown(own: OperatorAnalysis, about: str) -> Figure:
    """The parts of the step, most time first: forward, backward and other phases end to end."""
    rows = [row for row in own.components if row.ms_per_step > 0][:BARS]
    clock, step_ms = own.attribution.clock, own.attribution.ms_per_step
    mean = mean_of(own.attribution, own.steps.count)
    colors = {**PHASE_COLORS, IDLE: color_of(IDLE)}
    phases_ms = {}
    for phase in own.phases:
        if phase.ms_per_step > 0:
            phases_ms[phase.phase] = [row.phases_ms.get(phase.phase, 0.0) for row in rows]
            colors.setdefault(phase.phase, GRAY)
    title = f"A step by part and phase: {significant(step_ms)} ms of {clock} time"
    figure, axes = bar_axes(f"{title}, {mean}", len(rows), about)
    names = told_apart([row.component for row in rows], NAME)
    stacked_bars(axes, names, phases_ms, colors)
    beside(axes, [f"{row.share:.1%}" for row in rows])
    axes.set_xlabel(f"{clock} time per step (ms)")
    legend(axes)
    return figure


def draw_ranks(own: OperatorAnalysis, about: str) -> Figure:
    """The step of each rank: what communication exposed, as transfer and waiting where these are
    told apart, and the rest.  Of many ranks, those that cause most of the waiting."""
    every = own.ranks.rows
    by_waiting = sorted(every, key=lambda row: -(row.caused_waiting_ms or 0.0))
    rows = sorted(by_waiting[:BARS], key=lambda row: row.rank)
    step_ms = np.array([row.ms_per_step for row in rows])
    exposed_ms = np.array([row.exposed_comm_ms or 0.0 for row in rows])
    waiting_ms = np.array([row.waiting_ms or 0.0 for row in rows])
    parts_ms = {"no exposed communication": step_ms - exposed_ms}
    if any(row.waiting_ms is None for row in rows):
        parts_ms["exposed communication"] = exposed_ms
    else:
        parts_ms["transfer"] = exposed_ms - waiting_ms
        parts_ms["waiting for other ranks"] = waiting_ms
    colors = {
        "no exposed communication": color_of("matmul"),
        "exposed communication": color_of("communication"),
        "transfer": color_of("communication"),
        "waiting for other ranks": CONTRAST,
    }
    title = f"A step of each of {len(every)} ranks"
    if len(every) > len(rows):
        title = f"A step of {len(rows)} of {len(every)} ranks, which cause most of the waiting"
    figure, axes = bar_axes(title, len(rows), about)
    stacked_bars(axes, [f"rank {row.rank}" for row in rows], parts_ms, colors)
    axes.set_xlabel(f"{own.attribution.clock} time per step (ms)")
    legend(axes)
    return figure


def bar_axes(title: str, bars: int, about: str):
    """A figure with room for this many bars below one another."""
    return new_axes(title, 1.5 + 0.24 * bars, about)


def draw_queue(queue: Queue, about: str) -> Figure:
    """How far the host is ahead of the GPU over a step: events in the queue, and ms until the
    latest one starts."""
    figure, axes = new_axes(f"Launch queue of the GPU over step {queue.step}", 3.2, about)
    axes.set(xlabel="time since the step began on the host (ms)", xlim=(0, queue.time_ms[-1]))
    lines = (
        (axes, queue.queued, "events in the queue", PHASE_COLORS["forward"]),
        (axes.twinx(), queue.ahead_ms, "launch ahead (ms)", PHASE_COLORS["optimizer"]),
    )
    for side, values, label, color in lines:
        side.spines["top"].set_visible(False)
        side.step(queue.time_ms, values, where="post", color=color, linewidth=1.2)
        side.set_ylabel(label, color=color)
        side.tick_params(axis="y", length=3.5, colors=color)
        side.set_ylim(bottom=0)
    return figure


def draw_steps(summary: dict, about: str) -> Figure:
    """The time of every step of the run; those that averages leave out in another color."""
    steps = summary["steps"]
    number, time_ms = np.array(steps["step"]), np.array(steps["time_ms"])
    averaged = np.array([reason is None for reason in steps["exclusion_reason"]])
    figure, axes = new_axes("Time of every step of the run", 3.2, about)
    axes.spines["left"].set_visible(True)
    groups = (
        ("in the averages", averaged, PHASE_COLORS["forward"]),
        ("left out of the averages", ~averaged, CONTRAST),
    )
    width, shown = min(40.0, 500 / len(number)), []  # points
    for label, of_group, color in groups:
        if of_group.any():  # lines, since a run may have thousands of steps
            axes.vlines(number[of_group], 0, time_ms[of_group], color=color, linewidth=width)
            shown.append(Patch(color=color, label=label))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set(xlabel="step", ylabel="time (ms)", xlim=(number[0] - 0.5, number[-1] + 0.5))
    axes.set_ylim(0, 1.05 * time_ms.max())
    legend(axes, handles=shown)
    return figure
