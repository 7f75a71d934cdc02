"""Is NEW slower than BASE?  `gate` of comparison.json, from `compare_runs.py BASE NEW
--fail-if-slower PERCENT`.

Both are a run, or a folder of runs that repeat each other.  A gate that fails by chance is soon
ignored: what counts is the spread between runs, which noise.noise_between_runs() measures where
there are repeats, and assumes where not.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from analysis.compare.document import Comparison, Gate, compare_read, read_runs
from analysis.compare.noise import REPEATED, Disturbance, around, judged, noise_between_runs
from analysis.compare.runs import ComparedRun, repeated_runs
from analysis.compare.same_training import OF_THE_DATA, OF_THE_MODEL
from analysis.compare.settings import different_settings, settings_text
from harness.base.errors import UserError

EXIT_SLOWER = 3


def compare_with_gate(base: Path, new: Path, allowed_percent: float) -> Comparison:
    """Of all runs in both, with `gate`.  Raises UserError, also where they do not do the same
    work."""
    before, left_out_before = repeated_runs(base)
    after, left_out_after = repeated_runs(new)
    runs = [*before, *after]
    different = different_settings([work_of(run) for run in runs])
    if different:
        raise UserError(
            f"--fail-if-slower: {base} and {new} do not do the same work:"
            f" {settings_text(different)}"
        )
    gate = judge_slowdown(before, after, allowed_percent, [*left_out_before, *left_out_after])
    return compare_read(read_runs([run.folder for run in runs]), gate)


def work_of(run: ComparedRun) -> dict:
    """What a step computes, on which device; not how, which may be what is compared."""
    training, model = run.summary["config"]["training"], run.summary["config"]["model"]
    work = {name: value for name, value in model.items() if name not in OF_THE_MODEL}
    for name in (*OF_THE_DATA, "batch_size", "world_size"):
        work[name] = training.get(name)
    work["device"] = run.environment["device"]["name"]
    return work


def judge_slowdown(
    base: Sequence[ComparedRun],
    new: Sequence[ComparedRun],
    allowed_percent: float,
    left_out: list[str],
) -> Gate:
    """How much slower the new runs are, by the geometric means of their medians, and whether that
    is too much."""
    times_before = [run.step_ms for run in base]
    times_after = [run.step_ms for run in new]
    ratio = float(np.exp(mean_logarithm(times_after) - mean_logarithm(times_before)))
    noise = noise_between_runs(times_before, times_after)
    left = share_left(base, new)
    lost = Disturbance(disturbed=left < 1, lost_share=1 - left)
    difference = judged(ratio, around(ratio, noise), lost)
    return Gate(
        base=[run.name for run in base],
        new=[run.name for run in new],
        left_out=left_out,
        allowed_percent=allowed_percent,
        slower_percent=100 * (ratio - 1),
        # What noise or disturbance alone could be.
        smallest_percent=100 * max(noise, 1 / left - 1) if left else None,
        difference=difference,
        failed=difference == "slower" and ratio > 1 + allowed_percent / 100,
    )


def mean_logarithm(runs: Sequence[np.ndarray]) -> float:
    """Of the medians of the step times of each run."""
    return np.mean([np.log(np.median(times)) for times in runs])


def share_left(base: Sequence[ComparedRun], new: Sequence[ComparedRun]) -> float:
    """The share of the new runs' time that disturbance cannot explain; 0: not known how much was
    lost.  Repeats show what a disturbance does, unless it came with the new runs."""
    before = [run.disturbance.of_times.least_left() for run in base]
    after = [run.disturbance.of_times.least_left() for run in new]
    repeated = min(len(base), len(new)) >= REPEATED
    came_with_the_new = max(after) < min(before) == 1
    if repeated and not came_with_the_new:
        return 1.0
    return float(np.median(after))
