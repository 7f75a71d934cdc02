"""What do the rows of the optimization study say?  What to keep on a device, and what to leave out."""

from __future__ import annotations

from analysis.commands.stored_optimizations import best_of
from harness.base.tables import Column, Section, column, text_columns
from harness.base.units import MB
from studies.engine.columns import optional, status_column
from studies.engine.prediction import predicted_finding
from studies.optimization.columns import baseline_of, failed_audit, is_reference
from studies.optimization.rungs import last_flag


def label(row: dict) -> str:
    return f"{row['size']} {row['batch_size']} x {row['seq_len']} {row['precision']}"


def result(row: dict) -> str:
    ratio = "" if row["ratio"] is None else f", {row['ratio']:.3f} of the baseline's"
    return f"{row['flags'] or 'baseline'}: {row['step_ms']:,.2f} ms{ratio}"


def ladders(rows: list[dict]) -> dict[str, list[dict]]:
    """The rows of each size and precision, by their label."""
    by_label: dict[str, list[dict]] = {}
    for row in rows:
        by_label.setdefault(label(row), []).append(row)
    return by_label


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
    against = [
        f"{interval_text(row, 'ratio_to_reference')} at {name}"
        for name, row in best.items()
        if row["ratio_to_reference"] is not None
    ]
    rates = [
        f"{row['share_of_measured_peak']:.0%} at {name}"
        for name, row in best.items()
        if row.get("share_of_measured_peak") is not None
    ]
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
            ratio_column("/ rung below", "ratio_to_previous"),
            ratio_column("/ transformers", "ratio_to_reference"),
            column("of peak", "share_of_measured_peak", ".1%"),
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
        "of peak: FLOPs of the model by the median step, relative to the rate of matmuls measured in the same process",
    ]
    return Section("Each alone, and one on top of another: step time relative to the baseline's", columns, rows, text)
