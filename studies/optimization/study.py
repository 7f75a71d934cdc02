"""The ladder of optimizations, each alone and one on top of another, in turn, beside transformers'
LLaMA.

Every size and precision is profiled once, for what the baseline's trace allows.  Then one process
has them all, as far as memory permits, and each takes one step in every round.
"""

import itertools
from argparse import BooleanOptionalAction
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from analysis.hardware import cache
from harness.base.command_line import require
from harness.base.documents import read_document, read_or_leave_out
from harness.base.errors import UserError
from harness.base.text import slug
from harness.documents.comparisons import OptimizationStudyRow
from harness.documents.trace import OperatorAnalysis
from harness.instruments.schedule import ProfilerConfig
from harness.model.workload import Workload
from studies.engine.columns import predicted_peak
from studies.engine.command_line import ByDevice, Flags, precisions_of, workload_of
from studies.engine.isolation import run_script
from studies.engine.report import Report
from studies.engine.study import Study
from studies.engine.sweep import FINISHED_STATUSES, Cell
from studies.optimization import results
from studies.optimization.groups import Candidate, groups_that_fit, rows_of_group
from studies.optimization.reference import MISSING, reference_of, reference_title
from studies.optimization.rungs import (
    NAMES,
    flag_sets,
    names_for,
    not_here,
    predicted_ratio,
    why_no_rung,
)
from studies.optimization.turns import take_turns
from tiny_llama_v1 import TinyLlamaWorkload

LISTS = {"rows": lambda row: not results.is_reference(row), "reference": results.is_reference}
SHAPE = results.KEY[:-1]  # of a ladder
PROFILED = ProfilerConfig(
    enable_pytorch_profiler=True, warmup_steps=1, profile_steps=2, profile_memory=True
)


@dataclass(kw_only=True)
class Ladder(Cell):
    """All sets of flags of a size and precision, the baseline first."""

    candidates: list[Candidate]


