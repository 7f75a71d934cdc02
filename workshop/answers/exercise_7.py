"""Mixed precision: data types under autocast, range, sums, what a step costs and saves."""

from harness.units import MB
from tiny_llama_v1 import TinyLlamaConfig
from workshop.results import Answer, Results, Source, holds, share

SETTINGS = {"size": "tiny", "seq_len": 64, "batch_size": 2, "steps": 3}
ON_GPU = {"seq_len": 256, "batch_size": 8}
MORE_TOKENS = {"size": "tiny", "seq_len": 128, "batch_size": 64, "precisions": ["fp32", "bf16"]}
MODEL = "TinyLlamaModel"
KEPT = ("parameter", "gradient", "optimizer state")
BYTES_KEPT = 16  # of a parameter: weight, gradient and two moments in float32


def answers(results: Results) -> dict[str, Answer]:
    study = results.read("exercise7_precision", "precision_study.json", **SETTINGS)
    memory = results.read("exercise7_memory", "precision_study.json", **MORE_TOKENS)
    return {
        "7.1": type_of(study, "bf16", MODEL, "parameter", "lm_head.weight"),
        "7.2": type_of(study, "fp16", "ToyModel", "output", "fc1"),
        "7.3": type_of(study, "fp16", "ToyModel", "output", "ln"),
        "7.4": type_of(study, "fp16", MODEL, "output", "norm"),
        "7.5": type_of(study, "fp16", MODEL, "logits", "model"),
        "7.6": type_of(study, "fp16", MODEL, "loss", "model"),
        "7.7": type_of(study, "fp16", MODEL, "gradient", "lm_head.weight"),
        **number_answers(study),
        "7.16": value(study, "fp32", "step_ms"),
        "7.17": against_fp32(study, "step_ms"),
        **product_answers(results.read("exercise7_products", "products.json")),
        "7.20": kept_in_float32(),
        "7.21": against_fp32(study, "predicted_peak_bytes"),
        "7.22": against_fp32(memory, "predicted_peak_bytes"),
        "7.23": on_gpu(results, study, "gpt2-small"),
        "7.24": on_gpu(results, study, "gpt2-medium"),
        "7.25": kept_types(study),
        "7.26": norms_differ(study),
        **normalisation_answers(study),
        "7.29": holds(against_fp32(study, "step_ms"), lambda ratio: ratio > 1),
        "7.30": holds(against_fp32(study, "predicted_peak_bytes"), lambda ratio: ratio > 1),
        "7.31": holds(against_fp32(memory, "predicted_peak_bytes"), lambda ratio: 0.5 < ratio < 1),
        "7.32": losses_agree(study),
    }


# ---- Data types -------------------------------------------------------------------------------------------------


def type_of(study: Source, autocast: str, model: str, what: str, name: str) -> Answer:
    wanted = {"autocast": autocast, "model": model, "what": what, "name": name}
    found = [row["dtype"] for row in study["dtypes"] if wanted.items() <= row.items()]
    if not found:
        return study.says(None, f"not run under {autocast}: {study['lacking'][autocast]}")
    return study.says(", ".join(found), f"dtypes: {model}, {what} {name}, {autocast}")


def kept_types(study: Source) -> Answer:
    kept = [row for row in study["dtypes"] if row["what"] in KEPT]
    if not kept:
        return study.says(None, "neither autocast ran; lacking says why")
    types, casts = (sorted({row[name] for row in kept}) for name in ("dtype", "autocast"))
    return study.says(types == ["float32"], f"dtypes: {', '.join(types)} under {', '.join(casts)}")


def norms_differ(study: Source) -> Answer:
    toy, ours = (type_of(study, "fp16", *where) for where in (("ToyModel", "output", "ln"), (MODEL, "output", "norm")))
    if toy.value is None:
        return toy
    device = study["environment.device.type"]
    return study.says(toy.value != ours.value, f"dtypes: {toy.value} and {ours.value} on {device}")


# ---- Range and sums ---------------------------------------------------------------------------------------------


