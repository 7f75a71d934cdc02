"""Does a run train as the baseline does?  Its audit, and how far rounding may take its losses from
the baseline's."""

from typing import NamedTuple

from harness.instruments.audit import audit_text, findings_text

NOT_THE_SAME = "not the same training"
# How much of the first loss rounding may change per step, in unit roundoffs of the type whose
# numbers matmuls multiply.  The same steps with the samples of each batch in another order, whose
# sums are rounded otherwise, in float64, and in fp32 instead of a narrow type stay well within it:
# tests/test_audit.py.  Of a narrow type it is a fraction, as weights and sums stay in float32, and
# the roundings of single products average out over the tokens.
EXPLAINED_PER_STEP = {
    "fp32": 20 * 2.0**-24,
    "tf32": 0.05 * 2.0**-11,
    "fp16": 0.05 * 2.0**-11,
    "bf16": 0.05 * 2.0**-8,
}
# Names of settings, or that follow from others; and a file with its source, which may compute the
# same in another way.
OF_THE_MODEL = {"size", "size_reason", "max_seq_len", "file", "source_sha256"}
OF_THE_DATA = ("seq_len", "learning_rate", "grad_clip", "data", "seed")


def trains_the_same_model(config: dict) -> tuple:
    """Equal for runs whose losses differ by rounding alone: model, data, seed, learning rate,
    clipping, samples per step."""
    training, model = config["training"], config["model"]
    shape = sorted((name, value) for name, value in model.items() if name not in OF_THE_MODEL)
    samples = training["batch_size"] * (training.get("world_size") or 1)
    return repr(shape), samples, *(training.get(name) for name in OF_THE_DATA)


class TrainingCheck(NamedTuple):
    """Whether a run trains as the baseline does."""

    audit_ok: bool | None  # None: its summary has no audit
    audit: str
    loss_bound: float | None  # the difference that rounding explains; None: not known
    not_the_same: str | None  # why it is another training; None: nothing says so


def training_check(summary: dict, baseline: dict, loss_difference: float | None) -> TrainingCheck:
    """summary, baseline: performance_summary.json of both.  loss_difference: the largest of the
    steps that both completed; None: there is none, as in traces, which tell no settings either."""
    audit = summary.get("audit")
    bound = None
    if loss_difference is not None:
        model = trains_the_same_model(summary["config"])
        if model == trains_the_same_model(baseline["config"]):
            bound = loss_bound(summary, baseline)
    failure = findings_text(audit) or trains_less(summary, baseline)
    of_baseline = findings_text(baseline.get("audit"))
    return TrainingCheck(
        audit_ok=audit["ok"] if audit else None,
        audit=audit_text(audit),
        loss_bound=bound,
        not_the_same=why_not_the_same(failure, of_baseline, loss_difference, bound),
    )


def trains_less(summary: dict, baseline: dict) -> str:
    """Of programs, whose size no flag tells: how many parameters fewer are trained; empty: none."""
    numbers = []
    for run in (summary, baseline):
        model = run["config"]["model"]
        numbers.append(model["parameters"] if "program" in model else None)
    if None in numbers or numbers[0] >= numbers[1]:
        return ""
    return f"it trains {numbers[0]:,} parameters, the baseline {numbers[1]:,}"


def why_not_the_same(
    failure: str | None,
    baseline_failure: str | None,
    loss_difference: float | None,
    bound: float | None,
) -> str | None:
    """Why it is another training than the baseline's, None if nothing says so.

    The failures are what the audits found, '' or None if nothing; bound: the loss difference that
    rounding explains, None if that is not known."""
    if failure or baseline_failure:
        return failure or f"the baseline fails its audit: {baseline_failure}"
    if bound is not None and loss_difference > bound:
        return f"the losses differ by {loss_difference:.1e}, and rounding explains {bound:.1e}"
    return None


def loss_bound(summary: dict, baseline: dict) -> float | None:
    """The largest difference between the losses of any step that both completed that rounding
    explains.  It grows with the steps, because each continues from weights that differ already."""
    first = baseline["loss"]["first"]
    if first is None:
        return None
    runs = (summary, baseline)
    steps = min(run["training"]["completed_steps"] for run in runs)
    precisions = [run["config"]["training"]["precision"] for run in runs]
    # Parameters in bf16 keep their rounding errors, and nothing was measured of those.
    if not all(precision in EXPLAINED_PER_STEP for precision in precisions):
        return None
    return explained_by_rounding(first, steps, *precisions)


def explained_by_rounding(first_loss: float, steps: int, *precisions: str) -> float:
    """How far apart the losses of runs in these precisions may be after so many steps."""
    return max(EXPLAINED_PER_STEP[precision] for precision in precisions) * first_loss * (1 + steps)
