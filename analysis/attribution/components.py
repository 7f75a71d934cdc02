"""Step time breakdown: all time of the profiled steps, by component of the model and by phase.

Forward work belongs to the named range around it, else to the nn.Module call.  Backward work belongs to the component
of the forward operator with the same autograd sequence number, and a GPU event to that of the operator that launched
it.  In a trace with neither ranges nor module calls, the components are the kinds of operators.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import fields

import numpy as np
import pandas as pd

from analysis.attribution.gpu_time import covered_until, exposed_us, union
from analysis.trace.links import (
    ANNOTATION,
    MODULE,
    OPERATOR,
    AttributedLinks,
    Links,
    cached_on_links,
    nearest_marked_ancestor,
    nearest_marked_caller,
    step_around,
)
from analysis.trace.tables import by_name, has_role, most_frequent, take_or, take_or_none
from analysis.vocabulary import roles
from analysis.vocabulary.operators import operator_class
from harness.base.layer_names import folded_names
from harness.base.tables import Column, column, narrow_table, sum_row
from harness.base.text import count_of
from harness.instruments.phases import PHASES

NAMED_RANGES, MODULE_CALLS, OPERATOR_KINDS = "named ranges", "nn.Module calls", "kinds of operators"
OVERHEAD, UNATTRIBUTED, IDLE = "framework overhead", "unattributed", "idle"
NEARLY_ALL = 0.9  # of what ran: one component with so much tells nothing of where the time goes
BETWEEN = "between phases"


def attribute(links: Links) -> AttributedLinks:
    """Find the component, phase and category of each host and GPU event; once is enough."""
    if isinstance(links, AttributedLinks):
        return links
    host, replayed = links.host, links.trace.replayed
    parent, kind = host["parent"].to_numpy(), host["kind"].to_numpy()
    is_range = (kind == ANNOTATION) & host["role"].isna().to_numpy()  # of the program
    is_node = backward_nodes(host)
    node = nearest_marked_ancestor(parent, is_node)
    phase = phases_of(host, node)
    if replayed:
        phase[links.replayed_rows] = replayed.phase
    source = component_source(host, is_range, phase)
    if replayed and source == OPERATOR_KINDS:
        source = replayed.source
    categories = host["named_category"].to_numpy(object)
    component = components_of(links, source, is_range, is_node, phase, categories)
    categories = np.where((phase == "optimizer") & (categories != "communication"), "optimizer", categories)
    host = host.assign(component=component, phase=phase, category=categories, node=node)
    gpu = attributed_gpu(links, host, source)
    known = {one.name: getattr(links, one.name) for one in fields(Links)} | {"results": {}}
    return AttributedLinks(**known | {"host": host, "gpu": gpu}, source=source)


def components_of(
    links: Links, source: str, is_range: np.ndarray, is_node: np.ndarray, phase: np.ndarray, categories: np.ndarray
) -> np.ndarray:
    """The component of each host event, by the first rule that tells one; None: unattributed."""
    host, replayed = links.host, links.trace.replayed
    kind = host["kind"].to_numpy()
    defines, labels = labeled_events(host, source, is_range)
    owner = nearest_marked_ancestor(host["parent"].to_numpy(), defines | is_node)
    in_node = (owner >= 0) & is_node[owner]
    of_forward = np.where((owner >= 0) & ~in_node, labels[owner], None)
    of_node = components_of_nodes(host, of_forward, is_node) if defines.any() else labels
    of_graph = np.full(len(host), None, dtype=object)
    if replayed:  # elsewhere, if at all, the operators of its graphs were within a component
        of_graph[links.replayed_rows] = replayed.component
    everywhere = np.ones(len(host), bool)
    rules = [
        (everywhere, of_graph),
        (everywhere, of_forward),
        (in_node, of_node[owner]),
        (categories == "communication", "communication"),
        (np.isin(phase.astype(str), ("data", "optimizer")), phase),
        (kind != OPERATOR, OVERHEAD),
        (everywhere & (source != NAMED_RANGES), categories),  # operators outside of all modules, by their kind
    ]
    component = np.full(len(host), None, dtype=object)
    for applies, told in rules:
        component = np.where(pd.isna(component) & applies, told, component)
    return component


def labeled_events(host: pd.DataFrame, source: str, is_range: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which host events define a component, and their labels; None elsewhere."""
    names, labels = host["name"], np.full(len(host), None, dtype=object)
    defines = np.zeros(len(host), bool)
    if source == NAMED_RANGES:
        defines = is_range
        labels[defines] = by_name(names[defines], folded_names(names[defines].unique()).get)
    elif source == MODULE_CALLS:
        defines = (host["kind"] == MODULE).to_numpy()
        labels[defines] = module_labels(host, defines)
    return defines, labels


