"""Weak and strong scaling over ranks and modes beside the prediction; inserted faults."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import NotRequired

from analysis.prediction.network import Network, measured_network, network_of, why_not_measured
from harness.base.command_line import network_choice, number_of
from harness.base.errors import UserError
from harness.base.sections import Section
from harness.base.tables import Column, column, value_of
from harness.base.text import count_of
from harness.base.units import MB
from harness.instruments.memory_timeline import CollectiveRow
from harness.machine.host_limits import usable_cores
from harness.model.workload import check_shards
from harness.ranks.parallel import ParallelConfig
from harness.schema import Unknown, field, known_or
from studies.engine.columns import optional, status_column
from studies.engine.command_line import (
    ByDevice,
    Flags,
    check_device_has_flags,
    check_step_flags,
    workload_of,
)
from studies.engine.report import Report
from studies.engine.rows import SweepDocument
from studies.engine.study import SweepStudy
from studies.engine.sweep import Cell
from studies.scaling_parts.faults import FAULTS, FaultVerdict, fault_sections, verdict_on_fault
from studies.scaling_parts.rank_steps import (
    PREDICTED,
    columns_of_launch,
    measure_steps,
    predicted_columns,
)
from studies.scaling_parts.rows import ScalingStudyRow, conclude, findings, row_without_fault
from tiny_llama_v1 import TinyLlamaWorkload

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MODES = ["ddp", "zero1", "fsdp"]
WITH_BUCKETS = ("ddp", "zero1")
SCALINGS = ["weak", "strong"]
SET_BY_THE_STUDY = {  # flags of tiny_llama_v1.py
    "size": "pass it without --flags",
    "batch_size": "pass it without --flags",
    "seq_len": "pass it without --flags",
    "cuda_graphs": (
        "a graph runs no separate operators, whose memory and collectives the study counts; leave"
        " it out"
    ),
}


# ---- The document --------------------------------------------------------------------------------


class ScalingStudy(SweepDocument):
    rows: list[ScalingStudyRow] = field("by kind of scaling, mode, ranks, buckets and fault")
    verdicts: NotRequired[list[FaultVerdict]] = field("of each inserted fault")


# ---- The study -----------------------------------------------------------------------------------


class Study(SweepStudy):
    name, row_type, document_type = "scaling_study", ScalingStudyRow, ScalingStudy
    predicted_column = "predicted_memory_bytes"

    @staticmethod
    def add_flags(flags: Flags) -> None:
        text = (
            "ranks of this machine; the fewest are the base (powers of two: of its GPUs; on a CPU 1"
            " 2, with four cores 4)"
        )
        flags.count("--world-sizes", text, metavar="W", nargs="+")
        text = f"{', '.join(MODES)} (all)"
        flags.choices("--parallel-modes", text, MODES, metavar="MODE", default=MODES)
        text = "weak: --batch-size is that of each rank; strong: of all ranks together (both)"
        flags.choices("--scalings", text, SCALINGS, default=SCALINGS)
        text = "sizes of the buckets of ddp and zero1, in MB (PyTorch's)"
        size = number_of(float, 0)
        flags.add("--bucket-mbs", type=size, nargs="+", metavar="MB", default=[], help=text)
        text = f"what to insert, each in a row of its own: {', '.join(FAULTS)} (none)"
        flags.choices("--faults", text, FAULTS, default=[])
        flags.size()
        flags.samples()
        flags.tokens()
        text = "further flags of tiny_llama_v1.py for all rows, such as --flags=--no-fsdp-reshard"
        flags.add("--flags", metavar="FLAGS", default="", help=text)
        flags.count("--num-steps", "steps of a launch (%(default)s)", default=ByDevice(20, 5))
        flags.count("--warmup-steps", "before them (%(default)s)", default=2)
        flags.count("--repetitions", "launches of each row, interleaved (%(default)s)", default=3)
        text = (
            "for the predicted efficiency: bus bandwidth of a rank in GB/s, or measured (measured,"
            " if there is one)"
        )
        flags.add("--network", type=network_choice, metavar="GB/S", help=text)

    def prepare(self) -> None:
        args = self.args
        args.world_sizes = sorted(args.world_sizes or self.device.default_world_sizes())
        if not args.dry_run:
            self.device.check_world_sizes(args.world_sizes, least=1)
        most = args.world_sizes[-1]
        if most < 2:
            raise UserError(f"--world-sizes {most}: scaling needs two ranks or more", 2)
        if args.bucket_mbs and not {*WITH_BUCKETS} & {*args.parallel_modes}:
            why = "has no effect with --parallel-modes fsdp; add ddp or zero1"
            raise UserError(f"--bucket-mbs: {why}", 2)
        for fault in args.faults:
            mode = FAULTS[fault].parallel
            if mode not in args.parallel_modes:
                why = f"is compared with {mode}; add it to --parallel-modes"
                raise UserError(f"--faults {fault}: {why}", 2)
        if args.faults and args.bucket_mbs:
            why = "are compared with buckets of PyTorch's size; leave out --bucket-mbs"
            raise UserError(f"--faults: {why}", 2)
        self.check_flags()
        self.network = self.network_of_study()

    def check_flags(self) -> None:
        """Raise UserError for one of --flags that the steps of the study would not have."""
        flags = shlex.split(self.args.flags)
        check_step_flags("--flags", flags, SET_BY_THE_STUDY)
        if self.args.bucket_mbs:
            not_here = {"bucket_mb": "--bucket-mbs sets it; leave one of the two out"}
            check_step_flags("--flags", flags, not_here)

    def network_of_study(self) -> Network | None:
        """That of --network; without the flag the measured one, if there is one.  Without base,
        none is of use."""
        args, environment = self.args, self.device.environment
        if args.dry_run:
            return None
        if args.network:
            network = network_of(args.network, environment)
        else:
            network = measured_network(environment)
        if network is None:
            args.notes.append(f"No efficiency is predicted: {why_not_measured(environment)}")
        else:
            source = network.source_for(max(args.world_sizes))
            args.notes.append(f"Predicted efficiency: {network.gb_per_sec:,.3g} GB/s, {source}")
        return network

    # ---- Which cells -----------------------------------------------------------------------------

    def cells(self) -> list[Cell]:
        """The rounds are interleaved, so that drift of the machine affects all rows."""
        rounds = 1 if self.args.dry_run else self.args.repetitions
        cells = []
        for number in range(rounds):
            cells += self.cells_of_round(number)
        self.workload = cells[0].workload  # for titles
        check_device_has_flags("--flags", self.workload, self.predicts_gpu)
        if not self.args.dry_run:
            self.device.check_precisions([self.workload.precision], "--flags: --precision")
        if not self.device.on_gpu and not self.args.dry_run:
            cores = count_of(len(usable_cores()), "core")
            alone = (
                "they share its memory and caches and cross no network, so their efficiency is not"
                " that of nodes"
            )
            note = f"gloo ranks with one thread each on {cores} of one machine: {alone}"
            self.args.notes.append(note)
        self.args.notes.append(f"Base of efficiency: {self.base_text()}")
        return cells

    def base_text(self) -> str:
        fewest = self.args.world_sizes[0]
        text = count_of(fewest, "rank")
        return text if fewest == 1 else f"{text} of the same mode"

    def cells_of_round(self, number: int) -> list[Cell]:
        """Ranks that train together.  The base of one rank has a row for each kind of scaling."""
        args, cells = self.args, []
        if 1 in args.world_sizes:  # the same step is the base of both kinds of scaling
            rows = [self.row_of(scaling, None, 1) for scaling in args.scalings]
            cells.append(self.cell_of(number, rows, args.parallel_modes[0]))
        several = [world_size for world_size in args.world_sizes if world_size > 1]
        for scaling, world_size, mode in itertools.product(
            args.scalings, several, args.parallel_modes
        ):
            bucket_mbs = [None]
            if mode in WITH_BUCKETS and args.bucket_mbs:
                bucket_mbs = args.bucket_mbs
            for bucket_mb in bucket_mbs:
                row = self.row_of(scaling, mode, world_size, bucket_mb=bucket_mb)
                cells.append(self.cell_of(number, [row], mode))
        for fault in args.faults:
            mode = FAULTS[fault].parallel
            row = self.row_of(args.scalings[0], mode, args.world_sizes[-1], fault=fault)
            cells.append(self.cell_of(number, [row], mode))
        return cells

    def row_of(
        self,
        scaling: str,
        mode: str | None,
        world_size: int,
        bucket_mb: float | None = None,
        fault: str | None = None,
    ) -> ScalingStudyRow:
        row = ScalingStudyRow(
            scaling=scaling,
            parallel=mode,
            world_size=world_size,
            bucket_mb=bucket_mb,
            fault=fault,
            base_world_size=self.args.world_sizes[0],
        )
        if mode not in WITH_BUCKETS:
            row.bucket_mb = Unknown("there are no buckets")
        return row

    def cell_of(self, number: int, rows: list[ScalingStudyRow], mode: str) -> Cell:
        """number: of the round."""
        workload = self.workload_of_row(rows[0], mode)
        check_shards(workload)
        for row in rows:
            row.batch_size = workload.batch_size
            row.global_batch_size = workload.batch_size * row.world_size
        return Cell(rows=rows, round=number, workload=workload)

    def workload_of_row(self, row: ScalingStudyRow, mode: str) -> TinyLlamaWorkload:
        """The workload of a rank.  Raises UserError for flags or a batch that it cannot have."""
        args, world_size = self.args, row.world_size
        workload = workload_of(
            shlex.split(args.flags),
            size=args.size,
            seq_len=args.seq_len,
            batch_size=args.batch_size,
            device=args.device,
            bucket_mb=row.bucket_mb,
            parallel=mode,
            world_size=max(2, world_size),
            dry_run=True,
        )
        parallel = workload.parallel
        asked = (mode, max(2, world_size))
        if (parallel.parallel, parallel.world_size) != asked or workload.compiled:
            why = "the study varies modes and ranks itself, and compiles nothing"
            raise UserError(f"--flags {args.flags}: {why}", 2)
        if row.scaling == "strong":
            whole = workload.batch_size
            if whole % world_size:
                text = f"not divisible by {world_size} ranks, which strong scaling requires"
                raise UserError(f"--batch-size {whole}: {text}", 2)
            workload = workload.with_settings(batch_size=whole // world_size)
        if world_size == 1:
            workload = workload.with_settings(**asdict(ParallelConfig()))
        if row.fault is not None:
            workload = workload.with_settings(**FAULTS[row.fault].settings)
        return workload

    # ---- Measurement -----------------------------------------------------------------------------

    def measure(self, cell: Cell) -> None:
        """The rows with one more launch."""
        workload, first = cell.workload, cell.rows[0]
        prediction = self.prediction_of(cell)
        for row in cell.rows:
            row.set(**prediction)
        answers = self.measure_on_ranks(
            cell.rows,
            first.predicted_memory_bytes,
            workload.parallel.world_size,
            measure_steps,
            workload,
            self.args.num_steps,
            self.args.warmup_steps,
            first.fault,
            precision=workload.precision,
        )
        if answers is None:
            return
        for row in cell.rows:
            earlier, times_ms, local_ms = self.sweep.known(row), [], None
            if earlier is not None:  # the row of the launches before, which were measured
                times_ms, local_ms = earlier.step_times_ms, earlier.local_step_ms
                if earlier.disturbed and not row.disturbed:
                    row.set(disturbed=earlier.disturbed, disturbance=earlier.disturbance)
            row.set(**columns_of_launch(answers, workload.seq_len, times_ms, local_ms))

    def prediction_of(self, cell: Cell) -> dict:
        """The predicted columns: those of an earlier round, if there was one."""
        row = cell.rows[0]
        earlier = self.sweep.known(row)
        if earlier is None:
            return self.predict(predicted_columns, cell.workload, self.predicts_gpu, row.fault)
        columns = {}
        for name in PREDICTED:
            columns[name] = known_or(getattr(earlier, name), earlier.reason_of(name))
        return columns

    def table(self, rows: list[ScalingStudyRow]) -> Section:
        conclude(rows, self.network)
        return table(rows)

    def report(self) -> Report:
        conclude(self.rows, self.network)
        verdicts, chart = fault_verdicts(self.rows), None
        plain = [row for row in self.measured if row.fault is None]
        if plain:
            about = f"{self.workload.title_on(self.device.name)}; base: {self.base_text()}"
            chart = figure(plain, about)
        return Report(
            self.finding(finding, verdicts),
            [*fault_sections(verdicts), table(self.rows), communication_section(self.rows)],
            chart,
            {"verdicts": verdicts},
        )


# ---- What the rows say together ------------------------------------------------------------------


def fault_verdicts(rows: list[ScalingStudyRow]) -> list[FaultVerdict]:
    """Whether the findings of a row with an inserted fault name it, and those of the row without it
    do not."""
    verdicts = []
    for row in rows:
        if row.fault is not None and row.is_measured:
            reference, without_fault = row_without_fault(row, rows), []
            disturbed = bool(row.disturbed)
            if reference is not None:
                without_fault = findings(reference, None)
                disturbed = disturbed or bool(reference.disturbed)
            with_fault = findings(row, reference)
            verdicts.append(verdict_on_fault(row.fault, with_fault, without_fault, disturbed))
    return verdicts


def finding(measured: list[ScalingStudyRow], verdicts: list[FaultVerdict]) -> list[str]:
    """The most and the least efficient row, how exact the prediction was, and which faults were
    named."""
    lines = []
    scaled = []
    for row in measured:
        if row.fault is None and row.efficiency and row.world_size > row.base_world_size:
            scaled.append(row)
    scaled.sort(key=lambda row: row.efficiency)
    if len(scaled) == 1:
        lines.append(f"Efficiency: {labeled_efficiency(scaled[0])}.")
    elif scaled:
        least, most = labeled_efficiency(scaled[0]), labeled_efficiency(scaled[-1])
        lines.append(f"Least efficient: {least}; most efficient: {most}.")
    predicted = [row for row in measured if row.predicted_memory_bytes is not None]
    rows = count_of(len(predicted), "row")
    equal = sum(row.predicted_memory_bytes == row.measured_memory_bytes for row in predicted)
    lines.append(f"Predicted memory: equal to the byte in {equal} of {rows}.")
    equal = sum(
        row.predicted_collective_bytes == row.measured_collective_bytes for row in predicted
    )
    lines.append(f"Predicted bytes of collectives: equal to the byte in {equal} of {rows}.")
    if verdicts:
        unnamed = [verdict.fault for verdict in verdicts if not verdict.named]
        missed = f", not {', '.join(unnamed)}" if unnamed else ""
        count = f"{len(verdicts) - len(unnamed)} of {len(verdicts)}"
        lines.append(f"Inserted faults found: {count}{missed}.")
    return lines


def labeled_efficiency(row: ScalingStudyRow) -> str:
    return f"{row.label()}, {efficiency_text(row)}"


def efficiency_text(row: ScalingStudyRow) -> str | None:
    """'81.2% (78.0% to 84.5%)'"""
    if row.efficiency is None:
        return None
    if row.efficiency_95 is None:
        return f"{row.efficiency:.1%}"
    low, high = row.efficiency_95
    return f"{row.efficiency:.1%} ({low:.1%} to {high:.1%})"


# ---- Tables and figure ---------------------------------------------------------------------------


def table(rows: list[ScalingStudyRow]) -> Section:
    columns = (
        column("scaling", "scaling", left=True),
        column("mode", "parallel", left=True),
        column("ranks", "world_size"),
        *optional(column("bucket MB", "bucket_mb", "g")),
        column("fault", "fault", left=True),
        column("tokens/s", "tokens_per_sec", ",.0f"),
        Column("efficiency", efficiency_text),
        Column("predicted", predicted_text),
        *optional(column("step ms", "step_ms", ",.1f")),
        measured_and_predicted("memory MB", "memory_bytes"),
        *optional(measured_and_predicted("collectives MB", "collective_bytes")),
        status_column(),
    )
    title = "Scaling: efficiency is tokens per second and rank, relative to the base"
    return Section(title, columns, rows)


def predicted_text(row: ScalingStudyRow) -> str | None:
    """'85.0% to 97.1%'"""
    if row.predicted_efficiency is None:
        return None
    unhidden_end, hidden_end = row.predicted_efficiency
    return f"{unhidden_end:.1%} to {hidden_end:.1%}"


def measured_and_predicted(title: str, name: str) -> Column:
    """'146.70 =' where the prediction is equal to the byte, else '146.70 (146.71)'."""

    def text(row: ScalingStudyRow) -> str | None:
        measured, predicted = value_of(row, f"measured_{name}"), value_of(row, f"predicted_{name}")
        if measured is None and predicted is None:
            return None
        if predicted is None:
            return f"{measured / MB:,.2f}"
        if measured is None:
            return f"({predicted / MB:,.2f})"
        if measured == predicted:
            return f"{measured / MB:,.2f} ="
        return f"{measured / MB:,.2f} ({predicted / MB:,.2f})"

    return Column(f"{title} (predicted)", text)


def communication_section(rows: list[ScalingStudyRow]) -> Section:
    columns = (
        Column("row", ScalingStudyRow.label, left=True),
        Column("collectives of a step", collectives_text, left=True),
        column("exposed ms", "exposed_ms", ",.1f"),
        column("waiting ms", "waiting_ms", ",.1f"),
        column("share of step", "communication_share", ".1%"),
        column("begun in backward", "overlapped_share", ".0%"),
    )
    notes = [
        "By difference, for ddp: the fastest steps with and without communication, on all ranks at"
        " once. Exposed: the step beyond that of the slowest rank. Waiting: for that rank, the mean"
        " over ranks. Share: both, of the step."
    ]
    for row in rows:
        if row.fault is None:
            notes += [f"{row.label()}: {text}." for text in row.findings or []]
    return Section("Communication", columns, rows, notes)


def collectives_text(row: ScalingStudyRow) -> str:
    return calls_text(row.measured_collectives or row.predicted_collectives or []) or "-"


def calls_text(collectives: Iterable[CollectiveRow]) -> str:
    """'2 all_reduce, 1 broadcast'"""
    return ", ".join(f"{calls.calls} {calls.kind}" for calls in collectives)


def figure(rows: list[ScalingStudyRow], about: str) -> Figure:
    """Efficiency by ranks, a line for each mode and bucket size with its interval and the predicted
    one (shaded), a panel for each kind of scaling."""
    from analysis.report.figures.axes import log_axis
    from studies.engine.drawing import new_panels

    scalings = list(dict.fromkeys(row.scaling for row in rows))
    title = "Scaling: efficiency relative to the base"
    chart, panels = new_panels(4.8, title, about, len(scalings))
    modes = dict.fromkeys((row.parallel, row.bucket_mb) for row in rows if row.parallel)
    for axes, scaling in zip(panels, scalings, strict=True):
        of_panel = [row for row in rows if row.scaling == scaling]
        for number, (mode, bucket_mb) in enumerate(modes):
            draw_mode(axes, of_panel, mode, bucket_mb, number)
        axes.axhline(1, color="#404040", linewidth=1, linestyle=":")
        axes.set(ylim=(0, None), xlabel="ranks", ylabel=f"{scaling} scaling: efficiency")
        log_axis(axes.xaxis, sorted({row.world_size for row in rows}))
    # Below all panels: above one of them, a wide legend would take the room of the others.
    chart.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside lower left",
        ncols=6,
        fontsize=8,
        frameon=False,
        title="Measured (markers) and predicted (shaded)",
        title_fontsize=10,
        alignment="left",
    )
    return chart


def draw_mode(
    axes: Axes, rows: list[ScalingStudyRow], mode: str, bucket_mb: float | None, number: int
) -> None:
    """The rows of a mode and bucket size, and the base of one rank, by ranks; number: of its
    color."""
    from analysis.report.palette import series

    color, marker, dashes = series(number)
    drawn = []
    for row in rows:
        of_mode = (row.parallel, row.bucket_mb) == (mode, bucket_mb)
        if (row.parallel is None or of_mode) and row.efficiency is not None:
            drawn.append(row)
    drawn.sort(key=lambda row: row.world_size)
    ranks = [row.world_size for row in drawn]
    efficiency = np.array([row.efficiency for row in drawn])
    intervals = [row.efficiency_95 or (row.efficiency, row.efficiency) for row in drawn]
    low, high = np.array(intervals).reshape(-1, 2).T
    axes.errorbar(
        ranks,
        efficiency,
        yerr=np.maximum(0, [efficiency - low, high - efficiency]),
        label=mode if bucket_mb is None else f"{mode}, {bucket_mb:g} MB",
        color=color,
        marker=marker,
        linestyle=dashes,
        markersize=5,
        capsize=3,
    )
    predicted = [row for row in drawn if row.predicted_efficiency]
    axes.fill_between(
        [row.world_size for row in predicted],
        [row.predicted_efficiency[0] for row in predicted],
        [row.predicted_efficiency[1] for row in predicted],
        color=color,
        alpha=0.12,
        linewidth=0,
    )
