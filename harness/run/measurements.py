"""What one rank of a run measures, while it trains and however it ends."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from harness.base.errors import is_interruption
from harness.base.units import MB
from harness.instruments.audit import RateLimit, audit_document
from harness.instruments.compilation import Compilation
from harness.instruments.phases import summary_stats
from harness.instruments.recorder import Instruments
from harness.instruments.schedule import InstrumentSchedule
from harness.instruments.timing import StepMeter, StepRecord
from harness.machine.devices import DeviceSampler
from harness.machine.disturbance import over_ranks
from harness.machine.environment import describe_environment
from harness.model.workload import Workload
from harness.ranks.failures import explain_error
from harness.run.run_summary import MeasuredRun


class Measurements:
    """The clock of the steps, the samples of the device, and what is filled in as the run gets so far."""

    def __init__(
        self,
        workload: Workload,
        config: dict,
        schedule: InstrumentSchedule,
        device: torch.device,
        ranks: tuple[int, int],
        wait_for: Callable[[int], bool],
        on_record: Callable[[StepRecord], None],
    ):
        """config: the sections model, training and profiling of config.json; ranks: this one and the world size;
        wait_for and on_record: of the StepMeter."""
        self.workload, self.config, self.schedule, self.device = workload, config, schedule, device
        self.rank, self.world_size = ranks
        self.environment = describe_environment(device)
        self.sampler = DeviceSampler(device)
        self.meter = StepMeter(device, self.world_size, wait_for, on_record)
        self.instruments: Instruments | None = None
        self.compilation: Compilation | None = None
        self.rate_limit = RateLimit(math.inf, "not known yet")  # of a step that has done its work
        self.no_sync: dict | None = None  # communication by difference
        self.ranks: list[dict] = []  # facts_of_rank() of each, once all have finished

    def facts_of_rank(self) -> dict:
        """What the summary tells of each rank."""
        steps = [r.total_ms for r in self.meter.records if self.schedule.exclusion_reason(r.step) is None]
        return {
            "rank": self.rank,
            "host": self.environment["host"],
            "mean_step_ms": summary_stats(steps)["mean"],
            "peak_memory_mb": self.sampler.peak_bytes / MB,
            "disturbance": self.meter.disturbance.document(),
        }

    def disturbance(self) -> dict:
        """Of all ranks, in the summary of rank 0 of a run that reached its end; else of this one."""
        if self.ranks and self.rank == 0:
            return over_ranks([one["disturbance"] for one in self.ranks])
        return self.meter.disturbance.document()

    def audit(self, records: list[StepRecord], reasons: list[str | None]) -> dict:
        """reasons: why each record is left out of the averages, None if it is not."""
        averaged = [record for record, reason in zip(records, reasons, strict=True) if reason is None]
        first = self.instruments and self.instruments.audit.result
        return audit_document(first, averaged, records[0].loss if records else None, self.workload, self.rate_limit)

    def measured_run(self, error: BaseException | None) -> MeasuredRun:
        """Everything so far; error: what ended the run, None if nothing did."""
        workload, sampler, records = self.workload, self.sampler, self.meter.records
        tracker = self.instruments and self.instruments.memory
        reasons = [self.schedule.exclusion_reason(record.step) for record in records]
        return MeasuredRun(
            config=self.config,
            environment=self.environment,
            on_gpu=self.device.type == "cuda",
            num_steps=self.schedule.num_steps,
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
            audit=self.audit(records, reasons),
            compilation_reason="the run ended before compilation" if workload.compiled else "--compile is off",
            status="completed" if error is None else "interrupted" if is_interruption(error) else "failed",
            error=explain_error(error)[0] if error else None,
        )
