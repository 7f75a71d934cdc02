"""Data parallel training: the network alone, four ways to reduce gradients, communication by two measurements."""

import math

from harness.base.units import MB
from tiny_llama_v1 import TinyLlamaConfig
from workshop.answers.shared import ANALYSIS
from workshop.exercise.results import PERCENT, Answer, Results, Source, derived, numbered

GB = 1e9  # of a bandwidth, in bytes
FAULTS = ("naive", "no-overlap", "small-buckets", "slow-rank")
STUDY = {"batch_size": 2, "scalings": ["weak"], "parallel_modes": ["ddp"], "world_sizes": [1, 2]}


def answers(results: Results) -> dict[str, Answer]:
    network = results.read("exercise10_network", "collective_benchmark.json", world_sizes=[2])
    study = results.read("exercise10_ddp", "scaling_study.json", **STUDY, faults=[*FAULTS])
    results.run("exercise10_profile", batch_size=2, num_steps=12, world_size=2)
    trace = results.read("exercise10_profile", ANALYSIS)
    alone = network.told("10.1 10.2 10.3 10.4 10.5 10.6")
    return alone | four_ways(study) | two_measurements(trace, network, alone["10.3"])


def all_reduces(row: Source) -> Answer:
    """Of gradients, in a step: one more is that of the loss."""
    calls = sum(one["calls"] for one in row["measured_collectives"] if one["kind"] == "all_reduce")
    return row.computed(calls - 1, f"measured_collectives, all_reduce: calls {calls} - 1 for the loss")


def four_ways(study: Source) -> dict[str, Answer]:
    one = study.row(scaling="weak", world_size=1)
    bucketed = study.row(scaling="weak", world_size=2, fault=None)
    naive, flat, small, slow = (study.row(fault=name) for name in FAULTS)
    steps = [row.answer("step_ms") for row in (one, bucketed, naive, flat, small)]
    local = slow["local_step_ms"]
    equal = all(row["measured_collectives"] == row["predicted_collectives"] for row in (one, bucketed))
    missed = [row["fault"] for row in study["verdicts"] if not row["named"]]
    return {
        **numbered("10.7 10.8 10.9 10.10 10.11", steps),
        "10.12": all_reduces(bucketed),
        "10.13": all_reduces(naive),
        "10.14": bucketed.answer("overlapped_share", PERCENT),
        "10.15": bucketed.answer("efficiency", PERCENT),
        "10.16": slow.computed(local[-1] / local[0], f"local_step_ms: {local[-1]:.1f} / {local[0]:.1f}"),
        **study.told("10.17"),
        "10.26": study.computed(equal, "rows without a fault: measured_collectives and predicted_collectives"),
        "10.27": derived(lambda bucketed, *others: bucketed < min(others), *steps[1:]),
        "10.28": study.computed(not missed, f"verdicts, not named: {', '.join(missed) or 'none'}"),
    }


def two_measurements(trace: Source, network: Source, alone: Answer) -> dict[str, Answer]:
    told = trace.told("10.18 10.19 10.20 10.21")
    interval = "communication.by_difference.difference_95_ms"
    ends = [trace.computed(end, interval) for end in trace[interval]]
    backward = trace.row("collectives", kind="all_reduce", phase="backward").answer("bus_bandwidth_gb_per_sec")
    return {
        **told,
        **numbered("10.22 10.23", ends),
        "10.24": backward,
        "10.25": best_bucket(network.row("fits", kind="all_reduce")),
        "10.29": derived(lambda exposed, low, high: low <= exposed <= high, told["10.20"], *ends),
        "10.30": derived(lambda training, alone: training < alone, backward, alone),
    }


def best_bucket(fit: Source) -> Answer:
    """In MB: where the calls and the transfer of the last bucket cost the same."""
    size, alpha_s, beta = 4 * TinyLlamaConfig().parameter_count(), fit["alpha_us"] / 1e6, GB * fit["beta_gb_per_sec"]
    text = f"sqrt({size:,} bytes x {fit['alpha_us']:.4g} us x {fit['beta_gb_per_sec']:.4g} GB/s)"
    return fit.computed(math.sqrt(size * alpha_s * beta) / MB, text)
