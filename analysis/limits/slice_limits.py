"""What limits each slice of the ledger: a column `bound` beside its other columns."""

from pathlib import Path

import numpy as np
import pandas as pd

from analysis.attribution.ledger import us_by
from analysis.limits.kernel_limits import BASES, UNKNOWN, by_shapes, kernel_bounds
from analysis.trace.links import AttributedLinks
from analysis.trace.tables import by_name, take_or
from analysis.vocabulary.operators import MATMUL_CLASSES, UNKNOWN_KIND, VECTOR_CLASSES, may_compute
from harness.base.text import read_ini

_TABLES = read_ini(Path(__file__).with_suffix(".ini"))
BOUNDS, BOUND_OF_CAUSE = dict(_TABLES["bounds"]), _TABLES["bound of a cause"]


def with_bounds(slices: pd.DataFrame, links: AttributedLinks, ridges) -> pd.DataFrame:
    """Slices of the ledger with the columns `bound`, of BOUNDS: what limits each, and `basis`, of
    BASES: how that was told of a matmul, attention or convolution."""
    number = {name: i for i, name in enumerate(BOUNDS)}
    operator, event = (slices[name].to_numpy() for name in ("operator", "event"))
    multiplies, works = (
        slices["category"].isin(MATMUL_CLASSES).to_numpy(),
        (slices["state"] == "working").to_numpy(),
    )
    if links.on_gpu:
        found, basis = (take_or(column, event, -1) for column in kernel_bounds(links, ridges))
        named = take_or(links.gpu["named_category"].isin(MATMUL_CLASSES).to_numpy(), event, False)
        told = (
            slices["category"].isin(VECTOR_CLASSES).to_numpy()
        )  # by the operator, which the kernel's name is not
        multiplies = multiplies | (named & ~told)
    else:
        found = take_or(by_shapes(links, ridges), operator, UNKNOWN)
        basis = np.where(found == UNKNOWN, -1, 0)
    causes = [number.get(BOUND_OF_CAUSE.get(cause), -1) for cause in slices["cause"].cat.categories]
    by_cause, kind = np.array(causes)[slices["cause"].cat.codes], slices["kind"]
    unknown = of_unknown_kind(slices, links)
    rules = [kind == "communication", by_cause >= 0, kind == "copy", multiplies, unknown]
    of_kernel = np.array([number[name] for name in ("unexplained", "memory", "compute")])[found]
    of_rules = [
        number["communication"],
        by_cause,
        number["memory"],
        of_kernel,
        number["unexplained"],
    ]
    bound = np.select(rules, of_rules, number["memory"])
    basis = np.where(np.select(rules[:3], [False] * 3, multiplies & works), basis, -1)
    columns = {"bound": (bound, [*BOUNDS]), "basis": (basis, [*BASES])}
    return slices.assign(**{name: pd.Categorical.from_codes(*of) for name, of in columns.items()})


def of_unknown_kind(slices: pd.DataFrame, links: AttributedLinks) -> np.ndarray:
    """Which slices of the ledger are work of which neither operator nor kernel tells
    what kind it is."""
    unknown = ((slices["category"] == UNKNOWN_KIND) & (slices["state"] == "working")).to_numpy()
    computes = by_name(links.trace.operators["name"], may_compute, bool)
    return unknown & take_or(computes, slices["operator"].to_numpy(), True)


def basis_shares(slices: pd.DataFrame) -> dict[str, float]:
    """Of the time of slices with bounds, the shares of the matmuls, attention and convolutions that
    each of BASES classified."""
    total = slices["us"].sum()
    return {
        name: float(us / total) if total else 0.0 for name, us in us_by(slices, "basis").items()
    }
