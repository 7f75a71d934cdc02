"""What a run prints and writes, however it ends: step lines, summary, files, TensorBoard events."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from harness.base.console import file_lines, say
from harness.base.errors import UserError, deferred_signals
from harness.base.files import files_of_run, make_folder, prepare_folder, write_figure, write_json
from harness.base.sections import as_text
from harness.base.text import tensorboard_command
from harness.instruments.audit import RateLimit
from harness.instruments.schedule import InstrumentSchedule, ProfilerConfig
from harness.instruments.timing import StepRecord
from harness.model.workload import Workload
from harness.ranks.distributed import suffix_of_rank, when_stuck
from harness.run.announcement import device_lines, profiling_lines, sharing_lines, workload_lines
from harness.run.event_file import EventFile
from harness.run.run_summary import Measurements, summarize
from harness.run.run_text import steps_section, summary_lines, trust_lines


class RunFolder:
    """--output-dir, or with an instrument --profile-dir; without either nothing is written, and
    `path` is None.

    Traces have a folder of their own only if both are given.
    """

    def __init__(self, output_dir: str | None, profiling: ProfilerConfig):
        profiles = (profiling.profile_dir or "./pytorch_profiles") if profiling.enabled else None
        self.path = Path(output_dir or profiles) if output_dir or profiles else None
        self.traced = profiling.records_trace
        self.traces = (
            Path(profiling.profile_dir)
            if profiling.enabled and profiling.profile_dir
            else self.path
        )

    def prepare(self, rank: int) -> None:
        """Rank 0 moves an earlier run aside.  Raises UserError if a folder cannot be written."""
        if self.path is None:
            return
        if rank != 0:
            make_folder(self.path)  # found now rather than after training: nodes need not share it
            return
        for folder in dict.fromkeys((self.path, self.traces)):
            prepare_folder(folder)

    def write(self, name: str, document: dict | None) -> None:
        if self.path and document:
            write_json(self.path / name, document)

    def lines(self, verbose: bool) -> list[str]:
        """What the run has left, and how to open it."""
        if self.path is None:
            return []
        lines = file_lines(files_of_run(*dict.fromkeys((self.path, self.traces))), verbose)
        # Where there is a trace, a command ends with its answer, which tells this too.
        return lines if self.traced else [*lines, f"TensorBoard: {tensorboard_command(self.path)}"]


class Explanation(NamedTuple):
    """The result of one instrument: a JSON file, lines to print after and before the result of the
    run, and perhaps a figure, a PNG of the same name."""

    file_name: str
    document: dict | None
    lines: Sequence[str]
    before: Sequence[str] = ()
    figure: Any = None


class RunReport:
    """The console, the folder and the event file of one run of a workload.
    Only rank 0 prints and writes."""

    def __init__(
        self,
        workload: Workload,
        profiling: ProfilerConfig,
        schedule: InstrumentSchedule,
        device: torch.device,
        ranks: tuple[int, int] = (0, 1),
        *,
        log_interval: int = 1,
        output_dir: str | None = None,
        verbose: bool = False,
    ):
        """ranks: this rank and the world size.  verbose: print tables too."""
        self.workload, self.profiling, self.schedule, self.device = (
            workload,
            profiling,
            schedule,
            device,
        )
        self.rank, self.world_size = ranks
        self.log_interval, self.verbose = log_interval, verbose
        self.config = workload.settings() | {"profiling": asdict(profiling)}
        self.folder = RunFolder(output_dir, profiling)
        self.events: EventFile | None = None
        self.measurements = Measurements(
            workload, self.config, schedule, device, ranks, self.prints, self.on_record
        )

    # ---- Before the first step -------------------------------------------------------------------

    def open(self) -> None:
        """Create the folder and config.json."""
        when_stuck(self.write_summary)
        self.folder.prepare(self.rank)
        if self.rank != 0 or self.folder.path is None:
            return
        document = self.config | {"environment": self.measurements.environment}
        self.folder.write("config.json", document)
        samples = self.workload.batch_size * self.world_size
        self.events = EventFile(self.folder.path, samples, self.workload.seq_len)
        self.events.add_texts(document)

    def announce(self) -> None:
        """Print what is about to run, and on which device."""
        say(*workload_lines(self.workload, self.profiling, self.device), "")
        say(
            *device_lines(self.measurements.environment),
            *sharing_lines(self.workload, self.world_size),
        )
        say(*profiling_lines(self.schedule, self.folder.traces if self.profiling.enabled else None))
        say("", "Starting training...")

    # ---- Step by step ----------------------------------------------------------------------------

    def prints(self, step: int) -> bool:
        return step % self.log_interval == 0 or step in (1, self.schedule.num_steps)

    def on_record(self, record: StepRecord) -> None:
        if self.prints(record.step):
            mark = (
                " [PROFILING]" if self.schedule.exclusion_reason(record.step) == "profiled" else ""
            )
            line = f"Step {record.step}/{self.schedule.num_steps}: Loss = {record.loss:.4f}"
            norm = "" if record.grad_norm is None else f", Gradient norm = {record.grad_norm:.4f}"
            say(f"{line}, Time = {record.total_ms / 1e3:.3f} seconds{mark}{norm}")
        record.memory_bytes = self.measurements.sampler.memory_bytes[-1]
        if self.events:
            self.events.add_step(record)

    # ---- After the last step ---------------------------------------------------------------------

    def close(
        self,
        error: BaseException | None,
        explain: Callable[[dict], Iterable[Explanation]],
        conclude: Callable[[dict], str],
        limit: RateLimit,
    ) -> dict | None:
        """After the last step, or the error that ended the run: write the files, print the summary
        and return it; None on ranks that print nothing.

        explain(summary) yields the results of the instruments; conclude(summary) is the last line
        of the summary; limit is a rate above which a step cannot have done its work.  Raises
        UserError if a file cannot be written.
        """
        self.measurements.rate_limit = limit
        with contextlib.suppress(
            FloatingPointError, RuntimeError
        ):  # the original error takes precedence
            self.measurements.meter.read_finished(wait=True)
        if self.rank != 0:
            with deferred_signals():
                self.write_summary(error)
            return None
        summary = summarize(self.measurements, error)
        basis, lines = (
            as_text(steps_section(summary, detailed=self.verbose)),
            summary_lines(summary),
        )
        explained, figures = [], {}
        try:
            with deferred_signals():  # a signal may interrupt what follows, but not this write
                self.write_summary(error)
            for found in explain(summary):
                self.folder.write(found.file_name, found.document)
                explained += ["", *found.lines] if found.lines else []
                basis += found.before
                if found.figure is not None:
                    figures[Path(found.file_name).stem] = found.figure
            if summary["training"]["completed_steps"]:
                lines.append(
                    conclude(summary)
                )  # an explanation may have measured the peak that it names
            if self.events:
                for name, figure in figures.items():
                    write_figure(self.folder.path / f"{name}.png", figure)
                self.events.close(summary, figures)
            basis += self.folder.lines(self.verbose)
        except UserError as failure:
            if error is None:
                self.folder.write(
                    "performance_summary.json",
                    summary | {"status": "failed", "error": str(failure)},
                )
            raise
        finally:
            say(*basis, *lines, *explained, *trust_lines(summary))
        return summary

    def write_summary(self, error: BaseException | None) -> None:
        """performance_summary.json; of another rank than 0, with its number in the name."""
        suffix = suffix_of_rank(self.rank, self.world_size) if self.rank else ""
        self.folder.write(f"performance_summary{suffix}.json", summarize(self.measurements, error))
