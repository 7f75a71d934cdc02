"""What is to be kept on this device, and what left out?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from analysis.compare.noise import AGAIN, as_fast, is_decided
from harness.base.tables import grouped
from studies.optimization_parts.ladder import last_flag
from studies.optimization_parts.rows import OptimizationStudyRow, baseline_of


class Verdict(NamedTuple):
    """On the ladder of a size and precision."""

    shape: str
    rows: list[OptimizationStudyRow]  # that were measured
    undecided: str | None = None  # why nothing can be said of them
    best: OptimizationStudyRow | None = None  # in a run of the default length
    # The fastest, if it is compiled, and that does not pay off in such a run.
    late: OptimizationStudyRow | None = None

    @property
    def is_probable(self) -> bool:
        """Whether what is best could be otherwise on a machine on which nothing else runs."""
        if self.best.is_baseline:
            return bool(self.best.disturbed)
        return not is_decided(self.best.difference())


def verdict_on(shape: str, rows: list[OptimizationStudyRow]) -> Verdict:
    why = undecided(rows)
    if why:
        return Verdict(shape, rows, why)
    best = best_of([row for row in rows if row.pays_off]) or baseline_of(rows)
    winners = [row for row in rows if row.wins]
    fastest = min(winners, key=lambda row: row.ratio, default=None)
    late = None
    if fastest is not None and not fastest.pays_off:
        late = fastest
    return Verdict(shape, rows, None, best, late)


def undecided(rows: list[OptimizationStudyRow]) -> str | None:
    """Why nothing can be said of the rows of a ladder,
    which were all measured; None if something can."""
    baseline = baseline_of(rows)
    sets = [row for row in rows if row.is_set_of_flags]
    if baseline is None:
        return "the baseline was not measured"
    if baseline.failed_audit:
        return f"the baseline fails its audit: {baseline.failed_audit}"
    if not sets:
        return "nothing but the baseline was measured"
    if all(row.ratio_high is None for row in sets):
        return sets[0].reason_of("ratio_high")
    return None


def best_of(rows: Iterable[OptimizationStudyRow]) -> OptimizationStudyRow | None:
    """The row of the set of flags with which a run of the default length is shortest, compiling
    included, of those that train the same and are faster than the baseline beyond noise."""
    winners = [row for row in rows if row.wins]
    return min(winners, key=lambda row: row.ratio_with_compiling, default=None)


# ---- In words ------------------------------------------------------------------------------------


def finding(measured: list[OptimizationStudyRow], device: str) -> list[str]:
    """What to keep on this device, and what not; and how that compares with transformers' LLaMA."""
    by_shape = grouped(measured, lambda row: row.shape)
    verdicts = [verdict_on(shape, rows) for shape, rows in by_shape.items()]
    sure, probable, late, against, rates, not_decided = [], [], [], [], [], []
    for verdict in verdicts:
        best = verdict.best
        if verdict.undecided:
            not_decided.append(f"Not decided at {verdict.shape}: {verdict.undecided}.")
            continue
        if verdict.is_probable:
            probable.append(verdict)
        else:
            sure.append(verdict)
        if best.ratio_to_reference is not None:
            against.append(f"{best.gain('ratio_to_reference')} at {verdict.shape}")
        if best.share_of_measured_peak is not None:
            rates.append(f"{best.share_of_measured_peak:.0%} at {verdict.shape}")
        if verdict.late is not None:
            row = verdict.late
            when = f"from step {row.break_even_step:,} on"
            late.append(f"{row.flags}, {row.gain()}, {when} at {verdict.shape}")
    again = f"Probably keep on {device}; disturbed, {AGAIN}"
    longer = "Only in runs longer than the default, as compiling has to pay off first"
    return [
        *sentence(f"Keep on {device}", to_keep(sure), "; "),
        *sentence(again, to_keep(probable), "; "),
        *sentence(longer, late, "; "),
        *not_decided,
        *sentence("Leave out", to_leave_out(by_shape), "; "),
        *sentence("Relative to transformers' LLaMA with its best settings", against),
        *sentence("Share of the matmul rate measured here", rates),
    ]


def sentence(subject: str, parts: list[str], separator: str = ", ") -> list[str]:
    """'subject: parts.'; nothing without parts."""
    return [f"{subject}: {separator.join(parts)}."] if parts else []


def to_keep(verdicts: list[Verdict]) -> list[str]:
    """The best sets of flags, each with where it is best and its gain there; without the rungs of a
    ladder whose own gain is not shown, which are named."""
    places: dict[str, list[str]] = {}
    for verdict in verdicts:
        row = verdict.best
        if row.is_baseline:
            subject = "the baseline, which no set of flags beats"
            places.setdefault(subject, []).append(f"at {verdict.shape}")
            continue
        without_gain = rungs_without_gain(row, verdict.rows)
        kept = [flag for flag in row.single_flags if flag not in without_gain]
        beside = ""
        if kept and len(kept) < len(row.single_flags):
            others = [flag for flag in row.single_flags if flag in without_gain]
            beside = f", measured with {' '.join(others)}: no gain beyond noise"
        subject = f"{' '.join(kept or row.single_flags)},"
        places.setdefault(subject, []).append(f"{row.gain()} at {verdict.shape}{beside}")
    return [f"{subject} {', '.join(where)}" for subject, where in places.items()]


def rungs_without_gain(row: OptimizationStudyRow, rows: list[OptimizationStudyRow]) -> set[str]:
    """The flags of the rungs up to this one that are no faster than the rung
    below them, beyond noise."""
    flags = set()
    for other in rows:
        is_below = other.ladder and other.ladder <= (row.ladder or 0)
        if is_below and "faster" not in other.difference("ratio_to_previous"):
            flags.add(last_flag(other.flags))
    return flags


def to_leave_out(by_shape: dict[str, list[OptimizationStudyRow]]) -> list[str]:
    """What loses, by the reason."""
    losers: dict[str, list[str]] = {}
    for shape, rows in by_shape.items():
        where = f" at {shape}" if len(by_shape) > 1 else ""
        baseline = baseline_of(rows)
        if baseline is not None and baseline.failed_audit:
            continue
        for row in rows:
            loses = why_it_loses(row, where) if row.is_set_of_flags else None
            if loses is not None:
                reason, text = loses
                losers.setdefault(reason, []).append(text)
    return [f"{reason}: {', '.join(texts)}" for reason, texts in losers.items()]


def why_it_loses(row: OptimizationStudyRow, where: str) -> tuple[str, str] | None:
    """The reason and the row's text: it does not train the same, or is slower alone or on top of
    the rungs below."""
    if row.not_the_same:
        return "not the same training", f"{row.flags}{where} ({row.not_the_same})"
    alone, on_top = row.difference(), row.difference("ratio_to_previous")
    if row.ladder is None and "slower" in alone:
        return alone, f"{row.flags} {as_fast(row.ratio)}{where}"
    if "slower" in on_top:
        factor = as_fast(row.ratio_to_previous)
        return f"{on_top} on top of the rungs below", f"{last_flag(row.flags)} {factor}{where}"
    return None
