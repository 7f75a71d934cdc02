"""Where did the step go?  Every microsecond of the profiled steps, by component of the model and by phase.

Forward work belongs to what encloses it: our named ranges, else nn.Module calls.  Backward work belongs to the forward
operator with the same autograd sequence number, and so to that operator's component.  On a GPU an event belongs to
where the operator that launched it belongs.  Where a trace names no parts at all, the kind of operator takes their
place.
"""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from analysis.costs import category, is_view_or_metadata_op, operator_class
from analysis.links import ANNOTATION, MODULE, OPERATOR, Links, step_at
from analysis.timeline import covered_until, exposed_us, is_communication, union
from analysis.trace import MODULE as MODULE_PREFIX
from analysis.trace import STEP, where_name
from harness.timing import PHASES

BACKWARD = "autograd::engine::evaluate_function: "
ACCUMULATE = BACKWARD + "torch::autograd::AccumulateGrad"
OVERHEAD, UNATTRIBUTED, IDLE = "framework overhead", "unattributed", "idle"
BETWEEN = "between phases"
LAYER = re.compile(r"layers\.\d+\.")
# Ranges that PyTorch itself opens: they say what phase it is, not what part of the model.
_FRAMEWORK = re.compile(
    rf"{STEP}|Optimizer\.|enumerate\(|DistributedDataParallel|FullyShardedDataParallel|FSDP|nccl:|gloo:|c10d"
    r"|Torch-Compiled|TorchDynamo|CompiledF|## Call|AOT|PyTorch Profiler|Iteration"
)
_PHASE_OF = {"Optimizer.": "optimizer", "enumerate(": "data", "DistributedDataParallel": "forward"}


def component_of(range_name: str) -> str:
    """'attention.scores' of the range layers.3.attention.scores; other names as they are."""
    return LAYER.sub("", range_name)


def class_of(module: str) -> str:
    """'Linear' of 'nn.Module: Linear_5'."""
    return module.removeprefix(MODULE_PREFIX).rsplit("_", 1)[0]


def nearest(parent: np.ndarray, marked: np.ndarray) -> np.ndarray:
    """For each row the nearest marked one among itself and its callers, or -1."""
    n = len(parent)
    up = np.append(np.where(marked, np.arange(n), np.where(parent >= 0, parent, n)), n)
    while True:
        further = up[up]
        if (further == up).all():
            return np.where(up[:n] == n, -1, up[:n])
        up = further


def attribute(links: Links) -> str:
    """Give each host and GPU event its component, phase and category, in place.  Returns what the components are."""
    host = links.host
    names, parent, kind = host["name"], host["parent"].to_numpy(), host["kind"].to_numpy()
    is_node = where_name(host, lambda name: name.startswith(BACKWARD)) & (kind == OPERATOR)
    is_phase = where_name(host, lambda name: name in PHASES) & (kind == ANNOTATION)
    is_framework = where_name(host, lambda name: bool(_FRAMEWORK.match(name))) & (kind == ANNOTATION)
    is_range = (kind == ANNOTATION) & ~is_phase & ~is_framework
    node = nearest(parent, is_node)
    phase = phases_of(links, parent, kind, is_phase, is_framework, node)
    source = component_source(host, parent, kind, is_range, phase)
    defines = {"named ranges": is_range, "nn.Module calls": kind == MODULE}.get(source, np.zeros(len(host), bool))

    labels = np.full(len(host), None, dtype=object)
    if source == "nn.Module calls":
        labels[defines] = module_labels(host, parent, defines)
    else:
        labels[defines] = names[defines].astype(object).map(component_of)
    categories = np.array([category(name) for name in names.cat.categories], dtype=object)[names.cat.codes]
    owner = nearest(parent, defines | is_node)
    forward = (owner >= 0) & ~is_node[owner]
    component = np.where(forward, labels[owner], None)
    if defines.any():
        component_of_node = components_of_nodes(host, component, is_node)
        in_node = (owner >= 0) & is_node[owner]
        component[in_node] = component_of_node[owner[in_node]]

    for name in ("data", "optimizer"):
        component[(phase == name) & pd.isna(component)] = name
    glue = pd.isna(component) & (kind != OPERATOR)
    component[glue] = np.where(categories[glue] == "communication", "communication", OVERHEAD)
    if source != "named ranges":  # what no part of the model claims, by its kind
        free = pd.isna(component)
        component[free] = categories[free]
    is_optimizer = phase == "optimizer"
    links.host = host.assign(
        component=component, phase=phase, category=np.where(is_optimizer, "optimizer", categories), node=node
    )
    attribute_gpu(links, source)
    return source


