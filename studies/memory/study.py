"""Memory by batch size and sequence length: measured and predicted for each pair, with a fit over all."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np

import tiny_llama_v1
from analysis.work.memory_tables import parts_of_peak
from harness.base.documents import read_document
from harness.base.files import explain_nulls
from harness.base.tables import Column, Section, column
from harness.base.text import batch_text
from harness.base.units import MB, megabytes
from harness.documents.sweeps import MemoryStudyRow
from harness.instruments.schedule import ProfilerConfig
from studies.engine.sweep import (
    NOT_SETTINGS,
    DeviceProperties,
    Sweep,
    factor_column,
    optional,
    predicted_finding,
    predicted_peak,
    run_script,
    status_column,
)
from tiny_llama_v1 import TinyLlamaWorkload

KEY = ("batch_size", "seq_len")
TERMS = ("constant", "linear", "quadratic")
FIGURES = {"step_time_ms": None, "peak_bytes": None, "predicted_bytes": None}  # without a spread


def study(args, device: DeviceProperties) -> None:
    """Run the sweep."""
    from studies.figures import memory_figure

    args.num_steps = args.num_steps or 6
    workload, profiling = tiny_llama_v1.resolve(args)
    device.check_precisions([workload.precision])
    if args.workload:  # its file decides the batches
        specs = [{"rows": [{"batch_size": workload.batch_size, "seq_len": workload.seq_len}], "workload": workload}]
    else:
        specs = [spec_of(args, batch_size, seq_len) for seq_len in args.seq_lens for batch_size in args.batch_sizes]
    sweep = Sweep("memory_study", args, device, MemoryStudyRow, KEY, FIGURES)
    sweep.settings |= settings_of(workload)
    sweep.open()

    def measure(spec: dict) -> list[dict]:
        workload = spec["workload"]
        row = spec["rows"][0] | sweep.predict(predicted_peak, workload, sweep.predicts_gpu, "predicted_bytes")
        work = (run_of_row, workload, replace(profiling, profile_memory=True, profile_dir=None), sweep.folder)
        outcome, found = sweep.measure_row(row["predicted_bytes"], *work, precision=workload.precision)
        return [row | (found or {}) | outcome]

    sweep.run(specs, measure, label, lambda row: megabytes(row["peak_bytes"]), table)
    fitted, factors = fit(sweep.rows), growth_factors(sweep.rows)
    sweep.rows = with_shares(sweep.rows, fitted)
    measured = [row for row in sweep.rows if row["status"] == "ok"]
    about = f"{workload.parameter_count():,} parameters, {workload.precision}, on {device.name}"
    figure = memory_figure(measured, fitted, about) if measured else None
    sections = [table(sweep.rows), fit_section(fitted, sweep.rows), factor_section(factors)]
    sweep.close(finding(sweep.rows, fitted, sweep.available_bytes), sections, figure, fit=fitted, factors=factors)


def spec_of(args, batch_size: int, seq_len: int) -> dict:
    """One pair and its workload.  Raises UserError if the script cannot train it."""
    row = {"batch_size": batch_size, "seq_len": seq_len}
    workload, _ = tiny_llama_v1.resolve(type(args)(**vars(args) | row))
    return {"rows": [row], "workload": workload}


def settings_of(workload: TinyLlamaWorkload) -> dict:
    """The resolved settings of the script, without those that differ between rows."""
    settings = workload.settings()
    resolved = settings["model"] | settings["training"]
    return {name: value for name, value in resolved.items() if name not in ("max_seq_len", *KEY, *NOT_SETTINGS)}


def run_of_row(workload: TinyLlamaWorkload, profiling: ProfilerConfig, parent: Path) -> dict:
    """In a new process: run the script, and read the columns from its files."""
    folder = parent / f"bs{workload.batch_size}_seq{workload.seq_len}"
    run_script(workload, profiling, folder)
    performance = read_document(folder / "performance_summary.json")["performance"]
    memory = read_document(folder / "memory_timeline.json")
    return {
        "peak_bytes": memory["peak_bytes"],
        "peak_phase": memory["peak"]["phase"],
        "bytes_by_category": memory["peak"]["bytes_by_category"],
        "bytes_per_token": memory["peak_bytes"] / (workload.batch_size * workload.seq_len),
        "step_time_ms": performance["avg_step_time_ms"],
        "samples_per_sec": performance["samples_per_sec"],
        "tokens_per_sec": performance["tokens_per_sec"],
        "folder": folder.name,
    }


def label(row: dict) -> str:
    return batch_text(row["batch_size"], row["seq_len"])


# ---- Fit and factors -----------------------------------------------------------------------------------------------


def fit(rows: list[dict]) -> dict:
    """Fit peak = constant + B (linear S + quadratic S^2) by least squares of relative errors.

    Runs whose peak is in the optimizer step are excluded: it does not grow with batch or sequence.
    """
    used = [row for row in rows if row["status"] == "ok" and not peaks_in_optimizer(row)]
    shapes = {(row["batch_size"] * row["seq_len"], row["seq_len"]) for row in used}
    document = dict.fromkeys((*(f"{term}_bytes" for term in TERMS), "largest_error_percent", "rows"))
    if len({seq for _, seq in shapes}) < 2 or len(shapes) < 3:
        reason = "a fit needs three runs, at two sequence lengths or more, whose peak is not in the optimizer step"
        return explain_nulls(document, reason)
    batch, seq, peak = (np.array([row[k] for row in used], float) for k in ("batch_size", "seq_len", "peak_bytes"))
    terms = np.stack([np.ones_like(batch), batch * seq, batch * seq**2], axis=1)
    found = np.linalg.lstsq(terms / peak[:, None], np.ones_like(peak), rcond=None)[0]
    errors = terms @ found / peak - 1
    document = {f"{term}_bytes": float(value) for term, value in zip(TERMS, found, strict=True)}
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


# ---- Reporting -----------------------------------------------------------------------------------------------------


def table(rows: list[dict]) -> Section:
    def error(row: dict) -> float | None:
        known = row["peak_bytes"] and row["predicted_bytes"]
        return row["predicted_bytes"] / row["peak_bytes"] - 1 if known else None

    def share(term: str) -> Column:
        return Column(term, lambda row: (row.get("shares_of_fit") or {}).get(term), ".1%")

    columns = (
        column("batch", "batch_size"),
        column("sequence", "seq_len"),
        column("measured (MB)", "peak_bytes", ",.1f", MB),
        column("predicted (MB)", "predicted_bytes", ",.1f", MB),
        Column("error", error, "+.2%"),
        column("KB/token", "bytes_per_token", ",.1f", 1024),
        column("tokens/s", "tokens_per_sec", ",.0f"),
        *optional(*(share(term) for term in TERMS)),
        status_column(),
    )
    return Section("Peak memory of a step (live tensors), with the share of each term of the fit", columns, rows)


def finding(rows: list[dict], fitted: dict, available_bytes: int) -> list[str]:
    """The largest measured peak with what it is made of, and by the fit the batch that would fill the memory."""
    measured = [row for row in rows if row["status"] == "ok"]
    if not measured:
        return predicted_finding(rows, "predicted_bytes", label, available_bytes)
    most, least = (pick(measured, key=lambda row: row["peak_bytes"]) for pick in (max, min))
    parts = parts_of_peak(most["bytes_by_category"])
    if len(measured) == 1:
        return [f"The peak is {megabytes(most['peak_bytes'])}, {label(most)}: {parts}."]
    smallest = f"the smallest is {megabytes(least['peak_bytes'])}, {label(least)}"
    first = f"The largest peak is {megabytes(most['peak_bytes'])}, {label(most)}: {parts}; {smallest}."
    if fitted["rows"] is None:
        return [first, f"No fit: {fitted['rows_reason']}."]
    constant, linear, quadratic = (fitted[f"{term}_bytes"] for term in TERMS)
    seq_len = most["seq_len"]
    batch = (available_bytes - constant) / (linear * seq_len + quadratic * seq_len**2)
    part = {term: max(0.0, share) for term, share in shares(fitted, most["batch_size"], seq_len).items()}
    return [
        first,
        f"In the fit {part['quadratic']:.0%} of it is quadratic in the sequence length and {part['constant']:.0%} "
        f"constant; estimated from the fit, the {megabytes(available_bytes)} available are filled by a batch of "
        f"{max(0, int(batch)):,} x {seq_len} tokens.",
    ]


def fit_section(fitted: dict, rows: list[dict]) -> Section:
    if fitted["rows"] is None:
        return Section("Fit", text=[f"No fit: {fitted['rows_reason']}"])
    constant, linear = fitted["constant_bytes"] / MB, fitted["linear_bytes"] / 1024
    left_out = ", ".join(label(row) for row in rows if peaks_in_optimizer(row))
    why = f"; not in the fit, because the peak is in the optimizer step: {left_out}" if left_out else ""
    text = [
        f"peak = {constant:,.2f} MB + B S x {linear:,.3f} KB + B S^2 x {fitted['quadratic_bytes']:,.2f} bytes",
        f"Largest error over {fitted['rows']} runs: {fitted['largest_error_percent']:.2f}%{why}",
    ]
    return Section("Fit: batch B, sequence S", text=text)


def factor_section(factors: list[dict]) -> Section:
    def shape(end: str) -> Column:
        return Column(end, lambda row: f"{row[end]['batch_size']} x {row[end]['seq_len']}", left=True)

    columns = (
        shape("from"),
        shape("to"),
        factor_column("memory", "memory_factor"),
        factor_column("tokens/s", "throughput_factor"),
    )
    return Section("Growth from one batch size or sequence length to the next", columns, factors)