def number_answers(study: Source) -> dict[str, Answer]:
    formats, squares = ({row["type"]: row for row in study[name]} for name in ("formats", "squares"))
    sums = {(row["accumulator"], row["addend"]): row for row in study["accumulation"]}
    lost = sums["bfloat16", "bfloat16"]["first_lost_addition"]

    def error(accumulator: str, addend: str) -> Answer:
        row = sums[accumulator, addend]
        return study.says(share(row["relative_error"], 1.0), f"accumulation: {row['result']:.7g} in place of 10")

    return {
        "7.8": study.says(formats["float16"]["exponent_bits"], "formats: float16"),
        "7.9": study.says(formats["bfloat16"]["exponent_bits"], "formats: bfloat16"),
        "7.10": study.says(formats["bfloat16"]["mantissa_bits"], "formats: bfloat16"),
        "7.11": study.says(int(squares["float16"]["sum_infinite_from"]), "squares: float16, sum_infinite_from"),
        "7.12": error("float16", "float16"),
        "7.13": error("bfloat16", "bfloat16"),
        "7.14": error("float32", "bfloat16"),
        "7.15": study.says(lost - 1, f"accumulation: bfloat16, number {lost} is the first that is lost"),
    }


def normalisation_answers(study: Source) -> dict[str, Answer]:
    rows = {row["type"]: row for row in study["squares"]}
    half = rows["float16"]
    saved = half["written_out"] == 0 and abs(half["rms_norm"] - 1) < 0.01
    ends = {name: rows[name]["sum_infinite_from"] for name in ("bfloat16", "float32")}
    return {
        "7.27": study.says(
            saved, f"squares, float16: {half['written_out']:.4g} written out, {half['rms_norm']:.4g} by RMSNorm"
        ),
        "7.28": study.says(
            ends["bfloat16"] >= ends["float32"],
            f"squares: inf from {ends['bfloat16']:.3g} in bfloat16, {ends['float32']:.3g} in float32",
        ),
    }


# ---- Cost -------------------------------------------------------------------------------------------------------


def row_of(study: Source, precision: str) -> dict:
    return next(row for row in study["rows"] if row["precision"] == precision)


def value(study: Source, precision: str, name: str) -> Answer:
    row = row_of(study, precision)
    return study.says(row[name], f"rows, {precision}: {row.get(f'{name}_reason', name)}")


def against_fp32(study: Source, name: str) -> Answer:
    """bf16 in units of fp32."""
    ours, base = (value(study, precision, name) for precision in ("bf16", "fp32"))
    for one in (ours, base):
        if one.value is None:
            return one
    unit, scale = ("MB", MB) if name.endswith("_bytes") else ("ms", 1.0)
    figures = f"{ours.value / scale:,.2f} / {base.value / scale:,.2f} {unit}"
    return study.says(ours.value / base.value, f"rows, bf16 / fp32: {name}, {figures}")


def product_answers(products: Source) -> dict[str, Answer]:
    wide, narrow = (products[f"ms.{name}"] for name in ("float32", "bfloat16"))
    worst = max(wide, key=lambda name: narrow[name] / wide[name])
    ratios = ", ".join(f"{name} {narrow[name] / wide[name]:.2f}x" for name in wide)
    figures = f"{narrow[worst]:.3f} / {wide[worst]:.3f} ms"
    return {
        "7.18": products.says(worst, f"ms, bfloat16 / float32: {ratios}"),
        "7.19": products.says(narrow[worst] / wide[worst], f"ms, {worst}: {figures}"),
    }


def kept_in_float32() -> Answer:
    parameters = TinyLlamaConfig().parameter_count()
    return Answer(BYTES_KEPT * parameters / MB, f"{BYTES_KEPT} bytes x {parameters:,} parameters")


def on_gpu(results: Results, study: Source, size: str) -> Answer:
    if study["environment.device.type"] == "cpu":
        return Answer(None, "the block of step 6 needs a GPU")
    folder = f"exercise7_{size.replace('-', '_')}"
    return against_fp32(results.read(folder, "precision_study.json", size=size, **ON_GPU), "step_ms")


def losses_agree(study: Source) -> Answer:
    losses = {row["precision"]: row["final_loss"] for row in study["rows"] if row["final_loss"] is not None}
    apart = max(abs(loss - losses["fp32"]) for loss in losses.values())
    return study.says(apart <= 0.01, f"rows, final_loss: at most {apart:.1e} from fp32, of {', '.join(losses)}")
