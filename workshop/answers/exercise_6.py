"""Attention: time, memory and their growth by implementation, and the configuration that does not fit."""

from harness.base.units import MB
from harness.instruments.phases import power_law_exponent
from workshop.exercise.results import Answer, Results, Source, derived, numbered, ratio

FILE = "attention_benchmark.json"
SETTINGS = {"dtypes": ["fp32"], "d_heads": [64], "batch_size": 8, "causal": False}
FUSED = ("sdpa-flash", "sdpa-efficient", "sdpa-cudnn")
SEQ_LEN = 1024
LONG = (8192, 16384)


def answers(results: Results) -> dict[str, Answer]:
    attention = results.read("exercise6_attention", FILE, **SETTINGS, seq_lens=[256, 512, SEQ_LEN], dry_run=False)
    predicted = results.read("exercise6_16gb", FILE, **SETTINGS, seq_lens=list(LONG), device_memory=16 * 2**30)
    short_exponent, long_exponent = growth(attention, "eager", "memory_bytes"), predicted_exponent(predicted)
    return {
        **costs(attention),
        "6.14": growth(attention, "eager", "forward_ms"),
        "6.15": short_exponent,
        "6.16": growth(attention, fused_row(attention, SEQ_LEN)["implementation"], "memory_bytes"),
        "6.17": fused_row(attention, SEQ_LEN).answer("kernel"),
        "6.18": backends(results),
        **smallest_that_does_not_fit(predicted),
        "6.24": long_exponent,
        "6.29": derived(lambda long, short: long > short, long_exponent, short_exponent),
    }


def fused_row(source: Source, seq_len: int) -> Source:
    """The row of the first fused kernel that accepts these inputs; if none does, the first, which has the reason."""
    tried = {row["implementation"] for row in source["rows"]}
    rows = [source.row(implementation=name, seq_len=seq_len) for name in FUSED if name in tried]
    return next((row for row in rows if row["predicted_memory_bytes"] is not None), rows[0])


def matrix_bytes(row: Source) -> int:
    """An S x S matrix for each head and sample, in fp32."""
    return 4 * row["batch_size"] * row["n_heads"] * row["seq_len"] ** 2


def costs(attention: Source) -> dict[str, Answer]:
    names = ("manual", "eager", "sdpa-math")
    manual, eager, math = (attention.row(implementation=name, seq_len=SEQ_LEN) for name in names)
    fused = fused_row(attention, SEQ_LEN)
    forward, backward = ([row.answer(name) for row in (manual, eager, fused)] for name in ("forward_ms", "backward_ms"))
    memory = [row.answer("memory_bytes", MB) for row in (manual, eager, fused)]
    slowdowns = [ratio(backward[i], forward[i]) for i in (2, 1)]  # of the backward pass
    one_matrix = f"4 bytes x {eager['batch_size']} samples x {SEQ_LEN} x {SEQ_LEN}"
    return {
        **numbered("6.1 6.3 6.5", forward),
        **numbered("6.2 6.4 6.6", backward),
        "6.7": ratio(forward[1], forward[2]),
        **numbered("6.8 6.9 6.10", memory),
        "6.11": Answer(matrix_bytes(eager) / MB, one_matrix),
        "6.12": matrices_kept(manual),
        "6.13": matrices_kept(eager),
        "6.25": derived(lambda manual, eager, fused: fused < min(manual, eager), *forward),
        "6.26": derived(lambda fused, eager: fused > eager, *slowdowns),
        "6.27": as_predicted(attention),
        "6.28": derived(lambda math, eager: math >= eager, math.answer("memory_bytes", MB), memory[1]),
    }


def matrices_kept(row: Source) -> Answer:
    names = [tensor["name"] for tensor in row["tensors"] if tensor["shape"][-2:] == [row["seq_len"]] * 2]
    return row.computed(len(names), f"tensors, {', '.join(names)}")


def as_predicted(attention: Source) -> Answer:
    rows = [row for row in attention["rows"] if row["status"] == "ok"]
    if not rows:
        return attention.computed(None, "rows: none was measured")
    most = max(abs(row["memory_bytes"] - row["rounding_bytes"] - row["predicted_memory_bytes"]) for row in rows)
    return attention.computed(most == 0, f"rows, {len(rows)} measured: at most {most:,} bytes of difference")


def growth(attention: Source, implementation: str, name: str) -> Answer:
    """An exponent of the growth table, which has no row for what was measured at fewer than two lengths."""
    if implementation not in {row["implementation"] for row in attention["growth"]}:
        return attention.computed(None, f"growth: {implementation} was measured at fewer than two lengths")
    return attention.row("growth", implementation=implementation).answer(name)


def predicted_exponent(predicted: Source) -> Answer:
    rows = [predicted.row(implementation="eager", seq_len=seq_len) for seq_len in LONG]
    memory = [row.answer("predicted_memory_bytes", MB) for row in rows]
    return derived(lambda *sizes: power_law_exponent(zip(LONG, sizes, strict=True)), *memory)


def backends(results: Results) -> Answer:
    """How many fused backends have a row in bf16, and why the others have none."""
    if not results.has("exercise6_gpu", FILE):
        return Answer(None, "exercise6_gpu: needs a GPU")
    source = results.read("exercise6_gpu", FILE, dtypes=["fp32", "bf16"], d_heads=[64])
    rows = [row for row in source["rows"] if row["dtype"] == "bf16" and row["implementation"] in FUSED]
    ran = sorted({row["implementation"] for row in rows if row["status"] == "ok"})
    refused = {row["implementation"]: row["reason"] for row in rows if row["implementation"] not in ran}
    reasons = [f"{name}: {reason}" for name, reason in refused.items()]
    return source.computed(len(ran), f"rows in bf16, {'; '.join([', '.join(ran) or 'none', *reasons])}")


def smallest_that_does_not_fit(predicted: Source) -> dict[str, Answer]:
    available = predicted["device_memory_bytes"]
    peaks = [(row["predicted_peak_bytes"] or 0, row["implementation"], row["seq_len"]) for row in predicted["rows"]]
    _, implementation, seq_len = min(peak for peak in peaks if peak[0] > available)
    row = predicted.row(implementation=implementation, seq_len=seq_len)
    two = f"2 x {matrix_bytes(row) / MB:,.0f} MB of {available / MB:,.0f} MB"
    eager, compiled = (
        predicted.row(implementation=name, seq_len=LONG[1]).answer("predicted_memory_bytes", MB)
        for name in ("eager", "compiled")
    )
    longest = fused_row(predicted, LONG[1]).answer("predicted_peak_bytes", MB)
    return {
        "6.19": row.answer("implementation"),
        "6.20": row.answer("seq_len"),
        "6.21": row.answer("predicted_memory_bytes", MB),
        "6.22": row.answer("predicted_peak_bytes", MB),
        "6.23": fused_row(predicted, seq_len).answer("predicted_peak_bytes", MB),
        "6.30": row.computed(2 * matrix_bytes(row) >= available, two),
        "6.31": derived(lambda compiled, eager: compiled >= 0.99 * eager, compiled, eager),
        "6.32": derived(lambda peak: peak * MB <= available, longest),
    }
