"""Straggler detection: the ranks of one run side by side, and the order in which they reach their collectives.

In a collective the last rank to arrive makes the others wait, so a slow rank has the shortest collectives.  What counts
is the waiting that a rank causes, not how often it is last: most collectives begin within microseconds.  The clocks
of ranks on several machines differ: they are aligned by the ends of the collectives, which all ranks leave together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.links import Links
from analysis.timeline import gpu_timeline, is_communication
from analysis.trace import where_name
from analysis.wording import count_of, narrow_table
from harness.tables import Column, column

ENDS_MEET_US = 1e3  # of a collective, on aligned clocks: if most differ by more, they do not tell who was late
SAME_RUN_US = 86_400e6  # ranks that recorded a day apart are not of one run
WORTH_NAMING = 0.01  # of the time: less waiting than this makes no straggler


@dataclass
class Rank:
    """The part of a rank's trace that the comparison needs."""

    rank: int | None  # by the trace, else by the file's name
    world_size: int | None
    file: str
    step_ms: list[float]
    busy_ms: float | None  # of the steps
    collectives: pd.DataFrame  # name, start, end, in us on the rank's own clock


def rank_facts(links: Links) -> Rank:
    trace = links.trace
    if links.on_gpu and (communication := is_communication(links.gpu)).any():
        found = links.gpu[communication]
    else:  # gloo runs on the host, in ranges with its name
        found = trace.annotations[where_name(trace.annotations, lambda name: name.startswith(("gloo:", "nccl:")))]
    collectives = found[["name", "start", "end"]].sort_values("start", ignore_index=True)
    collectives[["start", "end"]] += trace.base_us
    steps = links.steps if links.steps_are_marked else links.steps.iloc[:0]
    busy = gpu_timeline(links.gpu[(links.gpu["step"] >= 0).to_numpy()])["busy_ms"]
    in_name = re.search(r"rank[_-]?(\d+)", trace.path.name)
    rank = int(in_name[1]) if trace.rank is None and in_name else trace.rank
    world_size = trace.distributed.get("world_size")
    world_size = world_size if isinstance(world_size, int) else None
    steps_ms = ((steps["end"] - steps["start"]) / 1e3).tolist()
    return Rank(rank, world_size, trace.path.name, steps_ms, busy, collectives)


def not_of_one_run(ranks: list[Rank]) -> str | None:
    """Why these traces cannot be those of the ranks of one run; None if they can."""
    numbers = [one.rank for one in ranks]
    if None in numbers:
        return "some tell no rank, by distributedInfo or by the name of the file"
    if len({*numbers}) < len(numbers):
        return "several are of the same rank"
    if len({one.world_size for one in ranks}) > 1:
        return "they are of runs with different numbers of ranks"
    begins = [one.collectives["start"].iloc[0] for one in ranks if len(one.collectives)]
    if begins and (apart := max(begins) - min(begins)) > SAME_RUN_US:
        return f"they were recorded {apart / SAME_RUN_US:,.0f} days apart"
    return None


