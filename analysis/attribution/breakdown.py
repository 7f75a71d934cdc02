"""Step time breakdown: all time of the profiled steps by component of the model, by phase, by class
of operators."""

from collections import Counter

from analysis.attribution.components import (
    BETWEEN,
    IDLE,
    NAMED_RANGES,
    NEARLY_ALL,
    OVERHEAD,
    UNATTRIBUTED,
)
from analysis.attribution.ledger import of_steps, us_by
from analysis.trace.timeline import Timeline
from harness.base.sections import Section
from harness.base.tables import Column, column, sum_row, text_columns
from harness.base.text import shortened, significant
from harness.instruments.phases import PHASES

TOLD_FROM = 0.0005  # of the step: less is 0.0%


def step_breakdown(timeline: Timeline) -> dict:
    """Time per profiled step by component and phase; rows add up to the step.

    Time without any event is idle on a GPU, and framework overhead on a host.
    """
    slices, n = of_steps(timeline), len(timeline.steps)
    sums = us_by(slices, "component", "phase").unstack(fill_value=0.0)
    sums = sums.rename(index=str, columns=str).reindex(
        sorted({*map(str, sums.index), UNATTRIBUTED}), fill_value=0.0
    )
    sums = (
        sums.reindex(columns=[phase for phase in (*PHASES, BETWEEN, IDLE) if phase in sums])
        / 1e3
        / n
    )
    sums = sums.loc[sums.sum(axis=1).sort_values(ascending=False, kind="stable").index]
    step_ms = float(slices["us"].sum() / 1e3 / n)
    # Sample standard deviation over the steps; None for a single one.
    by_step = (
        us_by(slices, "component", "step")
        .unstack(fill_value=0.0)
        .reindex(columns=range(n), fill_value=0.0)
    )
    spread = (by_step.std(axis=1) / 1e3).to_dict() if n > 1 else {}

    def share(ms: float) -> float:
        return float(ms / step_ms) if step_ms else 0.0

    about = {
        "clock": "GPU" if timeline.on_gpu else "host",
        "source": timeline.source,
        "steps": n,
        "ms_per_step": step_ms,
    }
    about |= {"unattributed_share": share(sums.loc[UNATTRIBUTED].sum())}
    phases = [
        {"phase": phase, "ms_per_step": float(ms), "share": share(ms)}
        for phase, ms in sums.sum().items()
    ]
    components = []
    for name, row in sums.iterrows():
        ms, of_phases = row.sum(), {phase: float(ms) for phase, ms in row.items() if ms > 0}
        if ms > 0 or name == UNATTRIBUTED:
            found = {
                "component": name,
                "ms_per_step": float(ms),
                "std_ms": spread.get(name),
                "share": share(ms),
            }
            components.append(found | {"phases_ms": of_phases})
    return {"attribution": about, "phases": phases, "components": components}


def class_times(timeline: Timeline) -> list[dict]:
    """Time per profiled step by class of operators, largest first; rows add up to the step.

    Views, allocation, autograd's own work and the start of a collective count with the time outside
    of operators: as framework overhead on a host, as idle on a GPU.  On a host, all that happens
    while data is fetched is data.
    """
    sums = us_by(of_steps(timeline), "class").sort_values(ascending=False, kind="stable")
    total, n = sums.sum() or 1.0, len(timeline.steps)
    return [
        {"class": name, "ms_per_step": float(us / 1e3 / n), "share": float(us / total)}
        for name, us in sums.items()
    ]


def breakdown_rows(analysis: dict) -> list[dict]:
    """The components, the sums of the groups whose names begin alike, and the sum of all."""
    rows = analysis["components"]
    named = analysis["attribution"]["source"] == NAMED_RANGES
    groups = Counter(
        group
        for row in rows
        for group, dot, _ in [row["component"].partition(".")]
        if named and dot
    )
    several = [f"{group}." for group, n in groups.items() if n > 1]
    parts = ([row for row in rows if row["component"].startswith(group)] for group in several)
    sums = [component_sum(f"sum of {group}*", of) for group, of in zip(several, parts, strict=True)]
    return [*rows, *sums, component_sum("sum", rows)]


def component_sum(name: str, rows: list[dict]) -> dict:
    phases: Counter = Counter()
    for row in rows:
        phases.update(row["phases_ms"])
    return sum_row("component", name, rows, ("ms_per_step", "share")) | {"phases_ms": dict(phases)}


TIME_COLUMNS = [column("ms/step", "ms_per_step", "~3"), column("share", "share", ".1%")]


def largest_text(analysis: dict) -> str:
    """'matmul 32.2%, attention 7.5% of 42.0 ms (GPU time, mean of 4 steps)': what tells best where
    the time goes: the components, or the classes of operators where one component holds nearly all
    that ran."""
    rows, key, about = analysis["components"], "component", analysis["attribution"]
    ran = [row["share"] for row in rows if row["component"] not in (IDLE, OVERHEAD, "data")]
    if max(ran, default=0.0) >= NEARLY_ALL * sum(ran):
        rows, key = analysis["classes"], "class"
    ranked = sorted(rows, key=lambda row: -row["share"])[:3]
    parts = ", ".join(
        f"{shortened(row[key])} {row['share']:.1%}" for row in ranked if row["share"] >= TOLD_FROM
    )
    return (
        f"{parts} of {significant(about['ms_per_step'], 3)} ms ({about['clock']} time,"
        f" {mean_of(analysis)})"
    )


def mean_of(analysis: dict) -> str:
    """What the time of the step is of: 'mean of 4 steps'."""
    steps = analysis["attribution"]["steps"]
    if not analysis["steps"]["count"]:
        return "the whole trace"
    return f"mean of {steps} steps" if steps > 1 else "one step"


def breakdown_section(analysis: dict) -> Section:
    """The step by component and phase, and by class of operators."""
    about = analysis["attribution"]
    time = (
        f"{significant(about['ms_per_step'], most=3)} ms of {about['clock']} time,"
        f" {mean_of(analysis)}"
    )
    phases, names = analysis["phases"], [row["phase"] for row in analysis["phases"]]
    shares = [f"{row['phase']} {row['share']:.1%}" for row in phases if row["share"] > 0]
    behind = " on the GPU, which runs behind the host" if about["clock"] == "GPU" else ""
    by_phase = (
        Column(name, lambda row, name=name: row["phases_ms"].get(name), "~3") for name in names
    )
    columns, rows = [*text_columns("component"), *by_phase, *TIME_COLUMNS], breakdown_rows(analysis)
    note = [f"Times are ms per step, by {about['source']}; they add up to the step{behind}"]
    facts = {"Step": time, "Phases": ", ".join(shares)}
    found = Section("Step time breakdown", columns, rows, note, facts, figure="step_breakdown")
    found.lead, found.warning = (
        largest_text(analysis),
        analysis["integrity"]["unreliable"].get("components", ""),
    )
    by_class = ["The same time by class, as the names of operators and kernels tell it"]
    columns = [*text_columns("class"), *TIME_COLUMNS]
    found.parts = [Section("Classes of operators", columns, analysis["classes"], by_class)]
    return found
