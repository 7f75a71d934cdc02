"""What the program did in few of its steps: saves, evaluations, starts of loaders, as they were
noted while it ran."""

from __future__ import annotations

from typing import NamedTuple

from analysis.program.observed import observed
from analysis.trace.timeline import Timeline
from harness.base.tables import grouped
from harness.documents.program import OccasionRow


class Seldom(NamedTuple):
    """The same thing, in some of the steps that were timed or recorded."""

    what: str  # save, evaluation, ...
    where: str  # train.py:77, or what was called
    rows: list[OccasionRow]
    of_steps: int

    @property
    def steps(self) -> int:
        """In how many steps it happened."""
        return len({row.step for row in self.rows})

    @property
    def ms(self) -> float:
        """In a step in which it happens."""
        return sum(row.ms for row in self.rows) / self.steps


def seldom_seen(timeline: Timeline, few: float) -> list[Seldom]:
    """What happened in at most this share of the steps, or in one of several."""
    seen = observed(timeline)
    if seen is None or seen.steps < 2:
        return []
    kinds = []
    for (what, where), rows in grouped(seen.occasions, of_a_kind).items():
        kind = Seldom(what, where, rows, seen.steps)
        if kind.steps <= max(1.0, few * seen.steps):
            kinds.append(kind)
    return kinds


def of_a_kind(row: OccasionRow) -> tuple[str, str]:
    return row.what, row.where or row.call
