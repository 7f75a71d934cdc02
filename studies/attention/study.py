"""Forward time, backward time and memory of attention alone, by implementation and sequence length."""

from __future__ import annotations

import itertools

from harness.base.files import explain_nulls
from harness.base.tables import Column, Section, column
from harness.base.units import MB, megabytes
from harness.documents.sweeps import AttentionBenchmarkRow
from studies.attention.cost import measure, names_of, predicted_or_refused
from studies.engine.sweep import (
    DeviceProperties,
    Sweep,
    exponent,
    mean_std_column,
    optional,
    plain_columns,
    predicted_finding,
    status_column,
    text_columns,
    unique,
)

KEY = ("implementation", "dtype", "batch_size", "n_heads", "d_head", "seq_len", "causal")
FIGURES = {"forward_ms": "forward_std_ms", "backward_ms": "backward_std_ms", "compile_s": None, "memory_bytes": None}
GROUP = ("implementation", "dtype", "d_head")  # rows that differ only in sequence length


def benchmark(args, device: DeviceProperties) -> None:
    """Run the sweep."""
    device.check_precisions(args.dtypes, "--dtypes")
    args.implementations = names_of(args.implementations, device.device)
    sweep = Sweep("attention_benchmark", args, device, AttentionBenchmarkRow, KEY, FIGURES)
    sweep.open()
    specs = []
    for dtype, name, d_head, seq_len in itertools.product(
        args.dtypes, args.implementations, args.d_heads, args.seq_lens
    ):
        values = (name, dtype, args.batch_size, 1, d_head, seq_len, args.causal)
        specs.append({"rows": [dict(zip(KEY, values, strict=True))]})

    def row_of(spec: dict) -> list[dict]:
        (key,) = spec["rows"]
        found = sweep.predict(predicted_or_refused, key, device.device)
        if isinstance(found, str):
            return [key | {"status": "skipped", "reason": found}]
        work = (measure, key, args.device, args.repetitions, args.warmup_steps)
        outcome, answer = sweep.measure_row(found["predicted_peak_bytes"], *work, precision=key["dtype"])
        return [key | found | (answer or {}) | outcome]

    sweep.run(specs, row_of, label, result, table)
    growth = growth_rows(sweep.rows)
    found = finding(sweep.rows, growth, sweep.available_bytes)
    tables = sections(sweep.rows, growth, sweep.available_bytes)
    sweep.close(found, tables, figure_of(sweep.rows, device.name), growth=growth)


def label(row: dict) -> str:
    return f"{row['implementation']} {row['dtype']} d{row['d_head']} S {row['seq_len']}"


def result(row: dict) -> str:
    return f"{row['forward_ms']:.2f} + {row['backward_ms']:.2f} ms, {megabytes(row['memory_bytes'])}"


def growth_rows(rows: list[dict]) -> list[dict]:
    """For each implementation, dtype and head dimension: the exponents of time and memory in S."""
    found = []
    for group in unique([tuple(row[name] for name in GROUP) for row in rows]):
        some = [row for row in rows if row["status"] == "ok" and tuple(row[name] for name in GROUP) == group]
        if len({row["seq_len"] for row in some}) > 1:
            one = dict(zip(GROUP, group, strict=True)) | {"seq_lens": " ".join(str(row["seq_len"]) for row in some)}
            for name in ("forward_ms", "backward_ms", "memory_bytes", "predicted_memory_bytes"):
                one[name] = exponent([(row["seq_len"], row[name]) for row in some])
            found.append(explain_nulls(one, "known for fewer than two sequence lengths"))
    return found


# ---- Reporting -----------------------------------------------------------------------------------------------------


def finding(rows: list[dict], growth: list[dict], available_bytes: int) -> list[str]:
    """Fastest and slowest at the longest sequence that more than one has reached, their memory and its growth."""
    measured = [row for row in rows if row["status"] == "ok"]
    if not measured:
        return predicted_finding(rows, "predicted_peak_bytes", label, available_bytes)
    rivals: dict[tuple, list[dict]] = {}
    for row in measured:
        rivals.setdefault((row["seq_len"], row["dtype"], row["d_head"]), []).append(row)
    longest = max(rivals, key=lambda key: (len(rivals[key]) > 1, key[0], len(rivals[key])))
    ranked = sorted(rivals[longest], key=time_of)
    fast, slow = ranked[0], ranked[-1]
    first = f"At S = {longest[0]:,} ({longest[1]}, d_head {longest[2]}) {fast['implementation']} is fastest, "
    first += f"{time_of(fast):,.2f} ms forward and backward"
    if slow is not fast:
        first += f", {time_of(slow) / time_of(fast):.2f} times as fast as {slow['implementation']}"
    powers = {tuple(row[name] for name in GROUP): row["memory_bytes"] for row in growth}
    kept = []
    for row in ranked[:: max(1, len(ranked) - 1)]:
        power = powers.get(tuple(row[name] for name in GROUP))
        grows = "" if power is None else f", growing as S^{power:.2f}"
        kept.append(f"{row['implementation']} {megabytes(row['memory_bytes'])}{grows}")
    return [f"{first}.", f"Memory before the backward pass: {'; '.join(kept)}."]


