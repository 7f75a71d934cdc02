"""How does memory grow with batch and sequence?  A run for each pair, beside the prediction, and a fit over all."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

import tiny_llama_v1
from analysis.fake_run import FakeRunError
from analysis.prediction import predicted_memory
from harness.console import say
from harness.devices import choose_device, memory_of_a_rank
from harness.environment import describe_environment
from harness.errors import UserError
from harness.files import explain_nulls, png, prepare_folder, write_bytes, write_json
from harness.tables import cell
from harness.units import MB
from studies.sweep import in_fresh_process
from tiny_llama_v1 import TinyLlamaConfig, TrainingConfig, build_parser, resolve

TERMS = ("constant", "linear", "quadratic")
FIGURES = {"step_time_ms": None, "peak_bytes": None, "predicted_bytes": None}  # without a spread
MEASURED = ("peak_bytes", "bytes_per_token", "step_time_ms", "samples_per_sec", "tokens_per_sec")


def study(args, folder: Path) -> None:
    """All of it, from the command line's arguments: runs, table, JSON, figure, TensorBoard."""
    args.num_steps = args.num_steps or 6
    config, training, _ = resolve(args)
    device = choose_device(training.device)
    prepare_folder(folder)
    environment = describe_environment(device)
    settings = {"model": asdict(config) | {"parameters": config.parameter_count()}, "arguments": asdict(training)}
    write_json(folder / "config.json", settings | {"environment": environment})
    flags, rows = given_flags(args), []
    pairs = [(batch_size, seq_len) for seq_len in args.seq_lens for batch_size in args.batch_sizes]
    whole, taken = (args.device_memory, 0) if args.device_memory else memory_of_a_rank(device)
    on_gpu = device.type == "cuda" or bool(args.device_memory)
    try:
        for batch_size, seq_len in pairs:
            one = replace(training, batch_size=batch_size, seq_len=seq_len)
            row = study_row(folder, config, one, on_gpu, whole - taken, flags, args.dry_run)
            rows.append(row)
            outcome = f"{row['peak_bytes'] / MB:,.1f} MB" if row["status"] == "ok" else row["status"]
            say(f"[{len(rows)}/{len(pairs)}] batch {batch_size} x {seq_len} tokens: {outcome}")
            document = study_document(rows, settings, environment)
            write_json(folder / "memory_study.json", document)  # an interrupted study keeps what it has
    finally:
        if rows:
            say("", *study_lines(document))
    files = ["memory_study.json"]
    if any(row["status"] == "ok" for row in rows):
        from torch.utils.tensorboard import SummaryWriter

        figure = draw_study(document)
        write_bytes(folder / "memory_study.png", png(figure))
        with SummaryWriter(str(folder)) as writer:
            writer.add_figure("memory_study", figure)
        files.append("memory_study.png")
    say("", "Files:", *(f"  {folder / name}" for name in files), f"  {folder}/bs*_seq*/, a run each")
    if any(row["status"] == "failed" for row in rows):
        raise UserError(f"{sum(row['status'] == 'failed' for row in rows)} of {len(rows)} runs failed; see the table")


OWN_FLAGS = ("output_dir", "profile_dir", "dry_run", "device_memory", "profile_memory")


def given_flags(args) -> list[str]:
    """The flags of the training script as its command line would have them, but for what the study sets itself."""
    flags = []
    for action in build_parser()._actions:
        value = getattr(args, action.dest, None)
        if value is None or value is False or action.dest in OWN_FLAGS:
            continue
        flags += [action.option_strings[0], *([] if value is True else [str(value)])]
    return flags


def study_row(
    folder: Path,
    config: TinyLlamaConfig,
    training: TrainingConfig,
    on_gpu: bool,
    room: int,
    flags: list[str],
    dry: bool,
) -> dict:
    """One pair: predicted first, then run in a process of its own if it fits, into a folder of its own."""
    batch_size, seq_len = training.batch_size, training.seq_len
    row = {"batch_size": batch_size, "seq_len": seq_len, "status": "ok", "reason": "", "predicted_bytes": None}
    try:
        predicted = int(predicted_memory(config, training, on_gpu).live_bytes_at_allocations().max())
        row["predicted_bytes"] = predicted
        if predicted > room and not training.force:
            text = f"{predicted / MB:,.0f} MB predicted, {room / MB:,.0f} MB there; --force runs it"
            return unknown(row | {"status": "would not fit", "reason": text})
    except FakeRunError as error:
        row["predicted_bytes_reason"] = str(error)
    if dry:
        return unknown(row | {"status": "predicted", "reason": "--dry-run"})
    name = f"bs{batch_size}_seq{seq_len}"
    command = [*flags, "--batch-size", str(batch_size), "--seq-len", str(seq_len)]
    status, answer = in_fresh_process(trained, [*command, "--profile-memory", "--output-dir", str(folder / name)])
    if status != "ok":
        return unknown(row | {"status": "failed", "reason": answer})
    if answer[0]:
        return unknown(row | {"status": "failed", "reason": answer[1].split("error: ", 1)[-1]})
    summary, memory = (
        json.loads((folder / name / file).read_text()) for file in ("performance_summary.json", "memory_timeline.json")
    )
    performance, peak = summary["performance"], memory["peak_bytes"]
    row |= {
        "peak_bytes": peak,
        "peak_phase": memory["peak"]["phase"],
        "bytes_by_category": memory["peak"]["bytes_by_category"],
        "bytes_per_token": peak / (batch_size * seq_len),
        "step_time_ms": performance["avg_step_time_ms"],
        "samples_per_sec": performance["samples_per_sec"],
        "tokens_per_sec": performance["tokens_per_sec"],
        "folder": name,
    }
    return row