def backward_nodes(host: pd.DataFrame) -> np.ndarray:
    """Which host events are nodes of the backward pass; PyTorch 1.8 records them without the engine's call around."""
    nodes = has_role(host, *roles.NODES)
    return nodes if nodes.any() else has_role(host, roles.NODE_FUNCTION)


def component_source(host: pd.DataFrame, is_range: np.ndarray, phase: np.ndarray) -> str:
    """Ranges where they contain most of the forward operators, else modules where there are any, else kinds."""
    kind, own = host["kind"].to_numpy(), host["own_us"].to_numpy()
    forward = (kind == OPERATOR) & (phase == "forward")
    in_ranges = own[forward & (nearest_marked_ancestor(host["parent"].to_numpy(), is_range) >= 0)].sum()
    if in_ranges > 0 and in_ranges >= 0.5 * own[forward].sum():
        return NAMED_RANGES
    return MODULE_CALLS if (kind == MODULE).any() else OPERATOR_KINDS


def module_labels(host: pd.DataFrame, is_module: np.ndarray) -> np.ndarray:
    """'BertOutput.Linear': the class of each module call, after that of the call around it."""
    rows, parent = np.flatnonzero(is_module), host["parent"].to_numpy()
    above = nearest_marked_caller(parent, is_module)[rows]
    classes = host["about"].to_numpy(object)
    return np.where(above >= 0, classes[above] + "." + classes[rows], classes[rows])


def components_of_nodes(host: pd.DataFrame, component: np.ndarray, is_node: np.ndarray) -> np.ndarray:
    """For each backward node the component of the forward operator that has its sequence number; None elsewhere.

    Sequence numbers are counted per thread.  A node's `Fwd thread id` stands for the thread that most of them match.
    """
    out = np.full(len(host), None, dtype=object)
    parent, sequence = host["parent"].to_numpy(), host["sequence"].to_numpy()
    of_node = is_node | ((parent >= 0) & is_node[parent])  # XBackward0 within evaluate_function: XBackward0
    numbered = (sequence >= 0) & ~of_node & ~pd.isna(component)
    forward = host.loc[numbered, ["thread", "sequence", "start"]].assign(component=component[numbered])
    # The last operator with a number created the node: earlier ones only recorded what the next number would be.
    forward = forward.sort_values("start").drop_duplicates(["thread", "sequence"], keep="last")
    nodes = host.loc[is_node, ["sequence", "forward_thread"]]
    for _, group in nodes.groupby("forward_thread"):
        found = {}
        for thread, rows in forward.groupby("thread"):
            by_sequence = pd.Series(rows["component"].to_numpy(), index=rows["sequence"].to_numpy())
            found[thread] = group["sequence"].map(by_sequence)
        if found:
            out[group.index] = max(found.values(), key=lambda match: match.notna().sum()).to_numpy(object)
    out[pd.isna(out)] = None
    out[has_role(host, roles.ACCUMULATION) & is_node] = "gradient accumulation"
    return out


