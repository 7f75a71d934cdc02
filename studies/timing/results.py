"""What does each method conclude, and where does that differ from the right one?"""

import statistics

from analysis.comparison.noise import as_fast, interval_in_turn, is_decided, judged
from harness.base.sections import Section
from harness.base.tables import Column, column
from studies.engine.columns import factor_column, optional, status_column
from studies.timing.methods import MEANS, METHODS, RIGHT


def reported(method: str, baseline: list[float], changed: list[float]) -> dict:
    """The figures that this method reports, with every single time, in ms."""
    average = statistics.fmean if method in MEANS else statistics.median
    baseline_ms, changed_ms = average(baseline), average(changed)
    figures = {
        "baseline_ms": baseline_ms,
        "changed_ms": changed_ms,
        "ratio": changed_ms / baseline_ms,
    }
    if method == RIGHT:
        figures["ratio_95"] = interval_in_turn(changed, baseline, figures["ratio"])
        figures["ratios_of_pairs"] = [b / a for a, b in zip(baseline, changed, strict=True)]
    return figures | {"baseline_times_ms": baseline, "changed_times_ms": changed}


def with_conclusions(rows: list[dict]) -> list[dict]:
    """The rows with baseline factor and conclusion, compared with the right method."""
    right = next((row for row in rows if row["method"] == RIGHT and row["status"] == "ok"), None)
    if right is None:
        return rows
    return [with_conclusion(row, right) if row["status"] == "ok" else row for row in rows]


def with_conclusion(row: dict, right: dict) -> dict:
    low, high = interval_of(right)
    is_right = row["method"] == RIGHT
    text = (
        as_fast(row["ratio"]) + doubt(row)
        if is_right
        else conclusion(row["ratio"], right["ratio"], (low, high))
    )
    return row | {"baseline_factor": row["baseline_ms"] / right["baseline_ms"], "conclusion": text}


def conclusion(claimed: float, right: float, interval: tuple[float, float]) -> str:
    """How the conclusion from a ratio differs from that of the right one with its 95% interval."""
    low, high = interval
    if low <= claimed <= high:
        return "the same"
    if low <= 1 <= high:
        return f"{as_fast(claimed)}, where there is no significant difference"
    opposite = "the opposite: " if (claimed - 1) * (right - 1) < 0 else ""
    return f"{opposite}{as_fast(claimed)}, not {1 / right:.2f}x"


def interval_of(right: dict) -> tuple[float, float]:
    """Its 95% interval; the ratio itself if there are too few repetitions."""
    low, high = right["ratio_95"] or (right["ratio"], right["ratio"])
    return low, high


def doubt(right: dict) -> str:
    """What speaks against its ratio, which is of steps in turn; '' if nothing does."""
    word = judged(right["ratio"], right["ratio_95"], right, right, in_turn=True)
    return "" if is_decided(word) else f", {word}"


# ---- Reporting -----------------------------------------------------------------------------------


def label(row: dict) -> str:
    return row["method"]


def result(row: dict) -> str:
    return f"{row['baseline_ms']:.2f} and {row['changed_ms']:.2f} ms"


def finding(rows: list[dict], change: str) -> list[str]:
    """The effect by the right method, and which wrong ones conclude something else."""
    right, *others = rows
    if right["status"] != "ok":
        return [f"The right method could not be used: {right['reason']}."]
    wrong = [
        row["method"] for row in others if row["status"] == "ok" and row["conclusion"] != "the same"
    ]
    which = f": {', '.join(wrong)}" if wrong else ""
    first = f"{change}: {as_fast(right['ratio'], interval_of(right))}{doubt(right)}."
    return [first, f"{len(wrong)} of {len(others)} wrong methods conclude something else{which}."]


def table(rows: list[dict]) -> Section:
    columns = (
        column("method", "method", left=True),
        column("baseline (ms)", "baseline_ms", ",.2f"),
        column("changed (ms)", "changed_ms", ",.2f"),
        *optional(factor_column("baseline / right", "baseline_factor")),
        Column(
            "as fast",
            lambda row: row["ratio"] and as_fast(row["ratio"], row["ratio_95"], short=True),
        ),
        column("conclusion", "conclusion", left=True),
        status_column(),
    )
    return Section(
        "Baseline and changed step, timed by six methods", columns, with_conclusions(rows)
    )


def sections(rows: list[dict], change: str) -> list[Section]:
    first = table(rows)
    first.note = [
        f"The change: {change}",
        *(f"{method}: {text}" for method, text in METHODS.items()),
    ]
    right = rows[0]
    if right["status"] != "ok":
        return [first]
    low, high = interval_of(right)
    pairs = right["ratios_of_pairs"]
    outside = sum(not low <= pair <= high for pair in pairs)
    opposite = sum((pair - 1) * (right["ratio"] - 1) < 0 for pair in pairs)
    spread = f"{1 / max(pairs):.2f}x to {1 / min(pairs):.2f}x as fast"
    where = f"{outside} of {len(pairs)} are outside the interval, {opposite} on the other side of 1"
    found = f"Right: {as_fast(right['ratio'], (low, high))}, {len(pairs)} repetitions{doubt(right)}"
    return [
        first,
        Section(
            "How reliable is a single run?",
            note=[found, f"Single pairs of steps: {spread}; {where}"],
        ),
    ]
