"""What do the rows of the optimization study say?  Alone, beside each other, and on this device."""

import math
from collections.abc import Callable, Iterable

from analysis.comparison.noise import AGAIN, as_fast, interval_in_turn, is_decided, judged
from harness.base.sections import Section
from harness.base.tables import Column, column, grouped, text_columns
from harness.base.units import MB
from harness.documents.comparisons import NOT_IN_TURN
from harness.instruments.audit import FAILED
from harness.instruments.phases import break_even_step
from harness.model.workload import Workload
from harness.schema import because, unknown
from studies.engine.columns import optional, status_column, time_statistics
from studies.optimization.rungs import last_flag

KEY = ("size", "seq_len", "batch_size", "precision", "flags")


def is_reference(row: dict) -> bool:
    return row["flags"].startswith("transformers")


def baseline_of(rows: list[dict]) -> dict | None:
    return next((row for row in rows if row["ladder"] == 0), None)


def failed_audit(row: dict) -> str | None:
    """What its audit found, None if nothing."""
    return row["audit"].removeprefix(FAILED) if row["audit_ok"] is False else None


# ---- Alone ---------------------------------------------------------------------------------------


def columns_alone(answer: dict, workload: Workload) -> dict:
    """What a set of flags is by itself.  answer: of take_turns()."""
    row = {
        name: value
        for name, value in answer.items()
        if name not in ("losses", "compile_s", "differs_in")
    }
    if row["status"] != "ok":
        return row
    row |= time_statistics("step", row["step_times_ms"])
    peak = row["measured_peak_tflops"]
    if flops := workload.step_flops():
        row["achieved_tflops"] = flops / row["step_ms"] / 1e9
        row["share_of_measured_peak"] = peak and row["achieved_tflops"] / peak
    if workload.compiled:
        row["num_steps"] = workload.training.num_steps
        row["compile_s"] = answer["compile_s"]
    return row


# ---- Beside others -------------------------------------------------------------------------------


def columns_beside(row: dict, group: list[dict], answers: dict[str, dict]) -> dict:
    """What a row is beside those of its group: ratios, difference of the losses, whether it trains
    the same.

    answers: of take_turns(), by the flags of the rows.
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
        pairs = zip(*(answers[one["flags"]]["losses"] for one in (row, baseline)), strict=False)
        columns["largest_loss_difference"] = max(abs(a - b) for a, b in pairs)
        columns |= break_even_columns(row, baseline)
    columns |= {} if baseline else unknown(NOT_IN_TURN, "trains")  # of others it says nothing
    differs = ", ".join(answers[row["flags"]].get("differs_in", [])[:3]) if baseline else ""
    differs = f"its first steps differ by more than rounding: {differs}" if differs else None
    failed, of_baseline = failed_audit(row), baseline and failed_audit(baseline)
    of_baseline = of_baseline and f"the baseline fails its audit: {of_baseline}"
    return columns | {"not_the_same": failed or of_baseline or differs}


def rung_below(row: dict, measured: list[dict]) -> dict | None:
    """The highest one that was measured: this device may not have the next."""
    below = [
        other
        for other in measured
        if other["ladder"] is not None and other["ladder"] < (row["ladder"] or 0)
    ]
    return max(below, key=lambda other: other["ladder"], default=None)


def ratio_to(other: dict | None, row: dict, name: str) -> dict:
    """The ratio of the medians and its 95% interval over rounds in which both took a step."""
    ends = (f"{name}_low", f"{name}_high")
    if other is None:
        return unknown(NOT_IN_TURN, name, *ends)
    columns = {name: row["step_ms"] / other["step_ms"], **dict.fromkeys(ends)}
    times = row["step_times_ms"], other["step_times_ms"]
    interval = interval_in_turn(*times, columns[name])
    if interval is not None:
        columns |= zip(ends, interval, strict=True)
    return columns


def break_even_columns(row: dict, baseline: dict) -> dict:
    if row.get("compile_s") is None:
        return {}
    step = break_even_step(row["compile_s"], baseline["step_ms"] - row["step_ms"])
    return {"break_even_step": step} | because(
        "it is not faster than the baseline", "break_even_step"
    )


# ---- Reporting -----------------------------------------------------------------------------------


def label(row: dict) -> str:
    return f"{row['size']} {row['batch_size']} x {row['seq_len']} {row['precision']}"


def result(row: dict) -> str:
    ratio = (
        ""
        if row["ratio"] is None or not row["flags"]
        else f", {as_fast(row['ratio'])} as the baseline"
    )
    return f"{row['flags'] or 'baseline'}: {row['step_ms']:,.2f} ms{ratio}"


def ladders(rows: list[dict]) -> dict[str, list[dict]]:
    """The rows of each size and precision, by their label."""
    return grouped(rows, label)


def interval_of(row: dict, name: str) -> tuple[float, float] | None:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return None if low is None else (low, high)


def difference(row: dict, name: str = "ratio") -> str:
    """Of judged(); '' without a ratio.  The process of both was disturbed as the row says."""
    known = row[name] is not None
    return judged(row[name], interval_of(row, name), row, row, in_turn=True) if known else ""


def may_win(row: dict) -> bool:
    """Whether a row is a set of flags that was compared and trains the same.  A precision is not
    chosen: it changes the arithmetic."""
    is_set = row["flags"].startswith("--") and "--precision" not in row["flags"]
    return is_set and row["ratio_high"] is not None and row["not_the_same"] is None


def best_of(rows: Iterable[dict]) -> dict | None:
    """The row of the set of flags with which a run of the default length is shortest, compiling
    included, of those that train the same and are faster than the baseline beyond noise."""
    faster = [row for row in rows if may_win(row) and row["ratio_high"] < 1]
    return min(faster, key=ratio_with_compiling, default=None)


def ratio_with_compiling(row: dict) -> float:
    """The ratio of the steps, with each step's share of the time that compiling took."""
    if not row.get("compile_s"):
        return row["ratio"]
    compile_ms = 1e3 * row["compile_s"] / (row["num_steps"] or 1)
    return row["ratio"] * (1 + compile_ms / row["step_ms"])


