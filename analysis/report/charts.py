"""Charts: figures of plotly (https://plotly.com/javascript/reference)
as JSON, from the documents alone."""

import math
from collections.abc import Sequence
from html import escape

import numpy as np

from analysis.attribution.components import IDLE
from analysis.memory.tables import stack_of_memory
from analysis.report.palette import GRAY, MEMORY_COLORS, PHASE_COLORS, color_of
from analysis.report.step_zoom import GPU, look_of
from analysis.work.sections import by_time
from harness.base.text import shortened, told_apart

Chart = dict  # data and layout of plotly.newPlot
NAME = 44  # letters of a part beside its bar
BARS = 20  # of a chart at most, as many as can be told apart
COLORS = PHASE_COLORS | {IDLE: color_of(IDLE)}
CONTRAST = "#d55e00"  # steps that averages leave out; waiting; the second of two runs


def safe(name: str) -> str:
    """A name as plotly shows it: it takes <b>, <a> and others in any text for markup."""
    return escape(name, quote=False)


def chart(data: list[dict], height: int, x: str, y: str = "", **layout) -> Chart:
    """Traces with the titles of their axes; height in pixels."""
    axes = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}, "automargin": True}}
    return {"data": data, "layout": {"height": height, **axes, **layout}}


def bars(
    name: str, color: str | list[str], labels: list, values: list, hover: str, **style
) -> dict:
    """Horizontal bars of one color, or of one each;
    hover: what the pointer shows, with %{y} and %{x}."""
    look = {
        "marker": {"color": color, "line": {"width": 0}},
        "hovertemplate": f"{hover}<extra></extra>",
        **style,
    }
    return {"type": "bar", "orientation": "h", "name": safe(name), "y": labels, "x": values, **look}


def scatter(name: str, x: Sequence[float], y: Sequence[float], **style) -> dict:
    return {"type": "scatter", "name": safe(name), "x": x, "y": y, **style}


def bar_chart(data: list[dict], rows: int, x: str, **layout) -> Chart:
    """Bars below one another, the first row at the top."""
    found = chart(data, 150 + 22 * rows, x, **layout)
    found["layout"]["yaxis"] |= {"autorange": "reversed", "type": "category"}
    return found


def names_in_chart(names: list[str]) -> list[str]:
    """Short, and different where the names are: rows of one name would be one bar."""
    return [*map(safe, told_apart(names, NAME))]


def breakdown_chart(analysis: dict, documents: dict) -> Chart | None:
    """Components of the step, most time first: forward, backward and other phases end to end."""
    rows = [row for row in analysis["components"] if row["ms_per_step"] > 0][:BARS]
    names = names_in_chart([row["component"] for row in rows])
    data = [
        bars(
            phase,
            COLORS.get(phase, GRAY),
            names,
            [row["phases_ms"].get(phase, 0.0) for row in rows],
            hover,
        )
        for phase in (one["phase"] for one in analysis["phases"] if one["ms_per_step"] > 0)
        for hover in [f"%{{y}}, {safe(phase)}: %{{x:.3f}} ms per step"]
    ]
    return bar_chart(
        data, len(rows), f"{analysis['attribution']['clock']} time per step (ms)", barmode="stack"
    )


def queue_chart(analysis: dict, documents: dict) -> Chart | None:
    """How far the host is ahead of the GPU over a step: events in the queue, and ms until the
    latest one starts."""
    queue = analysis["gpu_timeline"]["queue_over_step"]
    if queue is None:
        return None
    look, colors = (
        {"shape": "hv", "width": 1.5},
        (PHASE_COLORS["forward"], PHASE_COLORS["optimizer"]),
    )
    lines = [
        ("events in the queue", "queued", colors[0], "y"),
        ("launch ahead", "ahead_ms", colors[1], "y2"),
    ]
    data = [
        scatter(
            name,
            queue["time_ms"],
            queue[field],
            mode="lines",
            yaxis=axis,
            line={"color": color, **look},
        )
        for name, field, color, axis in lines
    ]
    right = {
        "title": {"text": "launch ahead (ms)"},
        "overlaying": "y",
        "side": "right",
        "rangemode": "tozero",
    }
    right |= {"showgrid": False, "tickmode": "auto"}
    title = f"time since step {queue['step']} began on the host (ms)"
    found = chart(
        data,
        300,
        title,
        "events in the queue",
        yaxis2=right,
        margin={"t": 54, "r": 60, "b": 44, "l": 60},
    )
    found["layout"]["yaxis"]["rangemode"] = "tozero"
    return found


