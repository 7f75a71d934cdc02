"""Do the ranks of a program train one model?

Each has written a few numbers of its tensors in some steps: of parameters, of gradients as the
optimizer's step began, and of its state.  What has to be equal follows from what wraps the
parameters; without a wrapper, from what was equal in the first of these steps.
"""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

import numpy as np

from harness.base.tables import grouped
from harness.base.text import count_of, significant
from harness.base.units import MB
from harness.instruments.audit import NAMES_SHOWN, RANKS_DIFFER, AuditFinding

# In norms of the tensor.  A reduction gives all ranks the same bits; what ranks compute each for
# itself, as the norms of a layer in shards, may be rounded otherwise.
REDUCED_APART = 1e-6
COMPUTED_APART = 1e-3
KINDS = {"gradient": "gradients", "parameter": "parameters", "state": "the optimizer's state"}
REDUCED = ("DDP", "replica")  # what wraps a parameter that has to be equal
NOT_COMPARED = "shard"
# Collectives of one line, in a step: so many, of so few bytes each, are told of.
MANY = 8
SMALL_BYTES = 1 * MB
# Broadcasts of buffers are told of from this on: time of the host, or bytes.
BUFFERS_MS, BUFFERS_SHARE = 1.0, 0.02  # of the step
BUFFERS_BYTES, BUFFERS_OF_GRADIENTS = 1 * MB, 0.1


class RankComparison(NamedTuple):
    findings: list[AuditFinding]
    notes: list[str]
    not_checked: list[dict[str, str]]


class Apart(NamedTuple):
    """How far a kind of tensors of one parameter is apart over the ranks that have it."""

    position: int  # of the parameter
    kind: str  # of KINDS
    why: str | None  # what wraps the parameter
    ranks: tuple[int, ...]
    by_step: dict[int, float]  # in norms


class Split(NamedTuple):
    """Where ranks that were equal are not any more."""

    apart: Apart
    equal_step: int | None  # the last in which they were seen equal
    step: int  # the first in which they differ


def compare_ranks(processes: list[dict]) -> RankComparison:
    """processes: of each rank of a process group, what it has recorded."""
    sketches = {one["rank"]: one["sketches"] for one in processes if "sketches" in one}
    comparison = RankComparison([], [], [])
    if not sketches:  # one rank, or each trains by itself
        return comparison
    why_not = why_not_compared(sketches, processes[0]["world_size"])
    if why_not:
        comparison.not_checked.append({"check": "ranks_differ", "reason": why_not})
        return comparison
    names = [[row["name"] for row in of_rank["parameters"]] for of_rank in sketches.values()]
    if any(of_rank != names[0] for of_rank in names):
        comparison.notes.append("ranks train other parameters each, as stages of a pipeline do")
    else:
        compare_tensors(sketches, comparison)
    comparison.findings.extend(reductions_found(sketches))
    comparison.findings.extend(broadcasts_found(sketches, step_ms_of(processes)))
    compare_data(sketches, comparison)
    if all(finding.check != "same_data" for finding in comparison.findings):
        comparison.findings.extend(same_random_numbers(sketches))
    comparison.findings.extend(repeated_orders(sketches))
    comparison.findings.extend(small_collectives(sketches))
    return comparison


def why_not_compared(sketches: dict[int, dict], world_size: int) -> str:
    missing = [rank for rank in range(world_size) if rank not in sketches]
    if missing:
        ranks = ", ".join(map(str, missing))
        return f"nothing was written by rank {ranks}"
    if not any(of_rank["steps"] for of_rank in sketches.values()):
        return "no optimizer stepped in the steps that are looked at"
    if not common_steps(sketches):
        steps = [", ".join(of_rank["steps"]) for of_rank in sketches.values()]
        return f"ranks were looked at in other steps each: {' and '.join(steps)}"
    return ""


def common_steps(sketches: dict[int, dict]) -> list[int]:
    of_ranks = [set(map(int, of_rank["steps"])) for of_rank in sketches.values()]
    return sorted(set.intersection(*of_ranks))


# ---- Parameters, gradients, state ----------------------------------------------------------------


