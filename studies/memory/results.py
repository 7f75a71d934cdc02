"""What do the rows of the memory study say?  Which terms a peak is made of, and how it grows."""

import itertools

import numpy as np

from analysis.work.memory_tables import parts_of_peak
from harness.base.sections import Section
from harness.base.tables import Column, column
from harness.base.text import batch_text
from harness.base.units import MB, megabytes
from harness.documents.sweeps import NO_FIT
from harness.schema import unknown
from studies.engine.columns import factor_column, optional, status_column

KEY = ("batch_size", "seq_len")
TERMS = ("constant", "linear", "quadratic")


def fit(rows: list[dict]) -> dict:
    """Fit peak = constant + B (linear S + quadratic S^2) by least squares of relative errors.

    Runs whose peak is in the optimizer step are excluded: it does not grow with batch or sequence.
    """
    used = [row for row in rows if row["status"] == "ok" and not peaks_in_optimizer(row)]
    shapes = {(row["batch_size"] * row["seq_len"], row["seq_len"]) for row in used}
    if len({seq for _, seq in shapes}) < 2 or len(shapes) < 3:
        return unknown(
            NO_FIT, *(f"{term}_bytes" for term in TERMS), "largest_error_percent", "rows"
        )
    batch, seq, peak = (
        np.array([row[k] for row in used], float) for k in ("batch_size", "seq_len", "peak_bytes")
    )
    factors = np.stack([np.ones_like(batch), batch * seq, batch * seq**2], axis=1)  # [rows, terms]
    terms = np.linalg.lstsq(factors / peak[:, None], np.ones_like(peak), rcond=None)[0]
    errors = factors @ terms / peak - 1
    document = {f"{term}_bytes": float(value) for term, value in zip(TERMS, terms, strict=True)}
    return document | {
        "largest_error_percent": float(100 * np.abs(errors).max()),
        "rows": len(used),
    }


def peaks_in_optimizer(row: dict) -> bool:
    return row["status"] == "ok" and row["peak_phase"] == "optimizer"


def shares(fitted: dict, batch_size: int, seq_len: int) -> dict[str, float]:
    """Share of each term in the fitted peak; {} without a fit."""
    if fitted["rows"] is None:
        return {}
    sizes = (1, batch_size * seq_len, batch_size * seq_len**2)
    parts = [fitted[f"{term}_bytes"] * size for term, size in zip(TERMS, sizes, strict=True)]
    return {term: part / sum(parts) for term, part in zip(TERMS, parts, strict=True)}


def growth_factors(rows: list[dict]) -> list[dict]:
    """Memory and throughput relative to the next smaller batch size or sequence length."""
    measured = {(row["batch_size"], row["seq_len"]): row for row in rows if row["status"] == "ok"}
    batch_sizes, seq_lens = (sorted({row[key] for row in rows}) for key in KEY)
    steps = [
        ("batch", (a, s), (b, s)) for s in seq_lens for a, b in itertools.pairwise(batch_sizes)
    ]
    steps += [
        ("sequence", (b, s), (b, t)) for b in batch_sizes for s, t in itertools.pairwise(seq_lens)
    ]
    factors = []
    for kind, small, large in steps:
        first, second = measured.get(small), measured.get(large)
        both = first and second
        factor = {
            "grows": kind,
            "from": dict(zip(KEY, small, strict=True)),
            "to": dict(zip(KEY, large, strict=True)),
            "memory_factor": second["peak_bytes"] / first["peak_bytes"] if both else None,
            "throughput_factor": (
                second["tokens_per_sec"] / first["tokens_per_sec"] if both else None
            ),
        }
        factors.append(factor)
    return factors


# ---- Reporting -----------------------------------------------------------------------------------


def label(row: dict) -> str:
    return batch_text(row["batch_size"], row["seq_len"])


def result(row: dict) -> str:
    return megabytes(row["peak_bytes"])


