"""What each optimization gains, alone and on top of others, beside its bound.

Every size and precision is profiled once, for what the baseline's trace allows.  Then one process
has all sets of flags, as far as memory permits, and each takes one step in every round.
"""

from __future__ import annotations

import copy
import itertools
from argparse import BooleanOptionalAction
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.compare.noise import as_fast
from analysis.diagnosis.document import OperatorAnalysis
from analysis.hardware import cache
from analysis.memory.predicted import persistent_bytes
from harness.base.command_line import require
from harness.base.documents import read_document, read_or_leave_out
from harness.base.errors import UserError
from harness.base.sections import Section
from harness.base.tables import Column, column, grouped, text_columns
from harness.base.text import shortened, slug
from harness.base.units import MB
from harness.instruments.schedule import ProfilerConfig
from harness.model.optimizations import Optimization
from harness.model.workload import Workload
from harness.schema import Unknown
from harness.schema import field as declared
from studies.engine.columns import optional, predicted_peak, status_column
from studies.engine.command_line import ByDevice, Flags, precisions_of, workload_of
from studies.engine.isolation import run_script
from studies.engine.report import Report
from studies.engine.rows import SweepDocument
from studies.engine.study import SweepStudy
from studies.engine.sweep import FINISHED_STATUSES, Cell
from studies.optimization_parts.ladder import (
    NAMES,
    allowed_by_trace,
    flag_sets,
    last_flag,
    names_for,
    not_here,
    why_no_rung,
)
from studies.optimization_parts.reference import MISSING, reference_of, reference_title
from studies.optimization_parts.rows import OptimizationStudyRow, fill_alone, fill_beside
from studies.optimization_parts.turns import Answer, take_turns
from studies.optimization_parts.verdict import finding
from tiny_llama_v1 import TinyLlamaWorkload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROFILED = ProfilerConfig(
    enable_pytorch_profiler=True, warmup_steps=1, profile_steps=2, profile_memory=True
)
LISTS = {"rows": lambda row: not row.is_reference, "reference": lambda row: row.is_reference}
LARGEST_RATIO = 2.0  # of the figure's axis; what takes longer is at its end


# ---- The document --------------------------------------------------------------------------------


class OptimizationStudy(SweepDocument):
    rows: list[OptimizationStudyRow] = declared("by size, precision and flags")
    reference: list[OptimizationStudyRow] = declared("transformers' LLaMA, one for each size")


# ---- The study -----------------------------------------------------------------------------------


@dataclass(kw_only=True)
class FlagsCell(Cell):
    """All sets of flags of a size and precision, the baseline first; by the flags of a row, what it
    trains, and its optimizations: the baseline and the reference have none."""

    workloads: dict[str, Workload] = field(default_factory=dict)
    rungs: dict[str, tuple[Optimization, ...]] = field(default_factory=dict)

    @property
    def baseline(self) -> OptimizationStudyRow:
        return self.rows[0]

    def insert(
        self,
        place: int,
        row: OptimizationStudyRow,
        workload: Workload,
        rungs: tuple[Optimization, ...] = (),
    ) -> None:
        self.rows.insert(place, row)
        self.workloads[row.flags] = workload
        self.rungs[row.flags] = rungs

    def work_of(self, rows: Iterable[OptimizationStudyRow]) -> float:
        """By the FLOPs of a step of each; of a user's file, all of one size, by their number."""
        work = 0.0
        for row in rows:
            workload = self.workloads[row.flags]
            work += workload.step_flops() if isinstance(workload, TinyLlamaWorkload) else 1.0
        return work


