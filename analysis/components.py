"""Where did the step go?  Every microsecond of the profiled steps, by component of the model and by phase.

Forward work belongs to the named range around it.  Backward work belongs to the forward operator with the same autograd
sequence number, and so to that operator's range.  On a GPU an event belongs to where the operator that launched it
belongs.
"""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from analysis.operators import launching_operator, parents
from analysis.trace import Trace
from tiny_llama_v1 import PHASES

BACKWARD = "autograd::engine::evaluate_function: "
ACCUMULATE = BACKWARD + "torch::autograd::AccumulateGrad"
OVERHEAD, UNATTRIBUTED, IDLE = "framework overhead", "unattributed", "idle"
LAYER = re.compile(r"layers\.\d+\.")


def component_of(range_name: str) -> str:
    """'attention.scores' of the range layers.3.attention.scores; other names as they are."""
    return LAYER.sub("", range_name)


def belongings(trace: Trace) -> pd.DataFrame:
    """For each operator, then each annotation: component, phase, and the time that is its own (us)."""
    columns = ["name", "start", "end", "thread"]
    both = pd.concat([trace.operators[[*columns, "sequence"]], trace.annotations[columns]], ignore_index=True)
    both["sequence"] = both["sequence"].fillna(-1)
    parent = parents(*(both[name].to_numpy() for name in ("start", "end", "thread")))
    duration = (both["end"] - both["start"]).to_numpy()
    inner = np.bincount(parent[parent >= 0], weights=duration[parent >= 0], minlength=len(both))
    n_operators = len(trace.operators)
    names, sequences, parent_of = both["name"].tolist(), both["sequence"].tolist(), parent.tolist()
    # A parent starts no later than its child, so that going by start time and nesting sees it first.
    order = np.lexsort((-both["end"], both["start"])).tolist()
    component: list[str | None] = [None] * len(both)
    phase: list[str | None] = [None] * len(both)
    node: list[int] = [-1] * len(both)  # the backward node that an operator runs in
    component_of_sequence: dict[float, str] = {}
    for i in order:
        up, name = parent_of[i], names[i]
        if up >= 0:
            component[i], phase[i], node[i] = component[up], phase[up], node[up]
        if i >= n_operators:
            if name in PHASES:
                phase[i], component[i] = name, name if name in ("data", "optimizer") else None
            elif not name.startswith("ProfilerStep#") and "Optimizer." not in name:
                component[i] = component_of(name)
        elif name.startswith(BACKWARD):
            node[i] = i
        elif sequences[i] >= 0 and node[i] < 0 and component[i]:
            component_of_sequence[sequences[i]] = component[i]
    for i in order:  # the backward pass, now that all of the forward pass is known
        if node[i] >= 0:
            phase[i] = "backward"
            accumulates = names[node[i]] == ACCUMULATE
            found = component_of_sequence.get(sequences[node[i]])
            component[i] = "gradient accumulation" if accumulates else found
    return both.assign(component=component, phase=phase, own_us=duration - inner, is_operator=both.index < n_operators)


def exclusive_us(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The time of each interval in which none that started before it runs: together, the length of their union."""
    order = np.lexsort((-end, start))
    reached = np.maximum.accumulate(end[order])
    before = np.concatenate([[-np.inf], reached[:-1]])
    own = np.empty(len(start))
    own[order] = np.maximum(0.0, end[order] - np.maximum(start[order], before))
    return own


def step_breakdown(trace: Trace) -> dict:
    """Time per profiled step by component and phase; rows add up to the step.

    On a trace with GPU events it is the GPU's time, and what is left is idle.  Else it is the time of the host thread
    that ran the steps.
    """
    steps, where = trace.steps, belongings(trace)
    if steps.empty:
        return {"rows": [], "reason": "the trace holds no ProfilerStep annotations"}
    if len(trace.gpu):
        launcher = launching_operator(trace)
        own = exclusive_us(trace.gpu["start"].to_numpy(), trace.gpu["end"].to_numpy())
        # No operator is -1, which picks the None at the end.
        linked = [np.append(where[name].to_numpy(object), None)[launcher] for name in ("component", "phase")]
        table = pd.DataFrame({"component": linked[0], "phase": linked[1], "us": own})
        total = trace.gpu["end"].max() - trace.gpu["start"].min()
        table.loc[len(table)] = [IDLE, None, total - own.sum()]
    else:
        inside = np.zeros(len(where), dtype=bool)
        step_rows = where["name"].str.startswith("ProfilerStep#") & ~where["is_operator"]
        thread = where.loc[step_rows, "thread"].iloc[0]
        for start, end in zip(steps["start"], steps["end"], strict=True):
            inside |= ((where["thread"] == thread) & (where["start"] >= start) & (where["end"] <= end)).to_numpy()
        table = where[inside][["component", "phase", "is_operator"]].assign(us=where["own_us"][inside])
        glue = table["component"].isna() & ~table["is_operator"]  # a phase's own time, or the step's
        table.loc[glue, "component"] = OVERHEAD
        total = (steps["end"] - steps["start"]).sum()
    table["component"] = table["component"].fillna(UNATTRIBUTED)
    table["phase"] = table["phase"].fillna("between phases")
    sums = table.groupby(["component", "phase"])["us"].sum().sort_values(ascending=False)
    rows = [
        {"component": component, "phase": phase, "ms_per_step": us / 1e3 / len(steps), "share": us / total}
        for (component, phase), us in sums.items()
        if us > 0
    ]
    return {
        "clock": "GPU" if len(trace.gpu) else "host",
        "steps": len(steps),
        "ms_per_step": total / 1e3 / len(steps),
        "unattributed_share": sum(row["share"] for row in rows if row["component"] == UNATTRIBUTED),
        "rows": rows,
    }


def breakdown_lines(breakdown: dict) -> list[str]:
    """A component a line, phases side by side, in ms a step."""
    rows = breakdown["rows"]
    if not rows:
        return [f"Where the step went: unknown, {breakdown['reason']}"]
    table = pd.DataFrame(rows).pivot_table(index="component", columns="phase", values="ms_per_step", aggfunc="sum")
    phases = [phase for phase in (*PHASES, "between phases") if phase in table]
    table = table[phases].fillna(0.0)
    table = table.loc[table.sum(axis=1).sort_values(ascending=False).index]
    whole, clock, n = breakdown["ms_per_step"], breakdown["clock"], breakdown["steps"]
    lines = [
        f"Where the step went: {clock} time, mean of {n} profiled steps, {whole:.2f} ms each",
        f"{'component':<26}" + "".join(f"{phase:>16}" for phase in phases) + f"{'ms':>10}{'share':>9}",
    ]
    for name, row in table.iterrows():
        cells = "".join(f"{value:>16.3f}" if value else f"{'':>16}" for value in row)
        lines.append(f"{name:<26}{cells}{row.sum():>10.3f}{row.sum() / whole:>9.1%}")
    sums = table.sum()
    lines.append(f"{'sum':<26}{''.join(f'{v:>16.3f}' for v in sums)}{sums.sum():>10.3f}{sums.sum() / whole:>9.1%}")
    return lines
