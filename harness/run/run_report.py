"""What a run prints and writes, however it ends: step lines, summary, files, TensorBoard events."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from harness.base.console import file_lines, say
from harness.base.errors import UserError, deferred_signals
from harness.base.files import files_of_run, make_folder, prepare_folder, write_bytes, write_json
from harness.base.sections import as_text
from harness.base.text import tensorboard_command
from harness.instruments.audit import RateLimit
from harness.instruments.schedule import InstrumentSchedule, ProfilerConfig
from harness.instruments.timing import StepRecord
from harness.machine.setup_checks import profiler_warnings
from harness.model.workload import Workload
from harness.ranks.distributed import suffix_of_rank, when_stuck
from harness.run.announcement import device_lines, profiling_lines, sharing_lines, workload_lines
from harness.run.event_file import EventFile
from harness.run.measurements import Measurements
from harness.run.run_config import config_of, settings_of
from harness.run.run_summary import PerformanceSummary, summarize
from harness.run.run_text import steps_section, summary_lines, trust_lines
from harness.schema import Document, Unknown


class RunFolder:
    """--output-dir, or with an instrument --profile-dir; without either nothing is written, and
    `path` is None.

    Traces have a folder of their own only if both are given.
    """

    def __init__(self, output_dir: str | None, profiling: ProfilerConfig):
        self.path: Path | None = None
        if output_dir:
            self.path = Path(output_dir)
        elif profiling.enabled:
            self.path = Path(profiling.profile_dir or "./pytorch_profiles")
        self.traced = profiling.records_trace
        self.traces = self.path
        if profiling.enabled and profiling.profile_dir:
            self.traces = Path(profiling.profile_dir)

    def prepare(self, rank: int) -> None:
        """Rank 0 moves an earlier run aside.  Raises UserError if a folder cannot be written."""
        if self.path is None:
            return
        if rank != 0:
            make_folder(self.path)  # found now rather than after training: nodes need not share it
            return
        for folder in dict.fromkeys((self.path, self.traces)):
            prepare_folder(folder)

    def write(self, name: str, document: dict | Document | None) -> None:
        """A JSON file of the run, where there is a folder and something to write."""
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
    run, and perhaps a figure: the bytes of a PNG of the same name."""

    file_name: str
    document: dict | None
    lines: Sequence[str]
    before: Sequence[str] = ()
    figure: bytes | None = None


