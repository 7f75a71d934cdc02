"""What does a sweep end with?  Its finding and tables, on the screen, in markdown and in TensorBoard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.base.console import say
from harness.base.errors import UserError
from harness.base.files import write_bytes, write_figure
from harness.base.tables import Column, Section, narrow_table, with_room, wrapped
from harness.base.text import count_of
from harness.base.units import megabytes
from harness.run.event_file import in_words
from studies.engine.columns import first_reason
from studies.engine.sweep import Sweep

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass
class Report:
    """What the rows of a sweep say together."""

    finding: list[str]  # sentences
    sections: list[Section]  # the first is printed
    figure: Figure | None = None
    document: dict = field(default_factory=dict)  # fields of <name>.json beside the rows

    def write(self, sweep: Sweep) -> None:
        """<name>.md, <name>.png and TensorBoard events."""
        text = self.markdown(sweep)
        file = sweep.folder / sweep.kind.name
        write_bytes(file.with_suffix(".md"), ("\n".join(text) + "\n").encode())
        if self.figure is not None:
            write_figure(file.with_suffix(".png"), self.figure)
        self._write_events(sweep, text)

    def markdown(self, sweep: Sweep) -> list[str]:
        title, environment = sweep.kind.name.replace("_", " ").capitalize(), sweep.environment
        about = [
            f"Device: {environment['device']['name']}; PyTorch {environment['packages']['torch']}; "
            f"{count_of(environment['cpu']['torch_threads'], 'thread')}; {environment['timestamp']}",
            f"Command: {environment['command_line']}",
            *sweep.notes,
        ]
        lines = [f"# {title}", "", *(f"{line}  " for line in about), "", " ".join(self.finding)]
        if self.figure is not None:
            lines += ["", f"![{title}]({sweep.kind.name}.png)"]
        return lines + [line for section in self.sections for line in section.as_markdown()]

    def _write_events(self, sweep: Sweep, text: list[str]) -> None:
        """TensorBoard: the tables, the figure, and each measured row as a line of the HPARAMS tab."""
        from torch.utils.tensorboard import SummaryWriter

        try:
            with SummaryWriter(str(sweep.folder)) as writer:
                writer.add_text(sweep.kind.name, "\n".join(text))
                if self.figure is not None:
                    writer.add_figure(sweep.kind.name, self.figure)
                for row in sweep.rows:
                    known = [name for name in sweep.kind.figures if row.get(name) is not None]
                    if row["status"] == "ok" and known:
                        values = in_words({name: row[name] for name in sweep.kind.key})
                        run = "_".join(str(value).replace("/", "-") for value in values.values())
                        figures = {f"hparam/{name}": row[name] for name in known}
                        writer.add_hparams(values, figures, run_name=f"rows/{run}")
        except OSError as failure:
            raise UserError(f"cannot write events in {sweep.folder}: {failure.strerror}") from failure

    def show(self, sweep: Sweep, verbose: bool, with_table: bool) -> None:
        """Print the finding and the first table; verbose: all tables; not with_table: no table otherwise."""
        first, *others = self.sections
        for section in others if verbose else []:
            say(*screen_lines(section, fold=False), *wrapped(section.text))
        kinds = "json, .md" if self.figure is None else "json, .md, .png"
        more_tables = "" if verbose or (with_table and not others) else "; --verbose prints all of its tables"
        files = f"Files: {sweep.folder / sweep.kind.name}.{kinds}{more_tables}"
        say("", files, "", *wrapped([" ".join(self.finding)]), f"Disturbance: {disturbance_of(sweep.rows)}")
        if verbose or with_table:
            say(*screen_lines(first), *(wrapped(first.text) if verbose else []))


def disturbance_of(rows: list[dict]) -> str:
    measured = [row for row in rows if row["status"] == "ok"]
    if not measured:
        return "nothing was measured"
    disturbed = [first_reason(row) for row in measured if row.get("disturbed")]
    return f"{len(disturbed)} of {len(measured)} rows, such as: {disturbed[-1]}" if disturbed else "none seen"


def predicted_finding(rows: list[dict], key: str, label: Callable[[dict], str], available_bytes: int) -> list[str]:
    """The finding of a sweep that measured nothing: the range of predicted peaks, and which of them fit."""

    def peak_of(row: dict) -> str:
        return f"{megabytes(row[key])} ({label(row)})"

    known = sorted((row for row in rows if row[key] is not None), key=lambda row: row[key])
    if not known:
        return ["Nothing was measured, and nothing could be predicted; the column status says why."]
    least, most = known[0], known[-1]
    too_large = [row for row in known if row[key] > available_bytes]
    available = f"the {megabytes(available_bytes)} available"
    if len(known) == 1:
        return [f"Predicted peak: {peak_of(most)}; it {'does not fit' if too_large else 'fits'} in {available}."]
    first = f"Predicted peaks: from {peak_of(least)} to {peak_of(most)}."
    if not too_large:
        return [first, f"All of them fit in {available}."]
    count = f"{len(too_large)} of {len(known)}" if len(too_large) < len(known) else "All of them"
    verb = "does not" if len(too_large) == 1 else "do not"
    return [first, f"{count} {verb} fit in {available}, the smallest: {peak_of(too_large[0])}."]


# ---- On the screen -------------------------------------------------------------------------------------------------


def screen_lines(section: Section, fold: bool = True) -> list[str]:
    """The title and the table in at most COLUMNS columns: optional ones are left out, the last first, until it fits.

    fold: name what is the same in all rows once, above the table.
    """
    if not section.rows:
        return ["", section.title]
    rows = [row | {"disturbance": ""} if row.get("disturbed") else row for row in section.rows]
    columns, notes = folded(section.columns, rows) if fold else (list(section.columns), [])
    columns, left_out = with_room(columns, rows)
    notes += [f"Left out here, in the .md file: {', '.join(left_out)}"] if left_out else []
    return ["", section.title, *wrapped(notes), *narrow_table(columns, rows)]


def folded(columns: Sequence[Column], rows: list[dict]) -> tuple[list[Column], list[str]]:
    """The columns whose text differs between rows, and a line that names those of the others, if there are any."""
    kept, same = [], []
    for shown in columns:
        text, *different = {shown.text(row) for row in rows}
        if different or (text != "-" and len(rows) == 1):
            kept.append(shown)
        elif text not in ("-", ""):
            same.append(f"{shown.title} {text}")
    return kept, [f"In all rows: {', '.join(same)}"] if same else []