def compare_tensors(sketches: dict[int, dict], comparison: RankComparison) -> None:
    tensors = tensors_apart(sketches)
    equal_at_first = set()  # parameters whose gradients are
    for row in tensors:
        if row.kind == "gradient" and next(iter(row.by_step.values())) <= REDUCED_APART:
            equal_at_first.add(row.position)
    never_reduces = any(
        model["micro_steps"] and not model["times"]
        for of_rank in sketches.values()
        for model in of_rank["models"]
    )
    splits, by_design = [], set()
    for row in tensors:
        split = split_of(row)
        if split is None:
            continue
        has_to_be_equal = row.why in REDUCED and not never_reduces
        if has_to_be_equal or (row.why is None and row.position in equal_at_first):
            splits.append(split)
        else:
            by_design.add(row.position)
    if splits:
        comparison.findings.append(ranks_differ(splits, sketches))
    elif by_design:
        comparison.notes.append(by_design_text(len(by_design), tensors, never_reduces))


def tensors_apart(sketches: dict[int, dict]) -> list[Apart]:
    """Of each parameter, each kind and each group of ranks; none of what is in shards."""
    steps = common_steps(sketches)
    first = next(iter(sketches.values()))
    tensors = []
    for position, parameter in enumerate(first["parameters"]):
        if parameter["why"] == NOT_COMPARED:
            continue
        for ranks in groups_of(sketches, position):
            for kind in KINDS:
                by_step = {}
                for step in steps:
                    distance = distance_between(sketches, ranks, step, position, kind)
                    if distance is not None:
                        by_step[step] = distance
                if by_step:
                    tensors.append(Apart(position, kind, parameter["why"], ranks, by_step))
    return tensors


def groups_of(sketches: dict[int, dict], position: int) -> list[tuple[int, ...]]:
    """Of ranks that have the parameter in common."""
    groups: dict[tuple[int, ...], None] = {}  # each once
    for of_rank in sketches.values():
        ranks = of_rank["parameters"][position]["ranks"] or sorted(sketches)
        groups[tuple(ranks)] = None
    return [group for group in groups if len(group) > 1]


def distance_between(
    sketches: dict[int, dict], ranks: tuple[int, ...], step: int, position: int, kind: str
) -> float | None:
    """The largest distance of a rank from the first, in norms; None where one has no such
    tensor."""
    numbers = []
    for rank in ranks:
        row = sketches[rank]["steps"][str(step)][position]
        numbers.append(numbers_in(row, kind))
    if any(not of_rank or len(of_rank) != len(numbers[0]) for of_rank in numbers):
        return None
    values = np.array(numbers)  # [ranks, numbers]
    if not np.isfinite(values).all():
        return None
    largest = np.linalg.norm(values, axis=1).max()
    distance = np.linalg.norm(values - values[0], axis=1).max()
    return float(distance / largest) if largest else 0.0


def numbers_in(row: dict, kind: str) -> list[float]:
    if kind != "state":
        return row[kind] or []
    numbers = []
    for name in sorted(row["state"]):
        numbers.extend(row["state"][name])
    return numbers


def split_of(row: Apart) -> Split | None:
    """None where the ranks are equal in all steps."""
    limit = COMPUTED_APART if row.why is None else REDUCED_APART
    equal_step = None
    for step, distance in row.by_step.items():
        if distance > limit:
            return Split(row, equal_step, step)
        equal_step = step
    return None


def ranks_differ(splits: list[Split], sketches: dict[int, dict]) -> AuditFinding:
    kind = next(kind for kind in KINDS if any(one.apart.kind == kind for one in splits))
    of_kind = [one for one in splits if one.apart.kind == kind]
    first = min(of_kind, key=lambda one: one.step)
    parameters = next(iter(sketches.values()))["parameters"]
    positions = sorted({one.apart.position for one in of_kind})
    when = f"from step {first.step} on"
    if first.equal_step is not None:
        when = f"between step {first.equal_step} and {first.step}"
    number = f"{len(positions)} of {count_of(len(parameters), 'parameter')}"
    if len(positions) == len(parameters):
        number = f"all {count_of(len(parameters), 'parameter')}"
    difference = max(max(one.apart.by_step.values()) for one in of_kind)
    how_far = f"by {significant(difference, 2)} of their norm"
    if kind == "gradient":
        how_far = norms_text(of_kind, first, sketches) or how_far
    detail = f"{RANKS_DIFFER}{KINDS[kind]} differ {when} in {number} ({how_far})"
    return AuditFinding(
        check="ranks_differ",
        detail=detail + cause_text(sketches),
        parameters=[parameters[position]["name"] for position in positions[:NAMES_SHOWN]],
        between_steps=[first.equal_step, first.step],
        difference=difference,
    )


