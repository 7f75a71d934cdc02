"""What a run prints and writes, however it ends: step lines, summary, files, TensorBoard events."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch

from harness.base.console import RULE, say
from harness.base.errors import UserError, deferred_signals, is_interruption
from harness.base.files import files_of_run, make_folder, prepare_folder, write_figure, write_json
from harness.base.units import MB
from harness.instruments.audit import RateLimit, audit_document
from harness.instruments.compilation import Compilation
from harness.instruments.phases import summary_stats
from harness.instruments.recorder import Instruments
from harness.instruments.schedule import InstrumentSchedule, ProfilerConfig
from harness.instruments.timing import StepMeter, StepRecord
from harness.machine.devices import DeviceSampler
from harness.machine.disturbance import over_ranks
from harness.machine.environment import describe_environment
from harness.model.workload import Workload
from harness.ranks.distributed import suffix_of_rank, when_stuck
from harness.ranks.failures import explain_error
from harness.ranks.parallel import ParallelConfig, described
from harness.run.run_summary import MeasuredRun, audit_lines, basis_lines, disturbance_lines, summarize, summary_lines

# No columns of TensorBoard's HPARAMS tab: they affect neither speed nor memory nor the loss.
HIDDEN_SETTINGS = {
    "num_steps",
    "output_dir",
    "log_interval",
    "force",
    "device",
    "norm_eps",
    "rope_theta",
    "init_std",
    "max_seq_len",
    "source_sha256",
}


def in_words(settings: dict) -> dict:
    """Without booleans and None: TensorBoard would show booleans as numbers, and leave out None."""
    words = {None: "none", False: "no", True: "yes"}
    return {name: words[one] if one is None or isinstance(one, bool) else one for name, one in settings.items()}


def fused_lines(training) -> dict[str, str]:
    """What is fused, and by which kernels, where that is not as in the baseline: text to print, by label."""
    fused = [part for part in ("projections", "norm", "rope", "loss") if getattr(training, f"fused_{part}")]
    lines = {"Fused": ", ".join(fused), "Kernels": "" if training.kernels == "eager" else training.kernels}
    return {label: text for label, text in lines.items() if text}


class Explanation(NamedTuple):
    """The result of one instrument: a JSON file, lines to print, and perhaps a figure, a PNG of the same name.

    tables: lines that are printed only with --verbose, before the answer; basis: those that are printed always."""

    file_name: str
    document: dict | None
    lines: list[str]
    figure: Any = None
    tables: Sequence[str] = ()
    basis: Sequence[str] = ()


class RunReport:
    """The console, the folder and the event file of one run of a workload.  Only rank 0 prints and writes."""

    FLUSH_S = 10.0  # seconds between two writes of TensorBoard scalars: writing takes time, so not after every step

    def __init__(
        self,
        workload: Workload,
        profiling: ProfilerConfig,
        schedule: InstrumentSchedule,
        device: torch.device,
        ranks: tuple[int, int] = (0, 1),
        *,
        num_steps: int,
        log_interval: int = 1,
        output_dir: str | None = None,
        verbose: bool = False,
    ):
        """ranks: this rank and the world size.  verbose: print tables too."""
        self.workload, self.profiling, self.schedule, self.device = workload, profiling, schedule, device
        self.rank, self.world_size = ranks
        self.num_steps, self.log_interval, self.verbose = num_steps, log_interval, verbose
        self.config = workload.settings() | {"profiling": asdict(profiling)}
        self.environment = describe_environment(device)
        folder = output_dir or (profiling.enabled and (profiling.profile_dir or "./pytorch_profiles")) or None
        self.folder = Path(folder) if folder else None
        # Traces go to a separate folder only if both --output-dir and --profile-dir are given.
        self.trace_folder = Path(profiling.profile_dir) if profiling.enabled and profiling.profile_dir else self.folder
        self.writer = None
        self.sampler = DeviceSampler(device)
        self.meter = StepMeter(device, self.world_size, self.prints, self.on_record)
        self.instruments: Instruments | None = None
        self.compilation: Compilation | None = None
        self.rate_limit = RateLimit(math.inf, "not known yet")  # of a step that has done its work
        self.no_sync: dict | None = None  # communication by difference
        self.ranks: list[dict] = []  # rank_facts() of each
        self._unwritten: list[StepRecord] = []
        self._flushed_at = time.monotonic()

    # ---- Before the first step ---------------------------------------------------------------------------------------

    def open(self) -> None:
        """Create the folder and config.json."""
        when_stuck(self.write_summary)
        if not self.folder:
            return
        if self.rank != 0:
            make_folder(self.folder)  # found now rather than after training: nodes need not share it
            return
        from torch.utils.tensorboard import SummaryWriter

        for folder in dict.fromkeys((self.folder, self.trace_folder)):
            prepare_folder(folder)
        document = self.config | {"environment": self.environment}
        write_json(self.folder / "config.json", document)
        self.writer = SummaryWriter(str(self.folder))
        for title, values in document.items():
            self.writer.add_text(title, "    " + json.dumps(values, indent=2).replace("\n", "\n    "))

    def announce(self) -> None:
        """Print what is about to run, and on which device."""
        workload, profiling = self.workload, self.profiling
        mode = ""
        if profiling.records_trace or profiling.enable_deepspeed_flops:
            mode = " (Profiling Enabled)"
        elif profiling.profile_memory or profiling.memory_snapshot:
            mode = " (Memory Profiling)"
        say(RULE, f"{workload.title}{mode}", RULE, "Configuration:")
        say(*(f"  {label}: {value}" for label, value in workload.settings_lines(self.device).items()))
        parameters, forward_flops = workload.parameter_count(), workload.forward_flops()
        say("", "Model Configuration:", f"  Total Parameters: {parameters:,}")
        say(f"  Model Size: {4 * parameters / MB:.1f} MB (FP32)")
        if forward_flops is not None:
            say(f"  Forward FLOPs per Step: {forward_flops:,} (matmuls)")
        device, cpu = self.environment["device"], self.environment["cpu"]
        threads = f"{cpu['torch_threads']} thread{'s' * (cpu['torch_threads'] > 1)}"
        say("", f"Using device: {device['type']}")
        if self.device.type == "cuda":
            say(f"GPU: {device['name']} ({device['arch']}, {device['memory_bytes'] / MB:,.0f} MB)")
        else:
            say(f"CPU: {cpu['name']} ({threads}, {cpu['logical_cores']} logical cores)")
        say(*(f"Warning: {warning}" for warning in self.environment["warnings"]))
        if self.world_size > 1:
            shared = described(workload.parallel)
            say(f"Ranks: {self.world_size}, each with {workload.batch_size} samples per step ({shared})")
        if self.schedule.window:
            first, last = self.schedule.window
            steps = f"step {last} is" if last == first + 1 else f"steps {first + 1} to {last} are"
            say(f"Profiling enabled: Steps {first}-{last} ({steps} recorded)")
        say(*(f"Note: {note}" for note in self.schedule.notes))
        if profiling.enabled:
            say(f"Profile data will be saved to: {self.trace_folder}/")
        say("", "Starting training...")

    # ---- Step by step ------------------------------------------------------------------------------------------------

    def prints(self, step: int) -> bool:
        return step % self.log_interval == 0 or step in (1, self.num_steps)

    def on_record(self, record: StepRecord) -> None:
        if self.prints(record.step):
            mark = " [PROFILING]" if self.schedule.exclusion_reason(record.step) == "profiled" else ""
            line = f"Step {record.step}/{self.num_steps}: Loss = {record.loss:.4f}"
            norm = "" if record.grad_norm is None else f", Gradient norm = {record.grad_norm:.4f}"
            say(f"{line}, Time = {record.total_ms / 1e3:.3f} seconds{mark}{norm}")
        record.memory_bytes = self.sampler.memory_bytes[-1]
        self._unwritten.append(record)
        if time.monotonic() - self._flushed_at > self.FLUSH_S:
            self._write_scalars()

    def _write_scalars(self) -> None:
        if self.writer is None:
            return
        samples = self.workload.batch_size * self.world_size
        with self._naming_event_file():
            for record in self._unwritten:
                rate = samples / (record.total_ms / 1e3)
                scalars = {  # TensorBoard sorts by name: loss and step time come first
                    "loss": record.loss,
                    "step_time_ms": record.total_ms,
                    **{f"step_time_ms/{phase}": ms for phase, ms in record.phase_ms.items()},
                    "throughput/samples_per_sec": rate,
                    "throughput/tokens_per_sec": rate * self.workload.seq_len,
                    "used_memory_mb": record.memory_bytes / MB,
                }
                if record.grad_norm is not None:
                    scalars["grad_norm"] = record.grad_norm
                if record.interval.run_s:
                    scalars["waited_share"] = record.interval.waited_share
                for tag, value in scalars.items():
                    self.writer.add_scalar(tag, value, record.step, walltime=record.ended_at)
            self._unwritten.clear()
            self._flushed_at = time.monotonic()
            self.writer.flush()

    @contextlib.contextmanager
    def _naming_event_file(self):
        try:
            yield
        except OSError as failure:
            raise UserError(f"cannot write events in {self.folder}: {failure.strerror}") from failure

    # ---- After the last step -----------------------------------------------------------------------------------------

    def close(
        self,
        error: BaseException | None,
        explain: Callable[[dict], Iterable[Explanation]],
        conclude: Callable[[dict], str],
        limit: RateLimit,
    ) -> dict | None:
        """After the last step, or the error that ended the run: write the files, print the summary and return it; None
        on ranks that print nothing.

        explain(summary) yields the results of the instruments; conclude(summary) is the last line of the summary; limit
        is a rate above which a step cannot have done its work.  Raises UserError if a file cannot be written.
        """
        self.rate_limit = limit
        with contextlib.suppress(FloatingPointError, RuntimeError):  # the original error takes precedence
            self.meter.read_finished(wait=True)
        if self.rank != 0:
            with deferred_signals():
                self.write_summary(error)
            return None
        summary = summarize(self.measured(error))
        basis, lines, explained = basis_lines(summary, self.verbose), summary_lines(summary), []
        figures = {}
        try:
            with deferred_signals():  # a signal may interrupt what follows, but not this write
                self.write_summary(error)
            for found in explain(summary):
                self._write(found.file_name, found.document)
                explained += ["", *found.lines] if found.lines else []
                basis += [*found.tables, ""] if found.tables and self.verbose else []
                basis += found.basis
                if found.figure is not None and self.folder:
                    figures[Path(found.file_name).stem] = found.figure
            if summary["training"]["completed_steps"]:
                lines.append(conclude(summary))  # an explanation may have measured the peak that it names
            if self.folder:
                self._finish_events(summary, figures)
                basis += self._file_lines()
        except UserError as failure:
            if error is None:
                self._write("performance_summary.json", summary | {"status": "failed", "error": str(failure)})
            raise
        finally:
            say("", *basis, *lines, *explained, *disturbance_lines(summary), *audit_lines(summary))
        return summary

    def _file_lines(self) -> list[str]:
        files = list(files_of_run(*dict.fromkeys((self.folder, self.trace_folder))))
        if self.verbose:
            return ["Files:", *(f"  {file}" for file in files)]
        return [f"Files: {len(files)} in {self.folder}/; docs/files.md says what each of them holds"]

    def rank_facts(self) -> dict:
        """What the summary tells of each rank."""
        steps = [r.total_ms for r in self.meter.records if self.schedule.exclusion_reason(r.step) is None]
        return {
            "rank": self.rank,
            "host": self.environment["host"],
            "mean_step_ms": summary_stats(steps)["mean"],
            "peak_memory_mb": self.sampler.peak_bytes / MB,
            "disturbance": self.meter.disturbance.document(),
        }

    def write_summary(self, error: BaseException | None) -> None:
        """performance_summary.json; of another rank than 0, with its number in the name."""
        name = f"performance_summary{suffix_of_rank(self.rank, self.world_size) if self.rank else ''}.json"
        self._write(name, summarize(self.measured(error)))

    def disturbance(self) -> dict:
        """Of all ranks, in the summary of rank 0 of a run that reached its end; else of this one."""
        if self.ranks and self.rank == 0:
            return over_ranks([one["disturbance"] for one in self.ranks])
        return self.meter.disturbance.document()

    def measured(self, error: BaseException | None) -> MeasuredRun:
        """Everything measured so far, and how the run ended."""
        status = "completed" if error is None else "interrupted" if is_interruption(error) else "failed"
        records, sampler, workload = self.meter.records, self.sampler, self.workload
        tracker = self.instruments and self.instruments.memory
        reasons = [self.schedule.exclusion_reason(record.step) for record in records]
        free = [record for record, reason in zip(records, reasons, strict=True) if reason is None]
        first = self.instruments and self.instruments.audit.result
        return MeasuredRun(
            config=self.config,
            environment=self.environment,
            on_gpu=self.device.type == "cuda",
            num_steps=self.num_steps,
            batch_size=workload.batch_size,
            seq_len=workload.seq_len,
            rank=self.rank,
            world_size=self.world_size,
            parallel=workload.parallel.parallel,
            step_flops=workload.step_flops(),
            grad_clip=self.config["training"].get("grad_clip"),
            records=records,
            exclusion_reasons=reasons,
            memory_samples=sampler.memory_bytes,
            peak_memory_bytes=sampler.peak_bytes,
            memory_source=sampler.memory_source,
            utilization_percent=sampler.utilization_percent,
            utilization_reason=sampler.utilization_reason,
            memory_timeline=tracker.timeline.document() if tracker and tracker.finished else None,
            ranks=self.ranks,
            no_sync=self.no_sync,
            compilation=self.compilation and self.compilation.document(workload.micro_steps),
            disturbance=self.disturbance(),
            audit=audit_document(first, free, records[0].loss if records else None, workload, self.rate_limit),
            compilation_reason="the run ended before compilation" if workload.compiled else "--compile is off",
            status=status,
            error=explain_error(error)[0] if error else None,
        )

    def _write(self, name: str, document: dict | None) -> None:
        if self.folder and document:
            write_json(self.folder / name, document)

    def _finish_events(self, summary: dict, figures: dict) -> None:
        """Write figures and a row of TensorBoard's HPARAMS tab, and close the event file."""
        for name, figure in figures.items():
            write_figure(self.folder / f"{name}.png", figure)
        with self._naming_event_file():
            for name, figure in figures.items():
                self.writer.add_figure(f"whole_run/{name}", figure)  # as the report calls it: one card
            self._write_scalars()
            self._write_hyperparameters(summary)
            self.writer.close()

    def _write_hyperparameters(self, summary: dict) -> None:
        from torch.utils.tensorboard.summary import hparams

        every = self.config["training"] | self.config["model"]
        hidden = HIDDEN_SETTINGS | {name for name in every if name.endswith("_reason")}
        hidden |= {one.name for one in fields(ParallelConfig)} if self.world_size == 1 else set()
        settings = in_words({name: every[name] for name in every if name not in hidden})
        performance = summary["performance"]
        metrics = {name: performance[name] for name in ("avg_step_time_ms", "samples_per_sec", "achieved_tflops")}
        metrics |= {"peak_memory_mb": summary["memory"]["peak_mb"], "final_loss": summary["loss"]["final"]}
        metrics = {f"whole_run/{name}": value for name, value in metrics.items() if value is not None}
        for part in hparams(settings, metrics):
            self.writer.file_writer.add_summary(part)
        for name, value in metrics.items():
            self.writer.add_scalar(name, value)
