"""Memory over time of a snapshot of torch.cuda.memory: stacked by category, its peak marked, with
the lines that hold most at each time."""

from __future__ import annotations

import numpy as np

from analysis.memory.snapshot.analyzed import Analyzed
from analysis.memory.snapshot.headline import WORDS, size_text
from analysis.memory.snapshot.lines import line_sums, line_text
from analysis.memory.snapshot.reading import NO_TIME
from analysis.memory.snapshot.replay import BEFORE, CATEGORIES, Replay
from analysis.report.palette import MEMORY_COLORS
from harness.base.units import MB

POINTS = 1500  # of a chart: more cannot be told apart on a screen
LINES = 20  # that a chart knows
SHOWN = 3  # lines that the pointer shows at each time
COLORS = {
    BEFORE: MEMORY_COLORS["parameters"],
    "optimizer_state": MEMORY_COLORS["optimizer"],
    "gradients": MEMORY_COLORS["gradients"],
    "kept": MEMORY_COLORS["buckets"],
    "activations": MEMORY_COLORS["activations"],
    "temporaries": MEMORY_COLORS["temporaries"],
}


def memory_charts(analyzed: Analyzed) -> dict[str, dict]:
    """Data and layout for plotly, by the names that snapshot_sections() has for them; of devices
    with events."""
    charts = {}
    for replay in analyzed.replays:
        if len(replay.made_at):
            charts[f"memory_of_device_{replay.recording.device}"] = memory_chart(replay)
    return charts


def memory_chart(replay: Replay) -> dict:
    events = sampled_events(replay.totals())
    x, x_title = times_of(replay, events)
    traces = []
    for name, sizes in stacked(replay).items():
        mb = sizes[events] / MB
        if mb.any():
            traces.append(area(name, x, mb))
    traces.append(line_labels(replay, x, events))
    if replay.peak_event is not None:
        traces.append(peak_mark(x[events.index(replay.peak_event)], replay.peak_bytes))
    layout = {
        "height": 420,
        "hovermode": "x unified",
        "xaxis": {"title": {"text": x_title}, "hoverformat": ",.2~f"},
        "yaxis": {"title": {"text": "allocated (MB)"}, "automargin": True, "rangemode": "tozero"},
        "legend": {"orientation": "h", "y": 1.12},
    }
    return {"data": traces, "layout": layout}


def sampled_events(totals: np.ndarray) -> list[int]:
    """Numbers of events to draw: all, or of many the one of each group that has most, so that no
    peak is lost."""
    if len(totals) <= POINTS:
        return list(range(len(totals)))
    edges = np.linspace(0, len(totals), POINTS + 1).astype(int)
    events = []
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        events.append(begin + int(totals[begin:end].argmax()))
    return events


def times_of(replay: Replay, events: list[int]) -> tuple[list[float], str]:
    """Where the events stand, and the title of the axis: by time where it is told."""
    times = replay.recording.time_us
    if (times == NO_TIME).any():
        return [float(event) for event in events], "event"
    return ((times[events] - times[0]) / 1e3).round(3).tolist(), "time since the first event (ms)"


def stacked(replay: Replay) -> dict[str, np.ndarray]:
    """Bytes after each event by category, what stays longest at the bottom [events]."""
    sizes = {}
    for name in COLORS:
        if name != BEFORE:
            sizes[name] = replay.totals_of_category(CATEGORIES.index(name))
    return {BEFORE: replay.totals() - sum(sizes.values()), **sizes}


def area(name: str, x: list[float], mb: np.ndarray) -> dict:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": WORDS[name],
        "x": x,
        "y": mb.round(3).tolist(),
        "stackgroup": "memory",
        "fillcolor": COLORS[name],
        "line": {"shape": "hv", "width": 0.5, "color": COLORS[name]},
        "hovertemplate": "%{y:,.1f} MB",
    }


def line_labels(replay: Replay, x: list[float], events: list[int]) -> dict:
    """What the pointer shows beside the categories; nothing of it is drawn."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "largest lines",
        "x": x,
        "y": (replay.totals()[events] / MB).round(3).tolist(),
        "line": {"width": 0, "color": "rgba(0, 0, 0, 0)"},
        "showlegend": False,
        "customdata": largest_lines(replay, events),
        "hovertemplate": "<br>%{customdata}",
    }


def peak_mark(x: float, peak_bytes: int) -> dict:
    return {
        "type": "scatter",
        "mode": "markers+text",
        "name": "peak",
        "x": [x],
        "y": [peak_bytes / MB],
        "text": [f"peak {size_text(peak_bytes)}"],
        "textposition": "top center",
        "marker": {"color": "#000000", "symbol": "triangle-down", "size": 10},
        "hovertemplate": "%{y:,.1f} MB",
    }


def largest_lines(replay: Replay, events: list[int]) -> list[str]:
    """The lines that hold most at each of these events, as the pointer shows them."""
    every = np.ones(len(replay.made_at), dtype=bool)
    known = line_sums(replay, replay.at_peak)[:LINES] + line_sums(replay, every)[:LINES]
    lines = list(dict.fromkeys(row.line for row in known))
    number_of = {line: number for number, line in enumerate(lines)}
    by_stack = [number_of.get(stack.line, -1) for stack in replay.recording.stacks]
    by_stack.append(number_of.get(None, -1))  # without a stack
    line_of = np.array(by_stack)[replay.stack]
    rows = []
    for number in range(len(lines)):
        rows.append(np.cumsum(replay.changes(line_of == number))[events])
    sizes = np.array(rows)
    texts = []
    order = np.argsort(-sizes, axis=0)[:SHOWN]
    for place in range(len(events)):
        shown = []
        for number in order[:, place].tolist():
            if sizes[number, place] > 0:
                shown.append(f"{size_text(sizes[number, place])} {line_text(lines[number])}")
        texts.append("<br>".join(shown))
    return texts
