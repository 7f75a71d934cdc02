"""Attention alone: time, memory and their growth by implementation, and the row that does not fit."""

from collections.abc import Callable

from harness.units import MB
from studies.attention import label
from studies.sweep import exponent
from workshop.results import Answer, Results, Source

FILE = "attention_benchmark.json"
SETTINGS = {"dtypes": ["fp32"], "d_head": [64], "batch_size": 8, "causal": False}
FUSED = ("sdpa-flash", "sdpa-efficient", "sdpa-cudnn")
SEQ_LEN = 1024
LONG = (8192, 16384)


def answers(results: Results) -> dict[str, Answer]:
    attention = results.read("exercise6_attention", FILE, **SETTINGS, seq_len=[256, 512, SEQ_LEN], dry_run=False)
    room = results.read("exercise6_room", FILE, **SETTINGS, seq_len=list(LONG), device_memory=16 * 2**30)
    return {
        **costs(attention),
        **growth(attention),
        **kernels(attention, results),
        **row_without_room(room),
        "6.29": grows_faster(attention, room),
    }


def row_of(source: Source, implementation: str, seq_len: int) -> dict:
    wanted = (implementation, seq_len)
    return next(row for row in source["rows"] if (row["implementation"], row["seq_len"]) == wanted)


def fused_row(source: Source, seq_len: int) -> dict:
    """That of the first fused kernel that takes these inputs on this device; of one that says why not, if none does."""
    rows = [row for row in source["rows"] if row["implementation"] in FUSED and row["seq_len"] == seq_len]
    return next((row for row in rows if row["predicted_memory_bytes"] is not None), rows[0])


def measured(source: Source, rows: list[dict], work: Callable[..., tuple[object, str]]) -> Answer:
    return source.from_rows(rows, label, work)


def figure(source: Source, row: dict, name: str, scale: float = 1.0) -> Answer:
    return measured(source, [row], lambda row: (row[name] / scale, f"{label(row)}: {name}"))


def matrix_bytes(row: dict) -> int:
    """One S x S matrix for each head and sample, in fp32."""
    return 4 * row["batch_size"] * row["n_heads"] * row["seq_len"] ** 2


def costs(attention: Source) -> dict[str, Answer]:
    manual, eager = (row_of(attention, name, SEQ_LEN) for name in ("manual", "eager"))
    fused, math = fused_row(attention, SEQ_LEN), row_of(attention, "sdpa-math", SEQ_LEN)
    three = (manual, eager, fused)

    def speedup(row: dict, other: dict) -> tuple[float, str]:
        mine, theirs = row["forward_ms"], other["forward_ms"]
        return mine / theirs, f"forward_ms {mine:.2f} / {theirs:.2f}"

    def fused_first(*rows: dict) -> tuple[bool, str]:
        times = {row["implementation"]: row["forward_ms"] for row in rows}
        text = "forward_ms " + ", ".join(f"{name} {time:.2f}" for name, time in times.items())
        return min(times, key=times.get) == rows[-1]["implementation"], text

    def fused_has_more_backward(row: dict, other: dict) -> tuple[bool, str]:
        mine, theirs = (one["backward_ms"] / one["forward_ms"] for one in (row, other))
        return mine > theirs, f"backward / forward: {label(row)} {mine:.2f}, {label(other)} {theirs:.2f}"

    def math_keeps_as_much(row: dict, other: dict) -> tuple[bool, str]:
        mine, theirs = (one["memory_bytes"] / MB for one in (row, other))
        return mine >= theirs, f"memory_bytes: sdpa-math {mine:,.2f} MB, eager {theirs:,.2f} MB"

    return {
        **{f"6.{1 + 2 * i}": figure(attention, row, "forward_ms") for i, row in enumerate(three)},
        **{f"6.{2 + 2 * i}": figure(attention, row, "backward_ms") for i, row in enumerate(three)},
        "6.7": measured(attention, [eager, fused], speedup),
        **{f"6.{8 + i}": figure(attention, row, "memory_bytes", MB) for i, row in enumerate(three)},
        "6.11": attention.says(
            matrix_bytes(eager) / MB, f"4 bytes x {eager['batch_size']} samples x {SEQ_LEN} x {SEQ_LEN}"
        ),
        "6.12": matrices_kept(attention, manual),
        "6.13": matrices_kept(attention, eager),
        "6.25": measured(attention, list(three), fused_first),
        "6.26": measured(attention, [fused, eager], fused_has_more_backward),
        "6.27": as_predicted(attention),
        "6.28": measured(attention, [math, eager], math_keeps_as_much),
    }


def matrices_kept(attention: Source, row: dict) -> Answer:
    names = [tensor["name"] for tensor in row["tensors"] if tensor["shape"][-2:] == [row["seq_len"]] * 2]
    return attention.says(len(names), f"rows, {label(row)}, tensors: {', '.join(names)}")


def as_predicted(attention: Source) -> Answer:
    rows = [row for row in attention["rows"] if row["status"] == "ok"]
    if not rows:
        return attention.says(None, "rows: none was measured")
    apart = max(abs(row["memory_bytes"] - row["rounding_bytes"] - row["predicted_memory_bytes"]) for row in rows)
    return attention.says(apart == 0, f"rows, {len(rows)} measured: at most {apart:,} bytes apart")


