"""What will communication cost on W ranks?  Bytes of every collective, the time of a network, where it bounds the step,
and what would make a step fit.  Predicted: no rank is needed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from analysis.prediction.network import Network
from analysis.work.sent_bytes import sent_bytes
from harness.base.console import progress_bar
from harness.base.files import explain_nulls
from harness.base.tables import column
from harness.base.text import text_of
from harness.base.units import MB
from harness.model.workload import Workload, most_ranks
from harness.ranks.parallel import SHARDING

MOST_RANKS = 2**20  # no search goes further
NO_NETWORK = "no --network was given"
ONE_RANK = "one rank has nobody to communicate with"
NEVER = "the network needs less time than the computation, on any number of ranks"


def first_world_size(bound: Callable[[int], bool]) -> int | None:
    """The fewest ranks, at least two, from which on `bound` holds; None if it never does."""
    low, high = 1, 2
    while not bound(high):
        low, high = high, 2 * high
        if high > MOST_RANKS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if bound(middle) else (middle, high)
    return high


def communication(collectives: list[dict], world_size: int, bounds: dict, network: Network | None) -> dict:
    """`communication` of prediction.json: what a step sends, and how far it limits speed and scaling.

    bounds are those of the step's time on one rank.  Collectives are assumed to keep their calls, bytes and latency on
    other numbers of ranks.
    """
    sent = sent_bytes(collectives, world_size)
    computing = max((ms for ms in (bounds["compute_ms"], bounds["bandwidth_ms"]) if ms is not None), default=None)
    document = {"sent_bytes": round(sent), "network_gb_per_sec": network and network.gb_per_sec}
    document |= {"network_latency_us": network and network.latency_us}
    document |= {"network_source": network and network.source_for(world_size)}
    names = ("network_ms", "overlapped_ms", "not_overlapped_ms", "weak_scaling_bound_from", "strong_scaling_bound_from")
    document |= dict.fromkeys((*names, "efficiency_overlapped", "efficiency_not_overlapped"))
    if network is None:
        return explain_nulls(document, NO_NETWORK)

    def network_ms(ranks: int) -> float:
        return network.time_ms(collectives, ranks)

    taken = document["network_ms"] = network_ms(world_size)
    no_latency = {"network_latency_us": "not counted, as --network GB/s gives none"}
    if computing is None:
        return explain_nulls(document, bounds["bandwidth_ms_reason"], **no_latency)
    whole = computing * world_size  # ms of the computation of the global batch on one rank
    document |= {
        "overlapped_ms": max(computing, taken),
        "not_overlapped_ms": computing + taken,
        "weak_scaling_bound_from": first_world_size(lambda ranks: network_ms(ranks) > computing),
        "strong_scaling_bound_from": first_world_size(lambda ranks: network_ms(ranks) > whole / ranks),
        "efficiency_overlapped": computing / max(computing, taken),
        "efficiency_not_overlapped": computing / (computing + taken),
    }
    return explain_nulls(document, NEVER, **no_latency)


# ---- What would fit ------------------------------------------------------------------------------------------------


def smallest_world_size(workload: Workload, on_gpu: bool, capacity: int, predicted: Callable) -> int | None:
    """The fewest ranks, at least two, on which a step of this batch per rank fits; None if there is no such number.

    predicted(workload, on_gpu) is the tracker of a step.
    """
    if workload.parallel.parallel not in SHARDING:
        return None
    limit = most_ranks(workload)[0]

    @functools.cache
    def live(ranks: int) -> np.ndarray:
        return predicted(workload.with_settings(world_size=ranks), on_gpu).live_bytes_at_allocations()

    def fits(ranks: int) -> bool:
        return ranks > limit or bool(live(ranks).max() <= capacity)

    if workload.parallel.parallel == "zero1":  # deals out whole tensors: no formula
        found = first_world_size(fits)
    else:
        found = first_world_size_with_shards(live, fits, workload.parallel.world_size, capacity, limit)
    return found if found and found <= limit else None


def first_world_size_with_shards(
    live: Callable[[int], np.ndarray], fits: Callable[[int], bool], now: int, capacity: int, limit: int
) -> int | None:
    """The same, from few calls of live(ranks), the bytes at each allocation: any number of ranks makes the same
    allocations, constants plus shards.  Two numbers tell about where the limit is, neighbors find it exactly."""
    other = max(2, now // 2) if now > 2 else 2 * now
    if live(now).shape != live(other).shape:
        return first_world_size(fits)
    shards = (live(other) - live(now)) / (1 / other - 1 / now)  # bytes that are divided among the ranks
    constant = live(now) - shards / now
    if constant.max() >= capacity:
        return None
    guess = min(max(math.ceil((shards / (capacity - constant)).max()), 2), limit)
    while not fits(guess):
        guess += 1
    while guess > 2 and fits(guess - 1):
        guess -= 1
    return guess


REMEDIES = ({"activation_checkpointing": True}, {"attention": "sdpa"}, {"precision": "bf16"})


def remedies(workload: Workload) -> list[dict]:
    """Settings of this workload that lower the peak, one at a time, and all together at the end."""
    settings = workload.settings()["training"]
    changes = [one for one in REMEDIES for name, value in one.items() if settings.get(name, value) != value]
    return changes + ([{name: value for one in changes for name, value in one.items()}] if len(changes) > 1 else [])


def what_would_fit(workload: Workload, on_gpu: bool, capacity: int, predicted: Callable) -> list[dict]:
    """For each of the remedies the peak of a step, and whether it fits."""
    rows = []
    for change in progress_bar("Searching for what would fit", remedies(workload)):
        peak = int(predicted(workload.with_settings(**change), on_gpu).live_bytes_at_allocations().max())
        rows.append({"flags": flags_of(change), "peak_memory_mb": peak / MB, "fits": peak <= capacity})
    return rows


def on_more_ranks(workload: Workload, on_gpu: bool, capacity: int, predicted: Callable) -> list[dict]:
    """A row of `would_fit`: all remedies together, on the fewest ranks on which a step then fits; [] if on none."""
    together = remedies(workload)[-1]
    ranks = smallest_world_size(workload.with_settings(**together), on_gpu, capacity, predicted)
    if ranks is None:
        return []
    change = {"world_size": ranks, **together}
    peak = int(predicted(workload.with_settings(**change), on_gpu).live_bytes_at_allocations().max())
    return [{"flags": flags_of(change), "peak_memory_mb": peak / MB, "fits": True}]


def fitting(workload: Workload, document: dict, on_gpu: bool, predicted: Callable) -> dict:
    """`would_fit` and `smallest_world_size` of prediction.json, which has the rest already."""
    if workload.parallel.world_size == 1:
        return explain_nulls({"would_fit": None, "smallest_world_size": None}, "one rank")
    tensors_mb = document["peak_memory_mb"] - (document["library_workspaces_mb"] or 0)
    capacity = round((tensors_mb + document["margin_mb"]) * MB)
    workload = workload.with_settings(compile=False)
    rows = None if document["fits"] else what_would_fit(workload, on_gpu, capacity, predicted)
    ranks, mode = smallest_world_size(workload, on_gpu, capacity, predicted), workload.parallel.parallel
    if rows and ranks is None and not any(row["fits"] for row in rows):
        rows += on_more_ranks(workload, on_gpu, capacity, predicted)
    why = "fits on no number of them" if mode in SHARDING else f"{mode} needs as much on any number"
    found = {"would_fit": rows, "smallest_world_size": ranks}
    return explain_nulls(found, "it fits", smallest_world_size=why)


def flags_of(change: dict) -> str:
    return " ".join(
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}") for name, value in change.items()
    )


# ---- For a reader --------------------------------------------------------------------------------------------------


COLLECTIVE_COLUMNS = [
    column("collectives of a step and rank", "kind", left=True),
    column("ranks", "group_size", ","),
    column("calls", "calls", ","),
    column("MB", "bytes", ",.2f", MB),
    column("MB sent", "sent_bytes", ",.2f", MB),
]
FIT_COLUMNS = [
    column("would it fit with", "flags", left=True),
    column("peak, MB", "peak_memory_mb", ",.0f"),
    column("fits", "fits", left=True),
]


def communication_lines(document: dict) -> list[str]:
    """The tables of collectives and of what would fit, and the least time of a step with communication."""
    found, times = document["communication"] or {}, []
    if hidden := found.get("overlapped_ms"):
        apart = found["not_overlapped_ms"]
        times = ["", f"A step takes at least {hidden:,.2f} ms if communication is hidden, {apart:,.2f} ms if not"]
    would_fit = [row | {"fits": "yes" if row["fits"] else "no"} for row in document["would_fit"] or []]
    tables = ((COLLECTIVE_COLUMNS, document["collectives"]), (FIT_COLUMNS, would_fit))
    return text_of([(columns, rows) for columns, rows in tables if rows]) + times


def communication_facts(document: dict) -> dict[str, str]:
    """What a dry run says of the ranks and their network, by label; {} on one rank."""
    found = document["communication"]
    if found is None:
        return {}
    fewest = document["smallest_world_size"]
    would = [row["flags"] for row in document["would_fit"] or [] if row["fits"]]
    fits = f"fits on {fewest:,} or more" if fewest else document["smallest_world_size_reason"]
    fits += f"; would fit with {' or '.join(would[:2])}" if would else ""
    facts = {"Ranks": f"each sends {found['sent_bytes'] / MB:,.1f} MB{network_text(found)}; {fits}"}
    if found["overlapped_ms"] is None:
        return facts
    least, most = found["efficiency_not_overlapped"], found["efficiency_overlapped"]
    weak, strong = (found[f"{name}_scaling_bound_from"] for name in ("weak", "strong"))
    bound = f"communication-bound {f'from {weak:,} ranks on' if weak else 'never'} (weak scaling), "
    bound += f"{f'from {strong:,}' if strong else 'never'} (strong)"
    return facts | {"Scaling": f"efficiency at most {least:.1%} to {most:.1%}; {bound}"}


def network_text(found: dict) -> str:
    """The time of a step's communication, and the network that it is for."""
    if found["network_ms"] is None:
        return " a step"
    latency = found["network_latency_us"]
    calls = "no latency" if latency is None else f"{latency:,.3g} us a call, {found['network_source']}"
    return f" in {found['network_ms']:,.2f} ms a step ({found['network_gb_per_sec']:,.3g} GB/s, {calls})"
