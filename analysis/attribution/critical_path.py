"""The critical path of a step: the chain of work on host and GPU that its end had to wait for, by
component.

From the end backwards: a kernel waited either for its launch, then the path goes on at the host, or
for the GPU event that ended last before it began.  A call that also waits, as a blocking copy does,
launched as it began.  The host waited for the GPU where it called a synchronization, then the path
goes on at the event that ended last before the call returned.  Making something shorter that is not
on the path saves nothing.
"""

import numpy as np
import pandas as pd

from analysis.attribution.components import IDLE, OVERHEAD, UNATTRIBUTED
from analysis.attribution.intervals import Slices, innermost
from analysis.attribution.ledger import cut_to, left_out, of_steps, us_by
from analysis.trace.links import CLOCK_TICK_US
from analysis.trace.timeline import Timeline, cached_on_timeline, median_step
from harness.base.sections import Section
from harness.base.tables import added_up, column, text_columns
from harness.base.text import significant

BESIDE = (
    0.1  # of the path: from here on it is told that the GPU works while the path is on the host
)
GPU, HOST, START = "GPU", "host", "kernel start"
Span = tuple[str, int, float, float]  # where, row of the GPU event or host thread, from, to


def critical_path(timeline: Timeline) -> dict | None:
    """The path through a step of about median duration: `rows` of where, component and ms, most
    time first, which add up to `length_ms`; None without GPU events, or if it takes no time."""
    which = median_step(timeline) or min(
        1, len(timeline.steps) - 1
    )  # of the first, the trace lacks what was before
    if not (timeline.gpu["step"] == which).any() or not (spans := walk(timeline, which)):
        return None
    rows = added_up(time_by_component(timeline, spans))
    total = rows.total()
    slices = timeline.slices  # as long as the path: both with the profiler
    on_path = cut_to(slices[slices["of_steps"].to_numpy()], spans[-1][2], spans[0][3])
    idle_ms = float(us_by(on_path, "state").get(IDLE, 0.0) / 1e3)
    found = [
        {"where": where, "component": component, "ms": float(us / 1e3), "share": float(us / total)}
        for (where, component), us in rows.most_common()
        if us > 0
    ]
    step = int(timeline.steps["number"].iloc[which])
    return {"step": step, "length_ms": float(total / 1e3), "gpu_idle_ms": idle_ms, "rows": found}


@cached_on_timeline
def walk(timeline: Timeline, which: int) -> list[Span]:
    """The path from its end to the beginning of the step; where the GPU runs behind, to the end of
    the step before."""
    gpu, calls = timeline.gpu, timeline.calls
    first, last = (float(timeline.steps[name].iloc[which]) for name in ("start", "end"))
    first, last = (
        max(first, of_steps(timeline)["start"].min()),
        min(last, of_steps(timeline)["end"].max()),
    )
    start, end, call = (gpu[name].to_numpy() for name in ("start", "end", "call"))
    if (earlier := (gpu["step"] >= 0).to_numpy() & (gpu["step"] < which).to_numpy()).any():
        first = max(first, float(end[earlier].max()))
    order = np.argsort(end, kind="stable")
    ends = end[order]
    waits = calls[calls["waits"].to_numpy(bool)].sort_values("end")
    wait_starts, wait_ends = waits["start"].to_numpy(), waits["end"].to_numpy()
    late, call_threads = {*left_out(timeline)["event"]} - {-1}, calls["thread"].to_numpy()
    at_once = calls["waits"].to_numpy(bool) & ~np.isin(np.arange(len(calls)), call[[*late]])
    launched_at = np.where(at_once, calls["start"], calls["end"])

    own = np.flatnonzero(gpu["step"].to_numpy()[order] == which)
    place = int(own[-1])  # of the event in the order of ends
    left = (
        place + 1
    )  # events that the path may still come to: none twice, as events may take no time
    on_gpu, thread, time = bool(ends[place] >= last), timeline.thread, float(max(ends[place], last))
    spans: list[Span] = []
    while time > first:
        if on_gpu:
            row = order[place]
            begun = max(start[row], first)
            spans.append((GPU, row, begun, time))
            if (time := begun) <= first:
                break
            left = min(place, int(np.searchsorted(ends, time + CLOCK_TICK_US, side="right")))
            place = left - 1
            ended = min(ends[place], time) if place >= 0 else -np.inf
            launched = min(launched_at[call[row]], time) if call[row] >= 0 else -np.inf
            until = max(ended, launched, first)
            if row not in late:  # what it waited for was not recorded
                spans.append((START, row, until, time))
            on_gpu = ended > launched
            thread = thread if on_gpu or call[row] < 0 else int(call_threads[call[row]])
            time = until
        else:
            wait = int(np.searchsorted(wait_ends, time, side="right")) - 1
            returned = max(wait_ends[wait], first) if wait >= 0 else first
            place = min(left, int(np.searchsorted(ends, returned, side="right"))) - 1
            on_gpu = wait >= 0 and place >= 0 and ends[place] > max(wait_starts[wait], first)
            begun = (
                ends[place]
                if on_gpu
                else min(max(wait_starts[wait], first), time)
                if wait >= 0
                else first
            )
            spans.append((HOST, thread, begun, time))
            time = begun if begun < time or on_gpu else first
    return spans


