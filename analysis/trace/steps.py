"""Where the steps of a trace are: by their marks, or where its work repeats."""

from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.trace.links import CLOCK_TICK_US, OPERATOR, Links
from analysis.trace.tables import CUT_SHORT, Trace, has_role, steps_between, take_or
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
# What steps do, but layers do not: wait for the device, copy to or from the host, fetch data,
# update weights.
BETWEEN_STEPS = {
    "role": (roles.WAIT, *roles.HOST_COPIES, roles.SCALAR_READ),
    "named_phase": ("data", "optimizer"),
}
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


class JudgedSteps(NamedTuple):
    """The steps that are judged, and to which of them events belong, by row; -1: to none."""

    table: pd.DataFrame  # number, start, end; the entire trace as one step if none are marked
    are_marked: bool  # or found where the work repeats
    how_found: str | None  # where no event marks them
    unflushed: int  # launches at the ends of the trace without a kernel, if few
    apart: list[StepApart]  # steps that are not judged, in order
    of_calls: np.ndarray  # [calls]
    of_gpu: np.ndarray  # [GPU events]


def judged_steps(links: Links) -> JudgedSteps:
    trace, how_found = links.trace, None
    steps = whole_steps(trace)
    if steps.empty:
        steps, how_found = unmarked_steps(links)
    are_marked = len(steps) > 0
    if not are_marked:
        steps = whole_trace(trace)
    of_calls = step_at(links.calls["start"].to_numpy(), steps)
    of_gpu = steps_of_gpu(links, of_calls, steps)
    unflushed = unflushed_launches(links.calls, links.gpu)
    apart: list[StepApart] = []
    if are_marked:
        stands_apart, is_first = steps_apart(links, steps, of_calls, of_gpu, unflushed)
        for step in steps[stands_apart].itertuples():
            far_longer = is_first and step.Index == 0
            apart.append(StepApart(step.number, step.start, step.end, far_longer))
        steps = steps[~stands_apart].reset_index(drop=True)
        new_row = np.where(stands_apart, -1, np.cumsum(~stands_apart) - 1)
        of_calls, of_gpu = take_or(new_row, of_calls, -1), take_or(new_row, of_gpu, -1)
    return JudgedSteps(steps, are_marked, how_found, int(unflushed.sum()), apart, of_calls, of_gpu)


def whole_trace(trace: Trace) -> pd.DataFrame:
    """All of it as one step."""
    tables = (trace.operators, trace.annotations, trace.gpu)
    times = pd.concat([table[["start", "end"]] for table in tables])
    return pd.DataFrame({"number": [0], "start": times["start"].min(), "end": times["end"].max()})


def steps_of_gpu(links: Links, of_calls: np.ndarray, steps: pd.DataFrame) -> np.ndarray:
    """The step of each GPU event, that of its call.  In a trace of the GPU alone, or of one whose
    launches nothing links to its events, steps are in GPU time."""
    gpu, calls = links.gpu, links.calls
    is_linked = (gpu["call"] >= 0).any()
    could_be_linked = (gpu["correlation"] > 0).any() and len(calls) > 0
    if is_linked or could_be_linked:
        return take_or(of_calls, gpu["call"].to_numpy(), -1)
    return step_at(gpu["start"].to_numpy(), steps)


def unflushed_launches(calls: pd.DataFrame, gpu: pd.DataFrame) -> np.ndarray:
    """Which calls launched a kernel at the beginning or the end of the trace that was not written,
    while those between have theirs; none where they are more than a few of all."""
    starts = np.flatnonzero(calls["starts_kernel"].to_numpy(bool))
    starts = starts[np.argsort(calls["start"].to_numpy()[starts], kind="stable")]
    kernels = gpu["correlation"][(gpu["kind"] == "kernel").to_numpy()]
    answered = np.flatnonzero(calls["correlation"].isin(kernels).to_numpy()[starts])
    out = np.zeros(len(calls), bool)
    if len(answered):
        at_ends = np.append(starts[: answered[0]], starts[answered[-1] + 1 :])
        out[at_ends] = len(at_ends) <= FEW_UNFLUSHED * len(starts)
    return out


