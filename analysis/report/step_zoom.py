"""The events of one step for a timeline that can be zoomed: GPU streams and host threads, in rows;
whose time it is."""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from analysis.attribution.components import IDLE, OVERHEAD
from analysis.attribution.intervals import innermost
from analysis.attribution.ledger import cut_to, us_by
from analysis.attribution.operators import shapes_text
from analysis.diagnosis.timelines import window_of_step
from analysis.report.palette import GRAY, color_of, text_color
from analysis.trace.links import CLOCK_TICK_US
from analysis.trace.nesting import operators_around
from analysis.trace.steps import step_around
from analysis.trace.tables import take_or
from analysis.trace.timeline import Timeline, cached_on_timeline, median_step

MOST = (
    20_000  # events at once: the longest, and the others as one zooms in; blocks of slices at most
)
DEPTH = 14  # rows of a lane at most
LANES = 24  # at most
HOST, GPU, APART = "host", "GPU", "asynchronous"  # lanes
CALL, UNKNOWN, NOTHING = (
    "call of the runtime",
    "no component",
    "nothing recorded",
)  # what belongs to no component


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
    numbers, events = timeline.steps["number"].tolist(), all_events(timeline)
    which = numbers.index(number) if number in numbers else median_step(timeline)
    whole = window_of_step(timeline, which)
    first = whole[0]
    start, end = whole if window is None else (first + 1e3 * edge for edge in window)
    inside = events[((events["end"] > start) & (events["start"] < end)).to_numpy()]
    kept = (inside["end"] - inside["start"]).nlargest(MOST).index
    while len(more := events.index.intersection(events.loc[kept, "above"]).difference(kept)):
        kept = kept.union(more)  # whatever called or launched what is shown
    shown = events.loc[kept].assign(us=events["end"] - events["start"])
    shown = shown.sort_values(["start", "us"], ascending=[True, False])
    place = pd.Series(np.arange(len(shown)), shown.index)
    rows = [row | {"events": place[found].tolist()} for row, found in rows_of_lanes(shown)]
    drawn = shown.index[[i for row in rows for i in row["events"]]]
    slices = {of: cut_to(found, *whole) for of, found in whose_time(timeline).items()}
    parts = pd.concat([shown, *slices.values()])[["part", "class"]]
    code = parts.groupby(["part", "class"], sort=False).ngroup().to_numpy()
    of_events, *of_slices = np.split(code, np.cumsum([len(shown), *map(len, slices.values())])[:-1])
    name, inputs = (pd.Categorical(shown[key]) for key in ("name", "inputs"))
    pairs = zip(slices.items(), of_slices, strict=True)
    sums = [{"of": of} | pieces(found, part, first) for (of, found), part in pairs if len(found)]
    starts, lengths = ((shown["start"] - first) / 1e3).round(6), (shown["us"] / 1e3).round(6)
    events = {"start_ms": starts.tolist(), "ms": lengths.tolist()}
    events |= {"step": take_or(numbers, shown["step"], None).tolist()}
    events |= {"above": place.reindex(shown["above"], fill_value=-1).tolist()}
    events |= {
        "name": name.codes.tolist(),
        "inputs": inputs.codes.tolist(),
        "part": of_events.tolist(),
    }
    left_out = len(inside.index.difference(drawn))
    whole = {
        "steps": numbers,
        "step": numbers[which],
        "window_ms": [(start - first) / 1e3, (end - first) / 1e3],
    }
    whole |= {
        "began_ms": timeline.trace.perfetto_ms(first),
        "left_out": left_out,
        "rows": rows,
        "events": events,
    }
    whole |= {"names": name.categories.tolist(), "inputs": inputs.categories.tolist()}
    looks = [row | look_of(row["part"]) for row in parts.drop_duplicates().to_dict("records")]
    return whole | {"parts": looks, "sums": sums}


def pieces(slices: pd.DataFrame, part: np.ndarray, first: float) -> dict[str, list]:
    """Slices that follow each other: edges, in ms since `first`, and parts.  Of too many, each
    block has every part of it once, so that sums are right but for a block at the edges."""
    block = np.arange(len(part)) // -(-len(part) // MOST)
    us = us_by(
        pd.DataFrame({"block": block, "part": part, "us": slices["us"].to_numpy()}), "block", "part"
    )
    edges = max(slices["start"].min() - first, 0.0) + np.append(0.0, us.cumsum())
    return {
        "edges_ms": (edges / 1e3).round(6).tolist(),
        "part": us.index.get_level_values("part").tolist(),
    }


