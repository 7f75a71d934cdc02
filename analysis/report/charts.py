"""What one moves about in: the timeline of a step and memory over time.  The page's script draws
it with plotly (https://plotly.com/javascript/reference)."""

from analysis.diagnosis.document import OperatorAnalysis
from analysis.diagnosis.timelines import MemorySeries, StepTimeline
from analysis.report.palette import MEMORY_COLORS
from analysis.report.step_zoom import GPU, look_of

STEP_TIMELINE, MEMORY = "step_timeline", "memory"  # as sections name them


def charts_of(own: OperatorAnalysis | None) -> dict[str, dict]:
    """The charts for which there is data, as data and layout of plotly.newPlot, by the names that
    sections have for them; but for the timeline, which asks for its events."""
    if own is None or own.memory.peak_mb is None:
        return {}
    return {MEMORY: memory_chart(own.memory)}


def memory_chart(memory: MemorySeries) -> dict:
    """Allocated memory over the trace."""
    color = MEMORY_COLORS["activations"]
    line = {
        "type": "scatter",
        "mode": "lines",
        "x": memory.time_ms,
        "y": memory.allocated_mb,
        "fill": "tozeroy",
        "fillcolor": color,
        "line": {"shape": "hv", "width": 0.5, "color": color},
        "hovertemplate": "%{y:,.2f} MB at %{x:.3f} ms<extra></extra>",
    }
    layout = {
        "height": 300,
        "xaxis": {"title": {"text": "time since the first event (ms)"}},
        "yaxis": {"title": {"text": "allocated (MB)"}, "automargin": True},
    }
    return {"data": [line], "layout": layout}


def step_of_document(timeline: StepTimeline) -> dict:
    """The timeline as step_zoom.zoomed_step() tells a step: its components alone, for a page
    without the trace."""
    lanes = sorted(timeline.lanes, key=lambda lane: not lane.name.startswith(GPU))
    pieces = []  # start and end in ms, number of the component, number of the lane
    for number, lane in enumerate(lanes):
        pieces += [(*piece, number) for piece in lane.pieces]
    pieces.sort()
    rows = []
    for lane in lanes:
        on_gpu = lane.name.startswith(GPU)
        rows.append({"lane": lane.name, "on_gpu": on_gpu, "level": 0, "events": []})
    events = {name: [] for name in ("start_ms", "ms", "step", "above", "name", "inputs", "part")}
    for number, (start_ms, end_ms, component, lane) in enumerate(pieces):
        rows[lane]["events"].append(number)
        row = (start_ms, end_ms - start_ms, timeline.step, -1, component, -1, component)
        for column, value in zip(events.values(), row, strict=True):
            column.append(value)
    parts = [{"part": name, "class": "", **look_of(name)} for name in timeline.components]
    return {
        "embedded": True,
        "steps": [timeline.step],
        "step": timeline.step,
        "window_ms": [0.0, timeline.length_ms],
        "began_ms": None,
        "left_out": 0,
        "rows": rows,
        "events": events,
        "names": timeline.components,
        "inputs": [],
        "sums": [],
        "parts": parts,
    }