def compare_ranks(ranks: list[Rank]) -> dict:
    """Step times, communication and lateness of each rank; the straggler, if one causes most of the waiting.

    A rank causes excess waiting where it is the last to arrive: the time since the rank before it.
    """
    ranks = sorted(ranks, key=lambda one: one.rank)
    n = min(len(one.collectives) for one in ranks)
    rows = [
        {
            "rank": one.rank,
            "file": one.file,
            "mean_step_ms": float(np.mean(one.step_ms)) if one.step_ms else None,
            "gpu_busy_ms": one.busy_ms,
            "in_collectives_ms": float((one.collectives["end"] - one.collectives["start"]).sum() / 1e3),
            "collectives": len(one.collectives),
        }
        for one in ranks
    ]
    out = {"rows": rows, "collectives_compared": 0, "straggler": None}
    if n == 0:
        return out | {"straggler_reason": "no collectives in the traces"}
    # The last n of each: if recording began in the middle of a step, the first ones are missing.
    names = [one.collectives["name"].astype(str).tolist()[-n:] for one in ranks]
    if any(other != names[0] for other in names):
        return out | {"straggler_reason": "the ranks do not have the same collectives in the same order"}
    start, end = (np.stack([one.collectives[key].to_numpy()[-n:] for one in ranks]) for key in ("start", "end"))
    offsets = np.median(end - end[0], axis=1)  # of each rank's clock against the first's
    arrived, left = start - offsets[:, None], end - offsets[:, None]  # [ranks, collectives]
    ends_differ = left.max(axis=0) - left.min(axis=0)
    if (typical := float(np.median(ends_differ))) > ENDS_MEET_US:
        why = f"the clocks do not meet: aligned by the collectives, these still end {typical / 1e3:,.1f} ms apart"
        return out | {"straggler_reason": why}
    late = arrived - arrived.min(axis=0)
    last, before = late.argmax(axis=0), np.sort(late, axis=0)[-2]
    caused = np.bincount(last, weights=late.max(axis=0) - before, minlength=len(ranks)) / 1e3
    spread = late.max(axis=0) > ends_differ.max()
    last_where_spread = np.bincount(last[spread], minlength=len(ranks))
    columns = zip(rows, offsets, late, caused, last_where_spread, strict=True)
    for row, offset, lateness, waiting, times_last in columns:
        row |= {
            "clock_offset_us": float(offset),
            "mean_lateness_us": float(lateness.mean()),
            "median_lateness_us": float(np.median(lateness)),
            "caused_waiting_ms": float(waiting),
            "last_to_arrive": int(times_last),
        }
    out |= {
        "collectives_compared": n,
        "collectives_with_spread": int(spread.sum()),
        "excess_waiting_ms": float(caused.sum()),
    }
    compared_ms = float(left.max() - arrived.min()) / 1e3
    return out | straggler(ranks, caused, last_where_spread, compared_ms)


def straggler(ranks: list[Rank], caused: np.ndarray, last: np.ndarray, compared_ms: float) -> dict:
    """The rank that causes most of the excess waiting (`caused`, in ms by rank), or why none is named.

    last: in how many collectives that begin apart each rank was the last."""
    absent = (ranks[0].world_size or len(ranks)) - len(ranks)
    if absent:
        return {"straggler": None, "straggler_reason": f"{count_of(absent, 'rank')} of the run absent, which may be it"}
    worst, total = int(caused.argmax()), caused.sum()
    if total < WORTH_NAMING * compared_ms:
        return {"straggler": None, "straggler_reason": f"ranks wait for one another for only {total:.3f} ms"}
    if caused[worst] <= total / 2 or last[worst] < 2:
        return {
            "straggler": None,
            "straggler_reason": "no rank causes more than half of the excess waiting",
        }
    return {"straggler": ranks[worst].rank}


def rank_columns(comparison: dict) -> list[Column]:
    late = [
        column("mean lateness us", "mean_lateness_us", ",.1f"),
        column("waiting caused ms", "caused_waiting_ms", ",.3f"),
        column("last to arrive", "last_to_arrive"),
        column("clock offset us", "clock_offset_us", ",.1f"),
    ]
    return [
        column("rank", "rank"),
        column("step ms", "mean_step_ms", ",.3f"),
        column("GPU busy ms", "gpu_busy_ms", ",.3f"),
        column("in collectives ms", "in_collectives_ms", ",.3f"),
        column("collectives", "collectives"),
        *(late if comparison["collectives_compared"] else []),
    ]


def straggler_text(comparison: dict) -> str:
    if comparison["straggler"] is None:
        return f"No straggler: {comparison['straggler_reason']}"
    row = next(row for row in comparison["rows"] if row["rank"] == comparison["straggler"])
    return (
        f"Rank {row['rank']} is a straggler: it causes {row['caused_waiting_ms']:.1f} of "
        f"{comparison['excess_waiting_ms']:.1f} ms of waiting, last in {row['last_to_arrive']} of "
        f"{comparison['collectives_with_spread']} collectives"
    )


def rank_lines(comparison: dict) -> list[str]:
    n = comparison["collectives_compared"]
    aligned = ", clocks aligned by the ends of these" if n else ""
    return [
        f"Ranks: {len(comparison['rows'])}, {n} collectives compared{aligned}",
        *narrow_table(rank_columns(comparison), comparison["rows"]),
        straggler_text(comparison),
    ]
