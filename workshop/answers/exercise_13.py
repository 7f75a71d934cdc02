"""Take it home: a model in a file of its own, profiled as planted and as mended, and compared."""

import math

from workshop.answers import shared
from workshop.exercise.results import Answer, Results, Source, derived, numbered

FOLDERS = ("exercise13_before", "exercise13_after")
SETTINGS = {"function": "workload", "num_steps": 16, "enable_pytorch_profiler": True}
LOGITS = 2 * 256 * 4096  # elements


def answers(results: Results) -> dict[str, Answer]:
    before, after = (results.run(folder, **SETTINGS) for folder in FOLDERS)
    planted, mended = (results.read(folder, shared.ANALYSIS) for folder in FOLDERS)
    memories = [results.read(folder, "memory_timeline.json") for folder in FOLDERS]
    comparison = results.read("exercise13_comparison", "comparison.json")
    told, changes = planted.told("13.4 13.5 13.6 13.7"), comparison.told("13.17 13.18 13.19")
    estimated = changes["13.17"], told["13.5"], planted.answer("attribution.ms_per_step")
    return {
        **before.told("13.1 13.2"),
        "13.3": shared.verdict(planted),
        **told,
        **peaks(*memories),
        **after.told("13.11"),
        "13.12": shared.verdict(mended),
        **proof(comparison.row("runs", name="exercise13_after")),
        **changes,
        "13.23": derived(lambda attention, *others: attention < min(others), *changes.values()),
        "13.24": derived(lambda change, speedup, step: -change >= step * (1 - 1 / speedup), *estimated),
    }


def peaks(before: Source, after: Source) -> dict[str, Answer]:
    large = sum(math.prod(one["shape"]) == LOGITS for one in before["peak.largest_tensors"])
    equal = all(one["peak_bytes"] == one["predicted.peak_bytes"] for one in (before, after))
    return {
        **before.told("13.8 13.9"),
        "13.10": before.computed(large, f"peak.largest_tensors, rows of {LOGITS:,} elements"),
        **after.told("13.13"),
        "13.20": before.computed(equal, f"peak_bytes, predicted.peak_bytes; the same in {after.name}"),
    }


def proof(run: Source) -> dict[str, Answer]:
    """What the comparison says of the mended run."""
    difference, bound = (run.answer(name) for name in ("largest_loss_difference", "loss_bound"))
    return {
        "13.14": run.answer("ratio"),
        **numbered("13.15 13.16", (run.computed(end, "ratio_95") for end in run["ratio_95"])),
        "13.21": derived(lambda difference, bound: difference <= bound, difference, bound),
        "13.22": run.computed(run["difference"] == "faster", f"difference: {run['difference']}"),
    }
