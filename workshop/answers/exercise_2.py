"""Memory: predicted, counted, as it grows, as it would shrink; and the bytes that a step moves."""

from harness.units import MB
from workshop.results import Answer, Results, Source, share

TEMPLATE = {"run": "memory_hotspots", "trace": "memory_hotspots"}
SHAPE = {"batch_size": 8, "seq_len": 128}
LONG = {"batch_size": 8, "seq_len": 512}


def answers(results: Results) -> dict[str, Answer]:
    predicted = results.read("exercise2_prediction", "prediction.json", **SHAPE)
    results.run("memory_hotspots", **SHAPE, profile_memory=True)
    memory = results.read("memory_hotspots", "memory_timeline.json")
    return {
        "2.1": predicted.answer("peak_memory_mb"),
        **counted(memory),
        "2.12": predicted.answer("max_batch_size"),
        **growth(results.read("exercise2_study", "memory_study.json")),
        **savings(results),
        **moved(results.read("bandwidth_analysis", "computational_intensity.json")),
    }


def counted(memory: Source) -> dict[str, Answer]:
    peak, parts = memory["peak_bytes"], memory["peak.bytes_by_category"]
    phases = {row["name"]: row["peak_bytes"] for row in memory["phases"]}
    kept = memory["predicted.kept_for_backward"]
    total = memory["timeline.total_bytes"]
    error = memory["predicted.error_percent"]
    return {
        "2.2": memory.answer("peak_bytes", MB),
        "2.3": memory.says(share(parts["activations"], peak), "peak.bytes_by_category, activations"),
        "2.4": memory.answer("average_bytes", MB),
        "2.5": memory.answer("peak.phase"),
        "2.6": memory.says(phases["forward"] / MB, "phases, forward"),
        "2.7": memory.says(phases["optimizer"] / MB, "phases, optimizer"),
        "2.8": memory.answer("allocations"),
        "2.9": memory.says(memory["largest_tensor.bytes"] / MB, f"largest_tensor, {memory['largest_tensor.where']}"),
        "2.10": memory.says(sum(row["bytes"] for row in memory["kept_for_backward"]) / MB, "kept_for_backward, sum"),
        "2.11": memory.says(sum(row["quadratic_bytes"] for row in kept) / MB, "predicted.kept_for_backward, quadratic"),
        "2.36": memory.says(abs(error) <= 1, f"off by {error:+.2f}%"),
        "2.37": memory.says(memory["peak.phase"] == "backward", f"peak.phase {memory['peak.phase']}"),
        "2.40": memory.says(
            abs(total[-1] / total[0] - 1) < 1e-3, f"timeline: {total[0]:,} bytes before, {total[-1]:,} after"
        ),
        "2.41": memory.says(
            abs(parts["optimizer"] / parts["parameters"] - 2) < 0.01,
            f"{parts['optimizer'] / MB:.2f} MB of optimizer state, {parts['parameters'] / MB:.2f} MB of parameters",
        ),
    }


def growth(study: Source) -> dict[str, Answer]:
    peaks = {(row["batch_size"], row["seq_len"]): row["peak_bytes"] for row in study["rows"]}
    factors = {
        (*row["from"].values(), *row["to"].values()): (row["memory_factor"], row["throughput_factor"])
        for row in study["factors"]
    }
    batch = {key[:2]: value[0] for key, value in factors.items() if key[1] == key[3]}
    sequence = {key[:2]: value[0] for key, value in factors.items() if key[0] == key[2]}
    both = sorted(batch.keys() & sequence.keys())
    found = {
        nr: study.says(peaks[shape] / MB, f"rows, batch {shape[0]} x {shape[1]}")
        for nr, shape in (("2.13", (2, 128)), ("2.14", (4, 128)), ("2.15", (8, 64)), ("2.16", (8, 256)))
    }
    return found | {
        "2.17": study.says(factors[4, 128, 8, 128][0], "factors, batch 4 to 8 at 128 tokens"),
        "2.18": study.says(factors[8, 128, 8, 256][0], "factors, 128 to 256 tokens at batch 8"),
        "2.19": study.says(factors[4, 128, 8, 128][1], "factors, batch 4 to 8 at 128 tokens"),
        "2.20": study.answer("fit.constant_bytes", MB),
        "2.21": study.answer("fit.linear_bytes", 1024),
        "2.22": study.answer("fit.largest_error_percent"),
        "2.38": study.says(max(batch.values()) < 2, f"factors: at most {max(batch.values()):.2f}x"),
        "2.39": study.says(
            all(sequence[key] >= batch[key] for key in both),
            f"factors, sequence against batch, from {len(both)} shapes: "
            + ", ".join(f"{sequence[key]:.2f}x {batch[key]:.2f}x" for key in both),
        ),
    }


def savings(results: Results) -> dict[str, Answer]:
    settings = {
        "2.23": ("plain", {"attention": "eager", "activation_checkpointing": False, "precision": "fp32"}),
        "2.24": ("sdpa", {"attention": "sdpa"}),
        "2.25": ("checkpointing", {"activation_checkpointing": True}),
        "2.26": ("bf16", {"precision": "bf16"}),
    }
    found = {
        nr: results.read(f"exercise2_{name}", "prediction.json", **LONG, **expected).answer("peak_memory_mb")
        for nr, (name, expected) in settings.items()
    }
    names = {"2.24": "fused attention", "2.25": "checkpointing", "2.26": "bf16"}
    best = min(names, key=lambda nr: found[nr].value)
    shown = ", ".join(f"{name} {found[nr].value:.1f}" for nr, name in names.items())
    return found | {"2.27": Answer(names[best], f"2.24 to 2.26: {shown} MB")}


def moved(intensity: Source) -> dict[str, Answer]:
    bound = intensity["memory_bound_vs_compute_bound"]
    return {
        "2.28": intensity.answer("step_bytes", MB),
        "2.29": intensity.answer("memory_bandwidth_used_gb_per_sec"),
        "2.30": intensity.answer("memory_bandwidth_peak_gb_per_sec"),
        "2.31": intensity.answer("memory_bandwidth_utilization_percent"),
        "2.32": intensity.answer("arithmetic_intensity_flops_per_byte"),
        "2.33": intensity.answer("ridge_point_flops_per_byte"),
        "2.34": intensity.says(bound.replace("_", " "), "memory_bound_vs_compute_bound"),
        "2.35": intensity.answer("side_of_ridge_point"),
    }
