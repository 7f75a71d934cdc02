"""Time of forward, backward, optimizer and step, by size, length and precision."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from typing_extensions import NotRequired

from analysis.compare.noise import as_fast, is_decided
from analysis.work.fake_step import FakeRunError, fake_forward
from harness.base.errors import UserError
from harness.base.files import make_folder
from harness.base.sections import Section
from harness.base.tables import Column, column, grouped, text_columns, value_of
from harness.base.text import count_of, flag_of, slug
from harness.base.units import MB, megabytes
from harness.instruments.memory_tracker import MemoryTracker
from harness.instruments.phases import break_even_step
from harness.instruments.recorder import Instruments
from harness.instruments.schedule import InstrumentSchedule, ProfilerConfig
from harness.instruments.timing import NullMeter, StepRecord
from harness.machine.devices import choose_device
from harness.machine.workspaces import workspace_bytes
from harness.model.workload import TrainingState
from harness.schema import Unknown, field
from harness.session.session import Preparation, Session
from studies.engine.columns import (
    compared,
    mean_std_column,
    optional,
    predicted_peak,
    status_column,
    time_statistics,
    yes_no_column,
)
from studies.engine.command_line import ByDevice, Flags, precisions_of, workload_of
from studies.engine.isolation import cold_compiler
from studies.engine.report import Report
from studies.engine.rows import (
    FORWARD_ALONE,
    NO_ALLOCATOR,
    NO_FAKE_RUN,
    NOT_MEASURED,
    PassTimesRow,
    StepRow,
    SweepDocument,
)
from studies.engine.study import SweepStudy, fill
from studies.engine.sweep import Cell
from tiny_llama_v1 import SIZES, TinyLlamaWorkload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODES = ("forward", "train")
PASSES = ("forward", "backward", "optimizer")  # the phases of a step that compute
SNAPSHOT_LENGTHS = [128, 256, 512]


# ---- The document --------------------------------------------------------------------------------


class StepTimesRow(StepRow, PassTimesRow):
    """A training step of which each phase was timed."""

    key = ("size", "seq_len", "batch_size", "precision")

    parameters: NotRequired[int] = field("absent where the device lacks the precision")
    warmup_steps: int = field("excluded before the repetitions")
    optimizer_ms: float | None = field("median", null=FORWARD_ALONE)
    optimizer_mean_ms: float | None = field("mean", null=FORWARD_ALONE)
    optimizer_std_ms: float | None = field("sample standard deviation", null=FORWARD_ALONE)
    peak_bytes: int | None = field("of the allocator, with workspace_bytes", null=NO_ALLOCATOR)
    predicted_peak_bytes: int | None = field(
        "with workspace_bytes where measured", null=NO_FAKE_RUN
    )
    first_loss: float | None = field("of the first step", null=NOT_MEASURED)
    final_loss: float | None = field("of the last step", null=NOT_MEASURED)

    def label(self) -> str:
        return f"{self.size} {self.precision}"

    def result(self) -> str:
        return f"{self.step_ms:.2f} ms"


class TrainingBenchmarkRow(StepTimesRow):
    key = ("size", "seq_len", "batch_size", "mode", "precision", "compiled", "warmup_steps")

    mode: str = field("forward, train")
    compiled: bool = field("whether by --compile")

    def label(self) -> str:
        shape = f"{self.size} {self.batch_size} x {self.seq_len}"
        compiled = " compiled" if self.compiled else ""
        return f"{shape} {self.mode} {self.precision}{compiled}"


class TrainingBenchmark(SweepDocument):
    rows: list[TrainingBenchmarkRow] = field("by size, sequence, mode and what is compiled")


# ---- The study -----------------------------------------------------------------------------------


class Study(SweepStudy):
    name, row_type, document_type = "training_benchmark", TrainingBenchmarkRow, TrainingBenchmark
    not_with_workload = ("sizes", "seq_lens", "batch_size", "memory_snapshot")

    @staticmethod
    def add_flags(flags: Flags) -> None:
        on_gpu = [name for name in SIZES if name.startswith("gpt")]
        flags.sizes(ByDevice(on_gpu, ["tiny", "small", "gpt2-small"]))
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
        sizes = [None] if args.workload else args.sizes
        compiled_too = [False, True] if args.compile else [False]
        shapes = itertools.product(sizes, args.seq_lens, args.modes, args.precisions, compiled_too)
        cells = []
        for size, seq_len, mode, precision, compiled in shapes:
            workload = workload_of(
                size=size,
                seq_len=seq_len,
                precision=precision,
                compile=compiled,
                batch_size=args.batch_size,
                device=args.device,
                optimizer_impl=args.optimizer_impl,
                workload=args.workload,
            )
            name = size or Path(args.workload).name
            cells.append(Cell(rows=self.rows_of(workload, name, mode), workload=workload))
        return cells

    def rows_of(
        self, workload: TinyLlamaWorkload, size: str, mode: str
    ) -> list[TrainingBenchmarkRow]:
        """One for each number of warm-up steps, which are left out of the same measurement."""
        rows = []
        for warmup_steps in self.args.warmups:
            row = TrainingBenchmarkRow(
                size=size,
                seq_len=workload.seq_len,
                batch_size=workload.batch_size,
                mode=mode,
                precision=workload.precision,
                compiled=workload.compiled,
                warmup_steps=warmup_steps,
            )
            rows.append(row)
        return rows

    def measure(self, cell: Cell) -> None:
        row = cell.rows[0]
        snapshots = None
        if self.args.memory_snapshot and self.device.on_gpu:
            without_warmup = row.identity[:-1]
            snapshots = self.sweep.folder / "snapshots" / slug(*without_warmup)
        measure_steps(self, cell, row.mode, self.args.repetitions, snapshots)

    def table(self, rows: list[TrainingBenchmarkRow]) -> Section:
        return table(rows)

    def report(self) -> Report:
        warm = most_warmed_up(self.measured)
        chart = None
        if warm:
            chart = figure(warm, [row.label() for row in warm], self.device.name)
        return Report(self.finding(finding), sections(self.rows, self.args.memory_snapshot), chart)


# ---- One measurement; also of other studies, which time training steps alone ---------------------


class PassTimes(NamedTuple):
    """What a process measured in every step, from the first one."""

    phases_ms: list[dict[str, float]]
    step_ms: list[float]
    losses: list[float]
    compile_s: float | None
    peak_bytes: int | None  # None without a GPU
    workspace_bytes: int


def measure_steps(
    study: SweepStudy, cell: Cell, mode: str, repetitions: int, snapshots: Path | None = None
) -> None:
    """Fill the rows of the cell, which differ in the number of warm-up steps.

    mode: one of MODES; snapshots: see measure_passes().
    """
    workload = cell.workload
    predicted = study.predict(predicted_pass, workload, mode, study.predicts_gpu)
    fill(cell.rows, predicted_peak_bytes=predicted, parameters=workload.parameter_count())
    warmup_steps = max(row.warmup_steps for row in cell.rows)
    times = study.measure_in_process(
        cell.rows,
        cell.rows[0].predicted_peak_bytes,
        measure_passes,
        workload,
        mode,
        warmup_steps + repetitions,
        snapshots,
        precision=workload.precision,
    )
    if times is None:
        return
    flops = workload.step_flops() if mode == "train" else workload.forward_flops()
    for row in cell.rows:
        if row.predicted_peak_bytes is not None:  # the allocator's peak includes them
            row.predicted_peak_bytes += times.workspace_bytes
        row.set(**columns_of(times, row.warmup_steps, repetitions, flops))


def columns_of(times: PassTimes, warmup_steps: int, repetitions: int, flops: int | None) -> dict:
    """The columns of a row: what was measured without the warm-up steps.  flops: of a step, None if
    they are not known."""
    counted = slice(warmup_steps, warmup_steps + repetitions)
    columns = {
        "compile_s": times.compile_s,
        "peak_bytes": times.peak_bytes,
        "workspace_bytes": times.workspace_bytes,
        "repetitions": repetitions,
        "first_loss": times.losses[0],
        "final_loss": times.losses[-1],
        "achieved_tflops": None,
    }
    for phase in PASSES:
        phase_ms = [phases[phase] for phases in times.phases_ms[counted] if phase in phases]
        columns.update(time_statistics(phase, phase_ms))
    columns.update(time_statistics("step", times.step_ms[counted]))
    if flops:
        columns["achieved_tflops"] = flops / (columns["step_ms"] / 1e3) / 1e12
    return columns


def predicted_pass(workload: TinyLlamaWorkload, mode: str, on_gpu: bool) -> int | Unknown:
    """The peak of a step or of a forward pass alone in bytes, by a fake-tensor run."""
    if mode == "train":
        return predicted_peak(workload, on_gpu)
    try:
        tracker = fake_forward(workload, MemoryTracker)
    except FakeRunError as error:
        return Unknown(str(error))
    return int(tracker.timeline.live_bytes_at_allocations().max())


def measure_passes(
    workload: TinyLlamaWorkload, mode: str, steps: int, snapshot_folder: Path | None = None
) -> PassTimes:
    """In a new process: so many steps, or forward passes alone.

    snapshot_folder: for the allocation history of a step after them.  Steps that are timed have no
    instruments: the audit of a run's first step would be part of its time.
    """
    device = choose_device(workload.training.device)
    on_gpu = device.type == "cuda"
    # Measured first: once the run has used the libraries, they allocate nothing more.
    workspaces = workspace_bytes(device, workload.precision)
    preparation = Preparation(trains=mode == "train", compile_within=cold_compiler)
    session = Session(workload, device, preparation=preparation)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    records = timed(session, mode, steps, NullMeter())
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else None
    if snapshot_folder is not None:
        record_snapshot(session, mode, snapshot_folder)
    return PassTimes(
        phases_ms=[record.phase_ms for record in records],
        step_ms=[record.total_ms for record in records],
        losses=[record.loss for record in records],
        compile_s=session.compile_seconds,
        peak_bytes=peak,
        workspace_bytes=workspaces,
    )


def timed(
    session: Session, mode: str, steps: int, instruments: Instruments | NullMeter
) -> list[StepRecord]:
    """The records of so many training steps, or forward passes alone; a GPU's events are read
    after the last one."""
    meter, workload = session.step_meter(), session.workload
    with session:
        if mode == "train":
            workload.train(session.state, session.stream, steps, meter, instruments)
        else:
            infer(workload, session.state, session.stream, steps, meter, instruments)
        meter.read_finished(wait=True)
    return meter.records


def infer(
    workload: TinyLlamaWorkload, state: TrainingState, stream, steps: int, meter, instruments
) -> None:
    """The forward pass alone, which saves nothing for a backward pass."""
    with torch.no_grad():
        for step in range(1, steps + 1):
            with meter.step(step), instruments.step(step):
                with meter.phase("data"):
                    batch = next(stream)
                with meter.phase("forward"), instruments.forward(step), state.autocast:
                    # Within the phase, so that its copy is timed; in no variable, which would keep
                    # it through the next step.
                    meter.add_loss(workload.loss(state.model, batch))


def record_snapshot(session: Session, mode: str, folder: Path) -> None:
    """The allocation history of one step or forward pass, into the folder."""
    make_folder(folder)
    profiling = ProfilerConfig(memory_snapshot=True)
    schedule = InstrumentSchedule(1, profiling)
    instruments = Instruments(
        schedule, profiling, session.unwrapped, session.audit, session.device, folder, None
    )
    timed(session, mode, 1, instruments)


# ---- What the rows say together ------------------------------------------------------------------


def most_warmed_up(rows: list[TrainingBenchmarkRow]) -> list[TrainingBenchmarkRow]:
    most = max((row.warmup_steps for row in rows), default=0)
    return [row for row in rows if row.warmup_steps == most]


class Compilation(NamedTuple):
    """What compiling changed about a row, beside the same row not compiled."""

    plain_ms: float | None  # of the row not compiled
    speedup: float | None = None  # of the medians; None: one of the two was not measured
    difference: str = ""  # the word of judged(), if there is a speedup
    break_even: str | None = None  # the step from which on it has saved time


def compilations(rows: list[TrainingBenchmarkRow]) -> dict[tuple, Compilation]:
    """By the identity of the compiled row, of those with the most warm-up."""

    def settings(row: TrainingBenchmarkRow) -> tuple:
        return row.size, row.seq_len, row.batch_size, row.mode, row.precision

    warm = most_warmed_up(rows)
    plain = {settings(row): row for row in warm if not row.compiled}
    of_rows = {}
    for row in warm:
        if row.compiled and settings(row) in plain:
            of_rows[row.identity] = compilation(row, plain[settings(row)])
    return of_rows


def compilation(row: TrainingBenchmarkRow, plain: TrainingBenchmarkRow) -> Compilation:
    if not row.is_measured or not plain.is_measured:
        return Compilation(plain.step_ms)
    ratio, _, word = compared(row, plain, "step")
    # Step 0: code from the cache cost nothing.
    step = break_even_step(row.compile_s, plain.step_ms - row.step_ms)
    return Compilation(plain.step_ms, 1 / ratio, word, "never" if step is None else f"{step:,}")


def finding(measured: list[TrainingBenchmarkRow]) -> list[str]:
    """The slowest step with its phases, and what compiling, warm-up or the size changed."""
    warm = most_warmed_up(measured)
    slowest = max(warm, key=lambda row: row.step_ms)
    phases = shares_of_phases(slowest)
    first = f"The slowest is {slowest.label()}, median {slowest.step_ms:,.2f} ms: {phases}."
    alike = [row for row in warm if of_a_kind(row) == of_a_kind(slowest)]
    fastest = min(alike if len(alike) > 1 else warm, key=lambda row: row.step_ms)
    if fastest is slowest:
        if slowest.achieved_tflops:
            return [first, f"It reaches {slowest.achieved_tflops:.4g} TFLOP/s."]
        return [first, "Its FLOPs are not known."]
    compiled = list(compilations(measured).values())
    if compiled:
        return [first, finding_of_compilation(compiled)]
    size = ""
    if slowest.size != fastest.size:
        size = f", with {fastest.parameters / slowest.parameters:.2g} times the parameters"
    ratio = as_fast(fastest.step_ms / slowest.step_ms)
    second = f"The fastest, {fastest.label()}, {fastest.step_ms:,.2f} ms, is {ratio}{size}."
    return [first, second]


def of_a_kind(row: TrainingBenchmarkRow) -> tuple:
    return row.mode, row.precision, row.compiled


def shares_of_phases(row: TrainingBenchmarkRow) -> str:
    """'forward 25%, backward 50%, optimizer 25%'"""
    shares = []
    for phase in PASSES:
        ms = value_of(row, f"{phase}_ms")
        if ms is not None:
            shares.append(f"{phase} {ms / row.step_ms:.0%}")
    return ", ".join(shares)


def finding_of_compilation(compiled: list[Compilation]) -> str:
    """compiled: of measured rows."""
    speedups = [of_row.speedup for of_row in compiled]
    words = [of_row.difference for of_row in compiled]
    doubts = []
    for word in dict.fromkeys(words):
        if not is_decided(word):
            doubts.append(f"{words.count(word)} {word}")
    of_rows = f"; of {count_of(len(words), 'row')}: {', '.join(doubts)}" if doubts else ""
    return f"Compiled, a pass is {min(speedups):.2f}x to {max(speedups):.2f}x as fast{of_rows}."


# ---- Tables and figure ---------------------------------------------------------------------------

SIZE, MODE, PRECISION = text_columns("size", "mode", "precision")
SHAPE = (SIZE, column("batch", "batch_size", ","), column("sequence", "seq_len", ","))
COMPILED = yes_no_column("compiled", "compiled")
PHASE_COLUMNS = tuple(mean_std_column(phase, phase) for phase in PASSES)
STEP_COLUMNS = (mean_std_column("step", "step"), column("median", "step_ms", ",.2f"))
TFLOPS = column("TFLOP/s", "achieved_tflops", ",.3g")
PEAK = column("peak (MB)", "peak_bytes", ",.0f", MB)
PREDICTED = column("predicted (MB)", "predicted_peak_bytes", ",.0f", MB)


def title_of(subject: str, rows: list[StepTimesRow]) -> str:
    repetitions = next((row.repetitions for row in rows if row.repetitions), None)
    counted = f", {repetitions} repetitions" if repetitions else ""
    return f"{subject}: times in ms, mean ± standard deviation, and the median of the step{counted}"


def sections(rows: list[TrainingBenchmarkRow], snapshots: bool) -> list[Section]:
    """The table, and those of what varies between the rows."""
    tables = [table(rows)]
    if len({row.warmup_steps for row in rows}) > 1:
        tables.append(warmup_section(rows))
    if any(row.compiled for row in rows):
        tables.append(speedup_section(rows))
    if snapshots:
        tables.append(peak_section(rows))
    return tables


def table(rows: list[TrainingBenchmarkRow]) -> Section:
    columns = (
        *SHAPE,
        MODE,
        PRECISION,
        COMPILED,
        column("warm-up", "warmup_steps"),
        *optional(*PHASE_COLUMNS),
        *STEP_COLUMNS,
        *optional(TFLOPS, column("compile (s)", "compile_s", ",.1f"), PEAK, PREDICTED),
        status_column(),
    )
    return Section(title_of("Training benchmark", rows), columns, rows)


def warmup_section(rows: list[TrainingBenchmarkRow]) -> Section:
    """Mean and spread with less warm-up, relative to the row with the most."""
    warm = {row.label(): row for row in most_warmed_up(rows)}

    def mean_ratio(row: TrainingBenchmarkRow) -> float:
        return row.step_mean_ms / warm[row.label()].step_mean_ms

    def median_ratio(row: TrainingBenchmarkRow) -> float:
        return row.step_ms / warm[row.label()].step_ms

    columns = (
        Column("row", TrainingBenchmarkRow.label, left=True),
        column("warm-up steps", "warmup_steps"),
        column("mean (ms)", "step_mean_ms", ",.2f"),
        column("std (ms)", "step_std_ms", ",.2f"),
        column("median (ms)", "step_ms", ",.2f"),
        Column("mean / warm mean", mean_ratio, ".3f"),
        Column("median / warm median", median_ratio, ".3f"),
    )
    most = max(row.warmup_steps for row in rows)
    title = f"Effect of warm-up: the same run without its first steps; warm: after {most} steps"
    return Section(title, columns, [row for row in rows if row.is_measured])


def speedup_section(rows: list[TrainingBenchmarkRow]) -> Section:
    """Compiled and not compiled, compile time, and the step from which compiling saves time."""
    of_rows = compilations(rows)

    def speedup(row: TrainingBenchmarkRow) -> str | None:
        factor = of_rows[row.identity].speedup
        return None if factor is None else f"{factor:.2f}x"

    columns = (
        *SHAPE,
        MODE,
        PRECISION,
        Column("not compiled (ms)", lambda row: of_rows[row.identity].plain_ms, ",.2f"),
        column("compiled (ms)", "step_ms", ",.2f"),
        Column("speedup", speedup),
        Column("", lambda row: of_rows[row.identity].difference, left=True),
        column("compile (s)", "compile_s", ",.1f"),
        Column("break-even step", lambda row: of_rows[row.identity].break_even),
        status_column(),
    )
    compiled = [row for row in rows if row.identity in of_rows]
    return Section("Compiled compared with not compiled, medians", columns, compiled)


def peak_section(rows: list[TrainingBenchmarkRow]) -> Section:
    """Peaks of the forward pass alone and of the full step, labeled as measured or predicted."""
    lines = []
    by_model = grouped(rows, lambda row: (row.size, row.precision, row.compiled, row.seq_len))
    for (size, precision, compiled, seq_len), of_model in by_model.items():
        line = {"size": size, "precision": precision, "compiled": compiled, "seq_len": seq_len}
        for row in of_model:
            line.setdefault(row.mode, peak_text(row))
        lines.append(line)
    columns = (
        SIZE,
        PRECISION,
        COMPILED,
        column("sequence length", "seq_len", ","),
        column("forward only", "forward"),
        column("full step", "train"),
    )
    text = ["Forward only: nothing is saved for a backward pass, and there is no optimizer."]
    return Section("Peak memory by sequence length", columns, lines, text)


def peak_text(row: TrainingBenchmarkRow) -> str:
    if row.peak_bytes is not None:
        return f"{megabytes(row.peak_bytes)} (allocator)"
    if row.predicted_peak_bytes is None:
        return "unknown"
    outcome = "OOM, " if row.status == "oom" else ""
    return f"{megabytes(row.predicted_peak_bytes)} ({outcome}prediction)"


def figure(rows: list[StepTimesRow], names: list[str], about: str) -> Figure:
    """Mean of each phase in ms, and the standard deviation of the step as error bars."""
    from analysis.report.figures.axes import beside, legend, new_axes, stacked_bars
    from analysis.report.palette import PHASE_COLORS

    chart, axes = new_axes("Time of a step by phase", 1.9 + 0.3 * len(rows), about)
    parts = {}
    for phase in PASSES:
        parts[phase] = [value_of(row, f"{phase}_mean_ms") or 0.0 for row in rows]
    lengths = stacked_bars(axes, names, parts, PHASE_COLORS)
    spreads = np.array([row.step_std_ms or 0.0 for row in rows])
    axes.errorbar(lengths, range(len(names)), xerr=spreads, fmt="none", ecolor="black", capsize=3)
    axes.set_xlim(0, 1.02 * (lengths + spreads).max())
    axes.set_xlabel("time per step, mean (ms)\nerror bars: standard deviation of the step")
    beside(axes, [f"{row.step_mean_ms:,.2f} ms" for row in rows])
    legend(axes)
    return chart
