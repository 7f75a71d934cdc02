"""Baseline and changed step, timed by the right method and by five wrong ones, with the conclusion
from each."""

import shlex
from dataclasses import fields, replace

from harness.base.errors import UserError
from harness.documents.comparisons import TimingStudyRow
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
from studies.timing import results
from studies.timing.methods import METHODS, NO_WARM_UP, cold_steps, interleaved
from tiny_llama_v1 import TinyLlamaWorkload


class TimingStudy(Study):
    name, row_type, key = "timing_study", TimingStudyRow, ("method",)
    results, predicts = results, False

    @staticmethod
    def add_flags(flags: Flags) -> None:
        text = (
            "flags of tiny_llama_v1.py that the changed step has in addition to the baseline's"
            " (%(default)s)"
        )
        flags.add("--change", metavar="FLAGS", default="--activation-checkpointing", help=text)
        flags.size()
        flags.tokens()
        flags.samples()
        text = "steps of each, interleaved, for the right method (%(default)s)"
        flags.count("--repetitions", text, default=ByDevice(50, 10))
        text = "steps of each for the wrong methods, except `one run` (%(default)s)"
        flags.count("--wrong-method-repetitions", text, minimum=2, default=5)
        flags.count("--warmup-steps", "warm-up steps of each (%(default)s)", default=2)

    def prepare(self) -> None:
        """Raises UserError if the change does not affect a step, or is compilation."""
        self.args.change = shlex.split(self.args.change)
        self.change = shlex.join(self.args.change)
        one_rank = "the study's steps have one rank; leave it out"
        not_here = {one.name: one_rank for one in fields(ParallelConfig)}
        check_step_flags("--change", self.args.change, not_here)
        settings = {
            name: getattr(self.args, name) for name in ("device", "size", "batch_size", "seq_len")
        }
        self.baseline, self.changed = (
            workload_of(**settings),
            workload_of(self.args.change, **settings),
        )
        if step_of(self.baseline) == step_of(self.changed):
            raise UserError(
                f"--change {self.change}: does not change the step; try --activation-checkpointing",
                2,
            )
        if self.changed.compiled:
            text = "compiling is not part of a step; run_training_benchmark.py --compile times both"
            raise UserError(f"--change --compile: {text}", 2)
        self.device.check_precisions([self.changed.precision])
        check_device_has_flags("--change", self.changed, self.device.on_gpu)
        if not self.device.on_gpu:
            self.args.notes.append(
                "No GPU: in `no synchronization` a worker thread takes the role of the device"
            )

    def cells(self) -> list[Cell]:
        """All methods but one are measured in the same process, which that one needs for itself."""
        in_one_process = [{"method": method} for method in METHODS if method != NO_WARM_UP]
        return [Cell(rows=in_one_process), Cell(rows=[{"method": NO_WARM_UP}])]

    def measure(self, cell: Cell) -> list[dict]:
        args = self.args
        if cell.rows == [{"method": NO_WARM_UP}]:
            outcome, times_ms = self.measure_cold()
        else:
            counts = (args.repetitions, args.wrong_method_repetitions, args.warmup_steps)
            outcome, times_ms = self.measure_in_process(
                None, interleaved, self.baseline, self.changed, *counts
            )
        if times_ms is None:
            return [row | outcome for row in cell.rows]
        return [
            row | outcome | results.reported(row["method"], *times_ms[row["method"]])
            for row in cell.rows
        ]

    def measure_cold(self) -> tuple[dict, dict | None]:
        """Each of the two in a process of its own."""
        both = []
        for workload in (self.baseline, self.changed):
            outcome, times_ms = self.measure_in_process(
                None, cold_steps, workload, self.args.wrong_method_repetitions
            )
            if times_ms is None:
                return outcome, None
            both.append(times_ms)
        return outcome, {NO_WARM_UP: both}

    def report(self) -> Report:
        from studies.timing.figure import timing_figure

        order = list(METHODS)
        self.sweep.rows = sorted(
            results.with_conclusions(self.rows), key=lambda row: order.index(row["method"])
        )
        figure, right = None, self.rows[0]
        if right["status"] == "ok":
            about = self.baseline.title_on(self.device.name)
            figure = timing_figure(self.measured, results.interval_of(right), self.change, about)
        finding, sections = (
            results.finding(self.rows, self.change),
            results.sections(self.rows, self.change),
        )
        return Report(finding, sections, figure, {"methods": METHODS})


def step_of(workload: TinyLlamaWorkload) -> TinyLlamaWorkload:
    """The workload without the settings that do not affect a step."""
    training = replace(workload.training, num_steps=1, log_interval=1, output_dir=None, force=False)
    return replace(workload, training=training)
