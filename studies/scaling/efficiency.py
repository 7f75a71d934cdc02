"""How efficient are several ranks, relative to the base and to the prediction?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from analysis.prediction.network import Network
from harness.base.files import explain_nulls
from harness.instruments.phases import median_interval
from studies.scaling.columns import KEY


def same(row: dict, other: dict, *names: str) -> bool:
    return all(row[name] == other[name] for name in names)


def base_of(row: dict, rows: Sequence[dict]) -> dict | None:
    """The row with the fewest ranks, measured: of one rank, or of the same mode and bucket size."""
    for other in rows:
        of_mode = other["world_size"] == 1 or same(row, other, "parallel", "bucket_mb")
        plain = other["fault"] is None and other["status"] == "ok" and same(row, other, "scaling")
        if of_mode and plain and other["world_size"] == row["base_world_size"]:
            return other
    return None


def efficiency(row: dict, base: dict | None) -> dict:
    """Tokens per second and rank, relative to the base, with the interval."""
    if base is None:
        return explain_nulls({"efficiency": None, "efficiency_95": None}, "the base was not measured")
    of_rank = row["tokens_per_sec"] / row["world_size"] / (base["tokens_per_sec"] / base["world_size"])
    if same(row, base, *KEY):
        return explain_nulls({"efficiency": 1.0, "efficiency_95": None}, "it is the base")
    times = row["step_times_ms"], base["step_times_ms"]
    if min(map(len, times)) < 2:
        return explain_nulls({"efficiency": of_rank, "efficiency_95": None}, "needs two launches")
    interval = median_interval(np.divide, *times)
    scale = of_rank * row["step_ms"] / base["step_ms"]  # samples per rank, relative to the base
    return {"efficiency": of_rank, "efficiency_95": [scale / high for high in reversed(interval)]}


def predicted_efficiency(row: dict, base: dict | None, network: Network | None) -> dict:
    """From the base's step, which communicates nothing, and the predicted collectives: not hidden, and all hidden."""
    collectives, why = row["predicted_collectives"], None
    if base is None or base["world_size"] > 1:
        why = "the base communicates" if base else "the base was not measured"
    elif collectives is None:
        why = row["predicted_collectives_reason"]
    elif network is None:
        why = "no network is known"
    if why:
        return explain_nulls({"predicted_efficiency": None}, why)
    computing = base["step_ms"] * row["batch_size"] / base["batch_size"]
    sending = network.time_ms(collectives, row["world_size"])
    return {"predicted_efficiency": [computing / (computing + sending), computing / max(computing, sending)]}
