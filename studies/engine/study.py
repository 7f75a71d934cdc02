"""What is a study?  Cells to measure, each in a process or launch of its own, and what their rows
say together."""

import time
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from analysis.prediction.capacity import capacity_elsewhere
from harness.base.command_line import OneLineParser
from harness.base.console import progress_bar, say
from harness.base.errors import UserError
from harness.base.sections import Section, as_text
from harness.base.tables import wrapped
from harness.base.text import time_left
from harness.base.units import megabytes
from studies.engine import isolation, ranks
from studies.engine.columns import disturbance_columns, disturbance_of_ranks, first_reason
from studies.engine.command_line import Flags, parse_sweep, sweep_parser
from studies.engine.device import DeviceProperties
from studies.engine.report import Report, on_screen, predicted_finding
from studies.engine.rows import SweepRow
from studies.engine.sweep import Cell, Sweep, SweepKind

NOT_SETTINGS = ("device", "output_dir", "resume", "notes", "verbose")  # flags that change no row


class SweepStudy(SweepKind, ABC):
    """A sweep: the class `Study` of a study's file says which flags and cells it has, how a cell is
    measured, and what the rows say."""

    predicts = True  # the memory of its rows, so that those that would not fit are skipped
    predicted_column = "predicted_peak_bytes"
    not_with_workload: Sequence[str] = ()  # the flags that --workload takes the place of

    def __init__(self, args: Namespace, device: DeviceProperties):
        """args and device: of parse_sweep()."""
        self.args, self.device = args, device
        self.predicts_gpu = device.on_gpu or bool(args.device_memory)
        self.capacity = (
            capacity_elsewhere(args.device_memory) if args.device_memory else device.capacity
        )
        self.available_bytes = self.capacity.for_tensors()

    # ---- What a study says of itself -------------------------------------------------------------

    @classmethod
    def parser(cls, command: str, description: str) -> OneLineParser:
        """command: `run_study.py NAME`."""
        parser = sweep_parser(command, description, cls.name, cls.predicts)
        cls.add_flags(Flags(parser))
        return parser

    @staticmethod
    @abstractmethod
    def add_flags(flags: Flags) -> None:
        """Those of this study alone."""

    @abstractmethod
    def prepare(self) -> None:
        """Check and complete the flags, and note what a reader must know.  Raises UserError."""

    @abstractmethod
    def cells(self) -> list[Cell]:
        """All measurements.  Raises UserError for flags that do not go together."""

    def settings(self) -> dict:
        """What must be the same to resume the sweep."""
        return {name: value for name, value in vars(self.args).items() if name not in NOT_SETTINGS}

    @abstractmethod
    def measure(self, cell: Cell) -> None:
        """Fill the rows of the cell."""

    @abstractmethod
    def table(self, rows: list[SweepRow]) -> Section:
        """The rows; also of an interrupted sweep."""

    @abstractmethod
    def report(self) -> Report:
        """What all rows say together.  May complete the rows."""

    # ---- The sweep -------------------------------------------------------------------------------

    @classmethod
    def command(cls, command: str, description: str) -> None:
        """See parser().  Raises UserError if a flag is wrong, or if a row failed."""
        parser = cls.parser(command, description)
        cls(*parse_sweep(parser, cls.not_with_workload)).run()

    def run(self) -> None:
        self.prepare()
        cells, args = self.cells(), self.args
        folder = Path(args.resume or args.output_dir or f"./{self.name}")
        environment = self.device.environment
        self.sweep = Sweep(
            self, folder, self.settings(), environment, args.notes + environment["warnings"]
        )
        if args.resume:
            self.sweep.resume()
        else:
            self.sweep.create()
        say(*wrapped(self.sweep.notes))
        try:
            self._measure_all([cell for cell in cells if self.sweep.is_open(cell)])
        except BaseException:
            if self.rows:
                say(*as_text(on_screen(self.table(self.rows)), 0, fold=True, notes=False))
            raise
        self._finish()

    @property
    def rows(self) -> list:
        return self.sweep.rows

    @property
    def measured(self) -> list:
        return [row for row in self.rows if row.is_measured]

    def finding(self, of_measured: Callable[..., list[str]], *more) -> list[str]:
        """of_measured(rows, *more) of the rows that were measured; without any, which peaks are
        predicted to fit."""
        if self.measured:
            return of_measured(self.measured, *more)
        return predicted_finding(self.rows, self.predicted_column, self.available_bytes)

    def _measure_all(self, todo: list[Cell]) -> None:
        started, measured = time.monotonic(), 0.0
        with progress_bar(self.name.replace("_", " "), total=len(todo)) as self.bar:
            for number, cell in enumerate(todo, 1):
                if not self.sweep.is_open(cell):  # an earlier round of it failed
                    continue
                self.bar.set_postfix_str(cell.rows[0].label())
                self.measure(cell)
                if any(row.status != "skipped" for row in cell.rows):
                    measured += cell.work
                self.sweep.keep(cell.rows)
                self.sweep.write()
                self.bar.update()
                work_left = sum(later.work for later in todo[number:]) / (measured or cell.work)
                left = time_left((time.monotonic() - started) * work_left)
                progress = _progress(cell.rows[-1], left)
                self.while_waiting(f"{number} of {len(todo)}: {progress}")

    def while_waiting(self, told: str = "") -> None:
        """Keep the progress bar alive, above which is printed what is told."""
        if told:
            with self.bar.external_write_mode():
                say(*wrapped([told]))
        self.bar.refresh()

    def _finish(self) -> None:
        report = self.report()
        self.sweep.write(device_memory_bytes=self.available_bytes, **report.document)
        report.write(self.sweep)
        report.show(self.sweep, self.args.verbose)
        failed = sum(row.status == "failed" for row in self.rows)
        if failed:
            raise UserError(
                f"{failed} of {len(self.rows)} rows failed; see {self.sweep.folder / self.name}.md"
            )

    # ---- One measurement -------------------------------------------------------------------------

    def predict(self, work: Callable, *arguments):
        """What work(*arguments) predicts of a row.  Even on fake tensors, the compiler creates a
        GPU context."""
        return isolation.run_in_subprocess_if_gpu(self.device.on_gpu, work, *arguments)

    def skips(self, rows: list, peak: int | None, precision: str | None) -> bool:
        """Whether the rows are not measured, which they then say.

        peak: of their tensors, predicted, in bytes.  Rows that would not fit in their precision by
        the rule of a dry run are skipped, and so are all rows of a dry run.
        """
        available = self.capacity.for_tensors(precision)
        if peak is not None and peak > available and not self.args.force:
            need = f"{megabytes(peak)} predicted, {megabytes(available)} available"
            reason = f"would not fit: {need}; --force runs it"
        elif self.args.dry_run:
            reason = "--dry-run predicts only"
        else:
            return False
        fill(rows, status="skipped", reason=reason)
        return True

    def measure_in_process(
        self, rows: list, peak: int | None, work: Callable, *arguments, precision: str | None = None
    ):
        """What work(*arguments) returns in a new process; None if it was not called, or failed.

        The rows have status and reason after it, and whether they were disturbed; see skips().
        """
        if self.skips(rows, peak, precision):
            return None
        disturbance: dict = {}
        status, answer = isolation.in_fresh_process(
            work,
            *arguments,
            while_waiting=self.while_waiting,
            device=self.device.device,
            disturbance=disturbance,
        )
        if status == "ok":
            fill(rows, status=status, reason="", **disturbance_columns(disturbance))
            return answer
        need = f"; {megabytes(peak)} predicted" if status == "oom" and peak is not None else ""
        fill(rows, status=status, reason=f"{answer}{need}")
        return None

    def measure_on_ranks(
        self,
        rows: list,
        peak: int | None,
        world_size: int,
        work: Callable,
        *arguments,
        precision: str | None = None,
    ) -> list[dict] | None:
        """The same of work(RankContext, *arguments) on new ranks; the result has the answer of
        each.

        peak: of one rank; a CPU's memory has those of all.  An answer has `disturbance`,
        of DisturbanceMeter.
        """
        peak_of_device = peak
        if peak is not None and not self.predicts_gpu:
            peak_of_device = peak * world_size
        if self.skips(rows, peak_of_device, precision):
            return None
        device = self.device.device.type
        status, answers = ranks.on_ranks(
            world_size, device, work, *arguments, while_waiting=self.while_waiting
        )
        if status != "ok":
            fill(rows, status=status, reason=answers)
            return None
        disturbance = disturbance_of_ranks([answer["disturbance"] for answer in answers])
        fill(rows, status=status, reason="", **disturbance)
        return answers


def fill(rows: list[SweepRow], **columns) -> None:
    """The same columns in all of the rows."""
    for row in rows:
        row.set(**columns)


def _progress(row: SweepRow, left: str) -> str:
    outcome = row.result() if row.is_measured else f"{row.status}, {row.reason}"
    why = f"; disturbed: {first_reason(row)}" if row.disturbed else ""
    return f"{row.label()}: {outcome}{left}{why}"