def norms_text(of_kind: list[Split], first: Split, sketches: dict[int, dict]) -> str:
    """Of the gradients in the first step in which they differ; empty where the norms are alike."""
    positions = {one.apart.position for one in of_kind if one.apart.ranks == first.apart.ranks}
    norms = {}
    for rank in first.apart.ranks:
        rows = sketches[rank]["steps"][str(first.step)]
        squares = [rows[position]["norm"] ** 2 for position in positions if rows[position]["norm"]]
        norms[rank] = math.sqrt(sum(squares))
    one = first.apart.ranks[0]
    other = max(first.apart.ranks, key=lambda rank: abs(norms[rank] - norms[one]))
    norm, other_norm = significant(norms[one], 2), significant(norms[other], 2)
    if norm == other_norm:
        return ""
    return f"norm {norm} on rank {one}, {other_norm} on rank {other}"


def cause_text(sketches: dict[int, dict]) -> str:
    """Where DDP's last backward pass of a step does not reduce and an earlier one does, or no
    forward pass is one of DDP."""
    for model in next(iter(sketches.values()))["models"]:
        if model["times"] and not model["ends_reduced"]:
            return (
                "; the last backward pass of a step does not reduce: no_sync() belongs around all"
                f" micro-steps but the last, {model['where']}"
            )
        if model["micro_steps"] == 0:
            return (
                "; DDP reduces what its own forward passes lead to, and there are none: call the"
                " wrapper, not its .module"
            )
    return ""


def by_design_text(differing: int, tensors: list[Apart], never_reduces: bool) -> str:
    number = count_of(differing, "parameter")
    if never_reduces:
        why = "DDP reduces nothing in a step, as with no_sync() around all of it"
    elif any(row.why not in (None, *REDUCED) for row in tensors):
        why = "a communication hook of DDP decides"
    elif any(max(row.by_step.values()) <= REDUCED_APART for row in tensors):
        why = "only some tensors were equal in the first step, as in local SGD"
    else:
        why = "as parts of a model or models of their own, they never were equal"
    return f"ranks differ in {number}, taken for meant: {why}"


# ---- Reductions and data -------------------------------------------------------------------------


def reductions_found(sketches: dict[int, dict]) -> list[AuditFinding]:
    """Of DDP's models that reduce more than once between two steps of their optimizer."""
    findings = []
    for model in next(iter(sketches.values()))["models"]:
        if model["times"] < 2:
            continue
        cure = "no_sync() around all micro-steps but the last saves the others"
        if model["forgets_forward"]:
            cure = "no_sync() must hold the forward pass too"
        needed = model["bytes"] / MB
        size = significant(model["times"] * needed, 3)
        detail = (
            f"DDP reduces its gradients {model['times']} times a step, {size} MB where"
            f" {significant(needed, 3)} MB are needed: {cure}, {model['where']}"
        )
        findings.append(
            AuditFinding(
                check="reduced_too_often", detail=detail, times=model["times"], where=model["where"]
            )
        )
    return findings


def step_ms_of(processes: list[dict]) -> float | None:
    """The shortest of the timed steps' medians; None where none was timed, or a rank waited for
    cores: the others then wait for it, in whatever they call."""
    if any(one.get("disturbance", {}).get("disturbed") for one in processes):
        return None
    medians = [statistics.median(one["times_ms"]) for one in processes if one.get("times_ms")]
    return min(medians, default=None)