def steps_apart(
    links: Links,
    steps: pd.DataFrame,
    of_calls: np.ndarray,
    of_gpu: np.ndarray,
    unflushed: np.ndarray,
) -> tuple[np.ndarray, bool]:
    """Which steps are not judged with the others, and whether the first is one because it takes far
    longer: no others would remain.  Those at an end that lack kernels are left out too.

    of_calls, of_gpu: as in JudgedSteps, of all steps."""
    n, calls, gpu = len(steps), links.calls, links.gpu
    launches = calls["starts_kernel"].to_numpy(bool) & (of_calls >= 0)
    kernels = gpu["correlation"][(gpu["kind"] == "kernel").to_numpy()]
    lost = launches & ~calls["correlation"].isin(kernels).to_numpy()
    if not links.on_gpu:
        lost[:] = False
    missing, launched, at_end = (
        np.bincount(of_calls[which], minlength=n) for which in (lost, launches, lost & unflushed)
    )
    apart = incomplete_at_ends(missing, launched, at_end == missing)
    # A GPU that runs behind takes as long as its work: how long the host takes to launch it is
    # hidden.
    us = (gpu["end"] - gpu["start"]).to_numpy()
    busy = np.bincount(of_gpu[of_gpu >= 0], us[of_gpu >= 0], minlength=n)
    length = np.maximum((steps["end"] - steps["start"]).to_numpy(float), busy)
    is_first = not apart[0] and outlying_first(length[~apart])
    if is_first:
        apart[0] = True
    return apart, is_first


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


def unmarked_steps(links: Links) -> tuple[pd.DataFrame, str | None]:
    """Steps where no event marks them, and how they were found; none if they are not."""
    host = links.host
    work = work_in_order(links)
    steps, length = repeated_steps(work.names, work.times, work.between, links.on_gpu)
    if len(steps) and steps["end"].iloc[-1] == work.times[-1]:
        steps.loc[steps.index[-1], "end"] = end_of_work(links, work.times[-1])
    # Several within one range or operator are parts of what it does, such as layers.
    ends_in = np.searchsorted(steps["end"], host["end"] + CLOCK_TICK_US, side="right")
    in_one = ends_in - np.searchsorted(steps["start"], host["start"] - CLOCK_TICK_US)
    if len(steps) and in_one.max(initial=0) <= 1:
        return steps, f"repetitions of the same {length:,} events"
    updates = links.trace.annotations[has_role(links.trace.annotations, roles.OPTIMIZER_STEP)]
    often = updates["name"].value_counts()
    if len(often) and often.iloc[0] > REPEATS:
        marks = updates[(updates["name"] == often.index[0]).to_numpy()].sort_values("start")
        between = steps_between(marks["start"].to_numpy(), marks["end"].to_numpy())
        covered_us = between["end"].iloc[-1] - between["start"].iloc[0]
        if covered_us > COVERED * (host["end"].max() - host["start"].min()):
            return between, f"from one {often.index[0]} to the next"
    return steps.iloc[:0], None


def end_of_work(links: Links, begin: float) -> float:
    """Where a step ends whose last event, of the work of the trace, is begun by the host at this
    time: behind that, as what begins at the end of the last step is in none."""
    if links.on_gpu:
        launches_it = links.calls["start"] == begin
        return max(links.calls["end"][launches_it].max(), begin + CLOCK_TICK_US)
    host = links.host
    outermost = (host["operator_parent"] < 0) & (host["kind"] == OPERATOR)
    return host["end"][outermost].max()


class WorkInOrder(NamedTuple):
    """The work of a trace in the order in which the host began it."""

    names: np.ndarray  # [events]: a number for each different name
    times: np.ndarray  # [events]: us
    between: np.ndarray  # us, of what happens only between steps; in no order


