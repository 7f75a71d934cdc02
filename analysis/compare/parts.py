"""What do the parts of two profiled runs take?  By component where both have the same parts, else
by class."""

from __future__ import annotations

import math
from typing import NamedTuple

from analysis.attribution.components import OPERATOR_KINDS
from analysis.compare.noise import NOISE, SPREAD_UNKNOWN, Measured, noise_of_difference
from analysis.compare.runs import Profile
from harness.schema import Document, field

# The tables of a comparison, and what their rows are.
PART_KINDS = {"components": "component", "classes": "class", "operators": "operator"}
OTHER_PROFILER = "by another profiler"  # which adds to what it records: no change of the code
# Of the step of each run, in parts that both have: below it, components are not compared.
COMMON = 0.5
NO_RATIO = "no step was completed, or the baseline took no time"


class ChangeRow(Document):
    run: str = field("its name")
    baseline_ms: float = field("per step")
    ms: float = field("per step")
    change_ms: float = field("per step")
    ratio: float | None = field("to the baseline's", null=NO_RATIO)
    noise_ms: float | None = field(
        "the smallest told from zero", null="one of the profiles has a single step"
    )
    difference: str = field("in words")

    @property
    def part(self) -> str:
        """Its name."""
        raise NotImplementedError


class ComponentChange(ChangeRow):
    component: str = field("parts of one run alone are one row")

    @property
    def part(self) -> str:
        return self.component


class ClassChange(ChangeRow):
    class_: str = field("of operators")

    @property
    def part(self) -> str:
        return self.class_


class OperatorChange(ChangeRow):
    operator: str = field("by self time")

    @property
    def part(self) -> str:
        return self.operator


class ProfileChanges(NamedTuple):
    """What the parts of a run take, against those of the baseline; the largest change first."""

    components: list[ComponentChange]
    classes: list[ClassChange]
    operators: list[OperatorChange]
    components_reason: str | None  # why there are no components; None: there are


class PartTime(NamedTuple):
    """What a part takes per profiled step, in ms."""

    ms: float
    error_ms: float | None  # standard error; None: not known


Times = dict[str, PartTime]  # by the name of the part
NOTHING = PartTime(0.0, None)


class ProfileTimes(NamedTuple):
    """What each component, class and operator of a profile takes."""

    components: Times
    classes: Times
    operators: Times


class Profiles(NamedTuple):
    """What is known of two profiles, to tell changes from noise."""

    spread: float  # relative difference between runs with the same settings
    freedoms: tuple[int, int]  # of the standard errors of both: profiled steps, but one
    same_profiler: bool


class Change(NamedTuple):
    """The fields of a ChangeRow, of one part."""

    baseline_ms: float
    ms: float
    change_ms: float
    ratio: float | None
    noise_ms: float | None
    difference: str


def compare_profiles(run: str, before: Profile, after: Profile, spread: float) -> ProfileChanges:
    """The changes of a run by part, of two profiles of one clock.

    spread: the relative difference between runs with the same settings.
    """
    reason = why_by_class(before, after)
    first, second = times_of(before), times_of(after)
    profiles = Profiles(
        spread=spread,
        freedoms=(freedom_of(before), freedom_of(after)),
        same_profiler=before.recorded_by == after.recorded_by,
    )
    components: list[ComponentChange] = []
    if reason is None:
        parts = same_parts(first.components, second.components)
        for name, change in changes(*parts, profiles):
            components.append(ComponentChange(run=run, component=name, **change._asdict()))
    classes = []
    for name, change in changes(first.classes, second.classes, profiles):
        classes.append(ClassChange(run=run, class_=name, **change._asdict()))
    operators = []
    for name, change in changes(first.operators, second.operators, profiles):
        operators.append(OperatorChange(run=run, operator=name, **change._asdict()))
    why = None if reason is None else f"{run}: {reason}"
    return ProfileChanges(components, classes, operators, why)


def freedom_of(profile: Profile) -> int:
    """Of the standard errors of a profile: its steps, but one."""
    return max(1, profile.breakdown.attribution.steps - 1)


def why_by_class(before: Profile, after: Profile) -> str | None:
    """Why two runs are compared by class alone; None if they have components in common."""
    source, other = before.breakdown.attribution.source, after.breakdown.attribution.source
    if source != other:
        return f"components are {source} in one run, {other} in the other"
    if source == OPERATOR_KINDS:
        return f"components are {OPERATOR_KINDS} in both runs"
    common = components_of(before) & components_of(after)
    least = min(share_of(common, before), share_of(common, after))
    if least < COMMON:
        return f"the parts that both runs have take only {least:.0%} of a step"
    return None


def components_of(profile: Profile) -> set[str]:
    return {row.component for row in profile.breakdown.components}


def share_of(components: set[str], profile: Profile) -> float:
    """The share of a step that these components take."""
    return sum(row.share for row in profile.breakdown.components if row.component in components)


