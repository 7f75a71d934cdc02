"""The rungs of the ladder: optimizations by name, alone and one on top of another."""

from collections.abc import Sequence
from typing import NamedTuple

from harness.model.optimizations import OPTIMIZATIONS, Optimization, answering, missing
from harness.model.workload import Workload
from harness.schema import because, unknown
from studies.engine.device import DeviceProperties
from tiny_llama_v1 import TinyLlamaWorkload

RUNGS = tuple(one for one in OPTIMIZATIONS if one.studied)  # in the order of the ladder
NAMES = tuple(rung.name for rung in RUNGS)


def last_flag(flags: str) -> str:
    """'--compile' of '--attention sdpa --compile'"""
    return f"--{flags.split('--')[-1]}".strip()


def names_for(workload: Workload, names: Sequence[str]) -> list[str]:
    """Those of the names that can be switched on for it from outside of a file with a
    model of its own."""
    if isinstance(workload, TinyLlamaWorkload):
        return list(names)
    return [
        rung.name
        for rung in RUNGS
        if rung.name in names and rung.any_model and rung.setting not in workload.lacks
    ]


def why_no_rung(name: str, workload: Workload) -> str:
    """Why this one is in no ladder of the workload."""
    rung = next(rung for rung in RUNGS if rung.name == name)
    if rung.setting == "precision" and rung.value == workload.precision:
        return f"{rung.flag} is the precision of the baseline"
    if not rung.any_model:
        return f"{rung.flag} has no effect with --workload: the file has a model of its own"
    return f"{rung.flag}: {workload.lacks[rung.setting]}"


class FlagSet(NamedTuple):
    """Rungs that are measured together, and their place:
    alone, on the ladder (0: the baseline), or both."""

    rungs: tuple[Optimization, ...]
    ladder: int | None

    @property
    def flags(self) -> str:
        return " ".join(rung.flag for rung in self.rungs)


def flag_sets(names: Sequence[str], precision: str) -> list[FlagSet]:
    """The baseline, each rung alone, and the ladder of those that climb: those on the ladder last,
    from the bottom.

    precision: of the baseline; a rung that is this precision is left out.
    """
    rungs = [
        rung for rung in RUNGS if rung.name in names and rung.flag != f"--precision {precision}"
    ]
    ladder: list[tuple[Optimization, ...]] = [()]
    for rung in rungs:
        if rung.climbs:
            ladder.append(
                (*(below for below in ladder[-1] if rung.name not in below.replaced_by), rung)
            )
    alone = [FlagSet((rung,), None) for rung in rungs if (rung,) not in ladder]
    climbing = [FlagSet(some, height) for height, some in enumerate(ladder)]
    return [climbing[0], *alone, *climbing[1:]]


def not_here(workload: Workload, device: DeviceProperties) -> str | None:
    """Why this device cannot run it, None if it can."""
    return device.unsupported.get(workload.precision) or missing(workload.training, device.on_gpu)


# ---- What the baseline's trace allows ------------------------------------------------------------


def predicted_ratio(rungs: Sequence[Optimization], analysis: dict | None) -> dict:
    """`bound`, the least ratio of step times that the opportunities of the baseline's trace allow
    these rungs, and `estimate`, the likely one; of several rungs by the sum of what each saves, so
    too low where they save the same.

    analysis: operator_analysis.json of the baseline; None if there is none.
    """
    names = ("bound", "estimate")
    if not rungs:
        return unknown("it has none of these flags", *names)
    if analysis is None or not analysis["opportunities"]:
        return unknown((analysis or {}).get("opportunities_reason", "there is no trace"), *names)
    rows = {row["name"]: row for row in analysis["opportunities"]}
    refused = {row["name"]: row["reason"] for row in analysis["not_here"]}
    known, reasons = [], []
    for name in (name for rung in rungs for name in rung.answers):
        row = rows.get(name, {})
        if row.get("flag") in answering(name):
            known.append(row)
        else:  # on a CPU, for one, only a compiler fuses a norm
            reasons.append(f"{name}: {refused.get(name) or row.get('how', 'not in this trace')}")
    if not known:
        return unknown("; ".join(reasons), *names)
    faster = [
        row for row in known if "memory_bound_mb" not in row
    ]  # the others save memory, and cost time
    costs = sum(1 / row["speedup_bound"] - 1 for row in known if row not in faster)
    least = 1 - sum(saving(row["speedup_bound"]) for row in faster)
    likely = (
        1 + costs - sum(saving(row["speedup_estimate"] or row["speedup_bound"]) for row in faster)
    )
    estimated = costs or any(row["speedup_estimate"] for row in faster)
    ratios = dict(
        zip(names, (least if faster else None, likely if estimated else None), strict=True)
    )
    ratios = {name: ratio if ratio and ratio > 0 else None for name, ratio in ratios.items()}
    unbounded = [row["speedup_bound_reason"] for row in faster if "speedup_bound_reason" in row]
    overlap = "what each saves adds up to the whole step, so they must save the same"
    no_bound = next(iter(unbounded), overlap) if faster else "it saves memory, not time"
    no_estimate = overlap if estimated else "the trace gives a bound alone"
    return ratios | because(no_bound, "bound") | because(no_estimate, "estimate")


def saving(speedup: float | None) -> float:
    """The share of the step that is saved; all of it without a limit."""
    return 1 - 1 / speedup if speedup else 1.0
