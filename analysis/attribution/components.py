"""The component of the model, the phase and the category of each event.

Forward work belongs to the named range around it, else to the nn.Module call.  Backward work
belongs to the component of the forward operator with the same autograd sequence number, and a GPU
event to that of the operator that launched it.  In a trace with neither ranges nor module calls,
the components are the kinds of operators.
"""

from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.trace.links import ANNOTATION, MODULE, OPERATOR, Links
from analysis.trace.nesting import nearest_marked_ancestor, nearest_marked_caller, operators_around
from analysis.trace.tables import (
    by_name,
    different_pairs,
    has_role,
    most_frequent,
    take_or,
    take_or_none,
)
from analysis.vocabulary import roles
from analysis.vocabulary.operators import operator_class
from harness.base.layer_names import folded_names

NAMED_RANGES, MODULE_CALLS, OPERATOR_KINDS = "named ranges", "nn.Module calls", "kinds of operators"
RANGES_AND_KINDS = "named ranges, elsewhere kinds of operators"
OVERHEAD, UNATTRIBUTED, IDLE = "framework overhead", "unattributed", "idle"
BETWEEN, COMMUNICATION = "between phases", "communication"
MOST = 0.5  # of the forward operators: ranges with so much name the parts of the model
SOME = 0.05  # of the forward operators: ranges with less name no part of the model
NEARLY_ALL = 0.8  # of what ran: one component with so much tells nothing of where the time goes


class Parts(NamedTuple):
    """The tables of Links with component and phase (None: unknown) and category of each event."""

    host: pd.DataFrame  # and node: row of the autograd node that the event runs in, or -1
    gpu: pd.DataFrame
    source: str  # of the components


class HostParts(NamedTuple):
    """The host's table of them."""

    host: pd.DataFrame
    source: str


def attribute(links: Links) -> Parts:
    host, source = attributed_host(links)
    return Parts(host, attributed_gpu(links, host, source), source)


def attributed_host(links: Links) -> HostParts:
    host, replayed = links.host, links.replayed
    parent, kind = host["parent"].to_numpy(), host["kind"].to_numpy()
    is_range = (kind == ANNOTATION) & host["role"].isna().to_numpy()  # of the program
    is_node = has_role(host, *roles.NODES)
    if not is_node.any():
        # PyTorch 1.8 records nodes of the backward pass without the engine's call around
        is_node = has_role(host, roles.NODE_FUNCTION)
    node = nearest_marked_ancestor(parent, is_node)
    phase = phases_of(host, node)
    if replayed:
        phase[links.replayed_rows] = replayed.phase
    source = component_source(host, is_range, phase)
    if replayed and source == OPERATOR_KINDS:
        source = replayed.source
    category = host["named_category"].to_numpy(object)
    component = components_of(links, source, is_range, is_node, phase, category)
    updates = (phase == "optimizer") & (category != COMMUNICATION)
    category = np.where(updates, "optimizer", category)
    return HostParts(
        host.assign(component=component, phase=phase, category=category, node=node), source
    )


def classes_of(phase: pd.Series, category: pd.Series) -> pd.Categorical:
    """The class of each event, of its phase and its category, which may be unknown."""
    phase, category = pd.Categorical(phase), pd.Categorical(category)
    pairs, which = different_pairs(phase.codes, category.codes)
    phases, categories = [*phase.categories, None], [*category.categories, None]
    names = [operator_class(phases[i], categories[j]) for i, j in pairs]
    return categories_of(which, names)


def categories_of(codes: np.ndarray, names: list[str]) -> pd.Categorical:
    """names[code] of each row; names may occur several times."""
    different, new = np.unique(np.array(names, dtype=object), return_inverse=True)
    return pd.Categorical.from_codes(new[codes], different)


def components_of(
    links: Links,
    source: str,
    is_range: np.ndarray,
    is_node: np.ndarray,
    phase: np.ndarray,
    categories: np.ndarray,
) -> np.ndarray:
    """The component of each host event, by the first rule that tells one; None: unattributed."""
    host, replayed = links.host, links.replayed
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
        (categories == COMMUNICATION, COMMUNICATION),
        (np.isin(phase.astype(str), ("data", "optimizer")), phase),
        (kind != OPERATOR, OVERHEAD),
        # Operators outside of all modules, by their kind
        (np.full(len(host), source != NAMED_RANGES), categories),
    ]
    component = np.full(len(host), None, dtype=object)
    for applies, told in rules:
        component = np.where(pd.isna(component) & applies, told, component)
    return component