def phases_of(host: pd.DataFrame, node: np.ndarray) -> np.ndarray:
    """The phase of each host event: that of a range that names one, ours or PyTorch's; backward within autograd nodes.

    Other module calls, and operators with a sequence number, are the forward pass.  In a trace without a backward pass
    or without sequence numbers, so are all other operators.
    """
    parent, kind = host["parent"].to_numpy(), host["kind"].to_numpy()
    label = host["named_phase"]
    named = nearest_marked_ancestor(parent, label.notna().to_numpy())
    phase = np.where(named >= 0, label.to_numpy(object)[named], None)
    # Data and optimizer ranges take precedence, unless a node runs within them, as in an optimizer's closure.
    in_node = (node >= 0) & (~np.isin(phase.astype(str), ("data", "optimizer")) | (node > named))
    phase[in_node] = "backward"
    numbered = (kind == OPERATOR) & (host["sequence"].to_numpy() >= 0)
    forward = nearest_marked_ancestor(parent, (kind == MODULE) | numbered) >= 0
    if (node < 0).all() or not numbered.any():
        forward |= kind == OPERATOR
    phase[pd.isna(phase) & forward] = "forward"
    return phase


def attributed_gpu(links: Links, host: pd.DataFrame, source: str) -> pd.DataFrame:
    """The GPU events with the component, phase and category of the operator that launched each."""
    gpu, operator = links.gpu, links.gpu["operator"].to_numpy()
    linked = {name: take_or_none(host[name], operator) for name in ("component", "phase", "category")}
    codes = gpu["name"].cat.codes.to_numpy()
    # A kernel without an operator takes the usual category of its name: MIOpen's transposes belong to convolutions.
    # But an optimizer's additions are not the only ones, and an operator of no known kind tells nothing.
    elsewhere = np.where(np.isin(linked["category"].astype(str), ("optimizer", "other")), None, linked["category"])
    usual = pd.Series(codes).map(most_frequent(codes, elsewhere))
    own = gpu["named_category"].to_numpy(object)
    by_kernel = np.where(usual.notna(), usual, own)
    # Where one operator stands for many, a graph or a compiled region, a kernel's own name says more.
    many = (linked["category"] == "other") | links.only_of_graph
    linked["category"] = np.where(pd.isna(linked["category"]), by_kernel, linked["category"])
    linked["category"] = np.where(many, np.where(own == "other", by_kernel, own), linked["category"])
    # What its operator or its own name calls communication is that, but copies.
    copies = (gpu["kind"] == "memcpy").to_numpy()
    communicates = ~copies & ((own == "communication") | (linked["category"] == "communication"))
    linked["category"][communicates] = linked["component"][communicates] = "communication"
    linked["category"][copies & (linked["category"] == "communication")] = "copy"
    if source == OPERATOR_KINDS:
        linked["component"] = np.where(linked["category"] == "other", linked["component"], linked["category"])
    return gpu.assign(**linked)


@cached_on_links
def step_events(links: AttributedLinks) -> tuple[pd.DataFrame, float]:
    """The events of the profiled steps (component, phase, category, us, operator, step), and the steps' time in us.

    GPU events with their exposed time if the trace has any, else host events with their self time.
    """
    columns, host, steps = ["component", "phase", "category"], links.host, links.steps
    if links.on_gpu:
        events = links.gpu[[*columns, "operator", "step"]].assign(us=exposed_us(links.gpu, links.window))
        return events[events["us"] > 0], links.window[1] - links.window[0]
    us, step = own_or_waited_us(links), step_around(host["start"].to_numpy(), steps)
    rows = np.flatnonzero((step >= 0) & (us > 0))
    events = host.iloc[rows][columns].assign(us=us[rows], step=step[rows])
    events["operator"] = np.where(host["kind"].to_numpy()[rows] == OPERATOR, rows, -1)
    return events, float((steps["end"] - steps["start"]).sum())


