"""In which phase of a training step was each allocation made, and where do steps end?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from analysis.memory.snapshot.reading import ALLOC, NO_STACK, NO_TIME, Mark, Recording
from analysis.memory.snapshot.stacks import Phase

STEP_MARK = "Optimizer.step"  # so begin the names of the ranges that torch's optimizers open


class Span(NamedTuple):
    """A step of an optimizer, by its range."""

    start_us: float
    end_us: float
    name: str  # 'Optimizer.step#AdamW.step'


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
            spans.append(Span(start_us, mark.time_us, mark.name))
    for name, open_marks in begun.items():
        spans.extend(Span(start_us, np.inf, name) for start_us in open_marks)
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
    # A hook of the program's, or FSDP's, that the engine calls begins neither in a script nor in a
    # thread of Python's.
    in_callback = np.array([stack.in_callback for stack in recording.stacks] + [False])
    if (has_python & ~in_callback).any():
        phase[in_callback[recording.stack] & (phase == Phase.FORWARD)] = Phase.BACKWARD
    of_closure = in_closure[recording.stack]
    if in_closure.any():  # the step of the optimizer runs forward and backward pass itself
        of_closure |= phase == Phase.BACKWARD
    phase[within & ~of_closure] = Phase.OPTIMIZER
    ends = ends_of_steps(phase, is_alloc, recording.time_us, spans)
    optimizers = optimizers_of(ends, phase, recording, spans)
    return Phases(phase, are_told, ends_of_rounds(ends, optimizers))


def inside_spans(time_us: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """Whether each event happened within a span [events]."""
    within = np.zeros(len(time_us), dtype=bool)
    for span in spans:
        within |= (time_us >= span.start_us) & (time_us <= span.end_us) & (time_us != NO_TIME)
    return within


def ends_of_steps(
    phase: np.ndarray, is_alloc: np.ndarray, time_us: np.ndarray, spans: Sequence[Span]
) -> np.ndarray:
    """By the ranges of the optimizer, else by its allocations, else by those of backward passes and
    what follows them."""
    if spans and len(time_us):
        ends = np.array([span.end_us for span in spans])
        ends = ends[(ends >= time_us[0]) & np.isfinite(ends)]
        ends = np.unique(np.searchsorted(time_us, ends, side="right") - 1)
        # Several optimizers step in turn: between two of them nothing else allocates.
        of_others = np.flatnonzero(is_alloc & (phase != Phase.OPTIMIZER))
        if not len(of_others):  # as with graphs of the GPU
            return ends
        before = np.searchsorted(of_others, ends, side="right")
        return ends[np.diff(before, append=len(of_others) + 1) > 0]
    of_optimizer = ends_of_groups(phase, is_alloc, (Phase.OPTIMIZER,))
    if len(of_optimizer) > 1:
        return of_optimizer
    # A fused optimizer allocates in its first step alone.
    return ends_of_groups(phase, is_alloc, (Phase.BACKWARD, Phase.OPTIMIZER))


def optimizers_of(
    ends: np.ndarray, phase: np.ndarray, recording: Recording, spans: Sequence[Span]
) -> list[frozenset[str]]:
    """What tells the optimizer of each step from others: the names of its ranges, and the lines of
    the program that its allocations come from."""
    span_ends_us = [span.end_us for span in spans]
    last_events = np.searchsorted(recording.time_us, span_ends_us, side="right") - 1
    optimizers = []
    begin = 0
    for end in ends:
        events = np.arange(begin, end + 1)
        begin = end + 1
        known = set()
        for place in np.unique(recording.stack[events[phase[events] == Phase.OPTIMIZER]]):
            if place != NO_STACK and recording.stacks[place].line is not None:
                known.add(recording.stacks[place].line.where)
        for span, last in zip(spans, last_events, strict=True):
            if events[0] <= last <= end:
                known.add(span.name)
        optimizers.append(frozenset(known))
    return optimizers


def ends_of_rounds(ends: np.ndarray, optimizers: Sequence[frozenset[str]]) -> np.ndarray:
    """Of steps that are parts of one, the last of each: those of several optimizers in turn, as a
    GAN has them.  They are as many as those after which the optimizers repeat."""
    if len(set(optimizers)) > 1:
        for parts in range(2, len(ends) // 2 + 1):
            if optimizers[parts:] == optimizers[:-parts]:
                return ends[::-parts][::-1]
    return ends


def ends_of_groups(
    phase: np.ndarray, is_alloc: np.ndarray, wanted: tuple[Phase, ...]
) -> np.ndarray:
    """The last event of each group of allocations of these phases and what follows it, up to an
    allocation of another phase."""
    events = np.flatnonzero(is_alloc)
    is_wanted = np.isin(phase[events], wanted)
    is_next = is_wanted[:-1] & ~is_wanted[1:]
    ends = events[1:][is_next] - 1
    if len(events) and is_wanted[-1]:
        ends = np.append(ends, len(phase) - 1)
    return ends