def growth(attention: Source) -> dict[str, Answer]:
    """The exponents of the last table; none of an implementation that was measured at fewer than two lengths."""
    fitted = {row["implementation"]: row for row in attention["growth"]}

    def power(implementation: str, name: str) -> Answer:
        if implementation not in fitted:
            return attention.says(None, f"growth: {implementation} was measured at fewer than two lengths")
        row = fitted[implementation]
        return attention.says(row[name], f"growth, {implementation}, {row['seq_lens']}: {name}")

    return {
        "6.14": power("eager", "forward_ms"),
        "6.15": power("eager", "memory_bytes"),
        "6.16": power(fused_row(attention, SEQ_LEN)["implementation"], "memory_bytes"),
    }


def kernels(attention: Source, results: Results) -> dict[str, Answer]:
    fused = fused_row(attention, SEQ_LEN)
    return {
        "6.17": measured(attention, [fused], lambda row: (row["kernel"], f"{label(row)}: kernel")),
        "6.18": backends(results),
    }


def backends(results: Results) -> Answer:
    """The fused backends with a row in bf16, and what the others say."""
    if not (results.folder / "exercise6_gpu" / FILE).is_file():
        return Answer(None, "exercise6_gpu: needs a GPU")
    source = results.read("exercise6_gpu", FILE, dtypes=["fp32", "bf16"], d_head=[64])
    rows = [row for row in source["rows"] if row["dtype"] == "bf16" and row["implementation"] in FUSED]
    ran = sorted({row["implementation"] for row in rows if row["status"] == "ok"})
    refused = {row["implementation"]: row["reason"] for row in rows if row["implementation"] not in ran}
    said = [f"{name}: {reason}" for name, reason in refused.items()]
    return source.says(len(ran), f"rows in bf16, {'; '.join([', '.join(ran) or 'none', *said])}")


def row_without_room(room: Source) -> dict[str, Answer]:
    """A rehearsal answers for every row, whether it would fit or not."""
    there = room["device_memory_bytes"]
    too_large = [row for row in room["rows"] if row["predicted_peak_bytes"] and row["predicted_peak_bytes"] > there]
    smallest = min(too_large, key=lambda row: row["predicted_peak_bytes"])
    name, peak, matrix = label(smallest), smallest["predicted_peak_bytes"], matrix_bytes(smallest)
    two = f"2 x {matrix / MB:,.0f} MB, {there / MB:,.0f} MB there"
    return {
        "6.19": room.says(smallest["implementation"], f"rows, {name}: the smallest peak above {there / MB:,.0f} MB"),
        "6.20": room.says(smallest["seq_len"], f"rows, {name}: seq_len"),
        "6.21": room.says(smallest["predicted_memory_bytes"] / MB, f"rows, {name}: predicted_memory_bytes"),
        "6.22": room.says(peak / MB, f"rows, {name}: predicted_peak_bytes, {peak / matrix:.2f} S x S matrices"),
        "6.23": fused_peak(room, smallest["seq_len"], lambda peak: peak / MB),
        "6.24": room.says(eager_power(room), f"rows, eager at {LONG[0]} and {LONG[1]}: predicted_memory_bytes"),
        "6.30": room.says(2 * matrix >= there, two),
        "6.31": compiled_keeps_as_much(room),
        "6.32": fused_peak(room, LONG[1], lambda peak: peak <= there),
    }


def eager_power(room: Source) -> float:
    return exponent([(seq_len, row_of(room, "eager", seq_len)["predicted_memory_bytes"]) for seq_len in LONG])


def fused_peak(room: Source, seq_len: int, work: Callable[[int], object]) -> Answer:
    """What work(peak) makes of the fused kernel's peak; the reason where this device has no such kernel."""
    row = fused_row(room, seq_len)
    peak = row["predicted_peak_bytes"]
    if peak is None:
        return room.says(None, f"rows, {label(row)}: {row['reason']}")
    return room.says(work(peak), f"rows, {label(row)}: predicted_peak_bytes, {peak / MB:,.1f} MB")


def compiled_keeps_as_much(room: Source) -> Answer:
    eager, compiled = (row_of(room, name, LONG[1])["predicted_memory_bytes"] for name in ("eager", "compiled"))
    if compiled is None:
        return room.says(None, "rows, compiled: no prediction here")
    text = f"rows, predicted_memory_bytes: compiled {compiled / MB:,.2f} MB, eager {eager / MB:,.2f} MB"
    return room.says(compiled >= 0.99 * eager, text)


def grows_faster(attention: Source, room: Source) -> Answer:
    """Eager memory, at long sequences against short ones."""
    long = eager_power(room)
    short = next((row["memory_bytes"] for row in attention["growth"] if row["implementation"] == "eager"), None)
    if short is None:
        return attention.says(None, "growth: eager was measured at fewer than two lengths")
    return room.says(long > short, f"exponent {long:.3f}, in exercise6_attention {short:.3f}")