def views_and_metadata(links: Links, rows: np.ndarray) -> np.ndarray:
    """Which of the operators in these rows move no elements; so does what is no operator, row -1."""
    return take_or(has_role(links.trace.operators, *roles.MOVES_NO_ELEMENT), rows, True)


def own_or_waited_us(links: AttributedLinks) -> np.ndarray:
    """Self time of each host event in us: on the thread that ran the steps, and on threads that it waited for.

    While that thread is in no operator, another may run the backward pass or communicate for it: the time is then
    attributed to the other, and divided among them if there are several.
    """
    host = links.host
    own, parent, kind = host["own_us"].to_numpy(), host["parent"].to_numpy(), host["kind"].to_numpy()
    ours = (host["thread"] == links.thread).to_numpy()
    helps = ~ours & ((host["node"] >= 0).to_numpy() | (host["category"] == "communication").to_numpy())
    us = np.where(ours, own, 0.0)
    if not helps.any():
        return us
    start, end, thread = (host[name].to_numpy() for name in ("start", "end", "thread"))
    end = np.where((parent >= 0) & (thread[parent] == thread), np.minimum(end, end[parent]), end)
    others = union(start[helps], end[helps])
    covered = covered_until(end, others) - covered_until(start, others)
    nested = (parent >= 0) & ours
    waited = covered - np.bincount(parent[nested], weights=covered[nested], minlength=len(host))
    waited = np.where(ours & (kind != OPERATOR), np.clip(waited, 0.0, own), 0.0)
    return us - waited + np.where(helps, own, 0.0) * (waited.sum() / max(own[helps].sum(), 1e-12))


def step_breakdown(links: AttributedLinks) -> dict:
    """Time per profiled step by component and phase; rows add up to the step.

    Time without any event is idle on a GPU, and framework overhead on a host.
    """
    n, columns = len(links.steps), ["component", "phase"]
    events, total_us = step_events(links)
    rest, phase = (IDLE, IDLE) if links.on_gpu else (OVERHEAD, BETWEEN)
    left = max(0.0, total_us - events["us"].sum())
    remainder = pd.DataFrame({"component": [rest], "phase": [phase], "us": [left]})
    table = pd.concat([events[[*columns, "us"]], remainder]).fillna({"component": UNATTRIBUTED, "phase": BETWEEN})
    sums = table.groupby(columns)["us"].sum().unstack(fill_value=0.0)
    if UNATTRIBUTED not in sums.index:
        sums.loc[UNATTRIBUTED] = 0.0
    sums = sums.reindex(columns=[phase for phase in (*PHASES, BETWEEN, IDLE) if phase in sums]) / 1e3 / n
    sums = sums.loc[sums.sum(axis=1).sort_values(ascending=False, kind="stable").index]
    step_ms, spread = total_us / 1e3 / n, spread_over_steps(events, n)

    def share(ms: float) -> float:
        return float(ms / step_ms) if step_ms else 0.0

    return {
        "attribution": {
            "clock": "GPU" if links.on_gpu else "host",
            "source": links.source,
            "steps": n,
            "ms_per_step": step_ms,
            "unattributed_share": share(sums.loc[UNATTRIBUTED].sum()),
        },
        "phases": [{"phase": phase, "ms_per_step": float(ms), "share": share(ms)} for phase, ms in sums.sum().items()],
        "components": [
            {
                "component": name,
                "ms_per_step": float(row.sum()),
                "std_ms": spread.get(name),
                "share": share(row.sum()),
                "phases_ms": {phase: float(ms) for phase, ms in row.items() if ms > 0},
            }
            for name, row in sums.iterrows()
            if row.sum() > 0 or name == UNATTRIBUTED
        ],
    }