def labeled_events(
    host: pd.DataFrame, source: str, is_range: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Which host events define a component, and their labels; None elsewhere."""
    names, labels = host["name"], np.full(len(host), None, dtype=object)
    defines = np.zeros(len(host), bool)
    if source in (NAMED_RANGES, RANGES_AND_KINDS):
        defines = is_range
        labels[defines] = by_name(names[defines], folded_names(names[defines].unique()).get)
    elif source == MODULE_CALLS:
        defines = (host["kind"] == MODULE).to_numpy()
        # 'BertOutput.Linear': the class of each module call, after that of the call around it
        rows, classes = np.flatnonzero(defines), host["about"].to_numpy(object)
        above = nearest_marked_caller(host["parent"].to_numpy(), defines)[rows]
        labels[rows] = np.where(above >= 0, classes[above] + "." + classes[rows], classes[rows])
    return defines, labels


def component_source(host: pd.DataFrame, is_range: np.ndarray, phase: np.ndarray) -> str:
    """Ranges where they contain most of the forward operators, unless nearly all are in one that
    has modules in it; else modules where there are any, else ranges with kinds for the rest, else
    kinds.  Without operators, ranges."""
    kind, own_us = host["kind"].to_numpy(), host["own_us"].to_numpy()
    if is_range.any() and (kind == ANNOTATION).all():
        return NAMED_RANGES
    is_module = kind == MODULE
    forward = (kind == OPERATOR) & (phase == "forward")
    forward_us = own_us[forward].sum()
    nearest = nearest_marked_ancestor(host["parent"].to_numpy(), is_range)
    inside = forward & (nearest >= 0)
    names = host["name"].cat.codes.to_numpy()[nearest[inside]]
    us_of_name = pd.Series(own_us[inside]).groupby(names).sum()
    inside_us = us_of_name.sum()
    has_modules = (is_module & (nearest >= 0)).any()
    one_has_all = has_modules and us_of_name.max() >= NEARLY_ALL * forward_us
    if not one_has_all and inside_us > 0 and inside_us >= MOST * forward_us:
        return NAMED_RANGES
    if is_module.any():
        return MODULE_CALLS
    return RANGES_AND_KINDS if inside_us >= SOME * forward_us > 0 else OPERATOR_KINDS


def components_of_nodes(
    host: pd.DataFrame, component: np.ndarray, is_node: np.ndarray
) -> np.ndarray:
    """For each backward node the component of the forward operator that created it;
    None elsewhere."""
    out = np.append(component, None)[forward_of_nodes(host, ~pd.isna(component), is_node)]
    out[has_role(host, roles.ACCUMULATION) & is_node] = "gradient accumulation"
    return out


def forward_of_nodes(host: pd.DataFrame, candidates: np.ndarray, is_node: np.ndarray) -> np.ndarray:
    """For each backward node the row of the candidate, an operator, that has its sequence number;
    -1 elsewhere.

    Sequence numbers are counted per thread.  A node's `Fwd thread id` stands for the thread that
    most of them match.
    """
    out = np.full(len(host), -1)
    parent, sequence = host["parent"].to_numpy(), host["sequence"].to_numpy()
    # XBackward0 within evaluate_function: XBackward0
    of_node = is_node | take_or(is_node, parent, False)
    forward = host.loc[(sequence >= 0) & ~of_node & candidates, ["thread", "sequence", "start"]]
    # The last operator with a number created the node: earlier ones only recorded what the next
    # number would be.
    forward = forward.sort_values("start").drop_duplicates(["thread", "sequence"], keep="last")
    for _, group in host.loc[is_node, ["sequence", "forward_thread"]].groupby("forward_thread"):
        best, most = None, -1
        for _, of_thread in forward.groupby("thread"):
            row_of = pd.Series(of_thread.index, of_thread["sequence"].to_numpy())
            rows = group["sequence"].map(row_of).fillna(-1)
            matched = (rows >= 0).sum()
            if matched > most:
                best, most = rows, matched
        if best is not None:
            out[group.index] = best
    return out


def phases_of(host: pd.DataFrame, node: np.ndarray) -> np.ndarray:
    """The phase of each host event: that of a range that names one, ours or PyTorch's; backward
    within autograd nodes.

    Other module calls, and operators with a sequence number, are the forward pass.  In a trace
    without a backward pass or without sequence numbers, so are all other operators.
    """
    parent, kind = host["parent"].to_numpy(), host["kind"].to_numpy()
    label = host["named_phase"]
    named = nearest_marked_ancestor(parent, label.notna().to_numpy())
    phase = np.where(named >= 0, label.to_numpy(object)[named], None)
    # Data and optimizer ranges take precedence, unless a node runs within them, as in an
    # optimizer's closure.
    in_node = (node >= 0) & (~np.isin(phase.astype(str), ("data", "optimizer")) | (node > named))
    phase[in_node] = "backward"
    numbered = (kind == OPERATOR) & (host["sequence"].to_numpy() >= 0)
    forward = nearest_marked_ancestor(parent, (kind == MODULE) | numbered) >= 0
    if (node < 0).all() or not numbered.any():
        forward = forward | (kind == OPERATOR)
    phase[pd.isna(phase) & forward] = "forward"
    return phase


def attributed_gpu(links: Links, host: pd.DataFrame, source: str) -> pd.DataFrame:
    """The GPU events with the component, phase and category of the operator that launched each, or
    of the range."""
    gpu, operator = links.gpu, links.gpu["operator"].to_numpy()
    around = operator
    if links.trace.operators.empty:
        around = ranges_around(links, host)
    component = take_or_none(host["component"], around)
    component[(component == OVERHEAD) & (operator < 0)] = None
    category = categories_of_gpu(links, take_or_none(host["category"], operator))
    component[category == COMMUNICATION] = COMMUNICATION
    if source == OPERATOR_KINDS:
        component = np.where(category == "other", component, category)
    phase = take_or_none(host["phase"], around)
    return gpu.assign(component=component, phase=phase, category=category)


def ranges_around(links: Links, host: pd.DataFrame) -> np.ndarray:
    """The row of host of the range around the call of each GPU event, or -1: on the thread of the
    call, else on that of the steps."""
    call = links.gpu["call"].to_numpy()
    own = take_or(operators_around(links.calls, host), call, -1)
    as_of_steps = links.calls.assign(thread=links.thread)
    of_steps = take_or(operators_around(as_of_steps, host), call, -1)
    return np.where(own >= 0, own, of_steps)


def categories_of_gpu(links: Links, of_operator: np.ndarray) -> np.ndarray:
    """The category of each GPU event.  of_operator: [GPU events] that of its operator, or None."""
    gpu = links.gpu
    own = gpu["named_category"].to_numpy(object)
    # A kernel without an operator takes the usual category of its name: MIOpen's transposes belong
    # to convolutions.  But an optimizer's additions are not the only ones, and an operator of no
    # known kind tells nothing.
    tells = ~np.isin(of_operator.astype(str), ("optimizer", "other"))
    codes = gpu["name"].cat.codes.to_numpy()
    usual = pd.Series(codes).map(most_frequent(codes, np.where(tells, of_operator, None)))
    by_kernel = np.where(usual.notna(), usual, own)
    category = np.where(pd.isna(of_operator), by_kernel, of_operator)
    # Where one operator stands for many, a graph or a compiled region, a kernel's own name says
    # more.
    stands_for_many = (of_operator == "other") | links.only_of_graph
    category = np.where(stands_for_many, np.where(own == "other", by_kernel, own), category)
    # What its operator or its own name calls communication is that, but copies.
    copies = (gpu["kind"] == "memcpy").to_numpy()
    category[~copies & (own == COMMUNICATION)] = COMMUNICATION
    category[copies & (category == COMMUNICATION)] = "copy"
    return category


def views_and_metadata(links: Links, rows: np.ndarray) -> np.ndarray:
    """Which of the operators in these rows move no elements; so does what is none, row -1."""
    return take_or(has_role(links.trace.operators, *roles.MOVES_NO_ELEMENT), rows, True)
