"""The events of one step for a timeline that can be zoomed: host threads, GPU streams, communication, in rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from analysis.attribution.components import IDLE
from analysis.attribution.ledger import cut_to, ledger, us_by
from analysis.diagnosis.timelines import window_of_step
from analysis.report.palette import GRAY, color_of
from analysis.trace.links import AttributedLinks, median_step

MOST = 20_000  # events at once: the longest, and the others as one zooms in
MOST_SPENT = 5  # components, to tell what a window went to
DEPTH = 14  # rows of a lane at most
LANES = 24  # at most
HOST, APART = "host", "asynchronous"  # lanes
CALL, UNKNOWN = "call of the runtime", "no component"  # events that belong to no component


def zoomed_step(links: AttributedLinks, number: int | None = None, window: tuple[float, float] | None = None) -> dict:
    """The events of a step that lie in a window, in ms since the step began.

    number: of the step, by default that of median duration.  window: by default the whole step with its work on the
    GPU.  In each row, `name` and `part` are numbers in the lists of those names.  `spent`: what the window went to.
    """
    numbers = links.steps["number"].tolist()
    which = numbers.index(number) if number in numbers else median_step(links)
    first, last = window_of_step(links, which)
    start, end = (first, last) if window is None else (first + 1e3 * edge for edge in window)
    events = all_events(links)
    events = events[((events["end"] > start) & (events["start"] < end)).to_numpy()]
    events = events.assign(us=events["end"] - events["start"])
    shown = events.nlargest(MOST, "us").sort_values(["start", "us"], ascending=[True, False])
    name, part = shown["name"].cat.remove_unused_categories(), pd.Categorical(shown["part"])
    shown = shown.assign(name=name.cat.codes, part=part.codes)
    rows = []
    for lane, found in lanes(shown):
        row_of = rows_of(found["start"].tolist(), found["end"].tolist())
        for row in range(min(max(row_of) + 1, DEPTH)):
            cells = found[np.array(row_of) == row]
            times = {"start_ms": (cells["start"] - first) / 1e3, "ms": cells["us"] / 1e3}
            times = {key: column.round(6).tolist() for key, column in times.items()}
            texts = {key: cells[key].tolist() for key in ("name", "part")}
            rows.append({"lane": lane if row == 0 else "", **times, **texts})
    return {
        "spent": spent(links, start, end),
        "steps": numbers,
        "step": numbers[which],
        "window_ms": [(start - first) / 1e3, (end - first) / 1e3],
        "left_out": len(events) - sum(len(row["ms"]) for row in rows),
        "rows": rows,
        "names": name.cat.categories.tolist(),
        "parts": [{"name": text, "color": color_of_part(text)} for text in part.categories],
    }


def spent(links: AttributedLinks, start: float, end: float) -> list[dict]:
    """What most of the time between two times went to: components, and causes of idle time; name, ms."""
    slices = cut_to(ledger(links), start, end)
    idle = "idle: " + slices["cause"].astype(str).str.replace("_", " ")
    ms = us_by(slices.assign(name=idle.where(slices["kind"] == IDLE, slices["component"])), "name") / 1e3
    return [{"name": name, "ms": float(one)} for name, one in ms.nlargest(MOST_SPENT).items()]


def all_events(links: AttributedLinks) -> pd.DataFrame:
    """Host events, calls of the runtime and GPU events: lane, name, part, start, end."""
    columns = ["name", "start", "end", "component", "phase"]
    calls = links.calls.assign(component=CALL, phase=None)
    replayed = range(links.first_replayed, len(links.trace.operators))  # of graphs: they took no time
    host = links.host.drop(index=replayed)
    host = pd.concat([table[[*columns, "thread"]] for table in (host, calls)], ignore_index=True)
    thread = host["thread"].to_numpy()
    # An asynchronous range has a thread of its own, after those of the trace.
    of_trace = [table["thread"].max() for table in (links.trace.operators, links.trace.annotations) if len(table)]
    others = np.where(thread > max(of_trace, default=-1), APART, [f"{HOST} thread {one}" for one in thread])
    gpu, communicates = links.gpu, links.gpu["category"] == "communication"
    streams = [f"GPU {device} stream {stream}" for device, stream in zip(gpu["device"], gpu["stream"], strict=True)]
    mostly = {name for name, share in pd.Series(communicates).groupby(streams).mean().items() if share > 0.5}
    lane = np.array([f"{name}, communication" if name in mostly else name for name in streams], dtype=object)
    tables = [host.assign(lane=np.where(thread == links.thread, HOST, others)), gpu[columns].assign(lane=lane)]
    events = pd.concat([table[["lane", *columns]] for table in tables if len(table)], ignore_index=True)
    component = events["component"].astype(object).where(events["component"].notna(), UNKNOWN)
    phase = events["phase"].astype(object)
    part = component.where(phase.isna() | (phase == component), component + ", " + phase.astype(str))
    return events.assign(part=part)


def color_of_part(part: str) -> str:
    component = part.split(", ")[0]
    return GRAY if component in (CALL, UNKNOWN) else color_of(component)


def lanes(events: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The events of each lane: the thread of the steps, other threads, asynchronous ranges, streams of GPUs."""

    def place(name: str) -> tuple:
        return name.startswith("GPU"), name == APART, name != HOST, -busy[name]

    busy = events.groupby("lane")["us"].sum()
    for name in sorted(busy.index, key=place)[:LANES]:
        yield name, events[(events["lane"] == name).to_numpy()]


def rows_of(start: list[float], end: list[float]) -> list[int]:
    """For intervals in order, the first row that is free, which is below that of the caller; DEPTH where none is."""
    until, rows = [-np.inf] * DEPTH, []
    for begins, ends in zip(start, end, strict=True):
        row = next((row for row in range(DEPTH) if until[row] <= begins), DEPTH)
        if row < DEPTH:
            until[row] = ends
        rows.append(row)
    return rows
