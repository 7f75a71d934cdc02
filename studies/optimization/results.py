"""What do the rows of the optimization study say?  Alone, beside one another, and on this device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from analysis.commands.stored_optimizations import best_of
from analysis.trust.same_training import explained_by_rounding, why_not_the_same
from harness.base.files import explain_nulls
from harness.base.tables import Column, Section, column, text_columns
from harness.base.units import MB
from harness.instruments.phases import break_even_step, median_interval
from harness.model.workload import Workload
from studies.engine.columns import grouped, optional, status_column, time_statistics
from studies.engine.report import predicted_finding
from studies.optimization.rungs import last_flag

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


# ---- Reporting -----------------------------------------------------------------------------------------------------


def label(row: dict) -> str:
    return f"{row['size']} {row['batch_size']} x {row['seq_len']} {row['precision']}"


def result(row: dict) -> str:
    ratio = "" if row["ratio"] is None else f", {row['ratio']:.3f} of the baseline's"
    return f"{row['flags'] or 'baseline'}: {row['step_ms']:,.2f} ms{ratio}"


def ladders(rows: list[dict]) -> dict[str, list[dict]]:
    """The rows of each size and precision, by their label."""
    return grouped(rows, label)


def interval_text(row: dict, name: str = "ratio", form: str = ".2f") -> str:
    """'0.85 (0.83 to 0.87)'; the ratio alone without an interval."""
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return f"{row[name]:{form}}" + (f" ({low:{form}} to {high:{form}})" if low is not None else "")


def finding(rows: list[dict], device: str, available_bytes: int) -> list[str]:
    """What to keep on this device, and what not; and how that compares with transformers' LLaMA."""
    measured = [row for row in rows if row["status"] == "ok"]
    if not measured:
        return predicted_finding(
            rows, "predicted_memory_bytes", lambda row: f"{label(row)} {row['flags']}", available_bytes
        )
    by_label = ladders(measured)
    unknown = {name: why for name, ladder in by_label.items() if (why := undecided(ladder))}
    best = {name: best_of(ladder) or baseline_of(ladder) for name, ladder in by_label.items() if name not in unknown}

    def where_known(key: str, text: Callable[[dict], str]) -> list[str]:
        return [f"{text(row)} at {name}" for name, row in best.items() if row.get(key) is not None]

    against = where_known("ratio_to_reference", lambda row: interval_text(row, "ratio_to_reference"))
    rates = where_known("share_of_measured_peak", lambda row: f"{row['share_of_measured_peak']:.0%}")
    return [
        *sentence(f"Keep on {device}", to_keep(best), "; "),
        *(f"Not decided at {name}: {why}." for name, why in unknown.items()),
        *sentence("Leave out", to_leave_out(by_label), "; "),
        *sentence("Relative to transformers' LLaMA with its best settings", against),
        *sentence("Share of the matmul rate measured here", rates),
    ]


def sentence(subject: str, parts: list[str], separator: str = ", ") -> list[str]:
    """'subject: parts.'; nothing without parts."""
    return [f"{subject}: {separator.join(parts)}."] if parts else []


def to_keep(best: dict[str, dict]) -> list[str]:
    """The best sets of flags, each with where it is best, and the ratio there."""
    places: dict[str, list[str]] = {}
    for name, row in best.items():
        what = f"{row['flags']}, ratio" if row["flags"] else "the baseline, which no set of flags beats"
        places.setdefault(what, []).append(f"{interval_text(row)} at {name}" if row["flags"] else f"at {name}")
    return [f"{what} {', '.join(where)}" for what, where in places.items()]


def undecided(rows: list[dict]) -> str | None:
    """Why nothing can be said of the rows of a ladder, which were all measured; None if something can."""
    baseline, sets = baseline_of(rows), [row for row in rows if row["flags"] and not is_reference(row)]
    if baseline is None:
        return "the baseline was not measured"
    if failure := failed_audit(baseline):
        return f"the baseline fails its audit: {failure}"
    if not sets:
        return "nothing but the baseline was measured"
    if all(row["ratio_high"] is None for row in sets):
        return sets[0]["ratio_high_reason"]
    return None


def to_leave_out(by_label: dict[str, list[dict]]) -> list[str]:
    """What loses, by the reason."""
    losers: dict[str, list[str]] = {}
    for name, ladder in by_label.items():
        where = f" at {name}" if len(by_label) > 1 else ""
        baseline = baseline_of(ladder)
        if baseline and failed_audit(baseline):
            continue
        for row in ladder:
            if row["flags"] and not is_reference(row) and (loses := why_it_loses(row, where)):
                reason, text = loses
                losers.setdefault(reason, []).append(text)
    return [f"{why}: {', '.join(texts)}" for why, texts in losers.items()]


def why_it_loses(row: dict, where: str) -> tuple[str, str] | None:
    """The reason and the row's text: it does not train the same, or is slower alone or on top of the rungs below."""
    if row["not_the_same"]:
        return "not the same training", f"{row['flags']}{where} ({row['not_the_same']})"
    if row["ladder"] is None and row["ratio_low"] is not None and row["ratio_low"] > 1:
        return "slower", f"{row['flags']} {row['ratio']:.2f}{where}"
    if row["ratio_to_previous_low"] is not None and row["ratio_to_previous_low"] > 1:
        text = f"{last_flag(row['flags'])} {row['ratio_to_previous']:.2f}{where}"
        return "slower on top of the rungs below", text
    return None


def ratio_column(title: str, name: str) -> Column:
    """'0.850 (0.830 to 0.870)'"""
    return Column(title, lambda row: None if row[name] is None else interval_text(row, name, ".3f"))


def table(rows: list[dict]) -> Section:
    size, precision = text_columns("size", "precision")
    columns = (
        size,
        *optional(column("batch", "batch_size", ","), column("sequence", "seq_len", ",")),
        precision,
        Column("flags", lambda row: row["flags"] or "baseline", left=True),
        column("rung", "ladder"),
        column("step (ms)", "step_ms", ",.2f"),
        ratio_column("ratio", "ratio"),
        *optional(
            column("at least", "bound", ".3f"),
            column("estimate", "estimate", ".3f"),
            ratio_column("to rung below", "ratio_to_previous"),
            ratio_column("to transformers", "ratio_to_reference"),
            column("of matmul rate", "share_of_measured_peak", ".1%"),
            column("TFLOP/s", "achieved_tflops", ".4f"),
            column("memory (MB)", "measured_memory_bytes", ",.1f", MB),
            column("predicted (MB)", "predicted_memory_bytes", ",.1f", MB),
            column("loss difference", "largest_loss_difference", ".1e"),
            column("by rounding", "loss_bound", ".1e"),
            column("audit", "audit", left=True),
            column("compile (s)", "compile_s", ".1f"),
            column("break-even step", "break_even_step", ","),
        ),
        status_column(),
    )
    text = [
        "ratio: of the median step times, in brackets its 95% interval over the rounds; below 1 is faster",
        "at least, estimate: what the baseline's trace allows and suggests, see the folders profile_*",
        "of matmul rate: FLOPs of the model by the median step, over that of matmuls measured in the same process",
    ]
    return Section("Each alone, and one on top of another: step time relative to the baseline's", columns, rows, text)
