"""Step time breakdown: all time of the profiled steps by component of the model, by phase, by class
of operators."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import pandas as pd
from typing_extensions import NotRequired

from analysis.attribution.components import (
    BETWEEN,
    IDLE,
    NAMED_RANGES,
    NEARLY_ALL,
    OVERHEAD,
    UNATTRIBUTED,
)
from analysis.attribution.ledger.of_steps import left_out, of_steps, us_by
from analysis.trace.timeline import Timeline
from harness.base.sections import Section
from harness.base.tables import Column, added_up, column, text_columns
from harness.base.text import shortened, significant
from harness.instruments.phases import PHASES
from harness.run.run_summary import ONE_STEP
from harness.schema import Document, field

LEFT_OUT_FROM = 0.01  # of the step: as every recording has at its ends
TOLD_FROM = 0.0005  # of the step: less is 0.0%


class Attribution(Document):
    clock: str = field("GPU or host")
    source: str = field("where the names of the components come from")
    steps: int = field("of which the mean is taken")
    ms_per_step: float = field("on this clock")
    unattributed_share: float = field("of it, that no component has")
    left_out_ms: NotRequired[float] = field(
        "of the trace, without a GPU event: no part of the steps; absent if hardly any"
    )

    @staticmethod
    def contradiction(value: dict) -> str | None:
        """A trace without steps counts as one."""
        return None if value["steps"] > 0 else f"steps: is {value['steps']}"


class PhaseRow(Document):
    phase: str = field("data, forward, backward, optimizer, between phases, idle")
    ms_per_step: float = field("in it")
    share: float = field("of the step")


class ComponentRow(Document):
    component: str = field("part of the model, or what else takes time")
    ms_per_step: float = field("in it")
    std_ms: float | None = field("over the steps", null=ONE_STEP)
    share: float = field("of the step")
    phases_ms: dict[str, float] = field("ms per step by phase")


class ClassRow(Document):
    class_: str = field("of operators")
    ms_per_step: float = field("in it")
    share: float = field("of the step")


class Breakdown(NamedTuple):
    """Where the time of a step goes; phases, components and classes each add up to it."""

    attribution: Attribution
    phases: list[PhaseRow]
    components: list[ComponentRow]  # the most time first
    classes: list[ClassRow]  # the most time first


def step_breakdown(timeline: Timeline) -> Breakdown:
    """Time without any event is idle on a GPU, and framework overhead on a host."""
    slices = of_steps(timeline)
    steps = len(timeline.steps)
    step_ms = float(slices["us"].sum() / 1e3 / steps)
    ms = ms_by_component_and_phase(slices, steps)
    attribution = Attribution(
        clock="GPU" if timeline.on_gpu else "host",
        source=timeline.source,
        steps=steps,
        ms_per_step=step_ms,
        unattributed_share=share_of(ms.loc[UNATTRIBUTED].sum(), step_ms),
    )
    left_out_ms = float(left_out(timeline)["us"].sum() / 1e3)
    if timeline.on_gpu and left_out_ms >= LEFT_OUT_FROM * step_ms:
        attribution.left_out_ms = left_out_ms
    phases = []
    for phase, phase_ms in ms.sum().items():
        share = share_of(phase_ms, step_ms)
        phases.append(PhaseRow(phase=phase, ms_per_step=float(phase_ms), share=share))
    components = component_rows(ms, std_ms_of_components(slices, steps), step_ms)
    return Breakdown(attribution, phases, components, class_rows(slices, steps))


def share_of(ms: float, step_ms: float) -> float:
    return float(ms / step_ms) if step_ms else 0.0


def ms_by_component_and_phase(slices: pd.DataFrame, steps: int) -> pd.DataFrame:
    """[components, phases] ms per step: the components with the most time first, also the one that
    nothing is attributed to; the phases in their order."""
    us = us_by(slices, "component", "phase").unstack(fill_value=0.0)
    us = us.rename(index=str, columns=str)
    components = sorted({*us.index, UNATTRIBUTED})
    phases = [phase for phase in (*PHASES, BETWEEN, IDLE) if phase in us]
    ms = us.reindex(components, fill_value=0.0).reindex(columns=phases) / 1e3 / steps
    most_first = ms.sum(axis=1).sort_values(ascending=False, kind="stable").index
    return ms.loc[most_first]


def std_ms_of_components(slices: pd.DataFrame, steps: int) -> dict[str, float]:
    """The sample standard deviation over the steps, by component; of a single step, of none."""
    if steps == 1:
        return {}
    us = us_by(slices, "component", "step").unstack(fill_value=0.0)
    us = us.reindex(columns=range(steps), fill_value=0.0)
    return (us.std(axis=1) / 1e3).to_dict()


def component_rows(
    ms: pd.DataFrame, std_ms: dict[str, float], step_ms: float
) -> list[ComponentRow]:
    """ms: as ms_by_component_and_phase() gives it."""
    rows = []
    for component, by_phase in ms.iterrows():
        component_ms = by_phase.sum()
        if component_ms <= 0 and component != UNATTRIBUTED:
            continue
        phases_ms = {phase: float(phase_ms) for phase, phase_ms in by_phase.items() if phase_ms > 0}
        row = ComponentRow(
            component=component,
            ms_per_step=float(component_ms),
            std_ms=std_ms.get(component),
            share=share_of(component_ms, step_ms),
            phases_ms=phases_ms,
        )
        rows.append(row)
    return rows


def class_rows(slices: pd.DataFrame, steps: int) -> list[ClassRow]:
    """Time per profiled step by class of operators, largest first.

    Views, allocation, autograd's own work and the start of a collective count with the time outside
    of operators: as framework overhead on a host, as idle on a GPU.  On a host, all that happens
    while data is fetched is data.
    """
    us_of_class = us_by(slices, "class").sort_values(ascending=False, kind="stable")
    total_us = us_of_class.sum() or 1.0
    rows = []
    for name, us in us_of_class.items():
        ms_per_step = float(us / 1e3 / steps)
        rows.append(ClassRow(class_=name, ms_per_step=ms_per_step, share=float(us / total_us)))
    return rows


# ---- For a reader --------------------------------------------------------------------------------

TIME_COLUMNS = [column("ms/step", "ms_per_step", "~3"), column("share", "share", ".1%")]


def rows_with_sums(breakdown: Breakdown) -> list[ComponentRow]:
    """The components, the sums of the groups whose names begin alike, and the sum of all."""
    rows = [*breakdown.components]
    groups: Counter = Counter()
    if breakdown.attribution.source == NAMED_RANGES:
        for row in breakdown.components:
            group, dot, _ = row.component.partition(".")
            groups[group + dot] += 1
    for group, members in groups.items():
        if group.endswith(".") and members > 1:
            of_group = [row for row in breakdown.components if row.component.startswith(group)]
            rows.append(sum_of_components(f"sum of {group}*", of_group))
    rows.append(sum_of_components("sum", breakdown.components))
    return rows


def sum_of_components(name: str, rows: list[ComponentRow]) -> ComponentRow:
    by_phase = added_up(pair for row in rows for pair in row.phases_ms.items())
    return ComponentRow(
        component=name,
        ms_per_step=sum(row.ms_per_step for row in rows),
        std_ms=None,
        share=sum(row.share for row in rows),
        phases_ms=dict(by_phase),
    )


def largest_text(breakdown: Breakdown, marked_steps: int) -> str:
    """'matmul 32.2%, attention 7.5% of 42.0 ms (GPU time, mean of 4 steps)': what tells best where
    the time goes: the components, or the classes of operators where one component holds nearly all
    that ran."""
    about = breakdown.attribution
    shares = {row.component: row.share for row in breakdown.components}
    ran = [share for name, share in shares.items() if name not in (IDLE, OVERHEAD, "data")]
    if max(ran, default=0.0) >= NEARLY_ALL * sum(ran):
        shares = {row.class_: row.share for row in breakdown.classes}
    largest = sorted(shares.items(), key=lambda item: -item[1])[:3]
    parts = [f"{shortened(name)} {share:.1%}" for name, share in largest if share >= TOLD_FROM]
    mean = mean_of(about, marked_steps)
    step = f"{significant(about.ms_per_step, 3)} ms ({about.clock} time, {mean})"
    return f"{', '.join(parts)} of {step}"


def mean_of(about: Attribution, marked_steps: int) -> str:
    """What the time of the step is of: 'mean of 4 steps'."""
    if marked_steps:
        return f"mean of {about.steps} steps" if about.steps > 1 else "one step"
    if not about.left_out_ms:
        return "the whole trace"
    return f"the trace but for {significant(about.left_out_ms, 3)} ms without a GPU event"


def breakdown_section(breakdown: Breakdown, marked_steps: int, unreliable: str = "") -> Section:
    """The step by component and phase, and by class of operators.  unreliable: why the components
    should not be relied on."""
    about = breakdown.attribution
    step_ms = significant(about.ms_per_step, most=3)
    columns = text_columns("component")
    phases = []
    for row in breakdown.phases:
        columns.append(phase_column(row.phase))
        if row.share > 0:
            phases.append(f"{row.phase} {row.share:.1%}")
    behind = " on the GPU, which runs behind the host" if about.clock == "GPU" else ""
    by_class = Section(
        "Classes of operators",
        [column("class", "class_", left=True), *TIME_COLUMNS],
        breakdown.classes,
        ["The same time by class, as the names of operators and kernels tell it"],
    )
    return Section(
        "Step time breakdown",
        [*columns, *TIME_COLUMNS],
        rows_with_sums(breakdown),
        [f"Times are ms per step, by {about.source}; they add up to the step{behind}"],
        {
            "Step": f"{step_ms} ms of {about.clock} time, {mean_of(about, marked_steps)}",
            "Phases": ", ".join(phases),
        },
        figure="step_breakdown",
        lead=largest_text(breakdown, marked_steps),
        warning=unreliable,
        parts=[by_class],
    )


def phase_column(phase: str) -> Column:
    return Column(phase, lambda row: row.phases_ms.get(phase), "~3")
