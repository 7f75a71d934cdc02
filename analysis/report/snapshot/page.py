"""report.html of a snapshot of torch.cuda.memory: memory over time, and the tables of the
answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from analysis.memory.snapshot.analyzed import Analyzed
from analysis.memory.snapshot.document import SnapshotDevice
from analysis.memory.snapshot.headline import WORDS, held_of, size_text
from analysis.memory.snapshot.savings import lowers
from analysis.memory.snapshot.text import snapshot_sections
from analysis.report.html import Further, write_page
from analysis.report.page import FirstScreen, Share
from analysis.report.snapshot.charts import COLORS, memory_charts


def write_memory_report(folder: Path, analyzed: Analyzed) -> list[Path]:
    """Write report.html; returns the file."""
    charts = memory_charts(analyzed)
    document = analyzed.document
    device = document.fullest
    saves, next_step = "", ""
    if device.would_lower:
        saving = device.would_lower[0]
        size = size_text(saving.at_most_bytes)
        saves = f"It would lower {lowers(saving.change)} by {size} at most."
        next_step = saving.change
    first = FirstScreen(
        title=f"Memory of {document.snapshot}",
        sentence=document.headline,
        shares=shares_of(device),
        whole="peak",
        numbers=[
            (size_text(device.peak_bytes), "peak of allocated memory"),
            (size_text(device.end_bytes), "allocated at the end"),
            (size_text(device.reserved_bytes), "reserved at the end"),
        ],
        saves=saves,
        next=next_step,
    )
    sections = snapshot_sections(document)
    # Memory over time is what one opens this page for.
    sections[document.devices.index(device)].unfolded = True
    return [write_page(folder, first, sections, charts)]


def shares_of(device: SnapshotDevice) -> list[Share]:
    """Of the categories at the peak, the largest first."""
    shares = []
    for category, size in held_of(device.held).items():
        share = size / device.peak_bytes if device.peak_bytes else 0.0
        shares.append(Share(WORDS[category], share, COLORS[category]))
    return shares


def beside_traces(snapshots: Sequence[Analyzed]) -> Further:
    """What the report of traces shows of the first of the snapshots beside them."""
    if not snapshots:
        return Further([], {})
    return Further(snapshot_sections(snapshots[0].document), memory_charts(snapshots[0]))