def table(rows: list[dict]) -> Section:
    def error(row: dict) -> float | None:
        known = row["peak_bytes"] and row["predicted_bytes"]
        return row["predicted_bytes"] / row["peak_bytes"] - 1 if known else None

    def share(term: str) -> Column:
        return Column(
            term, lambda row: shares(fitted, row["batch_size"], row["seq_len"]).get(term), ".1%"
        )

    fitted = fit(rows)
    unit = "token" if any(row["seq_len"] > 1 for row in rows) else "sample"
    columns = (
        column("batch", "batch_size"),
        column("sequence", "seq_len"),
        column("measured (MB)", "peak_bytes", ",.1f", MB),
        column("predicted (MB)", "predicted_bytes", ",.1f", MB),
        Column("error", error, "+.2%"),
        column(f"KB/{unit}", "bytes_per_token", ",.1f", 1024),
        column(f"{unit}s/s", "tokens_per_sec", ",.0f"),
        *optional(*map(share, TERMS)),
        status_column(),
    )
    return Section(
        "Peak memory of a step (live tensors), with the share of each term of the fit",
        columns,
        rows,
    )


def finding(measured: list[dict], fitted: dict, available_bytes: int) -> list[str]:
    """The largest measured peak with what it is made of, and by the fit the batch that would fill
    the memory."""
    most, least = (pick(measured, key=lambda row: row["peak_bytes"]) for pick in (max, min))
    parts = parts_of_peak(most["bytes_by_category"])
    if len(measured) == 1:
        return [f"The peak is {megabytes(most['peak_bytes'])}, {label(most)}: {parts}."]
    smallest = f"the smallest is {megabytes(least['peak_bytes'])}, {label(least)}"
    first = (
        f"The largest peak is {megabytes(most['peak_bytes'])}, {label(most)}: {parts}; {smallest}."
    )
    if fitted["rows"] is None:
        return [first, f"No fit: {fitted['rows_reason']}."]
    constant, linear, quadratic = (fitted[f"{term}_bytes"] for term in TERMS)
    seq_len = most["seq_len"]
    batch = (available_bytes - constant) / (linear * seq_len + quadratic * seq_len**2)
    part = {
        term: max(0.0, share) for term, share in shares(fitted, most["batch_size"], seq_len).items()
    }
    return [
        first,
        (
            f"In the fit {part['quadratic']:.0%} of it is quadratic in the sequence length and"
            f" {part['constant']:.0%} constant; estimated from the fit, the"
            f" {megabytes(available_bytes)} available are filled by a batch of"
            f" {max(0, int(batch)):,} x {seq_len} tokens."
        ),
    ]


def fit_section(fitted: dict, rows: list[dict]) -> Section:
    if fitted["rows"] is None:
        return Section("Fit", note=[f"No fit: {fitted['rows_reason']}"])
    constant, linear = fitted["constant_bytes"] / MB, fitted["linear_bytes"] / 1024
    left_out = ", ".join(label(row) for row in rows if peaks_in_optimizer(row))
    why = (
        f"; not in the fit, because the peak is in the optimizer step: {left_out}"
        if left_out
        else ""
    )
    text = [
        (
            f"peak = {constant:,.2f} MB + B S x {linear:,.3f} KB + B S^2 x"
            f" {fitted['quadratic_bytes']:,.2f} bytes"
        ),
        f"Largest error over {fitted['rows']} runs: {fitted['largest_error_percent']:.2f}%{why}",
    ]
    return Section("Fit: batch B, sequence S", note=text)


def factor_section(factors: list[dict]) -> Section:
    def shape(end: str) -> Column:
        return Column(
            end, lambda row: f"{row[end]['batch_size']} x {row[end]['seq_len']}", left=True
        )

    ratios = [factor_column(name, f"{name}_factor") for name in ("memory", "throughput")]
    columns = (shape("from"), shape("to"), *ratios)
    return Section("Growth from one batch size or sequence length to the next", columns, factors)
