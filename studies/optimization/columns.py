"""Which columns does a set of flags have by itself, and beside those that it took turns with?"""

from __future__ import annotations

import numpy as np

from analysis.trust.same_training import explained_by_rounding, why_not_the_same
from harness.base.files import explain_nulls
from harness.instruments.phases import break_even_step, median_interval
from harness.model.workload import Workload
from studies.engine.columns import time_statistics

KEY = ("size", "seq_len", "batch_size", "precision", "flags")
LEAST_ROUNDS = 3  # for an interval


def is_reference(row: dict) -> bool:
    return row["flags"].startswith("transformers")


def baseline_of(rows: list[dict]) -> dict | None:
    return next((row for row in rows if row["ladder"] == 0), None)


def failed_audit(row: dict) -> str | None:
    """What its audit found, None if nothing."""
    return row["audit"] if row["audit_ok"] is False else None


# ---- Alone ---------------------------------------------------------------------------------------------------------


def columns_alone(answer: dict, workload: Workload) -> dict:
    """What a set of flags is by itself.  answer: of take_turns()."""
    row = {name: value for name, value in answer.items() if name not in ("losses", "first_step_ms")}
    if row["status"] != "ok":
        return row
    row |= time_statistics("step", row["step_times_ms"])
    peak = row["measured_peak_tflops"]
    if flops := workload.step_flops():
        row["achieved_tflops"] = flops / row["step_ms"] / 1e9
        row["share_of_measured_peak"] = peak and row["achieved_tflops"] / peak
    if workload.compiled:
        row["compile_s"] = max(0.0, answer["first_step_ms"] - row["step_ms"]) / 1e3
    return row


# ---- Beside others -------------------------------------------------------------------------------------------------


def columns_beside(row: dict, group: list[dict], losses: dict[str, list[float]]) -> dict:
    """What a row is beside those of its group: ratios, difference of the losses, whether it trains the same.

    losses: from the first step, by the flags of the rows.
    """
    if row["status"] != "ok":
        return {}
    measured = [other for other in group if other["status"] == "ok"]
    baseline = baseline_of(measured)
    columns = {
        **ratio_to(baseline, row, "ratio"),
        **ratio_to(rung_below(row, measured), row, "ratio_to_previous"),
        **ratio_to(next(filter(is_reference, measured), None), row, "ratio_to_reference"),
    }
    if baseline:
        columns |= loss_columns(row, losses[row["flags"]], losses[baseline["flags"]])
        columns |= break_even_columns(row, baseline)
    different = why_not_the_same(
        failed_audit(row),
        baseline and failed_audit(baseline),
        columns.get("largest_loss_difference"),
        columns.get("loss_bound"),
    )
    return columns | explain_nulls({"not_the_same": different}, "nothing says so")


def rung_below(row: dict, measured: list[dict]) -> dict | None:
    """The highest one that was measured: this device may not have the next."""
    below = [other for other in measured if other["ladder"] is not None and other["ladder"] < (row["ladder"] or 0)]
    return max(below, key=lambda other: other["ladder"], default=None)


def ratio_to(other: dict | None, row: dict, name: str) -> dict:
    """The ratio of the medians and its 95% interval over rounds, in each of which both took a step."""
    columns: dict[str, float | None] = dict.fromkeys((name, f"{name}_low", f"{name}_high"))
    if other is None:
        return explain_nulls(columns, "there is none that was measured in turn with this one")
    columns[name] = row["step_ms"] / other["step_ms"]
    times = row["step_times_ms"], other["step_times_ms"]
    if len(times[0]) >= LEAST_ROUNDS:
        rounds = ([[ms] for ms in series] for series in times)
        columns[f"{name}_low"], columns[f"{name}_high"] = median_interval(np.divide, *rounds)
    return explain_nulls(columns, f"an interval needs {LEAST_ROUNDS} rounds")


def loss_columns(row: dict, losses: list[float], expected: list[float]) -> dict:
    """How far its losses are from the baseline's, and how far rounding explains."""
    pairs = list(zip(losses, expected, strict=False))  # a compiled one has no step for its memory
    precisions = (row["precision"], *(["bf16"] if "--precision bf16" in row["flags"] else []))
    return {
        "largest_loss_difference": max(abs(a - b) for a, b in pairs),
        "loss_bound": explained_by_rounding(expected[0], len(pairs), *precisions),
    }


def break_even_columns(row: dict, baseline: dict) -> dict:
    if row.get("compile_s") is None:
        return {}
    step = break_even_step(row["compile_s"], baseline["step_ms"] - row["step_ms"])
    return explain_nulls({"break_even_step": step}, "it is not faster than the baseline")