def trained(flags: list[str]) -> tuple[int, str]:
    """Exit code and error of the training script, in this process."""
    errors, sys.argv = io.StringIO(), ["tiny_llama_v1.py", *flags]  # what its config.json says it was started with
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        try:
            code = tiny_llama_v1.main(flags)
        except SystemExit as stop:  # of the parser
            code = int(stop.code)
    return code, errors.getvalue().strip()


def unknown(row: dict) -> dict:
    """A row of what was not measured."""
    return explain_nulls(row | dict.fromkeys(MEASURED), f"{row['status']}: {row['reason']}")


def fit(rows: list[dict]) -> dict:
    """peak = constant + B (linear S + quadratic S^2), by least squares of relative errors, and how far off it is.

    Runs whose peak is the optimizer's are left out: it does not grow with batch or sequence.
    """
    used = [row for row in rows if row["status"] == "ok" and row["peak_phase"] != "optimizer"]
    shapes = {(row["batch_size"] * row["seq_len"], row["seq_len"]) for row in used}
    document = dict.fromkeys((*(f"{term}_bytes" for term in TERMS), "largest_error_percent", "rows"))
    if len({seq for _, seq in shapes}) < 2 or len(shapes) < 3:
        reason = "a fit takes three runs, of two sequence lengths or more, whose peak is not the optimizer's"
        return explain_nulls(document, reason)
    batch, seq, peak = (np.array([row[k] for row in used], float) for k in ("batch_size", "seq_len", "peak_bytes"))
    terms = np.stack([np.ones_like(batch), batch * seq, batch * seq**2], axis=1)
    found = np.linalg.lstsq(terms / peak[:, None], np.ones_like(peak), rcond=None)[0]
    errors = terms @ found / peak - 1
    document = {f"{term}_bytes": float(value) for term, value in zip(TERMS, found, strict=True)}
    return document | {"largest_error_percent": float(100 * np.abs(errors).max()), "rows": len(used)}


def shares(fitted: dict, batch_size: int, seq_len: int) -> dict[str, float]:
    """Which part of a predicted peak each term of the fit makes."""
    parts = [
        fitted["constant_bytes"],
        fitted["linear_bytes"] * batch_size * seq_len,
        fitted["quadratic_bytes"] * batch_size * seq_len**2,
    ]
    return {term: part / sum(parts) for term, part in zip(TERMS, parts, strict=True)}


def study_document(rows: list[dict], config: dict, environment: dict) -> dict:
    """memory_study.json"""
    fitted = fit(rows)
    known = {(row["batch_size"], row["seq_len"]): row for row in rows if row["status"] == "ok"}
    batch_sizes, seq_lens = (sorted({row[key] for row in rows}) for key in ("batch_size", "seq_len"))

    def factor(kind: str, small: tuple, large: tuple) -> dict:
        first, second = known.get(small), known.get(large)
        both = first and second
        row = {
            "grows": kind,
            "from": dict(zip(("batch_size", "seq_len"), small, strict=True)),
            "to": dict(zip(("batch_size", "seq_len"), large, strict=True)),
            "memory_factor": second["peak_bytes"] / first["peak_bytes"] if both else None,
            "throughput_factor": second["tokens_per_sec"] / first["tokens_per_sec"] if both else None,
        }
        return explain_nulls(row, "one of the two was not measured")

    factors = [factor("batch", (a, s), (b, s)) for s in seq_lens for a, b in itertools.pairwise(batch_sizes)]
    factors += [factor("sequence", (b, s), (b, t)) for b in batch_sizes for s, t in itertools.pairwise(seq_lens)]
    for row in rows:
        row["shares_of_fit"] = shares(fitted, row["batch_size"], row["seq_len"]) if fitted["rows"] else None
        if row["shares_of_fit"] is None:
            row["shares_of_fit_reason"] = "there is no fit"
    comparable = {"study": "memory_study", "key": ["batch_size", "seq_len"], "figures": FIGURES}
    return {"config": config, "environment": environment, **comparable, "fit": fitted, "rows": rows, "factors": factors}


