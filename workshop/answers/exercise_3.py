"""Bottlenecks: two sizes measured, two predicted, one size in depth; the plan."""

from workshop.answers import shared
from workshop.exercise.results import PERCENT, Answer, Results, Source, derived, numbered, percent, ratio

TEMPLATE = {"run": "exercise3_flops", "trace": "exercise3_flops", "flops": "exercise3_flops"}


def answers(results: Results) -> dict[str, Answer]:
    trace = results.read("exercise3_flops", shared.ANALYSIS)
    return sizes(results) | predicted(results) | in_depth(results, trace) | plan(trace)


def sizes(results: Results) -> dict[str, Answer]:
    tiny, small = (results.run(f"performance_results_{size}_*", size=size) for size in ("tiny", "small"))
    tiny_step, small_step = (run.answer("performance.median_step_time_ms") for run in (tiny, small))
    tiny_rate, small_rate = (run.answer("performance.achieved_tflops") for run in (tiny, small))
    parameters, flops = "config.model.parameters", "performance.model_flops_per_step"
    return {
        "3.1": tiny.answer("performance.samples_per_sec"),
        "3.2": small.answer("performance.samples_per_sec"),
        "3.3": tiny_step,
        "3.4": small_step,
        "3.5": tiny_rate,
        "3.6": small_rate,
        "3.7": ratio(small.answer(parameters), tiny.answer(parameters)),
        "3.8": ratio(small.answer(flops), tiny.answer(flops)),
        "3.9": ratio(small_step, tiny_step),
        "3.36": derived(lambda small, tiny: small > tiny, small_rate, tiny_rate),
    }


def predicted(results: Results) -> dict[str, Answer]:
    medium, large = (
        results.read(f"exercise3_{size}", "prediction.json", hidden_dim=hidden, device_memory_mb=80 * 1024)
        for size, hidden in (("medium", 1024), ("large", 2048))
    )
    activations = "memory_by_category_mb.activations"
    return {
        "3.10": medium.answer("peak_memory_mb"),
        "3.11": percent(medium.answer(activations), medium.answer("peak_memory_mb")),
        "3.12": large.answer("peak_memory_mb"),
        "3.13": percent(large.answer(activations), large.answer("peak_memory_mb")),
        "3.14": large.answer("max_batch_size"),
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
    matmuls, elementwise = (roofline.row("points", name=name) for name in (shared.MATMUL, "element-wise"))
    attention_time, mlp_time = (shared.component_share(trace, part) for part in ("attention.", "mlp."))
    by_flops = "flops_analysis.by_component"
    attention_flops, mlp_flops = (shared.component_share(flops, part, by_flops) for part in ("attention", "mlp"))
    counters = flops["flops_analysis.reconciliation.rows"]
    counts = ", ".join(f"{row['counter']} {row['forward_flops']:,}" for row in counters)
    return {
        "3.15": flops.answer("flops_analysis.step_flops"),
        "3.16": flops.answer("performance_metrics.flops_per_sec", 1e12),
        "3.17": flops.answer("efficiency_metrics.device_peak_flops", 1e12),
        "3.18": flops.answer("efficiency_metrics.mfu_percent"),
        "3.19": intensity.answer("arithmetic_intensity_flops_per_byte"),
        "3.20": matmuls.answer("share_of_time", PERCENT),
        "3.21": matmuls.answer("share_of_roof", PERCENT),
        "3.22": elementwise.answer("share_of_time", PERCENT),
        "3.23": elementwise.answer("share_of_roof", PERCENT),
        "3.24": attention_time,
        "3.25": mlp_time,
        "3.26": attention_flops,
        "3.27": mlp_flops,
        "3.28": shared.verdict(trace),
        "3.37": flops.computed(
            flops["flops_analysis.reconciliation.agree"], f"flops_analysis.reconciliation: {counts}"
        ),
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
