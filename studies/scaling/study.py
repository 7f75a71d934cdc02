"""Weak and strong scaling over numbers of ranks, modes and bucket sizes, beside the prediction; and
inserted faults."""

import itertools
import shlex
from dataclasses import asdict, replace

from analysis.prediction.network import Network, measured_network, network_of, why_not_measured
from harness.base.command_line import network_choice, number_of
from harness.base.errors import UserError
from harness.base.sections import Section
from harness.base.text import count_of
from harness.documents.comparisons import ScalingStudyRow
from harness.machine.host_limits import usable_cores
from harness.model.workload import check_shards
from harness.ranks.parallel import ParallelConfig
from studies.engine.command_line import (
    ByDevice,
    Flags,
    check_device_has_flags,
    check_step_flags,
    workload_of,
)
from studies.engine.report import Report
from studies.engine.study import Study
from studies.engine.sweep import Cell
from studies.scaling import columns, results
from studies.scaling.faults import FAULTS
from studies.scaling.rank_steps import measure_steps
from tiny_llama_v1 import TinyLlamaWorkload

MODES = ["ddp", "zero1", "fsdp"]
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


class ScalingStudy(Study):
    name, row_type, key, results = "scaling_study", ScalingStudyRow, columns.KEY, results
    predicted_column = "predicted_memory_bytes"

    @staticmethod
    def add_flags(flags: Flags) -> None:
        text = (
            "ranks of this machine; the fewest are the base (powers of two: of its GPUs; on a CPU 1"
            " 2, with four "
        )
        flags.count("--world-sizes", f"{text}cores 4)", metavar="W", nargs="+")
        flags.choices(
            "--parallel-modes", f"{', '.join(MODES)} (all)", MODES, metavar="MODE", default=MODES
        )
        text = "weak: --batch-size is that of each rank; strong: of all ranks together (both)"
        flags.choices("--scalings", text, SCALINGS, default=SCALINGS)
        text = "sizes of the buckets of ddp and zero1, in MB (PyTorch's)"
        flags.add(
            "--bucket-mbs", type=number_of(float, 0), nargs="+", metavar="MB", default=[], help=text
        )
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
        if args.world_sizes[-1] < 2:
            raise UserError(
                f"--world-sizes {args.world_sizes[-1]}: scaling needs two ranks or more", 2
            )
        if args.bucket_mbs and not {*columns.WITH_BUCKETS} & {*args.parallel_modes}:
            raise UserError(
                "--bucket-mbs: has no effect with --parallel-modes fsdp; add ddp or zero1", 2
            )
        for fault in args.faults:
            if (mode := FAULTS[fault].parallel) not in args.parallel_modes:
                raise UserError(
                    f"--faults {fault}: is compared with {mode}; add it to --parallel-modes", 2
                )
        if args.faults and args.bucket_mbs:
            raise UserError(
                "--faults: are compared with buckets of PyTorch's size; leave out --bucket-mbs", 2
            )
        self.check_flags()
        self.network = self.network_of_study()

    def check_flags(self) -> None:
        """Raise UserError for one of --flags that the steps of the study would not have."""
        args = self.args
        check_step_flags("--flags", shlex.split(args.flags), SET_BY_THE_STUDY)
        if args.bucket_mbs:
            not_here = {"bucket_mb": "--bucket-mbs sets it; leave one of the two out"}
            check_step_flags("--flags", shlex.split(args.flags), not_here)

    def network_of_study(self) -> Network | None:
        """That of --network; without the flag the measured one, if there is one.  Without base,
        none is of use."""
        args, environment = self.args, self.device.environment
        if args.dry_run:
            return None
        network = (
            network_of(args.network, environment) if args.network else measured_network(environment)
        )
        if network is None:
            args.notes.append(f"No efficiency is predicted: {why_not_measured(environment)}")
        else:
            source = network.source_for(max(args.world_sizes))
            args.notes.append(f"Predicted efficiency: {network.gb_per_sec:,.3g} GB/s, {source}")
        return network

    # ---- Which launches --------------------------------------------------------------------------

    def cells(self) -> list[Cell]:
        """The rounds are interleaved, so that drift of the machine affects all rows."""
        launches = self.launches()
        self.workload = launches[0].workload  # for titles
        check_device_has_flags("--flags", self.workload, self.predicts_gpu)
        if not self.args.dry_run:
            self.device.check_precisions([self.workload.precision], "--flags: --precision")
        if not self.device.on_gpu and not self.args.dry_run:
            cores = count_of(len(usable_cores()), "core")
            alone = (
                "they share its memory and caches and cross no network, so their efficiency is not"
                " that of nodes"
            )
            self.args.notes.append(
                f"gloo ranks with one thread each on {cores} of one machine: {alone}"
            )
        self.args.notes.append(f"Base of efficiency: {self.base_text()}")
        rounds = 1 if self.args.dry_run else self.args.repetitions
        return [replace(launch, round=n) for n in range(rounds) for launch in launches]

    def base_text(self) -> str:
        fewest = self.args.world_sizes[0]
        return count_of(fewest, "rank") + ("" if fewest == 1 else " of the same mode")

    def launches(self) -> list[Cell]:
        """Ranks that train together: those of a round.
        The base has a row for each kind of scaling."""
        args, launches = self.args, []
        ranks = [world_size for world_size in args.world_sizes if world_size > 1]
        if 1 in args.world_sizes:  # the same step is the base of both kinds of scaling
            rows = [key_of_row(scaling, None, 1, None) for scaling in args.scalings]
            launches.append(self.launch_of(rows, args.parallel_modes[0]))
        for scaling, world_size, mode in itertools.product(
            args.scalings, ranks, args.parallel_modes
        ):
            for bucket_mb in (
                (args.bucket_mbs or [None]) if mode in columns.WITH_BUCKETS else [None]
            ):
                launches.append(
                    self.launch_of([key_of_row(scaling, mode, world_size, bucket_mb)], mode)
                )
        for fault in args.faults:
            mode = FAULTS[fault].parallel
            row = key_of_row(args.scalings[0], mode, args.world_sizes[-1], None, fault)
            launches.append(self.launch_of([row], mode))
        return launches

    def launch_of(self, rows: list[dict], mode: str) -> Cell:
        workload = self.workload_of_row(rows[0], mode)
        check_shards(workload)
        return Cell(rows=rows, workload=workload)

    def workload_of_row(self, row: dict, mode: str) -> TinyLlamaWorkload:
        """The workload of a rank.  Raises UserError for flags or a batch that it cannot have."""
        args, world_size = self.args, row["world_size"]
        settings = {
            name: getattr(args, name) for name in ("size", "seq_len", "batch_size", "device")
        }
        settings |= {"bucket_mb": row["bucket_mb"], "parallel": mode, "dry_run": True}
        workload = workload_of(shlex.split(args.flags), world_size=max(2, world_size), **settings)
        whole, parallel = workload.batch_size, workload.parallel
        if (parallel.parallel, parallel.world_size) != (
            mode,
            max(2, world_size),
        ) or workload.compiled:
            raise UserError(
                f"--flags {args.flags}: the study varies modes and ranks itself, and compiles"
                " nothing",
                2,
            )
        if row["scaling"] == "strong" and whole % world_size:
            text = f"not divisible by {world_size} ranks, which strong scaling requires"
            raise UserError(f"--batch-size {whole}: {text}", 2)
        if row["scaling"] == "strong":
            workload = workload.with_settings(batch_size=whole // world_size)
        if world_size == 1:
            workload = workload.with_settings(**asdict(ParallelConfig()))
        return workload.with_settings(**FAULTS[row["fault"]].settings) if row["fault"] else workload

    # ---- Measurement -----------------------------------------------------------------------------

    def measure(self, cell: Cell) -> list[dict]:
        """The rows with one more launch."""
        workload, world_size = cell.workload, cell.workload.parallel.world_size
        prediction, fault = self.prediction_of(cell), cell.rows[0]["fault"]
        work = (measure_steps, workload, self.args.num_steps, self.args.warmup_steps, fault)
        peak = prediction["predicted_memory_bytes"]
        outcome, ranks = self.measure_on_ranks(
            peak, world_size, *work, precision=workload.precision
        )
        rows = []
        for key in cell.rows:
            row = (
                columns.columns_before(key, workload.batch_size, self.args.world_sizes[0])
                | prediction
                | outcome
            )
            if ranks is not None:
                earlier = self.sweep.known(
                    key
                )  # the row of the launches before, which were measured
                row |= columns.disturbance_so_far(outcome, earlier)
                row |= columns.measured_columns(ranks, workload.seq_len, earlier)
            rows.append(row)
        return rows

    def prediction_of(self, launch: Cell) -> dict:
        """The predicted columns: those of an earlier round, if there was one."""
        before = self.sweep.known(launch.rows[0])
        if before is None:
            return self.predict(
                columns.predicted_columns,
                launch.workload,
                self.predicts_gpu,
                launch.rows[0]["fault"],
            )
        return {
            name: value
            for name, value in before.items()
            if name.removesuffix("_reason") in columns.PREDICTED
        }

    # ---- Reporting -------------------------------------------------------------------------------

    def table(self, rows: list[dict]) -> Section:
        return results.table(results.with_conclusions(rows, self.network))

    def report(self) -> Report:
        from studies.scaling.figure import scaling_figure

        self.sweep.rows = [
            self.sweep.completed(row) for row in results.with_conclusions(self.rows, self.network)
        ]
        of_faults, figure = results.verdicts(self.rows), None
        if plain := [row for row in self.measured if row["fault"] is None]:
            about = self.workload.title_on(self.device.name)
            figure = scaling_figure(plain, f"{about}; base: {self.base_text()}")
        return Report(
            self.finding(results.finding, of_faults),
            [
                *results.fault_sections(of_faults),
                results.table(self.rows),
                results.communication_section(self.rows),
            ],
            figure,
            {"verdicts": of_faults},
        )


def key_of_row(
    scaling: str, mode: str | None, ranks: int, bucket_mb: float | None, fault: str | None = None
) -> dict:
    return dict(zip(columns.KEY, (scaling, mode, ranks, bucket_mb, fault), strict=True))