def time_of(row: dict) -> float:
    """Milliseconds of forward and backward pass."""
    return row["forward_ms"] + row["backward_ms"]


def table(rows: list[dict]) -> Section:
    columns = (
        *text_columns("implementation", "dtype"),
        column("batch", "batch_size", ","),
        column("d_head", "d_head"),
        column("sequence", "seq_len", ","),
        column("forward (ms)", "forward_ms", ",.2f"),
        *optional(mean_std_column("forward mean ± std", "forward")),
        column("backward (ms)", "backward_ms", ",.2f"),
        *optional(mean_std_column("backward mean ± std", "backward")),
        column("memory (MB)", "memory_bytes", ",.2f", MB),
        column("predicted (MB)", "predicted_memory_bytes", ",.2f", MB),
        *optional(
            column("predicted peak (MB)", "predicted_peak_bytes", ",.1f", MB),
            column("rounding (bytes)", "rounding_bytes", ","),
            column("workspaces (MB)", "workspace_bytes", ",.2f", MB),
            column("compile (s)", "compile_s", ".1f"),
        ),
        status_column(),
    )
    causal = "causal" if rows[0]["causal"] else "not causal"
    title = f"Attention alone, one head, {causal}: median, mean ± standard deviation, memory before the backward pass"
    return Section(title, columns, rows)


def sections(rows: list[dict], growth: list[dict], available_bytes: int) -> list[Section]:
    found = [table(rows)]
    names = ("implementation", "dtype", "kernel")
    kernels = unique([tuple(row[name] for name in names) for row in rows if row["kernel"]])
    if kernels:
        lines = [dict(zip(names, one, strict=True)) for one in kernels]
        found.append(Section("Which operator ran, according to the profiler", text_columns(*names), lines))
    found += breakdown(rows, available_bytes)
    if growth:
        title = "Growth: p in S^p, fitted to the measured rows"
        found.append(Section(title, plain_columns(growth, ".2f"), growth))
    return found


def breakdown(rows: list[dict], available_bytes: int) -> list[Section]:
    """The smallest row that does not fit, tensor by tensor."""
    sized = [row for row in rows if row["predicted_peak_bytes"]]
    too_large = [row for row in sized if row["predicted_peak_bytes"] > available_bytes or row["status"] == "oom"]
    if not too_large:
        return []
    row = min(too_large, key=lambda row: row["predicted_peak_bytes"])
    columns = (
        column("tensor live at the start of the backward pass", "name", left=True),
        Column("shape", lambda one: " x ".join(map(str, one["shape"])), left=True),
        column("dtype", "dtype", left=True),
        column("bytes", "bytes", ","),
        column("MB", "bytes", ",.1f", MB),
    )
    before, peak = row["predicted_memory_bytes"], row["predicted_peak_bytes"]
    text = [
        f"Total: {before:,} bytes, {megabytes(before)}. The peak of forward and backward pass together is "
        f"{megabytes(peak)}; {megabytes(available_bytes)} are available.",
    ]
    title = f"The smallest row that does not fit: {label(row)}, batch {row['batch_size']}"
    return [Section(title, columns, row["tensors"], text)]


def figure_of(rows: list[dict], device: str):
    """For the first head dimension and data type with a prediction."""
    from studies.figures import attention_figure

    first = next((row for row in rows if row["predicted_memory_bytes"]), None)
    if first is None:
        return None
    some = [row for row in rows if (row["d_head"], row["dtype"]) == (first["d_head"], first["dtype"])]
    about = f"batch {first['batch_size']}, d_head {first['d_head']}, {first['dtype']}, on {device}"
    return attention_figure(sorted(some, key=lambda row: row["seq_len"]), about)
