"""Latency and bandwidth of all-reduce and other collectives, by bytes and ranks."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

import numpy as np
import torch
from typing_extensions import NotRequired

from analysis.prediction.network import BACKENDS, fitted, keep_network
from analysis.work.sent_bytes import sent_share
from harness.base.command_line import byte_count
from harness.base.errors import UserError
from harness.base.sections import Section
from harness.base.tables import column, grouped
from harness.base.units import KB
from harness.instruments.phases import summary_stats
from harness.machine.clock import time_synced
from harness.machine.devices import synchronize
from harness.machine.disturbance import DisturbanceMeter
from harness.run.run_summary import ONE_STEP
from harness.schema import Document, field
from studies.engine.columns import optional, status_column
from studies.engine.command_line import ByDevice, Flags
from studies.engine.isolation import tell
from studies.engine.ranks import RankContext
from studies.engine.report import Report
from studies.engine.rows import NOT_MEASURED, SweepDocument, SweepRow
from studies.engine.study import SweepStudy
from studies.engine.sweep import Cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
IN_FIT = ("all_reduce", "all_gather", "reduce_scatter")  # of all kinds: their bandwidths compare
FACTOR = 4  # from one size to the next
CALLS = 5  # back to back in each repetition
ITEM = 4  # bytes of fp32


# ---- The document --------------------------------------------------------------------------------


class CollectiveBenchmarkRow(SweepRow):
    key = ("kind", "world_size", "bytes")

    kind: str = field("all_reduce, all_gather, reduce_scatter, broadcast")
    world_size: int = field("ranks")
    bytes: int = field("of the larger of input and output")
    repetitions: int | None = field("each of several calls", null=NOT_MEASURED)
    time_us: float | None = field(
        "of a call on the slowest rank, median of the repetitions", null=NOT_MEASURED
    )
    time_std_us: float | None = field("sample standard deviation", null=ONE_STEP)
    algorithm_bandwidth_gb_per_sec: float | None = field(
        "bytes / time, 10^9 bytes/s", null=NOT_MEASURED
    )
    bus_bandwidth_gb_per_sec: float | None = field(
        "bytes that a rank sends at least / time", null=NOT_MEASURED
    )

    def label(self) -> str:
        return f"{self.world_size} ranks"

    def result(self) -> str:
        return f"{self.kind} of {self.bytes:,} bytes in {self.time_us:,.1f} us"

    @property
    def sent_bytes(self) -> float:
        """What a rank sends at least."""
        return sent_share(self.kind, self.world_size) * self.bytes


class CollectiveFit(Document):
    kind: NotRequired[str] = field("absent: all kinds but broadcast, on the most ranks")
    world_size: int = field("ranks")
    alpha_us: float = field("microseconds of a call, whatever its bytes")
    beta_gb_per_sec: float = field("bus bandwidth, 10^9 bytes/s")
    half_bytes: float = field(
        "sent bytes from which on latency is less than half of the time: alpha times beta"
    )
    residual: float = field("relative error of the fitted times, root mean square")


class CollectiveBenchmark(SweepDocument):
    rows: list[CollectiveBenchmarkRow] = field("by kind, ranks and bytes")
    fits: NotRequired[list[CollectiveFit]] = field("by kind and number of ranks")
    fit: NotRequired[CollectiveFit] = field("of all kinds but broadcast, on the most ranks")


# ---- The study -----------------------------------------------------------------------------------


class Study(SweepStudy):
    name = "collective_benchmark"
    row_type, document_type = CollectiveBenchmarkRow, CollectiveBenchmark
    predicts = False

    @staticmethod
    def add_flags(flags: Flags) -> None:
        text = f"{', '.join(COLLECTIVES)} (all)"
        flags.choices("--kinds", text, COLLECTIVES, "KIND", default=[*COLLECTIVES])
        text = (
            "ranks of this machine (powers of two: of its GPUs; on a CPU 2, and 4 with four cores)"
        )
        flags.count("--world-sizes", text, metavar="W", nargs="+")
        text = (
            "of the larger of input and output; each size is four times the one before"
            " (%(default)s)"
        )
        flags.add("--min-bytes", type=byte_count, metavar="N", default="1K", help=text)
        text, default = "K, M or G: 2^10 (%(default)s)", ByDevice("1G", "16M")
        flags.add("--max-bytes", type=byte_count, metavar="N", default=default, help=text)
        flags.count("--repetitions", "each of five calls (%(default)s)", default=ByDevice(20, 10))
        flags.count("--warmup-steps", "calls before them (%(default)s)", default=3)

    def prepare(self) -> None:
        args, device = self.args, self.device
        args.max_bytes = byte_count(str(args.max_bytes))
        args.world_sizes = sorted(args.world_sizes or device.default_world_sizes()[1:])
        if args.min_bytes > args.max_bytes:
            text = f"is more than --max-bytes {args.max_bytes}"
            raise UserError(f"--min-bytes {args.min_bytes}: {text}", 2)
        device.check_world_sizes(args.world_sizes, least=2)
        self.backend = BACKENDS[device.device.type]
        note = f"{self.backend} on one machine"
        if not device.on_gpu:
            note += ", one thread in each rank"
        args.notes.append(note)

    def cells(self) -> list[Cell]:
        return [self.cell_of(world_size) for world_size in self.args.world_sizes]

    def cell_of(self, world_size: int) -> Cell:
        """All kinds and sizes on so many ranks."""
        sizes, size = [], self.args.min_bytes
        while size <= self.args.max_bytes:
            sizes.append(size_on_ranks(size, world_size))
            size *= FACTOR
        rows = []
        for kind, size in itertools.product(self.args.kinds, dict.fromkeys(sizes)):
            rows.append(CollectiveBenchmarkRow(kind=kind, world_size=world_size, bytes=size))
        return Cell(rows=rows)

    def measure(self, cell: Cell) -> None:
        sizes = list(dict.fromkeys(row.bytes for row in cell.rows))
        input_and_output = 2 * sizes[-1]
        answers = self.measure_on_ranks(
            cell.rows,
            input_and_output,
            cell.rows[0].world_size,
            time_collectives,
            self.args.kinds,
            sizes,
            self.args.repetitions,
            self.args.warmup_steps,
        )
        if answers is None:
            return
        for row in cell.rows:
            fill_measured(row, [answer["times_us"][row.kind, row.bytes] for answer in answers])

    def table(self, rows: list[CollectiveBenchmarkRow]) -> Section:
        return table(rows)

    def report(self) -> Report:
        """And keep the fit for predictions."""
        fits, fit = fits_of(self.measured), common_fit(self.measured)
        sections, chart, document = [table(self.rows)], None, {"fits": fits}
        if fits:
            sections.insert(0, fit_section(fits))
            about = f"{self.backend}, on {self.device.name}"
            chart = figure(self.measured, fits, about)
        if fit is not None:
            document["fit"] = fit
            keep_network(self.device.environment["device"], self.kept(fits, fit))
        return Report(finding(fit, self.backend), sections, chart, document)

    def kept(self, fits: list[CollectiveFit], fit: CollectiveFit) -> dict:
        """What --network measured uses: the fits of the most ranks, and where they come from."""
        on_most = [by_kind for by_kind in fits if by_kind.world_size == fit.world_size]
        return {
            "fit": fit.as_json(),
            "fits": [by_kind.as_json() for by_kind in on_most],
            "world_size": fit.world_size,
            "host": self.device.environment["host"],
            "when": datetime.now().strftime("%Y-%m-%d %H:%M"),
            "disturbed": any(row.disturbed for row in self.measured),
        }


def size_on_ranks(size: int, world_size: int) -> int:
    """The largest number of bytes up to size that all ranks share evenly; one element each at
    least."""
    unit = ITEM * world_size
    return max(size // unit, 1) * unit


def fill_measured(row: CollectiveBenchmarkRow, times_us: Sequence[Sequence[float]]) -> None:
    """times_us: of a call, by rank and repetition; the slowest rank counts."""
    slowest = [max(of_ranks) for of_ranks in zip(*times_us, strict=True)]
    time_us = statistics.median(slowest)
    row.repetitions = len(slowest)
    row.time_us = time_us
    row.time_std_us = summary_stats(slowest)["std"]
    row.algorithm_bandwidth_gb_per_sec = row.bytes / time_us / 1e3
    row.bus_bandwidth_gb_per_sec = row.sent_bytes / time_us / 1e3


# ---- On every rank -------------------------------------------------------------------------------


def time_collectives(
    rank: RankContext, kinds: list[str], sizes: list[int], repetitions: int, warmup: int
) -> dict:
    """Microseconds of a call on this rank in each repetition, by kind and bytes, and how disturbed
    it was."""
    meter, times_us = DisturbanceMeter(rank.device), {}
    with meter.long_interval():
        for number, kind in enumerate(kinds, 1):
            if rank.rank == 0:
                tell(f"{number} of {len(kinds)}: {kind}")
            for size in sizes:
                call = collective(kind, size, rank)
                for _ in range(warmup):
                    call()
                times_us[kind, size] = [time_of_call(call, rank) for _ in range(repetitions)]
    return {"times_us": times_us, "disturbance": meter.document()}


def collective(kind: str, size: int, rank: RankContext) -> Callable[[], object]:
    """A function that calls it once.  size: bytes of the larger of input and output."""
    whole = torch.zeros(size // ITEM, device=rank.device)  # their sum stays 0
    part = whole[: len(whole) // rank.world_size].clone()
    group = torch.distributed
    return {
        "all_reduce": lambda: group.all_reduce(whole),
        "all_gather": lambda: group.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: group.reduce_scatter_tensor(part, whole),
        "broadcast": lambda: group.broadcast(whole, 0),
    }[kind]


def time_of_call(call: Callable[[], object], rank: RankContext) -> float:
    """Microseconds of a call, the mean over some that follow one another, as nccl-tests does it."""

    def calls() -> None:
        for _ in range(CALLS):
            call()

    synchronize(rank.device)
    torch.distributed.barrier()
    return 1e3 * time_synced(calls, rank.device) / CALLS


# ---- What the rows say together ------------------------------------------------------------------


def fits_of(measured: list[CollectiveBenchmarkRow]) -> list[CollectiveFit]:
    """alpha and beta of each kind and number of ranks that was measured at two sizes or more."""
    fits = []
    groups = grouped(measured, lambda row: (row.kind, row.world_size))
    for (kind, world_size), rows in groups.items():
        if len(rows) > 1:
            fits.append(CollectiveFit(kind=kind, world_size=world_size, **fitted_to(rows)))
    return fits


def common_fit(measured: list[CollectiveBenchmarkRow]) -> CollectiveFit | None:
    """The same of all kinds together, on the most ranks; None if too little was measured."""
    comparable = [row for row in measured if row.kind in IN_FIT] or measured
    most = max((row.world_size for row in comparable), default=0)
    on_most = [row for row in comparable if row.world_size == most]
    if len({row.bytes for row in on_most}) < 2:
        return None
    return CollectiveFit(world_size=most, **fitted_to(on_most))


def fitted_to(rows: list[CollectiveBenchmarkRow]) -> dict:
    """The fields of a fit to these rows."""
    return fitted([row.time_us for row in rows], [row.sent_bytes for row in rows])


def finding(fit: CollectiveFit | None, backend: str) -> list[str]:
    if fit is None:
        return ["No fit: it needs two sizes that were measured."]
    return [
        (
            f"On {fit.world_size} ranks a call takes {fit.alpha_us:,.3g} us and its bytes pass at"
            f" {fit.beta_gb_per_sec:,.3g} GB/s of bus bandwidth ({backend}; all kinds but"
            f" broadcast, off by {fit.residual:.0%}, root mean square)."
        ),
        f"Below {fit.half_bytes / KB:,.3g} KB sent, latency is more than half of the time.",
        "Kept for tiny_llama_v1.py --dry-run --world-size W --network measured.",
    ]


# ---- Tables and figure ---------------------------------------------------------------------------


def fit_section(fits: list[CollectiveFit]) -> Section:
    columns = (
        column("collective", "kind", left=True),
        column("ranks", "world_size"),
        column("alpha (us)", "alpha_us", ",.1f"),
        column("beta (GB/s)", "beta_gb_per_sec", ",.3g"),
        column("half of the time is latency at (KB sent)", "half_bytes", ",.1f", KB),
        column("error of the fit", "residual", ".0%"),
    )
    text = [
        "Fit: time of a call = alpha + bytes sent / beta.  Bytes sent, of n bytes on W ranks, as"
        " bus bandwidth counts: all-reduce 2 (W-1)/W n, all-gather and reduce-scatter (W-1)/W n,"
        " broadcast n."
    ]
    return Section("Latency and bus bandwidth of collectives, fitted", columns, fits, text)


def table(rows: list[CollectiveBenchmarkRow]) -> Section:
    columns = (
        column("collective", "kind", left=True),
        column("ranks", "world_size"),
        column("bytes", "bytes", ","),
        column("time (us)", "time_us", ",.1f"),
        *optional(column("std (us)", "time_std_us", ",.1f")),
        column("algorithm bandwidth (GB/s)", "algorithm_bandwidth_gb_per_sec", ",.3g"),
        column("bus bandwidth (GB/s)", "bus_bandwidth_gb_per_sec", ",.3g"),
        status_column(),
    )
    title = "Collectives: median time of a call, and bandwidth as nccl-tests defines it"
    return Section(title, columns, rows)


def figure(rows: list[CollectiveBenchmarkRow], fits: list[CollectiveFit], about: str) -> Figure:
    """Time of a call over its bytes, measured and fitted, and bus bandwidth; on the most ranks."""
    from analysis.report.figures.axes import legend, log_axis
    from analysis.report.palette import series
    from studies.engine.drawing import new_panels

    most = max(fit.world_size for fit in fits)
    title = f"Collectives on {most} ranks: time and bus bandwidth by bytes"
    chart, (left, right) = new_panels(4.2, title, about, 2)
    of_most = [fit for fit in fits if fit.world_size == most]
    for number, fit in enumerate(of_most):
        color, marker, dashes = series(number)
        style = {"color": color, "label": fit.kind}
        drawn = [row for row in rows if (row.kind, row.world_size) == (fit.kind, most)]
        size = np.array([row.bytes for row in drawn], float)
        rates = np.array([row.bus_bandwidth_gb_per_sec for row in drawn])
        sent = np.array([row.sent_bytes for row in drawn])
        fitted_us = fit.alpha_us + sent / fit.beta_gb_per_sec / 1e3
        left.plot(size, [row.time_us for row in drawn], marker, **style)
        left.plot(size, fitted_us, color=color, linewidth=1, linestyle=dashes)
        right.plot(size, rates, marker=marker, linewidth=1.2, linestyle=dashes, **style)
    for axes in (left, right):
        log_axis(axes.xaxis)
        log_axis(axes.yaxis)
        axes.set_xlabel("bytes of the larger of input and output")
    left.set_ylabel("time of a call (us)")
    right.set_ylabel("bus bandwidth (GB/s)")
    legend(left, "Measured (markers) and alpha + bytes / beta (lines)")
    return chart
