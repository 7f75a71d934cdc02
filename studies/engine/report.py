"""What does a sweep end with?  Its finding and tables, on the screen and in markdown."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from harness.base.console import say
from harness.base.files import write_bytes, write_figure
from harness.base.sections import Section, as_markdown, as_text
from harness.base.tables import wrapped
from harness.base.units import megabytes
from studies.engine.columns import first_reason
from studies.engine.rows import SweepRow
from studies.engine.sweep import Sweep

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass
class Report:
    """What the rows of a sweep say together."""

    finding: list[str]  # sentences
    sections: list[Section]  # the main one first
    figure: Figure | None = None
    document: dict = field(default_factory=dict)  # fields of <name>.json beside the rows

    def write(self, sweep: Sweep) -> None:
        """<name>.md and <name>.png."""
        file = sweep.folder / sweep.kind.name
        write_bytes(file.with_suffix(".md"), ("\n".join(self.markdown(sweep)) + "\n").encode())
        if self.figure is not None:
            write_figure(file.with_suffix(".png"), self.figure)

    def markdown(self, sweep: Sweep) -> list[str]:
        environment = sweep.environment
        about = {
            "Device": environment["device"]["name"],
            "PyTorch": environment["packages"]["torch"],
            "Threads": environment["cpu"]["torch_threads"],
            "Time": environment["timestamp"],
            "Command": environment["command_line"],
        }
        page = Section(
            sweep.kind.name.replace("_", " ").capitalize(),
            note=[" ".join(self.finding), *sweep.notes],
            facts=about,
            figure="" if self.figure is None else sweep.kind.name,
            parts=self.sections,
        )
        return as_markdown(page, level=1)[1:]

    def show(self, sweep: Sweep, verbose: bool) -> None:
        """Print the finding; verbose: the tables before it, the first one last."""
        first, *others = self.sections
        if verbose:
            for section in [*others, first]:
                say(*as_text(on_screen(section), 0, fold=section is first))
        kinds = "json, .md" if self.figure is None else "json, .md, .png"
        files = f"Files: {sweep.folder / sweep.kind.name}.{kinds}"
        if not verbose:
            files += "; --verbose prints the tables"
        say("", files, "", *wrapped([" ".join(self.finding)]))
        say(f"Disturbance: {disturbance_of(sweep.rows)}")


def on_screen(section: Section) -> Section:
    """Without what disturbed a row, which is a long text: the .md file has it."""
    return replace(section, rows=[_without_disturbance(row) for row in section.rows])


def _without_disturbance(row: object) -> object:
    if not isinstance(row, SweepRow) or not row.disturbed:
        return row
    short = copy.deepcopy(row)
    short.disturbance = ""
    return short


def disturbance_of(rows: list[SweepRow]) -> str:
    measured = [row for row in rows if row.is_measured]
    if not measured:
        return "nothing was measured"
    reasons = [first_reason(row) for row in measured if row.disturbed]
    if not reasons:
        return "none seen"
    return f"{len(reasons)} of {len(measured)} rows, such as: {reasons[-1]}"


def predicted_finding(rows: list[SweepRow], key: str, available_bytes: int) -> list[str]:
    """The finding of a sweep that measured nothing: the range of predicted peaks, and which of them
    fit.  key: the column of predicted bytes."""
    predicted = [(getattr(row, key), row.label()) for row in rows if getattr(row, key) is not None]
    if not predicted:
        return ["Nothing was measured, and nothing could be predicted; the column status says why."]
    predicted.sort(key=lambda pair: pair[0])
    peaks = [f"{megabytes(peak)} ({label})" for peak, label in predicted]
    if len(peaks) > 1:
        first = f"Predicted peaks: from {peaks[0]} to {peaks[-1]}."
    else:
        first = f"Predicted peak: {peaks[0]}."
    fitting = sum(peak <= available_bytes for peak, _ in predicted)
    too_large = ""
    if fitting < len(peaks):
        too_large = f"; the smallest that does not: {peaks[fitting]}"
    available = megabytes(available_bytes)
    return [first, f"{fitting} of {len(peaks)} fit in the {available} available{too_large}."]
