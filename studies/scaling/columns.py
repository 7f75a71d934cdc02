"""Which columns has a row of the scaling study?  Of its launches, and relative to its base."""

import itertools
import statistics
from collections.abc import Sequence

from analysis.comparison.noise import interval_over_processes
from analysis.prediction.memory import predicted_memory
from analysis.prediction.network import Network
from analysis.work.fake_step import FakeRunError
from harness.schema import because, unknown
from studies.scaling.faults import FAULTS
from tiny_llama_v1 import TinyLlamaWorkload

KEY = ("scaling", "parallel", "world_size", "bucket_mb", "fault")
PREDICTED = [
    f"predicted_{name}"
    for name in ("memory_bytes", "memory_by_category", "collective_bytes", "collectives")
]
WITH_BUCKETS = ("ddp", "zero1")
NO_LOCAL_STEPS = "only ddp can compute steps without communication"


# ---- Of launches ---------------------------------------------------------------------------------


def predicted_columns(workload: TinyLlamaWorkload, on_gpu: bool, fault: str | None) -> dict:
    """Memory and collectives of a step, by a fake-tensor run;
    a fault that is no setting cannot be predicted."""
    if fault and not FAULTS[fault].settings:
        return unknown("the prediction is of the step without the fault", *PREDICTED)
    try:
        memory = predicted_memory(workload, on_gpu).document()
    except FakeRunError as error:
        return unknown(str(error), *PREDICTED)
    collectives = memory["collectives"]
    values = (
        memory["peak_bytes"],
        memory["peak"]["bytes_by_category"],
        total_bytes(collectives),
        collectives,
    )
    return dict(zip(PREDICTED, values, strict=True))


def columns_before(key: dict, batch_size: int, base_world_size: int) -> dict:
    """What is known of a row before it is measured.  batch_size: of a rank."""
    no_buckets = (
        {} if key["parallel"] in WITH_BUCKETS else because("there are no buckets", "bucket_mb")
    )
    shape = {"batch_size": batch_size, "global_batch_size": batch_size * key["world_size"]}
    return key | no_buckets | shape | {"base_world_size": base_world_size}


def disturbance_so_far(outcome: dict, earlier: dict | None) -> dict:
    """A row is disturbed if one of its launches was."""
    disturbed = (
        earlier if earlier and earlier["disturbed"] and not outcome["disturbed"] else outcome
    )
    return {name: disturbed[name] for name in ("disturbed", "disturbance")}


def total_bytes(collectives: list[dict]) -> int:
    return sum(row["bytes"] for row in collectives)


def measured_columns(ranks: list[dict], seq_len: int, earlier: dict | None) -> dict:
    """What was measured in this launch and the earlier ones of the row."""
    slowest = [
        max(times) for times in zip(*(rank["step_ms"] for rank in ranks), strict=True)
    ]  # rank, by step
    times = [*(earlier["step_times_ms"] if earlier else []), slowest]  # [launches, steps]
    samples, step_ms = (
        [rank["samples"] for rank in ranks],
        statistics.median(itertools.chain(*times)),
    )
    first, collectives = ranks[0], ranks[0]["collectives"]
    memory = {
        "measured_memory_bytes": first["peak_bytes"],
        "measured_memory_by_category": first["bytes_by_category"],
    }
    memory["memory_bytes_by_rank"] = [rank["peak_bytes"] for rank in ranks]
    return {
        "launches": len(times),
        "step_times_ms": times,
        "step_ms": step_ms,
        "global_batch_size": sum(samples),
        "samples_by_rank": samples,
        "tokens_per_sec": 1e3 * sum(samples) * seq_len / step_ms,
        **memory,
        "measured_collective_bytes": total_bytes(collectives),
        "measured_collectives": collectives,
        **local_columns(ranks, min(itertools.chain(*times)), earlier),
        **overlap_columns(first),
    }


def local_columns(ranks: list[dict], fastest_ms: float, earlier: dict | None) -> dict:
    """Communication by difference: the fastest step less one without communication.  The fastest of
    both, because other work on the machine, and ranks that wait for each other's,
    only add to a time."""
    names = ("local_step_ms", "exposed_ms", "waiting_ms", "communication_share")
    if ranks[0]["local_step_ms"] is None:
        return unknown("one rank" if len(ranks) == 1 else NO_LOCAL_STEPS, *names)
    local = [min(rank["local_step_ms"]) for rank in ranks]
    if earlier:
        local = [min(pair) for pair in zip(local, earlier["local_step_ms"], strict=True)]
    mean, most = statistics.fmean(local), max(local)
    values = (local, max(0.0, fastest_ms - most), most - mean, max(0.0, 1 - mean / fastest_ms))
    return dict(zip(names, values, strict=True))


def overlap_columns(rank: dict) -> dict:
    """Of the bytes that all-reduces send, those that begin in the backward pass."""
    reduced = sum(row["bytes"] for row in rank["collectives"] if row["kind"] == "all_reduce")
    kinds = {row["kind"] for row in rank["collectives"]}
    if not reduced or "reduce_scatter" in kinds:
        why = "fsdp reduces shards" if kinds else "one rank"
        return unknown(why, "overlapped_share")
    return {"overlapped_share": rank["overlapped_bytes"] / reduced}


# ---- Relative to the base ------------------------------------------------------------------------


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
        return unknown("the base was not measured", "efficiency", "efficiency_95")
    of_rank = (
        row["tokens_per_sec"] / row["world_size"] / (base["tokens_per_sec"] / base["world_size"])
    )
    if same(row, base, *KEY):
        return {"efficiency": 1.0} | unknown("it is the base", "efficiency_95")
    times = row["step_times_ms"], base["step_times_ms"]
    if min(map(len, times)) < 2:
        return {"efficiency": of_rank} | unknown("needs two launches", "efficiency_95")
    ratio = row["step_ms"] / base["step_ms"]
    interval = interval_over_processes(*times, ratio)
    scale = of_rank * ratio  # samples per rank, relative to the base
    return {"efficiency": of_rank, "efficiency_95": [scale / high for high in reversed(interval)]}


def predicted_efficiency(row: dict, base: dict | None, network: Network | None) -> dict:
    """From the base's step, which communicates nothing, and the predicted collectives: not hidden,
    and all hidden."""
    collectives, why = row["predicted_collectives"], None
    if base is None or base["world_size"] > 1:
        why = "the base communicates" if base else "the base was not measured"
    elif collectives is None:
        why = row["predicted_collectives_reason"]
    elif network is None:
        why = "no network is known"
    if why:
        return unknown(why, "predicted_efficiency")
    computing = base["step_ms"] * row["batch_size"] / base["batch_size"]
    sending = network.time_ms(collectives, row["world_size"])
    return {
        "predicted_efficiency": [
            computing / (computing + sending),
            computing / max(computing, sending),
        ]
    }
