"""Take it home: a model in a file of its own, profiled as planted and as mended, and compared."""

import math

from harness.base.units import MB
from workshop.answers import shared
from workshop.exercise.results import PERCENT, Answer, Results, Source, derived, numbered

PARTS = ("4 x blocks.*.attention", "loss", "optimizer")
FOLDERS = ("exercise13_before", "exercise13_after")
SETTINGS = {"function": "workload", "num_steps": 16, "enable_pytorch_profiler": True}
LOGITS = 2 * 256 * 4096  # elements


def answers(results: Results) -> dict[str, Answer]:
    before, after = (results.run(folder, **SETTINGS) for folder in FOLDERS)
    planted, mended = (results.read(folder, shared.ANALYSIS) for folder in FOLDERS)
    memories = [results.read(folder, "memory_timeline.json") for folder in FOLDERS]
    comparison = results.read("exercise13_comparison", "comparison.json")
    shares = [planted.row("components", component=part).answer("share", PERCENT) for part in PARTS]
    changes = comparison.told("13.17 13.18 13.19")
    return {
        **before.told("13.1 13.2"),
        "13.3": shared.verdict(planted),
        **numbered("13.4 13.6 13.7", shares),
        **peaks(*memories),
        **after.told("13.11"),
        "13.12": shared.verdict(mended),
        **proof(comparison.row("runs", name="exercise13_after")),
        **changes,
        "13.23": derived(lambda attention, *others: attention < min(others), *changes.values()),
        **estimate(planted, changes["13.17"]),
    }


def estimate(trace: Source, change: Answer) -> dict[str, Answer]:
    """The speedup that the opportunity estimated, and whether attention became as much shorter."""
    fused = trace.row("opportunities", name="fused attention").answer("speedup_estimate")
    step = trace.answer("attribution.ms_per_step")
    kept = derived(lambda change, speedup, step: -change >= step * (1 - 1 / speedup), change, fused, step)
    return {"13.5": fused, "13.24": kept}


def peaks(before: Source, after: Source) -> dict[str, Answer]:
    large = sum(math.prod(one["shape"]) == LOGITS for one in before["peak.largest_tensors"])
    equal = all(one["peak_bytes"] == one["predicted.peak_bytes"] for one in (before, after))
    return {
        "13.8": before.answer("predicted.peak_bytes", MB),
        "13.9": before.answer("peak_bytes", MB),
        "13.10": before.computed(large, f"peak.largest_tensors, rows of {LOGITS:,} elements"),
        "13.13": after.answer("peak_bytes", MB),
        "13.20": before.computed(equal, f"peak_bytes, predicted.peak_bytes; the same in {after.name}"),
    }


def proof(run: Source) -> dict[str, Answer]:
    """What the comparison says of the mended run."""
    low, high = run["ratio_95"]
    difference, bound = (run.answer(name) for name in ("largest_loss_difference", "loss_bound"))
    return {
        "13.14": run.answer("ratio"),
        **numbered("13.15 13.16", (run.computed(end, "ratio_95") for end in (low, high))),
        "13.21": derived(lambda difference, bound: difference <= bound, difference, bound),
        "13.22": run.computed(run["difference"] == "faster", f"difference: {run['difference']}"),
    }
