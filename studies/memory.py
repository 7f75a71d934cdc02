"""Peak memory by batch size and sequence length: measured, predicted and fitted."""

from __future__ import annotations

import itertools
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import NotRequired

import tiny_llama_v1
from analysis.memory.tables import parts_of_peak
from harness.base.command_line import OneLineParser
from harness.base.documents import read_document
from harness.base.errors import UserError
from harness.base.sections import Section
from harness.base.tables import Column, column
from harness.base.text import batch_text, flag_of
from harness.base.units import KB, MB, megabytes
from harness.instruments.schedule import ProfilerConfig
from harness.schema import Document, field
from studies.engine.columns import factor_column, optional, predicted_peak, status_column
from studies.engine.command_line import Flags
from studies.engine.isolation import run_script
from studies.engine.report import Report
from studies.engine.rows import NO_FAKE_RUN, NOT_MEASURED, SweepDocument, SweepRow
from studies.engine.study import NOT_SETTINGS, SweepStudy
from studies.engine.sweep import Cell
from tiny_llama_v1 import TinyLlamaWorkload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TERMS = ("constant", "linear", "quadratic")  # of the fit
NO_FIT = (
    "a fit needs three runs, at two sequence lengths or more, whose peak is not in the optimizer"
    " step"
)
TRACKED = "cannot be combined with the memory study, which tracks tensors operator by operator"
NOT_HERE = {  # flags of tiny_llama_v1.py
    ("batch_size", "seq_len"): "is set for each row; use --batch-sizes and --seq-lens",
    ("compile", "cuda_graphs", "system_profiler"): TRACKED,
    ("profile_dir",): "every row has a folder of its own; use --output-dir",
    ("validate_setup",): "is a flag of tiny_llama_v1.py",
}


# ---- The document --------------------------------------------------------------------------------


class MemoryStudyRow(SweepRow):
    key = ("batch_size", "seq_len")

    batch_size: int = field("samples")
    seq_len: int = field("tokens")
    predicted_bytes: int | None = field("peak", null=NO_FAKE_RUN)
    peak_bytes: int | None = field("of live tensors", null=NOT_MEASURED)
    peak_phase: str | None = field("in which it is", null=NOT_MEASURED)
    bytes_by_category: dict[str, int] | None = field("at the peak", null=NOT_MEASURED)
    bytes_per_token: float | None = field("of the peak", null=NOT_MEASURED)
    step_time_ms: float | None = field("mean, tracking included in one step", null=NOT_MEASURED)
    samples_per_sec: float | None = field("at the mean", null=NOT_MEASURED)
    tokens_per_sec: float | None = field("at the mean", null=NOT_MEASURED)
    folder: str | None = field("of the run, in the folder of the sweep", null=NOT_MEASURED)

    def label(self) -> str:
        return batch_text(self.batch_size, self.seq_len)

    def result(self) -> str:
        return megabytes(self.peak_bytes)

    @property
    def error(self) -> float | None:
        """Of the prediction, relative."""
        if not self.peak_bytes or not self.predicted_bytes:
            return None
        return self.predicted_bytes / self.peak_bytes - 1

    @property
    def peaks_in_optimizer(self) -> bool:
        return self.is_measured and self.peak_phase == "optimizer"


class MemoryFit(Document):
    """peak = constant + B (linear S + quadratic S^2)"""

    constant_bytes: float | None = field("whatever batch and sequence", null=NO_FIT)
    linear_bytes: float | None = field("per token", null=NO_FIT)
    quadratic_bytes: float | None = field(
        "per sample and squared length of the sequence", null=NO_FIT
    )
    largest_error_percent: float | None = field("of a row", null=NO_FIT)
    rows: int | None = field("that it was fitted to", null=NO_FIT)

    def shares(self, batch_size: int, seq_len: int) -> dict[str, float]:
        """Share of each term in the fitted peak; {} without a fit."""
        if self.rows is None:
            return {}
        parts = {
            "constant": self.constant_bytes,
            "linear": self.linear_bytes * batch_size * seq_len,
            "quadratic": self.quadratic_bytes * batch_size * seq_len**2,
        }
        total = sum(parts.values())
        return {term: part / total for term, part in parts.items()}


class GrowthFactor(Document):
    grows: str = field("batch or sequence")
    from_: dict[str, int] = field("batch_size and seq_len of the smaller")
    to: dict[str, int] = field("the same of the larger")
    memory_factor: float | None = field("of the peaks", null="one of the two was not measured")
    throughput_factor: float | None = field(
        "of tokens per second", null="one of the two was not measured"
    )


class MemoryStudy(SweepDocument):
    rows: list[MemoryStudyRow] = field("by batch size and sequence length")
    fit: NotRequired[MemoryFit] = field("of the peaks")
    factors: NotRequired[list[GrowthFactor]] = field("from one batch size or sequence to the next")


# ---- The study -----------------------------------------------------------------------------------


class Study(SweepStudy):
    name, row_type, document_type = "memory_study", MemoryStudyRow, MemoryStudy
    predicted_column = "predicted_bytes"
    not_with_workload = ("batch_sizes", "seq_lens")

    @classmethod
    def parser(cls, command: str, description: str) -> OneLineParser:
        """All flags of the script, as each row is a run of it."""
        parser = tiny_llama_v1.build_parser(command, description)
        cls.add_flags(Flags(parser.add_argument_group("sweep")))
        return parser

    @staticmethod
    def add_flags(flags: Flags) -> None:
        batch_sizes, seq_lens = [4, 8, 16], [64, 128, 256, 512]
        text = "samples per step (4 8 16)"
        flags.count("--batch-sizes", text, nargs="+", default=batch_sizes)
        text = "tokens per sample (64 128 256 512)"
        flags.count("--seq-lens", text, nargs="+", default=seq_lens)
        flags.resume()

    def prepare(self) -> None:
        for names, why in NOT_HERE.items():
            for name in names:
                if getattr(self.args, name):
                    raise UserError(f"argument {flag_of(name)}: {why}", 2)
        self.args.num_steps = self.args.num_steps or 6
        self.workload, self.profiling = tiny_llama_v1.resolve(self.args)
        self.device.check_precisions([self.workload.precision])

    def cells(self) -> list[Cell]:
        if self.args.workload:  # its file decides the batches
            return [cell_of(self.workload)]
        cells = []
        for seq_len in self.args.seq_lens:
            for batch_size in self.args.batch_sizes:
                args = Namespace(**vars(self.args))
                args.batch_size, args.seq_len = batch_size, seq_len
                cells.append(cell_of(tiny_llama_v1.resolve(args)[0]))
        return cells

    def settings(self) -> dict:
        """With the resolved settings of the script, but for those that differ between rows."""
        settings = super().settings()
        differ = ("max_seq_len", *MemoryStudyRow.key, *NOT_SETTINGS)
        resolved = self.workload.settings()
        for part in ("model", "training"):
            for name, value in resolved[part].items():
                if name not in differ:
                    settings[name] = value
        return settings

    def measure(self, cell: Cell) -> None:
        (row,) = cell.rows
        workload = cell.workload
        row.predicted_bytes = self.predict(predicted_peak, workload, self.predicts_gpu)
        profiling = replace(self.profiling, profile_memory=True, profile_dir=None)
        columns = self.measure_in_process(
            cell.rows,
            row.predicted_bytes,
            tracked_run,
            workload,
            profiling,
            self.sweep.folder,
            precision=workload.precision,
        )
        if columns is not None:
            row.set(**columns)

    def table(self, rows: list[MemoryStudyRow]) -> Section:
        return table(rows, fit_of(rows))

    def report(self) -> Report:
        fit, factors = fit_of(self.rows), growth_factors(self.rows)
        workload, chart = self.workload, None
        if self.measured:
            parameters = f"{workload.parameter_count():,} parameters"
            about = f"{parameters}, {workload.precision}, on {self.device.name}"
            chart = figure(self.measured, fit, about)
        return Report(
            self.finding(finding, fit, self.available_bytes),
            [table(self.rows, fit), fit_section(fit, self.rows), factor_section(factors)],
            chart,
            {"fit": fit, "factors": factors},
        )


def cell_of(workload: TinyLlamaWorkload) -> Cell:
    row = MemoryStudyRow(batch_size=workload.batch_size, seq_len=workload.seq_len)
    return Cell(rows=[row], workload=workload)


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


# ---- What the rows say together ------------------------------------------------------------------


def fit_of(rows: list[MemoryStudyRow]) -> MemoryFit:
    """Fit peak = constant + B (linear S + quadratic S^2) by least squares of relative errors.

    Runs whose peak is in the optimizer step are excluded: it does not grow with batch or sequence.
    """
    used = [row for row in rows if row.is_measured and not row.peaks_in_optimizer]
    shapes = {(row.batch_size * row.seq_len, row.seq_len) for row in used}
    if len({seq_len for _, seq_len in shapes}) < 2 or len(shapes) < 3:
        return MemoryFit(
            constant_bytes=None,
            linear_bytes=None,
            quadratic_bytes=None,
            largest_error_percent=None,
            rows=None,
        )
    batch = np.array([row.batch_size for row in used], float)
    seq_len = np.array([row.seq_len for row in used], float)
    peak = np.array([row.peak_bytes for row in used], float)
    factors = np.stack([np.ones_like(batch), batch * seq_len, batch * seq_len**2], axis=1)
    # factors: [rows, terms]
    terms = np.linalg.lstsq(factors / peak[:, None], np.ones_like(peak), rcond=None)[0]
    errors = factors @ terms / peak - 1
    return MemoryFit(
        constant_bytes=float(terms[0]),
        linear_bytes=float(terms[1]),
        quadratic_bytes=float(terms[2]),
        largest_error_percent=float(100 * np.abs(errors).max()),
        rows=len(used),
    )


def growth_factors(rows: list[MemoryStudyRow]) -> list[GrowthFactor]:
    """Memory and throughput relative to the next smaller batch size or sequence length."""
    measured = {row.identity: row for row in rows if row.is_measured}
    batch_sizes = sorted({row.batch_size for row in rows})
    seq_lens = sorted({row.seq_len for row in rows})
    factors = []
    for seq_len in seq_lens:
        for smaller, larger in itertools.pairwise(batch_sizes):
            pair = ((smaller, seq_len), (larger, seq_len))
            factors.append(growth_factor("batch", *pair, measured))
    for batch_size in batch_sizes:
        for smaller, larger in itertools.pairwise(seq_lens):
            pair = ((batch_size, smaller), (batch_size, larger))
            factors.append(growth_factor("sequence", *pair, measured))
    return factors


def growth_factor(
    grows: str, small: tuple[int, int], large: tuple[int, int], measured: dict
) -> GrowthFactor:
    """From one pair of batch size and sequence length to another; measured: rows by such a pair."""
    memory = throughput = None
    if small in measured and large in measured:
        first, second = measured[small], measured[large]
        memory = second.peak_bytes / first.peak_bytes
        throughput = second.tokens_per_sec / first.tokens_per_sec
    shapes = {
        "from": {"batch_size": small[0], "seq_len": small[1]},
        "to": {"batch_size": large[0], "seq_len": large[1]},
    }
    return GrowthFactor(grows=grows, memory_factor=memory, throughput_factor=throughput, **shapes)


def finding(measured: list[MemoryStudyRow], fit: MemoryFit, available_bytes: int) -> list[str]:
    """The largest measured peak with what it is made of, and by the fit the batch that would fill
    the memory."""
    most = max(measured, key=lambda row: row.peak_bytes)
    least = min(measured, key=lambda row: row.peak_bytes)
    parts = parts_of_peak(most.bytes_by_category)
    if len(measured) == 1:
        return [f"The peak is {most.result()}, {most.label()}: {parts}."]
    smallest = f"the smallest is {least.result()}, {least.label()}"
    first = f"The largest peak is {most.result()}, {most.label()}: {parts}; {smallest}."
    if fit.rows is None:
        return [first, f"No fit: {fit.reason_of('rows')}."]
    seq_len = most.seq_len
    bytes_per_sample = fit.linear_bytes * seq_len + fit.quadratic_bytes * seq_len**2
    batch_size = max(0, int((available_bytes - fit.constant_bytes) / bytes_per_sample))
    shares = fit.shares(most.batch_size, seq_len)
    quadratic, constant = max(0.0, shares["quadratic"]), max(0.0, shares["constant"])
    second = (
        f"In the fit {quadratic:.0%} of it is quadratic in the sequence length and"
        f" {constant:.0%} constant; estimated from the fit, the {megabytes(available_bytes)}"
        f" available are filled by a batch of {batch_size:,} x {seq_len} tokens."
    )
    return [first, second]


# ---- Tables and figure ---------------------------------------------------------------------------