def class_times(links: AttributedLinks) -> list[dict]:
    """Time per profiled step by class of operators, largest first; rows add up to the step.

    Views, allocation and autograd's own work count with the time outside of operators: as framework overhead on a
    host, as idle on a GPU.
    """
    events, total_us = step_events(links)
    rest = IDLE if links.on_gpu else OVERHEAD
    kinds = events["category"].to_numpy(object)
    if not links.on_gpu:
        kinds = np.where(views_and_metadata(links, events["operator"].to_numpy()), rest, kinds)
    pairs = events[["us", "phase"]].assign(kind=kinds).groupby(["phase", "kind"], dropna=False, sort=False)["us"].sum()
    classes = [kind if kind == rest else operator_class(phase, kind) for phase, kind in pairs.index]
    sums = pairs.groupby(np.asarray(classes, dtype=object)).sum()
    sums[rest] = sums.get(rest, 0.0) + max(0.0, total_us - events["us"].sum())
    return [
        {
            "class": name,
            "ms_per_step": float(us / 1e3 / len(links.steps)),
            "share": float(us / total_us) if total_us else 0.0,
        }
        for name, us in sums.sort_values(ascending=False, kind="stable").items()
    ]


def spread_over_steps(events: pd.DataFrame, n: int) -> dict[str, float]:
    """Sample standard deviation, over the steps, of each component's time in ms; {} for a single step."""
    if n < 2:
        return {}
    sums = events[events["step"] >= 0].groupby(["component", "step"])["us"].sum().unstack(fill_value=0.0)
    return (sums.reindex(columns=range(n), fill_value=0.0).std(axis=1) / 1e3).to_dict()


def component_columns(phases: list[dict]) -> list[Column]:
    """ms per step by phase and in total, one row per component."""
    return [
        column("component", "component", left=True),
        *(Column(one["phase"], lambda row, p=one["phase"]: row["phases_ms"].get(p), ".3f") for one in phases),
        column("ms", "ms_per_step", ".3f"),
        column("share", "share", ".1%"),
    ]


def breakdown_rows(analysis: dict) -> list[dict]:
    """The components, the sums of the groups whose names begin alike, and the sum of all."""
    rows = analysis["components"]
    named = analysis["attribution"]["source"] == NAMED_RANGES
    groups = Counter(group for row in rows for group, dot, _ in [row["component"].partition(".")] if named and dot)
    sums = [
        component_sum(f"sum of {group}.*", [row for row in rows if row["component"].startswith(f"{group}.")])
        for group, n in groups.items()
        if n > 1
    ]
    return [*rows, *sums, component_sum("sum", rows)]


def component_sum(name: str, rows: list[dict]) -> dict:
    phases: Counter = Counter()
    for row in rows:
        phases.update(row["phases_ms"])
    return sum_row("component", name, rows, ("ms_per_step", "share")) | {"phases_ms": dict(phases)}


CLASS_COLUMNS = [
    column("class", "class", left=True),
    column("ms", "ms_per_step", ",.3f"),
    column("share", "share", ".1%"),
]


def largest_parts(analysis: dict) -> tuple[list[dict], str]:
    """The rows that tell best where the time goes, and the key of their names: the components, or the classes of
    operators where one component holds nearly all that ran."""
    ran = [row["share"] for row in analysis["components"] if row["component"] not in (IDLE, OVERHEAD, "data")]
    if max(ran, default=0.0) >= NEARLY_ALL * sum(ran):
        return analysis["classes"], "class"
    return analysis["components"], "component"


def breakdown_lines(analysis: dict) -> list[str]:
    about = analysis["attribution"]
    return [
        f"Step time breakdown: {about['clock']} time by {about['source']}, mean of {count_of(about['steps'], 'step')}, "
        f"{about['ms_per_step']:.3f} ms each",
        *narrow_table(component_columns(analysis["phases"]), breakdown_rows(analysis)),
    ]


def class_lines(analysis: dict) -> list[str]:
    title = f"The same {analysis['attribution']['clock']} time by class, as the names of operators and kernels tell it"
    return [title, *narrow_table(CLASS_COLUMNS, analysis["classes"])]