def in_time(row: dict) -> bool:
    """Whether compiling, if it was compiled, has saved what it took before a run of the default
    length ends."""
    return (row.get("break_even_step") or 0) <= (row.get("num_steps") or math.inf)


def finding(measured: list[dict], device: str) -> list[str]:
    """What to keep on this device, and what not; and how that compares with transformers' LLaMA."""
    by_label = ladders(measured)
    unknown = {name: why for name, ladder in by_label.items() if (why := undecided(ladder))}
    decided = {name: ladder for name, ladder in by_label.items() if name not in unknown}
    best = {
        name: best_of(filter(in_time, ladder)) or baseline_of(ladder)
        for name, ladder in decided.items()
    }
    gains = {
        name: [one for one in rows if may_win(one) and one["ratio_high"] < 1]
        for name, rows in decided.items()
    }
    fastest = {
        name: min(rows, key=lambda row: row["ratio"]) for name, rows in gains.items() if rows
    }
    late = {name: row for name, row in fastest.items() if not in_time(row)}

    def where_known(key: str, text: Callable[[dict], str]) -> list[str]:
        return [f"{text(row)} at {name}" for name, row in best.items() if row.get(key) is not None]

    against = where_known("ratio_to_reference", lambda row: gain(row, "ratio_to_reference"))
    rates = where_known(
        "share_of_measured_peak", lambda row: f"{row['share_of_measured_peak']:.0%}"
    )
    sure = {name: row for name, row in best.items() if not is_probable(row)}
    probable = {name: row for name, row in best.items() if name not in sure}
    late_at = "{flags}, {gain}, from step {break_even_step:,} on at {name}"
    pays = [late_at.format(**row | {"gain": gain(row), "name": name}) for name, row in late.items()]
    return [
        *sentence(f"Keep on {device}", to_keep(sure, by_label), "; "),
        *sentence(
            f"Probably keep on {device}; disturbed, {AGAIN}", to_keep(probable, by_label), "; "
        ),
        *sentence(
            "Only in runs longer than the default, as compiling has to pay off first", pays, "; "
        ),
        *(f"Not decided at {name}: {why}." for name, why in unknown.items()),
        *sentence("Leave out", to_leave_out(by_label), "; "),
        *sentence("Relative to transformers' LLaMA with its best settings", against),
        *sentence("Share of the matmul rate measured here", rates),
    ]


def sentence(subject: str, parts: list[str], separator: str = ", ") -> list[str]:
    """'subject: parts.'; nothing without parts."""
    return [f"{subject}: {separator.join(parts)}."] if parts else []


def is_probable(row: dict) -> bool:
    """Whether what is best could be otherwise on a machine on which nothing else runs."""
    return not is_decided(difference(row)) if row["flags"] else bool(row.get("disturbed"))


