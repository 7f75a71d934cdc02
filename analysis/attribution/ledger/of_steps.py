"""What is asked of the ledger: the slices of the steps, and sums of them."""

import itertools

import numpy as np
import pandas as pd

from analysis.attribution.components import COMMUNICATION, IDLE
from analysis.attribution.intervals import Slices, slices_of
from analysis.attribution.ledger.host_activity import occasional_times, starts_up
from analysis.attribution.ledger.kinds import CAUSES, IDLE_CAUSES, NUMBER, WAITING
from analysis.trace.tables import has_role, take_or
from analysis.trace.timeline import Timeline, cached_on_timeline
from analysis.vocabulary import roles

# Of the GPU's work: steps that are shorter than it by more are those of something else
STEPS_DIFFER = 0.1


@cached_on_timeline
def of_steps(timeline: Timeline) -> pd.DataFrame:
    """The slices of the steps, whose `us` add up to the time of the steps, as long as they are
    without the profiler."""
    found = timeline.slices[timeline.slices["of_steps"].to_numpy()]
    if timeline.idle_left < 1:
        found = found.assign(
            us=found["us"].where(found["state"] != IDLE, timeline.idle_left * found["us"])
        )
    return found


def idle_left_without_profiler(timeline: Timeline, unprofiled_ms: float) -> float:
    """The share of the idle time that steps without the profiler, of so many milliseconds, leave
    beside the GPU's work."""
    if not timeline.on_gpu:
        return 1.0
    slices = timeline.slices[timeline.slices["of_steps"].to_numpy()]
    sums = us_by(slices, "state")
    idle = float(sums.get(IDLE, 0.0))
    working = float(sums.sum()) - idle
    left = 1e3 * unprofiled_ms * len(timeline.steps) - working
    if left < -STEPS_DIFFER * working:  # far less than the GPU works: they are other steps
        return 1.0
    if max(0.0, left) >= idle:
        return 1.0
    return max(0.0, left) / idle


def start_up_slices(timeline: Timeline) -> pd.DataFrame:
    """The idle slices of the steps, or apart, that are start-up but no compilation; `where`: the
    call that takes the time."""
    slices = timeline.slices
    in_steps = (slices["of_steps"] | slices["apart"]) & (slices["step"] >= 0)
    elsewhere = slices_of(occasional_times(timeline)).at(slices["start"].to_numpy()) < 0
    found = slices[((slices["cause"] == "start_up") & in_steps & elsewhere).to_numpy()]
    calls = timeline.calls[starts_up(timeline)]
    call = slices_of(calls).at(found["start"].to_numpy())
    names = take_or(calls["name"].to_numpy(object), call, "before the first event of the GPU")
    return found.assign(where=names)


@cached_on_timeline
def left_out(timeline: Timeline) -> pd.DataFrame:
    """The idle slices of the window that are no part of the steps.  The first event of a stream
    began more than LATENCY_US after its launch, so what was launched on it before the recording was
    still running.  Or nothing marks steps: then waits AT_EDGES are those of a program that was not
    recorded before, and not after."""
    slices = timeline.slices
    return cut_to(slices[~(slices["of_steps"] | slices["apart"]).to_numpy()], *timeline.window)


def capture_share(timeline: Timeline) -> float:
    """The share of the span of the steps in which a graph was being captured."""
    (first, last), calls = timeline.window, timeline.calls
    begin = np.sort(calls["start"][has_role(calls, roles.CAPTURE_BEGIN)])
    end = np.sort(calls["end"][has_role(calls, roles.CAPTURE_END)])
    until = take_or(end, np.searchsorted(end, begin), last)
    begin, until = np.clip([begin, until], first, last)
    captures = Slices(begin, until)
    return float((captures.end - captures.start).sum() / (last - first)) if last > first else 0.0


def us_by(slices: pd.DataFrame, *columns: str) -> pd.Series:
    """The time of slices in us, by one or more columns of them."""
    return slices.groupby([*columns], observed=True, sort=False)["us"].sum()


