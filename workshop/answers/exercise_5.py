"""Training benchmark: phases over sizes, what warm-up does, peaks by length, whether a large model fits."""

from collections.abc import Callable

from harness.units import MB
from studies.training import label
from tiny_llama_v1 import SIZES
from workshop.results import Answer, Results, Source

WARMUPS = [0, 1, 2, 5]
LARGE = {"sizes": ["large"], "seq_lens": [128], "batch_size": 4, "modes": ["train"], "device_memory": 24 * 2**30}


def answers(results: Results) -> dict[str, Answer]:
    training = results.read(
        "exercise5_training",
        "training_benchmark.json",
        sizes=["tiny", "small"],
        seq_lens=[128],
        batch_size=1,
        warmup_steps=WARMUPS,
        dry_run=False,
    )
    lengths = results.read(
        "exercise5_lengths", "training_benchmark.json", sizes=["tiny"], seq_lens=[128, 256, 512], batch_size=2
    )
    large = results.read("exercise5_large", "training_benchmark.json", **LARGE, optimizer_impl=None)
    fused = results.read("exercise5_large_fused", "training_benchmark.json", **LARGE, optimizer_impl="fused")
    return phases(training) | warm_up(training) | peaks(lengths) | fitting(large, fused) | seen_from_outside(results)


def row_of(source: Source, **key) -> dict:
    """The row that has these values in its columns."""
    return next(row for row in source["rows"] if all(row[name] == value for name, value in key.items()))


def measured(source: Source, rows: list[dict], work: Callable[..., tuple[object, str]]) -> Answer:
    return source.from_rows(rows, label, work)


def figure(source: Source, row: dict, name: str) -> Answer:
    where = f"{label(row)}, warm-up {row['warmup_steps']}: {name}"
    return measured(source, [row], lambda row: (row[name], where))


def phases(training: Source) -> dict[str, Answer]:
    settled = {"warmup_steps": WARMUPS[-1]}
    alone = row_of(training, size="small", mode="forward", **settled)
    step, tiny = (row_of(training, size=size, mode="train", **settled) for size in ("small", "tiny"))

    def backward(row: dict) -> tuple[float, str]:
        return row["backward_ms"] / row["forward_ms"], f"{row['backward_ms']:.1f} / {row['forward_ms']:.1f} ms"

    def growth(row: dict, smaller: dict) -> tuple[float, str]:
        return row["step_ms"] / smaller["step_ms"], f"step_ms {row['step_ms']:.1f} / {smaller['step_ms']:.1f} ms"

    parameters = step["parameters"] / tiny["parameters"]
    return {
        "5.1": figure(training, alone, "forward_ms"),
        "5.2": figure(training, step, "forward_ms"),
        "5.3": figure(training, step, "backward_ms"),
        "5.4": figure(training, step, "optimizer_ms"),
        "5.5": figure(training, step, "step_ms"),
        "5.6": measured(training, [step], backward),
        "5.7": training.says(parameters, f"rows, parameters {step['parameters']:,} / {tiny['parameters']:,}"),
        "5.8": measured(training, [step, tiny], growth),
        "5.25": measured(
            training, [step], lambda row: (1.5 <= backward(row)[0] <= 2.5, f"{backward(row)[0]:.2f} times")
        ),
        "5.26": measured(
            training,
            [step, alone],
            lambda row, other: (
                row["forward_ms"] > other["forward_ms"],
                f"forward_ms {row['forward_ms']:.2f} in train, {other['forward_ms']:.2f} in forward",
            ),
        ),
        "5.27": measured(
            training,
            [step, tiny],
            lambda *rows: (
                growth(*rows)[0] < parameters,
                f"step {growth(*rows)[0]:.2f} times, parameters {parameters:.2f} times",
            ),
        ),
    }


