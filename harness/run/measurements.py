"""What one rank of a run measures, while it trains and however it ends."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from harness.instruments.audit import (
    FAIL_NOTHING,
    Audit,
    RateLimit,
    audit_document,
    not_checked_for,
)
from harness.instruments.compilation import Compilation
from harness.instruments.no_sync import NoSyncSteps
from harness.instruments.recorder import Instruments
from harness.instruments.schedule import InstrumentSchedule
from harness.instruments.timing import StepMeter, StepRecord
from harness.machine.devices import DeviceSampler
from harness.machine.disturbance import over_ranks
from harness.machine.environment import describe_environment
from harness.model.workload import Workload
from harness.program.ranks import RankComparison, compare_ranks
from harness.run.rank_numbers import RankNumbers
from harness.run.run_config import Settings
from harness.schema import ABSENT, Document, Unknown
from harness.session.session import Session


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
        self.expected_time: Document | Unknown = ABSENT  # of a step, of a run with a prediction
        self.no_sync: NoSyncSteps | None = None  # communication by difference
        self.ranks: list[Document] = []  # the RankFacts of each, once all have finished
        self.numbers: RankNumbers | None = None  # of what this rank trains
        self.compared: RankComparison | None = None  # by the numbers of each, then

    def begin(self, session: Session) -> None:
        """Before the first step."""
        self.compilation = session.compilation
        self.numbers = RankNumbers(session)

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
        audit = audit_document(
            self.instruments.audit.result if self.instruments else None,
            self.included_records(),
            records[0].loss if records else None,
            self.workload,
            self.rate_limit,
        )
        if self.world_size > 1 and audit.ok is not None:
            add_ranks(audit, self.compared)
        return audit

    def hear_of_ranks(self, everyone: list[tuple[Document, dict]]) -> None:
        """What facts_of_rank() tells of each rank, in their order; empty: of one rank."""
        self.ranks = [facts for facts, _ in everyone]
        processes = []
        for rank, (_, numbers) in enumerate(everyone):
            processes.append({"rank": rank, "world_size": len(everyone), "sketches": numbers})
        if processes:
            self.compared = compare_ranks(processes)


def add_ranks(audit: Audit, compared: RankComparison | None) -> None:
    """Whether ranks train one model; compared: None where they did not reach the end together."""
    if compared is None:
        reason = "the ranks did not reach the end of the run together"
        audit.not_checked = [*audit.not_checked, *not_checked_for(reason, "ranks_differ")]
        return
    audit.findings = [*compared.findings, *audit.findings]
    audit.not_checked = [*audit.not_checked, *compared.not_checked]
    audit.notes = [*audit.notes, *compared.notes]
    audit.ok = all(finding.check in FAIL_NOTHING for finding in audit.findings)