class Study(SweepStudy):
    name, row_type, document_type = "optimization_study", OptimizationStudyRow, OptimizationStudy
    lists = LISTS
    not_with_workload = ("sizes", "seq_len", "batch_size", "reference")
    predicted_column = "predicted_memory_bytes"
    asked_rungs: Sequence[str] = ()  # those of --rungs; without the flag all, as far as they apply

    @staticmethod
    def add_flags(flags: Flags) -> None:
        flags.sizes(ByDevice(["small", "medium"], ["tiny", "small"]))
        flags.precisions("fp32; with --workload that of the file", of="of the baseline: ")
        text = "(all; one that the device does not have is a row with the reason)"
        flags.choices("--rungs", f"the optimizations: {', '.join(NAMES)} {text}", NAMES)
        text = "also measure transformers' LLaMA with its best settings (on)"
        flags.add("--reference", action=BooleanOptionalAction, default=True, help=text)
        flags.tokens()
        flags.samples()
        text = "rounds, in each of which every set of flags takes one step (%(default)s)"
        flags.count("--repetitions", text, default=ByDevice(30, 10))
        text = "steps of each before the rounds, beside the audited first one (%(default)s)"
        flags.count("--warmup-steps", text, minimum=0, default=1)
        flags.workload()

    def prepare(self) -> None:
        args = self.args
        self.device.check_precisions(args.precisions or [], "--precisions")
        args.precisions = precisions_of(args)
        self.asked_rungs = args.rungs or ()
        args.rungs = args.rungs or list(NAMES)
        require("the profile of the baseline", ["pandas"])

    # ---- Which sets of flags ---------------------------------------------------------------------

    def cells(self) -> list[FlagsCell]:
        args = self.args
        sizes = [None] if args.workload else args.sizes
        self.all_cells = []
        for size, precision in itertools.product(sizes, args.precisions):
            self.all_cells.append(self.cell_of(size, precision))
        self.check_rungs()
        rows = [row for cell in self.all_cells for row in cell.rows]
        if args.reference and not args.workload and not any(row.is_reference for row in rows):
            args.notes.append(MISSING)
        return self.all_cells

    def check_rungs(self) -> None:
        """Raise UserError for one that was asked for and is in no set of flags."""
        names = set()
        for cell in self.all_cells:
            for rungs in cell.rungs.values():
                names.update(rung.name for rung in rungs)
        for name in self.asked_rungs:
            if name not in names:
                first = self.all_cells[0]
                why = why_no_rung(name, first.workloads[first.baseline.flags])
                raise UserError(f"--rungs {name}: {why}; leave it out", 2)

    def cell_of(self, size: str | None, precision: str | None) -> FlagsCell:
        """size: None for --workload."""
        args = self.args
        settings = {"size": size, "precision": precision}
        for name in ("workload", "batch_size", "seq_len", "device"):
            settings[name] = getattr(args, name)
        baseline = workload_of(**settings)
        shape = {
            "size": size or Path(args.workload).name,
            "seq_len": baseline.seq_len,
            "batch_size": baseline.batch_size,
            "precision": baseline.precision,
        }
        cell = FlagsCell(rows=[])
        for flag_set in flag_sets(names_for(baseline, args.rungs), baseline.precision):
            row = OptimizationStudyRow(flags=flag_set.flags, ladder=flag_set.ladder, **shape)
            workload = workload_of(flag_set.flags.split(), **settings)
            cell.insert(len(cell.rows), row, workload, flag_set.rungs)
        reference = None
        if args.reference and size:
            reference = reference_of(baseline, self.device.on_gpu)
        if reference is not None:
            row = OptimizationStudyRow(flags=reference_title(reference), **shape)
            cell.insert(max(1, len(cell.rows) - 1), row, reference)  # below the top of the ladder
        cell.work = cell.work_of(cell.rows)
        return cell

    # ---- Measurement -----------------------------------------------------------------------------

    def measure(self, cell: FlagsCell) -> None:
        """The rows of every process are kept as soon as it ends."""
        todo = []
        for place, row in enumerate(cell.rows):
            kept = self.sweep.known(row)
            if kept is None:
                todo.append(row)
            else:
                cell.rows[place] = kept
        self.predict_rows(todo, cell)
        todo = [row for row in todo if not self.is_skipped(row, cell)]
        processes = Processes(cell.workloads, lambda rows: self.measure_in_turn(rows, cell))
        for group in groups_that_fit(todo, cell, self.available_bytes):
            measured = processes.rows_of(group)
            self.sweep.keep([row for row in measured if not self.is_finished(row)])
            self.sweep.write()
        cell.rows = [self.sweep.known(row) or row for row in cell.rows]

    def is_finished(self, row: OptimizationStudyRow) -> bool:
        kept = self.sweep.known(row)
        return kept is not None and kept.status in FINISHED_STATUSES

    def predict_rows(self, rows: list[OptimizationStudyRow], cell: FlagsCell) -> None:
        """Memory of each, and the ratio that the baseline's trace allows."""
        workloads = [cell.workloads[row.flags] for row in rows]
        peaks = self.predict(predicted_peaks, workloads, self.predicts_gpu)
        for row, peak in zip(rows, peaks, strict=True):
            row.predicted_memory_bytes = peak
        analysis = None
        if not self.args.dry_run:
            baseline = cell.baseline
            analysis = self.profile_of(baseline, cell.workloads[baseline.flags])
        for row in rows:
            row.bound, row.estimate = allowed_by_trace(cell.rungs[row.flags], analysis)

    def is_skipped(self, row: OptimizationStudyRow, cell: FlagsCell) -> bool:
        """Whether something speaks against measuring it, which its row then says."""
        workload = cell.workloads[row.flags]
        baseline = cell.workloads[cell.baseline.flags]
        why = not_here(workload, self.device) or self.slower_type(workload, baseline)
        if why:
            row.set(status="skipped", reason=why)
            return True
        return self.skips([row], row.predicted_memory_bytes, workload.precision)

    def slower_type(self, workload: Workload, baseline: Workload) -> str | None:
        """Why another precision is not worth its time: a CPU without its arithmetic may take 25
        times as long."""
        precision = workload.precision
        if self.device.on_gpu or self.args.dry_run or self.args.force:
            return None
        if precision == baseline.precision:
            return None
        gain = cache.measured(self.device.environment["device"], precision, "gain")
        if gain is None or gain.rate >= 1:
            return None
        rate = f"{precision} is {gain.rate:.2g} times as fast as fp32 here: {gain.source}"
        return f"{rate}; --force runs it"

    def profile_of(self, baseline: OptimizationStudyRow, workload: Workload) -> dict:
        """operator_analysis.json of the baseline, from a run of its own; without opportunities if
        there is none."""
        folder = self.sweep.folder / slug("profile", baseline.size, baseline.precision)
        # Of a sweep that is resumed; one that cannot be read is made again.
        analysis = read_or_leave_out(folder / "operator_analysis.json", OperatorAnalysis, [])
        if analysis is not None:
            return analysis
        steps = PROFILED.warmup_steps + PROFILED.profile_steps + 1
        profiled = copy.deepcopy(baseline)
        self.while_waiting(f"{baseline.size} {baseline.precision}: profiling the baseline")
        self.measure_in_process(
            [profiled],
            baseline.predicted_memory_bytes,
            run_script,
            workload.with_settings(num_steps=steps, force=self.args.force),
            PROFILED,
            folder,
            precision=workload.precision,
        )
        analysis = read_document(folder / "operator_analysis.json")
        if analysis is None:
            why = f"the baseline was not profiled: {profiled.reason}"
            return {"opportunities": [], "not_here": [], "opportunities_reason": why}
        return analysis

    def measure_in_turn(
        self, rows: list[OptimizationStudyRow], cell: FlagsCell
    ) -> list[Answer] | None:
        """Of these rows of the cell; see Processes."""
        work_left = 0.0
        for other in self.all_cells:
            work_left += other.work_of(row for row in other.rows if self.is_left(row))
        after = max(0.0, work_left / cell.work_of(rows) - 1)  # these rows are among what is left
        return self.measure_in_process(
            rows,
            None,
            take_turns,
            [cell.workloads[row.flags] for row in rows],
            self.args.repetitions,
            self.args.warmup_steps,
            [row.flags or "baseline" for row in rows],
            after,
        )

    def is_left(self, row: OptimizationStudyRow) -> bool:
        return row.status is None and self.sweep.known(row) is None

    # ---- Reporting -------------------------------------------------------------------------------

    def table(self, rows: list[OptimizationStudyRow]) -> Section:
        return table(rows)

    def report(self) -> Report:
        name, chart = self.device.name, None
        if self.measured:
            chart = figure(self.measured, name)
        return Report(self.finding(finding, name), [table(self.rows)], chart)


