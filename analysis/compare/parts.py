"""What do the parts of two profiled runs take?  By component where both have the same parts, else
by class."""

import itertools
import math

from analysis.attribution.components import OPERATOR_KINDS
from analysis.compare.noise import NOISE, SPREAD_UNKNOWN, Measured, noise_of_difference

PART_KINDS = {
    "components": "component",
    "classes": "class",
    "operators": "operator",
}  # tables: what their rows are
OTHER_PROFILER = "by another profiler"  # which adds to what it records: no change of the code
COMMON = (
    0.5  # of the step of each run, in parts that both have: below it, components are not compared
)
Time = tuple[float, float | None]  # ms per profiled step and its standard error, None if unknown
Times = dict[str, Time]  # by name
NOTHING: Time = (0.0, None)
Freedoms = tuple[int, int]  # of the standard errors of both runs: profiled steps, but one


def compare_profiles(
    run: str, before: dict, after: dict, spread: float
) -> dict[str, list[dict] | str]:
    """Rows of `components`, `classes` and `operators`, of two operator_analysis.json of one clock.

    spread is the relative difference between runs with the same settings.
    """
    first, second = times_of(before), times_of(after)
    freedoms = tuple(max(1, one["attribution"]["steps"] - 1) for one in (before, after))
    times, reason = (
        {table: (first[table], second[table]) for table in PART_KINDS},
        why_by_class(before, after),
    )
    times["components"] = ({}, {}) if reason else same_parts(*times["components"])
    found = {
        table: changes(run, kind, *times[table], spread, freedoms)
        for table, kind in PART_KINDS.items()
    }
    for row in (
        itertools.chain(*found.values()) if profiler_of(before) != profiler_of(after) else ()
    ):
        row["difference"] = (
            row["difference"] if row["difference"] in (NOISE, SPREAD_UNKNOWN) else OTHER_PROFILER
        )
    return found | ({"components_reason": f"{run}: {reason}"} if reason else {})


def profiler_of(analysis: dict) -> str:
    """What recorded a trace; earlier documents do not say it."""
    return analysis["integrity"].get("recorded_by", "torch.profiler")


def why_by_class(before: dict, after: dict) -> str | None:
    """Why two runs are compared by class alone; None if they have components in common."""
    sources = [one["attribution"]["source"] for one in (before, after)]
    if sources[0] != sources[1]:
        return f"components are {sources[0]} in one run, {sources[1]} in the other"
    if sources[0] == OPERATOR_KINDS:
        return f"components are {OPERATOR_KINDS} in both runs"
    names = [{row["component"] for row in one["components"]} for one in (before, after)]
    common = names[0] & names[1]
    shares = [
        sum(row["share"] for row in one["components"] if row["component"] in common)
        for one in (before, after)
    ]
    return (
        f"the parts that both runs have take only {min(shares):.0%} of a step"
        if min(shares) < COMMON
        else None
    )


def times_of(analysis: dict) -> dict[str, Times]:
    """By table.  The standard error of a component is that of its spread over steps; of a class,
    and of the self time of an operator, that of the step times."""
    about, steps = analysis["attribution"], analysis["steps"]
    self_us = "self_device_us" if about["clock"] == "GPU" else "self_cpu_us"
    relative = None
    if steps["std_ms"] is not None and steps["mean_ms"]:
        relative = steps["std_ms"] / steps["mean_ms"] / math.sqrt(steps["count"])

    def of_steps(name: str, ms: float) -> tuple[str, Time]:
        return name, (ms, None if relative is None else ms * relative)

    def of_itself(row: dict) -> tuple[str, Time]:
        std_ms = row.get("std_ms")
        return row["component"], (
            row["ms_per_step"],
            None if std_ms is None else std_ms / math.sqrt(about["steps"]),
        )

    return {
        "components": dict(map(of_itself, analysis["components"])),
        "classes": dict(of_steps(row["class"], row["ms_per_step"]) for row in analysis["classes"]),
        "operators": dict(
            of_steps(row["name"], row[self_us] / 1e3 / about["steps"])
            for row in analysis["operators"]
        ),
    }


def same_parts(before: Times, after: Times) -> tuple[Times, Times]:
    """The times by parts that both runs have: parts of one run alone are added up, those of a
    group, such as `attention.`, if the other run has its own parts of it, else all together."""
    alone = [
        {name: None for name in one if name not in other}
        for one, other in ((before, after), (after, before))
    ]
    groups = [{name.partition(".")[0] for name in names if "." in name} for names in alone]
    out = []
    for times, own in ((before, alone[0]), (after, alone[1])):
        sums: Times = {name: time for name, time in times.items() if name not in own}
        for name in own:
            title = title_of_part(name, alone, groups)
            ms, error = sums.get(title, (0.0, 0.0))
            more = times[name][1]
            sums[title] = (
                ms + times[name][0],
                None if error is None or more is None else math.hypot(error, more),
            )
        out.append(sums)
    return out[0], out[1]


def title_of_part(name: str, alone: list[dict], groups: list[set]) -> str:
    """'attention: scores, softmax, weighted_sum -> sdpa' of a part that only one run has."""
    group = name.partition(".")[0]
    if "." in name and group in groups[0] & groups[1]:
        of = f"{group}."
        parts = (
            ", ".join(one.removeprefix(of) for one in names if one.startswith(of))
            for names in alone
        )
        return f"{group}: {' -> '.join(parts)}"
    shared = groups[0] & groups[1]
    rest = [
        one
        for names in alone
        for one in names
        if one.partition(".")[0] not in shared or "." not in one
    ]
    return f"in one run only: {', '.join(rest)}"


def changes(
    run: str, kind: str, before: Times, after: Times, spread: float, freedoms: Freedoms
) -> list[dict]:
    """What each component, class or operator takes in both runs, the largest change first."""
    names = dict.fromkeys([*before, *after])
    rows = []
    for name in names:
        change = change_of_part(before.get(name), after.get(name), spread, freedoms)
        rows.append({"run": run, kind: name} | change)
    return sorted(rows, key=lambda row: -abs(row["change_ms"]))


def change_of_part(
    before: Time | None, after: Time | None, spread: float, freedoms: Freedoms
) -> dict:
    """The change of one part; None: a run does not have it."""
    (before_ms, error), (after_ms, other) = before or NOTHING, after or NOTHING
    known, noise = [], None
    for (ms, error_ms), freedom in zip(
        ((before_ms, error), (after_ms, other)), freedoms, strict=True
    ):
        if error_ms is not None:
            known.append(Measured(ms, error_ms, freedom))
    if known:
        noise = max(noise_of_difference(*known), spread * min(before_ms, after_ms))
    change_ms = after_ms - before_ms
    if before is None or after is None:
        difference = "new" if before is None else "gone"
    elif noise is None:
        difference = SPREAD_UNKNOWN
    elif abs(change_ms) <= noise:
        difference = NOISE
    else:
        difference = "more" if change_ms > 0 else "less"
    times = {"baseline_ms": before_ms, "ms": after_ms, "change_ms": change_ms}
    times |= {"ratio": after_ms / before_ms if before_ms else None}
    return times | {"noise_ms": noise, "difference": difference}
