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
PREDICTED = {  # worksheet rows, run, name among the opportunities
    14: ("exercise4_sdpa", "fused attention"),
    16: ("exercise4_compile", "compile"),
    18: ("exercise4_fused", "fused optimizer"),
}


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
    found["4.9"] = runs["exercise4_compile"].answer("performance.compilation.compile_s")
    memory = ("exercise4_baseline", "exercise4_sdpa", "exercise4_checkpointing", "exercise4_bf16")
    for i, name in enumerate(memory):
        found[f"4.{10 + i}"] = (baseline if i == 0 else runs[name]).answer("memory.peak_mb")
    found |= against_prediction(rows, profile)
    fastest = min(rows.values(), key=lambda row: row["ratio"] if row["name"] != "exercise4_repeat" else 9e9)
    names = {"exercise4_baseline": "baseline"} | {name: title for name, (title, _) in VARIANTS.items()}
    found["4.20"] = comparison.says(names[fastest["name"]], f"runs, ratio {fastest['ratio']:.3f}")
    return found | ticks(rows, comparison, found)


def interval(row: dict) -> str:
    """The ratio's interval and what the comparison makes of it."""
    between = "{:.3f} to {:.3f}, ".format(*row["ratio_95"]) if row["ratio_95"] else ""
    return f"{between}{row['difference']}"


def against_prediction(rows: dict[str, dict], profile: Source) -> dict[str, Answer]:
    bounds = {one["name"]: one["speedup_bound"] for one in profile["opportunities"]}
    found, above = {}, []
    for nr, (run, name) in PREDICTED.items():
        realised = 1 / rows[run]["ratio"]
        found[f"4.{nr}"] = (
            profile.says(bounds[name], f"opportunities, {name}")
            if name in bounds
            else Answer(None, f"{profile.name}: {name} is no opportunity here")
        )
        found[f"4.{nr + 1}"] = Answer(realised, f"1 / {rows[run]['ratio']:.3f}, the ratio of {run}")
        # Above the bound by less than the ratio is known is not above it.
        least = 1 / rows[run]["ratio_95"][1] if rows[run]["ratio_95"] else realised
        if name in bounds and least > bounds[name]:
            above.append(f"{name} {realised:.2f}x, at most {bounds[name]:.2f}x")
    return found | {"4.26": Answer(not above, "; ".join(above) or "4.14 to 4.19, within the intervals of the ratios")}


def ticks(rows: dict[str, dict], comparison: Source, found: dict[str, Answer]) -> dict[str, Answer]:
    off = {name: row["largest_loss_difference"] for name, row in rows.items()}
    exact = max(off[name] for name in ("exercise4_sdpa", "exercise4_fused", "exercise4_compile"))
    repeat, together = rows["exercise4_repeat"], rows["exercise4_together"]
    checkpointing = rows["exercise4_checkpointing"]
    before, after = found["4.10"].value, found["4.12"].value
    return {
        "4.21": comparison.says(exact <= 1e-5, f"largest_loss_difference, at most {exact:.1e}"),
        "4.22": comparison.says(
            off["exercise4_checkpointing"] == 0, f"largest_loss_difference {off['exercise4_checkpointing']:.1e}"
        ),
        "4.23": comparison.says(off["exercise4_bf16"] < 5e-3, f"largest_loss_difference {off['exercise4_bf16']:.1e}"),
        "4.24": comparison.says(
            repeat["difference"] == "within noise", f"ratio {repeat['ratio']:.3f}, {interval(repeat)}"
        ),
        "4.25": comparison.says(
            together["difference"] == "faster", f"ratio {together['ratio']:.3f}, {interval(together)}"
        ),
        "4.27": comparison.says(
            after < before and checkpointing["difference"] == "slower",
            f"{after:.1f} against {before:.1f} MB; ratio {checkpointing['ratio']:.3f}, {interval(checkpointing)}",
        ),
    }
