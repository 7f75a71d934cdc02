"""Which terms is a peak made of?  A fit over batch size and sequence length, and growth from one to the next."""

from __future__ import annotations

import itertools

import numpy as np

from harness.base.files import explain_nulls

KEY = ("batch_size", "seq_len")
TERMS = ("constant", "linear", "quadratic")


def fit(rows: list[dict]) -> dict:
    """Fit peak = constant + B (linear S + quadratic S^2) by least squares of relative errors.

    Runs whose peak is in the optimizer step are excluded: it does not grow with batch or sequence.
    """
    used = [row for row in rows if row["status"] == "ok" and not peaks_in_optimizer(row)]
    shapes = {(row["batch_size"] * row["seq_len"], row["seq_len"]) for row in used}
    if len({seq for _, seq in shapes}) < 2 or len(shapes) < 3:
        reason = "a fit needs three runs, at two sequence lengths or more, whose peak is not in the optimizer step"
        unknown = dict.fromkeys((*(f"{term}_bytes" for term in TERMS), "largest_error_percent", "rows"))
        return explain_nulls(unknown, reason)
    batch, seq, peak = (np.array([row[k] for row in used], float) for k in ("batch_size", "seq_len", "peak_bytes"))
    factors = np.stack([np.ones_like(batch), batch * seq, batch * seq**2], axis=1)  # [rows, terms]
    terms = np.linalg.lstsq(factors / peak[:, None], np.ones_like(peak), rcond=None)[0]
    errors = factors @ terms / peak - 1
    document = {f"{term}_bytes": float(value) for term, value in zip(TERMS, terms, strict=True)}
    return document | {"largest_error_percent": float(100 * np.abs(errors).max()), "rows": len(used)}


def peaks_in_optimizer(row: dict) -> bool:
    return row["status"] == "ok" and row["peak_phase"] == "optimizer"


def shares(fitted: dict, batch_size: int, seq_len: int) -> dict[str, float]:
    """Share of each term in the fitted peak."""
    sizes = (1, batch_size * seq_len, batch_size * seq_len**2)
    parts = [fitted[f"{term}_bytes"] * size for term, size in zip(TERMS, sizes, strict=True)]
    return {term: part / sum(parts) for term, part in zip(TERMS, parts, strict=True)}


def with_shares(rows: list[dict], fitted: dict) -> list[dict]:
    rows = [{name: value for name, value in row.items() if name != "shares_of_fit_reason"} for row in rows]
    if fitted["rows"] is None:
        return [row | explain_nulls({"shares_of_fit": None}, "there is no fit") for row in rows]
    return [row | {"shares_of_fit": shares(fitted, row["batch_size"], row["seq_len"])} for row in rows]


def growth_factors(rows: list[dict]) -> list[dict]:
    """Memory and throughput relative to the next smaller batch size or sequence length."""
    measured = {(row["batch_size"], row["seq_len"]): row for row in rows if row["status"] == "ok"}
    batch_sizes, seq_lens = (sorted({row[key] for row in rows}) for key in KEY)
    steps = [("batch", (a, s), (b, s)) for s in seq_lens for a, b in itertools.pairwise(batch_sizes)]
    steps += [("sequence", (b, s), (b, t)) for b in batch_sizes for s, t in itertools.pairwise(seq_lens)]
    factors = []
    for kind, small, large in steps:
        first, second = measured.get(small), measured.get(large)
        both = first and second
        factor = {
            "grows": kind,
            "from": dict(zip(KEY, small, strict=True)),
            "to": dict(zip(KEY, large, strict=True)),
            "memory_factor": second["peak_bytes"] / first["peak_bytes"] if both else None,
            "throughput_factor": second["tokens_per_sec"] / first["tokens_per_sec"] if both else None,
        }
        factors.append(explain_nulls(factor, "one of the two was not measured"))
    return factors