def broadcasts_found(sketches: dict[int, dict], step_ms: float | None) -> list[AuditFinding]:
    """Of DDP's models that send their buffers before forward passes, where it costs something: of
    the step's time, in which the rank that waits least is counted, or in bytes, beside those of the
    gradients."""
    findings = []
    for rows in zip(*(of_rank["models"] for of_rank in sketches.values()), strict=False):
        first, times = rows[0], min(len(row["buffers"]["ms"]) for row in rows)
        if not times:
            continue
        buffers = first["buffers"]
        ms, sent = min(sum(row["buffers"]["ms"]) for row in rows), times * buffers["bytes"]
        takes_time = step_ms is not None and ms > max(BUFFERS_MS, BUFFERS_SHARE * step_ms)
        takes_bytes = sent > max(BUFFERS_BYTES, BUFFERS_OF_GRADIENTS * first["bytes"])
        if not takes_time and not takes_bytes:
            continue
        are_equal = all(row["buffers"]["numbers"] == buffers["numbers"] for row in rows)
        known = "all ranks have them already" if are_equal else "rank 0 keeps its own either way"
        detail = (
            f"DDP broadcasts its buffers before {count_of(times, 'forward pass')} of a step,"
            f" {significant(sent / MB, 2)} MB and {significant(ms, 2)} ms of the host, though"
            f" {known}: {buffers['flag']}=False, {first['where']}"
        )
        findings.append(
            AuditFinding(
                check="buffers_broadcast", detail=detail, times=times, where=first["where"]
            )
        )
    return findings


def compare_data(sketches: dict[int, dict], comparison: RankComparison) -> None:
    """Over the ranks that train one model, as those of DDP: whether all get the same batches."""
    data = [
        (tuple(row["ranks"]), place, row)
        for of_rank in sketches.values()
        for place, row in enumerate(of_rank["data"])
    ]
    for (ranks, _), rows in grouped(data, lambda row: row[:2]).items():
        same = [row for _, _, row in rows]
        inputs = same[0]["inputs"]
        has_others = len(ranks) > 1 and any(inputs)
        if not has_others or any(row["inputs"] != inputs for row in same):
            continue
        batches = f"{len(inputs)} batches" if len(inputs) > 1 else "the batch"
        repeats = len(inputs) > 1 and all(batch == inputs[0] for batch in inputs)
        if repeats or all(row["is_constant"] for row in same):
            comparison.notes.append(
                "all ranks get the same constant batch, as synthetic inputs are"
            )
        else:
            detail = (
                f"{len(ranks)} ranks train on the same data, {batches} of a step, and learn what"
                " one would: a DistributedSampler, or a seed for each rank"
            )
            comparison.findings.append(AuditFinding(check="same_data", detail=detail))


def same_random_numbers(sketches: dict[int, dict]) -> list[AuditFinding]:
    """Of ranks of a model in DDP that draw some in each step, as for dropout."""
    first = next(iter(sketches.values()))
    steps = [str(step) for step in common_steps(sketches)]
    groups = {row["ranks"] and tuple(row["ranks"]) for row in first["parameters"]}
    if None in groups or len(groups) != 1 or len(steps) < 2:
        return []
    states = [[of_rank["random"][step] for step in steps] for of_rank in sketches.values()]
    draws_in_each = len(set(states[0])) == len(steps)
    if not draws_in_each or any(of_rank != states[0] for of_rank in states):
        return []
    detail = (
        f"{len(sketches)} ranks draw the same random numbers in each step, as for dropout:"
        " torch.manual_seed(seed + rank), once the model is made"
    )
    return [AuditFinding(check="same_random_numbers", detail=detail)]


def repeated_orders(sketches: dict[int, dict]) -> list[AuditFinding]:
    """Of samplers that do not hear of a new epoch."""
    findings = []
    for order in next(iter(sketches.values()))["repeated_orders"]:
        detail = (
            f"the data had the order of epoch {order['epoch']} {order['times']} times: the"
            f" DistributedSampler needs set_epoch() before each epoch, {order['where']}"
        )
        findings.append(AuditFinding(check="repeated_order", detail=detail, where=order["where"]))
    return findings


def small_collectives(sketches: dict[int, dict]) -> list[AuditFinding]:
    """Of lines of the program that call many in a step.  One call of all their bytes saves the time
    that each but one takes at least: that of the shortest."""
    findings = []
    for row in next(iter(sketches.values()))["collectives"]:
        calls, of_each = row["calls"], row["bytes"] / row["calls"]
        if calls < MANY or of_each > SMALL_BYTES:
            continue
        one_ms = row["ms"] - (calls - 1) * row["shortest_ms"]
        detail = (
            f"{calls} calls of all_reduce a step, {significant(of_each / 1e3, 2)} kB each, take"
            f" {significant(row['ms'], 2)} ms of the host: one of all of them about"
            f" {significant(one_ms, 2)} ms, {row['where']}"
        )
        findings.append(
            AuditFinding(check="small_collectives", detail=detail, times=calls, where=row["where"])
        )
    return findings