def predicted_peaks(workloads: Sequence[Workload], on_gpu: bool) -> list[int | Unknown]:
    return [predicted_peak(workload, on_gpu) for workload in workloads]


# ---- Which sets of flags share a process, and what if it dies ------------------------------------

# Calls take_turns() in a new process, with whose status it fills the rows; None if it died.
Measure = Callable[[list[OptimizationStudyRow]], list[Answer] | None]


def groups_that_fit(
    todo: list[OptimizationStudyRow], cell: FlagsCell, available_bytes: int
) -> Iterator[list[OptimizationStudyRow]]:
    """Rows whose states are in memory together, each group with the baseline, unless that does not
    fit."""
    always = [] if cell.baseline.status in ("skipped", "oom") else [cell.baseline]
    group = list(always)
    for row in todo:
        if row is cell.baseline:
            continue
        is_full = bytes_together([*group, row], cell.workloads) > available_bytes
        if is_full and len(group) > len(always):
            yield group
            group = list(always)
        group.append(row)
    if any(row.status is None for row in group):
        yield group


def bytes_together(rows: list[OptimizationStudyRow], workloads: dict[str, Workload]) -> int:
    """What all keep between two steps, and what one of them needs on top at its peak."""
    resting_bytes, most_on_top = 0, 0
    for row in rows:
        resting = persistent_bytes(workloads[row.flags])
        resting_bytes += resting
        most_on_top = max(most_on_top, (row.predicted_memory_bytes or 0) - resting)
    return resting_bytes + most_on_top


