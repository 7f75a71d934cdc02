"""Measuring well: one question answered in six ways, and one command started three times."""

from workshop.results import Answer, Results, Source, share

WAYS = ("no synchronisation", "no warm-up", "profiler left on", "one run", "mean with an outlier")
STARTS = ("exercise9_first", "exercise9_second", "exercise9_third")


def answers(results: Results) -> dict[str, Answer]:
    study = results.read("exercise9_timing", "timing_study.json", change=["--activation-checkpointing"])
    comparison = results.read("exercise9_comparison", "comparison.json")
    for name in STARTS:
        results.run(name, num_steps=20)
    return six_ways(study) | three_starts(comparison)


def six_ways(study: Source) -> dict[str, Answer]:
    rows = {row["way"]: row for row in study["rows"]}
    right = rows["right"]
    pairs = right["ratios_of_pairs"]
    low, high = right["ratio_95"] or (right["ratio"], right["ratio"])
    found = {
        "9.1": study.says(right["baseline_ms"], f"rows, right, median of {len(pairs)} rounds"),
        "9.2": study.says(right["ratio"], "rows, right"),
        "9.3": study.says(low, "rows, right, ratio_95"),
        "9.4": study.says(high, "rows, right, ratio_95"),
        "9.11": study.says(rows["one run"]["ratio"], "rows, one run"),
        "9.12": study.says(min(pairs), f"rows, right, the least of {len(pairs)} pairs"),
        "9.13": study.says(max(pairs), f"rows, right, the most of {len(pairs)} pairs"),
    }
    for nr, way in (
        (5, "no synchronisation"),
        (7, "no warm-up"),
        (9, "profiler left on"),
        (14, "mean with an outlier"),
    ):
        factor = f"{rows[way]['baseline_factor']:.3g} times the right one"
        found[f"9.{nr}"] = study.says(rows[way]["baseline_ms"], f"rows, {way}, {factor}")
        found[f"9.{nr + 1}"] = study.says(rows[way]["ratio"], f"rows, {way}")
    for i, way in enumerate(WAYS):
        row = rows[way]
        found[f"9.{20 + i}"] = study.says(row["conclusion"] != "the same", f"{row['conclusion']} ({row['ratio']:.3f})")
    return found


def three_starts(comparison: Source) -> dict[str, Answer]:
    rows = [row for row in comparison["runs"] if row["name"] in STARTS]
    medians = [row["median_ms"] for row in rows]
    apart = share(max(medians) - min(medians), min(medians))
    return {
        "9.16": comparison.says(min(medians), "runs, median_ms"),
        "9.17": comparison.says(max(medians), "runs, median_ms"),
        "9.18": comparison.says(apart, "(9.17 - 9.16) / 9.16"),
        "9.19": comparison.says(max(share(row["std_ms"], row["mean_ms"]) for row in rows), "runs, std_ms / mean_ms"),
        "9.25": comparison.says(apart > 2, f"{apart:.1f}% apart"),
    }