def component_source(host, parent, kind, is_range, phase) -> str:
    """Ranges where they hold most of the forward operators, else modules where there are any, else operator kinds."""
    forward = (kind == OPERATOR) & (phase == "forward")
    own = host["own_us"].to_numpy()
    in_ranges = own[forward & (nearest(parent, is_range) >= 0)].sum()
    if in_ranges > 0 and in_ranges >= 0.5 * own[forward].sum():
        return "named ranges"
    return "nn.Module calls" if (kind == MODULE).any() else "kinds of operators"


def module_labels(host: pd.DataFrame, parent: np.ndarray, is_module: np.ndarray) -> np.ndarray:
    """'BertOutput.Linear': the class of each module call, after that of the call around it."""
    rows = np.flatnonzero(is_module)
    above = np.where(parent[rows] >= 0, nearest(parent, is_module)[parent[rows]], -1)
    names = host["name"]
    classes = np.array([class_of(name) for name in names.cat.categories], dtype=object)[names.cat.codes]
    return np.array(
        [f"{classes[up]}.{classes[row]}" if up >= 0 else classes[row] for row, up in zip(rows, above, strict=True)],
        dtype=object,
    )


def components_of_nodes(host: pd.DataFrame, component: np.ndarray, is_node: np.ndarray) -> np.ndarray:
    """For each backward node the component of the forward operator that has its sequence number; None elsewhere.

    Sequence numbers count per thread.  Which thread a node's `Fwd thread id` means is what most of its numbers say.
    """
    out = np.full(len(host), None, dtype=object)
    parent, sequence = host["parent"].to_numpy(), host["sequence"].to_numpy()
    of_node = is_node | ((parent >= 0) & is_node[parent])  # XBackward0 within evaluate_function: XBackward0
    numbered = (sequence >= 0) & ~of_node & ~pd.isna(component)
    forward = host.loc[numbered, ["thread", "sequence", "start"]].assign(component=component[numbered])
    # The last to carry a number is the one that made the node: those before it only saw the number that was next.
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
    out[where_name(host, lambda name: name == ACCUMULATE) & is_node] = "gradient accumulation"
    return out


def phases_of(links: Links, parent, kind, is_phase, is_framework, node) -> np.ndarray:
    """Ranges that name a phase decide, ours and PyTorch's own; within autograd's nodes it is the backward one.

    Elsewhere the forward pass shows in calls of modules, and in operators that autograd numbers; in a trace without
    a backward pass every operator is of it.
    """
    host = links.host
    names = host["name"].astype(object).to_numpy()
    label = np.full(len(host), None, dtype=object)
    label[is_phase] = names[is_phase]
    for row in np.flatnonzero(is_framework):
        label[row] = next((phase for start, phase in _PHASE_OF.items() if names[row].startswith(start)), None)
    named = nearest(parent, ~pd.isna(label))
    phase = np.where(named >= 0, label[named], None)
    # Data and optimizer ranges are believed unless a node runs within them, as in an optimizer's closure.
    in_node = (node >= 0) & (~np.isin(phase.astype(str), ("data", "optimizer")) | (node > named))
    phase[in_node] = "backward"
    numbered = (kind == OPERATOR) & (host["sequence"].to_numpy() >= 0)
    shows = nearest(parent, (kind == MODULE) | numbered) >= 0
    if (node < 0).all():
        shows |= kind == OPERATOR
    phase[pd.isna(phase) & shows] = "forward"
    return phase


