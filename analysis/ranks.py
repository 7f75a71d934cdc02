"""Straggler detection: the ranks of one run side by side, and the order in which they reach their collectives.

In a collective the last rank to arrive makes the others wait, so a slow rank has the shortest collectives.  The clocks
of ranks on several machines differ: they are aligned by the ends of the collectives, which all ranks leave together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.links import Links
from analysis.timeline import gpu_timeline, is_communication
from analysis.trace import where_name
from analysis.wording import narrow_table
from harness.tables import Column, column

SAME_CLOCK_US = 1e3  # ranks whose collectives end within this time of each other share a clock


@dataclass
class Rank:
    """The part of a rank's trace that the comparison needs."""

    rank: int
    file: str
    step_ms: list[float]
    busy_ms: float | None
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
    busy = gpu_timeline(links.gpu)["busy_ms"]
    return Rank(trace.rank or 0, trace.path.name, ((steps["end"] - steps["start"]) / 1e3).tolist(), busy, collectives)


def compare_ranks(ranks: list[Rank]) -> dict:
    """Step times, communication and lateness of each rank; the straggler, if one is late in most collectives."""
    ranks = sorted(ranks, key=lambda one: one.rank)
    counts = {len(one.collectives) for one in ranks}
    n = min(counts)
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
    out = {"rows": rows, "collectives_compared": n, "straggler": None}
    if n == 0:
        return out | {"straggler_reason": "no collectives in the traces"}
    # The last n of each: if recording began in the middle of a step, the first ones are missing.
    start, end = (np.stack([one.collectives[key].to_numpy()[-n:] for one in ranks]) for key in ("start", "end"))
    offsets = np.median(end - end[0], axis=1)  # of each rank's clock against the first's
    offsets[np.abs(offsets) < SAME_CLOCK_US] = 0.0
    arrived = start - offsets[:, None]  # [ranks, collectives]
    late = arrived - arrived.min(axis=0)
    last = np.bincount(late.argmax(axis=0), minlength=len(ranks))
    for row, offset, lateness, times_last in zip(rows, offsets, late, last, strict=True):
        row |= {
            "clock_offset_us": float(offset),
            "mean_lateness_us": float(lateness.mean()),
            "median_lateness_us": float(np.median(lateness)),
            "last_to_arrive": int(times_last),
        }
    worst = int(last.argmax())
    others = np.delete(late.mean(axis=1), worst)
    if last[worst] > n / 2 and n > 1 and late[worst].mean() > 2 * others.max(initial=0.0):
        out["straggler"] = ranks[worst].rank
    return out


def rank_columns(comparison: dict) -> list[Column]:
    late = [
        column("mean lateness us", "mean_lateness_us", ",.1f"),
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
    return f"Rank {comparison['straggler']} is a straggler: it is the last to arrive in most collectives"


def rank_lines(comparison: dict) -> list[str]:
    n = comparison["collectives_compared"]
    aligned = ", clocks aligned by the ends of these" if n else ""
    return [
        f"Ranks: {len(comparison['rows'])}, {n} collectives compared{aligned}",
        *narrow_table(rank_columns(comparison), comparison["rows"]),
        straggler_text(comparison),
    ]