class Processes:
    """Measures the rows of a group in one process.  If that dies, each has one of its own, with the
    baseline if that lives by itself; a row gets the outcome of a process only if nothing else can
    have ended it."""

    def __init__(self, workloads: dict[str, Workload], measure: Measure):
        """workloads: by the flags of a row."""
        self.workloads, self.measure = workloads, measure

    def rows_of(self, group: list[OptimizationStudyRow]) -> list[OptimizationStudyRow]:
        """New records of the rows, as they were measured."""
        lives, rows = self._in_one_process(group)
        if lives or len(rows) == 1:
            return rows
        baseline, *others = group
        if not baseline.is_baseline:
            return [row for member in group for row in self.rows_of([member])]
        (alone,) = self.rows_of([baseline])
        if not alone.is_measured:
            return [alone, *self.rows_of(others)]
        if len(others) == 1:  # it has just ended a process that the baseline does not end
            return [alone, rows[1]]
        return self._in_pairs(alone, baseline, others)

    def _in_pairs(
        self,
        alone: OptimizationStudyRow,
        baseline: OptimizationStudyRow,
        others: list[OptimizationStudyRow],
    ) -> list[OptimizationStudyRow]:
        """Each beside the baseline in a process for two.  alone: the baseline as it was measured,
        until a pair has measured it again."""
        newest, rows = alone, []
        for other in others:
            _, (beside, row) = self._in_one_process([baseline, other])
            if beside.is_measured:
                newest = beside
            rows.append(row)
        return [newest, *rows]

    def _in_one_process(
        self, group: list[OptimizationStudyRow]
    ) -> tuple[bool, list[OptimizationStudyRow]]:
        """Whether it lived, and the rows."""
        rows = copy.deepcopy(group)
        answers = self.measure(rows)
        if answers is None:
            return False, rows
        for row, answer in zip(rows, answers, strict=True):
            fill_alone(row, answer, self.workloads[row.flags])
        by_flags = {row.flags: answer for row, answer in zip(rows, answers, strict=True)}
        for row in rows:
            fill_beside(row, rows, by_flags)
        return True, rows


# ---- Table and figure ----------------------------------------------------------------------------


def as_fast_column(title: str, name: str, has_interval: bool = True) -> Column:
    """'1.18x (1.15 to 1.20)'; the factor alone without an interval."""

    def text(row: OptimizationStudyRow) -> str | None:
        ratio = getattr(row, name)
        if ratio is None or row.is_baseline:
            return None
        interval = row.interval(name) if has_interval else None
        return as_fast(ratio, interval, short=True)

    return Column(title, text)


def table(rows: list[OptimizationStudyRow]) -> Section:
    columns = (
        *text_columns("size", "precision"),
        Column("flags", lambda row: row.flags or "baseline", left=True),
        column("rung", "ladder"),
        column("step (ms)", "step_ms", ",.2f"),
        as_fast_column("as fast", "ratio"),
        *optional(
            as_fast_column("at most", "bound", has_interval=False),
            as_fast_column("estimate", "estimate", has_interval=False),
            as_fast_column("as the rung below", "ratio_to_previous"),
            as_fast_column("as transformers", "ratio_to_reference"),
            column("of matmul rate", "share_of_measured_peak", ".0%"),
            column("memory (MB)", "measured_memory_bytes", ",.1f", MB),
            column("loss difference", "largest_loss_difference", ".1e"),
            *text_columns("audit", "trains"),
            column("compile (s)", "compile_s", ".1f"),
            column("break-even step", "break_even_step", ","),
        ),
        status_column(),
    )
    text = [
        (
            "as fast: as the baseline, by the median step, with the 95% interval over the rounds;"
            " above 1x is faster"
        ),
        "at most, estimate: as fast as that by the baseline's trace, see the folders profile_*",
        (
            "of matmul rate: FLOPs of the model by the median step, over that of matmuls measured"
            " in the same process"
        ),
    ]
    title = "Each alone, and one on top of another: how many times as fast"
    return Section(title, columns, rows, text)