def work_in_order(links: Links) -> WorkInOrder:
    """On a GPU its events, where their calls are in the trace, else the outermost operators."""
    host = links.host
    if links.on_gpu:
        work = links.gpu.assign(began=links.gpu["launched"]).dropna(subset="began")
    else:
        outermost = (host["operator_parent"] < 0) & (host["kind"] == OPERATOR)
        work = host.assign(began=host["start"])
        work = work[(outermost & (host["thread"] == links.thread)).to_numpy()]
    work = work.sort_values(["began", "start"], kind="stable")
    between = []
    for table in (links.calls, host, work.assign(start=work["began"])):
        for column, meanings in BETWEEN_STEPS.items():
            between.append(table["start"].to_numpy()[table[column].isin(meanings).to_numpy()])
    names = work["name"].cat.codes.to_numpy().astype(np.int64)
    return WorkInOrder(names, work["began"].to_numpy(), np.concatenate(between))


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
    if len(lengths):
        steps = steps_of_lengths(times, first, lengths)
        edges = np.append(steps["start"], steps["end"].iloc[-1:])
        n_between = np.diff(np.searchsorted(np.sort(between), edges))
        length = int(np.median(lengths))
        if np.mean(n_between > 0) >= 1 - 1 / REPEATS:
            return steps, length
    else:
        length = len(names)
    if on_gpu or not is_nothing_else(names, length):
        return steps_of_lengths(times, 0, np.zeros(0, np.int64)), 0
    lengths = np.full(len(names) // length, length)
    return steps_of_lengths(times, 0, lengths), length


def steps_of_lengths(times: np.ndarray, first: int, lengths: np.ndarray) -> pd.DataFrame:
    """Steps of so many events each, the first of which begins with this event; times: [events]."""
    ends = first + np.cumsum(lengths)
    starts = ends - lengths
    times = np.append(times, times[-1:])  # the last step ends with its last event
    return pd.DataFrame(
        {"number": np.arange(len(lengths)), "start": times[starts], "end": times[ends]}
    )


def is_nothing_else(names: np.ndarray, length: int) -> bool:
    """Whether parts of this length are all that there is, in the same order from the first event
    on: layers have something before and after them, as an embedding and a loss."""
    return len(names) > REPEATS * length and bool((names[length:] == names[:-length]).all())


class Repetition(NamedTuple):
    """Parts of a sequence, one after another, that contain the same."""

    first: int  # where the first of them begins
    lengths: np.ndarray  # [parts] of each; empty: nothing repeats


NOTHING_REPEATS = Repetition(0, np.zeros(0, dtype=np.int64))


def longest_repetition(names: np.ndarray) -> Repetition:
    """The repetition that covers most of a sequence.

    Each part begins with the same name, has the same length within SAME_LENGTH, and the same names
    within twice that.  Among repetitions that cover about as much, that of the longest parts
    counts: a step repeats layers in itself.
    """
    n = len(names)
    best, best_score = NOTHING_REPEATS, (0.0, 0.0)
    counts = np.bincount(names, minlength=1)
    order = np.argsort(names, kind="stable")
    for places in np.split(order, np.cumsum(counts)[:-1]):
        if not REPEATS <= len(places) <= n // REPEATS + 1:
            continue
        usual = int(np.median(np.diff(places)))
        found = longest_run(places, usual, n)
        covered = found.lengths.sum() / n
        if len(found.lengths) < REPEATS or covered < COVERED or usual < 2:
            continue
        score = (round(covered, 1), float(usual))
        if score > best_score and same_names(names, found.first, found.lengths):
            best, best_score = found, score
    return best


def longest_run(places: np.ndarray, usual: int, n: int) -> Repetition:
    """The longest run of parts of about the usual length, if parts begin at these places of a
    sequence of n.  The last part counts as far as it is there."""
    lengths = np.diff(places)
    alike = np.abs(lengths - usual) <= max(1, SAME_LENGTH * usual)
    left = n - places[-1]
    if alike[-1] and left >= usual * (1 - SAME_LENGTH):
        lengths, alike = np.append(lengths, min(usual, left)), np.append(alike, True)
    changes = np.diff(np.concatenate([[False], alike, [False]]).astype(np.int8))
    edges = np.flatnonzero(changes)
    begins, ends = edges[::2], edges[1::2]
    if len(begins) == 0:
        return NOTHING_REPEATS
    longest = int(np.argmax(ends - begins))
    begin, end = int(begins[longest]), int(ends[longest])
    return Repetition(int(places[begin]), lengths[begin:end])


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
