"""What limits each slice of the ledger: a column `bound` beside its other columns."""

import numpy as np
import pandas as pd

from analysis.attribution.ledger import IDLE_CAUSES, us_by
from analysis.limits.kernel_limits import BASES, COMPUTE, MEMORY, UNKNOWN, by_shapes, kernel_bounds
from analysis.trace.tables import by_name, take_or
from analysis.trace.timeline import Timeline
from analysis.vocabulary.bounds import BOUND_OF_CAUSE, MEANINGS
from analysis.vocabulary.kernel_classes import MATMUL_CLASSES, UNKNOWN_CATEGORY, VECTOR_CLASSES
from analysis.vocabulary.operators import may_compute

NUMBER = {name: number for number, name in enumerate(MEANINGS)}
# Every cause of idle time stands for a bound; where the host or the GPU works, no cause does.
NUMBER_OF_CAUSE = {cause: NUMBER[BOUND_OF_CAUSE[cause]] for cause in IDLE_CAUSES}
# The bound of a slice whose kernel is limited so.
BOUND_OF_KERNEL = np.zeros(3, int)
BOUND_OF_KERNEL[UNKNOWN] = NUMBER["unexplained"]
BOUND_OF_KERNEL[MEMORY] = NUMBER["memory"]
BOUND_OF_KERNEL[COMPUTE] = NUMBER["compute"]


def with_bounds(slices: pd.DataFrame, timeline: Timeline) -> pd.DataFrame:
    """Slices of the ledger with the columns `bound`: what limits each, and `basis`, of BASES: how
    that was told of a matmul, attention or convolution."""
    multiplies, limit, basis = matmul_limits(slices, timeline)
    by_cause = bounds_of_causes(slices)
    kind = slices["kind"].to_numpy()
    # Each rule comes before those above it.
    bound = np.full(len(slices), NUMBER["memory"])
    bound[of_unknown_kind(slices, timeline)] = NUMBER["unexplained"]
    bound[multiplies] = BOUND_OF_KERNEL[limit[multiplies]]
    bound[kind == "copy"] = NUMBER["memory"]
    bound[by_cause >= 0] = by_cause[by_cause >= 0]
    bound[kind == "communication"] = NUMBER["communication"]
    works = (slices["state"] == "working").to_numpy()
    is_told = multiplies & works & (by_cause < 0) & (kind != "copy") & (kind != "communication")
    return slices.assign(
        bound=pd.Categorical.from_codes(bound, [*MEANINGS]),
        basis=pd.Categorical.from_codes(np.where(is_told, basis, -1), [*BASES]),
    )


def matmul_limits(
    slices: pd.DataFrame, timeline: Timeline
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each slice, whether it is work of a matmul, attention or convolution; what limits that, of
    UNKNOWN, MEMORY and COMPUTE; and the row of BASES that tells, or -1."""
    multiplies = slices["category"].isin(MATMUL_CLASSES).to_numpy()
    if not timeline.on_gpu:
        limit = take_or(by_shapes(timeline), slices["operator"].to_numpy(), UNKNOWN)
        return multiplies, limit, np.where(limit == UNKNOWN, -1, 0)
    event = slices["event"].to_numpy()
    limits, bases = kernel_bounds(timeline)
    kernel_multiplies = timeline.gpu["named_category"].isin(MATMUL_CLASSES).to_numpy()
    # The operator tells what it calculates, where the kernel's name says something else.
    calculates = slices["category"].isin(VECTOR_CLASSES).to_numpy()
    multiplies = multiplies | (take_or(kernel_multiplies, event, False) & ~calculates)
    return multiplies, take_or(limits, event, -1), take_or(bases, event, -1)


def bounds_of_causes(slices: pd.DataFrame) -> np.ndarray:
    """The number of the bound that the cause of each slice stands for; -1 where it is no cause of
    idle time."""
    causes = slices["cause"].cat
    numbers = [NUMBER_OF_CAUSE.get(cause, -1) for cause in causes.categories]
    return np.array(numbers)[causes.codes]


def of_unknown_kind(slices: pd.DataFrame, timeline: Timeline) -> np.ndarray:
    """Which slices of the ledger are work of which neither operator nor kernel tells
    what kind it is."""
    unknown = ((slices["category"] == UNKNOWN_CATEGORY) & (slices["state"] == "working")).to_numpy()
    computes = by_name(timeline.trace.operators["name"], may_compute, bool)
    return unknown & take_or(computes, slices["operator"].to_numpy(), True)


def basis_shares(slices: pd.DataFrame) -> dict[str, float]:
    """Of the time of slices with bounds, the shares of the matmuls, attention and convolutions that
    each of BASES classified."""
    total = slices["us"].sum()
    return {
        name: float(us / total) if total else 0.0 for name, us in us_by(slices, "basis").items()
    }