def attribute_gpu(links: Links, source: str) -> None:
    gpu, host = links.gpu, links.host
    operator = gpu["operator"].to_numpy()  # -1 picks the None at the end
    linked = {name: np.append(host[name].to_numpy(object), None)[operator] for name in ("component", "phase")}
    linked["category"] = np.append(host["category"].to_numpy(object), None)[operator]
    codes, names = gpu["name"].cat.codes.to_numpy(), gpu["name"].cat.categories
    by_kernel = np.full(len(names), None, dtype=object)
    for code in np.unique(codes):
        by_kernel[code] = category(names[code])
    # A kernel without an operator is of the kind that its name has where it has one: MIOpen's transposes are a
    # convolution's.
    known = pd.DataFrame({"code": codes, "category": linked["category"]}).dropna()
    if len(known):
        counts = known.groupby(["code", "category"]).size().sort_values(kind="stable").reset_index()
        usual = counts.drop_duplicates("code", keep="last")
        by_kernel[usual["code"].to_numpy()] = usual["category"].to_numpy()
    unknown = pd.isna(linked["category"]) | (linked["category"] == "other")
    linked["category"] = np.where(unknown, by_kernel[codes], linked["category"])
    communicates = is_communication(gpu)
    linked["category"][communicates] = linked["component"][communicates] = "communication"
    if source == "kinds of operators":
        linked["component"] = np.where(linked["category"] == "other", linked["component"], linked["category"])
    links.gpu = gpu.assign(**linked)


def step_events(links: Links) -> tuple[pd.DataFrame, float]:
    """What the profiled steps consist of, and their length in us: component, phase, category, us, operator, step.

    On a trace with GPU events these are its events, and their time is the GPU's.  Else they are those of the host, each
    with the time that is its own.
    """
    columns, host, steps = ["component", "phase", "category"], links.host, links.steps
    if len(links.gpu):
        events = links.gpu[[*columns, "operator", "step"]].assign(us=exposed_us(links.gpu, links.window))
        return events[events["us"] > 0], links.window[1] - links.window[0]
    us, inside = own_or_waited_us(links), in_a_step(host["start"].to_numpy(), steps)
    rows = np.flatnonzero(inside & (us > 0))
    events = host.iloc[rows][columns].assign(us=us[rows])
    events["operator"] = np.where(host["kind"].to_numpy()[rows] == OPERATOR, rows, -1)
    events["step"] = step_at(host["start"].to_numpy()[rows], steps)
    return events, float((steps["end"] - steps["start"]).sum())


def keeps_books(links: Links) -> np.ndarray:
    """Which operators only keep books; a True at the end, that -1 picks, for what is of no operator."""
    names = links.trace.operators["name"].cat
    return np.append(
        np.array([is_view_or_metadata_op(name) for name in names.categories], dtype=bool)[names.codes], True
    )


def own_or_waited_us(links: Links) -> np.ndarray:
    """Host time in us that is each event's own: of the thread that ran the steps, and of those it waited for.

    While that thread is in no operator, another may run the backward pass or communicate for it: then the time is the
    other's.  What several others do meanwhile shares it.
    """
    host = links.host
    own, parent, kind = host["own_us"].to_numpy(), host["parent"].to_numpy(), host["kind"].to_numpy()
    ours = (host["thread"] == links.thread).to_numpy()
    helps = ~ours & ((host["node"] >= 0).to_numpy() | (host["category"] == "communication").to_numpy())
    us = np.where(ours, own, 0.0)
    if not helps.any():
        return us
    start, end = host["start"].to_numpy(), host["end"].to_numpy()
    end = np.where(parent >= 0, np.minimum(end, end[parent]), end)
    others = union(start[helps], end[helps])
    covered = covered_until(end, others) - covered_until(start, others)
    nested = (parent >= 0) & ours
    waited = covered - np.bincount(parent[nested], weights=covered[nested], minlength=len(host))
    waited = np.where(ours & (kind != OPERATOR), np.clip(waited, 0.0, own), 0.0)
    return us - waited + np.where(helps, own, 0.0) * (waited.sum() / max(own[helps].sum(), 1e-12))


