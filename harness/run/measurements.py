"""What one rank of a run measures, while it trains and however it ends."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from harness.instruments.audit import Audit, RateLimit, audit_document
from harness.instruments.compilation import Compilation
from harness.instruments.no_sync import NoSyncSteps
from harness.instruments.recorder import Instruments
from harness.instruments.schedule import InstrumentSchedule
from harness.instruments.timing import StepMeter, StepRecord
from harness.machine.devices import DeviceSampler
from harness.machine.disturbance import over_ranks
from harness.machine.environment import describe_environment
from harness.model.workload import Workload
from harness.run.run_config import Settings
from harness.schema import Document


class Measurements:
    """The clock of the steps, the samples of the device,
    and what is filled in as the run gets so far."""

    def __init__(
        self,
        workload: Workload,
        settings: Settings,
        schedule: InstrumentSchedule,
        device: torch.device,
        ranks: tuple[int, int],
        wait_for: Callable[[int], bool],
        on_record: Callable[[StepRecord], None],
    ):
        """ranks: this one and the world size; wait_for and on_record: of the StepMeter."""
        self.workload, self.settings, self.schedule = workload, settings, schedule
        self.device = device
        self.rank, self.world_size = ranks
        self.environment = describe_environment(device)
        self.grad_clip: float | None = settings.training.get("grad_clip")
        self.sampler = DeviceSampler(device)
        self.meter = StepMeter(device, self.world_size, wait_for, on_record)
        self.instruments: Instruments | None = None
        self.compilation: Compilation | None = None
        self.rate_limit = RateLimit(math.inf, "not known yet")  # of a step that has done its work
        self.no_sync: NoSyncSteps | None = None  # communication by difference
        self.ranks: list[Document] = []  # the RankFacts of each, once all have finished

    def disturbance(self) -> dict:
        """Of all ranks, in the summary of rank 0 of a run that ended; else of this one."""
        if self.ranks and self.rank == 0:
            return over_ranks([facts.disturbance for facts in self.ranks])
        return self.meter.disturbance.document()

    @property
    def exclusion_reasons(self) -> list[str | None]:
        """Why each step is left out of the averages; None if it is not."""
        return [self.schedule.exclusion_reason(record.step) for record in self.meter.records]

    def included_records(self) -> list[StepRecord]:
        """The steps that nothing excludes from averages; there may be none."""
        included = []
        for record in self.meter.records:
            if self.schedule.exclusion_reason(record.step) is None:
                included.append(record)
        return included

    def audit(self) -> Audit:
        """Whether the run trains, as far as it got."""
        records = self.meter.records
        return audit_document(
            self.instruments.audit.result if self.instruments else None,
            self.included_records(),
            records[0].loss if records else None,
            self.workload,
            self.rate_limit,
        )
