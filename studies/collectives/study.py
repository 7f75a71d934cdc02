"""Latency and bandwidth of the collectives of training, by bytes and ranks, and their fit alpha +
bytes / beta."""

import itertools
from datetime import datetime

from analysis.prediction.network import BACKENDS, keep_network
from harness.base.command_line import byte_count
from harness.base.errors import UserError
from harness.documents.comparisons import CollectiveBenchmarkRow
from studies.collectives import results
from studies.collectives.rank_timing import COLLECTIVES, size_on_ranks, time_collectives
from studies.engine.command_line import ByDevice, Flags
from studies.engine.report import Report
from studies.engine.study import Study
from studies.engine.sweep import Cell

FACTOR = 4  # from one size to the next


class CollectiveBenchmark(Study):
    name, row_type, key = (
        "collective_benchmark",
        CollectiveBenchmarkRow,
        ("kind", "world_size", "bytes"),
    )
    results, predicts = results, False

    @staticmethod
    def add_flags(flags: Flags) -> None:
        flags.choices(
            "--kinds",
            f"{', '.join(COLLECTIVES)} (all)",
            COLLECTIVES,
            "KIND",
            default=[*COLLECTIVES],
        )
        text = (
            "ranks of this machine (powers of two: of its GPUs; on a CPU 2, and 4 with four cores)"
        )
        flags.count("--world-sizes", text, metavar="W", nargs="+")
        text = (
            "of the larger of input and output; each size is four times the one before"
            " (%(default)s)"
        )
        flags.add("--min-bytes", type=byte_count, metavar="N", default="1K", help=text)
        default = ByDevice("1G", "16M")
        flags.add(
            "--max-bytes",
            type=byte_count,
            metavar="N",
            default=default,
            help="K, M or G: 2^10 (%(default)s)",
        )
        flags.count("--repetitions", "each of five calls (%(default)s)", default=ByDevice(20, 10))
        flags.count("--warmup-steps", "calls before them (%(default)s)", default=3)

    def prepare(self) -> None:
        args, device = self.args, self.device
        args.max_bytes = byte_count(str(args.max_bytes))
        args.world_sizes = sorted(args.world_sizes or device.default_world_sizes()[1:])
        if args.min_bytes > args.max_bytes:
            raise UserError(
                f"--min-bytes {args.min_bytes}: is more than --max-bytes {args.max_bytes}", 2
            )
        device.check_world_sizes(args.world_sizes, least=2)
        self.backend = BACKENDS[device.device.type]
        args.notes.append(
            f"{self.backend} on one machine"
            + ("" if device.on_gpu else ", one thread in each rank")
        )

    def cells(self) -> list[Cell]:
        return [self.launch_of(world_size) for world_size in self.args.world_sizes]

    def launch_of(self, world_size: int) -> Cell:
        """All kinds and sizes on so many ranks."""
        sizes, size = [], self.args.min_bytes
        while size <= self.args.max_bytes:
            sizes.append(size_on_ranks(size, world_size))
            size *= FACTOR
        pairs = itertools.product(self.args.kinds, dict.fromkeys(sizes))
        return Cell(
            rows=[{"kind": kind, "world_size": world_size, "bytes": size} for kind, size in pairs]
        )

    def measure(self, cell: Cell) -> list[dict]:
        sizes = list(dict.fromkeys(row["bytes"] for row in cell.rows))
        tensors = 2 * sizes[-1]  # input and output
        work = (
            time_collectives,
            self.args.kinds,
            sizes,
            self.args.repetitions,
            self.args.warmup_steps,
        )
        outcome, answers = self.measure_on_ranks(tensors, cell.rows[0]["world_size"], *work)
        if answers is None:
            return [row | outcome for row in cell.rows]
        times = [answer["times_us"] for answer in answers]
        return [row | outcome | results.measured_columns(row, times) for row in cell.rows]

    def report(self) -> Report:
        """And keep the fit for predictions."""
        from studies.collectives.figure import collectives_figure

        fits, fit, figure = results.fit_rows(self.measured), results.common_fit(self.measured), None
        if fits:
            figure = collectives_figure(
                self.measured, fits, f"{self.backend}, on {self.device.name}"
            )
        if fit:
            keep_network(self.device.environment["device"], self.kept(fits, fit))
        sections = (
            [results.fit_section(fits), results.table(self.rows)]
            if fits
            else [results.table(self.rows)]
        )
        document = {"fits": fits} | ({"fit": fit} if fit else {})
        return Report(results.finding(fit, self.backend), sections, figure, document)

    def kept(self, fits: list[dict], fit: dict) -> dict:
        """What --network measured uses: the fits of the most ranks, and where they come from."""
        return {
            "fit": fit,
            "fits": [row for row in fits if row["world_size"] == fit["world_size"]],
            "world_size": fit["world_size"],
            "host": self.device.environment["host"],
            "when": datetime.now().strftime("%Y-%m-%d %H:%M"),
            "disturbed": any(row["disturbed"] for row in self.measured),
        }