def figure(rows: list[OptimizationStudyRow], about: str) -> Figure:
    """A panel for each size and precision: the ladder as a waterfall, from the baseline to all
    rungs, each bar from the ratio below it to its own; then each optimization alone, and the
    reference; all with intervals and bounds."""
    from matplotlib.figure import Figure

    from analysis.report.figures.axes import WIDTH, entitle

    by_shape = grouped(rows, lambda row: row.shape)
    counts = [len(of_shape) + 1 for of_shape in by_shape.values()]
    height = 1.2 + sum(0.9 + 0.24 * count for count in counts)
    chart = Figure(figsize=(WIDTH, height), layout="constrained")
    panels = chart.subplots(len(counts), 1, squeeze=False, height_ratios=counts)[:, 0]
    for axes, (shape, of_shape) in zip(panels, by_shape.items(), strict=True):
        draw_waterfall(axes, shape, of_shape)
    entitle(chart, "Optimizations: step time relative to the baseline's", about)
    return chart


def draw_waterfall(axes, title: str, rows: list[OptimizationStudyRow]) -> None:
    from analysis.report.figures.axes import bare, beside
    from analysis.report.palette import GRAY

    known = [row for row in rows if row.ratio is not None]
    climbing = sorted((row for row in known if row.ladder), key=lambda row: row.ladder)
    others = [row for row in known if row.ladder is None]
    axes.barh(0, 1, color=GRAY, linewidth=0)
    draw_ladder(axes, climbing)
    draw_others(axes, others, 1 + len(climbing))
    draw_bounds(axes, title, [*climbing, *others])
    axes.axvline(1, color="#404040", linewidth=0.8, linestyle=":")
    names = ["baseline", *(f"+ {last_flag(row.flags)}" for row in climbing)]
    names += [shortened(row.flags, 40) for row in others]
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.margins(x=0.05)
    axes.set_xlim(0, min(axes.get_xlim()[1], LARGEST_RATIO))
    axes.set_xlabel("step time, as a share of the baseline's; at the right: how many times as fast")
    bare(axes)
    ratios = [1.0, *(row.ratio for row in climbing), *(row.ratio for row in others)]
    beside(axes, [f"{1 / ratio:.2f}x" for ratio in ratios])


def draw_ladder(axes, climbing: list[OptimizationStudyRow]) -> None:
    from analysis.report.figures.axes import SEAM
    from studies.engine.drawing import GAIN, LOSS

    below = 1.0
    for y, row in enumerate(climbing, 1):
        color, hatch = GAIN if row.ratio <= below else LOSS
        style = {"color": color, "hatch": hatch, "edgecolor": SEAM, "linewidth": 0}
        axes.barh(y, row.ratio - below, left=below, **style)
        below = row.ratio
        draw_interval(axes, row, y)


def draw_others(axes, others: list[OptimizationStudyRow], first: int) -> None:
    """first: the place of the first one."""
    from studies.engine.drawing import GAIN, LOSS

    for y, row in enumerate(others, first):
        color, _ = GAIN if row.ratio <= 1 else LOSS
        x, marker = row.ratio, "o"
        if row.ratio > LARGEST_RATIO:
            x, marker = LARGEST_RATIO, ">"
        draw_interval(axes, row, y)
        axes.plot([x], [y], marker, color=color, markersize=5, clip_on=False)


def draw_bounds(axes, title: str, rows: list[OptimizationStudyRow]) -> None:
    from analysis.report.figures.axes import legend

    bounds, places = [], []
    for y, row in enumerate(rows, 1):
        if row.bound:
            bounds.append(row.bound)
            places.append(y)
    if not bounds:
        axes.set_title(title, loc="left", fontsize=10)
        return
    text = "the fastest that the baseline's trace allows"
    style = {"color": "#009e73", "markersize": 12, "markeredgewidth": 2}
    axes.plot(bounds, places, "|", label=text, **style)
    legend(axes, title)


def draw_interval(axes, row: OptimizationStudyRow, y: float) -> None:
    """Of the ratio, where there is one."""
    if row.ratio_low is not None:
        axes.plot([row.ratio_low, row.ratio_high], [y, y], color="black", linewidth=1.2)
