"""Mixed precision: data types under autocast, range, sums, time and memory of a step."""

from harness.base.units import MB
from tiny_llama_v1 import TinyLlamaConfig
from workshop.exercise.results import Answer, Results, Source, derived, ratio

FILE = "precision_study.json"
SETTINGS = {"size": "tiny", "seq_len": 64, "batch_size": 2, "repetitions": 3}
ON_GPU = {"seq_len": 256, "batch_size": 8}
MORE_TOKENS = {"size": "tiny", "seq_len": 128, "batch_size": 64, "precisions": ["fp32", "bf16"]}
MODEL = "TinyLlamaModel"
FLOAT32_BYTES = 16  # of a parameter: weight, gradient and two moments


def answers(results: Results) -> dict[str, Answer]:
    study = results.read("exercise7_precision", FILE, **SETTINGS)
    memory = results.read("exercise7_memory", FILE, **MORE_TOKENS)
    step_ratio, parameters = bf16_ratio(study, "step_ms"), TinyLlamaConfig().parameter_count()
    peak_ratio, large_peak_ratio = (bf16_ratio(source, "predicted_peak_bytes", MB) for source in (study, memory))
    return {
        **types(study),
        **formats(study),
        **sums(study),
        "7.17": step_ratio,
        **matmuls(results.read("exercise7_matmuls", "matmuls.json")),
        "7.20": Answer(FLOAT32_BYTES * parameters / MB, f"{FLOAT32_BYTES} bytes x {parameters:,} parameters"),
        "7.21": peak_ratio,
        "7.22": large_peak_ratio,
        "7.23": on_gpu(results, study, "gpt2-small"),
        "7.24": on_gpu(results, study, "gpt2-medium"),
        "7.29": derived(lambda ratio: ratio > 1, step_ratio),
        "7.30": derived(lambda ratio: ratio > 1, peak_ratio),
        "7.31": derived(lambda ratio: 0.5 < ratio < 1, large_peak_ratio),
        "7.32": losses_agree(study),
    }


def types(study: Source) -> dict[str, Answer]:
    layer_norm = type_of(study, "fp16", "ToyModel", "output", "ln")
    our_norm = type_of(study, "fp16", MODEL, "output", "norm")
    return {
        "7.1": type_of(study, "bf16", MODEL, "parameter", "lm_head.weight"),
        "7.2": type_of(study, "fp16", "ToyModel", "output", "fc1"),
        "7.3": layer_norm,
        "7.4": our_norm,
        "7.5": type_of(study, "fp16", MODEL, "logits", "model"),
        "7.6": type_of(study, "fp16", MODEL, "loss", "model"),
        "7.7": type_of(study, "fp16", MODEL, "gradient", "lm_head.weight"),
        "7.25": persistent_types(study),
        "7.26": derived(lambda theirs, ours: theirs != ours, layer_norm, our_norm),
    }


def type_of(study: Source, autocast: str, model: str, what: str, name: str) -> Answer:
    wanted = {"autocast": autocast, "model": model, "what": what, "name": name}
    found = [row["dtype"] for row in study["dtypes"] if all(row[key] == value for key, value in wanted.items())]
    if not found:
        return study.computed(None, f"not run under {autocast}: {study['lacking'][autocast]}")
    return study.computed(", ".join(found), f"dtypes: {model}, {what} {name}, {autocast}")


def persistent_types(study: Source) -> Answer:
    rows = [row for row in study["dtypes"] if row["what"] in ("parameter", "gradient", "optimizer state")]
    if not rows:
        return study.computed(None, "neither autocast ran; lacking has the reasons")
    dtypes, casts = (sorted({row[name] for row in rows}) for name in ("dtype", "autocast"))
    return study.computed(dtypes == ["float32"], f"dtypes: {', '.join(dtypes)} under {', '.join(casts)}")


def formats(study: Source) -> dict[str, Answer]:
    squares = {name: study.row("squares", type=name) for name in ("float16", "bfloat16", "float32")}
    ends = [squares[name].answer("sum_infinite_from") for name in ("bfloat16", "float32")]
    norms = [squares["float16"].answer(name) for name in ("written_out", "rms_norm")]
    return {
        **study.told("7.8 7.9 7.10 7.11"),
        "7.27": derived(lambda written_out, ours: written_out == 0 and abs(ours - 1) < 0.01, *norms),
        "7.28": derived(lambda bfloat16, float32: bfloat16 >= float32, *ends),
    }


def sums(study: Source) -> dict[str, Answer]:
    lost = study.row("accumulation", accumulator="bfloat16", addend="bfloat16")["first_lost_addition"]
    kept = study.computed(lost - 1, f"accumulation, bfloat16: addition {lost} is the first without effect")
    return study.told("7.12 7.13 7.14 7.16") | {"7.15": kept}


def bf16_ratio(study: Source, name: str, scale: float = 1.0) -> Answer:
    """bf16 / fp32."""
    return ratio(*(study.row(precision=precision).answer(name, scale) for precision in ("bf16", "fp32")))


def matmuls(source: Source) -> dict[str, Answer]:
    float32, bfloat16 = source["ms.float32"], source["ms.bfloat16"]
    ratios = {name: bfloat16[name] / float32[name] for name in float32}
    slowest = max(ratios, key=lambda name: ratios[name])
    shown = ", ".join(f"{name} {value:.2f}x" for name, value in ratios.items())
    return {
        "7.18": source.computed(slowest, f"ms, bfloat16 / float32: {shown}"),
        "7.19": ratio(source.answer(f"ms.bfloat16.{slowest}"), source.answer(f"ms.float32.{slowest}")),
    }


def on_gpu(results: Results, study: Source, size: str) -> Answer:
    if study["environment.device.type"] == "cpu":
        return Answer(None, "the block of step 6 needs a GPU")
    folder = f"exercise7_{size.replace('-', '_')}"
    return bf16_ratio(results.read(folder, FILE, size=size, **ON_GPU), "step_ms")


def losses_agree(study: Source) -> Answer:
    losses = {row["precision"]: row["final_loss"] for row in study["rows"] if row["final_loss"] is not None}
    difference = max(abs(loss - losses["fp32"]) for loss in losses.values())
    text = f"rows, final_loss of {', '.join(losses)}: at most {difference:.1e} of difference to fp32"
    return study.computed(difference <= 0.01, text)
