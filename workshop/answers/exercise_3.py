"""Bottlenecks: two sizes, two predicted ones, and one run explained to the bottom; the plan that follows."""

from workshop.answers.exercise_1 import share_of, verdict
from workshop.results import Answer, Results, Source, share

TEMPLATE = {"run": "exercise3_flops", "trace": "exercise3_flops", "flops": "exercise3_flops"}


def answers(results: Results) -> dict[str, Answer]:
    flops = results.read("exercise3_flops", "flops_profile.json", batch_size=8, seq_len=128)
    return {
        **sizes(results),
        **predicted(results),
        **bottom(results, flops),
        **plan(results.read("exercise3_flops", "operator_analysis.json")),
    }


def sizes(results: Results) -> dict[str, Answer]:
    tiny, small = (results.run(f"performance_results_{size}_*", size=size) for size in ("tiny", "small"))
    found = {}
    for i, path in enumerate(("samples_per_sec", "median_step_time_ms", "achieved_tflops")):
        for j, run in enumerate((tiny, small)):
            found[f"3.{1 + 2 * i + j}"] = run.answer(f"performance.{path}")
    both = f"{small.name} / {tiny.name}"
    for nr, path in (
        ("3.7", "config.model.parameters"),
        ("3.8", "performance.model_flops_per_step"),
        ("3.9", "performance.median_step_time_ms"),
    ):
        found[nr] = Answer(small[path] / tiny[path], f"{both}: {path}")
    rates = [run["performance.achieved_tflops"] for run in (tiny, small)]
    return found | {"3.36": Answer(rates[1] > rates[0], f"3.5 and 3.6: {rates[0]:.4f} and {rates[1]:.4f} TFLOP/s")}


def predicted(results: Results) -> dict[str, Answer]:
    medium, large = (
        results.read(f"exercise3_{size}", "prediction.json", hidden_dim=hidden, device_memory_mb=80 * 1024)
        for size, hidden in (("medium", 1024), ("large", 2048))
    )
    found = {}
    for nr, document in ((10, medium), (12, large)):
        found[f"3.{nr}"] = document.answer("peak_memory_mb")
        part = share(document["memory_by_category_mb.activations"], document["peak_memory_mb"])
        found[f"3.{nr + 1}"] = document.says(part, "memory_by_category_mb, activations")
    return found | {
        "3.14": large.answer("max_batch_size"),
        "3.40": fits(medium),
        "3.41": fits(large),
    }


def fits(document: Source) -> Answer:
    sizes_of = f"{document['peak_memory_mb']:,.0f} of {document['device_memory_mb']:,.0f} MB"
    return document.says(document["fits"], f"fits, {sizes_of}")


def bottom(results: Results, flops: Source) -> dict[str, Answer]:
    intensity = results.read("exercise3_flops", "computational_intensity.json")
    roofline = results.read("exercise3_flops", "roofline_data.json")
    trace = results.read("exercise3_flops", "operator_analysis.json")
    points = {row["name"]: row for row in roofline["points"]}
    rows = flops["flops_analysis.by_component"]
    parts = {
        name: 100 * sum(row["share"] for row in rows if row["component"].startswith(name))
        for name in ("attention", "mlp")
    }
    times = {name: share_of(trace, f"{name}.") for name in parts}
    counts = {row["counter"]: row["forward_flops"] for row in flops["flops_analysis.reconciliation.rows"]}
    peak = flops.answer("efficiency_metrics.device_peak_flops", 1e12)
    found = {
        "3.15": flops.answer("flops_analysis.step_flops"),
        "3.16": flops.answer("performance_metrics.flops_per_sec", 1e12),
        "3.17": peak,
        "3.18": flops.answer("efficiency_metrics.mfu_percent"),
        "3.19": intensity.answer("arithmetic_intensity_flops_per_byte"),
        "3.24": trace.says(times["attention"], "components, sum of attention.*"),
        "3.25": trace.says(times["mlp"], "components, sum of mlp.*"),
        "3.26": flops.says(parts["attention"], "flops_analysis.by_component, sum of attention.*"),
        "3.27": flops.says(parts["mlp"], "flops_analysis.by_component, sum of mlp.*"),
        "3.28": verdict(trace),
        "3.37": flops.says(
            flops["flops_analysis.reconciliation.agree"], ", ".join(f"{name} {n:,}" for name, n in counts.items())
        ),
        "3.38": flops.says(parts["mlp"] > parts["attention"], f"{parts['mlp']:.1f}% and {parts['attention']:.1f}%"),
        "3.39": trace.says(times["mlp"] > times["attention"], f"{times['mlp']:.1f}% and {times['attention']:.1f}%"),
    }
    for nr, name in ((20, "matrix product"), (22, "element-wise")):
        for i, key in enumerate(("share_of_time", "share_of_roof")):
            value = points[name][key]
            place = f"points, {name}, {key}"
            found[f"3.{nr + i}"] = (
                roofline.says(100 * value, place)
                if value is not None
                else Answer(None, f"{roofline.name}: {points[name].get(f'{key}_reason', 'not given')}")
            )
    return found


def plan(trace: Source) -> dict[str, Answer]:
    found = {}
    for i in range(3):
        rows = trace["opportunities"]
        if i < len(rows):
            found[f"3.{29 + 2 * i}"] = trace.says(rows[i]["name"], rows[i]["evidence"])
            bound = rows[i]["speedup_bound"]  # None where nothing would be left
            found[f"3.{30 + 2 * i}"] = trace.says(bound, f"opportunities, {rows[i]['basis']}")
        else:
            found |= dict.fromkeys(
                (f"3.{29 + 2 * i}", f"3.{30 + 2 * i}"), Answer(None, f"{trace.name}: {len(rows)} of them")
            )
    products = {row["class"]: row["share"] for row in trace["classes"]}.get("matrix product", 0.0)
    text = f"classes: matrix products are p = {products:.1%}; 1 / (1 - p + p / 2)"
    return found | {"3.35": trace.says(1 / (1 - products / 2), text)}