def ranks_chart(analysis: dict, documents: dict) -> Chart | None:
    """The step of each rank: what communication exposed, as transfer and waiting where these are
    told apart, and the rest."""
    rows = analysis.get("ranks", {}).get("rows", [])
    if not any(row["exposed_comm_ms"] for row in rows):
        return None
    names, keys = (
        [f"rank {row['rank']}" for row in rows],
        ("ms_per_step", "exposed_comm_ms", "waiting_ms"),
    )
    step, exposed, waiting = (np.array([row[key] or 0.0 for row in rows]) for key in keys)
    parts = {"no exposed communication": step - exposed}
    if any(row["waiting_ms"] is None for row in rows):
        parts |= {"exposed communication": exposed}
    else:
        parts |= {"transfer": exposed - waiting, "waiting for other ranks": waiting}
    colors = (color_of("matmul"), color_of("communication"), CONTRAST)
    data = [
        bars(name, color, names, ms.tolist(), f"%{{y}}, {name}: %{{x:.3f}} ms per step")
        for (name, ms), color in zip(parts.items(), colors, strict=False)
    ]
    return bar_chart(
        data, len(rows), f"{analysis['attribution']['clock']} time per step (ms)", barmode="stack"
    )


def area(name: str, color: str, times: list[float], sizes: list[float], **style) -> dict:
    hover = f"{safe(name)}: %{{y:,.2f}} MB<extra></extra>"
    line = {"shape": "hv", "width": 0.5, "color": color}
    return scatter(
        name, times, sizes, hovertemplate=hover, mode="lines", line=line, fillcolor=color, **style
    )


def memory_timeline_chart(analysis: dict | None, documents: dict) -> Chart | None:
    """Live bytes of the tracked step by category, event by event: tracking distorts the time
    between them."""
    if not (memory := documents["memory"]):
        return None
    timeline = memory["timeline"]
    events = [*range(len(timeline["time_us"]))]
    stack = stack_of_memory(timeline, [*MEMORY_COLORS])
    data = [
        area(name, MEMORY_COLORS[name], events, sizes, stackgroup="all")
        for name, sizes in stack.items()
    ]
    title = f"allocations and frees of step {memory['step']}, in order"
    return chart(data, 420, title, "live tensors (MB)", hovermode="x unified")


def memory_chart(analysis: dict, documents: dict) -> Chart | None:
    """Allocated memory over the trace."""
    memory = analysis["memory"]
    if memory["peak_mb"] is None:
        return None
    data = [
        area(
            memory["of"],
            MEMORY_COLORS["activations"],
            memory["time_ms"],
            memory["allocated_mb"],
            fill="tozeroy",
        )
    ]
    return chart(data, 300, "time since the first event (ms)", "allocated (MB)")


def steps_chart(analysis: dict | None, documents: dict) -> Chart | None:
    """Every step of the run; those that averages leave out in another color."""
    if not (summary := documents["summary"]) or not summary["steps"]["step"]:
        return None
    steps = summary["steps"]
    reasons = [reason or "averaged" for reason in steps["exclusion_reason"]]
    marker = {
        "color": [
            PHASE_COLORS["forward"] if reason == "averaged" else CONTRAST for reason in reasons
        ]
    }
    hover = "step %{x}: %{y:.2f} ms, %{text}<extra></extra>"
    named = {"x": steps["step"], "y": steps["time_ms"], "text": reasons, "textposition": "none"}
    return chart(
        [{"type": "bar", **named, "marker": marker, "hovertemplate": hover}],
        280,
        "step",
        "time (ms)",
    )


def roofline_chart(analysis: dict | None, documents: dict) -> Chart | None:
    """Rate and operations per byte of each class of operators and of the step, under the roofs of
    the device."""
    if not (data := documents["roofline"]):
        return None
    shown = [
        row
        for row in (*by_time(data["points"]), data["step"])
        if row["operations_per_sec"] and row["operations"]
    ]
    each = [row["operations_per_byte"] for row in (*shown, *data["ridges"])] or [1.0]
    low, high = min(each) / 4, 4 * max(each)
    lines = roof_lines(data["roofs"], low, high)
    found = [
        points(f"{one['rate'] / 1e9:,.4g} G/s, {one['kind']}", x, y, mode="lines")
        for one, x, y, _ in lines
    ]
    for row in shown:
        marker = {"size": 10 + 30 * (row["share_of_time"] or 0), "color": color_of(row["name"])}
        place = [row["operations_per_byte"]], [row["operations_per_sec"]]
        found.append(points(row["name"], *place, mode="markers", marker=marker))
    out = chart(found, 480, "operations per byte moved", "operations per second")
    for axis in ("xaxis", "yaxis"):
        out["layout"][axis]["type"] = "log"
    return out