class OptimizationStudy(Study):
    name, row_type, key, results = "optimization_study", OptimizationStudyRow, results.KEY, results
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

    def cells(self) -> list[Ladder]:
        args = self.args
        pairs = itertools.product([None] if args.workload else args.sizes, args.precisions)
        self.ladders = cells = [self.ladder_of(size, precision) for size, precision in pairs]
        self.check_rungs(cells)
        with_reference = any(results.is_reference(row) for cell in cells for row in cell.rows)
        if args.reference and not args.workload and not with_reference:
            args.notes.append(MISSING)
        return cells

    def check_rungs(self, ladders: list[Ladder]) -> None:
        """Raise UserError for one that was asked for and is in none of the ladders."""
        candidates = list(itertools.chain.from_iterable(ladder.candidates for ladder in ladders))
        measured = {rung.name for candidate in candidates for rung in candidate.rungs}
        for name in self.asked_rungs:
            if name not in measured:
                raise UserError(
                    f"--rungs {name}: {why_no_rung(name, candidates[0].workload)}; leave it out", 2
                )

    def ladder_of(self, size: str | None, precision: str) -> Ladder:
        """size: None for --workload."""
        args = self.args
        settings = {
            name: getattr(args, name) for name in ("workload", "batch_size", "seq_len", "device")
        }
        settings |= {"size": size, "precision": precision}
        baseline = workload_of(**settings)
        values = (
            size or Path(args.workload).name,
            baseline.seq_len,
            baseline.batch_size,
            baseline.precision,
        )
        shape = dict(zip(SHAPE, values, strict=True))
        candidates = []
        for flag_set in flag_sets(names_for(baseline, args.rungs), baseline.precision):
            row = shape | {"flags": flag_set.flags, "ladder": flag_set.ladder}
            candidates.append(
                Candidate(row, workload_of(flag_set.flags.split(), **settings), flag_set.rungs)
            )
        if args.reference and size and (reference := reference_of(baseline, self.device.on_gpu)):
            row = shape | {"flags": reference_title(reference), "ladder": None}
            candidates.insert(
                max(1, len(candidates) - 1), Candidate(row, reference)
            )  # below the top of the ladder
        return Ladder(
            rows=[one.row for one in candidates], candidates=candidates, work=work_of(candidates)
        )

    # ---- Measurement -----------------------------------------------------------------------------

    def measure(self, cell: Ladder) -> list[dict]:
        """The rows of every process are kept as soon as it ends."""
        self.predict_rows(cell.candidates)
        baseline, *_ = cell.candidates
        todo = [
            candidate for candidate in cell.candidates if self.is_to_measure(candidate, baseline)
        ]
        for group in groups_that_fit(todo, baseline, self.available_bytes):
            rows = rows_of_group(self.measure_in_turn, group)
            self.sweep.keep([row for row in rows if not is_finished(self.sweep.known(row))])
            self.sweep.write()
        return [self.sweep.known(candidate.row) or candidate.row for candidate in cell.candidates]

    def predict_rows(self, candidates: list[Candidate]) -> None:
        """Memory of each, and the ratio that the baseline's trace allows."""
        peaks = self.predict(
            predicted_peaks, [one.workload for one in candidates], self.predicts_gpu
        )
        for candidate, peak in zip(candidates, peaks, strict=True):
            candidate.row = candidate.row | peak
        analysis = None if self.args.dry_run else self.profile_of(candidates[0])
        for candidate in candidates:
            candidate.row |= predicted_ratio(candidate.rungs, analysis)

    def is_to_measure(self, candidate: Candidate, baseline: Candidate) -> bool:
        """Whether its row is not finished, and nothing speaks against measuring it, which its row
        then says."""
        row, workload = candidate.row, candidate.workload
        if is_finished(before := self.sweep.known(row)):
            row["status"] = before["status"]
        elif why := not_here(workload, self.device) or self.slower_type(
            workload, baseline.workload
        ):
            row |= {"status": "skipped", "reason": why}
        elif skipped := self.skipped(row["predicted_memory_bytes"], workload.precision):
            row |= skipped
        return "status" not in row

    def slower_type(self, workload: Workload, baseline: Workload) -> str | None:
        """Why another precision is not worth its time: a CPU without its arithmetic may take 25
        times as long."""
        if (
            self.device.on_gpu
            or self.args.dry_run
            or self.args.force
            or workload.precision == baseline.precision
        ):
            return None
        gain = cache.measured(self.device.environment["device"], workload.precision, "gain")
        if gain is None or gain.rate >= 1:
            return None
        return (
            f"{workload.precision} is {gain.rate:.2g} times as fast as fp32 here: {gain.source};"
            " --force runs it"
        )

    def profile_of(self, baseline: Candidate) -> dict:
        """operator_analysis.json of the baseline, from a run of its own; without opportunities if
        there is none."""
        row, workload = baseline.row, baseline.workload
        folder = self.sweep.folder / slug("profile", row["size"], row["precision"])
        # Of a sweep that is resumed; one that cannot be read is made again.
        analysis = read_or_leave_out(folder / "operator_analysis.json", OperatorAnalysis, [])
        if analysis is None:
            steps = PROFILED.warmup_steps + PROFILED.profile_steps + 1
            work = (
                run_script,
                workload.with_settings(num_steps=steps, force=self.args.force),
                PROFILED,
                folder,
            )
            peak = row["predicted_memory_bytes"]
            self.while_waiting(f"{row['size']} {row['precision']}: profiling the baseline")
            outcome, _ = self.measure_in_process(peak, *work, precision=workload.precision)
            analysis = read_document(folder / "operator_analysis.json")
        if analysis is None:
            why = f"the baseline was not profiled: {outcome['reason']}"
            return {"opportunities": [], "not_here": [], "opportunities_reason": why}
        return analysis

    def measure_in_turn(self, group: list[Candidate]) -> tuple[dict, list[dict] | None]:
        workloads, names = (
            [one.workload for one in group],
            [one.row["flags"] or "baseline" for one in group],
        )
        of_study = itertools.chain.from_iterable(cell.candidates for cell in self.ladders)
        left = [one for one in of_study if not (self.sweep.known(one.row) or one.row.get("status"))]
        after = max(
            0.0, work_of(left) / work_of(group) - 1
        )  # in times of this group, which is among them
        work = (take_turns, workloads, self.args.repetitions, self.args.warmup_steps, names, after)
        return self.measure_in_process(None, *work)

    # ---- Reporting -------------------------------------------------------------------------------

    def report(self) -> Report:
        from studies.optimization.figure import optimization_figure

        name = self.device.name
        figure = (
            optimization_figure(results.ladders(self.measured), name) if self.measured else None
        )
        finding = self.finding(
            results.finding, name, label=lambda row: f"{results.label(row)} {row['flags']}"
        )
        return Report(finding, [results.table(self.rows)], figure)


def work_of(candidates: Sequence[Candidate]) -> float:
    """By the FLOPs of a step of each; of a user's file, all of one size, by their number."""
    return sum(
        one.workload.step_flops() if isinstance(one.workload, TinyLlamaWorkload) else 1.0
        for one in candidates
    )


def is_finished(row: dict | None) -> bool:
    return row is not None and row["status"] in FINISHED_STATUSES


def predicted_peaks(workloads: Sequence[Workload], on_gpu: bool) -> list[dict]:
    return [predicted_peak(workload, on_gpu, "predicted_memory_bytes") for workload in workloads]
