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


COMPILED = ("exercise4_compile", "exercise4_together")  # what a machine without a compiler cannot run


def answers(results: Results) -> dict[str, Answer]:
    baseline = results.run("exercise4_baseline", num_steps=12, attention="eager", compile=False)
    shape = {"num_steps": 12, "batch_size": baseline["training.batch_size"]}
    runs = {"exercise4_baseline": baseline}
    for name, (_, settings) in VARIANTS.items():
        if name not in COMPILED or results.completed(name):
            runs[name] = results.run(name, **shape, **settings)
    profile = results.read("exercise4_profile", "operator_analysis.json")
    comparison = results.read("exercise4_comparison", "comparison.json")
    turns = results.read("exercise4_interleaved", "optimisations.json", size="tiny", batch_size=shape["batch_size"])
    rows = {row["name"]: row for row in comparison["runs"] if row["name"] in runs}
    return {
        **separate_starts(runs, rows, comparison),
        **in_turn(turns),
        **{f"4.{13 + i}": runs[name].answer("memory.peak_mb") for i, name in enumerate(COUNTED)},
        **against_prediction(rows, turns, profile),
        **ticks(rows, turns, comparison, [runs[name]["memory.peak_mb"] for name in COUNTED]),
    }


COUNTED = ("exercise4_baseline", "exercise4_sdpa", "exercise4_checkpointing", "exercise4_bf16")


def not_there(name: str) -> Answer:
    return Answer(None, f"{name}: no completed run; could it be compiled here?")


def separate_starts(runs: dict[str, Source], rows: dict[str, dict], comparison: Source) -> dict[str, Answer]:
    found = {"4.1": runs["exercise4_baseline"].answer("performance.median_step_time_ms")}
    for i, name in enumerate(VARIANTS):
        found[f"4.{2 + i}"] = (
            comparison.says(rows[name]["ratio"], f"runs, {name}: {interval(rows[name])}")
            if name in rows
            else not_there(name)
        )
    found["4.9"] = not_there("exercise4_compile")
    if "exercise4_compile" in runs:
        compilation = runs["exercise4_compile"]["performance.compilation"]
        cached = "from a cache of earlier ones" if compilation["from_cache"] else "a first time"
        text = f"performance.compilation.compile_s, {cached}"
        found["4.9"] = runs["exercise4_compile"].says(compilation["compile_s"], text)
    names = {"exercise4_baseline": "baseline"} | {name: title for name, (title, _) in VARIANTS.items()}
    fastest = min((row for name, row in rows.items() if name != "exercise4_repeat"), key=lambda row: row["ratio"])
    return found | {"4.23": comparison.says(names[fastest["name"]], f"runs, ratio {fastest['ratio']:.3f}")}


def interval(row: dict) -> str:
    """The ratio's interval and what the comparison makes of it."""
    between = "{:.3f} to {:.3f}, ".format(*row["ratio_95"]) if row["ratio_95"] else ""
    return f"{between}{row['difference']}"


def in_turn(turns: Source) -> dict[str, Answer]:
    rows = {row["flags"]: row for row in turns["rows"]}
    return {
        f"4.{10 + i}": turns.says(
            rows[flags]["ratio"],
            f"rows, {flags}: {rows[flags]['ratio_95_low']:.3f} to {rows[flags]['ratio_95_high']:.3f}, "
            f"{rows[flags]['rounds']} rounds",
        )
        for i, flags in enumerate(IN_TURN)
    }


def against_prediction(rows: dict[str, dict], turns: Source, profile: Source) -> dict[str, Answer]:
    """Bound and realised speed-up, and whether any is above its bound by more than its ratio is unsure."""
    bounds = {one["name"]: one["speedup_bound"] for one in profile["opportunities"]}
    measured = {row["flags"]: (row["ratio"], row["ratio_95_high"]) for row in turns["rows"]}
    if "exercise4_compile" in rows:
        compiled = rows["exercise4_compile"]
        measured["exercise4_compile"] = compiled["ratio"], (compiled["ratio_95"] or [0, compiled["ratio"]])[1]
    found, above = {}, []
    for nr, name, of in (
        (17, "fused attention", IN_TURN[0]),
        (19, "fused optimizer", IN_TURN[1]),
        (21, "compile", "exercise4_compile"),
    ):
        bound = bounds.get(name)
        found[f"4.{nr}"] = profile.says(bound, f"opportunities, {name}" + " is none here" * (bound is None))
        if of not in measured:
            found[f"4.{nr + 1}"] = not_there(of)
            continue
        ratio, highest = measured[of]
        found[f"4.{nr + 1}"] = Answer(1 / ratio, f"1 / {ratio:.3f}, the ratio of {of}")
        if bound is not None and 1 / highest > bound:
            above.append(f"{name}: at least {1 / highest:.2f}x, and {bound:.2f}x was predicted at most")
    return found | {"4.29": Answer(not above, "; ".join(above) or "4.17 to 4.22, and the intervals of the ratios")}


def ticks(rows: dict[str, dict], turns: Source, comparison: Source, peaks: list[float | None]) -> dict[str, Answer]:
    off = {name: row["largest_loss_difference"] for name, row in rows.items()}
    exact = max(off[name] for name in ("exercise4_sdpa", "exercise4_fused", "exercise4_compile") if name in off)
    repeat = rows["exercise4_repeat"]
    together = rows.get("exercise4_together")
    interleaved = {row["flags"]: row for row in turns["rows"]}
    checkpointing = interleaved["--activation-checkpointing"]
    widths = [
        (
            interleaved[flags]["ratio_95_high"] - interleaved[flags]["ratio_95_low"],
            rows[name]["ratio_95"][1] - rows[name]["ratio_95"][0],
        )
        for flags, name in zip(IN_TURN, ("exercise4_sdpa", "exercise4_fused", "exercise4_checkpointing"), strict=True)
    ]
    before, _, after, _ = peaks
    return {
        "4.24": comparison.says(exact <= 1e-5, f"largest_loss_difference, at most {exact:.1e}"),
        "4.25": comparison.says(
            off["exercise4_checkpointing"] == 0, f"largest_loss_difference {off['exercise4_checkpointing']:.1e}"
        ),
        "4.26": comparison.says(off["exercise4_bf16"] < 5e-3, f"largest_loss_difference {off['exercise4_bf16']:.1e}"),
        "4.27": comparison.says(abs(repeat["ratio"] - 1) <= 0.05, f"ratio {repeat['ratio']:.3f}"),
        "4.28": (
            comparison.says(together["difference"] == "faster", f"ratio {together['ratio']:.3f}, {interval(together)}")
            if together
            else not_there("exercise4_together")
        ),
        "4.30": Answer(
            after < before and checkpointing["ratio_95_low"] > 1,
            f"{after:.1f} against {before:.1f} MB; 4.12 from {checkpointing['ratio_95_low']:.3f} on",
        ),
        "4.31": Answer(
            all(turn < start for turn, start in widths),
            "widths in turn and between starts: " + ", ".join(f"{turn:.3f} {start:.3f}" for turn, start in widths),
        ),
    }
