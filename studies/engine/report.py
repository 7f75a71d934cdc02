"""What does a sweep end with?  Its finding and tables, on the screen and in markdown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from harness.base.console import say
from harness.base.files import write_bytes, write_figure
from harness.base.sections import Section, as_markdown, as_text
from harness.base.tables import wrapped
from harness.base.units import megabytes
from studies.engine.columns import first_reason
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
        about = {
            "Device": sweep.environment["device"]["name"],
            "PyTorch": sweep.environment["packages"]["torch"],
            "Threads": sweep.environment["cpu"]["torch_threads"],
            "Time": sweep.environment["timestamp"],
            "Command": sweep.environment["command_line"],
        }
        title, figure = (
            sweep.kind.name.replace("_", " ").capitalize(),
            sweep.kind.name * (self.figure is not None),
        )
        note = [" ".join(self.finding), *sweep.notes]
        return as_markdown(
            Section(title, note=note, facts=about, figure=figure, parts=self.sections), level=1
        )[1:]

    def show(self, sweep: Sweep, verbose: bool) -> None:
        """Print the finding; verbose: the tables before it, the first one last."""
        first, *others = self.sections
        for section in [*others, first] if verbose else []:
            say(*as_text(on_screen(section), 0, fold=section is first))
        kinds = "json, .md" if self.figure is None else "json, .md, .png"
        files = (
            f"Files: {sweep.folder / sweep.kind.name}.{kinds}"
            + "; --verbose prints the tables" * (not verbose)
        )
        say(
            "",
            files,
            "",
            *wrapped([" ".join(self.finding)]),
            f"Disturbance: {disturbance_of(sweep.rows)}",
        )


def on_screen(section: Section) -> Section:
    """Without what disturbed a row, which is a long text: the .md file has it."""
    return replace(
        section,
        rows=[row | {"disturbance": ""} if row.get("disturbed") else row for row in section.rows],
    )


def disturbance_of(rows: list[dict]) -> str:
    measured = [row for row in rows if row["status"] == "ok"]
    if not measured:
        return "nothing was measured"
    disturbed = [first_reason(row) for row in measured if row.get("disturbed")]
    return (
        f"{len(disturbed)} of {len(measured)} rows, such as: {disturbed[-1]}"
        if disturbed
        else "none seen"
    )


def predicted_finding(
    rows: list[dict], key: str, label: Callable[[dict], str], available_bytes: int
) -> list[str]:
    """The finding of a sweep that measured nothing: the range of predicted peaks,
    and which of them fit."""

    known = sorted((row for row in rows if row[key] is not None), key=lambda row: row[key])
    if not known:
        return ["Nothing was measured, and nothing could be predicted; the column status says why."]
    peaks = [f"{megabytes(row[key])} ({label(row)})" for row in known]
    first = (
        f"Predicted peaks: from {peaks[0]} to {peaks[-1]}."
        if peaks[1:]
        else f"Predicted peak: {peaks[0]}."
    )
    fitting, available = (
        sum(row[key] <= available_bytes for row in known),
        megabytes(available_bytes),
    )
    too_large = "" if fitting == len(known) else f"; the smallest that does not: {peaks[fitting]}"
    return [first, f"{fitting} of {len(known)} fit in the {available} available{too_large}."]