def roof_lines(
    roofs: dict[str, list[dict]], low: float, high: float
) -> list[tuple[dict, list, list, bool]]:
    """Each roof with the ends of its line, operations per byte and rates, and whether it is of
    arithmetic.  Slanted: bandwidth, up to the highest of arithmetic; level: arithmetic, from the
    highest bandwidth on."""
    compute, bandwidth = roofs["compute"], roofs["bandwidth"]
    top = max((one["rate"] for one in compute), default=math.inf)
    ends = [(one, [low, max(low, min(top / one["rate"], high))], False) for one in bandwidth]
    first = {
        one["rate"]: min((one["rate"] / other["rate"] for other in bandwidth), default=low)
        for one in compute
    }
    ends += [(one, [max(first[one["rate"]], low), high], True) for one in compute]
    return [
        (one, x, [one["rate"] * (1 if level else at) for at in x], level) for one, x, level in ends
    ]


def points(name: str, x: Sequence[float], y: Sequence[float], **style) -> dict:
    hover = f"{safe(name)}: %{{y:.4s}} per second at %{{x:.3g}} per byte<extra></extra>"
    return scatter(shortened(name), x, y, hovertemplate=hover, **style)


def step_of_document(timeline: dict) -> dict:
    """`step_timeline` as step_zoom.zoomed_step() tells a step: its components alone, for a page
    without the trace."""
    lanes = sorted(timeline["lanes"], key=lambda lane: not lane["name"].startswith(GPU))
    pieces = sorted((*piece, at) for at, lane in enumerate(lanes) for piece in lane["pieces"])
    start, end, part, lane_of = [[*values] for values in zip(*pieces, strict=True)] or [[]] * 4
    nothing, parts = [-1] * len(pieces), timeline["components"]
    rows = [
        {"lane": lane["name"], "on_gpu": lane["name"].startswith(GPU), "level": 0, "events": []}
        for lane in lanes
    ]
    for i, at in enumerate(lane_of):
        rows[at]["events"].append(i)
    step, ms = timeline["step"], [until - since for since, until in zip(start, end, strict=True)]
    events = {"start_ms": start, "ms": ms, "step": [step] * len(pieces)}
    events |= {"above": nothing, "name": part, "inputs": nothing, "part": part}
    out = {
        "steps": [step],
        "step": step,
        "window_ms": [0.0, timeline["length_ms"]],
        "began_ms": None,
        "left_out": 0,
    }
    out |= {"rows": rows, "events": events, "names": parts, "inputs": [], "sums": []}
    return out | {"parts": [{"part": name, "class": ""} | look_of(name) for name in parts]}


CHARTS = {
    "step_breakdown": breakdown_chart,
    "queue": queue_chart,
    "ranks": ranks_chart,
    "memory": memory_chart,
}
CHARTS_OF_RUN = {
    "memory_timeline": memory_timeline_chart,
    "steps": steps_chart,
    "roofline": roofline_chart,
}


def charts(analysis: dict | None, documents: dict) -> dict[str, Chart]:
    """The charts for which there is data, by the names that sections of a page have for them."""
    found = {
        name: make(analysis, documents)
        for name, make in ((CHARTS if analysis else {}) | CHARTS_OF_RUN).items()
    }
    return {name: one for name, one in found.items() if one}


def comparison_chart(rows: list[dict], kind: str, names: tuple[str, str]) -> Chart:
    """The same parts of two runs beside each other, the largest first."""
    rows = sorted(rows, key=lambda row: -max(row["baseline_ms"], row["ms"]))[:BARS]
    parts = names_in_chart([row[kind] for row in rows])
    data = [
        bars(name, color, parts, [row[key] for row in rows], "%{y}: %{x:.3f} ms per step")
        for name, color, key in zip(
            names, (PHASE_COLORS["forward"], CONTRAST), ("baseline_ms", "ms"), strict=True
        )
    ]
    return bar_chart(data, 2 * len(rows), "time per step (ms)", barmode="group")
