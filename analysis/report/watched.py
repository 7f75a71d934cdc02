"""report.html of a watched run: all steps, the slow ones by cause, and memory beneath."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from analysis.program.slow_steps import Cause, SlowSteps, duration, percent
from analysis.program.watched_process import WatchedProcess
from analysis.program.whole_run import WatchDocument, WatchedRun, watch_sections
from analysis.report.html import write_page
from analysis.report.page import FirstScreen, Share
from harness.base.files import writing
from harness.base.sections import Section
from harness.base.text import significant
from harness.base.units import MB

CHART = "all_steps"
# Of a rank: of more steps, every group shows its longest.  As vectors: not every browser has WebGL.
MOST_POINTS = 6_000
SCALARS = "events.out.tfevents.*.watch"
SIZE, SLOW_SIZE = 3, 8  # of a point, in pixels
RANKS_DRAWN = 4
ORDINARY_COLOR = "#4c78a8"
COLORS = ("#e45756", "#f58518", "#72b7b2", "#54a24b", "#b279a2", "#9d755d", "#bab0ac")


def write_watch_report(folder: Path, run: WatchedRun) -> Path:
    """Returns the file."""
    document = run.document
    charts = {CHART: steps_chart(run)} if run.processes else {}
    saves = ""
    if document.headline.saves_ms is not None:
        saves = f"It takes {significant(document.headline.saves_ms, 3)} ms per step."
    first = FirstScreen(
        title=f"A whole run of {document.command}",
        sentence=document.headline.finding,
        shares=shares_of(document),
        whole="run",
        numbers=numbers_of(document),
        saves=saves,
        next=document.headline.next,
    )
    sections = watch_sections(document)
    if charts:
        note = (
            f"Each point is a step; of more than {MOST_POINTS:,}, each group of them shows its"
            " longest."
        )
        sections.insert(0, Section("All steps", note=[note], figure=CHART, unfolded=True))
    return write_page(folder, first, sections, charts)


def write_watch_scalars(folder: Path, run: WatchedRun) -> list[Path]:
    """The points that are drawn, for TensorBoard; in place of those of an earlier answer."""
    from torch.utils.tensorboard import SummaryWriter  # slow

    for earlier in folder.glob(SCALARS):
        earlier.unlink()
    with (
        writing(f"events in {folder}"),
        SummaryWriter(str(folder), filename_suffix=".watch") as writer,
    ):
        for trace in steps_chart(run)["data"]:
            unit = "MB" if "yaxis" in trace else "ms"
            for step, value in zip(trace["x"], trace["y"], strict=True):
                writer.add_scalar(f"whole run/{trace['name']} ({unit})", value, int(step))
    return sorted(folder.glob(SCALARS))


def numbers_of(document: WatchDocument) -> list[tuple[str, str]]:
    """Those of the first screen, with what they are."""
    steps = document.steps
    if steps is None:
        return []
    return [
        (f"{steps.count:,}", "steps"),
        (duration(1e-3 * steps.median_ms), "an ordinary step, in the median"),
        (percent(steps.goodput), "of the time in ordinary steps"),
    ]


def shares_of(document: WatchDocument) -> list[Share]:
    """Of the run: ordinary steps, then the causes of slow ones on all ranks or on the first."""
    if document.steps is None:
        return []
    shares = [Share("ordinary steps", document.steps.goodput, ORDINARY_COLOR)]
    first_rank = document.ranks[0].rank
    rows = [row for row in document.slow or [] if row.rank in (None, first_rank)]
    for number, row in enumerate(rows[: len(COLORS)]):
        shares.append(Share(row.cause, row.share_of_run, COLORS[number]))
    return shares


def steps_chart(run: WatchedRun) -> dict:
    """Data and layout for plotly: above the steps, beneath them memory."""
    ranks = sorted({process.rank for process in run.processes})[:RANKS_DRAWN]
    traces = []
    first_step: dict[int, int] = dict.fromkeys(ranks, 2)  # a later start goes on where one ended
    for process, slow in zip(run.processes, run.slow, strict=True):
        if process.rank not in ranks:
            continue
        name = f"rank {process.rank}" if len(ranks) > 1 else "steps"
        begin = first_step[process.rank]
        first_step[process.rank] += len(process.seconds)
        every = np.arange(len(process.seconds))
        traces.append(points(name, begin, process.seconds, every, SIZE))
        traces += slow_points(begin, process, slow)
        traces += memory_lines(name, begin, process)
    layout = {
        "height": 560,
        "hovermode": "closest",
        "xaxis": {"title": {"text": "step"}, "anchor": "y2"},
        "yaxis": {"title": {"text": "ms"}, "domain": [0.38, 1], "automargin": True},
        "yaxis2": {"title": {"text": "memory (MB)"}, "domain": [0, 0.3], "automargin": True},
        "legend": {"orientation": "h", "y": 1.12},
    }
    return {"data": traces, "layout": layout}


def points(name: str, begin: int, seconds: np.ndarray, places: np.ndarray, size: int) -> dict:
    """Steps as points, of many the longest of each group.

    begin: number of the first step.  seconds: of all steps [N].  places: of those that are meant.
    size: of a point, in pixels."""
    shown = places[longest_of_groups(seconds[places])]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": (begin + shown).tolist(),
        "y": (1e3 * seconds[shown]).round(3).tolist(),
        "marker": {"size": size},
    }


def longest_of_groups(seconds: np.ndarray) -> np.ndarray:
    """Places of all, or of many those of the longest in each of MOST_POINTS groups."""
    n = len(seconds)
    if n <= MOST_POINTS:
        return np.arange(n)
    edges = np.linspace(0, n, MOST_POINTS + 1).astype(int)
    longest = np.maximum.reduceat(seconds, edges[:-1])
    group = np.searchsorted(edges, np.arange(n), side="right") - 1
    is_longest = seconds == longest[group]
    return np.flatnonzero(is_longest)


def slow_points(begin: int, process: WatchedProcess, slow: SlowSteps) -> list[dict]:
    """Slow steps, a color for each cause."""
    by_cause: dict[str, list[int]] = {}
    for place, times in slow.causes.items():
        largest: Cause = max(times, key=times.get)
        by_cause.setdefault(largest.cause, []).append(place)
    traces = []
    for cause, places in sorted(by_cause.items()):
        traces.append(points(cause, begin, process.seconds, np.array(places), SLOW_SIZE))
    return traces


def memory_lines(name: str, begin: int, process: WatchedProcess) -> list[dict]:
    """Memory of the process and of the GPU's allocator."""
    steps = (process.memory[:, 0] - 2 + begin).tolist()
    columns = {"process": 1}
    if process.on_gpu:
        columns["GPU"] = 2
    traces = []
    for of, column in columns.items():
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"{name}: memory of {of}",
                "x": steps,
                "y": (process.memory[:, column] / MB).round(2).tolist(),
                "yaxis": "y2",
            }
        )
    return traces
