"""The events of one step for a timeline that can be zoomed: GPU streams and host threads, in rows;
whose time it is."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.attribution.components import IDLE, OVERHEAD, classes_of
from analysis.attribution.intervals import innermost
from analysis.attribution.ledger.of_steps import cut_to, us_by
from analysis.attribution.operators import shapes_text
from analysis.diagnosis.document import OperatorAnalysis
from analysis.diagnosis.timelines import window_of_step
from analysis.limits.timeline import timeline_of
from analysis.report.palette import GRAY, color_of, text_color
from analysis.trace.links import CLOCK_TICK_US
from analysis.trace.nesting import operators_around
from analysis.trace.steps import step_around
from analysis.trace.tables import read_trace, take_or
from analysis.trace.timeline import Timeline, cached_on_timeline, median_step
from analysis.trust.beside import summary_beside

# Events at once: the longest, and the others as one zooms in; blocks of slices at most.
MOST = 20_000
DEPTH = 14  # rows of a lane at most
LANES = 24  # at most
HOST, GPU, APART = "host", "GPU", "asynchronous"  # lanes
# What belongs to no component.
CALL, UNKNOWN, NOTHING = "call of the runtime", "no component", "nothing recorded"


def step_of_trace(path: Path, own: OperatorAnalysis, reading: dict) -> dict:
    """The step that the answers of a trace show, with its events, to be embedded in a page.
    Raises UserError if the trace cannot be read.

    reading: how it was read, as read_trace() takes it."""
    rank = own.integrity.rank if own.integrity.ranks_in_file else None
    trace = read_trace(path, rank=rank, **reading)
    timeline = timeline_of(trace, summary_beside(path))
    step = zoomed_step(timeline, own.step_timeline.step)
    step["steps"] = [step["step"]]  # the only one to choose
    step["embedded"] = True
    return step


def zoomed_step(
    timeline: Timeline, number: int | None = None, window: tuple[float, float] | None = None
) -> dict:
    """The events of a step that lie in a window, in ms since the step began.

    number: of the step, by default that of median duration.  window: by default the whole step with
    its work on the GPU.  `events` are columns: `name`, `inputs` and `part` are numbers in the lists
    of those names, `above` is the event that called or launched it, and -1 none.  `rows` are
    numbers of events.  `sums`: whose time the step is, as pieces that follow each other.
    `began_ms`: of the step after the first event of the file, as Perfetto counts.
    """
    numbers = timeline.steps["number"].tolist()
    which = numbers.index(number) if number in numbers else median_step(timeline)
    first_us, last_us = window_of_step(timeline, which)
    start_us, end_us = first_us, last_us
    if window is not None:
        start_us, end_us = (first_us + 1e3 * edge for edge in window)
    inside, shown = events_between(all_events(timeline), start_us, end_us)
    number_of = pd.Series(np.arange(len(shown)), shown.index)
    rows, drawn = [], []
    for row in rows_of_lanes(shown):
        drawn.append(row.events)
        rows.append({**row.about, "events": number_of[row.events].tolist()})
    left_out = inside.difference(np.concatenate(drawn)) if drawn else inside
    slices = {of: cut_to(table, first_us, last_us) for of, table in whose_time(timeline).items()}
    parts = numbered_parts([shown, *slices.values()])
    return {
        "device": timeline.context.device["name"],
        "steps": numbers,
        "step": numbers[which],
        "window_ms": [(start_us - first_us) / 1e3, (end_us - first_us) / 1e3],
        "began_ms": timeline.trace.perfetto_ms(first_us),
        "left_out": len(left_out),
        "rows": rows,
        "sums": sums_of(slices, parts.numbers[1:], first_us),
        "parts": [{**part, **look_of(part["part"])} for part in parts.each],
        **columns_of(shown, parts.numbers[0], number_of, first_us, numbers),
    }


def events_between(
    events: pd.DataFrame, start_us: float, end_us: float
) -> tuple[pd.Index, pd.DataFrame]:
    """Which events lie between two times; and the longest of them with whatever called or launched
    these, in the order in which they began, with their length `us`."""
    is_inside = (events["end"] > start_us) & (events["start"] < end_us)
    inside = events[is_inside.to_numpy()]
    kept = (inside["end"] - inside["start"]).nlargest(MOST).index
    callers = kept
    while len(callers):
        callers = events.index.intersection(events.loc[callers, "above"]).difference(kept)
        kept = kept.union(callers)
    shown = events.loc[kept]
    shown = shown.assign(us=shown["end"] - shown["start"])
    return inside.index, shown.sort_values(["start", "us"], ascending=[True, False])


class Parts(NamedTuple):
    """Pairs of part and class that occur in tables, and which one each row of each table has."""

    each: list[dict]  # part, class
    numbers: list[np.ndarray]  # of a table [rows]


def numbered_parts(tables: list[pd.DataFrame]) -> Parts:
    every = pd.concat(tables)[["part", "class"]]
    number = every.groupby(["part", "class"], sort=False).ngroup().to_numpy()
    ends = np.cumsum([len(table) for table in tables])[:-1]
    return Parts(every.drop_duplicates().to_dict("records"), np.split(number, ends))


def columns_of(
    shown: pd.DataFrame, part: np.ndarray, number_of: pd.Series, first_us: float, steps: list[int]
) -> dict:
    """The events as columns, and the lists in which `name` and `inputs` are numbers.

    part: number of the part of each event.  number_of: an event by its row of all_events().
    steps: their numbers."""
    name, inputs = pd.Categorical(shown["name"]), pd.Categorical(shown["inputs"])
    events = {
        "start_ms": ((shown["start"] - first_us) / 1e3).round(6).tolist(),
        "ms": (shown["us"] / 1e3).round(6).tolist(),
        "step": take_or(steps, shown["step"], None).tolist(),
        "above": number_of.reindex(shown["above"], fill_value=-1).tolist(),
        "name": name.codes.tolist(),
        "inputs": inputs.codes.tolist(),
        "part": part.tolist(),
    }
    names, texts = name.categories.tolist(), inputs.categories.tolist()
    return {"events": events, "names": names, "inputs": texts}


def sums_of(
    slices: dict[str, pd.DataFrame], parts: list[np.ndarray], first_us: float
) -> list[dict]:
    """Whose time the step is, of the GPU and of the host, as pieces that follow each other."""
    sums = []
    for (of, table), part in zip(slices.items(), parts, strict=True):
        if len(table):
            sums.append({"of": of, **pieces(table, part, first_us)})
    return sums


def pieces(slices: pd.DataFrame, part: np.ndarray, first_us: float) -> dict[str, list]:
    """Slices that follow each other: edges, in ms since `first_us`, and parts.  Of too many, each
    block has every part of it once, so that sums are right but for a block at the edges."""
    slices_per_block = -(-len(part) // MOST)
    block = np.arange(len(part)) // slices_per_block
    table = pd.DataFrame({"block": block, "part": part, "us": slices["us"].to_numpy()})
    us = us_by(table, "block", "part")
    begins_us = max(slices["start"].min() - first_us, 0.0)
    edges_us = begins_us + np.append(0.0, us.cumsum())
    return {
        "edges_ms": (edges_us / 1e3).round(6).tolist(),
        "part": us.index.get_level_values("part").tolist(),
    }


@cached_on_timeline
def whose_time(timeline: Timeline) -> dict[str, pd.DataFrame]:
    """Slices with part and class: the ledger, and beside that of a GPU the thread of the steps."""
    slices = timeline.slices
    idle = "idle: " + slices["cause"].astype(str).str.replace("_", " ")
    of_ledger = slices[["start", "end", "us"]].assign(
        part=idle.where(slices["kind"] == IDLE, parts_of(slices)),
        **{"class": slices["class"].astype(str)},
    )
    if not timeline.on_gpu:
        return {HOST: of_ledger}
    own = innermost(timeline.host, (timeline.host["thread"] == timeline.thread).to_numpy())
    ends = [of_ledger["start"].iloc[:1], of_ledger["end"].iloc[-1:]]
    edges = np.unique(np.concatenate([own.edges, *ends]))
    texts = all_events(timeline)[["part", "class"]].reindex(own.at(edges[:-1])).fillna(NOTHING)
    of_host = texts.reset_index(drop=True)
    of_host = of_host.assign(start=edges[:-1], end=edges[1:], us=np.diff(edges))
    return {GPU: of_ledger, HOST: of_host}


@cached_on_timeline
def all_events(timeline: Timeline) -> pd.DataFrame:
    """Host events, calls of the runtime and GPU events: lane, where (as Perfetto calls it), name,
    part, class, inputs, start, end, step (row of steps), and the row of the event that called
    or launched each; -1: unknown."""
    columns = "name start end component phase category step above lane where".split()
    by_host, gpu = events_of_host(timeline), events_of_gpu(timeline)
    tables = [table[columns] for table in (by_host, gpu) if len(table)]
    events = pd.concat(tables, ignore_index=True)
    category = events["category"].astype(object).fillna(OVERHEAD)
    events["part"] = parts_of(events)
    events["class"] = classes_of(events["phase"], category).astype(object)
    events["inputs"] = inputs_of_events(timeline, len(events))
    # Those of replayed graphs took no time.
    return events.drop(index=range(timeline.first_replayed, len(timeline.trace.operators)))


def inputs_of_events(timeline: Timeline, n: int) -> np.ndarray:
    """The text of the inputs of each of n events, of which the first are the operators [events,
    object]; None: not recorded, or of no operator."""
    texts = []
    for shapes, types, _ in timeline.trace.signatures:
        texts.append(" ".join([shapes_text(shapes), *map(str, types or [])]))
    operators = timeline.trace.operators
    inputs = np.full(n, None, dtype=object)
    of_operators = take_or(np.array(texts, dtype=object), operators["signature"], None)
    inputs[: len(operators)] = of_operators
    return inputs


def events_of_host(timeline: Timeline) -> pd.DataFrame:
    """Host events, and after them the calls of the runtime, by thread."""
    threads = timeline.trace.threads
    step = step_around(timeline.host["start"].to_numpy(), timeline.steps)
    host = timeline.host.assign(step=step, above=timeline.host["parent"])
    calls = timeline.calls.assign(
        component=CALL, phase=None, category=CALL, above=operators_around(timeline.calls, host)
    )
    events = pd.concat([host, calls], ignore_index=True)
    lanes, places = [], []
    for number, (process, thread) in enumerate(threads):
        lanes.append(HOST if number == timeline.thread else f"{HOST} thread {number}")
        places.append(f"process {process}, thread {thread}")
    # An asynchronous range has a thread of its own, after those of the trace.
    lanes.append(APART)
    places.append(HOST)
    thread = np.minimum(events["thread"], len(threads))
    return events.assign(lane=np.array(lanes)[thread], where=np.array(places)[thread])


def events_of_gpu(timeline: Timeline) -> pd.DataFrame:
    """Kernels, copies and fills, by stream; a stream that is mostly communication is named so."""
    gpu = timeline.gpu
    places = gpu["device"].astype(str) + " stream " + gpu["stream"].astype(str)
    is_communication = gpu["category"] == "communication"
    mostly = is_communication.groupby(places).transform("mean") > 0.5
    return gpu.assign(
        lane=f"{GPU} " + places + np.where(mostly, ", communication", ""),
        where="process " + places.str.replace(" ", ", ", n=1),
        above=gpu["operator"].where(gpu["call"] < 0, gpu["call"] + len(timeline.host)),
    )


def parts_of(table: pd.DataFrame) -> pd.Series:
    """'matmul, backward': component and phase, where the component is none."""
    component = table["component"].astype(object).fillna(UNKNOWN)
    phase = table["phase"].astype(object)
    with_phase = component + ", " + phase.fillna("").astype(str)
    return component.where(phase.isna() | (phase == component), with_phase)


def look_of(part: str) -> dict[str, str]:
    """Colors of a part and of text on it."""
    component = part.split(", ")[0]
    color = GRAY if component in (CALL, UNKNOWN, NOTHING) else color_of(component)
    return {"color": color, "ink": text_color(color)}


class Row(NamedTuple):
    """A row of the timeline, and which events of a table it shows."""

    about: dict  # lane, where, level, on_gpu
    events: pd.Index


def rows_of_lanes(events: pd.DataFrame) -> Iterator[Row]:
    """The rows of each lane: streams of GPUs, the thread of the steps, others, asynchronous ranges.
    The second row of a stream shows what ran while something else did."""

    def place(name: str) -> tuple:
        return not name.startswith(GPU), name == APART, name != HOST, -busy_us[name]

    busy_us = events.groupby("lane")["us"].sum()
    for name in sorted(busy_us.index, key=place)[:LANES]:
        on_gpu = name.startswith(GPU)
        of_lane = events[(events["lane"] == name).to_numpy()]
        ends = of_lane["end"] - CLOCK_TICK_US if on_gpu else of_lane["end"]
        level_of = np.array(rows_of(of_lane["start"].tolist(), ends.tolist()))
        for level in range(min(level_of.max() + 1, DEPTH)):
            where = of_lane["where"].iloc[0]
            about = {"lane": name, "where": where, "level": level, "on_gpu": on_gpu}
            yield Row(about, of_lane.index[level_of == level])


def rows_of(start: list[float], end: list[float]) -> list[int]:
    """For intervals in order, the first row that is free, which is below that of the caller; DEPTH
    where none is."""
    until, rows = [-np.inf] * DEPTH, []
    for begins, ends in zip(start, end, strict=True):
        row = next((row for row in range(DEPTH) if until[row] <= begins), DEPTH)
        if row < DEPTH:
            until[row] = ends
        rows.append(row)
    return rows
