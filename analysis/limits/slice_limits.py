"""What limits each slice of the ledger: a column `bound` beside its other columns."""

from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.attribution.ledger.kinds import IDLE_CAUSES
from analysis.attribution.ledger.of_steps import us_by
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
    """Slices of the ledger with the columns `bound`: what limits each; `basis`, of BASES: how that
    was told of a matmul, attention or convolution; and `unknown_kind`: whether it is unexplained
    because neither operator nor kernel tells what kind of work it is."""
    matmuls = matmul_limits(slices, timeline)
    multiplies = matmuls.multiplies
    by_cause = bounds_of_causes(slices)
    kind = slices["kind"].to_numpy()
    # Each rule comes before those above it.
    bound = np.full(len(slices), NUMBER["memory"])
    unknown_kind = of_unknown_kind(slices, timeline)
    bound[unknown_kind] = NUMBER["unexplained"]
    bound[multiplies] = BOUND_OF_KERNEL[matmuls.limit[multiplies]]
    bound[kind == "copy"] = NUMBER["memory"]
    bound[by_cause >= 0] = by_cause[by_cause >= 0]
    bound[kind == "communication"] = NUMBER["communication"]
    works = (slices["state"] == "working").to_numpy()
    is_told = multiplies & works & (by_cause < 0) & (kind != "copy") & (kind != "communication")
    return slices.assign(
        bound=pd.Categorical.from_codes(bound, [*MEANINGS]),
        basis=pd.Categorical.from_codes(np.where(is_told, matmuls.basis, -1), [*BASES]),
        unknown_kind=unknown_kind & (bound == NUMBER["unexplained"]),
    )


class MatmulLimits(NamedTuple):
    """What limits the matmuls, attention and convolutions among slices of the ledger; arrays with
    an entry for each slice."""

    multiplies: np.ndarray  # bool: whether it is one
    limit: np.ndarray  # UNKNOWN, MEMORY or COMPUTE
    basis: np.ndarray  # row of BASES that tells, or -1


def matmul_limits(slices: pd.DataFrame, timeline: Timeline) -> MatmulLimits:
    multiplies = slices["category"].isin(MATMUL_CLASSES).to_numpy()
    if not timeline.on_gpu:
        limit = take_or(by_shapes(timeline), slices["operator"].to_numpy(), UNKNOWN)
        return MatmulLimits(multiplies, limit, np.where(limit == UNKNOWN, -1, 0))
    event = slices["event"].to_numpy()
    kernels = kernel_bounds(timeline)
    kernel_multiplies = timeline.gpu["named_category"].isin(MATMUL_CLASSES).to_numpy()
    # The operator tells what it calculates, where the kernel's name says something else.
    calculates = slices["category"].isin(VECTOR_CLASSES).to_numpy()
    multiplies = multiplies | (take_or(kernel_multiplies, event, False) & ~calculates)
    return MatmulLimits(
        multiplies, take_or(kernels.limit, event, -1), take_or(kernels.basis, event, -1)
    )


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