def cut_to(slices: pd.DataFrame, first: float, last: float) -> pd.DataFrame:
    """The slices between two times, each with its share of `us`."""
    start, end = slices["start"].to_numpy(), slices["end"].to_numpy()
    inside = (end > first) & (start < last)
    cut, start, end = slices[inside], start[inside], end[inside]
    within = np.minimum(end, last) - np.maximum(start, first)
    return cut.assign(us=cut["us"].to_numpy() * within / (end - start))


@cached_on_timeline
def events_of_steps(timeline: Timeline) -> pd.DataFrame:
    """A row for each event that owns time of the steps, by its row: component, phase, category,
    class, operator, step (those of its first slice), us.  Row -1: collectives of the host that a
    GPU waits for."""
    slices = of_steps(timeline)
    slices = slices[
        ((slices["state"] != IDLE) | ((slices["event"] >= 0) & (not timeline.on_gpu))).to_numpy()
    ]
    first = slices.drop_duplicates("event").set_index("event").sort_index()
    columns = ["component", "phase", "category", "class", "operator", "step"]
    return first[columns].assign(us=slices.groupby("event")["us"].sum())


def idle_by_cause(slices: pd.DataFrame) -> dict[str, float]:
    """Idle time of the GPU in these slices in us, by cause."""
    is_idle = (slices["state"] == IDLE).to_numpy()
    cause, us = slices["cause"].cat.codes.to_numpy()[is_idle], slices["us"].to_numpy()[is_idle]
    sums = np.bincount(cause, us, minlength=len(CAUSES))
    return {cause: float(sums[NUMBER[cause]]) for cause in IDLE_CAUSES}


def named_slices(timeline: Timeline, slices: pd.DataFrame) -> pd.DataFrame:
    """Slices for a reader: the number of the step, names in place of rows; without them, `none`."""
    table = timeline.gpu if timeline.on_gpu else timeline.host
    rows = {"operator": timeline.host["name"], "event": table["name"]}
    names = {
        key: take_or(column.to_numpy(object), slices[key], "none") for key, column in rows.items()
    }
    number = take_or(timeline.steps["number"].to_numpy(float), slices["step"], np.nan)
    return slices.assign(
        **names, step=pd.array(number, dtype="Int64"), trace=timeline.trace.path.name
    )


def exposed_communication(timeline: Timeline) -> pd.DataFrame:
    """The slices of the steps that belong to communication: nothing computes meanwhile."""
    slices = of_steps(timeline)
    return slices[(slices["kind"] == COMMUNICATION).to_numpy()]


def hidden_communication_us(timeline: Timeline) -> float:
    """How long communication ran in the steps while something else worked, or data were fetched."""
    slices = of_steps(timeline)
    return float(slices["us"][slices["overlaps"].str.contains(COMMUNICATION).to_numpy(bool)].sum())


def cut_at_arrivals(
    slices: pd.DataFrame, events: pd.DataFrame, waiting_us: np.ndarray
) -> pd.DataFrame:
    """Slices with communication cut where the last rank arrived: before that it waits for the
    ranks.  The sum stays.

    events: the collectives.  waiting_us: of each, until the last rank arrived;
    NaN where that is unknown."""
    of = slices["collective"].to_numpy()
    begin = take_or(events["start"].to_numpy(), of, np.nan)
    until = begin + take_or(np.nan_to_num(waiting_us), of, np.nan)
    start, end = slices["start"].to_numpy(), slices["end"].to_numpy()
    edges = [start, *(np.fmin(np.fmax(start, one), end) for one in (begin, until)), end]
    parts = [slices.assign(start=first, end=last) for first, last in itertools.pairwise(edges)]
    parts[1] = parts[1].assign(state=WAITING, cause="ranks")
    out = pd.concat(parts).astype(slices.dtypes)
    out["us"] = out["end"] - out["start"]
    return out[out["us"] > 0].sort_values("start", ignore_index=True)
