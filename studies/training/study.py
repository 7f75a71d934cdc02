"""Time of each phase of a training step by size, length, precision, warm-up and compilation."""

import itertools
from pathlib import Path

from harness.base.errors import UserError
from harness.base.text import flag_of, slug
from harness.documents.comparisons import TrainingBenchmarkRow
from studies.engine.command_line import ByDevice, Flags, precisions_of, workload_of
from studies.engine.report import Report
from studies.engine.study import Study
from studies.engine.sweep import Cell
from studies.training import results
from studies.training.passes import MODES, measure_passes, measured_columns, predicted_pass
from tiny_llama_v1 import SIZES

SNAPSHOT_LENGTHS = [128, 256, 512]


class TrainingBenchmark(Study):
    name, row_type, key, results = "training_benchmark", TrainingBenchmarkRow, results.KEY, results
    not_with_workload = ("sizes", "seq_lens", "batch_size", "memory_snapshot")

    @staticmethod
    def add_flags(flags: Flags) -> None:
        flags.sizes(
            ByDevice(
                [name for name in SIZES if name.startswith("gpt")], ["tiny", "small", "gpt2-small"]
            )
        )
        flags.count("--seq-lens", "tokens per sample (that of the size)", nargs="+")
        flags.samples()
        text = "forward: the forward pass alone, saving no tensors; train: a full step (both)"
        flags.choices("--modes", text, MODES, metavar="MODE", default=[*MODES])
        flags.precisions("fp32; with --workload that of the file")
        text = (
            "each row compiled too, in the mode `default`, with speedup, compile time and"
            " break-even step"
        )
        flags.add("--compile", action="store_true", help=text)
        text = "warm-up steps before the repetitions, a row for each number (%(default)s)"
        flags.count("--warmups", text, minimum=0, nargs="+", default=ByDevice([5], [1]))
        flags.count("--repetitions", "steps measured (%(default)s)", default=ByDevice(10, 5))
        text = "as in tiny_llama_v1.py (PyTorch's choice)"
        flags.add("--optimizer-impl", choices=["foreach", "fused"], help=text)
        text = (
            "peak memory by sequence length (128 256 512): from a GPU's allocator, with its"
            " history, else predicted"
        )
        flags.add("--memory-snapshot", action="store_true", help=text)
        flags.workload()

    def prepare(self) -> None:
        args = self.args
        self.device.check_precisions(args.precisions or [], "--precisions")
        args.precisions = precisions_of(args)
        if args.optimizer_impl and "train" not in args.modes:
            text = "has no effect on a forward pass; add train to --modes, or leave it out"
            raise UserError(f"{flag_of('optimizer_impl', args.optimizer_impl)}: {text}", 2)
        args.warmups = sorted(args.warmups)
        args.seq_lens = args.seq_lens or (SNAPSHOT_LENGTHS if args.memory_snapshot else [None])
        if args.memory_snapshot and not self.device.on_gpu:
            args.notes.append("No GPU: peaks are predicted, and no allocation history is written")

    def cells(self) -> list[Cell]:
        args = self.args
        names = ("batch_size", "device", "optimizer_impl")
        common = {name: getattr(args, name) for name in names}
        sizes = args.sizes
        if args.workload:
            sizes = [None]
            common["workload"] = args.workload
        cells = []
        compiled_too = sorted({False, args.compile})
        shapes = (sizes, args.seq_lens, args.modes, args.precisions, compiled_too)
        for size, seq_len, mode, precision, compiled in itertools.product(*shapes):
            workload = workload_of(
                size=size, seq_len=seq_len, precision=precision, compile=compiled, **common
            )
            name = size or Path(args.workload).name
            values = (
                name,
                workload.seq_len,
                workload.batch_size,
                mode,
                workload.precision,
                compiled,
            )
            rows = [
                dict(zip(results.KEY, (*values, warmup), strict=True)) for warmup in args.warmups
            ]
            cells.append(Cell(rows=rows, workload=workload))
        return cells

    def measure(self, cell: Cell) -> list[dict]:
        snapshots = None
        if self.args.memory_snapshot and self.device.on_gpu:
            snapshots = (
                self.sweep.folder
                / "snapshots"
                / slug(*(cell.rows[0][name] for name in results.KEY[:-1]))
            )
        return measured_rows(self, cell, self.args.repetitions, snapshots)

    def report(self) -> Report:
        from studies.training.figure import training_figure

        warm = results.most_warmed_up(self.measured)
        return Report(
            self.finding(results.finding),
            results.sections(self.rows, self.args.memory_snapshot),
            (
                training_figure(warm, [results.label(row) for row in warm], self.device.name)
                if warm
                else None
            ),
        )


def measured_rows(
    study: Study, cell: Cell, repetitions: int, snapshots: Path | None = None
) -> list[dict]:
    """A row for each number of warm-up steps; also of other studies,
    which time training steps alone."""
    workload, mode = cell.workload, cell.rows[0].get("mode", "train")
    common = study.predict(predicted_pass, workload, mode, study.predicts_gpu)
    common |= {"parameters": workload.parameter_count()}
    steps = repetitions + max(row["warmup_steps"] for row in cell.rows)
    work = (measure_passes, workload, mode, steps, snapshots)
    outcome, answer = study.measure_in_process(
        common["predicted_peak_bytes"], *work, precision=workload.precision
    )
    common |= outcome
    if answer is None:
        return [row | common for row in cell.rows]
    if common["predicted_peak_bytes"] is not None:  # the allocator's peak includes them
        common["predicted_peak_bytes"] += answer["workspace_bytes"]
    flops = workload.step_flops() if mode == "train" else workload.forward_flops()
    return [
        row | common | measured_columns(answer, row["warmup_steps"], repetitions, flops)
        for row in cell.rows
    ]