def table(rows: list[MemoryStudyRow], fit: MemoryFit) -> Section:
    def share_column(term: str) -> Column:
        def share(row: MemoryStudyRow) -> float | None:
            return fit.shares(row.batch_size, row.seq_len).get(term)

        return Column(term, share, ".1%")

    unit = "token" if any(row.seq_len > 1 for row in rows) else "sample"
    columns = (
        column("batch", "batch_size"),
        column("sequence", "seq_len"),
        column("measured (MB)", "peak_bytes", ",.1f", MB),
        column("predicted (MB)", "predicted_bytes", ",.1f", MB),
        column("error", "error", "+.2%"),
        column(f"KB/{unit}", "bytes_per_token", ",.1f", KB),
        column(f"{unit}s/s", "tokens_per_sec", ",.0f"),
        *optional(*map(share_column, TERMS)),
        status_column(),
    )
    title = "Peak memory of a step (live tensors), with the share of each term of the fit"
    return Section(title, columns, rows)


def fit_section(fit: MemoryFit, rows: list[MemoryStudyRow]) -> Section:
    if fit.rows is None:
        return Section("Fit", note=[f"No fit: {fit.reason_of('rows')}"])
    constant_mb, linear_kb = fit.constant_bytes / MB, fit.linear_bytes / KB
    left_out = ", ".join(row.label() for row in rows if row.peaks_in_optimizer)
    why = ""
    if left_out:
        why = f"; not in the fit, because the peak is in the optimizer step: {left_out}"
    text = [
        (
            f"peak = {constant_mb:,.2f} MB + B S x {linear_kb:,.3f} KB + B S^2 x"
            f" {fit.quadratic_bytes:,.2f} bytes"
        ),
        f"Largest error over {fit.rows} runs: {fit.largest_error_percent:.2f}%{why}",
    ]
    return Section("Fit: batch B, sequence S", note=text)


def factor_section(factors: list[GrowthFactor]) -> Section:
    def shape_text(shape: dict[str, int]) -> str:
        return f"{shape['batch_size']} x {shape['seq_len']}"

    columns = (
        Column("from", lambda factor: shape_text(factor.from_), left=True),
        Column("to", lambda factor: shape_text(factor.to), left=True),
        factor_column("memory", "memory_factor"),
        factor_column("throughput", "throughput_factor"),
    )
    return Section("Growth from one batch size or sequence length to the next", columns, factors)


def figure(rows: list[MemoryStudyRow], fit: MemoryFit, about: str) -> Figure:
    """Measured peaks and fit over sequence length, a line for each batch size, and the peaks by
    category."""
    from analysis.report.figures.axes import legend, stacked_bars
    from analysis.report.palette import MEMORY_COLORS
    from studies.engine.drawing import new_panels

    height = max(4.6, 2 + 0.25 * len(rows))
    title = "Peak memory by batch size and sequence length"
    chart, (left, right) = new_panels(height, title, about, 2)
    for number, batch_size in enumerate(sorted({row.batch_size for row in rows})):
        draw_batch_size(left, rows, batch_size, number, fit)
    left.set(xlabel="sequence length (tokens)", ylabel="peak of live tensors (MB)", ylim=(0, None))
    legend(left, "Measured (markers) and fit (lines)")
    parts = {}
    for category in MEMORY_COLORS:
        if category in rows[0].bytes_by_category:
            parts[category] = [row.bytes_by_category[category] / MB for row in rows]
    names = [f"{row.batch_size} x {row.seq_len}" for row in rows]
    stacked_bars(right, names, parts, MEMORY_COLORS)
    right.set(xlabel="live tensors at the peak (MB)", ylabel="batch x sequence length")
    legend(right, "By category", ncols=3)
    return chart


def draw_batch_size(
    axes, rows: list[MemoryStudyRow], batch_size: int, number: int, fit: MemoryFit
) -> None:
    """The peaks of a batch size over sequence length, measured and fitted; number: of its color."""
    from analysis.report.palette import series

    color, marker, dashes = series(number)
    drawn = [row for row in rows if row.batch_size == batch_size]
    seq_len = np.array([row.seq_len for row in drawn], float)
    peaks_mb = [row.peak_bytes / MB for row in drawn]
    axes.plot(seq_len, peaks_mb, marker, color=color, label=f"batch {batch_size}")
    if fit.rows is None:
        return
    dense = np.linspace(seq_len.min(), seq_len.max(), 100)
    growing = fit.linear_bytes * dense + fit.quadratic_bytes * dense**2
    fitted_mb = (fit.constant_bytes + batch_size * growing) / MB
    axes.plot(dense, fitted_mb, color=color, linewidth=1, linestyle=dashes)
