"""Training benchmark: phases by size, the effect of warm-up, peaks by sequence length, whether a large model fits."""

from harness.base.units import MB
from tiny_llama_v1 import SIZES
from workshop.exercise.results import Answer, Results, Source, derived, ratio

FILE = "training_benchmark.json"
WARMUPS = [0, 1, 2, 5]
TRAINING = {"sizes": ["tiny", "small"], "seq_lens": [128], "batch_size": 1, "warmups": WARMUPS, "dry_run": False}
LENGTHS = {"sizes": ["tiny"], "seq_lens": [128, 256, 512], "batch_size": 2}
LARGE = {"sizes": ["large"], "seq_lens": [128], "batch_size": 4, "modes": ["train"], "device_memory": 24 * 2**30}


def answers(results: Results) -> dict[str, Answer]:
    training = results.read("exercise5_training", FILE, **TRAINING)
    lengths = results.read("exercise5_lengths", FILE, **LENGTHS)
    large = results.read("exercise5_large", FILE, **LARGE, optimizer_impl=None)
    fused = results.read("exercise5_large_fused", FILE, **LARGE, optimizer_impl="fused")
    system = Answer(None, "exercise5_system: needs a GPU with nsys or rocprofv3")
    if results.has("exercise5_system"):
        system = results.run("exercise5_system", size="gpt2-small").answer("performance.avg_forward_time_ms")
    return phases(training) | warm_up(training) | peaks(lengths) | fitting(large, fused) | {"5.24": system}


def phases(training: Source) -> dict[str, Answer]:
    alone = training.row(size="small", mode="forward", warmup_steps=5).answer("forward_ms")
    small, tiny = (training.row(size=size, mode="train", warmup_steps=5) for size in ("small", "tiny"))
    forward, backward, step = (small.answer(name) for name in ("forward_ms", "backward_ms", "step_ms"))
    backward_ratio = ratio(backward, forward)
    parameters = ratio(small.answer("parameters"), tiny.answer("parameters"))
    step_growth = ratio(step, tiny.answer("step_ms"))
    return {
        **training.told("5.1 5.2 5.3 5.4 5.5"),
        "5.6": backward_ratio,
        "5.7": parameters,
        "5.8": step_growth,
        "5.25": derived(lambda value: 1.5 <= value <= 2.5, backward_ratio),
        "5.26": derived(lambda train, forward: train > forward, forward, alone),
        "5.27": derived(lambda step, parameters: step < parameters, step_growth, parameters),
    }


def warm_up(training: Source) -> dict[str, Answer]:
    rows = {steps: training.row(size="small", mode="train", warmup_steps=steps) for steps in (0, 5)}
    spreads = training.told("5.10 5.11 5.12 5.13")
    means = ratio(rows[0].answer("step_mean_ms"), rows[5].answer("step_mean_ms"))
    medians = ratio(rows[0].answer("step_ms"), rows[5].answer("step_ms"))
    return {
        **training.told("5.9"),
        **spreads,
        "5.14": means,
        "5.15": medians,
        "5.28": derived(lambda cold, *warm: cold >= max(warm), *spreads.values()),
        "5.29": derived(lambda median, mean: abs(median - 1) < abs(mean - 1), medians, means),
    }


def peaks(lengths: Source) -> dict[str, Answer]:
    """Predicted peaks: every row has one, whether it would fit or not."""

    def peak(mode: str, seq_len: int) -> Answer:
        return lengths.row(mode=mode, seq_len=seq_len).answer("predicted_peak_bytes", MB)

    steps = [peak("train", seq_len) for seq_len in (128, 256, 512)]
    more = derived(lambda short, middle, long: long - middle > 2 * (middle - short), *steps)
    return lengths.told("5.16 5.17 5.18 5.19") | {"5.30": more}


def fitting(large: Source, fused: Source) -> dict[str, Answer]:
    row = large.row(size="large")
    shape = row["batch_size"], row["seq_len"], SIZES["large"]["hidden_dim"]
    stream = 4 * shape[0] * shape[1] * shape[2]
    on_paper = row.computed(4 * 4 * row["parameters"] / MB, f"4 x 4 bytes x {row['parameters']:,} parameters, in MB")
    peak, available = row.answer("predicted_peak_bytes", MB), large.answer("device_memory_bytes", MB)
    return {
        "5.20": Answer(stream / MB, "{} x {} x {} x 4 bytes".format(*shape)),
        "5.21": on_paper,
        "5.22": peak,
        "5.23": fused.row(size="large").answer("predicted_peak_bytes", MB),
        "5.31": derived(lambda needed, available: needed <= available, on_paper, available),
        "5.32": derived(lambda needed, available: needed <= available, peak, available),
    }
