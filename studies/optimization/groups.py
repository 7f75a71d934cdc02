"""Which sets of flags are measured in the same process, and what if it dies?"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from analysis.prediction.memory import persistent_bytes
from harness.model.optimizations import Optimization
from harness.model.workload import Workload
from studies.optimization.results import columns_alone, columns_beside


@dataclass
class Candidate:
    """A set of flags, the baseline or transformers' LLaMA: its row,
    as far as it is known, and its workload."""

    row: dict
    workload: Workload
    rungs: tuple[Optimization, ...] = ()


# Calls take_turns() in a new process: status and reason of that, and its answers, None if it died.
Measure = Callable[[list[Candidate]], tuple[dict, list[dict] | None]]


# ---- Groups --------------------------------------------------------------------------------------


def groups_that_fit(
    todo: list[Candidate], baseline: Candidate, available: int
) -> Iterator[list[Candidate]]:
    """Candidates whose states are in memory together, each group with the baseline, unless that
    does not fit."""
    always = [] if baseline.row.get("status") in ("skipped", "oom") else [baseline]
    group = always[:]
    for candidate in todo:
        if candidate is baseline:
            continue
        if len(group) > len(always) and bytes_together([*group, candidate]) > available:
            yield group
            group = always[:]
        group.append(candidate)
    if any(candidate.row.get("status") is None for candidate in group):
        yield group


def bytes_together(group: list[Candidate]) -> int:
    """What all keep between two steps, and what one of them needs on top at its peak."""
    resting = [persistent_bytes(candidate.workload) for candidate in group]
    peaks = [candidate.row["predicted_memory_bytes"] or 0 for candidate in group]
    return sum(resting) + max(
        max(0, peak - rest) for peak, rest in zip(peaks, resting, strict=True)
    )


# ---- Measurement ---------------------------------------------------------------------------------


def rows_of_group(measure: Measure, group: list[Candidate]) -> list[dict]:
    """The rows of a group, measured in one process.  If that dies, each has one of its own, with
    the baseline if that lives by itself; a row gets the outcome of a process only if nothing else
    can have ended it."""
    outcome, rows = rows_of_process(measure, group)
    if rows:
        return rows
    if len(group) == 1:
        return [group[0].row | outcome]
    if group[0].row["ladder"] != 0:
        return [row for candidate in group for row in rows_of_group(measure, [candidate])]
    baseline, *others = group
    (alone,) = rows_of_group(measure, [baseline])
    if alone["status"] != "ok":
        return [alone, *rows_of_group(measure, others)]
    if len(others) == 1:  # it has just ended a process that the baseline does not end
        return [alone, others[0].row | outcome]
    return rows_of_pairs(measure, baseline, alone, others)


def rows_of_pairs(
    measure: Measure, baseline: Candidate, alone: dict, others: list[Candidate]
) -> list[dict]:
    """Each beside the baseline in a process for two.  alone: the baseline's row, until a pair has a
    newer one."""
    newest, rows = alone, []
    for candidate in others:
        outcome, pair = rows_of_process(measure, [baseline, candidate])
        newest = next((row for row in pair[:1] if row["status"] == "ok"), newest)
        rows.append(pair[1] if pair else candidate.row | outcome)
    return [newest, *rows]


def rows_of_process(measure: Measure, group: list[Candidate]) -> tuple[dict, list[dict]]:
    """Status and reason of a process, and its rows, [] if it died."""
    outcome, answers = measure(group)
    if answers is None:
        return outcome, []
    pairs = list(zip(group, answers, strict=True))
    rows = [
        candidate.row | outcome | columns_alone(answer, candidate.workload)
        for candidate, answer in pairs
    ]
    by_flags = {candidate.row["flags"]: answer for candidate, answer in pairs}
    return outcome, [row | columns_beside(row, rows, by_flags) for row in rows]