@dataclass
class Ending:
    """The lines that a run ends with, in the order in which they are printed; and its figures."""

    basis: list[str]  # what the averages are taken from, tables of instruments, files
    result: list[str]  # which scripts search for
    explained: list[str] = field(default_factory=list)  # by the instruments
    figures: dict[str, bytes] = field(default_factory=dict)  # by the name of the file, no suffix

    def add(self, explanation: Explanation) -> None:
        """The lines and the figure of an instrument."""
        self.basis += explanation.before
        if explanation.lines:
            self.explained += ["", *explanation.lines]
        if explanation.figure is not None:
            self.figures[Path(explanation.file_name).stem] = explanation.figure


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
        self.workload, self.profiling = workload, profiling
        self.schedule, self.device = schedule, device
        self.rank, self.world_size = ranks
        self.log_interval, self.verbose = log_interval, verbose
        self.folder = RunFolder(output_dir, profiling)
        self.events: EventFile | None = None
        settings = settings_of(workload, profiling)
        self.measurements = Measurements(
            workload, settings, schedule, device, ranks, self.prints, self.on_record
        )

    # ---- Before the first step -------------------------------------------------------------------

    def open(self) -> None:
        """Create the folder and config.json."""
        when_stuck(self.write_summary)
        self.folder.prepare(self.rank)
        if self.profiling.records_trace and self.rank == 0:
            graphs = self.measurements.settings.training.get("cuda_graphs", False)
            warnings = profiler_warnings(self.device, graphs)
            self.measurements.environment.warnings.extend(warnings)
        if self.rank != 0 or self.folder.path is None:
            return
        config = config_of(self.measurements.settings, self.measurements.environment)
        self.folder.write("config.json", config)
        samples = self.workload.batch_size * self.world_size
        self.events = EventFile(self.folder.path, samples, self.workload.seq_len)
        self.events.add_texts(config.as_json())

    def announce(self) -> None:
        """Print what is about to run, and on which device."""
        say(*workload_lines(self.workload, self.profiling, self.device), "")
        say(*device_lines(self.measurements.environment))
        say(*sharing_lines(self.workload, self.world_size))
        trace_folder = self.folder.traces if self.profiling.enabled else None
        say(*profiling_lines(self.schedule, trace_folder))
        say("", "Starting training...")

    # ---- Step by step ----------------------------------------------------------------------------

    def prints(self, step: int) -> bool:
        """Whether there is a line for this step."""
        return step % self.log_interval == 0 or step in (1, self.schedule.num_steps)

    def on_record(self, record: StepRecord) -> None:
        """Print and keep a step that the device has finished."""
        if self.prints(record.step):
            say(self.step_line(record))
        record.memory_bytes = self.measurements.sampler.memory_bytes[-1]
        if self.events:
            self.events.add_step(record)

    def step_line(self, record: StepRecord) -> str:
        """Loss and time of a step."""
        parts = [
            f"Step {record.step}/{self.schedule.num_steps}: Loss = {record.loss:.4f}",
            f"Time = {record.total_ms / 1e3:.3f} seconds",
        ]
        if self.schedule.exclusion_reason(record.step) == "profiled":
            parts[-1] += " [PROFILING]"
        if record.grad_norm is not None:
            parts.append(f"Gradient norm = {record.grad_norm:.4f}")
        return ", ".join(parts)

    # ---- After the last step ---------------------------------------------------------------------

    def close(
        self,
        error: BaseException | None,
        explain: Callable[[dict], Iterable[Explanation]],
        conclude: Callable[[dict], str],
        limit: RateLimit,
        expect: Callable[[], Document | Unknown],
    ) -> dict | None:
        """After the last step, or the error that ended the run: write the files, print the summary
        and return it; None on ranks that print nothing.

        explain(summary) yields the results of the instruments; conclude(summary) is the last line
        of the summary; limit is a rate above which a step cannot have done its work; expect()
        predicts the time of a step.  Raises UserError if a file cannot be written.
        """
        self.measurements.rate_limit = limit
        # The error that ended the run takes precedence.
        with contextlib.suppress(FloatingPointError, RuntimeError):
            self.measurements.meter.read_finished(wait=True)
        if self.rank != 0:
            with deferred_signals():
                self.write_summary(error)
            return None
        try:
            with deferred_signals():  # a signal may interrupt what follows, but not this write
                if error is None and self.recorded_memory:
                    self.measurements.expected_time = expect()
                summary = self.summary(error).as_json()
                ending = Ending(
                    basis=as_text(steps_section(summary, detailed=self.verbose)),
                    result=summary_lines(summary),
                )
                self.write_summary(error)
            for explanation in explain(summary):
                self.folder.write(explanation.file_name, explanation.document)
                ending.add(explanation)
            if summary["training"]["completed_steps"]:
                # An explanation may have measured the peak that this line names.
                ending.result.append(conclude(summary))
            self.close_events(summary, ending.figures)
            ending.basis += self.folder.lines(self.verbose)
        except UserError as failure:
            if error is None:
                failed = dict(summary, status="failed", error=str(failure))
                self.folder.write("performance_summary.json", failed)
            raise
        finally:
            say(*ending.basis, *ending.result, *ending.explained, *trust_lines(summary))
        return summary

    @property
    def recorded_memory(self) -> bool:
        """Whether a step with the memory tracker is complete."""
        instruments = self.measurements.instruments
        return bool(instruments and instruments.memory and instruments.memory.finished)

    def summary(self, error: BaseException | None) -> PerformanceSummary:
        """Of what was measured so far; error: what ended the run."""
        return summarize(self.measurements, error)

    def write_summary(self, error: BaseException | None) -> None:
        """performance_summary.json; of another rank than 0, with its number in the name."""
        suffix = suffix_of_rank(self.rank, self.world_size) if self.rank else ""
        self.folder.write(f"performance_summary{suffix}.json", self.summary(error))

    def close_events(self, summary: dict, figures: dict[str, bytes]) -> None:
        """The figures as files, and all in TensorBoard, where there is a folder."""
        if not self.events:
            return
        for name, picture in figures.items():
            write_bytes(self.folder.path / f"{name}.png", picture)
        self.events.close(summary, figures)
