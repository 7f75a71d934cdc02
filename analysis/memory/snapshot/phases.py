"""In which phase of a training step was each allocation made, and where do steps end?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from analysis.memory.snapshot.reading import ALLOC, NO_TIME, Mark, Recording
from analysis.memory.snapshot.stacks import Phase

STEP_MARK = "Optimizer.step"  # so begin the names of the ranges that torch's optimizers open


class Span(NamedTuple):
    """A step of an optimizer, by its range."""

    start_us: float
    end_us: float


def optimizer_spans(marks: Sequence[Mark]) -> list[Span]:
    """Those that began or ended within the recording; one of which an end is missing lasts from its
    beginning, or to its end."""
    begun: dict[str, list[int]] = {}
    spans = []
    for mark in marks:
        if not mark.name.startswith(STEP_MARK):
            continue
        open_marks = begun.setdefault(mark.name, [])
        if mark.begins:
            open_marks.append(mark.time_us)
        else:
            start_us = open_marks.pop() if open_marks else -np.inf
            spans.append(Span(start_us, mark.time_us))
    for open_marks in begun.values():
        spans.extend(Span(start_us, np.inf) for start_us in open_marks)
    return sorted(spans)


class Phases(NamedTuple):
    """The phase of each event, and where each step ends."""

    of_event: np.ndarray  # codes of Phase [events]
    are_told: bool  # whether the recording has stacks that tell forward from backward pass
    step_ends: np.ndarray  # number of the last event of each step [steps]


def phases_of(recording: Recording, marks: Sequence[Mark]) -> Phases:
    spans = optimizer_spans(marks)
    by_stack = [stack.phase for stack in recording.stacks] + [Phase.NOT_TOLD]  # last: NO_STACK
    phase = np.array(by_stack, dtype=np.int8)[recording.stack]
    has_python = np.array([stack.has_python for stack in recording.stacks] + [False])
    in_closure = np.array([stack.in_closure for stack in recording.stacks] + [False])
    with_python = has_python[recording.stack]
    not_told = phase == Phase.NOT_TOLD
    is_alloc = recording.action == ALLOC
    are_told = bool(with_python[is_alloc].any())
    within = inside_spans(recording.time_us, spans)
    # A thread of the engine has no frame of Python, where all others have some.  torch can be
    # asked for the frames of allocations alone: then those of frees tell nothing.
    if are_told:
        phase[not_told & is_alloc] = Phase.BACKWARD
    if with_python[~is_alloc].any():
        phase[not_told & ~is_alloc] = Phase.BACKWARD
    of_closure = in_closure[recording.stack]
    if in_closure.any():  # the step of the optimizer runs forward and backward pass itself
        of_closure |= phase == Phase.BACKWARD
    phase[within & ~of_closure] = Phase.OPTIMIZER
    step_ends = ends_of_steps(phase, is_alloc, recording.time_us, spans)
    return Phases(phase, are_told, step_ends)


def inside_spans(time_us: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """Whether each event happened within a span [events]."""
    within = np.zeros(len(time_us), dtype=bool)
    for span in spans:
        within |= (time_us >= span.start_us) & (time_us <= span.end_us) & (time_us != NO_TIME)
    return within


def ends_of_steps(
    phase: np.ndarray, is_alloc: np.ndarray, time_us: np.ndarray, spans: Sequence[Span]
) -> np.ndarray:
    """By the ranges of the optimizer, else by its allocations, else by those of backward passes."""
    if spans and len(time_us):
        ends = np.array([span.end_us for span in spans])
        ends = ends[(ends >= time_us[0]) & np.isfinite(ends)]
        return np.unique(np.searchsorted(time_us, ends, side="right") - 1)
    of_optimizer = ends_of_groups(phase, is_alloc, Phase.OPTIMIZER)
    if len(of_optimizer) > 1:
        return of_optimizer
    return ends_of_groups(phase, is_alloc, Phase.BACKWARD)


def ends_of_groups(phase: np.ndarray, is_alloc: np.ndarray, wanted: Phase) -> np.ndarray:
    """The last allocation of each group of one phase, between allocations of others."""
    events = np.flatnonzero(is_alloc)
    is_wanted = phase[events] == wanted
    followed = np.append(is_wanted[1:], False)
    return events[is_wanted & ~followed]
