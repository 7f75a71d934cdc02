"""How many FLOPs does the model ask for in a step?  What is computed twice does not count."""

import numpy as np

from analysis.attribution.operators import costs_of_operators, operator_calls
from analysis.trace.links import OPERATOR
from analysis.trace.nesting import nearest_marked_ancestor
from analysis.trace.steps import step_at
from analysis.trace.tables import by_name, has_role, take_or
from analysis.trace.timeline import Timeline
from analysis.vocabulary import roles
from analysis.vocabulary.operators import makes_a_tensor


def model_flops_per_step(timeline: Timeline) -> int | None:
    """Matmul FLOPs of forward and backward passes, mean of the steps, with the full S x T scores of
    attention: what checkpointed blocks and the backward pass of fused attention compute again is
    left out, but for what a compiler has put into a graph of its own.  None: no operator's FLOPs
    are known."""
    costs, which = costs_of_operators(timeline)
    n = len(which)
    host = timeline.host.iloc[:n]
    counts = operator_calls(timeline)["calls_of_name"].to_numpy() & ~recomputed(timeline)[:n]
    counts &= ~host["phase"].isin(("data", "optimizer")).to_numpy()
    counts &= step_at(host["start"].to_numpy(), timeline.steps) >= 0
    n_calls = np.bincount(which[counts], minlength=len(costs)).tolist()
    flops = [
        calls * cost.model_flops
        for calls, cost in zip(n_calls, costs, strict=True)
        if calls and cost.model_flops
    ]
    return sum(flops) // len(timeline.steps) if flops else None


def recomputed(timeline: Timeline) -> np.ndarray:
    """Which host events belong to a forward pass that the backward pass runs again, as for a
    checkpointed block: [events].

    Its operators run with gradients and so have numbers, inside of an autograd node whose own
    operators have none.  Where those have numbers too, the gradients are
    themselves to be differentiated.
    """
    host = timeline.host
    parent, node = host["parent"].to_numpy(), host["node"].to_numpy()
    is_node = node == np.arange(len(host))
    # XBackward0 within evaluate_function: XBackward0
    of_node = is_node | has_role(host, roles.NODE_FUNCTION)
    numbered = host["sequence"].to_numpy() >= 0
    makes = by_name(host["name"], makes_a_tensor, bool)
    is_operator = (host["kind"] == OPERATOR).to_numpy()
    own = take_or(of_node, parent, False) & ~of_node & is_operator
    without_gradients = np.zeros(len(host) + 1, dtype=bool)  # of nodes; the last: of none
    without_gradients[node[own & ~numbered & ~makes]] = True
    without_gradients[-1] = False
    begins = numbered & ~of_node & without_gradients[node]
    nearest = nearest_marked_ancestor(parent, begins | is_node)
    return (nearest >= 0) & ~take_or(is_node, nearest, True)
