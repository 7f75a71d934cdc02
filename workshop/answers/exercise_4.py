"""The optimisations, one at a time and together, against the baseline and against what was predicted."""

from workshop.results import Answer, Results, Source

TEMPLATE = {"run": "exercise4_baseline", "trace": "exercise4_profile"}
VARIANTS = {  # run, its name in the worksheet, and the settings that make it
    "exercise4_repeat": ("repeat", {"attention": "eager", "compile": False, "precision": "fp32"}),
    "exercise4_sdpa": ("fused attention", {"attention": "sdpa", "compile": False}),
    "exercise4_fused": ("fused optimizer", {"optimizer_impl": "fused", "compile": False}),
    "exercise4_checkpointing": ("checkpointing", {"activation_checkpointing": True}),
    "exercise4_bf16": ("bf16", {"precision": "bf16"}),
    "exercise4_compile": ("compiled", {"compile": True, "attention": "eager"}),
    "exercise4_together": ("together", {"compile": True, "attention": "sdpa"}),
}
IN_TURN = ("--attention sdpa", "--optimizer-impl fused", "--activation-checkpointing")


def answers(results: Results) -> dict[str, Answer]:
    baseline = results.run("exercise4_baseline", num_steps=12, attention="eager", compile=False)
    shape = {"num_steps": 12, "batch_size": baseline["training.batch_size"]}
    runs = {name: results.run(name, **shape, **settings) for name, (_, settings) in VARIANTS.items()}
    profile = results.read("exercise4_profile", "operator_analysis.json")
    comparison = results.read("exercise4_comparison", "comparison.json")
    rows = {row["name"]: row for row in comparison["runs"]}
    found = {"4.1": baseline.answer("performance.median_step_time_ms")}
    for i, name in enumerate(VARIANTS):
        found[f"4.{2 + i}"] = comparison.says(rows[name]["ratio"], f"runs, {name}: {interval(rows[name])}")
    compiled = runs["exercise4_compile"]
    cached = "from a cache of earlier ones" if compiled["performance.compilation.from_cache"] else "a first time"
    found["4.9"] = compiled.says(
        compiled["performance.compilation.compile_s"], f"performance.compilation.compile_s, {cached}"
    )
    memory = ("exercise4_baseline", "exercise4_sdpa", "exercise4_checkpointing", "exercise4_bf16")
    for i, name in enumerate(memory):
        found[f"4.{13 + i}"] = (baseline if i == 0 else runs[name]).answer("memory.peak_mb")
    in_turn = results.read("exercise4_interleaved", "optimisations.json", size="tiny")
    turns = {row["flags"]: row for row in in_turn["rows"]}
    for i, flags in enumerate(IN_TURN):
        row = turns[flags]
        text = f"rows, {flags}: {row['ratio_95_low']:.3f} to {row['ratio_95_high']:.3f}, {row['rounds']} rounds"
        found[f"4.{10 + i}"] = in_turn.says(row["ratio"], text)
    found |= against_prediction(rows, turns, profile)
    fastest = min((row for name, row in rows.items() if name != "exercise4_repeat"), key=lambda row: row["ratio"])
    names = {"exercise4_baseline": "baseline"} | {name: title for name, (title, _) in VARIANTS.items()}
    found["4.23"] = comparison.says(names[fastest["name"]], f"runs, ratio {fastest['ratio']:.3f}")
    return found | ticks(rows, turns, comparison, found)


def interval(row: dict) -> str:
    """The ratio's interval and what the comparison makes of it."""
    between = "{:.3f} to {:.3f}, ".format(*row["ratio_95"]) if row["ratio_95"] else ""
    return f"{between}{row['difference']}"


def against_prediction(rows: dict[str, dict], turns: dict[str, dict], profile: Source) -> dict[str, Answer]:
    """Bound and realised speed-up, and whether any is above its bound by more than its ratio is unsure."""
    bounds = {one["name"]: one["speedup_bound"] for one in profile["opportunities"]}
    compiled = rows["exercise4_compile"]
    ratios = {  # worksheet row, name among the opportunities: the ratio, the upper end of its interval, whose it is
        (17, "fused attention"): ends_of(turns[IN_TURN[0]]) + (IN_TURN[0],),
        (19, "fused optimizer"): ends_of(turns[IN_TURN[1]]) + (IN_TURN[1],),
        (21, "compile"): (compiled["ratio"], (compiled["ratio_95"] or [0, compiled["ratio"]])[1], "exercise4_compile"),
    }
    found, above = {}, []
    for (nr, name), (ratio, highest, of) in ratios.items():
        found[f"4.{nr + 1}"] = Answer(1 / ratio, f"1 / {ratio:.3f}, the ratio of {of}")
        if name not in bounds:
            found[f"4.{nr}"] = Answer(None, f"{profile.name}: {name} is no opportunity here")
            continue
        found[f"4.{nr}"] = profile.says(bounds[name], f"opportunities, {name}")
        if 1 / highest > bounds[name]:
            above.append(f"{name}: at least {1 / highest:.2f}x, at most {bounds[name]:.2f}x was predicted")
    return found | {"4.29": Answer(not above, "; ".join(above) or "4.17 to 4.22, and the intervals of the ratios")}


def ends_of(turn: dict) -> tuple[float, float]:
    return turn["ratio"], turn["ratio_95_high"]


def ticks(
    rows: dict[str, dict], turns: dict[str, dict], comparison: Source, found: dict[str, Answer]
) -> dict[str, Answer]:
    off = {name: row["largest_loss_difference"] for name, row in rows.items()}
    exact = max(off[name] for name in ("exercise4_sdpa", "exercise4_fused", "exercise4_compile"))
    repeat, together = rows["exercise4_repeat"], rows["exercise4_together"]
    checkpointing = turns["--activation-checkpointing"]
    before, after = found["4.13"].value, found["4.15"].value
    widths = [row["ratio_95_high"] - row["ratio_95_low"] for row in turns.values()]
    starts = [rows[name]["ratio_95"] for name in ("exercise4_sdpa", "exercise4_fused", "exercise4_checkpointing")]
    wide = [high - low for low, high in starts]
    return {
        "4.24": comparison.says(exact <= 1e-5, f"largest_loss_difference, at most {exact:.1e}"),
        "4.25": comparison.says(
            off["exercise4_checkpointing"] == 0, f"largest_loss_difference {off['exercise4_checkpointing']:.1e}"
        ),
        "4.26": comparison.says(off["exercise4_bf16"] < 5e-3, f"largest_loss_difference {off['exercise4_bf16']:.1e}"),
        "4.27": comparison.says(abs(repeat["ratio"] - 1) <= 0.05, f"ratio {repeat['ratio']:.3f}"),
        "4.28": comparison.says(
            together["difference"] == "faster", f"ratio {together['ratio']:.3f}, {interval(together)}"
        ),
        "4.30": Answer(
            after < before and checkpointing["ratio_95_low"] > 1,
            f"{after:.1f} against {before:.1f} MB; 4.12 from {checkpointing['ratio_95_low']:.3f} on",
        ),
        "4.31": Answer(
            max(widths) < min(wide),
            f"widths in turn {', '.join(f'{one:.3f}' for one in widths)}; between starts "
            + ", ".join(f"{one:.3f}" for one in wide),
        ),
    }
