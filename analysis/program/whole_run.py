"""watch.json: what does a whole run of a program of somebody else's do?  Which of its steps are
slow and why, what grows, and the share of time in ordinary steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from analysis.program.memory_growth import GrowthRow, growth_of
from analysis.program.slow_steps import (
    UNKNOWN,
    SlowRow,
    SlowSteps,
    percent,
    slow_rows,
    slow_steps,
    with_other_ranks,
)
from analysis.program.watched_process import FEW, WatchedProcess
from harness.base.sections import Section
from harness.base.tables import column
from harness.base.text import count_of, significant
from harness.instruments.audit import AuditFinding
from harness.program.hooks.whole_run.step_files import PHASES
from harness.program.ranks import RankComparison, compare_ranks
from harness.schema import Document, Unknown, field

WORTH_A_HEADLINE = 0.01  # of the run
ROW_NAMES = ("cause", "rank", "where", "steps", "seconds", "share_of_run")
TOO_SHORT = "the run has fewer steps than tell what an ordinary one is"


class WatchedSteps(Document):
    """Of a rank, over all starts of the program in this folder."""

    count: int = field("timed: all but the first of each start")
    median_ms: float = field("of a step: the GPU's time where there is one, else the host's")
    host_median_ms: float = field("of a step, of the host's clock")
    phase_ms: dict[str, float] = field(
        "median of a step's data, backward and optimizer phase, of the host's clock"
    )
    seconds: float = field("of all steps")
    goodput: float = field("share of that time, that ordinary steps take")


class WatchedRank(Document):
    rank: int = field("of torch.distributed or of the launcher")
    starts: int = field("of the program, or of this rank by its launcher")
    steps: int = field("timed")
    median_ms: float | None = field("of a step", null="no step was timed")
    seconds: float = field("of all steps")
    ended: bool = field("by itself, or by us after the steps that were asked for")


class WatchHeadline(Document):
    finding: str = field("what costs most, in a sentence")
    saves_ms: float | None = field(
        "per ordinary step, if all of it vanished", null="memory, or nothing that costs time"
    )
    next: str = field("the change or command to try")


class WatchDocument(Document):
    command: str = field("of the program")
    device: str = field("cuda, cpu")
    steps: WatchedSteps | None = field("timed steps", null="no step was timed")
    ranks: list[WatchedRank] = field("one for each that was seen")
    slow: list[SlowRow] | None = field("causes of slow steps, largest first", null=TOO_SHORT)
    growth: list[GrowthRow] = field("memory that grows with the steps; empty where nothing grows")
    not_yet_known: list[str] = field("what this run is too short to tell, and what is missing")
    ranks_compared: list[AuditFinding] = field(
        "whether ranks train one model, on data of their own; empty: so it seems, or it is not"
        " known"
    )
    not_seen: list[str] = field("of what slows steps: what this machine does not tell, and why")
    headline: WatchHeadline = field("what costs most")


class WatchedRun(NamedTuple):
    """The document, and what figures are drawn of."""

    document: WatchDocument
    processes: list[WatchedProcess]
    slow: list[SlowSteps]


def watched_run(command: str, processes: Sequence[WatchedProcess]) -> WatchedRun:
    """processes: those with a step, in the order in which they began."""
    timed = [process for process in processes if len(process.seconds)]
    by_process = [slow_steps(process) for process in timed]
    slow = together(timed, by_process)
    ranks = sorted({process.rank for process in processes})
    not_yet_known = missing(processes, ranks)
    rows = None
    if any(len(process.seconds) >= FEW for process in timed):
        rows = slow_rows(timed, slow, ranks)
    growth = []
    for process in latest(timed):
        of_process, unsure = growth_of(process, len(ranks))
        growth += of_process
        not_yet_known += unsure
    steps = steps_of(timed, slow) if timed else None
    compared = compared_ranks(processes)
    not_yet_known += compared.notes
    for row in compared.not_checked:
        not_yet_known.append(f"whether ranks train one model: {row['reason']}")
    document = WatchDocument(
        command=command,
        device=processes[0].about["device"],
        steps=steps,
        ranks=[rank_of(rank, processes) for rank in ranks],
        slow=rows,
        growth=growth,
        not_yet_known=not_yet_known,
        ranks_compared=compared.findings,
        not_seen=not_seen(processes),
        headline=failure_of(compared.findings) or headline_of(steps, rows or [], growth),
    )
    return WatchedRun(document, timed, slow)


def together(timed: Sequence[WatchedProcess], slow: Sequence[SlowSteps]) -> list[SlowSteps]:
    """Ranks of the same start are looked at together."""
    result = list(slow)
    for part in {process.part for process in timed}:
        places = [place for place, process in enumerate(timed) if process.part == part]
        of_part = [timed[place] for place in places]
        is_one_world = len({process.rank for process in of_part}) == len(of_part) > 1
        if is_one_world:
            for place, own in zip(
                places, with_other_ranks([slow[place] for place in places]), strict=True
            ):
                result[place] = own
    return result


def latest(timed: Sequence[WatchedProcess]) -> list[WatchedProcess]:
    """Of each rank, the process that began last."""
    by_rank = {process.rank: process for process in timed}
    return [by_rank[rank] for rank in sorted(by_rank)]


def missing(processes: Sequence[WatchedProcess], ranks: Sequence[int]) -> list[str]:
    """What cannot be told of this run."""
    told = []
    most = max(len(process.seconds) for process in processes)
    if most < FEW:
        told.append(
            f"which steps are slow, after {count_of(most, 'step')}: from {FEW} on it would be"
        )
    size = max(process.about["world_size"] for process in processes)
    absent = [rank for rank in range(size) if rank not in ranks]
    if absent:
        told.append(
            f"{count_of(len(absent), 'rank')} of {size} wrote nothing here, the first is"
            f" {absent[0]}: --output-dir in a folder that all nodes share"
        )
    last = latest(processes)
    counts = [len(process.seconds) for process in last]
    if max(counts) - min(counts) > 1:
        told.append(
            f"ranks have different numbers of steps, {min(counts):,} to {max(counts):,}: those"
            " that all have are compared"
        )
    return told


def compared_ranks(processes: Sequence[WatchedProcess]) -> RankComparison:
    """Of the last start."""
    recorded = []
    for process in latest(processes):
        if process.sketches is not None and process.part == processes[-1].part:
            recorded.append({**process.about, "sketches": process.sketches})
    return compare_ranks(recorded)


def failure_of(compared: Sequence[AuditFinding]) -> WatchHeadline | None:
    """Wrong training comes before slow training."""
    for finding in compared:
        if finding.check == "ranks_differ":
            return WatchHeadline(
                finding=finding.detail,
                saves_ms=Unknown("it is about what is trained"),
                next="reduce the gradients of all ranks before each step of the optimizer",
            )
    return None


def not_seen(processes: Sequence[WatchedProcess]) -> list[str]:
    """Each once, of all of them."""
    reasons = []
    for process in processes:
        reasons += process.about.get("not_seen", [])  # a part may be of an earlier version
    return list(dict.fromkeys(reasons))


def rank_of(rank: int, processes: Sequence[WatchedProcess]) -> WatchedRank:
    own = [process for process in processes if process.rank == rank]
    seconds = np.concatenate([process.seconds for process in own])
    return WatchedRank(
        rank=rank,
        starts=len(own),
        steps=len(seconds),
        median_ms=1e3 * float(np.median(seconds)) if len(seconds) else None,
        seconds=float(seconds.sum()),
        ended=own[-1].about["ended"],
    )


def steps_of(timed: Sequence[WatchedProcess], slow: Sequence[SlowSteps]) -> WatchedSteps:
    """Of the lowest rank."""
    rank = min(process.rank for process in timed)
    own = [process for process in timed if process.rank == rank]
    seconds = np.concatenate([process.seconds for process in own])
    host_ms = {}
    for name in ("seconds", *PHASES):
        host_ms[name] = 1e3 * float(np.median(np.concatenate([one.steps[name] for one in own])))
    ordinary_s = 0.0
    for process, steps in zip(timed, slow, strict=True):
        if process.rank == rank:
            ordinary_s += float(np.where(steps.is_slow, steps.ordinary, process.seconds).sum())
    total_s = float(seconds.sum())
    return WatchedSteps(
        count=len(seconds),
        median_ms=1e3 * float(np.median(seconds)),
        host_median_ms=host_ms.pop("seconds"),
        phase_ms=host_ms,
        seconds=total_s,
        goodput=ordinary_s / total_s if total_s else 1.0,
    )


def headline_of(
    steps: WatchedSteps | None, slow: Sequence[SlowRow], growth: Sequence[GrowthRow]
) -> WatchHeadline:
    """The slow steps that cost most, if that is worth a word; else what grows."""
    named = [row for row in slow if row.cause != UNKNOWN]
    named = [row for row in named if row.share_of_run >= WORTH_A_HEADLINE]
    if named:
        row = named[0]
        return WatchHeadline(
            finding=row.sentence,
            saves_ms=1e3 * row.seconds / steps.count,
            next=row.cure or f"look at {row.where or 'what happens in these steps'}",
        )
    nothing_to_save = Unknown("memory, or nothing that costs time")
    if growth:
        row = growth[0]
        place = row.where or row.held_by or "what is kept from step to step"
        return WatchHeadline(
            finding=row.sentence,
            saves_ms=nothing_to_save,
            next=f"look at {place}: keep values (.item(), .detach()), or only the latest",
        )
    finding = "No step was timed"
    if steps is not None:
        finding = (
            f"Steps are even: ordinary ones take {percent(steps.goodput)} of the time, no named"
            f" cause {percent(WORTH_A_HEADLINE)} of it, and no growth of memory is seen"
        )
    return WatchHeadline(
        finding=finding,
        saves_ms=nothing_to_save,
        next="profile_program.py without --watch tells what limits an ordinary step",
    )


# ---- Shown ---------------------------------------------------------------------------------------


def answer_rows(document: WatchDocument, report: Path) -> dict[str, str | list[str]]:
    """The last lines, by label.  report: the page."""
    steps = document.steps
    rows: dict[str, str | list[str]] = {"Headline": document.headline.finding}
    rows["Try first"] = document.headline.next
    if steps is not None:
        text = (
            f"{steps.count:,} of {significant(steps.median_ms, 3)} ms in the median,"
            f" {significant(steps.seconds, 3)} s; goodput {percent(steps.goodput)}"
        )
        if document.device == "cuda":
            text += f"; host {significant(steps.host_median_ms, 3)} ms"
        rows["Steps"] = text
    others = [row.sentence for row in document.slow or []]
    others = [sentence for sentence in others if sentence != document.headline.finding]
    if others:
        rows["Slow steps"] = others[:4]
    elif document.slow:
        rows["Slow steps"] = "no others"
    elif document.slow is not None:
        rows["Slow steps"] = "none"
    grown = [row.sentence for row in document.growth]
    rows["Growth"] = grown[:2] or "none seen"
    compared = [finding.detail for finding in document.ranks_compared]
    compared = [detail for detail in compared if detail != document.headline.finding]
    if compared:
        rows["Ranks"] = compared[:2]
    again = [rank for rank in document.ranks if rank.starts > 1]
    if again:
        rows["Starts"] = f"rank {again[0].rank} began {again[0].starts} times in this folder"
    if document.not_yet_known:
        rows["Not known"] = document.not_yet_known[:2]
    rows["Read on"] = f"{report}; docs/your_own_model.md#a-whole-run; --verbose prints the tables"
    return rows


def watch_sections(document: WatchDocument) -> list[Section]:
    """Of a page, or of the screen with --verbose."""
    slow = [row.as_json() for row in document.slow or []]
    growth = [row.as_json() for row in document.growth]
    ranks = [row.as_json() for row in document.ranks]
    columns = [
        column("cause", "cause", left=True),
        column("rank", "rank"),
        column("steps", "steps"),
        column("seconds", "seconds", ".3f"),
        column("share", "share_of_run", ".2%"),
        column("where", "where", left=True),
    ]
    notes = [
        "A slow step takes a quarter more than the median of the 101 steps around it, and five"
        " robust standard deviations. Seconds are those beyond an ordinary step.",
        *[row.sentence for row in document.slow or []],
        *[f"{row.cause}: {row.cure}" for row in document.slow or [] if row.cure],
        *[f"Not seen: {reason}" for reason in document.not_seen],
    ]
    of_growth = [
        column("memory of", "of", left=True),
        column("rank", "rank"),
        column("bytes per step", "bytes_per_step", ",.0f"),
        column("from", "low", ",.0f"),
        column("to", "high", ",.0f"),
        column("held by", "held_by", left=True),
        column("where", "where", left=True),
    ]
    of_ranks = [
        column("rank", "rank"),
        column("starts", "starts"),
        column("steps", "steps"),
        column("median (ms)", "median_ms", ".3f"),
        column("seconds", "seconds", ".1f"),
    ]
    phases = []
    if document.steps is not None:
        times = [f"{name} {significant(ms, 3)} ms" for name, ms in document.steps.phase_ms.items()]
        phases.append(f"In the median of the lowest rank's steps, by the host: {', '.join(times)}")
    return [
        Section("Slow steps", columns, slow, notes),
        Section("Memory that grows", of_growth, growth, list(document.not_yet_known)),
        Section("Ranks", of_ranks, ranks, phases),
    ]
