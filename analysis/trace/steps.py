"""Where the steps of a trace are: by their marks, or where its work repeats."""

from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.trace.tables import CUT_SHORT, Trace, has_role
from analysis.vocabulary import roles

REPEATS = 3  # of the same work at least make steps
SAME_LENGTH = 0.02  # by which repetitions may differ in their number of events
COVERED = (
    0.5  # of the events, or of the time: what repeats in less of it is not what the program does
)
# A first step that takes so many times as long as the others, and no other one half of it, contains
# what happens once: start-up of the program or of the profiler, the first launch of each kernel.
OUTLYING, NO_OTHER = 2.0, 0.5
MISSING_KERNELS = 0.02  # of a step's launches: with more of them a step is incomplete
# Share of all launches: so many at an end, whose kernels were not written, leave the others whole
FEW_UNFLUSHED = 0.1
FEW_STEPS = 0.25  # of the steps: so many incomplete ones at an end leave the others whole


def whole_steps(trace: Trace) -> pd.DataFrame:
    """The marked steps without a last one that is cut: a mark that opened as recording ended,
    before any work.

    It contains no operator, on a GPU no call that launches anything,
    and is far shorter than the others.
    """
    steps = trace.steps
    if len(steps) < 2:
        return steps
    start, end = steps["start"].iloc[-1], steps["end"].iloc[-1]
    launches = trace.launches[has_role(trace.launches, *roles.STARTS_WORK)]
    work = trace.operators if launches.empty else launches
    empty = len(work) and not ((work["start"] < end) & (work["end"] > start)).any()
    cut = empty and end - start < CUT_SHORT * (steps["end"] - steps["start"]).iloc[:-1].median()
    return steps.iloc[:-1] if cut else steps


class StepApart(NamedTuple):
    """A marked or found step that is not judged with the others."""

    number: int
    start: float  # us
    end: float
    is_first: bool  # it takes far longer than the others; else events of it are missing


def outlying_first(length_us: np.ndarray) -> bool:
    """Whether the first of these steps takes far longer than all others; of less than three, nobody
    can tell."""
    if len(length_us) < 3:
        return False
    first, others = length_us[0], length_us[1:]
    return bool(first > OUTLYING * np.median(others) and NO_OTHER * first > others.max())


def incomplete_at_ends(missing: np.ndarray, launched: np.ndarray, few: np.ndarray) -> np.ndarray:
    """Which steps at the beginning and the end lack kernels, while the others are whole; none, if
    these are too few.

    missing, launched: kernels of each step.  few: which of the steps lack only the few of an end of
    the trace."""
    lacks = missing > MISSING_KERNELS * launched
    n, whole = len(lacks), np.flatnonzero(~lacks)
    out = np.zeros(n, bool)
    if not len(whole) or not lacks.any():
        return out
    ends = np.append(np.arange(whole[0]), np.arange(whole[-1] + 1, n))
    if len(ends) <= FEW_STEPS * n or few[ends].all():
        out[ends] = True
    return out


def repeated_steps(
    names: np.ndarray, times: np.ndarray, between: np.ndarray, on_gpu: bool
) -> tuple[pd.DataFrame, int]:
    """Steps where the same work repeats: number, start, end; and how many events one has.  Empty if
    none does.

    names: numbers of the events' names, in the order in which the host began them, at `times`.
    between: times of what happens between steps.  Steps of a program on a CPU may have nothing
    between them, if the same repeats from the first event to the last.  A step begins where the
    first of its events does, and the last ends with its last one.
    """
    first, lengths = longest_repetition(names)
    starts = (
        np.append(times, times[-1:])[first + np.append(0, np.cumsum(lengths))]
        if len(lengths)
        else np.zeros(0)
    )
    inside = np.diff(np.searchsorted(np.sort(between), starts))
    if not len(lengths) or np.mean(inside > 0) < 1 - 1 / REPEATS:
        length = int(np.median(lengths)) if len(lengths) else len(names)
        if on_gpu or not is_nothing_else(names, length):
            return pd.DataFrame({"number": [], "start": [], "end": []}), 0
        lengths = np.full(len(names) // length, length)
        starts = np.append(times, times[-1:])[np.append(0, np.cumsum(lengths))]
    steps = pd.DataFrame(
        {"number": np.arange(len(lengths)), "start": starts[:-1], "end": starts[1:]}
    )
    return steps, int(np.median(lengths))


def is_nothing_else(names: np.ndarray, length: int) -> bool:
    """Whether parts of this length are all that there is, in the same order from the first event
    on: layers have something before and after them, as an embedding and a loss."""
    return len(names) > REPEATS * length and bool((names[length:] == names[:-length]).all())


def longest_repetition(names: np.ndarray) -> tuple[int, np.ndarray]:
    """Where the repetition begins that covers most of a sequence, and the lengths of its parts; no
    parts if none does.

    Each part begins with the same name, has the same length within SAME_LENGTH, and the same names
    within twice that.  Among repetitions that cover about as much, that of the longest parts
    counts: a step repeats layers in itself.
    """
    n, best, found = len(names), (0.0, 0.0), (0, np.zeros(0, dtype=np.int64))
    counts = np.bincount(names, minlength=1)
    order = np.argsort(names, kind="stable")
    for places in np.split(order, np.cumsum(counts)[:-1]):
        if not REPEATS <= len(places) <= n // REPEATS + 1:
            continue
        lengths = np.diff(places)
        usual = int(np.median(lengths))
        alike = np.abs(lengths - usual) <= max(1, SAME_LENGTH * usual)
        if alike[-1] and n - places[-1] >= usual * (
            1 - SAME_LENGTH
        ):  # the last part, as far as it is there
            lengths, alike = np.append(lengths, min(usual, n - places[-1])), np.append(alike, True)
        edges = np.flatnonzero(
            np.diff(np.concatenate([[False], alike, [False]]).astype(np.int8))
        )  # of runs
        begin, end = max(
            edges.reshape(-1, 2).tolist(), key=lambda run: run[1] - run[0], default=(0, 0)
        )
        covered = lengths[begin:end].sum() / n
        if end - begin < REPEATS or covered < COVERED or usual < 2:
            continue
        score = (round(covered, 1), float(usual))
        if score > best and same_names(names, places[begin], lengths[begin:end]):
            best, found = score, (int(places[begin]), lengths[begin:end])
    return found


def same_names(names: np.ndarray, first: int, lengths: np.ndarray) -> bool:
    """Whether the parts of these lengths contain the same names, as often."""
    part = np.repeat(np.arange(len(lengths)), lengths)
    different, which = np.unique(names[first : first + lengths.sum()], return_inverse=True)
    counts = np.bincount(part * len(different) + which, minlength=len(lengths) * len(different))
    counts = counts.reshape(len(lengths), len(different))
    differing = np.abs(counts - np.median(counts, axis=0)).sum(axis=1)
    return bool(np.median(differing / lengths) <= 2 * SAME_LENGTH)


def step_at(times: np.ndarray, steps: pd.DataFrame) -> np.ndarray:
    """The row of the step that was running on the host at each time,
    or -1; gaps belong to the step before."""
    at = np.searchsorted(steps["start"].to_numpy(), times, side="right") - 1
    return np.where(times < steps["end"].max(), at, -1)


def step_around(times: np.ndarray, steps: pd.DataFrame) -> np.ndarray:
    """The row of the step that was running on the host at each time, or -1; gaps belong to none."""
    at = step_at(times, steps)
    return np.where(times < steps["end"].to_numpy()[at], at, -1)
