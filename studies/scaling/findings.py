"""What is wrong with a row, from what was measured alone?  And do the findings name the planted faults?"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from analysis.prediction.network import Network
from studies.scaling.efficiency import base_of, efficiency, predicted_efficiency, same
from studies.scaling.faults import FAULTS

CONCLUDED = ("efficiency", "efficiency_95", "predicted_efficiency", "findings")  # of several rows together
SLOW = 1.2  # times as long as the other ranks' local steps, and the rank is named
MANY = 2.0  # times the calls for the same bytes, and they are too small


def with_conclusions(rows: list[dict], network: Network | None) -> list[dict]:
    """The rows with efficiency, measured and predicted, and findings, in the order of their columns."""
    out = []
    for row in rows:
        row = {name: value for name, value in row.items() if name.removesuffix("_reason") not in CONCLUDED}
        if row["status"] == "ok":
            row |= efficiency(row, base_of(row, rows)) | predicted_efficiency(row, base_of(row, rows), network)
            row["findings"] = [*findings(row, row_without_fault(row, rows)).values()]
        out.append(row)
    return out


def row_without_fault(row: dict, rows: Sequence[dict]) -> dict | None:
    """The row that differs from this one by its fault, or by its bucket size, alone."""
    for other in rows:
        plain = other["fault"] is None and other["bucket_mb"] is None and other["status"] == "ok"
        if plain and other is not row and same(row, other, "scaling", "parallel", "world_size"):
            return other
    return None


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
    before = {calls["kind"]: calls for calls in reference["measured_collectives"]} if reference else {}
    for now in row["measured_collectives"]:
        least = before.get(now["kind"])
        if now["kind"] == "reduce_scatter" or not least or now["bytes"] > 1.1 * least["bytes"]:
            continue  # a reduce-scatter follows from the all-gathers
        if now["calls"] < MANY * least["calls"]:
            continue
        kind = now["kind"].replace("_", "-")
        sizes = [f"{x['calls']:,} of {x['bytes'] / x['calls'] / 1e3:,.0f} KB" for x in (now, least)]
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


# ---- Planted faults ------------------------------------------------------------------------------------------------


def verdicts(rows: list[dict]) -> list[dict]:
    """Of each planted fault that was measured: whether the findings of its row name it, and those without it do not."""
    planted = [row for row in rows if row["fault"] is not None and row["status"] == "ok"]
    return [verdict(row, row_without_fault(row, rows)) for row in planted]


def verdict(row: dict, reference: dict | None) -> dict:
    wanted, now = {*FAULTS[row["fault"]].named_by}, findings(row, reference)
    before = findings(reference, None) if reference else {}
    named = wanted <= now.keys() and not wanted & before.keys()
    texts = [now[name] for name in sorted(now, key=lambda name: name not in wanted)] or ["nothing was found"]
    if not named:
        disturbed = row.get("disturbed") or (reference or {}).get("disturbed")
        why = ["without the fault too"] if wanted & before.keys() else []
        why += ["not decidable: the run was disturbed"] if disturbed else []
        texts = [*why, *texts]  # first, as a table cuts what is long
    return {"fault": row["fault"], "named": named, "text": "; ".join(texts)}