def study_lines(document: dict) -> Iterator[str]:
    titles = f"{'measured MB':>13}{'predicted':>11}{'error':>9}{'KB/token':>10}{'tokens/s':>11}"
    yield f"{'batch':>6}{'sequence':>10}{titles}{'constant':>10}{'linear':>8}{'quadratic':>11}  status"

    for row in document["rows"]:
        peak, predicted = row["peak_bytes"], row["predicted_bytes"]
        error = f"{100 * (predicted / peak - 1):+.2f}%" if peak and predicted else "-"
        parts = row["shares_of_fit"] or {}
        yield (
            f"{row['batch_size']:>6}{row['seq_len']:>10}{cell(peak and peak / MB, 13, ',.1f')}"
            f"{cell(predicted and predicted / MB, 11, ',.1f')}{error:>9}"
            f"{cell(row['bytes_per_token'] and row['bytes_per_token'] / 1024, 10, ',.1f')}"
            f"{cell(row['tokens_per_sec'], 11, ',.0f')}{cell(parts.get('constant'), 10, '.1%')}"
            f"{cell(parts.get('linear'), 8, '.1%')}{cell(parts.get('quadratic'), 11, '.1%')}  "
            + row["status"]
            + (f": {row['reason']}" if row["reason"] else "")
        )
    fitted = document["fit"]
    yield ""
    if fitted["rows"] is None:
        yield f"No fit: {fitted['rows_reason']}"
    else:
        yield (
            f"peak = {fitted['constant_bytes'] / MB:,.2f} MB + B S x {fitted['linear_bytes'] / 1024:,.3f} KB "
            f"+ B S^2 x {fitted['quadratic_bytes']:,.2f} bytes; off by {fitted['largest_error_percent']:.2f}% at most, "
            f"{fitted['rows']} runs"
        )
    yield ""
    yield f"{'from':<22}{'to':<22}{'memory':>9}{'tokens/s':>10}"
    for row in document["factors"]:
        places = (f"batch {row[end]['batch_size']} x {row[end]['seq_len']}" for end in ("from", "to"))
        numbers = (row["memory_factor"], row["throughput_factor"])
        cells = ("-" if number is None else f"{number:.2f}x" for number in numbers)
        yield f"{next(places):<22}{next(places):<22}{next(cells):>9}{next(cells):>10}"


def draw_study(document: dict):
    """Measured peaks over the sequence, a line a batch size, with the fit behind; and what they consist of."""
    from matplotlib.figure import Figure

    from analysis.figures import PALETTE, WIDTH
    from analysis.memory import CATEGORY_COLORS

    rows = [row for row in document["rows"] if row["status"] == "ok"]
    figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.1, 1))
    fitted, batch_sizes = document["fit"], sorted({row["batch_size"] for row in rows})
    for colour, batch_size in zip(PALETTE, batch_sizes, strict=False):
        some = sorted((row for row in rows if row["batch_size"] == batch_size), key=lambda row: row["seq_len"])
        seq = np.array([row["seq_len"] for row in some], float)
        left.plot(seq, [row["peak_bytes"] / MB for row in some], "o", color=colour, label=f"batch {batch_size}")
        if fitted["rows"]:
            dense = np.linspace(seq.min(), seq.max(), 100)
            curve = fitted["constant_bytes"] + batch_size * (
                fitted["linear_bytes"] * dense + fitted["quadratic_bytes"] * dense**2
            )
            left.plot(dense, curve / MB, color=colour, linewidth=1)
    left.set(xlabel="sequence (tokens)", ylabel="peak of live tensors (MB)", ylim=(0, None))
    left.set_title("Measured peaks (dots) and the fit (lines)", loc="left", fontsize=11)
    if batch_sizes:
        left.legend(frameon=False)
    names = [f"{row['batch_size']} x {row['seq_len']}" for row in rows]
    base = np.zeros(len(rows))
    for category, colour in CATEGORY_COLORS.items():
        sizes = np.array([row["bytes_by_category"][category] / MB for row in rows])
        right.barh(names, sizes, left=base, color=colour, label=category)
        base += sizes
    right.invert_yaxis()
    right.set(xlabel="MB at the peak")
    right.set_title("What the peak consists of", loc="left", fontsize=11)
    right.legend(frameon=False, fontsize=8)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure
