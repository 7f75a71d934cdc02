"""What do the rows of the attention benchmark say?  Tables, growth with the sequence length, and
what does not fit."""

from analysis.comparison.noise import as_fast
from harness.base.sections import Section
from harness.base.tables import Column, column, grouped, text_columns
from harness.base.units import MB, megabytes
from harness.instruments.phases import power_law_exponent
from studies.engine.columns import compared, optional, plain_columns, status_column

GROUP = ("implementation", "dtype", "d_head")  # rows that differ only in sequence length


def label(row: dict) -> str:
    return f"{row['implementation']} {row['dtype']} d{row['d_head']} S {row['seq_len']}"


def result(row: dict) -> str:
    return (
        f"{row['forward_ms']:.2f} + {row['backward_ms']:.2f} ms, {megabytes(row['memory_bytes'])}"
    )


def group_of(row: dict) -> tuple:
    return tuple(row[name] for name in GROUP)


def time_of(row: dict) -> float:
    """Milliseconds of forward and backward pass."""
    return row["forward_ms"] + row["backward_ms"]


def growth_rows(rows: list[dict]) -> list[dict]:
    """For each implementation, dtype and head dimension: the exponents of time and memory in S."""
    growth = []
    for group, measured in grouped(
        (row for row in rows if row["status"] == "ok"), group_of
    ).items():
        if len({row["seq_len"] for row in measured}) > 1:
            line = dict(zip(GROUP, group, strict=True))
            line["seq_lens"] = " ".join(str(row["seq_len"]) for row in measured)
            for name in ("forward_ms", "backward_ms", "memory_bytes", "predicted_memory_bytes"):
                line[name] = power_law_exponent((row["seq_len"], row[name]) for row in measured)
            growth.append(line)
    return growth


def finding(measured: list[dict], growth: list[dict]) -> list[str]:
    """Fastest and slowest at the longest sequence that more than one has reached, their memory and
    its growth."""
    rivals = grouped(measured, lambda row: (row["seq_len"], row["dtype"], row["d_head"]))
    longest = max(rivals, key=lambda key: (len(rivals[key]) > 1, key[0], len(rivals[key])))
    ranked = sorted(rivals[longest], key=time_of)
    fast, slow = ranked[0], ranked[-1]
    first = (
        f"At S = {longest[0]:,} ({longest[1]}, d_head {longest[2]}) {fast['implementation']} takes"
        " least, "
    )
    first += f"{time_of(fast):,.2f} ms forward and backward"
    if slow is not fast:
        ratio, word = compared(fast, slow, "forward", "backward")
        first += ", " + as_fast(ratio, word=word, than=f" as {slow['implementation']}")
    powers = {group_of(row): row["memory_bytes"] for row in growth}
    kept = []
    for row in ranked[:: max(1, len(ranked) - 1)]:
        power = powers.get(group_of(row))
        grows = "" if power is None else f", growing as S^{power:.2f}"
        kept.append(f"{row['implementation']} {megabytes(row['memory_bytes'])}{grows}")
    return [f"{first}.", f"Memory before the backward pass: {'; '.join(kept)}."]


def table(rows: list[dict]) -> Section:
    columns = (
        *text_columns("implementation", "dtype"),
        column("batch", "batch_size", ","),
        column("d_head", "d_head"),
        column("sequence", "seq_len", ","),
        column("forward (ms)", "forward_ms", ",.2f"),
        column("backward (ms)", "backward_ms", ",.2f"),
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
    title = f"Attention alone, one head, {causal}: medians, and memory before the backward pass"
    return Section(title, columns, rows)


def sections(rows: list[dict], growth: list[dict], available_bytes: int) -> list[Section]:
    tables = [table(rows)]
    names = ("implementation", "dtype", "kernel")
    kernels = dict.fromkeys(tuple(row[name] for name in names) for row in rows if row["kernel"])
    if kernels:
        lines = [dict(zip(names, values, strict=True)) for values in kernels]
        tables.append(
            Section("Which operator ran, according to the profiler", text_columns(*names), lines)
        )
    tables += breakdown(rows, available_bytes)
    if growth:
        title = "Growth: p in S^p, fitted to the measured rows"
        tables.append(Section(title, plain_columns(growth, ".2f"), growth))
    return tables


def breakdown(rows: list[dict], available_bytes: int) -> list[Section]:
    """The smallest row that does not fit, tensor by tensor."""
    sized = [row for row in rows if row["predicted_peak_bytes"]]
    too_large = [
        row
        for row in sized
        if row["predicted_peak_bytes"] > available_bytes or row["status"] == "oom"
    ]
    if not too_large:
        return []
    row = min(too_large, key=lambda row: row["predicted_peak_bytes"])
    columns = (
        column("tensor live at the start of the backward pass", "name", left=True),
        Column("shape", lambda tensor: " x ".join(map(str, tensor["shape"])), left=True),
        column("dtype", "dtype", left=True),
        column("bytes", "bytes", ","),
        column("MB", "bytes", ",.1f", MB),
    )
    before, peak = row["predicted_memory_bytes"], row["predicted_peak_bytes"]
    total = (
        f"Total: {before:,} bytes, {megabytes(before)}. The peak of forward and backward pass"
        " together is"
    )
    text = f"{total} {megabytes(peak)}; {megabytes(available_bytes)} are available."
    title = f"The smallest row that does not fit: {label(row)}, batch {row['batch_size']}"
    return [Section(title, columns, row["tensors"], [text])]
