"""Auditing a speedup: five variants, and what the audit and the losses say about each."""

from workshop.exercise.results import Answer, Results, Source, derived, numbered

VARIANTS = [f"exercise12_variant_{letter}" for letter in "abcde"]
TRUE = "exercise12_variant_d"


def answers(results: Results) -> dict[str, Answer]:
    summaries = {name: results.run(name, num_steps=12, vocab_size=4000) for name in ("exercise12_baseline", *VARIANTS)}
    comparison = results.read("exercise12_comparison", "comparison.json")
    baseline, *variants = (comparison.row("runs", name=name) for name in summaries)
    clues = [clue(variant) for variant in variants]
    true = comparison.row("runs", name=TRUE)
    return {
        **comparison.told("12.1 12.2 12.3 12.4 12.5 12.6 12.7 12.8 12.9 12.10 12.11 12.12 12.13"),
        "12.14": backward_share(baseline),
        "12.15": backward_share(variants[1]),
        "12.16": without_gradient(summaries["exercise12_variant_c"]),
        **numbered("12.17 12.18 12.19 12.20 12.21", clues),
        "12.22": derived(lambda *found: found.count("nothing") == 1, *clues),
        "12.23": derived(lambda *fell: all(fell), *(loss_falls(summaries[name]) for name in VARIANTS)),
        "12.24": comparison.computed(
            any(row["not_the_same"] and row["ratio"] < true["ratio"] for row in variants),
            f"runs: ratio of those that are not the same training, against {true['ratio']:.4g}",
        ),
        "12.25": derived(lambda difference: difference == "faster", true.answer("difference")),
    }


def clue(row: Source) -> Answer:
    """What says that the run is not the baseline's training: its audit first."""
    reason = row["not_the_same"]
    found = "audit" if row["audit_ok"] is False else "losses" if reason else "nothing"
    return row.computed(found, f"not_the_same: {reason or 'null'}")


def backward_share(row: Source) -> Answer:
    forward, backward = row["phases_ms.forward"], row["phases_ms.backward"]
    return row.computed(backward / forward, f"phases_ms: backward {backward:.4g} / forward {forward:.4g}")


def without_gradient(run: Source) -> Answer:
    found = [one for one in run["audit.findings"] if one["check"] == "missing_gradient"]
    detail = found[0]["detail"] if found else "none"
    return run.computed(sum(len(one["parameters"]) for one in found), f"audit.findings: {detail}")


def loss_falls(run: Source) -> Answer:
    first, final = run["loss.first"], run["loss.final"]
    return run.computed(final < first, f"loss: {first:.4f} to {final:.4f}")
