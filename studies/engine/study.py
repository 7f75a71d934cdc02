"""What is a study?  Cells to measure, each in a process or launch of its own, and what their rows
say together."""

import time
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

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
from studies.engine.sweep import Cell, Sweep, SweepKind

NOT_SETTINGS = ("device", "output_dir", "resume", "notes", "verbose")  # flags that change no row


class Study(SweepKind, ABC):
    """A sweep: a subclass says which flags and cells it has, how a cell is measured, and what the
    rows say."""

    # label(row): what a row is, and result(row): what was measured, for its line of output;
    # table(rows)
    results: ModuleType
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
    def parser(cls, documentation: str) -> OneLineParser:
        """The parser of run_<name>.py, whose documentation this is."""
        parser = sweep_parser(cls.name, documentation, cls.predicts)
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
    def measure(self, cell: Cell) -> list[dict]:
        """The rows of a cell."""

    def table(self, rows: list[dict]) -> Section:
        """The rows; also of an interrupted sweep."""
        return self.results.table(rows)

    @abstractmethod
    def report(self) -> Report:
        """What all rows say together.  May complete the rows."""

    # ---- The sweep -------------------------------------------------------------------------------

    @classmethod
    def command(cls, documentation: str) -> None:
        """run_<name>.py, whose documentation this is.  Raises UserError if a flag is wrong, or if a
        row failed."""
        cls(*parse_sweep(cls.parser(documentation), cls.not_with_workload)).run()

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
    def rows(self) -> list[dict]:
        return self.sweep.rows

    @property
    def measured(self) -> list[dict]:
        return [row for row in self.rows if row["status"] == "ok"]

    def finding(
        self, of_measured: Callable[..., list[str]], *more, label: Callable | None = None
    ) -> list[str]:
        """of_measured(rows, *more) of the rows that were measured; without any, which peaks are
        predicted to fit."""
        if self.measured:
            return of_measured(self.measured, *more)
        return predicted_finding(
            self.rows, self.predicted_column, label or self.results.label, self.available_bytes
        )

    def _measure_all(self, todo: list[Cell]) -> None:
        started, measured = time.monotonic(), 0.0
        with progress_bar(self.name.replace("_", " "), total=len(todo)) as self.bar:
            for i, cell in enumerate(todo, 1):
                if not self.sweep.is_open(cell):  # an earlier round of it failed
                    continue
                self.bar.set_postfix_str(self.results.label(cell.rows[0]))
                rows = self.measure(cell)
                measured += cell.work * any(row["status"] != "skipped" for row in rows)
                self.sweep.keep(rows)
                self.sweep.write()
                self.bar.update()
                left = sum(one.work for one in todo[i:]) / (measured or cell.work)
                left = time_left((time.monotonic() - started) * left)
                self.while_waiting(f"{i} of {len(todo)}: {self._progress(rows[-1], left)}")

    def _progress(self, row: dict, left: str) -> str:
        outcome = (
            self.results.result(row)
            if row["status"] == "ok"
            else f"{row['status']}, {row['reason']}"
        )
        why = f"; disturbed: {first_reason(row)}" if row.get("disturbed") else ""
        return f"{self.results.label(row)}: {outcome}{left}{why}"

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
        failed = sum(row["status"] == "failed" for row in self.rows)
        if failed:
            raise UserError(
                f"{failed} of {len(self.rows)} rows failed; see {self.sweep.folder / self.name}.md"
            )

    # ---- One measurement -------------------------------------------------------------------------

    def predict(self, work: Callable, *arguments):
        """What work(*arguments) predicts of a row.  Even on fake tensors, the compiler creates a
        GPU context."""
        return isolation.run_in_subprocess_if_gpu(self.device.on_gpu, work, *arguments)

    def skipped(self, peak: int | None, precision: str | None) -> dict | None:
        """Status and reason of a row that is not measured; None if it is.

        peak: of its tensors, predicted, in bytes.  A row that would not fit in its precision by the
        rule of a dry run is skipped, and so is every row of a dry run.
        """
        available = self.capacity.for_tensors(precision)
        if peak is not None and peak > available and not self.args.force:
            need = f"{megabytes(peak)} predicted, {megabytes(available)} available"
            return {"status": "skipped", "reason": f"would not fit: {need}; --force runs it"}
        return (
            {"status": "skipped", "reason": "--dry-run predicts only"}
            if self.args.dry_run
            else None
        )

    def measure_in_process(
        self, peak: int | None, work: Callable, *arguments, precision: str | None = None
    ) -> tuple[dict, object]:
        """Call work(*arguments) in a new process, unless skipped(peak, precision).

        Returns status and reason of the row, whether it was disturbed,
        and the result, None without one.
        """
        if skipped := self.skipped(peak, precision):
            return skipped, None
        disturbance: dict = {}
        options = {
            "while_waiting": self.while_waiting,
            "device": self.device.device,
            "disturbance": disturbance,
        }
        status, answer = isolation.in_fresh_process(work, *arguments, **options)
        if status == "ok":
            return {"status": status, "reason": ""} | disturbance_columns(disturbance), answer
        need = f"; {megabytes(peak)} predicted" if status == "oom" and peak is not None else ""
        return {"status": status, "reason": f"{answer}{need}"}, None

    def measure_on_ranks(
        self,
        peak: int | None,
        world_size: int,
        work: Callable,
        *arguments,
        precision: str | None = None,
    ) -> tuple[dict, list[dict] | None]:
        """The same of work(RankContext, *arguments) on new ranks; the result has the answer of
        each.

        peak: of one rank; a CPU's memory has those of all.  An answer has `disturbance`,
        of DisturbanceMeter.
        """
        peak_of_device = peak if peak is None or self.predicts_gpu else peak * world_size
        if skipped := self.skipped(peak_of_device, precision):
            return skipped, None
        device = self.device.device.type
        status, answers = ranks.on_ranks(
            world_size, device, work, *arguments, while_waiting=self.while_waiting
        )
        if status != "ok":
            return {"status": status, "reason": answers}, None
        disturbance = disturbance_of_ranks([answer["disturbance"] for answer in answers])
        return {"status": status, "reason": ""} | disturbance, answers
