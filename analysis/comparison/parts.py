"""What do the parts of two profiled runs take?  By component where both have the same parts, else by class."""

from __future__ import annotations

import math

from analysis.attribution.components import OPERATOR_KINDS

NOISE = "within noise"
STANDARD_ERRORS = 2.0  # of a difference of means, below which it is noise
COMMON = 0.5  # of the step of each run, in parts that both have: below it, components are not compared
Times = dict[str, tuple[float, float | None]]  # by name: ms per profiled step and its standard error, None if unknown


def compare_profiles(run: str, before: dict, after: dict, spread: float) -> dict[str, list[dict] | str]:
    """Rows of `components`, `classes` and `operators`, of two operator_analysis.json of one clock.

    spread is the relative difference between runs with the same settings.
    """
    out: dict = {"components": []}
    if reason := why_by_class(before, after):
        out["components_reason"] = f"{run}: {reason}"
    else:
        out["components"] = changes(run, "component", *same_parts(*map(component_times, (before, after))), spread)
    out["classes"] = changes(run, "class", class_times(before), class_times(after), spread)
    return out | {"operators": changes(run, "operator", operator_times(before), operator_times(after), spread)}


def why_by_class(before: dict, after: dict) -> str | None:
    """Why two runs are compared by class alone; None if they have components in common."""
    sources = [one["attribution"]["source"] for one in (before, after)]
    if sources[0] != sources[1]:
        return f"components are {sources[0]} in one run, {sources[1]} in the other"
    if sources[0] == OPERATOR_KINDS:
        return f"components are {OPERATOR_KINDS} in both runs"
    names = [{row["component"] for row in one["components"]} for one in (before, after)]
    shares = [
        sum(row["share"] for row in one["components"] if row["component"] in names[0] & names[1])
        for one in (before, after)
    ]
    return f"the parts that both runs have take only {min(shares):.0%} of a step" if min(shares) < COMMON else None


def component_times(analysis: dict) -> Times:
    """The standard error is that of the spread over steps."""
    n = analysis["attribution"]["steps"]
    return {
        row["component"]: (row["ms_per_step"], None if row.get("std_ms") is None else row["std_ms"] / math.sqrt(n))
        for row in analysis["components"]
    }


def class_times(analysis: dict) -> Times:
    """The standard error is that of the step times."""
    return with_error_of_steps({row["class"]: row["ms_per_step"] for row in analysis["classes"]}, analysis)


def operator_times(analysis: dict) -> Times:
    """Self time; the standard error is that of the step times."""
    about = analysis["attribution"]
    key = "self_device_us" if about["clock"] == "GPU" else "self_cpu_us"
    each = {row["name"]: row[key] / 1e3 / about["steps"] for row in analysis["operators"]}
    return with_error_of_steps(each, analysis)


def with_error_of_steps(each: dict[str, float], analysis: dict) -> Times:
    steps = analysis["steps"]
    relative = None if steps["std_ms"] is None else steps["std_ms"] / steps["mean_ms"] / math.sqrt(steps["count"])
    return {name: (ms, None if relative is None else ms * relative) for name, ms in each.items()}


def same_parts(before: Times, after: Times) -> tuple[Times, Times]:
    """The times by parts that both runs have: parts of one run alone are added up, those of a group, such as
    `attention.`, if the other run has its own parts of it, else all together."""
    alone = [{name: None for name in one if name not in other} for one, other in ((before, after), (after, before))]
    groups = [{name.partition(".")[0] for name in names if "." in name} for names in alone]
    out = []
    for times, own in ((before, alone[0]), (after, alone[1])):
        sums: Times = {name: time for name, time in times.items() if name not in own}
        for name in own:
            title = title_of(name, alone, groups)
            ms, error = sums.get(title, (0.0, 0.0))
            more = times[name][1]
            sums[title] = (ms + times[name][0], None if error is None or more is None else math.hypot(error, more))
        out.append(sums)
    return out[0], out[1]


def title_of(name: str, alone: list[dict], groups: list[set]) -> str:
    """'attention: scores, softmax, weighted_sum -> sdpa' of a part that only one run has."""
    group = name.partition(".")[0]
    if "." in name and group in groups[0] & groups[1]:
        parts = (
            ", ".join(one.removeprefix(f"{group}.") for one in names if one.startswith(f"{group}.")) for names in alone
        )
        return f"{group}: {' -> '.join(parts)}"
    shared = groups[0] & groups[1]
    rest = [one for names in alone for one in names if one.partition(".")[0] not in shared or "." not in one]
    return f"in one run only: {', '.join(rest)}"


def changes(run: str, kind: str, before: Times, after: Times, spread: float) -> list[dict]:
    """What each component, class or operator takes in both runs, the largest change first."""
    rows = []
    for name in dict.fromkeys([*before, *after]):
        (before_ms, error), (after_ms, other) = before.get(name, (0.0, None)), after.get(name, (0.0, None))
        known = [one for one in (error, other) if one is not None]
        noise, change = None, after_ms - before_ms
        if known:
            noise = max(STANDARD_ERRORS * math.hypot(*known), spread * min(before_ms, after_ms))
        if name not in before or name not in after:
            difference = "new" if name in after else "gone"
        elif noise is None:
            difference = "spread unknown"
        elif abs(change) <= noise:
            difference = NOISE
        else:
            difference = "more" if change > 0 else "less"
        rows.append(
            {
                "run": run,
                kind: name,
                "baseline_ms": before_ms,
                "ms": after_ms,
                "change_ms": change,
                "ratio": after_ms / before_ms if before_ms else None,
                "noise_ms": noise,
                "difference": difference,
            }
        )
    return sorted(rows, key=lambda row: -abs(row["change_ms"]))
