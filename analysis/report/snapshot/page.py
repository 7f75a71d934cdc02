"""report.html of a snapshot of torch.cuda.memory: memory over time, and the tables of the
answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from analysis.memory.snapshot.analyzed import Analyzed
from analysis.memory.snapshot.headline import size_text
from analysis.memory.snapshot.text import snapshot_sections
from analysis.report.html import Further, packed, plotly, script
from analysis.report.page import FirstScreen, fill_template
from analysis.report.snapshot.charts import memory_charts
from harness.base.files import write_bytes


def write_memory_report(folder: Path, analyzed: Analyzed) -> list[Path]:
    """Write report.html; returns the file."""
    charts = memory_charts(analyzed)
    document, device = analyzed.document, analyzed.device
    saves, next_step = "", ""
    if device.would_lower:
        saving = device.would_lower[0]
        saves = f"It would lower the peak by {size_text(saving.at_most_bytes)} at most."
        next_step = saving.change
    first = FirstScreen(
        title=f"Memory of {document.snapshot}",
        sentence=document.headline,
        numbers=[
            (size_text(device.peak_bytes), "peak of allocated memory"),
            (size_text(device.end_bytes), "allocated at the end"),
            (size_text(device.reserved_bytes), "reserved at the end"),
        ],
        saves=saves,
        next=next_step,
    )
    text = fill_template(
        "page.html",
        first,
        snapshot_sections(document),
        charts=list(charts),
        chart_data=charts,
        step=packed(b"null"),  # no timeline asks for it
        plotly=packed(plotly().read_bytes()) if charts else "",
        script=script(),
    )
    target = folder / "report.html"
    write_bytes(target, text.encode(errors="backslashreplace"))
    return [target]


def beside_traces(snapshots: Sequence[Analyzed]) -> Further:
    """What the report of traces shows of the first of the snapshots beside them."""
    if not snapshots:
        return Further([], {})
    return Further(snapshot_sections(snapshots[0].document), memory_charts(snapshots[0]))
