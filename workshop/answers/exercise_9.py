"""Measuring well: one question answered by six methods, and one command run three times."""

from workshop.exercise.results import Answer, Results, Source, derived, numbered, percent

WRONG = ("no synchronization", "no warm-up", "profiler left on", "one run", "mean with an outlier")
RUNS = ("exercise9_first", "exercise9_second", "exercise9_third")


def answers(results: Results) -> dict[str, Answer]:
    study = results.read("exercise9_timing", "timing_study.json", change=["--activation-checkpointing"])
    comparison = results.read("exercise9_comparison", "comparison.json")
    for name in RUNS:
        results.run(name, num_steps=20)
    return six_methods(study) | three_runs(comparison)


def six_methods(study: Source) -> dict[str, Answer]:
    right = study.row(method="right")
    pairs, ends = right["ratios_of_pairs"], right["ratio_95"] or (right["ratio"], right["ratio"])
    return {
        **study.told("9.1 9.2 9.5 9.6 9.7 9.8 9.9 9.10 9.11 9.14 9.15"),
        **numbered("9.3 9.4", (right.computed(end, "ratio_95") for end in ends)),
        "9.12": right.computed(min(pairs), f"ratios_of_pairs, the smallest of {len(pairs)}"),
        "9.13": right.computed(max(pairs), f"ratios_of_pairs, the largest of {len(pairs)}"),
        **numbered("9.20 9.21 9.22 9.23 9.24", (misleads(study.row(method=name)) for name in WRONG)),
    }


def misleads(row: Source) -> Answer:
    """Whether this method leads to another conclusion than the right one."""
    return derived(lambda conclusion: conclusion != "the same", row.answer("conclusion"))


def three_runs(comparison: Source) -> dict[str, Answer]:
    rows = [comparison.row("runs", name=name) for name in RUNS]
    medians = sorted((row.answer("median_ms") for row in rows), key=lambda answer: answer.value)
    fastest, slowest = medians[0], medians[-1]
    spreads = [percent(row.answer("std_ms"), row.answer("mean_ms")) for row in rows]
    difference = derived(lambda slowest, fastest: 100 * (slowest - fastest) / fastest, slowest, fastest)
    return {
        "9.16": fastest,
        "9.17": slowest,
        "9.18": difference,
        "9.19": max(spreads, key=lambda answer: answer.value),
        "9.25": derived(lambda percent: percent > 2, difference),
    }
