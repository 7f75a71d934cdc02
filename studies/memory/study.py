"""Memory by batch size and sequence length: measured and predicted for each pair,
with a fit over all."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import tiny_llama_v1
from harness.base.command_line import OneLineParser
from harness.base.documents import read_document
from harness.base.errors import UserError
from harness.base.text import flag_of
from harness.documents.sweeps import MemoryStudyRow
from harness.instruments.schedule import ProfilerConfig
from studies.engine.columns import predicted_peak
from studies.engine.command_line import Flags
from studies.engine.isolation import run_script
from studies.engine.report import Report
from studies.engine.study import NOT_SETTINGS, Study
from studies.engine.sweep import Cell
from studies.memory import results
from tiny_llama_v1 import TinyLlamaWorkload

TRACKED = "cannot be combined with the memory study, which tracks tensors operator by operator"
NOT_HERE = {  # flags of the script
    ("batch_size", "seq_len"): "is set for each row; use --batch-sizes and --seq-lens",
    ("compile", "cuda_graphs", "system_profiler"): TRACKED,
    ("profile_dir",): "every row has a folder of its own; use --output-dir",
    ("validate_setup",): "is a flag of tiny_llama_v1.py",
}


class MemoryStudy(Study):
    name, row_type, key, results = "memory_study", MemoryStudyRow, results.KEY, results
    predicted_column = "predicted_bytes"
    not_with_workload = ("batch_sizes", "seq_lens")

    @classmethod
    def parser(cls, documentation: str) -> OneLineParser:
        """All flags of the script, as each row is a run of it."""
        parser = tiny_llama_v1.build_parser("run_memory_study.py", documentation.splitlines()[0])
        cls.add_flags(Flags(parser.add_argument_group("sweep")))
        return parser

    @staticmethod
    def add_flags(flags: Flags) -> None:
        flags.count("--batch-sizes", "samples per step (4 8 16)", nargs="+", default=[4, 8, 16])
        flags.count(
            "--seq-lens",
            "tokens per sample (64 128 256 512)",
            nargs="+",
            default=[64, 128, 256, 512],
        )
        flags.resume()

    def prepare(self) -> None:
        for name, why in ((name, why) for names, why in NOT_HERE.items() for name in names):
            if getattr(self.args, name):
                raise UserError(f"argument {flag_of(name)}: {why}", 2)
        self.args.num_steps = self.args.num_steps or 6
        self.workload, self.profiling = tiny_llama_v1.resolve(self.args)
        self.device.check_precisions([self.workload.precision])

    def cells(self) -> list[Cell]:
        if self.args.workload:  # its file decides the batches
            workload = self.workload
            return [
                Cell(
                    rows=[{"batch_size": workload.batch_size, "seq_len": workload.seq_len}],
                    workload=workload,
                )
            ]
        args = self.args
        rows = [
            {"batch_size": size, "seq_len": length}
            for length in args.seq_lens
            for size in args.batch_sizes
        ]
        workloads = [tiny_llama_v1.resolve(Namespace(**vars(args) | row))[0] for row in rows]
        return [
            Cell(rows=[row], workload=workload)
            for row, workload in zip(rows, workloads, strict=True)
        ]

    def settings(self) -> dict:
        """With the resolved settings of the script, but for those that differ between rows."""
        settings = self.workload.settings()
        resolved = settings["model"] | settings["training"]
        differ = ("max_seq_len", *results.KEY, *NOT_SETTINGS)
        return super().settings() | {
            name: value for name, value in resolved.items() if name not in differ
        }

    def measure(self, cell: Cell) -> list[dict]:
        row = cell.rows[0] | self.predict(
            predicted_peak, cell.workload, self.predicts_gpu, "predicted_bytes"
        )
        profiling = replace(self.profiling, profile_memory=True, profile_dir=None)
        work = (tracked_run, cell.workload, profiling, self.sweep.folder)
        outcome, columns = self.measure_in_process(
            row["predicted_bytes"], *work, precision=cell.workload.precision
        )
        return [row | (columns or {}) | outcome]

    def report(self) -> Report:
        from studies.memory.figure import memory_figure

        fitted, factors = results.fit(self.rows), results.growth_factors(self.rows)
        workload = self.workload
        about = (
            f"{workload.parameter_count():,} parameters, {workload.precision}, on"
            f" {self.device.name}"
        )
        return Report(
            self.finding(results.finding, fitted, self.available_bytes),
            [
                results.table(self.rows),
                results.fit_section(fitted, self.rows),
                results.factor_section(factors),
            ],
            memory_figure(self.measured, fitted, about) if self.measured else None,
            {"fit": fitted, "factors": factors},
        )


def tracked_run(workload: TinyLlamaWorkload, profiling: ProfilerConfig, parent: Path) -> dict:
    """In a new process: run the script, and read the columns from its files."""
    folder = parent / f"bs{workload.batch_size}_seq{workload.seq_len}"
    run_script(workload, profiling, folder)
    performance = read_document(folder / "performance_summary.json")["performance"]
    memory = read_document(folder / "memory_timeline.json")
    return {
        "peak_bytes": memory["peak_bytes"],
        "peak_phase": memory["peak"]["phase"],
        "bytes_by_category": memory["peak"]["bytes_by_category"],
        "bytes_per_token": memory["peak_bytes"] / (workload.batch_size * workload.seq_len),
        "step_time_ms": performance["avg_step_time_ms"],
        "samples_per_sec": performance["samples_per_sec"],
        "tokens_per_sec": performance["tokens_per_sec"],
        "folder": folder.name,
    }
