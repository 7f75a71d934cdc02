"""The optimizations, one at a time and combined, compared with the baseline and the prediction."""

from workshop.answers.shared import ANALYSIS, compile_time
from workshop.results import Answer, Results, Source, derived, numbered

TEMPLATE = {"run": "exercise4_baseline", "trace": "exercise4_profile"}
VARIANTS = {  # run: its name in the worksheet, and its settings
    "exercise4_repeat": ("repeat", {"attention": "eager", "compile": False, "precision": "fp32"}),
    "exercise4_sdpa": ("fused attention", {"attention": "sdpa", "compile": False}),
    "exercise4_fused": ("fused optimizer", {"optimizer_impl": "fused", "compile": False}),
    "exercise4_checkpointing": ("checkpointing", {"activation_checkpointing": True}),
    "exercise4_bf16": ("bf16", {"precision": "bf16"}),
    "exercise4_compile": ("compiled", {"compile": True, "attention": "eager"}),
    "exercise4_together": ("combined", {"compile": True, "attention": "sdpa"}),
}
COMPILED = ("exercise4_compile", "exercise4_together")  # a machine without a compiler cannot run these
NOT_COMPILED = Answer(None, "no completed run; is there a compiler?")
PEAKS = ("exercise4_baseline", "exercise4_sdpa", "exercise4_checkpointing", "exercise4_bf16")
INTERLEAVED = {  # the flags of benchmarks/optimizations.py, and the run with the same flags
    "--attention sdpa": "exercise4_sdpa",
    "--optimizer-impl fused": "exercise4_fused",
    "--activation-checkpointing": "exercise4_checkpointing",
}


def answers(results: Results) -> dict[str, Answer]:
    baseline = results.run("exercise4_baseline", num_steps=12, attention="eager", compile=False)
    shape = {"num_steps": 12, "batch_size": baseline["training.batch_size"]}
    runs = {"exercise4_baseline": baseline}
    for name, (_, settings) in VARIANTS.items():
        if name not in COMPILED or results.has(name):
            runs[name] = results.run(name, **shape, **settings)
    comparison = results.read("exercise4_comparison", "comparison.json")
    benchmark = results.read("exercise4_interleaved", "optimizations.json", size="tiny", batch_size=shape["batch_size"])
    separate = {name: comparison.row("runs", name=name) for name in runs}
    interleaved = {flags: benchmark.row(flags=flags) for flags in INTERLEAVED}
    return {
        **separate_runs(runs, separate),
        **numbered("4.10 4.11 4.12", (ratio_of(interleaved, flags) for flags in INTERLEAVED)),
        **speedups(results.read("exercise4_profile", ANALYSIS), separate, interleaved),
        **checks(runs, separate, interleaved),
    }


def figure(found: dict[str, Source], name: str, path: str) -> Answer:
    """A figure of a run, which may be one that this machine cannot compile."""
    return found[name].answer(path) if name in found else NOT_COMPILED


def ratio_of(found: dict[str, Source], name: str) -> Answer:
    """Step time relative to the baseline, with its interval."""
    answer = figure(found, name, "ratio")
    if answer.value is None:
        return answer
    low, high = interval(found[name])
    return found[name].computed(answer.value, f"ratio, {low:.3f} to {high:.3f}")


def interval(row: Source) -> tuple[float, float]:
    """The ends of the ratio's interval; both are the ratio if it has none."""
    return tuple(row["ratio_95"] or (row["ratio"], row["ratio"]))


def separate_runs(runs: dict[str, Source], separate: dict[str, Source]) -> dict[str, Answer]:
    titles = {"exercise4_baseline": "baseline"} | {name: title for name, (title, _) in VARIANTS.items()}
    fastest = min((name for name in separate if name != "exercise4_repeat"), key=lambda name: separate[name]["ratio"])
    return {
        "4.1": runs["exercise4_baseline"].answer("performance.median_step_time_ms"),
        **numbered("4.2 4.3 4.4 4.5 4.6 4.7 4.8", (ratio_of(separate, name) for name in VARIANTS)),
        "4.9": compile_time(runs["exercise4_compile"]) if "exercise4_compile" in runs else NOT_COMPILED,
        **numbered("4.13 4.14 4.15 4.16", (runs[name].answer("memory.peak_mb") for name in PEAKS)),
        "4.23": separate[fastest].computed(titles[fastest], f"ratio {separate[fastest]['ratio']:.3f}"),
    }


def speedups(profile: Source, separate: dict[str, Source], interleaved: dict[str, Source]) -> dict[str, Answer]:
    """Bounds and measured speedups, and whether one exceeds its bound by more than its uncertainty."""
    bounds = {row["name"]: row["speedup_bound"] for row in profile["opportunities"]}

    def bound(name: str) -> Answer:
        absent = "" if name in bounds else " is not among them"
        return profile.computed(bounds.get(name), f"opportunities, {name}{absent}")

    def measured(found: dict[str, Source], name: str) -> Answer:
        return derived(lambda ratio: 1 / ratio, ratio_of(found, name))

    exceeded = []
    for name, row in (
        ("fused attention", interleaved["--attention sdpa"]),
        ("fused optimizer", interleaved["--optimizer-impl fused"]),
        ("compile", separate.get("exercise4_compile")),
    ):
        limit, at_least = bounds.get(name), row and 1 / interval(row)[1]
        if limit is not None and row is not None and at_least > limit:
            exceeded.append(f"{name}: at least {at_least:.2f}x, above its bound of {limit:.2f}x")
    return {
        "4.17": bound("fused attention"),
        "4.18": measured(interleaved, "--attention sdpa"),
        "4.19": bound("fused optimizer"),
        "4.20": measured(interleaved, "--optimizer-impl fused"),
        "4.21": bound("compile"),
        "4.22": measured(separate, "exercise4_compile"),
        "4.29": Answer(not exceeded, "; ".join(exceeded) or "4.17 to 4.22, and the intervals of the ratios"),
    }


def checks(runs: dict[str, Source], separate: dict[str, Source], interleaved: dict[str, Source]) -> dict[str, Answer]:
    before, _, after, _ = (runs[name].answer("memory.peak_mb") for name in PEAKS)
    losses = {name: row.answer("largest_loss_difference") for name, row in separate.items()}
    unchanged = [name for name in ("exercise4_sdpa", "exercise4_fused", "exercise4_compile") if name in separate]
    lower_end = interleaved["--activation-checkpointing"].answer("ratio_95.0")
    widths = []  # of the intervals: interleaved, and from separate runs
    for flags, name in INTERLEAVED.items():
        ends = interval(interleaved[flags]), interval(separate[name])
        widths.append([high - low for low, high in ends])
    return {
        "4.24": derived(lambda *differences: max(differences) <= 1e-5, *(losses[name] for name in unchanged)),
        "4.25": derived(lambda difference: difference == 0, losses["exercise4_checkpointing"]),
        "4.26": derived(lambda difference: difference < 5e-3, losses["exercise4_bf16"]),
        "4.27": derived(lambda ratio: abs(ratio - 1) <= 0.05, ratio_of(separate, "exercise4_repeat")),
        "4.28": derived(lambda text: text == "faster", figure(separate, "exercise4_together", "difference")),
        "4.30": derived(lambda before, after, low: after < before and low > 1, before, after, lower_end),
        "4.31": Answer(
            all(interleaved < separate for interleaved, separate in widths),
            "widths, interleaved and separate: " + ", ".join("{:.3f} {:.3f}".format(*pair) for pair in widths),
        ),
    }
