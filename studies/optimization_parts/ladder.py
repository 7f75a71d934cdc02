"""Which sets of flags are measured, and what does the baseline's trace allow them?  Optimizations
alone, and one on top of another: the rungs of a ladder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from harness.model.optimizations import OPTIMIZATIONS, Optimization, answering, missing
from harness.model.workload import Workload
from harness.schema import Unknown
from studies.engine.device import DeviceProperties
from tiny_llama_v1 import TinyLlamaWorkload

RUNGS = tuple(record for record in OPTIMIZATIONS if record.studied)  # in the order of the ladder
NAMES = tuple(rung.name for rung in RUNGS)
OVERLAP = "what each saves adds up to the whole step, so they must save the same"


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
    rungs = []
    for rung in RUNGS:
        if rung.name in names and rung.flag != f"--precision {precision}":
            rungs.append(rung)
    ladder: list[tuple[Optimization, ...]] = [()]
    for rung in rungs:
        if rung.climbs:
            kept = [below for below in ladder[-1] if rung.name not in below.replaced_by]
            ladder.append((*kept, rung))
    alone = [FlagSet((rung,), None) for rung in rungs if (rung,) not in ladder]
    climbing = [FlagSet(rungs_below, height) for height, rungs_below in enumerate(ladder)]
    return [climbing[0], *alone, *climbing[1:]]


def last_flag(flags: str) -> str:
    """'--compile' of '--attention sdpa --compile'"""
    return f"--{flags.split('--')[-1]}".strip()


# ---- Which of them there are ---------------------------------------------------------------------


def names_for(workload: Workload, names: Sequence[str]) -> list[str]:
    """Those of the names that can be switched on for it from outside of a file with a
    model of its own."""
    if isinstance(workload, TinyLlamaWorkload):
        return list(names)
    possible = []
    for rung in RUNGS:
        if rung.name in names and rung.any_model and rung.setting not in workload.lacks:
            possible.append(rung.name)
    return possible


def why_no_rung(name: str, workload: Workload) -> str:
    """Why this one is in no ladder of the workload."""
    rung = next(rung for rung in RUNGS if rung.name == name)
    if rung.setting == "precision" and rung.value == workload.precision:
        return f"{rung.flag} is the precision of the baseline"
    if not rung.any_model:
        return f"{rung.flag} has no effect with --workload: the file has a model of its own"
    return f"{rung.flag}: {workload.lacks[rung.setting]}"


def not_here(workload: Workload, device: DeviceProperties) -> str | None:
    """Why this device cannot run it, None if it can."""
    return device.unsupported.get(workload.precision) or missing(workload.training, device.on_gpu)


# ---- What the baseline's trace allows ------------------------------------------------------------


class Allowed(NamedTuple):
    """Ratios of step times that the opportunities of the baseline's trace allow; of several rungs
    by the sum of what each saves, so too low where they save the same."""

    bound: float | Unknown  # the least
    estimate: float | Unknown  # the likely one

    @classmethod
    def unknown(cls, why: str) -> Allowed:
        return cls(Unknown(why), Unknown(why))


def allowed_by_trace(rungs: Sequence[Optimization], analysis: dict | None) -> Allowed:
    """analysis: operator_analysis.json of the baseline; None if there is none."""
    if not rungs:
        return Allowed.unknown("it has none of these flags")
    if analysis is None:
        return Allowed.unknown("there is no trace")
    if not analysis["opportunities"]:
        return Allowed.unknown(analysis.get("opportunities_reason", "there is no trace"))
    answered, reasons = opportunities_for(rungs, analysis)
    if not answered:
        return Allowed.unknown("; ".join(reasons))
    faster, costs = [], 0.0
    for opportunity in answered:
        if "memory_bound_mb" in opportunity:  # it saves memory, and costs time
            costs += 1 / opportunity["speedup_bound"] - 1
        else:
            faster.append(opportunity)
    return Allowed(bound_of(faster), estimate_of(faster, costs))


def opportunities_for(
    rungs: Sequence[Optimization], analysis: dict
) -> tuple[list[dict], list[str]]:
    """The opportunities of the trace that the flags of the rungs answer, and the reasons why others
    are none."""
    by_name = {row["name"]: row for row in analysis["opportunities"]}
    refused = {row["name"]: row["reason"] for row in analysis["not_here"]}
    answered, reasons = [], []
    for rung in rungs:
        for name in rung.answers:
            opportunity = by_name.get(name, {})
            if opportunity.get("flag") in answering(name):
                answered.append(opportunity)
            else:  # on a CPU, for one, only a compiler fuses a norm
                why = refused.get(name) or opportunity.get("how", "not in this trace")
                reasons.append(f"{name}: {why}")
    return answered, reasons


def bound_of(faster: list[dict]) -> float | Unknown:
    """faster: the opportunities that save time."""
    if not faster:
        return Unknown("it saves memory, not time")
    ratio = 1 - sum(saving(opportunity["speedup_bound"]) for opportunity in faster)
    if ratio > 0:
        return ratio
    for opportunity in faster:
        if "speedup_bound_reason" in opportunity:
            return Unknown(opportunity["speedup_bound_reason"])
    return Unknown(OVERLAP)


def estimate_of(faster: list[dict], costs: float) -> float | Unknown:
    """costs: of those that save memory, as a share of the step."""
    if not costs and not any(opportunity["speedup_estimate"] for opportunity in faster):
        return Unknown("the trace gives a bound alone")
    saved = 0.0
    for opportunity in faster:
        saved += saving(opportunity["speedup_estimate"] or opportunity["speedup_bound"])
    ratio = 1 + costs - saved
    return ratio if ratio > 0 else Unknown(OVERLAP)


def saving(speedup: float | None) -> float:
    """The share of the step that is saved; all of it without a limit."""
    return 1 - 1 / speedup if speedup else 1.0
