"""fp32, tf32, bf16 and fp16: time and memory of a step,
data types under autocast, range and rounding."""

import torch

from harness.documents.comparisons import StepTimesRow
from harness.machine.devices import PRECISIONS
from studies.engine.command_line import ByDevice, Flags, workload_of
from studies.engine.report import Report
from studies.engine.study import Study
from studies.engine.sweep import Cell
from studies.precision import number_formats, results
from studies.precision.autocast import AUTOCAST, data_types, dtype_sections
from studies.training.study import measured_rows

KEY = ("size", "seq_len", "batch_size", "precision")


class PrecisionStudy(Study):
    name, row_type, key, results = "precision_study", StepTimesRow, KEY, results

    @staticmethod
    def add_flags(flags: Flags) -> None:
        flags.size(ByDevice("gpt2-small", "tiny"))
        flags.tokens()
        flags.samples()
        flags.precisions("all; one that the device does not support is a row with the reason")
        flags.count("--repetitions", "steps measured (%(default)s)", default=ByDevice(10, 5))
        flags.count(
            "--warmup-steps", "steps before them (%(default)s)", minimum=0, default=ByDevice(5, 1)
        )

    def prepare(self) -> None:
        self.device.check_precisions(self.args.precisions or [], "--precisions")
        self.args.precisions = self.args.precisions or list(PRECISIONS)
        if not self.device.on_gpu:
            self.args.notes.append(
                "No GPU: tf32 is not available, and data types are those of autocast on a CPU"
            )

    def cells(self) -> list[Cell]:
        settings = {
            name: getattr(self.args, name) for name in ("size", "seq_len", "batch_size", "device")
        }
        self.workloads = [
            workload_of(precision=precision, **settings) for precision in self.args.precisions
        ]
        cells = []
        for workload in self.workloads:
            values = (self.args.size, workload.seq_len, workload.batch_size, workload.precision)
            row = dict(zip(KEY, values, strict=True)) | {"warmup_steps": self.args.warmup_steps}
            cells.append(Cell(rows=[row], workload=workload))
        return cells

    def measure(self, cell: Cell) -> list[dict]:
        if why := self.device.unsupported.get(cell.workload.precision):
            return [row | {"status": "skipped", "reason": why} for row in cell.rows]
        return measured_rows(self, cell, self.args.repetitions)

    def report(self) -> Report:
        """With the checks of data types and formats, which take seconds."""
        from studies.training.figure import training_figure

        lacking, workload = self.device.unsupported, self.workloads[0]
        autocast = [name for name in AUTOCAST if name not in lacking]
        checks = self.predict(
            checks_of_formats, autocast, workload.config.hidden_dim, self.device.device
        )
        sections = [
            results.table(self.rows),
            *dtype_sections(checks["dtypes"], lacking, self.device.device),
            number_formats.format_section(),
            number_formats.squares_section(checks["squares"]),
            number_formats.accumulation_section(checks["accumulation"]),
        ]
        precisions, about = (
            [row["precision"] for row in self.measured],
            workload.title_on(self.device.name),
        )
        figure = training_figure(self.measured, precisions, about) if precisions else None
        return Report(
            self.finding(results.finding), sections, figure, {"lacking": lacking, **checks}
        )


def checks_of_formats(
    precisions: list[str], width: int, device: torch.device
) -> dict[str, list[dict]]:
    """The lists `dtypes`, `formats`, `squares` and `accumulation` of the document."""
    return {
        "dtypes": [row for precision in precisions for row in data_types(precision, device)],
        "formats": number_formats.formats(),
        "squares": number_formats.squares(width, device),
        "accumulation": number_formats.accumulation(device),
    }