def warm_up(training: Source) -> dict[str, Answer]:
    rows = [row_of(training, size="small", mode="train", warmup_steps=steps) for steps in WARMUPS]

    def means(cold: dict, *others: dict) -> tuple[float, str]:
        warm = others[-1]["step_mean_ms"]
        return cold["step_mean_ms"] / warm, f"step_mean_ms {cold['step_mean_ms']:.1f} / {warm:.1f} ms"

    def medians(cold: dict, *others: dict) -> tuple[float, str]:
        warm = others[-1]["step_ms"]
        return cold["step_ms"] / warm, f"step_ms {cold['step_ms']:.1f} / {warm:.1f} ms"

    def largest_cold(*rows: dict) -> tuple[bool, str]:
        spreads = [row["step_std_ms"] for row in rows]
        return spreads[0] == max(spreads), "step_std_ms " + ", ".join(f"{spread:.2f}" for spread in spreads)

    def medians_move_less(*rows: dict) -> tuple[bool, str]:
        mean, median = means(*rows)[0], medians(*rows)[0]
        return abs(median - 1) < abs(mean - 1), f"medians {median:.3f} times, means {mean:.3f} times"

    return {
        "5.9": figure(training, rows[0], "step_mean_ms"),
        **{f"5.{10 + i}": figure(training, row, "step_std_ms") for i, row in enumerate(rows)},
        "5.14": measured(training, rows, means),
        "5.15": measured(training, rows, medians),
        "5.28": measured(training, rows, largest_cold),
        "5.29": measured(training, rows, medians_move_less),
    }


def peaks(lengths: Source) -> dict[str, Answer]:
    """A rehearsal answers for every row, whether it would fit or not."""
    forward, step = (
        {row["seq_len"]: row["predicted_peak_bytes"] / MB for row in lengths["rows"] if row["mode"] == mode}
        for mode in ("forward", "train")
    )

    def peak(of: dict[int, float], mode: str, seq_len: int) -> Answer:
        return lengths.says(of[seq_len], f"rows, tiny 2 x {seq_len} {mode}: predicted_peak_bytes")

    first, second = step[256] - step[128], step[512] - step[256]
    return {
        "5.16": peak(forward, "forward", 128),
        "5.17": peak(forward, "forward", 512),
        "5.18": peak(step, "train", 128),
        "5.19": peak(step, "train", 512),
        "5.30": lengths.says(second > 2 * first, f"rows, train: {first:.1f} MB more, then {second:.1f} MB more"),
    }


def fitting(large: Source, fused: Source) -> dict[str, Answer]:
    row, with_fused = large["rows.0"], fused["rows.0"]
    room = large["device_memory_bytes"]
    batch, seq_len, hidden = row["batch_size"], row["seq_len"], SIZES["large"]["hidden_dim"]
    held = 4 * 4 * row["parameters"]
    peak = row["predicted_peak_bytes"]
    against = f"{room / MB:,.1f} MB there"
    return {
        "5.20": large.says(4 * batch * seq_len * hidden / MB, f"{batch} x {seq_len} x {hidden} x 4 bytes"),
        "5.21": large.says(held / MB, f"4 x 4 bytes x {row['parameters']:,} parameters"),
        "5.22": large.says(peak / MB, f"rows.0.predicted_peak_bytes, {peak / (4 * row['parameters']):.2f} x weights"),
        "5.23": fused.says(with_fused["predicted_peak_bytes"] / MB, "rows.0.predicted_peak_bytes"),
        "5.31": large.says(held <= room, f"{held / MB:,.1f} MB on paper, {against}"),
        "5.32": large.says(peak <= room, f"{peak / MB:,.1f} MB predicted, {against}"),
    }


def seen_from_outside(results: Results) -> dict[str, Answer]:
    folder = "exercise5_system"
    if not (results.folder / folder / "performance_summary.json").is_file():
        return {"5.24": Answer(None, f"{folder}: needs a GPU with nsys or rocprofv3")}
    return {"5.24": results.run(folder, size="gpt2-small").answer("performance.avg_forward_time_ms")}