@cached_on_timeline
def whose_time(timeline: Timeline) -> dict[str, pd.DataFrame]:
    """Slices with part and class: the ledger, and beside that of a GPU the thread of the steps."""
    slices = timeline.slices
    idle = "idle: " + slices["cause"].astype(str).str.replace("_", " ")
    part = idle.where(slices["kind"] == IDLE, parts_of(slices))
    found = slices[["start", "end", "us"]].assign(part=part)
    found["class"] = slices["class"].astype(str)
    if not timeline.on_gpu:
        return {HOST: found}
    own, events = (
        innermost(timeline.host, (timeline.host["thread"] == timeline.thread).to_numpy()),
        all_events(timeline),
    )
    edges = np.unique(np.concatenate([own.edges, found["start"].iloc[:1], found["end"].iloc[-1:]]))
    texts = (
        events[["part", "class"]].reindex(own.at(edges[:-1])).fillna(NOTHING).reset_index(drop=True)
    )
    return {GPU: found, HOST: texts.assign(start=edges[:-1], end=edges[1:], us=np.diff(edges))}


@cached_on_timeline
def all_events(timeline: Timeline) -> pd.DataFrame:
    """Host events, calls of the runtime and GPU events: lane, where (as Perfetto calls it), name,
    part, class, inputs, start, end, step (row of steps), and the row of the event that called
    or launched each; -1: unknown."""
    gpu, operators, threads = timeline.gpu, timeline.trace.operators, timeline.trace.threads
    host = timeline.host.assign(
        step=step_around(timeline.host["start"].to_numpy(), timeline.steps),
        above=timeline.host["parent"],
    )
    calls = timeline.calls.assign(
        component=CALL, phase=None, category=CALL, above=operators_around(timeline.calls, host)
    )
    by_host = pd.concat([host, calls], ignore_index=True)
    # An asynchronous range has a thread of its own, after those of the trace.
    thread = np.minimum(by_host["thread"], len(threads))
    lane = [
        HOST if one == timeline.thread else f"{HOST} thread {one}" for one in range(len(threads))
    ]
    where = [f"process {process}, thread {number}" for process, number in threads]
    by_host = by_host.assign(
        lane=np.array([*lane, APART])[thread], where=np.array([*where, HOST])[thread]
    )
    places = gpu["device"].astype(str) + " stream " + gpu["stream"].astype(str)
    mostly = (gpu["category"] == "communication").groupby(places).transform("mean") > 0.5
    above = gpu["operator"].where(gpu["call"] < 0, gpu["call"] + len(host))
    lane = f"{GPU} " + places + np.where(mostly, ", communication", "")
    gpu = gpu.assign(lane=lane, where="process " + places.str.replace(" ", ", ", n=1), above=above)
    columns = [
        "name",
        "start",
        "end",
        "component",
        "phase",
        "category",
        "step",
        "above",
        "lane",
        "where",
    ]
    events = pd.concat(
        [table[columns] for table in (by_host, gpu) if len(table)], ignore_index=True
    )
    texts = [
        " ".join([shapes_text(shapes), *map(str, types or [])])
        for shapes, types, _ in timeline.trace.signatures
    ]
    signature = take_or(operators["signature"], np.minimum(events.index, len(operators)), -1)
    events = events.assign(
        part=parts_of(events), inputs=take_or(np.array(texts, dtype=object), signature, None)
    )
    phase, category = (
        events["phase"].astype(object).fillna(""),
        events["category"].astype(object).fillna(OVERHEAD),
    )
    events["class"] = category.where(
        ~phase.isin(("data", "optimizer")) | (category == "communication"), phase
    )
    return events.drop(
        index=range(timeline.first_replayed, len(operators))
    )  # those of graphs took no time


def parts_of(table: pd.DataFrame) -> pd.Series:
    """'matmul, backward': component and phase, where the component is none."""
    component, phase = (
        table["component"].astype(object).fillna(UNKNOWN),
        table["phase"].astype(object),
    )
    return component.where(
        phase.isna() | (phase == component), component + ", " + phase.fillna("").astype(str)
    )


def look_of(part: str) -> dict[str, str]:
    """Colors of a part and of text on it."""
    component = part.split(", ")[0]
    color = GRAY if component in (CALL, UNKNOWN, NOTHING) else color_of(component)
    return {"color": color, "ink": text_color(color)}


def rows_of_lanes(events: pd.DataFrame) -> Iterator[tuple[dict, pd.Index]]:
    """The rows of each lane with their events: streams of GPUs, the thread of the steps, others,
    asynchronous ranges.  The second row of a stream shows what ran while something else did."""

    def place(name: str) -> tuple:
        return not name.startswith(GPU), name == APART, name != HOST, -busy[name]

    busy = events.groupby("lane")["us"].sum()
    for name in sorted(busy.index, key=place)[:LANES]:
        found, on_gpu = events[(events["lane"] == name).to_numpy()], name.startswith(GPU)
        row_of = np.array(
            rows_of(found["start"].tolist(), (found["end"] - CLOCK_TICK_US * on_gpu).tolist())
        )
        for level in range(min(row_of.max() + 1, DEPTH)):
            row = {"lane": name, "where": found["where"].iloc[0], "level": level, "on_gpu": on_gpu}
            yield row, found.index[row_of == level]


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
