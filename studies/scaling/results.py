"""What rows of a scaling study say together: efficiency, measured and predicted, and findings from measured columns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from analysis.prediction.network import Network
from harness.base.files import explain_nulls
from harness.instruments.phases import median_interval
from studies.scaling.rank_steps import FAULTS

KEY = ("scaling", "parallel", "world_size", "bucket_mb", "fault")
CONCLUDED = ("efficiency", "efficiency_95", "predicted_efficiency", "findings")  # of several rows together
SLOW = 1.2  # times as long as the other ranks' local steps, and the rank is named
MANY = 2.0  # times the calls for the same bytes, and they are too small


def concluded(rows: list[dict], network: Network | None) -> list[dict]:
    """The rows with efficiency, measured and predicted, and findings, in the order of their columns."""
    out = []
    for row in rows:
        row = {name: value for name, value in row.items() if name.removesuffix("_reason") not in CONCLUDED}
        if row["status"] == "ok":
            row |= efficiency(row, base_of(row, rows)) | predicted_efficiency(row, base_of(row, rows), network)
            row["findings"] = [*findings(row, reference_of(row, rows)).values()]
        out.append(row)
    return out


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


def reference_of(row: dict, rows: Sequence[dict]) -> dict | None:
    """The row that differs from this one by its fault, or by its bucket size, alone."""
    for other in rows:
        plain = other["fault"] is None and other["bucket_mb"] is None and other["status"] == "ok"
        if plain and other is not row and same(row, other, "scaling", "parallel", "world_size"):
            return other
    return None


# ---- Efficiency ----------------------------------------------------------------------------------------------------


def efficiency(row: dict, base: dict | None) -> dict:
    """Tokens per second and rank, relative to the base, with the interval."""
    if base is None:
        return explain_nulls({"efficiency": None, "efficiency_95": None}, "the base was not measured")
    found = row["tokens_per_sec"] / row["world_size"] / (base["tokens_per_sec"] / base["world_size"])
    if same(row, base, *KEY):
        return explain_nulls({"efficiency": 1.0, "efficiency_95": None}, "it is the base")
    times = row["step_times_ms"], base["step_times_ms"]
    if min(map(len, times)) < 2:
        return explain_nulls({"efficiency": found, "efficiency_95": None}, "needs two launches")
    interval = median_interval(np.divide, *times)
    scale = found * row["step_ms"] / base["step_ms"]  # samples per rank, relative to the base
    return {"efficiency": found, "efficiency_95": [scale / high for high in reversed(interval)]}


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


# ---- Findings ------------------------------------------------------------------------------------------------------


def findings(row: dict, reference: dict | None) -> dict[str, str]:
    """What is wrong with a row, by name, from what was measured alone.  reference: the same row without a fault."""
    return uneven_ranks(row) | small_messages(row, reference) | unhidden(row)


def uneven_ranks(row: dict) -> dict[str, str]:
    """A rank with more samples than the others, or one that takes longer for as many."""
    samples, local = row["samples_by_rank"], row["local_step_ms"]
    uneven = min(samples) < max(samples)
    by = samples if uneven else local
    if by is None:
        return {}
    worst, longer = by.index(max(by)), ""
    if local:
        factor = local[worst] / statistics.median(local[:worst] + local[worst + 1 :])
        waits = f"ranks wait {row['waiting_ms']:,.1f} ms a step"
        longer = f"{factor:.2f} times the others' step without communication; {waits}" if factor > 1 else waits
    if uneven:
        text = f"rank {worst} has more data, {samples[worst]} samples, others {min(samples)}"
        return {"more-data": text + f"; {longer}" * bool(longer)}
    return {"slow-rank": f"rank {worst} is slow: {longer}"} if factor >= SLOW else {}


def small_messages(row: dict, reference: dict | None) -> dict[str, str]:
    """Many more calls than the reference has for as many bytes."""
    before = {one["kind"]: one for one in reference["measured_collectives"]} if reference else {}
    for now in row["measured_collectives"]:
        least = before.get(now["kind"])
        if now["kind"] == "reduce_scatter" or not least or now["bytes"] > 1.1 * least["bytes"]:
            continue  # a reduce-scatter follows from the all-gathers
        if now["calls"] < MANY * least["calls"]:
            continue
        kind = now["kind"].replace("_", "-")
        sizes = [f"{one['calls']:,} of {one['bytes'] / one['calls'] / 1e3:,.0f} KB" for one in (now, least)]
        text = f"{kind}s are too small, {sizes[0]}, not {sizes[1]}"
        if now["kind"] == "all_gather":
            return {"fine-wrapping": f"{text}: too fine a wrapping, use --fsdp-wrap block"}
        return {"small-buckets": f"{text}: too small buckets, raise --bucket-mb"}
    return {}


def unhidden(row: dict) -> dict[str, str]:
    share = row["overlapped_share"]
    if share is None or share >= 0.5:
        return {}
    exposed = "" if row["exposed_ms"] is None else f"; {row['exposed_ms']:,.1f} ms a step are exposed"
    return {"no-overlap": f"no overlap: {share:.0%} of the reduced bytes begin in the backward pass{exposed}"}


def verdicts(rows: list[dict]) -> list[dict]:
    """Of each planted fault that was measured: whether the findings of its row name it, and those without it do not."""
    found = []
    for row in rows:
        if row["fault"] is None or row["status"] != "ok":
            continue
        reference, wanted = reference_of(row, rows), {*FAULTS[row["fault"]].named_by}
        now = findings(row, reference)
        before = findings(reference, None) if reference else {}
        named = wanted <= now.keys() and not wanted & before.keys()
        texts = [now[name] for name in sorted(now, key=lambda name: name not in wanted)] or ["nothing was found"]
        if not named:
            disturbed = any(one and one.get("disturbed") for one in (row, reference))
            why = ["without the fault too"] * bool(wanted & before.keys())
            why += ["not decidable: the run was disturbed"] * disturbed
            texts = [*why, *texts]  # first, as a table cuts what is long
        found.append({"fault": row["fault"], "named": named, "text": "; ".join(texts)})
    return found