def times_of(profile: Profile) -> ProfileTimes:
    """By table.  The standard error of a component is that of its spread over steps; of a class,
    and of the self time of an operator, that of the step times."""
    n_steps, steps = profile.breakdown.attribution.steps, profile.steps
    relative = None
    if steps.std_ms is not None and steps.mean_ms:
        relative = steps.std_ms / steps.mean_ms / math.sqrt(steps.count)

    def of_steps(ms: float) -> PartTime:
        return PartTime(ms, None if relative is None else ms * relative)

    components = {}
    for row in profile.breakdown.components:
        error_ms = None if row.std_ms is None else row.std_ms / math.sqrt(n_steps)
        components[row.component] = PartTime(row.ms_per_step, error_ms)
    operators = {}
    for row in profile.operators:
        self_us = row.self_device_us if profile.clock == "GPU" else row.self_cpu_us
        operators[row.name] = of_steps(self_us / 1e3 / n_steps)
    classes = {row.class_: of_steps(row.ms_per_step) for row in profile.breakdown.classes}
    return ProfileTimes(components, classes, operators)


# ---- Parts that both runs have -------------------------------------------------------------------


class Alone(NamedTuple):
    """The parts that only one of two runs has."""

    before: list[str]
    after: list[str]

    def shared_groups(self) -> set[str]:
        """Groups such as `attention`, of whose parts each run has some of its own."""
        return groups_of(self.before) & groups_of(self.after)


def groups_of(names: list[str]) -> set[str]:
    return {name.partition(".")[0] for name in names if "." in name}


def same_parts(before: Times, after: Times) -> tuple[Times, Times]:
    """The times by parts that both runs have: parts of one run alone are added up, those of a
    group, such as `attention.`, if the other run has its own parts of it, else all together."""
    alone = Alone(
        before=[name for name in before if name not in after],
        after=[name for name in after if name not in before],
    )
    return added_up(before, alone.before, alone), added_up(after, alone.after, alone)


def added_up(times: Times, own: list[str], alone: Alone) -> Times:
    """The times of a run, those of its own parts as sums."""
    sums = {name: time for name, time in times.items() if name not in own}
    for name in own:
        title = title_of_part(name, alone)
        total, more = sums.get(title, PartTime(0.0, 0.0)), times[name]
        error_ms = None
        if total.error_ms is not None and more.error_ms is not None:
            error_ms = math.hypot(total.error_ms, more.error_ms)
        sums[title] = PartTime(total.ms + more.ms, error_ms)
    return sums


def title_of_part(name: str, alone: Alone) -> str:
    """'attention: scores, softmax, weighted_sum -> sdpa' of a part that only one run has."""
    shared = alone.shared_groups()
    if is_of(name, shared):
        group = name.partition(".")[0]
        return f"{group}: {parts_of(group, alone.before)} -> {parts_of(group, alone.after)}"
    rest = [other for other in (*alone.before, *alone.after) if not is_of(other, shared)]
    return f"in one run only: {', '.join(rest)}"


def is_of(name: str, groups: set[str]) -> bool:
    """Whether a part belongs to one of the groups."""
    return "." in name and name.partition(".")[0] in groups


def parts_of(group: str, names: list[str]) -> str:
    """'scores, softmax' of the parts of attention."""
    prefix = f"{group}."
    return ", ".join(name.removeprefix(prefix) for name in names if name.startswith(prefix))


# ---- Changes -------------------------------------------------------------------------------------


def changes(before: Times, after: Times, profiles: Profiles) -> list[tuple[str, Change]]:
    """What each part takes in both runs, by its name, the largest change first."""
    rows = []
    for name in dict.fromkeys([*before, *after]):
        rows.append((name, change_of_part(before.get(name), after.get(name), profiles)))
    return sorted(rows, key=lambda row: -abs(row[1].change_ms))


def change_of_part(before: PartTime | None, after: PartTime | None, profiles: Profiles) -> Change:
    """None: a run does not have the part."""
    first, second = before or NOTHING, after or NOTHING
    change_ms = second.ms - first.ms
    noise_ms = noise_of_part(first, second, profiles)
    if before is None:
        difference = "new"
    elif after is None:
        difference = "gone"
    else:
        difference = word_of_change(change_ms, noise_ms)
    if not profiles.same_profiler and difference not in (NOISE, SPREAD_UNKNOWN):
        difference = OTHER_PROFILER
    ratio = second.ms / first.ms if first.ms else None
    return Change(first.ms, second.ms, change_ms, ratio, noise_ms, difference)


def word_of_change(change_ms: float, noise_ms: float | None) -> str:
    """Of a part that both runs have."""
    if noise_ms is None:
        return SPREAD_UNKNOWN
    if abs(change_ms) <= noise_ms:
        return NOISE
    return "more" if change_ms > 0 else "less"


def noise_of_part(before: PartTime, after: PartTime, profiles: Profiles) -> float | None:
    """The smallest change in ms that can be told from none; None: no error is known."""
    known = []
    for time, freedom in zip((before, after), profiles.freedoms, strict=True):
        if time.error_ms is not None:
            known.append(Measured(time.ms, time.error_ms, freedom))
    if not known:
        return None
    return max(noise_of_difference(*known), profiles.spread * min(before.ms, after.ms))