def step_breakdown(links: Links, source: str) -> dict:
    """Time per profiled step by component and phase; rows add up to the step.

    What no event has is idle on a GPU, and the framework's own on a host.
    """
    steps, columns = links.steps, ["component", "phase"]
    events, total = step_events(links)
    rest, phase = (IDLE, IDLE) if len(links.gpu) else (OVERHEAD, BETWEEN)
    left = max(0.0, total - events["us"].sum())
    remainder = pd.DataFrame({"component": [rest], "phase": [phase], "us": [left]})
    table = pd.concat([events[[*columns, "us"]], remainder]).fillna({"component": UNATTRIBUTED, "phase": BETWEEN})
    n, order = len(steps), [*PHASES, BETWEEN, IDLE]
    sums = table.groupby(columns)["us"].sum().unstack(fill_value=0.0)
    if UNATTRIBUTED not in sums.index:
        sums.loc[UNATTRIBUTED] = 0.0
    sums = sums.reindex(columns=[phase for phase in order if phase in sums]) / 1e3 / n
    sums = sums.loc[sums.sum(axis=1).sort_values(ascending=False, kind="stable").index]
    whole = total / 1e3 / n
    spread = spread_over_steps(events, n)
    return {
        "attribution": {
            "clock": "GPU" if len(links.gpu) else "host",
            "source": source,
            "steps": n,
            "ms_per_step": whole,
            "unattributed_share": float(sums.loc[UNATTRIBUTED].sum() / whole) if whole else 0.0,
        },
        "phases": [
            {"phase": phase, "ms_per_step": float(ms), "share": float(ms / whole) if whole else 0.0}
            for phase, ms in sums.sum().items()
        ],
        "components": [
            {
                "component": name,
                "ms_per_step": float(row.sum()),
                "std_ms": spread.get(name),
                "share": float(row.sum() / whole) if whole else 0.0,
                "phases_ms": {phase: float(ms) for phase, ms in row.items() if ms > 0},
            }
            for name, row in sums.iterrows()
            if row.sum() > 0 or name == UNATTRIBUTED
        ],
    }


def class_times(links: Links) -> list[dict]:
    """Time per profiled step by class of operators, most first; together the step.

    What keeps books only (views, allocation, autograd's own work) counts with what no operator has: as the framework's
    on a host, as idle on a GPU.
    """
    events, total = step_events(links)
    n, rest = len(links.steps), IDLE if len(links.gpu) else OVERHEAD
    kinds = events["category"].to_numpy(object)
    if not len(links.gpu):
        kinds = np.where(keeps_books(links)[events["operator"].to_numpy()], rest, kinds)
    pairs = zip(events["phase"].to_numpy(object), kinds, strict=True)
    named = [kind if kind == rest else operator_class(phase, kind) for phase, kind in pairs]
    sums = events["us"].groupby(np.asarray(named, dtype=object)).sum()
    sums[rest] = sums.get(rest, 0.0) + max(0.0, total - events["us"].sum())
    return [
        {"class": name, "ms_per_step": float(us / 1e3 / n), "share": float(us / total) if total else 0.0}
        for name, us in sums.sort_values(ascending=False, kind="stable").items()
    ]


def spread_over_steps(events: pd.DataFrame, n: int) -> dict[str, float]:
    """Sample standard deviation, over the steps, of each component's time in ms; nothing for a single step."""
    if n < 2:
        return {}
    sums = events[events["step"] >= 0].groupby(["component", "step"])["us"].sum().unstack(fill_value=0.0)
    sums = sums.reindex(columns=range(n), fill_value=0.0)
    return {name: float(std) for name, std in (sums.std(axis=1, ddof=1) / 1e3).items()}


def in_a_step(times: np.ndarray, steps: pd.DataFrame) -> np.ndarray:
    at = np.searchsorted(steps["start"].to_numpy(), times, side="right") - 1
    return (at >= 0) & (times < steps["end"].to_numpy()[np.maximum(at, 0)])


def breakdown_lines(analysis: dict) -> list[str]:
    """A component a line, phases side by side, in ms a step."""
    about, rows = analysis["attribution"], analysis["components"]
    phases = [row["phase"] for row in analysis["phases"]]
    lines = [
        f"Where the step went: {about['clock']} time by {about['source']}, mean of {about['steps']} "
        f"step{'s' * (about['steps'] != 1)}, {about['ms_per_step']:.3f} ms each",
        f"{'component':<34}" + "".join(f"{phase:>16}" for phase in phases) + f"{'ms':>10}{'share':>9}",
    ]
    for row in rows:
        cells = (f"{row['phases_ms'][phase]:>16.3f}" if phase in row["phases_ms"] else " " * 16 for phase in phases)
        lines.append(f"{row['component'][:33]:<34}{''.join(cells)}{row['ms_per_step']:>10.3f}{row['share']:>9.1%}")
    cells = "".join(f"{row['ms_per_step']:>16.3f}" for row in analysis["phases"])
    whole, share = (sum(row[key] for row in rows) for key in ("ms_per_step", "share"))
    return [*lines, f"{'sum':<34}{cells}{whole:>10.3f}{share:>9.1%}"]
