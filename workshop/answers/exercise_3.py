"""Bottlenecks: two sizes measured, two predicted, one size in depth; the plan."""

from workshop.answers import shared
from workshop.exercise.results import Answer, Results, Source, derived, numbered, percent, ratio

TEMPLATE = {"run": "exercise3_flops", "trace": "exercise3_flops", "flops": "exercise3_flops"}


def answers(results: Results) -> dict[str, Answer]:
    trace = results.read("exercise3_flops", shared.ANALYSIS)
    return sizes(results) | predicted(results) | in_depth(results, trace) | plan(trace)


def sizes(results: Results) -> dict[str, Answer]:
    tiny, small = (results.run(f"performance_results_{size}_*", size=size) for size in ("tiny", "small"))
    told = tiny.told("3.1 3.3 3.5") | small.told("3.2 3.4 3.6")
    parameters, flops = "config.model.parameters", "performance.model_flops_per_step"
    return {
        **told,
        "3.7": ratio(small.answer(parameters), tiny.answer(parameters)),
        "3.8": ratio(small.answer(flops), tiny.answer(flops)),
        "3.9": ratio(told["3.4"], told["3.3"]),
        "3.36": derived(lambda small, tiny: small > tiny, told["3.6"], told["3.5"]),
    }


def predicted(results: Results) -> dict[str, Answer]:
    medium, large = (
        results.read(f"exercise3_{size}", "prediction.json", hidden_dim=hidden, device_memory_mb=80 * 1024)
        for size, hidden in (("medium", 1024), ("large", 2048))
    )
    activations = "memory_by_category_mb.activations"
    return {
        **medium.told("3.10"),
        "3.11": percent(medium.answer(activations), medium.answer("peak_memory_mb")),
        **large.told("3.12 3.14"),
        "3.13": percent(large.answer(activations), large.answer("peak_memory_mb")),
        "3.40": fits(medium),
        "3.41": fits(large),
    }


def fits(prediction: Source) -> Answer:
    needed, available = (prediction.answer(name) for name in ("peak_memory_mb", "device_memory_mb"))
    return derived(lambda needed, available: needed <= available, needed, available)


def in_depth(results: Results, trace: Source) -> dict[str, Answer]:
    flops = results.read("exercise3_flops", "flops_profile.json", batch_size=8, seq_len=128)
    intensity = results.read("exercise3_flops", "computational_intensity.json")
    roofline = results.read("exercise3_flops", "roofline_data.json")
    attention_time, mlp_time = (shared.component_share(trace, part) for part in ("attention.", "mlp."))
    by_flops = "flops_analysis.by_component"
    attention_flops, mlp_flops = (shared.component_share(flops, part, by_flops) for part in ("attention", "mlp"))
    agree, counters = (flops[f"flops_analysis.reconciliation.{name}"] for name in ("agree", "rows"))
    counts = ", ".join(f"{row['counter']} {row['forward_flops']:,}" for row in counters)
    return {
        **flops.told("3.15 3.16 3.17 3.18"),
        **intensity.told("3.19"),
        **roofline.told("3.20 3.21 3.22 3.23"),
        **numbered("3.24 3.25 3.26 3.27", (attention_time, mlp_time, attention_flops, mlp_flops)),
        "3.28": shared.verdict(trace),
        "3.37": flops.computed(agree, f"flops_analysis.reconciliation: {counts}"),
        "3.38": derived(lambda mlp, attention: mlp > attention, mlp_flops, attention_flops),
        "3.39": derived(lambda mlp, attention: mlp > attention, mlp_time, attention_time),
    }


def plan(trace: Source) -> dict[str, Answer]:
    return {
        **numbered("3.29 3.31 3.33", shared.opportunities(trace)),
        **numbered("3.30 3.32 3.34", shared.opportunities(trace, "speedup_bound")),
        # 1 / (1 - p + p / 2)
        "3.35": derived(lambda percent: 1 / (1 - percent / 200), shared.class_share(trace, shared.MATMUL)),
    }
