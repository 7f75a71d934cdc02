"""What is stacked in figures and in charts alike?  Names and values of the parts, from the documents."""

from __future__ import annotations

from collections.abc import Sequence

from harness.base.units import MB


def stack_of_gpu(timeline: dict) -> dict[str, float]:
    """The GPU's ms from its first event to its last: computation, communication, copies, idle by cause."""
    parts = {
        "computation": timeline["computation_ms"],
        "exposed communication": timeline["exposed_comm_ms"],
        "exposed copies": timeline["exposed_memcpy_ms"],
    }
    causes = timeline["idle_by_cause"] or [{"cause": "cause unknown", "ms": timeline["idle_ms"]}]
    return parts | {f"idle: {row['cause'].replace('_', ' ')}": row["ms"] for row in causes if row["ms"] > 0}


def stack_of_ranks(rows: list[dict]) -> dict[str, list[float]]:
    """The ms of each rank's step: what communication exposed, as transfer and waiting where these are told apart, and
    the rest."""
    step, exposed, waiting = (
        [row[key] or 0.0 for row in rows] for key in ("ms_per_step", "exposed_comm_ms", "waiting_ms")
    )
    rest = {"no exposed communication": minus(step, exposed)}
    if any(row["waiting_ms"] is None for row in rows):
        return rest | {"exposed communication": exposed}
    return rest | {"transfer": minus(exposed, waiting), "waiting for other ranks": waiting}


def minus(minuends: Sequence[float], subtrahends: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(minuends, subtrahends, strict=True)]


def stack_of_memory(timeline: dict, categories: Sequence[str]) -> dict[str, list[float]]:
    """Live MB by category after each event of memory_timeline.json, of those categories that it has."""
    return {
        category: [size / MB for size in timeline[f"{category}_bytes"]]
        for category in categories
        if f"{category}_bytes" in timeline
    }
