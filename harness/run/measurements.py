"""What one rank of a run measures, while it trains and however it ends."""

import math
from collections.abc import Callable

import torch

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
        self.grad_clip = config["training"].get("grad_clip")
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

    @property
    def exclusion_reasons(self) -> list[str | None]:
        """Why each step is left out of the averages; None if it is not."""
        return [self.schedule.exclusion_reason(record.step) for record in self.meter.records]

    def audit(self) -> dict:
        records = self.meter.records
        averaged = [record for record, why in zip(records, self.exclusion_reasons, strict=True) if why is None]
        first = self.instruments and self.instruments.audit.result
        return audit_document(first, averaged, records[0].loss if records else None, self.workload, self.rate_limit)