def time_by_component(timeline: Timeline, spans: list[Span]) -> list[tuple[tuple[str, str], float]]:
    """The time of each span, by where and component; that of the host by the innermost event,
    else overhead."""
    host, component = timeline.host, timeline.gpu["component"].to_numpy(object)
    out = []
    for where, row, begin, end in spans:
        if where != HOST:
            out.append(
                (
                    (where, str(component[row]) if pd.notna(component[row]) else UNATTRIBUTED),
                    end - begin,
                )
            )
    for thread in {row for where, row, *_ in spans if where == HOST}:
        edges = np.array([span[2:] for span in spans if span[:2] == (HOST, thread)])
        on_path = Slices(edges[:, 0], edges[:, 1])
        inside = (
            (host["thread"] == thread)
            & (host["until"] > edges.min())
            & (host["start"] < edges.max())
        )
        slices = innermost(host, inside.to_numpy())
        begin, end = map(on_path.covered_until, (slices.start, slices.end))
        names = host["component"].to_numpy(object)[slices.row]
        sums = pd.Series(end - begin).groupby(np.where(pd.isna(names), UNATTRIBUTED, names)).sum()
        out += [((HOST, str(name)), float(us)) for name, us in sums.items()]
        out.append(((HOST, OVERHEAD), max(0.0, float(np.diff(edges).sum() - sums.sum()))))
    return out


# ---- For a reader --------------------------------------------------------------------------------

PATH_COLUMNS = [
    *text_columns("where", "component"),
    column("ms", "ms", "~3"),
    column("share", "share", ".1%"),
]


def path_title(path: dict) -> str:
    """The path may be on the host while the GPU works too: then another path is nearly as long."""
    title = (
        f"{significant(path['length_ms'], most=3)} ms of step {path['step']}; nothing else can make"
        " it shorter"
    )
    on_host = sum(row["ms"] for row in path["rows"] if row["where"] != GPU)
    if on_host - path["gpu_idle_ms"] < BESIDE * path["length_ms"]:
        return title
    saved = (
        f"a faster host alone saves at most the {significant(path['gpu_idle_ms'])} ms in which the"
        " GPU is idle"
    )
    return f"{title}; while it is on the host, the GPU works as well: {saved}"


def path_section(analysis: dict) -> Section:
    """One step: its timeline, and what its end had to wait for."""
    path, timeline = analysis["critical_path"], analysis["step_timeline"]
    title = path_title(path) if path else f"not known: {analysis['critical_path_reason']}"
    lanes = timeline["lanes_left_out"]
    rows, note = (
        path["rows"] if path else [],
        [f"The figure leaves out {lanes} more lanes"] * bool(lanes),
    )
    found = Section(
        "One step, and its critical path", PATH_COLUMNS, rows, note, figure="step_timeline"
    )
    found.facts = {"Timeline": timeline_text(analysis), "Critical path": title}
    found.warning = analysis["integrity"]["unreliable"].get("step_timeline", "")
    found.label, found.sums = "component", ("ms", "share")
    return found


def timeline_text(analysis: dict) -> str:
    """How long the step of the timeline takes on the host, and with its work on the GPU, which may
    end later."""
    timeline = analysis["step_timeline"]
    own = next(
        (
            row["duration_ms"]
            for row in analysis["steps"]["rows"]
            if row["number"] == timeline["step"]
        ),
        None,
    )
    if own is None or timeline["length_ms"] <= own:
        return f"step {timeline['step']}, {timeline['length_ms']:.2f} ms"
    later = f"the GPU, which runs behind, ends its work {timeline['length_ms'] - own:.2f} ms later"
    return f"step {timeline['step']}, {own:.2f} ms on the host; {later}"
