"""Is NEW slower than BASE?  `gate` of comparison.json, from `compare_runs.py BASE NEW
--fail-if-slower PERCENT`.

Both are a run, or a folder of runs that repeat each other.  A gate that fails by chance is soon
ignored: what counts is the spread between runs, which noise.noise_between_runs() measures where
there are repeats, and assumes where not.
"""

from pathlib import Path

import numpy as np

from analysis.compare.document import compare_read, read_runs
from analysis.compare.noise import REPEATED, around, judged, least_left, noise_between_runs
from analysis.compare.runs import ComparedRun, different_settings, repeated_runs, settings_text
from analysis.compare.same_training import OF_THE_DATA, OF_THE_MODEL
from harness.base.errors import UserError
from harness.documents.comparisons import Comparison
from harness.schema import explained

EXIT_SLOWER = 3


def compare_with_gate(base: Path, new: Path, allowed_percent: float) -> dict:
    """comparison.json of all runs in both, with `gate`.  Raises UserError, also where they do not
    do the same work."""
    (before, left_out), (after, more) = map(repeated_runs, (base, new))
    if different := different_settings([work_of(run) for run in (*before, *after)]):
        raise UserError(
            f"--fail-if-slower: {base} and {new} do not do the same work:"
            f" {settings_text(different)}"
        )
    comparison = compare_read(read_runs([run.folder for run in (*before, *after)]))
    found = judge_slowdown(before, after, allowed_percent)
    sides = {
        "base": [run.name for run in before],
        "new": [run.name for run in after],
        "left_out": left_out + more,
    }
    return explained(comparison | {"gate": sides | found}, Comparison)


def work_of(run: ComparedRun) -> dict:
    """What a step computes, on which device; not how, which may be what is compared."""
    training, model = run.summary["config"]["training"], run.summary["config"]["model"]
    work = {name: value for name, value in model.items() if name not in OF_THE_MODEL}
    work |= {name: training.get(name) for name in (*OF_THE_DATA, "batch_size", "world_size")}
    return work | {"device": run.environment["device"]["name"]}


def judge_slowdown(base: list[ComparedRun], new: list[ComparedRun], allowed_percent: float) -> dict:
    """How much slower the new runs are, by the geometric means of their medians, and whether that
    is too much.

    smallest_percent: what noise or disturbance alone could be; None if it is not known how much
    time was lost.
    """
    steps = [[run.step_ms for run in runs] for runs in (base, new)]
    before, after = (np.mean([np.log(np.median(times)) for times in runs]) for runs in steps)
    ratio, noise = float(np.exp(after - before)), noise_between_runs(*steps)
    kept = [[least_left(run.disturbance) for run in runs] for runs in (base, new)]
    repeated = min(len(base), len(new)) >= REPEATED
    # Repeats show what a disturbance does, unless it came with the new runs.
    left = 1.0 if repeated and not max(kept[1]) < min(kept[0]) == 1 else float(np.median(kept[1]))
    difference = judged(
        ratio, around(ratio, noise), {"disturbed": left < 1, "lost_share": 1 - left}
    )
    smallest = 100 * max(noise, 1 / left - 1) if left else None
    failed = difference == "slower" and ratio > 1 + allowed_percent / 100
    found = {
        "allowed_percent": allowed_percent,
        "slower_percent": 100 * (ratio - 1),
        "smallest_percent": smallest,
    }
    return found | {"difference": difference, "failed": failed}
