"""Memory: predicted, measured, its growth, what would reduce it; bytes moved by a step."""

from harness.base.units import MB
from workshop.exercise.results import Answer, Results, Source, derived, numbered, percent, ratio

TEMPLATE = {"run": "memory_hotspots", "trace": "memory_hotspots"}
SHAPE = {"batch_size": 8, "seq_len": 128}
LONG = {"batch_size": 8, "seq_len": 512}


def answers(results: Results) -> dict[str, Answer]:
    predicted = results.read("exercise2_prediction", "prediction.json", **SHAPE)
    results.run("memory_hotspots", **SHAPE, profile_memory=True)
    return {
        **predicted.told("2.1 2.12 2.42"),
        **results.read("exercise2_one_run", "memory_timeline.json").told("2.47"),
        **measured(results.read("memory_hotspots", "memory_timeline.json")),
        **growth(results.read("exercise2_study", "memory_study.json")),
        **savings(results),
        **moved(results.read("bandwidth_analysis", "computational_intensity.json")),
    }


def measured(memory: Source) -> dict[str, Answer]:
    told = memory.told("2.2 2.4 2.5 2.6 2.7 2.8 2.9")
    kinds = (f"peak.bytes_by_category.{name}" for name in ("activations", "parameters", "optimizer"))
    activations, parameters, optimizer = (memory.answer(kind, MB) for kind in kinds)
    kept = sum(row["bytes"] for row in memory["kept_for_backward"])
    quadratic = sum(row["quadratic_bytes"] for row in memory["predicted.kept_for_backward"])
    before, *_, after = memory["timeline.total_bytes"]
    return {
        **told,
        "2.3": percent(activations, told["2.2"]),
        "2.43": ratio(told["2.2"], told["2.4"]),
        **numbered("2.44 2.45 2.46", largest_tensors(memory)),
        "2.10": memory.computed(kept / MB, "kept_for_backward, sum"),
        "2.11": memory.computed(quadratic / MB, "predicted.kept_for_backward, quadratic"),
        "2.36": derived(lambda error: abs(error) <= 1, memory.answer("predicted.error_percent")),
        "2.37": derived(lambda phase: phase == "backward", told["2.5"]),
        "2.40": memory.computed(
            abs(after / before - 1) < 1e-3, f"timeline.total_bytes: {before:,} before, {after:,} after"
        ),
        "2.41": derived(lambda two: abs(two - 2) < 0.01, ratio(optimizer, parameters)),
    }


def largest_tensors(memory: Source) -> list[Answer]:
    """Where each of the three largest tensors at the peak was created."""
    rows = memory["peak.largest_tensors"][:3]
    return [memory.computed(row["where"], f"peak.largest_tensors, {row['bytes'] / MB:.2f} MB") for row in rows]


def growth(study: Source) -> dict[str, Answer]:
    def factor(name: str, small: tuple[int, int], large: tuple[int, int]) -> Answer:
        start, end = ({"batch_size": shape[0], "seq_len": shape[1]} for shape in (small, large))
        row = study.row("factors", **{"from": start, "to": end})
        return study.computed(row[name], f"factors, {small[0]} x {small[1]} to {large[0]} x {large[1]} tokens: {name}")

    found = {(row["grows"], *row["from"].values()): row["memory_factor"] for row in study["factors"]}
    by_batch, by_sequence = ({k[1:]: v for k, v in found.items() if k[0] == way} for way in ("batch", "sequence"))
    both = [(by_sequence[shape], by_batch[shape]) for shape in sorted(by_batch.keys() & by_sequence.keys())]
    return {
        **study.told("2.13 2.14 2.15 2.16 2.20 2.21 2.22"),
        "2.17": factor("memory_factor", (4, 128), (8, 128)),
        "2.18": factor("memory_factor", (8, 128), (8, 256)),
        "2.19": factor("throughput_factor", (4, 128), (8, 128)),
        "2.38": study.computed(max(by_batch.values()) < 2, f"factors: at most {max(by_batch.values()):.2f}x"),
        "2.39": study.computed(
            all(sequence >= batch for sequence, batch in both),
            f"factors, by sequence and by batch, from {len(both)} shapes: "
            + ", ".join(f"{sequence:.2f}x {batch:.2f}x" for sequence, batch in both),
        ),
    }


def savings(results: Results) -> dict[str, Answer]:
    def peak(name: str, **expected) -> Answer:
        return results.read(f"exercise2_{name}", "prediction.json", **LONG, **expected).answer("peak_memory_mb")

    saving = {
        "fused attention": peak("sdpa", attention="sdpa"),
        "checkpointing": peak("checkpointing", activation_checkpointing=True),
        "bf16": peak("bf16", precision="bf16"),
    }
    shown = ", ".join(f"{name} {answer.value:.1f}" for name, answer in saving.items())
    return {
        "2.23": peak("default", attention="eager", activation_checkpointing=False, precision="fp32"),
        **numbered("2.24 2.25 2.26", saving.values()),
        "2.27": Answer(min(saving, key=lambda name: saving[name].value), f"2.24 to 2.26: {shown} MB"),
    }


def moved(intensity: Source) -> dict[str, Answer]:
    bound = intensity["memory_bound_vs_compute_bound"]
    as_written = intensity.computed(bound.replace("_", " "), "memory_bound_vs_compute_bound")
    return intensity.told("2.28 2.29 2.30 2.31 2.32 2.33 2.35") | {"2.34": as_written}