def gain(row: dict, name: str = "ratio") -> str:
    return as_fast(
        row[name], interval_of(row, name), difference(row, name).replace("probably faster", "")
    )


def to_keep(best: dict[str, dict], by_label: dict[str, list[dict]]) -> list[str]:
    """The best sets of flags, each with where it is best and its gain there; without the rungs of a
    ladder whose own gain is not shown, which are named."""
    places: dict[str, list[str]] = {}
    for name, row in best.items():
        if not row["flags"]:
            places.setdefault("the baseline, which no set of flags beats", []).append(f"at {name}")
            continue
        gains_nothing = [flag for flag in flags_of(row) if flag in not_shown(row, by_label[name])]
        kept = [flag for flag in flags_of(row) if flag not in gains_nothing] or flags_of(row)
        beside = (
            f", measured with {' '.join(gains_nothing)}: no gain beyond noise"
            if kept != flags_of(row)
            else ""
        )
        places.setdefault(f"{' '.join(kept)},", []).append(f"{gain(row)} at {name}{beside}")
    return [f"{what} {', '.join(where)}" for what, where in places.items()]


def flags_of(row: dict) -> list[str]:
    return [f"--{flag.strip()}" for flag in row["flags"].split("--")[1:]]


def not_shown(row: dict, ladder: list[dict]) -> set[str]:
    """The flags of the rungs up to this one that are no faster than the rung
    below them, beyond noise."""
    rungs = [
        other for other in ladder if other["ladder"] and other["ladder"] <= (row["ladder"] or 0)
    ]
    return {
        last_flag(rung["flags"])
        for rung in rungs
        if "faster" not in difference(rung, "ratio_to_previous")
    }


def undecided(rows: list[dict]) -> str | None:
    """Why nothing can be said of the rows of a ladder,
    which were all measured; None if something can."""
    baseline, sets = (
        baseline_of(rows),
        [row for row in rows if row["flags"] and not is_reference(row)],
    )
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
    """The reason and the row's text: it does not train the same, or is slower alone or on top of
    the rungs below."""
    if row["not_the_same"]:
        return "not the same training", f"{row['flags']}{where} ({row['not_the_same']})"
    alone, on_top = difference(row), difference(row, "ratio_to_previous")
    if row["ladder"] is None and "slower" in alone:
        return alone, f"{row['flags']} {as_fast(row['ratio'])}{where}"
    if "slower" in on_top:
        factor = as_fast(row["ratio_to_previous"])
        return f"{on_top} on top of the rungs below", f"{last_flag(row['flags'])} {factor}{where}"
    return None


def as_fast_column(title: str, name: str) -> Column:
    """'1.18x (1.15 to 1.20)'; the factor alone without an interval."""

    def text(row: dict) -> str | None:
        interval = interval_of(row, name) if f"{name}_low" in row else None
        return as_fast(row[name], interval, short=True) if row[name] and row["flags"] else None

    return Column(title, text)


def table(rows: list[dict]) -> Section:
    columns = (
        *text_columns("size", "precision"),
        Column("flags", lambda row: row["flags"] or "baseline", left=True),
        column("rung", "ladder"),
        column("step (ms)", "step_ms", ",.2f"),
        as_fast_column("as fast", "ratio"),
        *optional(
            as_fast_column("at most", "bound"),
            as_fast_column("estimate", "estimate"),
            as_fast_column("as the rung below", "ratio_to_previous"),
            as_fast_column("as transformers", "ratio_to_reference"),
            column("of matmul rate", "share_of_measured_peak", ".0%"),
            column("memory (MB)", "measured_memory_bytes", ",.1f", MB),
            column("loss difference", "largest_loss_difference", ".1e"),
            *text_columns("audit", "trains"),
            column("compile (s)", "compile_s", ".1f"),
            column("break-even step", "break_even_step", ","),
        ),
        status_column(),
    )
    text = [
        (
            "as fast: as the baseline, by the median step, with the 95% interval over the rounds;"
            " above 1x is faster"
        ),
        "at most, estimate: as fast as that by the baseline's trace, see the folders profile_*",
        (
            "of matmul rate: FLOPs of the model by the median step, over that of matmuls measured"
            " in the same process"
        ),
    ]
    return Section(
        "Each alone, and one on top of another: how many times as fast", columns, rows, text
    )
